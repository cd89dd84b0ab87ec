//! Reads tensors from the mapped files straight into kernel layout, one tensor (or one fused group) after the other.
//!
//! The only place of this crate with `unsafe`: the read-only mapping of weight files. Pages are given back right after a
//! tensor is packed, so the peak is the packed size plus one tensor. When a manifest is given, a thread hashes the same
//! open files meanwhile; a file that changes between open and end of load is refused, so what was hashed is what serves.
//! A file that is *truncated* while it is mapped ends the process (SIGBUS), as for every user of mmap; the supervisor
//! reports a worker that dies while loading.

use super::checkpoint::{Checkpoint, CheckpointError, ElementType, TensorAt};
use super::digest::{Hashing, Manifest};
use super::plan::Form;
use ernie_kernels::ops::embed_bf16;
use ernie_kernels::{Arrange, Matrix, PackError, Pool, RowSource};
use memmap2::{Advice, Mmap, UncheckedAdvice};
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A weight file: open, mapped read-only, and remembered as it was.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    name: String,
    file: Arc<File>,
    map: Mmap,
    stamp: Stamp,
}

/// Identity of a file's content as the file system sees it. The change time can not be set back by a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(meta: &Metadata) -> Self {
        Self {
            length: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

impl MappedFile {
    pub(crate) fn open(path: &Path, name: &str) -> Result<Self, CheckpointError> {
        let read = |source| CheckpointError::Read { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(read)?;
        let meta = file.metadata().map_err(read)?;
        if !meta.is_file() {
            let cause = "not a regular file".to_owned();
            let remedy = "put the weight file itself there";
            return Err(CheckpointError::Malformed { file: path.to_path_buf(), cause, remedy });
        }
        // SAFETY: the mapping is private and read-only and lives in this struct. Another process may write to the file: the
        // bytes are then wrong, which `unchanged` reports, but they are plain numbers and headers that are bounds-checked
        // (the header is parsed from one pass; all later ranges were checked against the mapping's length).
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        Ok(Self { path: path.to_path_buf(), name: name.to_owned(), file: Arc::new(file), map, stamp: Stamp::of(&meta) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub(crate) fn length(&self) -> u64 {
        self.stamp.length
    }

    /// Asks the kernel to read ahead.
    fn expect(&self, range: &Range<usize>) {
        // Advice only: if it fails, reading is slower.
        let _ = self.map.advise_range(Advice::WillNeed, range.start, range.len());
    }

    /// Gives back the pages of a range that was read.
    fn release(&self, range: &Range<usize>) {
        // SAFETY: the mapping is a file's, shared with nobody who wrote to it: dropped pages come back from the file with
        // the same bytes if they are read again (the edge pages, which the neighbouring tensors share).
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }

    /// Refuses a file that is not what it was when it was opened.
    fn unchanged(&self) -> Result<(), CheckpointError> {
        let read = |source| CheckpointError::Read { path: self.path.clone(), source };
        let now = Stamp::of(&self.file.metadata().map_err(read)?);
        if now == self.stamp { Ok(()) } else { Err(CheckpointError::Changed { file: self.path.clone() }) }
    }
}

/// Why weights could not be brought into memory.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{name} can not be packed: {source}")]
    Pack { name: String, source: PackError },
    #[error("{0} was asked for twice, or is not in the parameter list; this is a defect of ernied, please report it")]
    Unclaimed(String),
    #[error("{0} was never read; this is a defect of ernied, please report it")]
    Unread(String),
}

/// Hands out each tensor of a checkpoint exactly once, packed or converted.
pub struct Loader<'a> {
    pool: &'a Pool,
    checkpoint: Checkpoint,
    remaining: HashMap<String, TensorAt>,
    bytes_done: u64,
    bytes_total: u64,
    hashing: Option<Hashing>,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("dir", &self.checkpoint.dir).field("remaining", &self.remaining.len()).finish()
    }
}

impl<'a> Loader<'a> {
    /// `progress` is told bytes done and bytes in all. With a manifest, hashing of every file that was or will be read
    /// starts now, on its own threads; `config` is the text of `config.json` as it was parsed.
    pub fn new(
        mut checkpoint: Checkpoint,
        config: &[u8],
        verify: Option<&Manifest>,
        pool: &'a Pool,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, WeightsError> {
        let bytes_total = checkpoint.bytes();
        let remaining = std::mem::take(&mut checkpoint.tensors);
        let hashing = match verify {
            Some(manifest) => Some(Hashing::start(manifest, &checkpoint, config, pool.threads())?),
            None => None,
        };
        progress(0, bytes_total);
        Ok(Self { pool, checkpoint, remaining, bytes_done: 0, bytes_total, hashing, progress })
    }

    pub fn pool(&self) -> &'a Pool {
        self.pool
    }

    fn claim(&mut self, name: &str) -> Result<TensorAt, WeightsError> {
        self.remaining.remove(name).ok_or_else(|| WeightsError::Unclaimed(name.to_owned()))
    }

    /// Packs one or more tensors as one matrix.
    pub fn matrix(&mut self, form: Form, arrange: Arrange, names: &[&str]) -> Result<Matrix, WeightsError> {
        let tensors = names.iter().map(|name| self.claim(name)).collect::<Result<Vec<_>, _>>()?;
        let matrix = self.pack(form, arrange, names[0], &tensors)?;
        tensors.iter().for_each(|t| self.done(t));
        Ok(matrix)
    }

    fn pack(&self, form: Form, arrange: Arrange, name: &str, parts: &[TensorAt]) -> Result<Matrix, WeightsError> {
        let columns = parts[0].shape.last().copied().unwrap_or(0);
        parts.iter().for_each(|t| self.checkpoint.files[t.file].expect(&t.range));
        let sources: Vec<_> = parts.iter().map(|t| self.rows(t)).collect();
        Matrix::pack_with(self.pool, form.weights, form.acts, columns, &sources, arrange)
            .map_err(|source| WeightsError::Pack { name: name.to_owned(), source })
    }

    fn rows(&self, tensor: &TensorAt) -> RowSource<'_> {
        let bytes = &self.checkpoint.files[tensor.file].bytes()[tensor.range.clone()];
        match tensor.element {
            ElementType::Bf16 => RowSource::Bf16(bytes),
            ElementType::F16 => RowSource::F16(bytes),
            ElementType::F32 => RowSource::F32(bytes),
        }
    }

    /// A small tensor (norm, router) in f32, whatever its type in the file.
    pub fn vector(&mut self, name: &str) -> Result<Vec<f32>, WeightsError> {
        let tensor = self.claim(name)?;
        let values = floats(self.rows(&tensor)).collect();
        self.done(&tensor);
        Ok(values)
    }

    /// The embedding: packed as the tied head when `head` says so, row by row otherwise, or both.
    pub fn embedding(
        &mut self,
        name: &str,
        head: Option<Form>,
        keep_rows: Option<RowKind>,
    ) -> Result<Embedding, WeightsError> {
        let tensor = self.claim(name)?;
        let head = match head {
            Some(form) => Some(self.pack(form, Arrange::Concat, name, std::slice::from_ref(&tensor))?),
            None => None,
        };
        let rows = keep_rows.map(|kind| Rows::read(kind, self.rows(&tensor)));
        self.done(&tensor);
        Ok(Embedding { head, rows })
    }

    fn done(&mut self, tensor: &TensorAt) {
        self.checkpoint.files[tensor.file].release(&tensor.range);
        self.bytes_done += tensor.range.len() as u64;
        (self.progress)(self.bytes_done, self.bytes_total);
    }

    /// Every parameter was taken, every digest is right, and no file changed meanwhile.
    pub fn finish(self) -> Result<(), WeightsError> {
        if let Some(name) = self.remaining.into_keys().min() {
            return Err(WeightsError::Unread(name));
        }
        if let Some(hashing) = self.hashing {
            hashing.finish()?;
        }
        for file in &self.checkpoint.files {
            file.unchanged()?;
        }
        Ok(())
    }
}

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
}

impl Rows {
    fn read(kind: RowKind, source: RowSource<'_>) -> Self {
        match (kind, source) {
            (RowKind::Bf16, RowSource::Bf16(bytes)) => Self::Bf16(bytes.to_vec()),
            (RowKind::Bf16, source) => {
                Self::Bf16(floats(source).flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect())
            }
            (RowKind::F32, source) => Self::F32(floats(source).collect()),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Bf16(bytes) => bytes.len(),
            Self::F32(rows) => rows.len() * 4,
        }
    }

    /// The rows of `ids`, each `hidden` wide, widened into `out`.
    pub fn gather(&self, pool: &Pool, hidden: usize, ids: &[u32], out: &mut [f32]) {
        match self {
            Self::Bf16(bytes) => embed_bf16(pool, bytes, hidden, ids, out),
            Self::F32(rows) => {
                for (out, &id) in out.chunks_exact_mut(hidden).zip(ids) {
                    out.copy_from_slice(&rows[id as usize * hidden..][..hidden]);
                }
            }
        }
    }
}

/// Little-endian numbers of any float type as f32.
fn floats(source: RowSource<'_>) -> Box<dyn Iterator<Item = f32> + '_> {
    match source {
        RowSource::Bf16(b) => Box::new(b.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        RowSource::F16(b) => Box::new(b.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())),
        RowSource::F32(b) => Box::new(b.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
    }
}
