//! What a sample tells about the inputs of one matrix.

use super::CHUNK;
use ernie_kernels::{ActKind, Acts, Arrange, Compensation, Matrix, Out, Pool, RowSource, WeightKind, gemm};

/// Share of the mean square of the inputs that every direction is assumed to have at least.
const DAMPING: f32 = 0.01;
/// Tokens longer than this many times the median are shortened to it: attention sinks, whose few rows would outweigh all.
const LONG: f32 = 4.0;

/// Gathers the inputs of a matrix.
pub(super) enum Inputs {
    /// What they have in common in every direction.
    All(Box<Gram>),
    /// Their sum: for inputs that all point the same way.
    Mean(Vec<f32>),
}

impl Inputs {
    /// Of k values each.
    pub(super) fn new(k: usize, first_tokens: bool) -> Self {
        if first_tokens { Self::Mean(vec![0.0; k]) } else { Self::All(Box::new(Gram::new(k))) }
    }

    /// Adds rows of k values.
    pub(super) fn add(&mut self, pool: &Pool, rows: &[f32]) {
        match self {
            Self::All(gram) => rows.chunks(CHUNK * gram.k).for_each(|rows| gram.add(pool, rows)),
            Self::Mean(sum) => rows
                .chunks_exact(sum.len())
                .for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value)),
        }
    }

    /// `None` when nothing was added, or something that is not finite.
    pub(super) fn compensation(self, pool: &Pool) -> Option<Compensation> {
        match self {
            Self::All(gram) => gram.compensation(pool),
            Self::Mean(sum) => Compensation::along(sum),
        }
    }
}

/// Sum of x xᵀ.
pub(super) struct Gram {
    k: usize,
    rows: usize,
    sum: Vec<f32>,
    acts: Acts,
}

impl Gram {
    fn new(k: usize) -> Self {
        Self { k, rows: 0, sum: vec![0.0; k * k], acts: Acts::new(k, CHUNK) }
    }

    fn add(&mut self, pool: &Pool, rows: &[f32]) {
        let k = self.k;
        let count = rows.len() / k;
        if count == 0 {
            return;
        }
        let lengths: Vec<f32> = rows.chunks_exact(k).map(|row| row.iter().map(|x| x * x).sum::<f32>().sqrt()).collect();
        let mut sorted = lengths.clone();
        sorted.sort_by(f32::total_cmp);
        let limit = LONG * sorted[count / 2];
        // Inputs by token, padded with tokens of zeros.
        let padded = count.next_multiple_of(32);
        let mut turned = vec![0f32; k * padded];
        for (token, row) in rows.chunks_exact(k).enumerate() {
            let factor = if lengths[token] > limit { limit / lengths[token] } else { 1.0 };
            for (out, x) in turned[token..].iter_mut().step_by(padded).zip(row) {
                *out = x * factor;
            }
        }
        self.acts.convert(pool, ActKind::Bf16, k, padded, &turned);
        let source = RowSource::F32(bytemuck::cast_slice(&turned));
        let other = Matrix::pack(pool, WeightKind::Bf16, padded, &[source], Arrange::Concat)
            .expect("rows of a multiple of 32 values can be packed");
        gemm(pool, &self.acts, &other, Out::Add(&mut self.sum));
        self.rows += count;
    }

    fn compensation(&self, pool: &Pool) -> Option<Compensation> {
        // A sample with fewer tokens than inputs leaves directions unseen; they must not pass for free.
        let damping = DAMPING * (1.0 + 4.0 * self.k as f32 / self.rows.max(1) as f32);
        (self.rows > 0).then(|| Compensation::new(pool, self.k, &self.sum, damping)).flatten()
    }
}
