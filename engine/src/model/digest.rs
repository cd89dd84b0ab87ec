//! SHA-256 of the files that a load reads, computed beside the packing.
//!
//! Reads through the descriptors that the loader opened, so that the file which is hashed is the file which is packed. The
//! manifest itself (`SHA256SUMS`) is parsed by whoever owns the model store; here are only names and digests.

use super::checkpoint::CheckpointError;
use super::weights::MappedFile;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Bytes per read of a hashing thread; large enough that reading costs nothing, small enough to stay in cache.
const CHUNK: usize = 256 << 10;

/// File name in the model folder to SHA-256.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    pub digests: BTreeMap<String, [u8; 32]>,
}

/// One file to be hashed.
struct Job {
    path: PathBuf,
    file: Arc<File>,
    length: u64,
    expected: [u8; 32],
}

/// Hashing under way.
#[derive(Debug)]
pub(crate) struct Hashing {
    threads: Vec<JoinHandle<()>>,
    /// Set when the load fails, so that nobody waits for digests that no longer matter.
    cancelled: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<CheckpointError>>>,
    hashed: Arc<AtomicU64>,
    total: u64,
}

impl Hashing {
    /// Checks the small files at once (their bytes are here already) and starts threads for the weight files.
    pub(crate) fn start(
        manifest: &Manifest,
        dir: &Path,
        files: &[&MappedFile],
        small: &[(&str, &[u8])],
        threads: usize,
    ) -> Result<Self, CheckpointError> {
        let listed = |name: &str| {
            let file = dir.join(name);
            manifest.digests.get(name).copied().ok_or(CheckpointError::Unlisted { file })
        };
        for (name, bytes) in small {
            compare(&dir.join(name), Sha256::digest(bytes).into(), listed(name)?)?;
        }
        let mut jobs = Vec::new();
        for file in files {
            jobs.push(Job {
                path: file.path().to_path_buf(),
                file: Arc::clone(file.file()),
                length: file.length(),
                expected: listed(file.name())?,
            });
        }
        // The longest first: the others fit beside it.
        jobs.sort_by_key(|job| std::cmp::Reverse(job.length));
        let total = jobs.iter().map(|job| job.length).sum();
        let hashed = Arc::new(AtomicU64::new(0));
        let (next, jobs) = (Arc::new(AtomicUsize::new(0)), Arc::new(jobs));
        let cancelled = Arc::new(AtomicBool::new(false));
        let failure = Arc::new(Mutex::new(None));
        let threads = (0..threads.clamp(1, jobs.len().max(1)))
            .map(|_| {
                let (next, jobs) = (Arc::clone(&next), Arc::clone(&jobs));
                let (cancelled, failure) = (Arc::clone(&cancelled), Arc::clone(&failure));
                let hashed = Arc::clone(&hashed);
                std::thread::spawn(move || {
                    while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(error) =
                            hash(job, &cancelled, &hashed).and_then(|d| compare(&job.path, d, job.expected))
                        {
                            cancelled.store(true, Ordering::Relaxed);
                            failure.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
                        }
                    }
                })
            })
            .collect();
        Ok(Self { threads, cancelled, failure, hashed, total })
    }

    /// Bytes hashed so far, and in all.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.hashed.load(Ordering::Relaxed), self.total)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the digests; an error is the first that was found.
    pub(crate) fn finish(mut self) -> Result<(), CheckpointError> {
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        match self.failure.lock().unwrap_or_else(|e| e.into_inner()).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Hashing {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Digest of a whole file, or of nothing useful once cancelled.
fn hash(job: &Job, cancelled: &AtomicBool, hashed: &AtomicU64) -> Result<[u8; 32], CheckpointError> {
    let read = |source| CheckpointError::Read { path: job.path.clone(), source };
    let mut buffer = vec![0; CHUNK];
    let mut hasher = Sha256::new();
    let mut offset = 0;
    while offset < job.length && !cancelled.load(Ordering::Relaxed) {
        let want = CHUNK.min(usize::try_from(job.length - offset).unwrap_or(CHUNK));
        match job.file.read_at(&mut buffer[..want], offset).map_err(read)? {
            0 => return Err(CheckpointError::Changed { file: job.path.clone() }),
            n => {
                hasher.update(&buffer[..n]);
                offset += n as u64;
                hashed.fetch_add(n as u64, Ordering::Relaxed);
            }
        }
    }
    if cancelled.load(Ordering::Relaxed) { Ok(job.expected) } else { Ok(hasher.finalize().into()) }
}

fn compare(file: &Path, found: [u8; 32], expected: [u8; 32]) -> Result<(), CheckpointError> {
    if found == expected {
        return Ok(());
    }
    Err(CheckpointError::Digest { file: file.to_path_buf(), found: hex(&found), expected: hex(&expected) })
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}
