//! `out[row][n] = sum over k of acts[row][k] * w[n][k]`, with the packed weights of `matrix.rs`.
//!
//! Work is split over panels of weight columns, never over K, and rows are cut into even register tiles; neither changes a
//! single bit of a row's result. A job walks blocks of rows that stay in L2, all its panels for each block, all tiles of
//! the block for each panel: a panel comes from memory once and from L2 for the later tiles. Where a level
//! computes faster than L2 delivers, all tiles take one part of K after the other (`k_chunk`), which then comes from L1.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::act::{ActKind, Acts};
use crate::epilogue::{ARGMAX_ROWS, Place, Running, Sink};
use crate::matrix::{Arrange, Matrix, WeightKind};
use crate::rotation::Rotation;
use crate::table::{FinishFn, KernelTable, Meanwhile, PANEL, Tile, TileKernels};
use crate::threads::{Pool, SharedMut};

/// What becomes of the product.
#[derive(Debug)]
pub enum Out<'a> {
    /// `[rows][n]`, overwritten.
    Store(&'a mut [f32]),
    /// `[rows][n]`, added to: the residual.
    Add(&'a mut [f32]),
    /// `silu(gate) * up`, n/2 wide, converted for the next GEMM. The matrix is arranged `GateUp`.
    SiluMul {
        /// Where the products go.
        acts: &'a mut Acts,
        /// What the next matrix wants.
        kind: ActKind,
        /// Basis that the next matrix reads them in, where it is not that of the products.
        turn: Option<&'a Rotation>,
    },
    /// Per row the lowest id of the largest product, and its value; NaN when any product of the row is not finite.
    ArgMax(&'a mut [(u32, f32)]),
}

/// Multiplications below which waking a second thread costs more than it saves.
const PARALLEL_PRODUCTS: usize = 64 * 1024;
/// Jobs per thread: enough to even out, few enough to keep panels together.
const JOBS_PER_THREAD: usize = 8;

/// Multiplies. Panics when shapes or kinds do not fit: a mistake of the calling code, not of a request.
pub fn gemm(pool: &Pool, acts: &Acts, w: &Matrix, out: Out<'_>) {
    let rows = acts.rows();
    check(acts, w);
    match out {
        Out::Store(out) => {
            assert_eq!(out.len(), rows * w.n(), "the output holds rows x n values");
            run(pool, acts, w, &Sink::Store { out: SharedMut::new(out), stride: w.n() });
        }
        Out::Add(out) => {
            assert_eq!(out.len(), rows * w.n(), "the residual holds rows x n values");
            run(pool, acts, w, &Sink::Add { out: SharedMut::new(out), stride: w.n() });
        }
        Out::SiluMul { acts: next, kind, turn } => {
            assert_eq!(w.arrange(), Arrange::GateUp, "a SiLU product needs gate and up interleaved");
            assert_eq!(next.isa(), acts.isa(), "both activations are of one level");
            let writer = next.begin(kind, rows, w.n() / 2).turned(turn);
            run(pool, acts, w, &Sink::Silu { writer });
            writer.finish(pool, rows);
        }
        Out::ArgMax(best) => {
            assert_eq!(best.len(), rows, "one maximum per row");
            assert_eq!(w.arrange(), Arrange::Concat, "an argmax over interleaved columns has no meaning");
            run(pool, acts, w, &Sink::argmax(best));
        }
    }
}

/// Checks what the tile kernels rely on.
pub(crate) fn check(acts: &Acts, w: &Matrix) {
    assert_eq!(acts.k(), w.k(), "activations and weights have the same K");
    assert_eq!(acts.kind(), w.act_kind(), "activations were converted to the kind that the matrix wants");
}

fn run(pool: &Pool, acts: &Acts, w: &Matrix, sink: &Sink<'_>) {
    let rows = acts.rows();
    if rows == 0 {
        return;
    }
    let per_job = panels_per_job(pool, rows, w.panels(), w.k());
    pool.run(w.panels().div_ceil(per_job), &|job, _| {
        let panels = job * per_job..((job + 1) * per_job).min(w.panels());
        // SAFETY: `check` passed, the sink has room for all rows and columns, and jobs have disjoint panels.
        unsafe { run_panels(acts, 0..rows, w, panels, sink) }
    });
}

/// Panels that one job takes, given how many there are and how much work each is.
pub(crate) fn panels_per_job(pool: &Pool, rows: usize, panels: usize, k: usize) -> usize {
    if rows * panels * PANEL * k < PARALLEL_PRODUCTS {
        return panels.max(1);
    }
    let threads = pool.threads();
    let even = panels.div_ceil(threads * JOBS_PER_THREAD).max(1);
    // One panel a job only where there are too few for two each.
    if panels >= 4 * threads { even.max(2) } else { even }
}

/// The kernels for this pair of activations and weights.
fn kernels<'t>(table: &'t KernelTable, w: &Matrix) -> &'t TileKernels {
    match (w.kind(), w.act_kind()) {
        (WeightKind::F32, _) => &table.f32,
        (WeightKind::Bf16, _) => &table.bf16,
        (WeightKind::Int8, ActKind::I8) => &table.i8_row,
        (WeightKind::Int8 | WeightKind::Int8Group { .. }, _) => &table.i8_group,
        (WeightKind::Int4 { .. }, _) => &table.i4,
    }
}

/// The sums of one panel: for a whole block where K is walked in parts, else for a tile and the one before it.
#[repr(align(64))]
#[allow(dead_code)] // used through pointers
struct Sums([[f32; PANEL]; BLOCK_ROWS_MAX]);

/// A tile whose sums are there, on its way to the sink.
struct Computed<'a, 's> {
    tile: Tile,
    /// Rows that are in the sink.
    ended: usize,
    place: Place<'a, 's>,
    finish: Option<FinishFn>,
    running: *mut Running,
}

impl Computed<'_, '_> {
    fn end_rows(&mut self, rows: usize) {
        let rows = self.ended..self.ended.saturating_add(rows).min(self.tile.rows);
        if rows.is_empty() {
            return;
        }
        self.ended = rows.end;
        // SAFETY: the kernel left the tile's sums in `out`; the maxima are used by one tile at a time.
        unsafe {
            if let Some(finish) = self.finish {
                finish(&self.tile, rows.clone());
            }
            let sums = self.tile.out.cast::<[f32; PANEL]>().add(rows.start);
            let sums = std::slice::from_raw_parts(sums, rows.len());
            self.place.take(rows.start, sums, &mut *self.running);
        }
    }

    fn meanwhile(&mut self) -> Meanwhile {
        unsafe fn end_rows(state: *mut (), rows: usize) {
            // SAFETY: `state` is what stands beside this function in the `Meanwhile`.
            unsafe { (*state.cast::<Computed<'_, '_>>()).end_rows(rows) }
        }
        Meanwhile { end_rows, state: std::ptr::from_mut(self).cast() }
    }
}

/// Rows of the largest block.
const BLOCK_ROWS_MAX: usize = ARGMAX_ROWS;

/// Computes `rows` (positions in `acts` and in the sink) against `panels`.
///
/// # Safety
/// `check` passed for the pair; rows and panels exist; the sink has room for them and nobody else writes there.
pub(crate) unsafe fn run_panels(acts: &Acts, rows: Range<usize>, w: &Matrix, panels: Range<usize>, sink: &Sink<'_>) {
    let table = acts.table();
    let kernels = kernels(table, w);
    let view = acts.view();
    let tile_rows_max = kernels.by_rows.len();
    let step = kernels.row_step;
    let block_rows = (kernels.block_bytes / view.stride / tile_rows_max).max(1) * tile_rows_max;
    let block_rows = block_rows.min(BLOCK_ROWS_MAX / tile_rows_max * tile_rows_max);
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<[f32; PANEL]>();
    let mut running = Running::new();
    let pairs = kernels.finish.is_some();
    let mut waiting: Option<Computed<'_, '_>> = None;
    let mut turn = 0;
    let mut block_start = rows.start;
    while block_start < rows.end {
        let block = block_rows_of(rows.end - block_start, block_rows, step);
        let tiles = if block >= kernels.split_from { 2 } else { 1 }.max(block.div_ceil(tile_rows_max));
        let steps = block.div_ceil(step);
        let pace = block >= kernels.prefetch_from;
        // With one tile a panel is read once, whatever the order.
        let k_chunk = if tiles == 1 { w.k() } else { kernels.k_chunk.min(w.k()) };
        let chunks = w.k().div_ceil(k_chunk);
        if let Some(around) = kernels.around {
            // SAFETY: the level is available: the acts were made for it.
            unsafe { (around.enter)(block, w.group().min(view.scale_group)) };
        }
        for panel in panels.clone() {
            let weights = w.panel(panel);
            let next = if pace && panel + 1 < panels.end { w.panel(panel + 1).data } else { &[] };
            let share = next.len().div_ceil(tiles * chunks).next_multiple_of(64);
            for chunk in 0..chunks {
                let k_to = ((chunk + 1) * k_chunk).min(w.k());
                let mut row = block_start;
                for tile in 0..tiles {
                    let share_steps = steps / tiles + usize::from(tile < steps % tiles);
                    let count = (share_steps * step).min(block_start + block - row);
                    let part = chunk * tiles + tile;
                    let prefetch = &next[(part * share).min(next.len())..((part + 1) * share).min(next.len())];
                    // The sums of a tile that waits for its end must outlive the next one's.
                    turn = if pairs { tile_rows_max - turn } else { 0 };
                    // SAFETY: a row of the block, and blocks are at most `BLOCK_ROWS_MAX` rows.
                    let out = unsafe { sums.add(if chunks == 1 { turn } else { row - block_start }) };
                    let args = Tile {
                        rows: count,
                        a: view.data[row * view.stride..].as_ptr(),
                        a_stride: view.stride,
                        a_wide: view.wide,
                        k: w.k(),
                        k_from: chunk * k_chunk,
                        k_to,
                        panel: weights.data.as_ptr(),
                        panel_again: tile + 1 < tiles,
                        column_scales: weights.column_scales.as_ptr(),
                        group_scales: weights.group_scales.map_or(std::ptr::null(), <[u16]>::as_ptr),
                        group_zeros: weights.group_zeros.map_or(std::ptr::null(), <[u16]>::as_ptr),
                        group: w.group(),
                        act_scales: view.scales[row * view.scale_stride..].as_ptr(),
                        act_scale_stride: view.scale_stride,
                        act_group: view.scale_group,
                        act_sums: view.sums[row * view.sum_stride..].as_ptr(),
                        act_sum_stride: view.sum_stride,
                        unit: w.unit(),
                        out: out.cast(),
                        prefetch: prefetch.as_ptr(),
                        prefetch_bytes: prefetch.len(),
                        meanwhile: waiting.as_mut().map(Computed::meanwhile),
                    };
                    // SAFETY: the level is available (the acts were made for it), the views above hold `count` rows from
                    // `row` on and one whole panel, and the sums have room for the tile (whole tiles behind `out`: blocks are
                    // at most `BLOCK_ROWS_MAX` rows, a multiple of every level's largest tile).
                    unsafe { kernels.by_rows[count - 1](&args) };
                    if let Some(before) = &mut waiting {
                        before.end_rows(usize::MAX);
                    }
                    waiting = None;
                    if k_to == w.k() {
                        let computed = Computed {
                            tile: args,
                            ended: 0,
                            place: Place { table, w, sink, panel, first_row: row, block_row: block_start },
                            finish: kernels.finish,
                            running: &raw mut running,
                        };
                        if pairs {
                            waiting = Some(computed);
                        } else {
                            { computed }.end_rows(usize::MAX);
                        }
                    }
                    row += count;
                }
            }
        }
        if let Some(last) = &mut waiting {
            last.end_rows(usize::MAX);
        }
        waiting = None;
        if let Some(around) = kernels.around {
            // SAFETY: as `enter`.
            unsafe { (around.leave)() };
        }
        if let Sink::ArgMax { .. } = sink {
            sink.merge(block_start, block, &running);
            running = Running::new();
        }
        block_start += block;
    }
}

/// Rows of the next block: all that are left when they nearly fit, else an even share, in whole steps.
fn block_rows_of(left: usize, max: usize, step: usize) -> usize {
    left.div_ceil(left.div_ceil(max)).next_multiple_of(step).min(left)
}
