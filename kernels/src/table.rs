//! One table of kernels per instruction-set level, and the arguments that every GEMM kernel takes.
//!
//! A kernel computes one register tile: a few activation rows against one panel of `PANEL` weight columns over the whole
//! of K, into a small buffer. What happens to the tile (store, add, SiLU, argmax) is `epilogue.rs`; who computes which
//! tile is `gemm.rs`. Kernels of the same level differ in MR only, never in the order of a sum.

use std::ops::Range;

use crate::isa::Isa;
use crate::rotation::Rotation;

/// Weight columns (rows of W, outputs) of one packed panel.
pub(crate) const PANEL: usize = 32;
/// Columns that one SiLU segment holds: a panel of a gate/up matrix is 16 gate columns, then their 16 up columns.
pub(crate) const SEGMENT: usize = 16;
/// Rows of the largest register tile of any level.
pub(crate) const MAX_TILE_ROWS: usize = 32;
/// Granularity of the activation sums: weight groups are multiples of it.
pub(crate) const SUM_BLOCK: usize = 32;

/// How activation rows lie in memory. Which form an `ActKind` takes depends on the level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    F32,
    Bf16,
    I8,
    /// `I8` followed by the same values as i16, per four values in the order 0, 2, 1, 3: what `vpmaddwd` wants.
    I8I16,
}

/// Arguments of a tile kernel. Pointers are valid for what the fields say; `gemm.rs` derives them from checked slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// Rows of the tile. Kernels made for one number know it already.
    pub(crate) rows: usize,
    /// First activation row of the tile; following rows every `a_stride` bytes.
    pub(crate) a: *const u8,
    pub(crate) a_stride: usize,
    /// Offset of the i16 copy inside a row of form `I8I16`.
    pub(crate) a_wide: usize,
    pub(crate) k: usize,
    /// The part of K to be multiplied now, whole groups. Kernels whose `k_chunk` is unlimited always get all of it; others add
    /// to what an earlier part left in `out`, and scale at the end of K.
    pub(crate) k_from: usize,
    pub(crate) k_to: usize,
    /// All of the panel's codes.
    pub(crate) panel: *const u8,
    /// Whether other tiles read the same part of the panel after this one.
    pub(crate) panel_again: bool,
    /// Per-column f32 scales of the panel (`Int8`).
    pub(crate) column_scales: *const f32,
    /// f16 scales `[group][PANEL]` of the panel (grouped kinds).
    pub(crate) group_scales: *const u16,
    /// f16 scale * zero point `[group][PANEL]`, or null.
    pub(crate) group_zeros: *const u16,
    /// Weight group length along K (K itself for a scale per column).
    pub(crate) group: usize,
    /// Scales of the tile's first row; following rows every `act_scale_stride`. One, or one per `act_group` of K.
    pub(crate) act_scales: *const f32,
    pub(crate) act_scale_stride: usize,
    pub(crate) act_group: usize,
    /// Running sums of the quantised row, one per `SUM_BLOCK`, beginning with 0.
    pub(crate) act_sums: *const i32,
    pub(crate) act_sum_stride: usize,
    /// Power of two that the group scales were divided by.
    pub(crate) unit: f32,
    /// `[rows][PANEL]`, 64-byte aligned.
    pub(crate) out: *mut f32,
    /// Bytes to bring into L2 while computing, at an even pace: this tile's share of the next panel.
    pub(crate) prefetch: *const u8,
    pub(crate) prefetch_bytes: usize,
    /// For kernels whose arithmetic leaves the rest of the core idle.
    pub(crate) meanwhile: Option<Meanwhile>,
}

/// Work on the tile before, to be done in parts while this one is computed. What a kernel leaves is done after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meanwhile {
    /// Ends up to this many rows more; any number of calls is right.
    ///
    /// # Safety
    /// The state is that of the same `Meanwhile`, and nothing else uses it now.
    pub(crate) end_rows: unsafe fn(state: *mut (), rows: usize),
    pub(crate) state: *mut (),
}

/// Scales rows of a tile whose sums were left as they came.
///
/// # Safety
/// As [`TileFn`]; the tile was computed, and has these rows.
pub(crate) type FinishFn = unsafe fn(&Tile, rows: Range<usize>);

/// Computes one tile.
///
/// # Safety
/// The CPU has the level's instructions and every pointer of the tile is valid as its field says.
pub(crate) type TileFn = unsafe fn(&Tile);

/// Kernels of one weight kind: `by_rows[mr - 1]` computes a tile of `mr` rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKernels {
    pub(crate) by_rows: &'static [TileFn],
    /// Use two tiles rather than one from this many rows on, so that the next panel can be fetched during the second.
    pub(crate) split_from: usize,
    /// Rows that a tile takes for the price of one: rows are shared out in multiples of it.
    pub(crate) row_step: usize,
    /// From this many rows on computing a panel takes as long as reading the next, which is then prefetched.
    pub(crate) prefetch_from: usize,
    /// Activation bytes of a row block: with a panel they should fit half of the level's smallest L2.
    pub(crate) block_bytes: usize,
    /// Values of K that are multiplied for all rows of a block before the next ones: that part of a panel stays in L1.
    pub(crate) k_chunk: usize,
    /// For kernels that work on two tiles at a time, as `Tile::meanwhile` says: what they leave to do for each row.
    pub(crate) finish: Option<FinishFn>,
    /// What to set up around the tiles of a block, if anything.
    pub(crate) around: Option<Around>,
}

impl TileKernels {
    /// Kernels of vector levels: no set-up, any number of rows.
    pub(crate) const fn vectors(by_rows: &'static [TileFn], split_from: usize) -> TileKernels {
        TileKernels {
            by_rows,
            split_from,
            row_step: 1,
            prefetch_from: 4,
            block_bytes: 256 << 10,
            k_chunk: usize::MAX,
            finish: None,
            around: None,
        }
    }
}

/// State that tile kernels need in the core while they run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around {
    /// Sets up for a block of `rows` rows where `stretch` values of K share their scales on both sides.
    ///
    /// # Safety
    /// The CPU has the level's instructions.
    pub(crate) enter: unsafe fn(rows: usize, stretch: usize),
    /// Ends what `enter` began.
    ///
    /// # Safety
    /// As `enter`.
    pub(crate) leave: unsafe fn(),
}

/// See `RowKernels::to_i8`.
pub(crate) type ToI8Fn =
    unsafe fn(src: &[f32], group: usize, codes: &mut [i8], wide: &mut [i16], scales: &mut [f32], sums: &mut [i32]);

/// Row operations of `act.rs` and the epilogues.
///
/// # Safety (of all function pointers)
/// The CPU has the level's instructions; slices are what the wrappers in `act.rs` and `epilogue.rs` checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowKernels {
    /// `out[i] = src[i] * rsqrt(mean(src^2) + eps) * weight[i]`.
    pub(crate) rmsnorm: unsafe fn(src: &[f32], weight: &[f32], eps: f32, out: &mut [f32]),
    /// Turns a row of the rotation's width.
    pub(crate) turn: unsafe fn(rotation: &Rotation, row: &mut [f32]),
    /// Rounds to bf16, to nearest even.
    pub(crate) to_bf16: unsafe fn(src: &[f32], out: &mut [u16]),
    /// Quantises one row in groups of `group`: codes, optional i16 copy, one scale per group, running sums.
    pub(crate) to_i8: ToI8Fn,
    /// `silu(gate) * up` of a gate/up tile, the first `len` columns, into rows that are `stride` apart.
    pub(crate) silu_f32: unsafe fn(tile: &[[f32; PANEL]], len: usize, out: *mut f32, stride: usize),
    /// The same, rounded to bf16.
    pub(crate) silu_bf16: unsafe fn(tile: &[[f32; PANEL]], len: usize, out: *mut u16, stride: usize),
    /// Copies a whole tile into rows that are `stride` apart.
    pub(crate) store: unsafe fn(tile: &[[f32; PANEL]], out: *mut f32, stride: usize),
    /// Adds a whole tile to rows that are `stride` apart.
    pub(crate) add: unsafe fn(tile: &[[f32; PANEL]], out: *mut f32, stride: usize),
    /// Maximum of one tile row, ignoring NaN, and whether all values are finite.
    pub(crate) row_max: unsafe fn(row: &[f32; PANEL]) -> (f32, bool),
    /// `x += weight * y`.
    pub(crate) add_scaled: unsafe fn(x: &mut [f32], weight: f32, y: &[f32]),
}

/// Runs a level's arithmetic out of registers for about a millisecond and returns the number of operations done.
///
/// # Safety
/// The CPU has the level's instructions.
pub(crate) type PeakFn = unsafe fn() -> f64;

/// What the level's arithmetic units can do, for judging kernels: the operations a kernel can not do without, from registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeakKernels {
    pub(crate) f32: PeakFn,
    pub(crate) bf16: PeakFn,
    pub(crate) int8: PeakFn,
    pub(crate) int4: PeakFn,
}

/// Everything one level computes with.
#[derive(Debug)]
pub(crate) struct KernelTable {
    pub(crate) isa: Isa,
    /// Form of activations that meet bf16 weights: bf16 where the level multiplies bf16, else f32 (no rounding).
    pub(crate) bf16_form: Form,
    pub(crate) i8_form: Form,
    pub(crate) f32: TileKernels,
    pub(crate) bf16: TileKernels,
    /// 8-bit weights, one scale per column, one per activation row.
    pub(crate) i8_row: TileKernels,
    /// 8-bit weights with groups on either side.
    pub(crate) i8_group: TileKernels,
    /// 4-bit weights (always grouped).
    pub(crate) i4: TileKernels,
    pub(crate) rows: RowKernels,
    pub(crate) peaks: PeakKernels,
}

impl std::fmt::Display for KernelTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.isa.fmt(f)
    }
}

impl KernelTable {
    /// The level's kernels. A level that this CPU lacks has none: callers check `Isa::available`.
    pub(crate) fn of(isa: Isa) -> &'static KernelTable {
        assert!(isa.available(), "this CPU lacks the instructions of level {isa}");
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &crate::x86_64::avx2::AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &crate::x86_64::avx2::AVX_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &crate::x86_64::avx512::gemm::AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &crate::x86_64::avx512::gemm::AVX512_BF16,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &crate::x86_64::amx::gemm::AMX,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &crate::aarch64::neon::NEON,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => &crate::aarch64::neon::NEON_DOT,
            _ => &crate::reference::TABLE,
        }
    }
}
