//! Matrices for a turned residual stream, while they are read: those that read it row by row, those that write it as a whole.

use ernie_kernels::{Pool, Rotation, RowSource};
use std::sync::OnceLock;

/// Reads rows of a matrix whose inputs are the turned stream under a norm without weights.
pub(super) fn turned_row<'s>(
    rotation: &'s Rotation,
    norm: &'s [f32],
    source: RowSource<'s>,
) -> impl Fn(usize, &mut [f32]) + Sync + 's {
    move |row, out| {
        source.read_f32(row, out);
        out.iter_mut().zip(norm).for_each(|(value, norm)| *value *= norm);
        rotation.turn(out);
    }
}

/// A matrix whose outputs are turned, all together or in groups of the rotation's width. Its rows mix, so it is turned as a
/// whole, in strips of columns.
pub(super) struct TurnedColumns {
    strips: Vec<OnceLock<Vec<f32>>>,
}

impl TurnedColumns {
    const STRIP: usize = 32;

    /// Of `n` rows. `inputs` turns what the matrix reads, in groups of its width.
    pub(super) fn new(
        pool: &Pool,
        rotation: &Rotation,
        inputs: Option<&Rotation>,
        source: RowSource<'_>,
        (n, columns): (usize, usize),
    ) -> Self {
        let strips: Vec<_> = (0..columns.div_ceil(Self::STRIP)).map(|_| OnceLock::new()).collect();
        // A job reads whole rows to use some strips of them: as many as there are threads' worth of jobs.
        let per_job = strips.len().div_ceil(4 * pool.threads()).max(1);
        pool.run(strips.len().div_ceil(per_job), &|job, _| {
            let range = job * per_job..((job + 1) * per_job).min(strips.len());
            let mut values: Vec<_> = range.clone().map(|_| Vec::with_capacity(n * Self::STRIP)).collect();
            let mut row_values = vec![0.0; columns];
            for row in 0..n {
                source.read_f32(row, &mut row_values);
                if let Some(inputs) = inputs {
                    row_values.chunks_exact_mut(inputs.width()).for_each(|group| inputs.turn(group));
                }
                for (strip, out) in range.clone().zip(&mut values) {
                    let start = strip * Self::STRIP;
                    out.extend_from_slice(&row_values[start..(start + Self::STRIP).min(columns)]);
                }
            }
            for (strip, mut values) in range.zip(values) {
                let width = values.len() / n;
                let groups = values.chunks_exact_mut(rotation.width() * width);
                groups.for_each(|group| rotation.turn_columns(group, width));
                // Each strip is made by one job.
                let _ = strips[strip].set(values);
            }
        });
        Self { strips }
    }

    pub(super) fn read(&self, row: usize, out: &mut [f32]) {
        for (strip, out) in self.strips.iter().zip(out.chunks_mut(Self::STRIP)) {
            let width = out.len();
            out.copy_from_slice(&strip.get().expect("all strips were made")[row * width..][..width]);
        }
    }
}
