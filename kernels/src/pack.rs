//! From checkpoint rows to packed panels: reading, quantising, transposing, one job per panel.

use half::{bf16, f16};
use thiserror::Error;

use crate::act::ActKind;
use crate::compensate::Compensation;
use crate::matrix::{Arrange, Matrix, RowSource, Shape, WeightKind};
use crate::memory::{AlignedBuf, Store};
use crate::reference::quant::{self, GroupScale};
use crate::table::{PANEL, SEGMENT, SUM_BLOCK};
use crate::threads::{Pool, SharedMut};

/// Why weights can not be packed: a checkpoint that does not fit its configuration, or a kind that does not exist.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PackError {
    /// K does not suit the kernels.
    #[error("weights with K = {k} can not be packed: K must be a positive multiple of {SUM_BLOCK}")]
    InnerSize {
        /// The length of a row.
        k: usize,
    },
    /// A source is no whole number of rows.
    #[error("part {part} has {bytes} bytes, which is no whole number of rows of {row_bytes} bytes")]
    PartialRow {
        /// Which source.
        part: usize,
        /// Its length.
        bytes: usize,
        /// Length of one row.
        row_bytes: usize,
    },
    /// Gate and up differ, or are not two.
    #[error("a gate/up matrix needs two parts of equal height, not {heights:?} rows")]
    UnequalHalves {
        /// Rows of each part.
        heights: Vec<usize>,
    },
    /// No such group size.
    #[error("quantization groups of {group} are not supported: use 32, 64 or 128")]
    Group {
        /// What was asked for.
        group: usize,
    },
    /// The weights do not multiply with these activations.
    #[error("{kind:?} weights do not take {act:?} activations")]
    ActKind {
        /// Kind of the weights.
        kind: WeightKind,
        /// Kind of the activations.
        act: ActKind,
    },
    /// A weight is infinite or NaN, which no quantised kind can hold.
    #[error("row {row} holds a weight that is not finite: the checkpoint is damaged, or must be served unquantized")]
    NotFinite {
        /// Row of the matrix.
        row: usize,
    },
}

impl RowSource<'_> {
    /// Number of rows of `k` values, `None` when the bytes are no whole number of them.
    fn rows(&self, k: usize) -> Option<usize> {
        match self {
            RowSource::Rows(rows) => Some(rows.n),
            _ => self.bytes().len().is_multiple_of(self.row_len(k)).then(|| self.bytes().len() / self.row_len(k)),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            RowSource::Bf16(bytes) | RowSource::F16(bytes) | RowSource::F32(bytes) => bytes,
            RowSource::Rows(_) => &[],
        }
    }

    /// Bytes of a row as it is stored.
    fn row_len(&self, k: usize) -> usize {
        match self {
            RowSource::Bf16(_) | RowSource::F16(_) => 2 * k,
            RowSource::F32(_) | RowSource::Rows(_) => 4 * k,
        }
    }

    fn row_bytes(&self, row: usize, k: usize) -> &[u8] {
        let len = self.row_len(k);
        &self.bytes()[row * len..(row + 1) * len]
    }

    /// Row `row` in f32; `out` has its K values.
    pub fn read_f32(&self, row: usize, out: &mut [f32]) {
        let k = out.len();
        match self {
            RowSource::F32(_) => {
                for (out, &b) in out.iter_mut().zip(self.row_bytes(row, k).as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(b);
                }
            }
            RowSource::Bf16(_) => {
                for (out, &b) in out.iter_mut().zip(self.row_bytes(row, k).as_chunks::<2>().0) {
                    *out = f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
                }
            }
            RowSource::F16(_) => {
                for (out, &b) in out.iter_mut().zip(self.row_bytes(row, k).as_chunks::<2>().0) {
                    *out = f16::from_le_bytes(b).to_f32();
                }
            }
            RowSource::Rows(rows) => (rows.read)(row, out),
        }
    }

    fn read_bf16(&self, row: usize, k: usize, out: &mut [u16], wide: &mut [f32]) {
        if let RowSource::Bf16(_) = self {
            for (out, &b) in out.iter_mut().zip(self.row_bytes(row, k).as_chunks::<2>().0) {
                *out = u16::from_le_bytes(b);
            }
            return;
        }
        self.read_f32(row, wide);
        for (out, &value) in out.iter_mut().zip(&*wide) {
            *out = bf16::from_f32(value).to_bits();
        }
    }
}

/// The rows of all parts under one numbering.
struct Rows<'a> {
    parts: &'a [RowSource<'a>],
    /// First row of each part.
    starts: Vec<usize>,
    k: usize,
}

impl Rows<'_> {
    fn find(&self, row: usize) -> (&RowSource<'_>, usize) {
        let part = self.starts.partition_point(|&start| start <= row) - 1;
        (&self.parts[part], row - self.starts[part])
    }
}

pub(crate) fn pack(
    pool: &Pool,
    kind: WeightKind,
    act: ActKind,
    k: usize,
    parts: &[RowSource<'_>],
    arrange: Arrange,
    compensation: Option<&Compensation>,
) -> Result<Matrix, PackError> {
    assert!(compensation.is_none_or(|c| c.k() == k), "compensation is for matrices of the same K");
    let (rows, n) = check(kind, act, k, parts, arrange)?;
    let shape = Shape { n, k, kind, act, arrange };
    let panels = shape.panels();
    let mut codes = AlignedBuf::<u8>::zeroed(panels * kind.panel_bytes(k));
    let mut column_scales = AlignedBuf::<f32>::zeroed(if kind == WeightKind::Int8 { panels * PANEL } else { 0 });
    // Group scales in f32 until the largest is known.
    let mut wide = vec![GroupScale::default(); panels * kind.group_values(k)];

    let bad_row = std::sync::atomic::AtomicUsize::new(usize::MAX);
    {
        let (codes, column_scales, wide) =
            (SharedMut::new(&mut codes), SharedMut::new(&mut column_scales), SharedMut::new(&mut wide));
        pool.run(panels, &|panel, _| {
            let (bytes, values) = (kind.panel_bytes(k), kind.group_values(k));
            // SAFETY: one job per panel, and the buffers hold `panels` of each.
            let (codes, wide, columns) = unsafe {
                (
                    codes.part(panel * bytes, bytes),
                    wide.part(panel * values, values),
                    if kind == WeightKind::Int8 { column_scales.part(panel * PANEL, PANEL) } else { &mut [] },
                )
            };
            if let Err(row) = pack_panel(&rows, shape, compensation, panel, codes, columns, wide) {
                bad_row.fetch_min(row, std::sync::atomic::Ordering::Relaxed);
            }
        });
    }
    let bad_row = bad_row.into_inner();
    if bad_row != usize::MAX {
        return Err(PackError::NotFinite { row: bad_row });
    }

    let unit = quant::unit(&wide);
    let mut group_scales = AlignedBuf::<u16>::zeroed(wide.len());
    let mut group_zeros = AlignedBuf::<u16>::zeroed(if kind.has_zeros() { wide.len() } else { 0 });
    for (out, group) in group_scales.iter_mut().zip(&wide) {
        *out = f16::from_f32(group.scale / unit).to_bits();
    }
    for (out, group) in group_zeros.iter_mut().zip(&wide) {
        *out = f16::from_f32(group.offset / unit).to_bits();
    }
    Ok(Matrix {
        shape,
        codes: Store::Owned(codes),
        column_scales: Store::Owned(column_scales),
        group_scales: Store::Owned(group_scales),
        group_zeros: Store::Owned(group_zeros),
        unit,
    })
}

fn check<'a>(
    kind: WeightKind,
    act: ActKind,
    k: usize,
    parts: &'a [RowSource<'a>],
    arrange: Arrange,
) -> Result<(Rows<'a>, usize), PackError> {
    if k == 0 || !k.is_multiple_of(SUM_BLOCK) {
        return Err(PackError::InnerSize { k });
    }
    if let WeightKind::Int8Group { group } | WeightKind::Int4 { group, .. } = kind
        && !matches!(group, 32 | 64 | 128)
    {
        return Err(PackError::Group { group });
    }
    if !kind.accepts(act) {
        return Err(PackError::ActKind { kind, act });
    }
    let mut starts = Vec::with_capacity(parts.len());
    let mut heights = Vec::with_capacity(parts.len());
    let mut n = 0;
    for (part, source) in parts.iter().enumerate() {
        let Some(rows) = source.rows(k) else {
            return Err(PackError::PartialRow { part, bytes: source.bytes().len(), row_bytes: source.row_len(k) });
        };
        starts.push(n);
        heights.push(rows);
        n += rows;
    }
    if arrange == Arrange::GateUp && (heights.len() != 2 || heights[0] != heights[1]) {
        return Err(PackError::UnequalHalves { heights });
    }
    Ok((Rows { parts, starts, k }, n))
}

/// Fills one panel. `Err` is the row that holds something not finite.
fn pack_panel(
    rows: &Rows<'_>,
    shape: Shape,
    compensation: Option<&Compensation>,
    panel: usize,
    codes: &mut [u8],
    columns: &mut [f32],
    groups: &mut [GroupScale],
) -> Result<(), usize> {
    let k = rows.k;
    // (column in the panel, row of the matrix) of every column that exists.
    let present = shape
        .segments(panel)
        .into_iter()
        .enumerate()
        .flat_map(|(segment, part)| (0..part.len).map(move |i| (segment * SEGMENT + i, part.start + i)));
    match shape.kind {
        WeightKind::F32 => {
            let out: &mut [f32] = bytemuck::cast_slice_mut(codes);
            let mut row_values = vec![0f32; k];
            for (column, row) in present {
                let (source, at) = rows.find(row);
                source.read_f32(at, &mut row_values);
                for (out, &value) in out[column..].iter_mut().step_by(PANEL).zip(&row_values) {
                    *out = value;
                }
            }
        }
        WeightKind::Bf16 => {
            let mut values = vec![0u16; PANEL * k];
            let mut wide = vec![0f32; k];
            for (column, row) in present {
                let (source, at) = rows.find(row);
                source.read_bf16(at, k, &mut values[column * k..(column + 1) * k], &mut wide);
            }
            let out: &mut [[u16; 2]] = bytemuck::cast_slice_mut(codes);
            for (pair, out) in out.chunks_exact_mut(PANEL).enumerate() {
                for (column, out) in out.iter_mut().enumerate() {
                    let from = column * k + 2 * pair;
                    *out = [values[from], values[from + 1]];
                }
            }
        }
        WeightKind::Int8 | WeightKind::Int8Group { .. } | WeightKind::Int4 { .. } => {
            let mut values = vec![0f32; PANEL * k];
            let mut row_codes = vec![128u8; PANEL * k];
            let per_row = k.div_ceil(shape.kind.group(k));
            let mut row_groups = vec![GroupScale::default(); PANEL * per_row];
            for (column, row) in present {
                let (source, at) = rows.find(row);
                let row_values = &mut values[column * k..(column + 1) * k];
                source.read_f32(at, row_values);
                if row_values.iter().any(|value| !value.is_finite()) {
                    return Err(row);
                }
                if compensation.is_none() {
                    let codes = &mut row_codes[column * k..(column + 1) * k];
                    let groups = &mut row_groups[column * per_row..(column + 1) * per_row];
                    quant::quantize_row(shape.kind, row_values, None, codes, groups);
                }
            }
            if let Some(compensation) = compensation {
                compensation.quantize(shape.kind, &values, &mut row_codes, &mut row_groups);
            }
            for (column, row_groups) in row_groups.chunks_exact(per_row).enumerate() {
                if shape.kind == WeightKind::Int8 {
                    columns[column] = row_groups[0].scale;
                } else {
                    for (group, &scale) in row_groups.iter().enumerate() {
                        groups[group * PANEL + column] = scale;
                    }
                }
            }
            let four_bits = matches!(shape.kind, WeightKind::Int4 { .. });
            let (out, _) = codes.as_chunks_mut::<4>();
            for (step, out) in out.chunks_exact_mut(PANEL).enumerate() {
                for (column, out) in out.iter_mut().enumerate() {
                    let row = &row_codes[column * k..(column + 1) * k];
                    if four_bits {
                        let (low, high) = row[8 * step..8 * step + 8].split_at(4);
                        for i in 0..4 {
                            out[i] = (low[i] & 15) | (high[i] << 4);
                        }
                    } else {
                        out.copy_from_slice(&row[4 * step..4 * step + 4]);
                    }
                }
            }
        }
    }
    Ok(())
}
