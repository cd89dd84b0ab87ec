//! What happens to a finished tile: stored, added to the residual, turned into SiLU products, or searched for its maximum.
//!
//! A sink is shared by all jobs of one GEMM; each job writes the rows and columns of its own tiles only.

use std::sync::{Mutex, PoisonError};

use crate::act::RowWriter;
use crate::matrix::{Columns, Matrix};
use crate::table::{KernelTable, PANEL, SEGMENT};
use crate::threads::SharedMut;

/// Rows whose running maxima a job keeps on its stack before it merges them.
pub(crate) const ARGMAX_ROWS: usize = 256;

/// Where tiles go.
pub(crate) enum Sink<'a> {
    /// `out[row][column] = tile`
    Store {
        out: SharedMut<f32>,
        stride: usize,
    },
    /// `out[row][column] += tile`
    Add {
        out: SharedMut<f32>,
        stride: usize,
    },
    Silu {
        writer: RowWriter<'a>,
    },
    ArgMax {
        best: Mutex<&'a mut [(u32, f32)]>,
    },
}

/// Running maxima of one job, for the rows `first..first + rows`.
pub(crate) struct Running {
    best: [(u32, f32); ARGMAX_ROWS],
}

/// The value before anything was seen: any real value, and the lowest id among equals, replaces it.
const NOTHING: (u32, f32) = (u32::MAX, f32::NEG_INFINITY);

impl Running {
    pub(crate) fn new() -> Running {
        Running { best: [NOTHING; ARGMAX_ROWS] }
    }
}

/// The better of two candidates, in whatever order they come: NaN (something was not finite) wins and stays, then the larger
/// value, then the lower id.
fn better(a: (u32, f32), b: (u32, f32)) -> (u32, f32) {
    if a.1.is_nan() || b.1.is_nan() {
        return (a.0.min(b.0), f32::NAN);
    }
    if b.1 > a.1 || (b.1 == a.1 && b.0 < a.0) { b } else { a }
}

/// Whether two segments are one run of a panel's width.
fn whole(first: Columns, second: Columns) -> bool {
    first.len == SEGMENT && second.len == SEGMENT && second.start == first.start + SEGMENT
}

/// Where a tile belongs.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a, 's> {
    pub(crate) table: &'static KernelTable,
    pub(crate) w: &'a Matrix,
    pub(crate) sink: &'a Sink<'s>,
    pub(crate) panel: usize,
    /// Of the tile.
    pub(crate) first_row: usize,
    /// Of the block that running maxima are counted in.
    pub(crate) block_row: usize,
}

impl Place<'_, '_> {
    /// Hands over some rows of the tile, from its row `from` on.
    ///
    /// # Safety
    /// The sink's memory holds every row and column of the matrix, nobody else has this tile's part of it, and the CPU has
    /// the table's level.
    pub(crate) unsafe fn take(&self, from: usize, tile: &[[f32; PANEL]], running: &mut Running) {
        let Place { table, w, sink, panel, first_row, block_row } = *self;
        let first_row = first_row + from;
        match sink {
            Sink::Store { out, stride } => {
                let [first, second] = w.segments(panel);
                if whole(first, second) {
                    // SAFETY: the caller's contract.
                    unsafe { (table.rows.store)(tile, out.get().add(first_row * stride + first.start), *stride) };
                    return;
                }
                for (row, values) in tile.iter().enumerate() {
                    for (segment, Columns { start, len }) in [first, second].into_iter().enumerate() {
                        // SAFETY: the caller's contract.
                        let out = unsafe { out.part((first_row + row) * stride + start, len) };
                        out.copy_from_slice(&values[segment * SEGMENT..segment * SEGMENT + len]);
                    }
                }
            }
            Sink::Add { out, stride } => {
                let [first, second] = w.segments(panel);
                if whole(first, second) {
                    // SAFETY: the caller's contract.
                    unsafe { (table.rows.add)(tile, out.get().add(first_row * stride + first.start), *stride) };
                    return;
                }
                for (row, values) in tile.iter().enumerate() {
                    for (segment, Columns { start, len }) in [first, second].into_iter().enumerate() {
                        // SAFETY: the caller's contract.
                        let out = unsafe { out.part((first_row + row) * stride + start, len) };
                        for (out, value) in out.iter_mut().zip(&values[segment * SEGMENT..]) {
                            *out += value;
                        }
                    }
                }
            }
            Sink::Silu { writer } => {
                let [Columns { start, len }, _] = w.segments(panel);
                // SAFETY: the caller's contract; gate columns are numbered like the output's.
                unsafe { writer.write_silu(first_row, start, len, tile) };
            }
            Sink::ArgMax { .. } => {
                let columns = w.n() - (panel * PANEL).min(w.n());
                for (row, values) in tile.iter().enumerate() {
                    let best = &mut running.best[first_row + row - block_row];
                    *best = row_best(table, values, columns.min(PANEL), panel * PANEL, *best);
                }
            }
        }
    }
}

impl Sink<'_> {
    /// Hands over a job's running maxima of `rows` rows from `first_row` on.
    pub(crate) fn merge(&self, first_row: usize, rows: usize, running: &Running) {
        if let Sink::ArgMax { best } = self {
            let mut best = best.lock().unwrap_or_else(PoisonError::into_inner);
            for (best, &found) in best[first_row..first_row + rows].iter_mut().zip(&running.best) {
                *best = better(*best, found);
            }
        }
    }

    /// Prepares an argmax output.
    pub(crate) fn argmax(best: &mut [(u32, f32)]) -> Sink<'_> {
        best.fill(NOTHING);
        Sink::ArgMax { best: Mutex::new(best) }
    }
}

fn row_best(table: &KernelTable, values: &[f32; PANEL], len: usize, first: usize, best: (u32, f32)) -> (u32, f32) {
    if len < PANEL {
        // The padding columns of the last panel are zeros, not outputs.
        let mut found = best;
        for (column, &value) in values[..len].iter().enumerate() {
            let value = if value.is_finite() { value } else { f32::NAN };
            found = better(found, ((first + column) as u32, value));
        }
        return found;
    }
    // SAFETY: the level is available: the acts that chose it were made for it.
    let (max, finite) = unsafe { (table.rows.row_max)(values) };
    if !finite {
        return better(best, (first as u32, f32::NAN));
    }
    if max < best.1 {
        return best;
    }
    let column = values.iter().position(|&value| value == max).unwrap_or(0);
    better(best, ((first + column) as u32, max))
}
