//! The log file: rotates by size, by time and on request, keeps N old files below a total size, gzips them; opens again for
//! an outside logrotate.
//!
//! Lives on the log writer's thread; requests reach it as flags that the next write sees. A line that can not be written
//! (full disk, a folder that went away) is counted and given up whole: the daemon goes on, and so does the next line. Moving
//! and compressing old files is file-rotate's work; the current file is ours, because only its owner knows what was lost.

use crate::config::LoggingConfig;
use file_rotate::compression::Compression;
use file_rotate::suffix::AppendCount;
use file_rotate::{ContentLimit, FileRotate};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// `None`: it could not be opened; the next line tries again.
    current: Option<Current>,
    config: LoggingConfig,
    control: Rotation,
    failed: Arc<AtomicU64>,
}

struct Current {
    file: File,
    bytes: u64,
    /// Which stretch of `rotate_every` its lines are from.
    period: i64,
}

impl RotatingFile {
    pub(super) fn open(path: &Path, config: &LoggingConfig, failed: Arc<AtomicU64>) -> io::Result<(Self, Rotation)> {
        if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir)?;
        }
        let control = Rotation {
            path: path.to_owned(),
            rotate: Arc::new(AtomicBool::new(false)),
            reopen: Arc::new(AtomicBool::new(false)),
        };
        let mut file = Self { current: None, config: config.clone(), control: control.clone(), failed };
        file.current = Some(file.open_current(local_seconds())?);
        Ok((file, control))
    }

    fn open_current(&self, now: i64) -> io::Result<Current> {
        let file = OpenOptions::new().create(true).append(true).open(&self.control.path)?;
        let meta = file.metadata()?;
        // Lines of an earlier life belong to the day on which they were written.
        let modified = meta.modified().ok().filter(|_| meta.len() > 0);
        let at = modified.and_then(|m| jiff::Timestamp::try_from(m).ok()).map_or(now, |m| m.as_second() + offset(m));
        Ok(Current { file, bytes: meta.len(), period: self.period(at) })
    }

    fn period(&self, at: i64) -> i64 {
        self.config
            .rotate_every
            .map_or(0, |every| at.div_euclid(i64::try_from(every.as_secs()).unwrap_or(i64::MAX).max(1)))
    }

    fn due(&self, now: i64) -> bool {
        self.current
            .as_ref()
            .is_some_and(|c| c.bytes > 0 && (c.bytes >= self.config.rotate_bytes || c.period != self.period(now)))
    }

    /// Moves the file out of the way. What can not be moved is written on.
    fn rotate(&mut self) {
        self.current = None;
        // file-rotate asserts that files are where it left them; somebody may have been there in between.
        let rotated = catch_unwind(AssertUnwindSafe(|| {
            let mut archive = self.archive();
            let result = archive.rotate();
            (result, archive.log_paths())
        }));
        match rotated {
            Ok((Ok(()), old)) => self.prune(&old),
            Ok((Err(error), _)) => tracing::error!("the log file could not be rotated: {error}"),
            Err(_) => tracing::error!("the log file could not be rotated: old files have changed under it"),
        }
    }

    /// Old files, moved and compressed. Made anew for each rotation, so that it sees what lies there now.
    fn archive(&self) -> FileRotate<AppendCount> {
        // The newest old file stays plain, so that `tail` and `grep` right after a rotation find it.
        let compression = if self.config.compress { Compression::OnRotate(1) } else { Compression::None };
        let keep = AppendCount::new(self.config.rotate_keep as usize);
        FileRotate::new(&self.control.path, keep, ContentLimit::None, compression, None)
    }

    /// Removes the oldest files until all of them and a full current one are within the cap. `old`: oldest first.
    fn prune(&self, old: &[PathBuf]) {
        let Some(cap) = self.config.total_bytes else { return };
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
        let mut total = self.config.rotate_bytes + old.iter().map(size).sum::<u64>();
        for path in old {
            if total <= cap {
                return;
            }
            let bytes = size(path);
            match std::fs::remove_file(path) {
                Ok(()) => total -= bytes,
                Err(error) => tracing::error!(path = %path.display(), "an old log file could not be removed: {error}"),
            }
        }
    }

    fn write_line(&mut self, line: &[u8], now: i64) -> io::Result<()> {
        if self.control.reopen.swap(false, Ordering::AcqRel) {
            self.current = None;
        }
        if self.control.rotate.swap(false, Ordering::AcqRel) || self.due(now) {
            self.rotate();
        }
        if self.current.is_none() {
            self.current = Some(self.open_current(now)?);
        }
        let period = self.period(now);
        let Some(current) = &mut self.current else { return Ok(()) };
        if let Err(error) = current.file.write_all(line) {
            // A part of a line would be glued to the next one that fits. A pipe or a device can not be cut: it keeps it.
            let _ = current.file.set_len(current.bytes);
            return Err(error);
        }
        current.bytes += line.len() as u64;
        current.period = period;
        Ok(())
    }
}

impl Write for RotatingFile {
    /// One call is one line, so a rotation between calls never tears one.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.write_line(line, local_seconds()).is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // Nothing is held back: each line is one write.
        Ok(())
    }
}

/// Seconds since 1970 on the wall clock of this place, so that a day begins at midnight here.
fn local_seconds() -> i64 {
    let now = jiff::Timestamp::now();
    now.as_second() + offset(now)
}

fn offset(at: jiff::Timestamp) -> i64 {
    i64::from(jiff::tz::TimeZone::system().to_offset(at).seconds())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const DAY: i64 = 86_400;

    fn file(dir: &Path, change: impl FnOnce(&mut LoggingConfig)) -> (RotatingFile, Arc<AtomicU64>) {
        let mut config = super::super::tests::config(&dir.join("l"), crate::config::LogFormat::Text);
        change(&mut config);
        let failed = Arc::new(AtomicU64::new(0));
        (RotatingFile::open(&dir.join("l"), &config, Arc::clone(&failed)).expect("opened").0, failed)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .expect("listed")
            .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_day_begins_a_new_file_and_an_empty_one_is_not_rotated() {
        let dir = tempfile::tempdir().expect("temp");
        let (mut log, _) = file(dir.path(), |c| c.rotate_every = Some(Duration::from_secs(86_400)));
        log.write_line(b"evening\n", 10 * DAY - 1).expect("written");
        assert_eq!(names(dir.path()), ["l"]);
        log.write_line(b"morning\n", 10 * DAY).expect("written");
        log.write_line(b"noon\n", 10 * DAY + DAY / 2).expect("written");
        log.write_line(b"three days later\n", 13 * DAY).expect("written");
        assert_eq!(names(dir.path()), ["l", "l.1", "l.2.gz"]);
        assert_eq!(std::fs::read_to_string(dir.path().join("l.1")).expect("read"), "morning\nnoon\n");
    }

    #[test]
    fn all_files_together_stay_below_the_cap() {
        let dir = tempfile::tempdir().expect("temp");
        let (mut log, failed) = file(dir.path(), |c| {
            (c.rotate_bytes, c.total_bytes, c.compress) = (1000, Some(5000), false);
        });
        for n in 0..2000 {
            log.write_line(format!("line {n:05}\n").as_bytes(), 0).expect("written");
            let total: u64 = std::fs::read_dir(dir.path())
                .expect("listed")
                .map(|e| e.expect("entry").metadata().expect("meta").len())
                .sum();
            assert!(total <= 5000, "{total} bytes after line {n}");
        }
        assert_eq!(failed.load(Ordering::Relaxed), 0);
        assert!(names(dir.path()).len() >= 4, "{:?}", names(dir.path()));
    }

    #[test]
    fn what_can_not_be_written_is_counted_and_the_file_comes_back_when_it_can() {
        let dir = tempfile::tempdir().expect("temp");
        let logs = dir.path().join("logs");
        std::fs::create_dir(&logs).expect("made");
        let (mut log, failed) = file(&logs, |_| {});
        log.write_all(b"one\n").expect("never an error");
        std::fs::rename(&logs, dir.path().join("away")).expect("moved");
        // A file where the folder was: it can be made for nobody, root included.
        std::fs::write(&logs, b"").expect("in the way");
        log.control.request_reopen();
        log.write_all(b"two\n").expect("never an error");
        log.control.request();
        log.write_all(b"three\n").expect("never an error");
        assert_eq!(failed.load(Ordering::Relaxed), 2);
        std::fs::remove_file(&logs).expect("removed");
        std::fs::rename(dir.path().join("away"), &logs).expect("back");
        log.write_all(b"four\n").expect("never an error");
        assert_eq!(failed.load(Ordering::Relaxed), 2);
        assert_eq!(std::fs::read_to_string(logs.join("l")).expect("read"), "one\nfour\n");
    }

    #[test]
    fn a_full_disk_costs_lines_and_each_is_counted() {
        let dir = tempfile::tempdir().expect("temp");
        // Every write to it fails with "no space left on device".
        std::os::unix::fs::symlink("/dev/full", dir.path().join("l")).expect("linked");
        let (mut log, failed) = file(dir.path(), |_| {});
        for _ in 0..5 {
            log.write_all(b"lost\n").expect("never an error");
        }
        assert_eq!(failed.load(Ordering::Relaxed), 5);
    }
}
