//! Packed matrices as bytes: written once by `model prepare`, mapped read-only at every start.
//!
//! A matrix is a header, then its arrays, each at a multiple of 64 bytes from the header, which itself lies at such a
//! multiple of the file. All numbers are little-endian. The layout id changes whenever packing or panels change; a file with
//! another id is prepared again, never guessed at.

use std::io::{self, Write};

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use crate::act::ActKind;
use crate::matrix::{Arrange, Matrix, Shape, WeightKind};
use crate::memory::{ALIGNMENT, MappedBytes, Store};
use crate::table::{PANEL, SUM_BLOCK};

/// First bytes of every matrix.
const MAGIC: [u8; 8] = *b"ernmat\r\n";
/// Layout of panels and scales as `matrix.rs` describes it.
pub const LAYOUT: u32 = 1;

/// What precedes the arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Header {
    magic: [u8; 8],
    layout: u32,
    kind: u8,
    act: u8,
    arrange: u8,
    zero_point: u8,
    group: u32,
    unit: f32,
    n: u64,
    k: u64,
    reserved: [u64; 3],
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == ALIGNMENT && PANEL == 32);

/// Why bytes are no usable matrix.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PreparedError {
    /// Too short for what the header says.
    #[error("a prepared matrix at byte {offset} is cut short: prepare the model again")]
    Truncated {
        /// Where the matrix begins.
        offset: usize,
    },
    /// Not ours.
    #[error(
        "there is no prepared matrix at byte {offset}: the file is damaged or of another kind; prepare the model again"
    )]
    NotAMatrix {
        /// Where it should begin.
        offset: usize,
    },
    /// Written by a version with other panels.
    #[error("the prepared matrix has layout {found}, this version reads layout {LAYOUT}: prepare the model again")]
    Layout {
        /// The layout in the file.
        found: u32,
    },
    /// Bytes that are not aligned as the kernels need them.
    #[error("the prepared matrix at byte {offset} is not aligned to {ALIGNMENT} bytes")]
    Misaligned {
        /// Where the matrix begins.
        offset: usize,
    },
}

/// Lengths of the arrays behind a header, in bytes.
struct Lengths {
    codes: usize,
    column_scales: usize,
    group_scales: usize,
    group_zeros: usize,
}

impl Lengths {
    fn of(shape: Shape) -> Option<Lengths> {
        let panels = shape.panels();
        let groups = panels.checked_mul(shape.kind.group_values(shape.k))?.checked_mul(2)?;
        Some(Lengths {
            codes: panels.checked_mul(shape.kind.panel_bytes(shape.k))?,
            column_scales: if shape.kind == WeightKind::Int8 { panels * PANEL * 4 } else { 0 },
            group_scales: groups,
            group_zeros: if shape.kind.has_zeros() { groups } else { 0 },
        })
    }

    fn arrays(&self) -> [usize; 4] {
        [self.codes, self.column_scales, self.group_scales, self.group_zeros]
    }
}

impl Matrix {
    /// Bytes that `write_to` writes: a multiple of 64.
    pub fn prepared_bytes(&self) -> usize {
        let arrays =
            [self.codes.bytes(), self.column_scales.bytes(), self.group_scales.bytes(), self.group_zeros.bytes()];
        HEADER_BYTES + arrays.iter().map(|bytes| bytes.len().next_multiple_of(ALIGNMENT)).sum::<usize>()
    }

    /// Writes the matrix in its prepared form. The writer stands at a multiple of 64 bytes of its file.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(bytemuck::bytes_of(&self.header()))?;
        for bytes in
            [self.codes.bytes(), self.column_scales.bytes(), self.group_scales.bytes(), self.group_zeros.bytes()]
        {
            out.write_all(bytes)?;
            out.write_all(&[0; ALIGNMENT][..bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])?;
        }
        Ok(())
    }

    /// The matrix whose prepared form begins `offset` bytes into `owner`, without copying, and the bytes it takes.
    pub fn from_mapped(owner: &MappedBytes, offset: usize) -> Result<(Matrix, usize), PreparedError> {
        let bytes: &[u8] = (**owner).as_ref();
        let truncated = PreparedError::Truncated { offset };
        let head = offset.checked_add(HEADER_BYTES).and_then(|end| bytes.get(offset..end)).ok_or(truncated)?;
        let header: Header = bytemuck::pod_read_unaligned(head);
        if header.magic != MAGIC {
            return Err(PreparedError::NotAMatrix { offset });
        }
        if header.layout != LAYOUT {
            return Err(PreparedError::Layout { found: header.layout });
        }
        let shape = header.shape().ok_or(PreparedError::NotAMatrix { offset })?;
        let lengths = Lengths::of(shape).ok_or(PreparedError::NotAMatrix { offset })?;

        let mut starts = [0; 4];
        let mut at = HEADER_BYTES;
        for (start, len) in starts.iter_mut().zip(lengths.arrays()) {
            *start = at;
            let next = len.checked_next_multiple_of(ALIGNMENT).and_then(|len| at.checked_add(len));
            at = next.ok_or(PreparedError::Truncated { offset })?;
        }
        let fits = offset.checked_add(at).is_some_and(|end| end <= bytes.len());
        if !fits {
            return Err(PreparedError::Truncated { offset });
        }
        if !(bytes.as_ptr() as usize + offset).is_multiple_of(ALIGNMENT) {
            return Err(PreparedError::Misaligned { offset });
        }
        let misaligned = || PreparedError::Misaligned { offset };
        let matrix = Matrix {
            shape,
            codes: Store::mapped(owner, offset + starts[0], lengths.codes).ok_or_else(misaligned)?,
            column_scales: Store::mapped(owner, offset + starts[1], lengths.column_scales / 4)
                .ok_or_else(misaligned)?,
            group_scales: Store::mapped(owner, offset + starts[2], lengths.group_scales / 2).ok_or_else(misaligned)?,
            group_zeros: Store::mapped(owner, offset + starts[3], lengths.group_zeros / 2).ok_or_else(misaligned)?,
            unit: header.unit,
        };
        Ok((matrix, at))
    }

    fn header(&self) -> Header {
        let Shape { n, k, kind, act, arrange } = self.shape;
        let (code, group, zero_point) = match kind {
            WeightKind::F32 => (0, 0, false),
            WeightKind::Bf16 => (1, 0, false),
            WeightKind::Int8 => (2, 0, false),
            WeightKind::Int8Group { group } => (3, group, false),
            WeightKind::Int4 { group, zero_point } => (4, group, zero_point),
        };
        let act = match act {
            ActKind::F32 => 0,
            ActKind::Bf16 => 1,
            ActKind::I8 => 2,
            ActKind::I8Group128 => 3,
        };
        let arrange = match arrange {
            Arrange::Concat => 0,
            Arrange::GateUp => 1,
        };
        Header {
            magic: MAGIC,
            layout: LAYOUT,
            kind: code,
            act,
            arrange,
            zero_point: u8::from(zero_point),
            group: group as u32,
            unit: self.unit,
            n: n as u64,
            k: k as u64,
            reserved: [0; 3],
        }
    }
}

impl Header {
    /// What the header describes, if the kernels can take it.
    fn shape(&self) -> Option<Shape> {
        let group = self.group as usize;
        let kind = match (self.kind, self.zero_point) {
            (0, 0) => WeightKind::F32,
            (1, 0) => WeightKind::Bf16,
            (2, 0) => WeightKind::Int8,
            (3, 0) => WeightKind::Int8Group { group },
            (4, zero_point @ (0 | 1)) => WeightKind::Int4 { group, zero_point: zero_point == 1 },
            _ => return None,
        };
        let act = match self.act {
            0 => ActKind::F32,
            1 => ActKind::Bf16,
            2 => ActKind::I8,
            3 => ActKind::I8Group128,
            _ => return None,
        };
        let arrange = match self.arrange {
            0 => Arrange::Concat,
            1 => Arrange::GateUp,
            _ => return None,
        };
        let (n, k) = (usize::try_from(self.n).ok()?, usize::try_from(self.k).ok()?);
        let grouped = matches!(kind, WeightKind::Int8Group { .. } | WeightKind::Int4 { .. });
        let sound = k > 0
            && k.is_multiple_of(SUM_BLOCK)
            && kind.accepts(act)
            && (!grouped || matches!(group, 32 | 64 | 128))
            && (arrange == Arrange::Concat || n.is_multiple_of(2))
            // Far beyond any model, and small enough that no product below overflows.
            && n <= 1 << 28
            && k <= 1 << 24;
        sound.then_some(Shape { n, k, kind, act, arrange })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::AlignedBuf;
    use crate::tests::{matrix, pairs, random};
    use crate::{Acts, Out, Pool, gemm};
    use std::sync::Arc;

    struct Aligned(AlignedBuf<u8>);

    impl AsRef<[u8]> for Aligned {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    fn mapped(bytes: &[u8]) -> MappedBytes {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        Arc::new(Aligned(buf))
    }

    #[test]
    fn a_mapped_matrix_multiplies_like_the_one_that_was_written() {
        let pool = Pool::new(1, false);
        let mut file = vec![7u8; 64];
        let mut written = Vec::new();
        for (kind, act) in pairs() {
            for arrange in [Arrange::Concat, Arrange::GateUp] {
                let w = matrix(&pool, kind, act, 74, 96, arrange, 30);
                let start = file.len();
                w.write_to(&mut file).unwrap();
                assert_eq!(file.len() - start, w.prepared_bytes());
                written.push(w);
            }
        }
        let owner = mapped(&file);
        let mut offset = 64;
        for w in &written {
            let (read, bytes) = Matrix::from_mapped(&owner, offset).unwrap();
            offset += bytes;
            assert_eq!(read.shape, w.shape);
            let mut acts = Acts::new(3, 96);
            acts.convert(&pool, w.act_kind(), 3, 96, &random(31, 3 * 96, 1.0));
            let (mut a, mut b) = (vec![0.0; 3 * 74], vec![0.0; 3 * 74]);
            gemm(&pool, &acts, w, Out::Store(&mut a));
            gemm(&pool, &acts, &read, Out::Store(&mut b));
            assert_eq!(a, b);
        }
        assert_eq!(offset, file.len());
    }

    #[test]
    fn damaged_bytes_are_refused_and_never_read_past() {
        let pool = Pool::new(1, false);
        let kind = WeightKind::Int4 { group: 32, zero_point: true };
        let w = matrix(&pool, kind, ActKind::I8, 40, 64, Arrange::Concat, 32);
        let mut file = Vec::new();
        w.write_to(&mut file).unwrap();
        for len in [0, 63, 64, 100, file.len() - 1] {
            let found = Matrix::from_mapped(&mapped(&file[..len]), 0).unwrap_err();
            assert_eq!(found, PreparedError::Truncated { offset: 0 }, "{len} bytes");
        }
        assert_eq!(
            Matrix::from_mapped(&mapped(&file), usize::MAX).unwrap_err(),
            PreparedError::Truncated { offset: usize::MAX }
        );
        let shifted = [&[0u8; 8], &file[..]].concat();
        assert_eq!(Matrix::from_mapped(&mapped(&shifted), 8).unwrap_err(), PreparedError::Misaligned { offset: 8 });
        // Every single header byte broken: an error, or a matrix that still fits its bytes.
        for at in 0..HEADER_BYTES {
            for value in [0u8, 1, 5, 0x7f, 0xff] {
                let mut broken = file.clone();
                broken[at] = value;
                if let Ok((found, _)) = Matrix::from_mapped(&mapped(&broken), 0) {
                    let _ = found.dequantized();
                }
            }
        }
        file[8] = 99;
        let text = Matrix::from_mapped(&mapped(&file), 0).unwrap_err().to_string();
        assert!(text.contains("layout 99") && text.contains("prepare"), "{text}");
    }
}
