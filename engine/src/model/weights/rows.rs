//! Embedding rows, as they are looked up: row-major, in 16 or 32 bits, in memory or where they lie in a prepared folder.

use super::mapped::MappedFile;
use ernie_kernels::ops::embed_bf16;
use ernie_kernels::{Matrix, Pool, Rotation, RowSource};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// An embedding as it was read: the packed head, rows for the lookup, or both.
#[derive(Debug)]
pub struct Embedding {
    pub head: Option<Matrix>,
    pub rows: Option<Rows>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    Bf16,
    F32,
}

/// Row-major embedding values.
#[derive(Debug)]
pub enum Rows {
    /// Little-endian, as in the files.
    Bf16(Vec<u8>),
    F32(Vec<f32>),
    /// As `Bf16`, where they lie in a prepared folder.
    Mapped {
        file: Arc<MappedFile>,
        range: Range<usize>,
    },
}

impl Rows {
    pub(super) fn read(kind: RowKind, source: RowSource<'_>) -> Self {
        match (kind, source) {
            (RowKind::Bf16, RowSource::Bf16(bytes)) => Self::Bf16(bytes.to_vec()),
            (RowKind::Bf16, source) => {
                Self::Bf16(floats(source).flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect())
            }
            (RowKind::F32, source) => Self::F32(floats(source).collect()),
        }
    }

    /// All `n` rows in the turned basis.
    pub(super) fn turned(pool: &Pool, kind: RowKind, rotation: &Rotation, source: RowSource<'_>, n: usize) -> Self {
        let width = rotation.width();
        let per_job = n.div_ceil(8 * pool.threads()).max(1);
        let parts: Vec<_> = (0..n.div_ceil(per_job)).map(|_| OnceLock::new()).collect();
        pool.run(parts.len(), &|job, _| {
            let rows = job * per_job..((job + 1) * per_job).min(n);
            let mut values = vec![0.0; width * rows.len()];
            for (row, out) in rows.zip(values.chunks_exact_mut(width)) {
                source.read_f32(row, out);
                rotation.turn(out);
            }
            // Each part is made by one job.
            let _ = parts[job].set(match kind {
                RowKind::F32 => Self::F32(values),
                RowKind::Bf16 => {
                    Self::Bf16(values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect())
                }
            });
        });
        let mut out = match kind {
            RowKind::F32 => Self::F32(Vec::with_capacity(n * width)),
            RowKind::Bf16 => Self::Bf16(Vec::with_capacity(2 * n * width)),
        };
        for part in parts {
            match (&mut out, part.into_inner().expect("all parts were made")) {
                (Self::F32(out), Self::F32(part)) => out.extend(part),
                (Self::Bf16(out), Self::Bf16(part)) => out.extend(part),
                _ => unreachable!("all parts are of one kind"),
            }
        }
        out
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Bf16(bytes) => bytes.len(),
            Self::F32(rows) => rows.len() * 4,
            Self::Mapped { range, .. } => range.len(),
        }
    }

    /// The values as bytes where they are bf16; nothing where they are not.
    pub(in crate::model) fn bf16_bytes(&self) -> &[u8] {
        match self {
            Self::Bf16(bytes) => bytes,
            Self::Mapped { file, range } => &file.bytes()[range.clone()],
            Self::F32(_) => &[],
        }
    }

    /// The rows of `ids`, each `hidden` wide, widened into `out`.
    pub fn gather(&self, pool: &Pool, hidden: usize, ids: &[u32], out: &mut [f32]) {
        match self {
            Self::Bf16(_) | Self::Mapped { .. } => embed_bf16(pool, self.bf16_bytes(), hidden, ids, out),
            Self::F32(rows) => {
                for (out, &id) in out.chunks_exact_mut(hidden).zip(ids) {
                    out.copy_from_slice(&rows[id as usize * hidden..][..hidden]);
                }
            }
        }
    }
}

/// Little-endian numbers of any float type as f32.
pub(super) fn floats(source: RowSource<'_>) -> Box<dyn Iterator<Item = f32> + '_> {
    match source {
        RowSource::Bf16(b) => Box::new(b.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        RowSource::F16(b) => Box::new(b.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())),
        RowSource::F32(b) => Box::new(b.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        RowSource::Rows(_) => unreachable!("files hold numbers, not ways to compute them"),
    }
}
