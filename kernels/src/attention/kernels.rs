//! The table of attention kernels: one per level and width of K and V, all over the same driver.
//!
//! A kernel gets a tile of query rows (tokens x the query heads of one KV head, about [`TILE_ROWS`]) and a chunk of at most
//! [`CHUNK`] keys, and cuts the tile into what its registers hold. Per (row, key) and per (row, column) the order of operations
//! is the same for every number of rows and blocks: that is what makes results independent of the batch.

use crate::isa::Isa;
use crate::kv::KvKind;

/// Keys per softmax update, aligned to absolute positions.
pub(crate) const CHUNK: usize = 128;
/// KV blocks in a chunk.
pub(crate) const CHUNK_BLOCKS: usize = CHUNK / crate::kv::BLOCK_TOKENS;
/// Query rows a tile of vector levels aims at.
pub(crate) const TILE_ROWS: usize = 48;
/// Query rows of the largest tile of any level, unless a KV head has more queries.
pub(crate) const TILE_ROWS_MAX: usize = 64;
/// The maximum of no keys: finite, so that differences stay numbers, and far below any score.
pub(crate) const NO_SCORE: f32 = -1e30;

/// How q and P are handed to the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    F32,
    Bf16,
}

impl Operand {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Operand::F32 => 4,
            Operand::Bf16 => 2,
        }
    }
}

/// The K or V blocks of one chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    pub(crate) count: usize,
    pub(crate) head_dim: usize,
    pub(crate) at: [*const u8; CHUNK_BLOCKS],
    /// What will be read next, to be prefetched at the pace of this walk; null: nothing. Null from the first block on, or the
    /// next chunk is shorter.
    pub(crate) ahead: [*const u8; CHUNK_BLOCKS],
}

/// One row's running softmax.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftmaxRows {
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
    /// Out: what the row's earlier sums are multiplied with.
    pub(crate) correction: *mut f32,
    /// Keys of this chunk that each row may see.
    pub(crate) valid: *const u32,
}

/// State that a level's kernels need in the core while they run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Around {
    /// Sets up for tiles of `rows` rows.
    pub(crate) enter: unsafe fn(rows: usize),
    /// Ends what `enter` began.
    pub(crate) leave: unsafe fn(),
}

/// Kernels of one level for one KV kind.
#[derive(Debug)]
pub(crate) struct AttentionKernels {
    pub(crate) operand: Operand,
    /// Query rows a tile aims at, at most [`TILE_ROWS_MAX`].
    pub(crate) tile_rows: usize,
    /// What to set up around the kernels of a tile, if anything.
    pub(crate) around: Option<Around>,
    /// `s[row][key] = q[row] . k[key]` for `blocks.count * 16` keys; rows of q are `head_dim` operands, rows of s [`CHUNK`].
    pub(crate) scores: unsafe fn(rows: usize, q: *const u8, blocks: &Blocks, s: *mut f32),
    /// Turns scores into P (rows of [`CHUNK`] operands, exact zeros from `valid` on) and updates the running softmax.
    pub(crate) softmax: unsafe fn(rows: usize, blocks: usize, s: *const f32, p: *mut u8, state: &SoftmaxRows),
    /// `o[row][d] = o[row][d] * correction[row] + sum_key p[row][key] * v[key][d]`; rows of o are `head_dim` long.
    pub(crate) values: unsafe fn(rows: usize, p: *const u8, blocks: &Blocks, correction: *const f32, o: *mut f32),
    /// `out = rotate(x, cos_sin)`, all `head_dim` long.
    pub(crate) rotate: unsafe fn(x: &[f32], cos_sin: &[f32], out: &mut [f32]),
    /// `out = scale * rotate(x, cos_sin)` as `head_dim` operands.
    pub(crate) rotate_q: unsafe fn(x: &[f32], cos_sin: &[f32], scale: f32, out: *mut u8),
    /// Writes a whole block: 16 rows of K, contiguous, and 16 rows of V, `v_stride` apart.
    pub(crate) append_block:
        unsafe fn(head_dim: usize, k: &[f32], v: &[f32], v_stride: usize, to_k: *mut u8, to_v: *mut u8),
}

impl AttentionKernels {
    /// The kernels of `isa`.
    ///
    /// # Panics
    /// If this CPU lacks the level.
    pub(crate) fn get(isa: Isa, kind: KvKind) -> &'static AttentionKernels {
        assert!(isa.available(), "this CPU lacks the level {isa}");
        #[cfg(target_arch = "aarch64")]
        use crate::aarch64::neon;
        use crate::reference;
        #[cfg(target_arch = "x86_64")]
        use crate::x86_64::{amx, avx2, avx512};
        // 8-bit blocks are widened to bf16 before these see them (`int8.rs`).
        let kind = if kind == KvKind::Int8 { KvKind::Bf16 } else { kind };
        match (isa, kind) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::AvxVnni, KvKind::F32) => &avx2::attention::F32,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::AvxVnni, KvKind::Bf16) => &avx2::attention::BF16,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, KvKind::F32) => &avx512::attention::F32,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, KvKind::Bf16) => &avx512::attention::WIDENED,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, KvKind::Bf16) => &avx512::attention::BF16,
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, KvKind::Bf16) => &amx::attention::BF16,
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon | Isa::NeonDot, KvKind::F32) => &neon::attention::F32,
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon | Isa::NeonDot, KvKind::Bf16) => &neon::attention::BF16,
            (_, KvKind::F32) => &reference::attention::F32,
            (_, KvKind::Bf16 | KvKind::Int8) => &reference::attention::BF16,
        }
    }
}
