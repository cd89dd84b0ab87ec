//! Sealing and verifying a model folder.
//!
//! Files are opened relative to the folder and never outside of it, symbolic links included. Before a load only the small
//! files are hashed here: the weights are hashed by the worker in the pass that packs them, so that the bytes that were
//! hashed are the bytes that serve.

use super::manifest::{MANIFEST_FILE, Manifest, ManifestError, hex};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Read at once while hashing.
const CHUNK: usize = 1 << 20;

/// Depth of folders in a model that are looked into.
const DEPTH_MAX: usize = 8;

/// A model whose files are what its manifest says, or that an operator takes without one. Only verifying makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedModel {
    dir: PathBuf,
    manifest: Option<Manifest>,
    revision: String,
    weights_bytes: u64,
}

impl VerifiedModel {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `None`: taken unsealed.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Bytes of the weight files.
    pub fn weights_bytes(&self) -> u64 {
        self.weights_bytes
    }
}

/// Why a model was not taken. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("{} is not a model folder: {cause}", dir.display())]
    Folder { dir: PathBuf, cause: String },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("model {} does not match its manifest: {}", dir.display(), listed(problems))]
    Mismatch { dir: PathBuf, problems: Vec<Problem> },
    #[error("{} can not be written: {cause}", path.display())]
    Write { path: PathBuf, cause: String },
}

/// One thing that is wrong with one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub path: String,
    pub cause: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.cause)
    }
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

/// Names the shards of a checkpoint.
const INDEX: &str = "model.safetensors.index.json";

/// Whether the loader or the text side reads a file of this name: such a file must be in the manifest.
fn is_read(path: &str) -> bool {
    const NAMES: [&str; 11] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        INDEX,
        "prepared.json",
        "smoke.json",
    ];
    NAMES.contains(&path) || is_weights(path)
}

fn is_weights(path: &str) -> bool {
    !path.contains('/') && [".safetensors", ".gguf", ".ernie"].iter().any(|end| path.ends_with(end))
}

/// A model folder, held open.
struct Folder {
    dir: PathBuf,
    handle: OwnedFd,
}

impl Folder {
    fn open(dir: &Path) -> Result<Self, VerifyError> {
        let folder = |cause: String| VerifyError::Folder { dir: dir.to_path_buf(), cause };
        let dir = dir.canonicalize().map_err(|error| folder(error.to_string()))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(&dir, flags, Mode::empty()).map_err(|error| folder(error.to_string()))?;
        Ok(Self { dir, handle })
    }

    /// Opens a regular file in the folder; what leads out of it is refused by the kernel.
    fn file(&self, path: &str) -> Result<File, String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let opened = match rustix::fs::openat2(&self.handle, path, flags, Mode::empty(), resolve) {
            // A kernel before 5.6, or a sandbox that does not know the call: resolve by hand.
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
                let real = self.dir.join(path).canonicalize().map_err(|error| error.to_string())?;
                if !real.starts_with(&self.dir) {
                    return Err(LEADS_OUT.to_string());
                }
                rustix::fs::open(&real, flags, Mode::empty())
            }
            opened => opened,
        };
        let file = File::from(opened.map_err(|error| match error {
            rustix::io::Errno::XDEV | rustix::io::Errno::LOOP => LEADS_OUT.to_string(),
            rustix::io::Errno::NOENT => "it is missing; copy it again".to_string(),
            other => other.to_string(),
        })?);
        let metadata = file.metadata().map_err(|error| error.to_string())?;
        if metadata.is_file() { Ok(file) } else { Err("it is not a regular file".to_string()) }
    }

    /// Every file in the folder, relative, without the manifest and what is hidden.
    fn list(&self) -> Result<Vec<String>, VerifyError> {
        let mut found = Vec::new();
        let mut folders = vec![(PathBuf::new(), 0)];
        while let Some((relative, depth)) = folders.pop() {
            let folder =
                |error: std::io::Error| VerifyError::Folder { dir: self.dir.clone(), cause: error.to_string() };
            for entry in std::fs::read_dir(self.dir.join(&relative)).map_err(folder)? {
                let entry = entry.map_err(folder)?;
                let name = entry.file_name();
                let Some(name) = name.to_str() else { continue };
                if name.starts_with('.') || (depth == 0 && name.starts_with(MANIFEST_FILE)) {
                    continue;
                }
                let path = relative.join(name);
                match entry.file_type().map_err(folder)? {
                    kind if kind.is_dir() && depth < DEPTH_MAX => folders.push((path, depth + 1)),
                    kind if kind.is_dir() => {}
                    _ => found.extend(path.to_str().map(str::to_string)),
                }
            }
        }
        found.sort();
        Ok(found)
    }
}

const LEADS_OUT: &str = "it is a link that leads out of the model folder; copy the file itself there (cp -L)";

/// Writes the manifest of a model folder; returns it. Overwrites an older one.
pub fn seal(dir: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Manifest, VerifyError> {
    let folder = Folder::open(dir)?;
    let files = folder.list()?;
    if !files.iter().any(|path| is_weights(path)) || !files.iter().any(|path| path == "config.json") {
        let cause = "config.json or the weights are missing; complete the copy, then seal".to_string();
        return Err(VerifyError::Folder { dir: folder.dir, cause });
    }
    let digests = hash_all(&folder, files.iter().map(String::as_str), progress);
    let mut problems = Vec::new();
    let mut sealed = Vec::new();
    for (path, digest) in digests {
        match digest {
            Ok((digest, _)) => sealed.push((path, digest)),
            Err(cause) => problems.push(Problem { path, cause }),
        }
    }
    if !problems.is_empty() {
        return Err(VerifyError::Mismatch { dir: folder.dir, problems });
    }
    let manifest = Manifest::new(sealed);
    // What was written must be what is read later: names that a manifest can not hold are found here.
    let manifest = Manifest::parse(&manifest.to_text())?;
    write_whole(&folder.dir.join(MANIFEST_FILE), manifest.to_text().as_bytes())?;
    Ok(manifest)
}

/// Replaces a file so that it is there whole or not at all, also after a power cut.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), VerifyError> {
    let wrong = |error: std::io::Error| VerifyError::Write { path: path.to_path_buf(), cause: error.to_string() };
    let parent = path.parent().unwrap_or(Path::new("."));
    let temporary = parent.join(format!(".{MANIFEST_FILE}.{}", std::process::id()));
    let mut file = File::create(&temporary).map_err(wrong)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let moved = written.and_then(|()| std::fs::rename(&temporary, path));
    if let Err(error) = moved {
        // Best effort: the error that matters is told.
        let _ = std::fs::remove_file(&temporary);
        return Err(wrong(error));
    }
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(wrong)
}

/// Hashes every file of the manifest, in parallel; `progress` is told bytes done and bytes in all.
pub fn verify_all(dir: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<VerifiedModel, VerifyError> {
    verify(dir, false, true, progress)
}

/// What has to be right before a worker loads the model: the manifest, the set of files, the content of all files but the
/// weights, which the worker hashes while it loads them. `unsealed` takes a folder without a manifest.
pub fn verify_for_load(dir: &Path, unsealed: bool) -> Result<VerifiedModel, VerifyError> {
    verify(dir, unsealed, false, &|_, _| {})
}

/// Files that the loader reads and the manifest does not list.
pub fn unlisted(dir: &Path, manifest: &Manifest) -> Vec<Problem> {
    match Folder::open(dir).and_then(|folder| folder.list()) {
        Ok(present) => not_listed(&present, manifest),
        Err(_) => Vec::new(),
    }
}

/// Copies what belongs to a model besides its weights: config, tokenizer, template, smoke prompts.
pub fn copy_text_side(dir: &Path, out: &Path) -> Result<(), VerifyError> {
    let folder = Folder::open(dir)?;
    let files = folder.list()?;
    for path in files.iter().filter(|path| is_read(path) && !is_weights(path) && *path != INDEX) {
        let wrong = |cause: String| VerifyError::Write { path: out.join(path), cause };
        let mut from = folder.file(path).map_err(wrong)?;
        let mut to = File::create_new(out.join(path)).map_err(|error| wrong(error.to_string()))?;
        std::io::copy(&mut from, &mut to).and_then(|_| to.sync_all()).map_err(|error| wrong(error.to_string()))?;
    }
    Ok(())
}

/// Files of a folder that neither the loader nor the text side reads.
pub fn unread(dir: &Path) -> Result<Vec<String>, VerifyError> {
    let mut files = Folder::open(dir)?.list()?;
    files.retain(|path| !is_read(path));
    Ok(files)
}

fn not_listed(present: &[String], manifest: &Manifest) -> Vec<Problem> {
    let unlisted = present.iter().filter(|path| is_read(path) && manifest.get(path).is_none());
    let cause = format!("the loader reads it, but {MANIFEST_FILE} does not list it; seal the model again");
    unlisted.map(|path| Problem { path: path.clone(), cause: cause.clone() }).collect()
}

/// The revision that a folder claims to hold, without a look at the files' content: its manifest's, or for an unsealed folder
/// one that changes with names, sizes and times. `None`: no model folder, or a manifest that can not be used.
pub fn revision_on_disk(dir: &Path) -> Option<String> {
    match Manifest::read(dir) {
        Ok(manifest) => Some(manifest.revision()),
        Err(ManifestError::Missing { .. }) => {
            let folder = Folder::open(dir).ok()?;
            let present = folder.list().ok()?;
            unsealed_model(&folder, &present).ok().map(|model| model.revision)
        }
        Err(_) => None,
    }
}

fn verify(
    dir: &Path,
    unsealed: bool,
    weights: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifiedModel, VerifyError> {
    let folder = Folder::open(dir)?;
    let present = folder.list()?;
    let manifest = match Manifest::read(&folder.dir) {
        Err(ManifestError::Missing { .. }) if unsealed => return unsealed_model(&folder, &present),
        manifest => manifest?,
    };
    let mut problems = not_listed(&present, &manifest);
    let (hashed, unhashed): (Vec<_>, Vec<_>) = manifest.files().partition(|(path, _)| weights || !is_weights(path));
    let mut weights_bytes = 0;
    for (path, _) in unhashed {
        match folder.file(path).and_then(|file| file.metadata().map_err(|error| error.to_string())) {
            Ok(metadata) => weights_bytes += metadata.len(),
            Err(cause) => problems.push(Problem { path: path.to_string(), cause }),
        }
    }
    for (path, digest) in hash_all(&folder, hashed.iter().map(|(path, _)| *path), progress) {
        let expected = manifest.get(&path).copied().unwrap_or_default();
        match digest {
            Ok((digest, bytes)) if digest == expected => weights_bytes += if is_weights(&path) { bytes } else { 0 },
            Ok((digest, _)) => {
                let (found, wanted) = (hex(&digest), hex(&expected));
                let cause = format!("it has sha256 {found}, expected {wanted}; copy it again or seal the model anew");
                problems.push(Problem { path, cause });
            }
            Err(cause) => problems.push(Problem { path, cause }),
        }
    }
    if !problems.is_empty() {
        problems.sort_by(|a, b| a.path.cmp(&b.path));
        return Err(VerifyError::Mismatch { dir: folder.dir, problems });
    }
    Ok(VerifiedModel { revision: manifest.revision(), dir: folder.dir, manifest: Some(manifest), weights_bytes })
}

/// A folder that an operator takes as it is. Its revision tells names, sizes and times apart, not content.
fn unsealed_model(folder: &Folder, present: &[String]) -> Result<VerifiedModel, VerifyError> {
    let mut hash = Sha256::new();
    let mut weights_bytes = 0;
    for path in present.iter().filter(|path| is_read(path)) {
        let metadata = std::fs::metadata(folder.dir.join(path))
            .map_err(|error| VerifyError::Folder { dir: folder.dir.clone(), cause: format!("{path}: {error}") })?;
        weights_bytes += if is_weights(path) { metadata.len() } else { 0 };
        let modified = metadata.modified().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        hash.update(format!("{path} {} {modified:?}\n", metadata.len()));
    }
    let revision = format!("unsealed-{}", &hex(&hash.finalize())[..16]);
    Ok(VerifiedModel { dir: folder.dir.clone(), manifest: None, revision, weights_bytes })
}

type Hashed = Result<([u8; 32], u64), String>;

/// Hashes files on as many threads as there are cores, large files first.
fn hash_all<'a>(
    folder: &Folder,
    paths: impl Iterator<Item = &'a str>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> BTreeMap<String, Hashed> {
    let mut jobs: Vec<_> = paths
        .map(|path| {
            let file = folder.file(path);
            let bytes = file.as_ref().ok().and_then(|file| file.metadata().ok()).map_or(0, |metadata| metadata.len());
            (path, file, bytes)
        })
        .collect();
    jobs.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes));
    let total: u64 = jobs.iter().map(|(_, _, bytes)| bytes).sum();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(0u64));
    let results = Mutex::new(BTreeMap::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len().max(1));
    let work = || {
        while let Some((path, file, _)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let hashed = match file {
                Ok(file) => hash(file, &mut |bytes| {
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    *done += bytes;
                    progress(*done, total);
                }),
                Err(cause) => Err(cause.clone()),
            };
            results.lock().unwrap_or_else(PoisonError::into_inner).insert((*path).to_string(), hashed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn hash(mut file: &File, progress: &mut dyn FnMut(u64)) -> Hashed {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((hash.finalize().into(), total)),
            Ok(read) => {
                hash.update(&buffer[..read]);
                total += read as u64;
                progress(read as u64);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    fn model() -> TempDir {
        let dir = tempfile::tempdir().expect("a folder for the test");
        for (name, content) in
            [("config.json", "{}"), ("tokenizer.json", "[]"), ("model.safetensors", "weights"), ("README.md", "hello")]
        {
            fs::write(dir.path().join(name), content).expect("writable");
        }
        dir
    }

    fn mismatch(dir: &Path) -> String {
        verify_all(dir, &|_, _| {}).expect_err("it does not match").to_string()
    }

    #[test]
    fn a_sealed_model_verifies_and_its_revision_stays() {
        let dir = model();
        let manifest = seal(dir.path(), &|_, _| {}).expect("sealed");
        let verified = verify_all(dir.path(), &|_, _| {}).expect("untouched");
        assert_eq!(verified.revision(), manifest.revision());
        assert_eq!(verified.weights_bytes(), 7);
        assert_eq!(verify_for_load(dir.path(), false).expect("untouched"), verified);
        assert_eq!(seal(dir.path(), &|_, _| {}).expect("sealed again"), manifest);
        let known = "7b3d979ca8330a94fa7e9e1b466d8b99e0bcdea1ec90596c0dcc8d7ef6b4300c";
        assert!(!manifest.to_text().contains(known) && manifest.files().count() == 4);
    }

    #[test]
    fn sha256sum_agrees_with_the_seal() {
        let dir = model();
        let manifest = seal(dir.path(), &|_, _| {}).expect("sealed");
        // Of "weights", by sha256sum.
        let digest = hex(manifest.get("model.safetensors").expect("listed"));
        assert_eq!(digest, hex(&Sha256::digest(b"weights")));
    }

    #[test]
    fn every_kind_of_difference_is_named() {
        let dir = model();
        seal(dir.path(), &|_, _| {}).expect("sealed");
        fs::write(dir.path().join("model.safetensors"), "weightz").expect("writable");
        fs::remove_file(dir.path().join("tokenizer.json")).expect("removable");
        fs::write(dir.path().join("generation_config.json"), "{}").expect("writable");
        let error = mismatch(dir.path());
        assert!(error.contains("model.safetensors: it has sha256"), "{error}");
        assert!(error.contains("tokenizer.json: it is missing"), "{error}");
        assert!(error.contains("generation_config.json: the loader reads it"), "{error}");
        // Before a load the weights are only looked at: the worker hashes them.
        let error = verify_for_load(dir.path(), false).expect_err("two of three").to_string();
        assert!(!error.contains("model.safetensors"), "{error}");
        // A file that nobody reads may be there unlisted.
        let dir = model();
        seal(dir.path(), &|_, _| {}).expect("sealed");
        fs::write(dir.path().join("notes.txt"), "mine").expect("writable");
        verify_all(dir.path(), &|_, _| {}).expect("notes are no business of the loader");
    }

    #[test]
    fn links_inside_are_followed_and_links_out_are_refused() {
        let dir = model();
        let other = tempfile::tempdir().expect("a folder for the test");
        fs::write(other.path().join("weights"), "weights").expect("writable");
        symlink("config.json", dir.path().join("generation_config.json")).expect("linkable");
        seal(dir.path(), &|_, _| {}).expect("a link inside is fine");
        fs::remove_file(dir.path().join("model.safetensors")).expect("removable");
        symlink(other.path().join("weights"), dir.path().join("model.safetensors")).expect("linkable");
        for error in [
            mismatch(dir.path()),
            verify_for_load(dir.path(), false).expect_err("a link out").to_string(),
            seal(dir.path(), &|_, _| {}).expect_err("a link out").to_string(),
        ] {
            assert!(error.contains("leads out of the model folder"), "{error}");
        }
    }

    #[test]
    fn a_folder_without_manifest_is_taken_only_when_asked() {
        let dir = model();
        let error = verify_for_load(dir.path(), false).expect_err("unsealed").to_string();
        assert!(error.contains("ernie-ctl model seal"), "{error}");
        let taken = verify_for_load(dir.path(), true).expect("asked for");
        assert!(taken.revision().starts_with("unsealed-") && taken.manifest().is_none());
        // A manifest that is there counts, also then.
        seal(dir.path(), &|_, _| {}).expect("sealed");
        fs::write(dir.path().join("config.json"), "{ }").expect("writable");
        verify_for_load(dir.path(), true).expect_err("its manifest says otherwise");
        assert!(verify_for_load(Path::new("/nowhere/at/all"), true).is_err());
    }

    #[test]
    fn progress_ends_at_the_whole() {
        let dir = model();
        seal(dir.path(), &|_, _| {}).expect("sealed");
        let last = Mutex::new((0, 0));
        verify_all(dir.path(), &|done, total| *last.lock().expect("no panic") = (done, total)).expect("untouched");
        let (done, total) = *last.lock().expect("no panic");
        assert_eq!((done, total), (2 + 2 + 7 + 5, 16));
    }
}
