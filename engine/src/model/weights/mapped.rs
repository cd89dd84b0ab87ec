//! Weight files in memory: mapped read-only, given back page by page, and refused when they change while they are read.
//!
//! The only place of this crate with `unsafe`. A file that is *truncated* while it is mapped ends the process (SIGBUS), as
//! for every user of mmap; the supervisor reports a worker that dies while loading.

use super::super::checkpoint::CheckpointError;
use memmap2::{Advice, Mmap, UncheckedAdvice};
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
    pub(in crate::model) fn expect(&self, range: &Range<usize>) {
        // Advice only: if it fails, reading is slower.
        let _ = self.map.advise_range(Advice::WillNeed, range.start, range.len());
    }

    /// Gives back the pages of a range that was read.
    pub(super) fn release(&self, range: &Range<usize>) {
        // SAFETY: the mapping is a file's, shared with nobody who wrote to it: dropped pages come back from the file with
        // the same bytes if they are read again (the edge pages, which the neighbouring tensors share).
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }

    /// Refuses a file that is not what it was when it was opened.
    pub(super) fn unchanged(&self) -> Result<(), CheckpointError> {
        let read = |source| CheckpointError::Read { path: self.path.clone(), source };
        let now = Stamp::of(&self.file.metadata().map_err(read)?);
        if now == self.stamp { Ok(()) } else { Err(CheckpointError::Changed { file: self.path.clone() }) }
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
