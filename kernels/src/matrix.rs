//! Packed weight matrices: their kinds, their layout, and reading single rows back.
//!
//! A matrix is a sequence of panels of 32 columns (rows of W), each holding the whole of K in one stretch:
//!
//! | kind | panel | scales |
//! |---|---|---|
//! | f32 | `[K][32]` | |
//! | bf16 | `[K/2][32][2]` | |
//! | int8 | `[K/4][32][4]`, code + 128 | f32 per column, or f16 `[K/group][32]` |
//! | int4 | `[K/8][32][4]`: low nibbles are k..k+4, high ones k+4..k+8, code 0..15 | f16 `[K/group][32]`; with zero points also f16 scale * zero |
//!
//! The layout is the same for every instruction-set level. Packing is `pack.rs`, the file form `prepared.rs`.

use half::f16;

use crate::act::ActKind;
use crate::compensate::Compensation;
use crate::memory::Store;
use crate::pack;
use crate::reference::matmul::widen;
use crate::table::{PANEL, SEGMENT};
use crate::threads::Pool;

pub use crate::pack::PackError;

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// 32-bit floats: the exact form, for parity checks.
    F32,
    /// 16-bit brain floats, as checkpoints have them.
    Bf16,
    /// 8-bit codes with one scale per row of W.
    Int8,
    /// 8-bit codes with one scale per `group` values.
    Int8Group {
        /// 32, 64 or 128; a smaller K makes one group.
        group: usize,
    },
    /// 4-bit codes with one scale per `group` values.
    Int4 {
        /// 32, 64 or 128; a smaller K makes one group.
        group: usize,
        /// Whether each group also has an offset.
        zero_point: bool,
    },
}

impl WeightKind {
    /// What the activations are converted to unless the caller chooses: one scale per row for 8-bit codes.
    pub fn default_act_kind(self) -> ActKind {
        match self {
            WeightKind::F32 => ActKind::F32,
            WeightKind::Bf16 => ActKind::Bf16,
            WeightKind::Int8 | WeightKind::Int8Group { .. } | WeightKind::Int4 { .. } => ActKind::I8,
        }
    }

    /// Whether the GEMM kernels take this pair.
    pub fn accepts(self, act: ActKind) -> bool {
        match self {
            WeightKind::F32 => act == ActKind::F32,
            WeightKind::Bf16 => act == ActKind::Bf16,
            WeightKind::Int8 | WeightKind::Int8Group { .. } | WeightKind::Int4 { .. } => {
                matches!(act, ActKind::I8 | ActKind::I8Group128)
            }
        }
    }

    /// Values that share a scale in a matrix of this K.
    pub(crate) fn group(self, k: usize) -> usize {
        match self {
            WeightKind::Int8Group { group } | WeightKind::Int4 { group, .. } => group.min(k),
            _ => k,
        }
    }

    /// Bytes of one panel's codes.
    pub(crate) fn panel_bytes(self, k: usize) -> usize {
        match self {
            WeightKind::F32 => k * PANEL * 4,
            WeightKind::Bf16 => k * PANEL * 2,
            WeightKind::Int8 | WeightKind::Int8Group { .. } => k * PANEL,
            WeightKind::Int4 { .. } => k * PANEL / 2,
        }
    }

    /// f16 scales of one panel.
    pub(crate) fn group_values(self, k: usize) -> usize {
        match self {
            WeightKind::Int8Group { .. } | WeightKind::Int4 { .. } => k.div_ceil(self.group(k)) * PANEL,
            _ => 0,
        }
    }

    pub(crate) fn has_zeros(self) -> bool {
        matches!(self, WeightKind::Int4 { zero_point: true, .. })
    }
}

/// Weights as a checkpoint stores them: little-endian, row-major `[n][k]`, at any alignment.
#[derive(Clone, Copy, Debug)]
pub enum RowSource<'a> {
    /// 16-bit brain floats.
    Bf16(&'a [u8]),
    /// IEEE half floats.
    F16(&'a [u8]),
    /// 32-bit floats.
    F32(&'a [u8]),
    /// Rows that are computed when they are packed, by any thread and in any order.
    Rows(ComputedRows<'a>),
}

/// Rows that exist only while they are packed: `read` fills one with its K values.
#[derive(Clone, Copy)]
pub struct ComputedRows<'a> {
    /// How many rows there are.
    pub n: usize,
    /// Fills a row, given its number.
    pub read: &'a (dyn Fn(usize, &mut [f32]) + Sync),
}

impl std::fmt::Debug for ComputedRows<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComputedRows").field("n", &self.n).finish_non_exhaustive()
    }
}

/// How the rows of several sources become one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arrange {
    /// One after the other: q, k, v.
    Concat,
    /// Two sources of equal height, gate and up, 16 columns of each in every panel: what `Out::SiluMul` needs. Row numbers
    /// still count all gate rows first.
    GateUp,
}

/// A packed weight matrix.
pub struct Matrix {
    pub(crate) shape: Shape,
    pub(crate) codes: Store<u8>,
    pub(crate) column_scales: Store<f32>,
    pub(crate) group_scales: Store<u16>,
    pub(crate) group_zeros: Store<u16>,
    /// Power of two that the group scales were divided by, so that f16 holds them well.
    pub(crate) unit: f32,
}

/// What a matrix is, without its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) kind: WeightKind,
    pub(crate) act: ActKind,
    pub(crate) arrange: Arrange,
}

impl Shape {
    pub(crate) fn panels(&self) -> usize {
        match self.arrange {
            Arrange::Concat => self.n.div_ceil(PANEL),
            Arrange::GateUp => (self.n / 2).div_ceil(SEGMENT),
        }
    }

    /// Row numbers of the two 16-column segments of a panel.
    pub(crate) fn segments(&self, panel: usize) -> [Columns; 2] {
        let columns = |start: usize, end: usize| Columns { start, len: end.saturating_sub(start).min(SEGMENT) };
        match self.arrange {
            Arrange::Concat => {
                let start = (panel * PANEL).min(self.n);
                let second = (panel * PANEL + SEGMENT).min(self.n);
                [columns(start, self.n), columns(second, self.n)]
            }
            Arrange::GateUp => {
                let half = self.n / 2;
                let start = panel * SEGMENT;
                [columns(start, half), columns(half + start, self.n)]
            }
        }
    }

    /// Panel and column of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        let half = self.n / 2;
        match self.arrange {
            Arrange::Concat => (row / PANEL, row % PANEL),
            Arrange::GateUp if row < half => (row / SEGMENT, row % SEGMENT),
            Arrange::GateUp => ((row - half) / SEGMENT, SEGMENT + (row - half) % SEGMENT),
        }
    }
}

/// Consecutive row numbers of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// One panel's parts.
pub(crate) struct Panel<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) column_scales: &'a [f32],
    pub(crate) group_scales: Option<&'a [u16]>,
    pub(crate) group_zeros: Option<&'a [u16]>,
}

impl Matrix {
    /// Packs `parts` (row-major, K values a row), quantising where the kind says so. K is a multiple of 32.
    pub fn pack(
        pool: &Pool,
        kind: WeightKind,
        k: usize,
        parts: &[RowSource<'_>],
        arrange: Arrange,
    ) -> Result<Matrix, PackError> {
        Matrix::pack_with(pool, kind, kind.default_act_kind(), k, parts, arrange)
    }

    /// As `pack`, for activations of a kind of choice: `ActKind::I8Group128` where inputs have outliers.
    pub fn pack_with(
        pool: &Pool,
        kind: WeightKind,
        act: ActKind,
        k: usize,
        parts: &[RowSource<'_>],
        arrange: Arrange,
    ) -> Result<Matrix, PackError> {
        pack::pack(pool, kind, act, k, parts, arrange, None)
    }

    /// As `pack_with`, rounding for the inputs that `compensation` knows. Kinds that are not quantised take no notice.
    pub fn pack_compensated(
        pool: &Pool,
        kind: WeightKind,
        act: ActKind,
        k: usize,
        parts: &[RowSource<'_>],
        arrange: Arrange,
        compensation: &Compensation,
    ) -> Result<Matrix, PackError> {
        pack::pack(pool, kind, act, k, parts, arrange, Some(compensation))
    }

    /// Rows of W: outputs.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Columns of W: inputs.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// How the weights are stored.
    pub fn kind(&self) -> WeightKind {
        self.shape.kind
    }

    /// What activations must be converted to.
    pub fn act_kind(&self) -> ActKind {
        self.shape.act
    }

    /// How the parts were put together.
    pub fn arrange(&self) -> Arrange {
        self.shape.arrange
    }

    /// Memory of weights and scales.
    pub fn bytes(&self) -> usize {
        self.codes.len()
            + size_of_val(&*self.column_scales)
            + size_of_val(&*self.group_scales)
            + size_of_val(&*self.group_zeros)
    }

    /// A copy in memory of its own.
    pub(crate) fn copied(&self) -> Matrix {
        Matrix {
            shape: self.shape,
            codes: self.codes.copied(),
            column_scales: self.column_scales.copied(),
            group_scales: self.group_scales.copied(),
            group_zeros: self.group_zeros.copied(),
            unit: self.unit,
        }
    }

    pub(crate) fn panels(&self) -> usize {
        self.shape.panels()
    }

    pub(crate) fn segments(&self, panel: usize) -> [Columns; 2] {
        self.shape.segments(panel)
    }

    pub(crate) fn group(&self) -> usize {
        self.shape.kind.group(self.shape.k)
    }

    pub(crate) fn unit(&self) -> f32 {
        self.unit
    }

    pub(crate) fn panel(&self, panel: usize) -> Panel<'_> {
        let Shape { k, kind, .. } = self.shape;
        let (bytes, values) = (kind.panel_bytes(k), kind.group_values(k));
        Panel {
            data: &self.codes[panel * bytes..(panel + 1) * bytes],
            column_scales: match kind {
                WeightKind::Int8 => &self.column_scales[panel * PANEL..(panel + 1) * PANEL],
                _ => &[],
            },
            group_scales: (values > 0).then(|| &self.group_scales[panel * values..(panel + 1) * values]),
            group_zeros: kind.has_zeros().then(|| &self.group_zeros[panel * values..(panel + 1) * values]),
        }
    }

    /// Row `row` of W, dequantised: embedding lookup in a tied head, tests.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        let Shape { n, k, kind, .. } = self.shape;
        assert!(row < n, "row {row} of a matrix of {n}");
        assert_eq!(out.len(), k, "a row holds K values");
        let (panel, column) = self.shape.place(row);
        let panel = self.panel(panel);
        let data = panel.data;
        let group = self.group();
        let scale = |scales: Option<&[u16]>, at: usize| {
            scales.map_or(0.0, |scales| f16::from_bits(scales[at / group * PANEL + column]).to_f32())
        };
        match kind {
            WeightKind::F32 => {
                for (at, out) in out.iter_mut().enumerate() {
                    let from = (at * PANEL + column) * 4;
                    *out = f32::from_ne_bytes([data[from], data[from + 1], data[from + 2], data[from + 3]]);
                }
            }
            WeightKind::Bf16 => {
                for (at, out) in out.iter_mut().enumerate() {
                    let from = ((at / 2 * PANEL + column) * 2 + at % 2) * 2;
                    *out = widen(u16::from_ne_bytes([data[from], data[from + 1]]));
                }
            }
            WeightKind::Int8 | WeightKind::Int8Group { .. } => {
                for (at, out) in out.iter_mut().enumerate() {
                    let code = i32::from(data[(at / 4 * PANEL + column) * 4 + at % 4]) - 128;
                    let scale = match kind {
                        WeightKind::Int8 => panel.column_scales[column],
                        _ => scale(panel.group_scales, at) * self.unit,
                    };
                    *out = code as f32 * scale;
                }
            }
            WeightKind::Int4 { zero_point, .. } => {
                for (at, out) in out.iter_mut().enumerate() {
                    let byte = data[(at / 8 * PANEL + column) * 4 + at % 4];
                    let code = f32::from(if at % 8 < 4 { byte & 15 } else { byte >> 4 });
                    let s = scale(panel.group_scales, at);
                    let value = if zero_point { code * s - scale(panel.group_zeros, at) } else { (code - 8.0) * s };
                    *out = value * self.unit;
                }
            }
        }
    }

    /// All rows, dequantised: for tests and quality checks.
    pub fn dequantized(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n() * self.k()];
        for (row, out) in out.chunks_exact_mut(self.k()).enumerate() {
            self.row_f32(row, out);
        }
        out
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matrix").field("shape", &self.shape).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
