//! Rounding weights for the inputs that they will meet: each column's rounding error is made up for by the columns rounded
//! after it (GPTQ; seen as a lattice problem, Babai's nearest plane).
//!
//! With H = the sum of x xᵀ over sample inputs x, a row w rounded to q changes outputs by (w - q) H (w - q)ᵀ in the mean
//! square. H = Rᵀ R with R upper triangular, so the error is |R (w - q)|², a sum over columns in which column p meets the
//! errors of those behind it only. Rounding from the back, each column aims at what cancels the errors made so far. Columns
//! with large inputs go first: the others then make up for them.
//!
//! Where all that is known is one direction in which the inputs are far longer than in any other, the same reasoning takes two
//! numbers per column: the error along it so far, and the share of it that the column makes up for.
//!
//! Every sum has one order on every level, so a model quantised anywhere has the same codes.

use crate::matrix::WeightKind;
use crate::memory::AlignedBuf;
use crate::reference::quant::{self, Grid, GroupScale};
use crate::reference::rows::reduce_lanes;
use crate::table::PANEL;
use crate::threads::{Pool, SharedMut};

/// Rows and columns of a block of the factorisation.
const BLOCK: usize = 32;
const LANES: usize = 16;
/// Columns whose targets are gathered in one pass over the errors before them.
const STRIDE: usize = 8;

/// Calls a function compiled for the widest vectors of the level in use. Order and rounding are the source's, on all levels.
macro_rules! by_level {
    ($f:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512vl")]
            fn avx512($($arg: $type),*) $(-> $out)? { $f($($arg),*) }
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $type),*) $(-> $out)? { $f($($arg),*) }
            use crate::isa::Isa;
            match Isa::selected() {
                // SAFETY: the selected level is available.
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                Isa::Avx2 | Isa::AvxVnni => unsafe { avx2($($arg),*) },
                _ => $f($($arg),*),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        { $f($($arg),*) }
    }};
}

/// What is known about the inputs of a matrix, in the form that rounding needs.
pub struct Compensation {
    k: usize,
    known: Known,
}

enum Known {
    Sample(Sample),
    Direction(Direction),
}

struct Sample {
    /// Columns in the order of rounding.
    order: Vec<u32>,
    /// `[k][k]` in that order: row t holds, for each column rounded before, the share of its error that column t makes up for.
    pull: AlignedBuf<f32>,
    /// Mean square of each input.
    importance: Vec<f32>,
}

struct Direction {
    inputs: Vec<f32>,
    /// Of the error along the direction, what this column takes upon itself.
    shares: Vec<f32>,
}

impl std::fmt::Debug for Compensation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compensation").field("k", &self.k).finish_non_exhaustive()
    }
}

impl Compensation {
    /// From H, `[k][k]`, symmetric. `damping` is the share of the mean diagonal that is added to it: how far the sample is
    /// distrusted. `None` when H holds something that is not finite.
    pub fn new(pool: &Pool, k: usize, h: &[f32], damping: f32) -> Option<Compensation> {
        assert_eq!(h.len(), k * k, "H has a row and a column per input");
        let importance: Vec<f32> = (0..k).map(|i| h[i * k + i]).collect();
        let mean = importance.iter().sum::<f32>() / k as f32;
        if !mean.is_finite() {
            return None;
        }
        // Inputs that were always zero have no say; the damping keeps the factor regular.
        let added = (mean * damping).max(f32::MIN_POSITIVE * 1e8);
        let mut order: Vec<u32> = (0..k as u32).collect();
        order.sort_by(|&a, &b| importance[b as usize].total_cmp(&importance[a as usize]).then(a.cmp(&b)));
        let mut l = AlignedBuf::<f32>::zeroed(k * k);
        for (i, row) in l.chunks_exact_mut(k).enumerate() {
            let from = order[k - 1 - i] as usize;
            for (j, out) in row[..=i].iter_mut().enumerate() {
                *out = h[from * k + order[k - 1 - j] as usize];
            }
            row[i] += added;
        }
        factorize(pool, &mut l, k);
        let mut pull = AlignedBuf::<f32>::zeroed(k * k);
        for (t, row) in pull.chunks_exact_mut(k).enumerate() {
            let at = k - 1 - t;
            let diagonal = l[at * k + at];
            for (s, out) in row[..t].iter_mut().enumerate() {
                *out = l[(k - 1 - s) * k + at] / diagonal;
            }
        }
        // A few inputs that dwarf the rest would choose their groups' scales alone.
        let limit = 10.0 * importance[order[k / 2] as usize] + added;
        let importance = importance.into_iter().map(|square| (square + added).min(limit)).collect();
        pull.iter()
            .all(|value| value.is_finite())
            .then_some(Compensation { k, known: Known::Sample(Sample { order, pull, importance }) })
    }

    /// Keeps what this input gives as it is, as far as others do not suffer: they are taken to be as long and to have no direction
    /// in common. `None` when it holds something that is not finite.
    pub fn along(inputs: Vec<f32>) -> Option<Compensation> {
        let k = inputs.len();
        let square = |x: f32| f64::from(x) * f64::from(x);
        // From the last column on: how much can still make up for an error along the direction. Others' share comes first.
        let mut left = inputs.iter().map(|&x| square(x)).sum::<f64>() / k as f64;
        if !left.is_finite() {
            return None;
        }
        let mut shares = vec![0.0; k];
        for (share, &x) in shares.iter_mut().zip(&inputs).rev() {
            left += square(x);
            *share = if x == 0.0 { 0.0 } else { (f64::from(x) / left) as f32 };
        }
        Some(Compensation { k, known: Known::Direction(Direction { inputs, shares }) })
    }

    /// Inputs of the matrices that this is for.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Rounds the rows of one panel, `[PANEL][k]`: codes of the same shape, and `[PANEL]` rows of group scales.
    pub(crate) fn quantize(&self, kind: WeightKind, rows: &[f32], codes: &mut [u8], groups: &mut [GroupScale]) {
        match &self.known {
            Known::Sample(sample) => sample.quantize(self.k, kind, rows, codes, groups),
            Known::Direction(direction) => direction.quantize(self.k, kind, rows, codes, groups),
        }
    }
}

impl Direction {
    fn quantize(&self, k: usize, kind: WeightKind, rows: &[f32], codes: &mut [u8], groups: &mut [GroupScale]) {
        let group = kind.group(k);
        let per_row = k.div_ceil(group);
        let grid = Grid::of(kind);
        for ((row, codes), groups) in
            rows.chunks_exact(k).zip(codes.chunks_exact_mut(k)).zip(groups.chunks_exact_mut(per_row))
        {
            quant::quantize_row(kind, row, None, codes, groups);
            groups.iter_mut().for_each(|g| *g = grid.storable(*g));
        }
        let mut off = [0f32; PANEL];
        let mut weights = vec![[0f32; PANEL]; group];
        let mut rounded = vec![[0u8; PANEL]; group];
        for at in 0..per_row {
            let columns = at * group..((at + 1) * group).min(k);
            let (inputs, shares) = (&self.inputs[columns.clone()], &self.shares[columns.clone()]);
            let (weights, rounded) = (&mut weights[..columns.len()], &mut rounded[..columns.len()]);
            for (row, values) in rows.chunks_exact(k).enumerate() {
                for (out, &value) in weights.iter_mut().zip(&values[columns.clone()]) {
                    out[row] = value;
                }
            }
            let scales = std::array::from_fn(|row| groups[row * per_row + at]);
            round_along(grid, &scales, inputs, shares, weights, &mut off, rounded);
            for (row, codes) in codes.chunks_exact_mut(k).enumerate() {
                for (code, rounded) in codes[columns.clone()].iter_mut().zip(&*rounded) {
                    *code = rounded[row];
                }
            }
        }
    }
}

/// Rounds one group of columns, the panel's rows side by side. `off` is what they were off along the direction.
fn round_along(
    grid: Grid,
    scales: &[GroupScale; PANEL],
    inputs: &[f32],
    shares: &[f32],
    weights: &[[f32; PANEL]],
    off: &mut [f32; PANEL],
    codes: &mut [[u8; PANEL]],
) {
    #[inline(always)]
    fn work(
        grid: Grid,
        scales: &[GroupScale; PANEL],
        inputs: &[f32],
        shares: &[f32],
        weights: &[[f32; PANEL]],
        off: &mut [f32; PANEL],
        codes: &mut [[u8; PANEL]],
    ) {
        for (((&input, &share), weights), codes) in inputs.iter().zip(shares).zip(weights).zip(codes) {
            for row in 0..PANEL {
                let (code, value) = grid.round(weights[row] - off[row] * share, scales[row]);
                codes[row] = code;
                off[row] += (value - weights[row]) * input;
            }
        }
    }
    by_level!(work(
        grid: Grid, scales: &[GroupScale; PANEL], inputs: &[f32], shares: &[f32], weights: &[[f32; PANEL]],
        off: &mut [f32; PANEL], codes: &mut [[u8; PANEL]]
    ))
}

impl Sample {
    fn quantize(&self, k: usize, kind: WeightKind, rows: &[f32], codes: &mut [u8], groups: &mut [GroupScale]) {
        let group = kind.group(k);
        let per_row = k.div_ceil(group);
        let grid = Grid::of(kind);
        for ((row, codes), groups) in
            rows.chunks_exact(k).zip(codes.chunks_exact_mut(k)).zip(groups.chunks_exact_mut(per_row))
        {
            quant::quantize_row(kind, row, Some(&self.importance), codes, groups);
            groups.iter_mut().for_each(|g| *g = grid.storable(*g));
        }
        // Columns in the order of rounding, the panel's rows side by side.
        let mut weights = vec![[0f32; PANEL]; k];
        for (row, values) in rows.chunks_exact(k).enumerate() {
            for (out, &column) in weights.iter_mut().zip(&self.order) {
                out[row] = values[column as usize];
            }
        }
        let mut errors = vec![[0f32; PANEL]; k];
        let mut t = 0;
        while t < k {
            let count = STRIDE.min(k - t);
            let mut targets = [[0f32; PANEL]; STRIDE];
            targets[..count].copy_from_slice(&weights[t..t + count]);
            gather(&self.pull[t * k..(t + count) * k], k, &errors[..t], &mut targets[..count]);
            for i in 0..count {
                // What this stride's own columns leave to this one.
                for before in 0..i {
                    let share = self.pull[(t + i) * k + t + before];
                    for row in 0..PANEL {
                        targets[i][row] += share * errors[t + before][row];
                    }
                }
                let column = self.order[t + i] as usize;
                for row in 0..PANEL {
                    let (code, value) = grid.round(targets[i][row], groups[row * per_row + column / group]);
                    codes[row * k + column] = code;
                    errors[t + i][row] = weights[t + i][row] - value;
                }
            }
            t += count;
        }
    }
}

/// `targets[i] += sum over s of pull[i][s] * errors[s]`.
fn gather(pull: &[f32], k: usize, errors: &[[f32; PANEL]], targets: &mut [[f32; PANEL]]) {
    #[inline(always)]
    fn work(pull: &[f32], k: usize, errors: &[[f32; PANEL]], targets: &mut [[f32; PANEL]]) {
        if let Ok(targets) = <&mut [[f32; PANEL]; STRIDE]>::try_from(&mut *targets) {
            let mut sums = *targets;
            let rows: [&[f32]; STRIDE] = std::array::from_fn(|i| &pull[i * k..i * k + errors.len()]);
            for (s, error) in errors.iter().enumerate() {
                for i in 0..STRIDE {
                    let share = rows[i][s];
                    for row in 0..PANEL {
                        sums[i][row] += share * error[row];
                    }
                }
            }
            *targets = sums;
            return;
        }
        for (i, target) in targets.iter_mut().enumerate() {
            for (error, &share) in errors.iter().zip(&pull[i * k..]) {
                for row in 0..PANEL {
                    target[row] += share * error[row];
                }
            }
        }
    }
    by_level!(work(pull: &[f32], k: usize, errors: &[[f32; PANEL]], targets: &mut [[f32; PANEL]]))
}

/// The Cholesky factor in place of the lower triangle of `a`, a block of columns after the other.
fn factorize(pool: &Pool, a: &mut [f32], k: usize) {
    let a = SharedMut::new(a);
    for start in (0..k).step_by(BLOCK) {
        let width = BLOCK.min(k - start);
        // SAFETY: nothing else runs.
        unsafe { update(a, k, start, start, width, width) };
        // SAFETY: as above.
        unsafe { diagonal(a, k, start, width) };
        let below = (k - start - width).div_ceil(BLOCK);
        pool.run(below, &|job, _| {
            let first = start + width + job * BLOCK;
            let rows = BLOCK.min(k - first);
            // SAFETY: each job writes its own rows' columns of this block and reads their columns before it, and the
            // block's own rows, which are finished.
            unsafe {
                update(a, k, first, start, rows, width);
                solve(a, k, first, start, rows, width);
            }
        });
    }
}

/// Takes from `rows` rows at `first`, columns `start..start + width`, what the columns before `start` have in common.
///
/// # Safety
/// `a` is `[k][k]`, and nobody else writes these rows or the rows `start..start + width`.
unsafe fn update(a: SharedMut<f32>, k: usize, first: usize, start: usize, rows: usize, width: usize) {
    #[inline(always)]
    fn dots(x: [&[f32]; 4], y: [&[f32]; 4]) -> [[f32; 4]; 4] {
        let mut sums = [[[0f32; LANES]; 4]; 4];
        let x = x.map(|x| x.as_chunks::<LANES>().0);
        let y = y.map(|y| y.as_chunks::<LANES>().0);
        for at in 0..x[0].len() {
            for i in 0..4 {
                for j in 0..4 {
                    for lane in 0..LANES {
                        sums[i][j][lane] += x[i][at][lane] * y[j][at][lane];
                    }
                }
            }
        }
        sums.map(|row| row.map(reduce_lanes))
    }
    fn dots_here(x: [&[f32]; 4], y: [&[f32]; 4]) -> [[f32; 4]; 4] {
        by_level!(dots(x: [&[f32]; 4], y: [&[f32]; 4]) -> [[f32; 4]; 4])
    }
    // SAFETY: rows exist; the columns before `start` are finished and only read.
    let row = |at: usize| unsafe { &*a.part(at * k, start) };
    for i in (0..rows).step_by(4) {
        for j in (0..width).step_by(4) {
            // At the edge a row is taken again and its sums are not used.
            let x = std::array::from_fn(|r| row(first + (i + r).min(rows - 1)));
            let y = std::array::from_fn(|c| row(start + (j + c).min(width - 1)));
            let sums = dots_here(x, y);
            for r in 0..4.min(rows - i) {
                for c in 0..4.min(width - j) {
                    // SAFETY: inside the caller's own rows, behind the columns that are read.
                    unsafe { *a.get().add((first + i + r) * k + start + j + c) -= sums[r][c] };
                }
            }
        }
    }
}

/// Factorises the block on the diagonal.
///
/// # Safety
/// As `update`.
unsafe fn diagonal(a: SharedMut<f32>, k: usize, start: usize, width: usize) {
    // SAFETY: inside the block.
    let at = |i: usize, j: usize| unsafe { &mut *a.get().add((start + i) * k + start + j) };
    for j in 0..width {
        let mut pivot = *at(j, j);
        for c in 0..j {
            pivot -= *at(j, c) * *at(j, c);
        }
        // A pivot that rounding made negative stands for a direction that the sample does not have.
        let pivot = pivot.max(f32::MIN_POSITIVE).sqrt();
        *at(j, j) = pivot;
        for i in j + 1..width {
            let mut value = *at(i, j);
            for c in 0..j {
                value -= *at(i, c) * *at(j, c);
            }
            *at(i, j) = value / pivot;
        }
    }
}

/// Solves `rows` rows at `first` against the finished block on the diagonal.
///
/// # Safety
/// As `update`.
unsafe fn solve(a: SharedMut<f32>, k: usize, first: usize, start: usize, rows: usize, width: usize) {
    for i in first..first + rows {
        // SAFETY: the caller's own row.
        let row = unsafe { a.part(i * k + start, width) };
        for j in 0..width {
            // SAFETY: a row of the finished block.
            let factor = unsafe { &*a.part((start + j) * k + start, j + 1) };
            let mut value = row[j];
            for c in 0..j {
                value -= row[c] * factor[c];
            }
            row[j] = value / factor[j];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::random;

    const K: usize = 96;

    /// H of inputs that have most of their length in a few common directions.
    fn correlated(pool_rows: usize) -> Vec<f32> {
        let (directions, loads, noise) =
            (random(1, 6 * K, 1.0), random(2, pool_rows * 6, 1.0), random(3, pool_rows * K, 0.2));
        let mut h = vec![0.0; K * K];
        for row in 0..pool_rows {
            let mut x = noise[row * K..(row + 1) * K].to_vec();
            for d in 0..6 {
                for i in 0..K {
                    x[i] += loads[row * 6 + d] * directions[d * K + i];
                }
            }
            for i in 0..K {
                for j in 0..K {
                    h[i * K + j] += x[i] * x[j];
                }
            }
        }
        h
    }

    fn quantized(kind: WeightKind, weights: &[f32], h: Option<&Compensation>) -> Vec<f32> {
        let group = kind.group(K);
        let per_row = K.div_ceil(group);
        let mut codes = vec![0u8; PANEL * K];
        let mut groups = vec![GroupScale::default(); PANEL * per_row];
        match h {
            Some(h) => h.quantize(kind, weights, &mut codes, &mut groups),
            None => {
                for row in 0..PANEL {
                    quant::quantize_row(
                        kind,
                        &weights[row * K..(row + 1) * K],
                        None,
                        &mut codes[row * K..(row + 1) * K],
                        &mut groups[row * per_row..(row + 1) * per_row],
                    );
                }
            }
        }
        let bias = match kind {
            WeightKind::Int4 { zero_point: true, .. } => 0.0,
            WeightKind::Int4 { .. } => 8.0,
            _ => 128.0,
        };
        (0..PANEL * K)
            .map(|at| {
                let g = groups[at / K * per_row + at % K / group];
                g.scale * (f32::from(codes[at]) - bias) - g.offset
            })
            .collect()
    }

    fn pull(known: &Compensation) -> &[f32] {
        match &known.known {
            Known::Sample(sample) => &sample.pull,
            Known::Direction(_) => panic!("it was made of a direction"),
        }
    }

    /// Sum of (w - q) H (w - q) over the rows.
    fn loss(h: &[f32], weights: &[f32], got: &[f32]) -> f64 {
        weights
            .chunks_exact(K)
            .zip(got.chunks_exact(K))
            .map(|(w, q)| {
                let e: Vec<f64> = w.iter().zip(q).map(|(w, q)| f64::from(w - q)).collect();
                (0..K * K).map(|at| e[at / K] * f64::from(h[at]) * e[at % K]).sum::<f64>()
            })
            .sum()
    }

    #[test]
    fn errors_are_made_up_for_where_inputs_go_together() {
        let pool = Pool::new(2, false);
        let h = correlated(400);
        let weights = random(4, PANEL * K, 0.05);
        let known = Compensation::new(&pool, K, &h, 0.01).unwrap();
        for kind in [
            WeightKind::Int8,
            WeightKind::Int4 { group: 32, zero_point: false },
            WeightKind::Int4 { group: 128, zero_point: true },
        ] {
            let plain = loss(&h, &weights, &quantized(kind, &weights, None));
            let informed = loss(&h, &weights, &quantized(kind, &weights, Some(&known)));
            println!("{kind:?}: {informed:.4} of {plain:.4}");
            assert!(informed < 0.6 * plain, "{kind:?}: {informed} of {plain}");
        }
    }

    #[test]
    fn inputs_that_have_nothing_in_common_make_up_for_nothing() {
        let pool = Pool::new(1, false);
        let mut h = vec![0.0; K * K];
        (0..K).for_each(|i| h[i * K + i] = 3.0);
        let weights = random(5, PANEL * K, 0.05);
        let known = Compensation::new(&pool, K, &h, 0.01).unwrap();
        assert!(pull(&known).iter().all(|&share| share == 0.0));
        let kind = WeightKind::Int4 { group: 32, zero_point: false };
        let (plain, informed) = (quantized(kind, &weights, None), quantized(kind, &weights, Some(&known)));
        let (plain, informed) = (loss(&h, &weights, &plain), loss(&h, &weights, &informed));
        assert!((informed / plain - 1.0).abs() < 0.02, "{informed} against {plain}");
    }

    #[test]
    fn the_product_with_one_direction_is_kept() {
        let weights = random(7, PANEL * K, 0.1);
        // Some of them zero: also at the end, where nothing is left to make up for an error.
        let mut inputs = random(8, K, 1.0);
        inputs[11] = 0.0;
        inputs[K - 3..].fill(0.0);
        let known = Compensation::along(inputs.clone()).unwrap();
        let off = |got: &[f32]| -> f32 {
            let product = |row: &[f32]| row.iter().zip(&inputs).map(|(w, x)| w * x).sum::<f32>();
            weights.chunks_exact(K).zip(got.chunks_exact(K)).map(|(w, q)| (product(w) - product(q)).powi(2)).sum()
        };
        let distance = |got: &[f32]| -> f32 { weights.iter().zip(got).map(|(w, q)| (w - q).powi(2)).sum() };
        for kind in [WeightKind::Int8, WeightKind::Int4 { group: 32, zero_point: true }] {
            let (plain, kept) = (quantized(kind, &weights, None), quantized(kind, &weights, Some(&known)));
            assert!(off(&kept) < 0.05 * off(&plain), "{kind:?}: {} against {}", off(&kept), off(&plain));
            assert!(distance(&kept) < 1.1 * distance(&plain), "{kind:?}: the others pay for it");
        }
    }

    #[test]
    fn others_do_not_pay_for_one_input_that_is_all_of_a_direction() {
        let weights = random(7, PANEL * K, 0.1);
        let mut inputs = random(8, K, 0.01);
        inputs[11] = 3000.0;
        let known = Compensation::along(inputs).unwrap();
        let (plain, kept) =
            (quantized(WeightKind::Int8, &weights, None), quantized(WeightKind::Int8, &weights, Some(&known)));
        let distance = |got: &[f32]| -> f32 { weights.iter().zip(got).map(|(w, q)| (w - q).powi(2)).sum() };
        assert!(distance(&kept) < 1.1 * distance(&plain), "{} against {}", distance(&kept), distance(&plain));
    }

    #[test]
    fn threads_and_odd_sizes_change_nothing_and_bad_samples_are_refused() {
        for k in [32, 96] {
            let h: Vec<f32> = correlated(50).chunks_exact(K).take(k).flat_map(|row| row[..k].to_vec()).collect();
            let (one, two) = (Pool::new(1, false), Pool::new(2, false));
            let of = |pool| pull(&Compensation::new(pool, k, &h, 0.01).unwrap()).to_vec();
            assert_eq!(of(&one), of(&two));
        }
        let pool = Pool::new(1, false);
        assert!(Compensation::new(&pool, K, &vec![f32::NAN; K * K], 0.01).is_none());
        assert!(Compensation::new(&pool, K, &vec![0.0; K * K], 0.01).is_some(), "no input at all is no obstacle");
        assert!(Compensation::along(vec![f32::INFINITY; K]).is_none());
        assert!(Compensation::along(vec![0.0; K]).is_some(), "no input at all is no obstacle");
    }
}
