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
        // Rows are read once, by blocks, then cut into strips.
        let block = n.div_ceil(4 * pool.threads()).max(1);
        let blocks: Vec<_> = (0..n.div_ceil(block)).map(|_| OnceLock::new()).collect();
        pool.run(blocks.len(), &|job, _| {
            let rows = job * block..((job + 1) * block).min(n);
            let mut values = vec![0.0; rows.len() * columns];
            for (row, out) in rows.zip(values.chunks_exact_mut(columns)) {
                source.read_f32(row, out);
                if let Some(inputs) = inputs {
                    out.chunks_exact_mut(inputs.width()).for_each(|group| inputs.turn(group));
                }
            }
            // Each block, and below each strip, is made by one job.
            let _ = blocks[job].set(values);
        });
        let strips: Vec<_> = (0..columns.div_ceil(Self::STRIP)).map(|_| OnceLock::new()).collect();
        pool.run(strips.len(), &|strip, _| {
            let range = strip * Self::STRIP..((strip + 1) * Self::STRIP).min(columns);
            let width = range.len();
            let mut values = Vec::with_capacity(n * width);
            for block in &blocks {
                let rows = block.get().expect("all blocks were made").chunks_exact(columns);
                rows.for_each(|row| values.extend_from_slice(&row[range.clone()]));
            }
            let groups = values.chunks_exact_mut(rotation.width() * width);
            groups.for_each(|group| rotation.turn_columns(group, width));
            let _ = strips[strip].set(values);
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
