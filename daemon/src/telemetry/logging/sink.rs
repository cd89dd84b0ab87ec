//! The log file: rotates by size, on request, keeps N old files, gzips them; reopens for an outside logrotate.
//!
//! Lives on the log writer's thread; requests reach it as flags that the next write sees. A write that fails (full disk)
//! is counted and swallowed: the daemon goes on, and so does the next line.

use crate::config::LoggingConfig;
use file_rotate::compression::Compression;
use file_rotate::suffix::AppendCount;
use file_rotate::{ContentLimit, FileRotate};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Asks the writer for a new file.
#[derive(Debug, Clone)]
pub struct Rotation {
    path: PathBuf,
    rotate: Arc<AtomicBool>,
    reopen: Arc<AtomicBool>,
}

impl Rotation {
    pub fn request(&self) {
        self.rotate.store(true, Ordering::Release);
        tracing::info!("log file rotated on request");
    }

    pub fn request_reopen(&self) {
        self.reopen.store(true, Ordering::Release);
        tracing::info!("log file opened again on request");
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens the file again for each generation; counts what could not be written.
pub(super) struct RotatingFile {
    file: FileRotate<AppendCount>,
    config: LoggingConfig,
    control: Rotation,
    failed: Arc<AtomicU64>,
}

impl RotatingFile {
    pub(super) fn open(path: &Path, config: &LoggingConfig, failed: Arc<AtomicU64>) -> io::Result<(Self, Rotation)> {
        if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir)?;
        }
        // file-rotate panics on a file that can not be opened; find out here.
        std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        let control = Rotation {
            path: path.to_owned(),
            rotate: Arc::new(AtomicBool::new(false)),
            reopen: Arc::new(AtomicBool::new(false)),
        };
        let file = Self::rotate_file(path, config);
        Ok((Self { file, config: config.clone(), control: control.clone(), failed }, control))
    }

    fn rotate_file(path: &Path, config: &LoggingConfig) -> FileRotate<AppendCount> {
        let keep = config.rotate_keep as usize;
        let limit = ContentLimit::BytesSurpassed(usize::try_from(config.rotate_bytes).unwrap_or(usize::MAX));
        // The newest old file stays plain, so that `tail` and `grep` right after a rotation find it.
        let compression = if config.compress { Compression::OnRotate(1) } else { Compression::None };
        FileRotate::new(path, AppendCount::new(keep), limit, compression, None)
    }
}

impl Write for RotatingFile {
    /// One call is one line, so a rotation between calls never tears one.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.control.reopen.swap(false, Ordering::AcqRel) {
            self.file = Self::rotate_file(&self.control.path, &self.config);
        }
        if self.control.rotate.swap(false, Ordering::AcqRel) && self.file.rotate().is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        if self.file.write_all(line).is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // A failed flush was or will be counted by a write.
        let _ = self.file.flush();
        Ok(())
    }
}
