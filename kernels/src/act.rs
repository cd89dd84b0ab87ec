//! Activation rows in the form that the GEMM kernels read: f32, bf16, or 8-bit codes with scales.
//!
//! Buffers are sized once for the largest batch. Each row is converted from that row alone (its own scales, its own
//! sums), so a row's codes never depend on its company.

use crate::isa::Isa;
use crate::memory::AlignedBuf;
use crate::rotation::Rotation;
use crate::table::{Form, KernelTable, MAX_TILE_ROWS, PANEL, SUM_BLOCK};
use crate::threads::{Pool, SharedMut};

/// What activations are converted to. `Matrix::act_kind` says what a matrix wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    /// As they are.
    F32,
    /// Rounded to bf16 where the level multiplies bf16; elsewhere kept in f32.
    Bf16,
    /// 8-bit codes, one scale per row.
    I8,
    /// 8-bit codes, one scale per 128 values: for rows with outliers.
    I8Group128,
}

impl ActKind {
    /// Values that share a scale in a row of `k` values.
    pub(crate) fn scale_group(self, k: usize) -> usize {
        match self {
            ActKind::I8Group128 => 128.min(k),
            _ => k,
        }
    }
}

/// Space behind each row, so that rows a power of two long do not compete for the same cache sets.
const ROW_PADDING: usize = 64;
/// Below this many values a conversion is not worth waking another thread.
const PARALLEL_VALUES: usize = 16 * 1024;

/// Converted activation rows.
#[derive(Debug)]
pub struct Acts {
    table: &'static KernelTable,
    max_rows: usize,
    max_k: usize,
    kind: ActKind,
    form: Form,
    rows: usize,
    k: usize,
    data: AlignedBuf<u8>,
    scales: AlignedBuf<f32>,
    sums: AlignedBuf<i32>,
    /// Rows before they are quantised, `max_k` apart: norms, and SiLU products whose largest value is not known yet.
    staging: AlignedBuf<f32>,
}

/// Where a job writes the rows it owns.
#[derive(Clone, Copy)]
pub(crate) struct RowWriter<'a> {
    table: &'static KernelTable,
    kind: ActKind,
    form: Form,
    k: usize,
    data: SharedMut<u8>,
    scales: SharedMut<f32>,
    sums: SharedMut<i32>,
    staging: SharedMut<f32>,
    staging_stride: usize,
    /// What rows go through before they are converted.
    turn: Option<&'a Rotation>,
}

impl Acts {
    /// Room for `max_rows` rows of up to `max_k` values, for the level this process uses.
    pub fn new(max_rows: usize, max_k: usize) -> Acts {
        Acts::with_isa(Isa::selected(), max_rows, max_k)
    }

    /// The same for a level of choice; GEMMs on these rows use that level. Panics when the CPU lacks it.
    pub fn with_isa(isa: Isa, max_rows: usize, max_k: usize) -> Acts {
        Acts::with_table(KernelTable::of(isa), max_rows, max_k)
    }

    pub(crate) fn with_table(table: &'static KernelTable, max_rows: usize, max_k: usize) -> Acts {
        Acts {
            table,
            max_rows,
            max_k,
            kind: ActKind::F32,
            form: Form::F32,
            rows: 0,
            k: 0,
            // Tile kernels may read (not use) whole tiles of rows behind the last one.
            data: AlignedBuf::zeroed(max_rows * row_bytes_max(max_k) + MAX_TILE_ROWS * row_stride(Form::Bf16, max_k)),
            scales: AlignedBuf::zeroed(max_rows * max_k.div_ceil(128).max(1)),
            sums: AlignedBuf::zeroed(max_rows * (max_k / SUM_BLOCK + 1)),
            staging: AlignedBuf::zeroed(max_rows * max_k),
        }
    }

    /// Rows of the last conversion.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of each row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Kind of the last conversion.
    pub fn kind(&self) -> ActKind {
        self.kind
    }

    /// The level whose kernels read these rows.
    pub fn isa(&self) -> Isa {
        self.table.isa
    }

    /// Memory reserved.
    pub fn bytes(&self) -> usize {
        self.data.len() + size_of_val(&*self.scales) + size_of_val(&*self.sums) + size_of_val(&*self.staging)
    }

    /// Converts `rows` rows of `k` values.
    pub fn convert(&mut self, pool: &Pool, kind: ActKind, rows: usize, k: usize, src: &[f32]) {
        assert_eq!(src.len(), rows * k, "activations hold rows x k values");
        let writer = self.begin(kind, rows, k);
        for_rows(pool, rows, k, &|row| {
            // SAFETY: each row is converted by one job, inside the sizes that `begin` checked.
            unsafe { writer.write(row, &src[row * k..(row + 1) * k]) }
        });
    }

    /// Converts chosen rows: row i becomes row `row_index[i]` of `src`.
    pub fn gather(&mut self, pool: &Pool, kind: ActKind, k: usize, src: &[f32], row_index: &[u32]) {
        assert!(
            row_index.iter().all(|&row| (row as usize + 1) * k <= src.len()),
            "gathered rows lie inside the source"
        );
        let writer = self.begin(kind, row_index.len(), k);
        for_rows(pool, row_index.len(), k, &|row| {
            let from = row_index[row] as usize * k;
            // SAFETY: as in `convert`.
            unsafe { writer.write(row, &src[from..from + k]) }
        });
    }

    /// RMS norm of each row (`x * rsqrt(mean(x^2) + eps) * weight`, in f32), then the conversion. Also writes the f32
    /// rows to `normed` when given.
    #[allow(clippy::too_many_arguments)] // the contract between kernels and model
    pub fn rmsnorm(
        &mut self,
        pool: &Pool,
        kind: ActKind,
        rows: usize,
        k: usize,
        src: &[f32],
        weight: &[f32],
        eps: f32,
        normed: Option<&mut [f32]>,
    ) {
        assert_eq!(src.len(), rows * k, "activations hold rows x k values");
        assert_eq!(weight.len(), k, "a norm has one weight per value");
        let kept = normed.map(|normed| {
            assert_eq!(normed.len(), rows * k, "normed rows have room for rows x k values");
            SharedMut::new(normed)
        });
        let writer = self.begin(kind, rows, k);
        let norm = self.table.rows.rmsnorm;
        for_rows(pool, rows, k, &|row| {
            // SAFETY: each row's part of `normed`, staging and acts belongs to the one job that converts it; the table's
            // level is available (checked when the acts were made).
            unsafe {
                let out = match kept {
                    Some(kept) => kept.part(row * k, k),
                    None => writer.staging_row(row),
                };
                norm(&src[row * k..(row + 1) * k], weight, eps, out);
                writer.write(row, out);
            }
        });
    }

    /// The rows of a conversion to `ActKind::F32`, one behind the other.
    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.form, Form::F32, "only f32 activations are kept as they were");
        let stride = row_stride(self.form, self.k);
        let row = |row: usize| &self.data[row * stride..row * stride + 4 * self.k];
        (0..self.rows).flat_map(|r| bytemuck::cast_slice::<u8, f32>(row(r)).iter().copied()).collect()
    }

    pub(crate) fn table(&self) -> &'static KernelTable {
        self.table
    }

    /// Sets kind and shape; the rows' contents are whatever the writer then writes.
    pub(crate) fn begin(&mut self, kind: ActKind, rows: usize, k: usize) -> RowWriter<'static> {
        assert!(
            rows <= self.max_rows && k <= self.max_k,
            "acts made for {} x {} can not hold {rows} x {k}",
            self.max_rows,
            self.max_k
        );
        assert!(k.is_multiple_of(SUM_BLOCK), "K = {k} is not a multiple of {SUM_BLOCK}");
        self.kind = kind;
        self.form = match kind {
            ActKind::F32 => Form::F32,
            ActKind::Bf16 => self.table.bf16_form,
            ActKind::I8 | ActKind::I8Group128 => self.table.i8_form,
        };
        self.rows = rows;
        self.k = k;
        RowWriter {
            table: self.table,
            kind,
            form: self.form,
            k,
            data: SharedMut::new(&mut self.data),
            scales: SharedMut::new(&mut self.scales),
            sums: SharedMut::new(&mut self.sums),
            staging: SharedMut::new(&mut self.staging),
            staging_stride: self.max_k,
            turn: None,
        }
    }

    pub(crate) fn view(&self) -> ActView<'_> {
        ActView {
            data: &self.data,
            stride: row_stride(self.form, self.k),
            wide: wide_offset(self.k),
            scales: &self.scales,
            scale_stride: self.k.div_ceil(self.kind.scale_group(self.k).max(1)),
            scale_group: self.kind.scale_group(self.k),
            sums: &self.sums,
            sum_stride: self.k / SUM_BLOCK + 1,
        }
    }
}

/// Read access for the GEMM driver.
pub(crate) struct ActView<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) stride: usize,
    pub(crate) wide: usize,
    pub(crate) scales: &'a [f32],
    pub(crate) scale_stride: usize,
    pub(crate) scale_group: usize,
    pub(crate) sums: &'a [i32],
    pub(crate) sum_stride: usize,
}

impl<'a> RowWriter<'a> {
    /// With rows turned before they are converted.
    pub(crate) fn turned(self, turn: Option<&'a Rotation>) -> RowWriter<'a> {
        if let Some(rotation) = turn {
            assert_eq!(rotation.width(), self.k, "rows are as wide as the rotation that turns them");
        }
        RowWriter { turn, ..self }
    }

    /// Whether rows can be written piece by piece: turned and quantised ones are needed as a whole first.
    fn piecewise(&self) -> bool {
        self.turn.is_none() && matches!(self.form, Form::F32 | Form::Bf16)
    }

    /// Turns and converts the staging rows, if `write_silu` left them there. Every row is written by now.
    pub(crate) fn finish(&self, pool: &Pool, rows: usize) {
        if self.piecewise() {
            return;
        }
        for_rows(pool, rows, self.k, &|row| {
            // SAFETY: one job per row; the GEMM that filled the staging rows is over, and the level is available.
            unsafe {
                let values = self.staging_row(row);
                if let Some(rotation) = self.turn {
                    (self.table.rows.turn)(rotation, values);
                }
                self.write(row, values);
            }
        });
    }

    /// Converts one whole row.
    ///
    /// # Safety
    /// `row` is below the rows of `begin`, `src` has its k values, no other job uses the row, and the acts outlive the
    /// writer unmoved and unread.
    pub(crate) unsafe fn write(&self, row: usize, src: &[f32]) {
        let k = self.k;
        let stride = row_stride(self.form, k);
        // SAFETY: the row lies inside `data` (begin checked rows and k against the capacity), which is 64-byte aligned,
        // and so are all strides and offsets.
        unsafe {
            let data = self.data.get().add(row * stride);
            match self.form {
                Form::F32 => std::slice::from_raw_parts_mut(data.cast::<f32>(), k).copy_from_slice(src),
                Form::Bf16 => (self.table.rows.to_bf16)(src, std::slice::from_raw_parts_mut(data.cast::<u16>(), k)),
                Form::I8 | Form::I8I16 => {
                    let group = self.kind.scale_group(k);
                    let codes = std::slice::from_raw_parts_mut(data.cast::<i8>(), k);
                    let wide: &mut [i16] = match self.form {
                        Form::I8I16 => std::slice::from_raw_parts_mut(data.add(wide_offset(k)).cast::<i16>(), k),
                        _ => &mut [],
                    };
                    let scales = k.div_ceil(group);
                    let sums = k / SUM_BLOCK + 1;
                    (self.table.rows.to_i8)(
                        src,
                        group,
                        codes,
                        wide,
                        self.scales.part(row * scales, scales),
                        self.sums.part(row * sums, sums),
                    );
                }
            }
        }
    }

    /// Writes the SiLU products of a gate/up tile to the columns `at .. at + len` of the rows from `first_row` on, where they
    /// belong or into the staging rows: `finish` ends it.
    ///
    /// # Safety
    /// As `write`, for all rows of the tile and columns below k.
    pub(crate) unsafe fn write_silu(&self, first_row: usize, at: usize, len: usize, tile: &[[f32; PANEL]]) {
        let rows = &self.table.rows;
        let stride = row_stride(self.form, self.k);
        // SAFETY: as in `write`; strides are multiples of the elements' sizes.
        unsafe {
            let data = self.data.get().add(first_row * stride);
            match self.form {
                Form::F32 if self.piecewise() => {
                    (rows.silu_f32)(tile, len, data.cast::<f32>().add(at), stride / size_of::<f32>());
                }
                Form::Bf16 if self.piecewise() => {
                    (rows.silu_bf16)(tile, len, data.cast::<u16>().add(at), stride / size_of::<u16>());
                }
                _ => {
                    let staging = self.staging.get().add(first_row * self.staging_stride + at);
                    (rows.silu_f32)(tile, len, staging, self.staging_stride);
                }
            }
        }
    }

    /// The staging row.
    ///
    /// # Safety
    /// As `write`.
    pub(crate) unsafe fn staging_row<'r>(&self, row: usize) -> &'r mut [f32] {
        // SAFETY: staging holds max_rows rows of staging_stride >= k values.
        unsafe { self.staging.part(row * self.staging_stride, self.k) }
    }
}

/// Calls `f` for every row, on several threads when it is worth it.
pub(crate) fn for_rows(pool: &Pool, rows: usize, k: usize, f: &(dyn Fn(usize) + Sync)) {
    if rows * k < PARALLEL_VALUES || rows == 1 {
        for row in 0..rows {
            f(row);
        }
        return;
    }
    let per_job = (PARALLEL_VALUES / 2).div_ceil(k).max(rows.div_ceil(pool.threads() * 8));
    pool.run(rows.div_ceil(per_job), &|job, _| {
        for row in job * per_job..((job + 1) * per_job).min(rows) {
            f(row);
        }
    });
}

fn wide_offset(k: usize) -> usize {
    k.next_multiple_of(64)
}

fn row_stride(form: Form, k: usize) -> usize {
    let bytes = match form {
        Form::F32 => 4 * k,
        Form::Bf16 => 2 * k,
        Form::I8 => k,
        Form::I8I16 => wide_offset(k) + 2 * k,
    };
    bytes.next_multiple_of(64) + ROW_PADDING
}

fn row_bytes_max(k: usize) -> usize {
    let forms = [Form::F32, Form::Bf16, Form::I8, Form::I8I16];
    forms.into_iter().map(|form| row_stride(form, k)).max().unwrap_or(0)
}

#[cfg(test)]
impl Acts {
    /// Codes dequantised, or values as stored (tests).
    pub(crate) fn dequantized(&self) -> Vec<f32> {
        let view = self.view();
        let mut out = Vec::with_capacity(self.rows * self.k);
        for row in 0..self.rows {
            let data = &view.data[row * view.stride..];
            for i in 0..self.k {
                out.push(match self.form {
                    Form::F32 => f32::from_le_bytes(data[4 * i..4 * i + 4].try_into().unwrap()),
                    Form::Bf16 => crate::reference::matmul::widen(u16::from_le_bytes([data[2 * i], data[2 * i + 1]])),
                    Form::I8 | Form::I8I16 => {
                        f32::from(data[i] as i8) * view.scales[row * view.scale_stride + i / view.scale_group]
                    }
                });
            }
        }
        out
    }
}
