//! `SHA256SUMS`: its text, its rules, the revision that it makes.

use ernie_proto::worker::FileDigest;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Component, Path, PathBuf};

/// Name of the manifest in a model folder.
pub const MANIFEST_FILE: &str = "SHA256SUMS";

/// No manifest of a model is longer; nothing longer is read.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// The digests that a model's files must have, by path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    files: BTreeMap<String, [u8; 32]>,
}

/// Why a manifest can not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("{} has no {MANIFEST_FILE}; write one with `ernie-ctl model seal {}`", dir.display(), dir.display())]
    Missing { dir: PathBuf },
    #[error("{} can not be read: {cause}", path.display())]
    Unreadable { path: PathBuf, cause: String },
    #[error("{MANIFEST_FILE} lists no file; seal the model again with `ernie-ctl model seal`")]
    Empty,
    #[error("{MANIFEST_FILE} line {line}: {cause}; seal the model again with `ernie-ctl model seal`")]
    Line { line: usize, cause: String },
}

impl Manifest {
    pub fn new(files: impl IntoIterator<Item = (String, [u8; 32])>) -> Self {
        Self { files: files.into_iter().collect() }
    }

    /// The manifest of a model folder.
    pub fn read(dir: &Path) -> Result<Self, ManifestError> {
        let path = dir.join(MANIFEST_FILE);
        let unreadable = |cause: String| ManifestError::Unreadable { path: path.clone(), cause };
        let size = match std::fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ManifestError::Missing { dir: dir.to_path_buf() });
            }
            Err(error) => return Err(unreadable(error.to_string())),
        };
        if size > MANIFEST_BYTES_MAX {
            return Err(unreadable(format!("it has {size} bytes, which no manifest has")));
        }
        Self::parse(&std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?)
    }

    /// Reads what `sha256sum` writes: 64 hex digits, a space, a space or `*`, a path.
    pub fn parse(text: &str) -> Result<Self, ManifestError> {
        let mut files = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let wrong = |cause: String| ManifestError::Line { line: index + 1, cause };
            let line = line.strip_suffix('\r').unwrap_or(line);
            if line.trim().is_empty() {
                continue;
            }
            let (digest, rest) = line.split_once(' ').ok_or_else(|| wrong("no path follows the digest".to_string()))?;
            let digest = parse_digest(digest).map_err(wrong)?;
            let path = rest.strip_prefix([' ', '*']).unwrap_or(rest);
            check_path(path).map_err(wrong)?;
            if files.insert(path.to_string(), digest).is_some_and(|other| other != digest) {
                return Err(wrong(format!("{path} is listed twice with different digests")));
            }
        }
        if files.is_empty() { Err(ManifestError::Empty) } else { Ok(Self { files }) }
    }

    /// As `sha256sum` would print it, sorted by path.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, digest) in &self.files {
            let _ = writeln!(text, "{}  {path}", hex(digest));
        }
        text
    }

    /// Names the model's content: the SHA-256 of the sorted manifest.
    pub fn revision(&self) -> String {
        hex(&Sha256::digest(self.to_text().as_bytes()))
    }

    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8; 32])> {
        self.files.iter().map(|(path, digest)| (path.as_str(), digest))
    }

    pub fn get(&self, path: &str) -> Option<&[u8; 32]> {
        self.files.get(path)
    }

    /// As it travels to a worker.
    pub fn to_wire(&self) -> Vec<FileDigest> {
        self.files.iter().map(|(path, sha256)| FileDigest { path: path.clone(), sha256: *sha256 }).collect()
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn parse_digest(text: &str) -> Result<[u8; 32], String> {
    let wrong = || format!("{:?} is not a SHA-256 digest of 64 hex digits", shortened(text));
    if text.len() != 64 || !text.is_ascii() {
        return Err(wrong());
    }
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
        // `from_str_radix` takes a sign; a digest has none.
        if !pair.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
    }
    Ok(digest)
}

/// A path may name files in the folder and nothing else.
fn check_path(path: &str) -> Result<(), String> {
    let shown = shortened(path);
    if path.is_empty() {
        return Err("no path follows the digest".to_string());
    }
    if path.chars().any(char::is_control) {
        return Err(format!("the path {shown:?} has a control character"));
    }
    if path == MANIFEST_FILE {
        return Err("a manifest can not list itself".to_string());
    }
    let inside = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    // `components` reads `a/./b` and `a//b` as `a/b`: two names for one file would be two entries.
    let plain = !path.split('/').any(|part| part.is_empty() || part == ".");
    if inside && plain { Ok(()) } else { Err(format!("the path {shown:?} leaves the model folder or is not plain")) }
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    #[test]
    fn what_sha256sum_writes_is_read_and_written_sorted() {
        let text = format!("{ZERO}  b.json\n{ZERO} *a/c.safetensors\r\n\n");
        let manifest = Manifest::parse(&text).expect("valid");
        assert_eq!(manifest.to_text(), format!("{ZERO}  a/c.safetensors\n{ZERO}  b.json\n"));
        assert_eq!(Manifest::parse(&manifest.to_text()), Ok(manifest));
    }

    #[test]
    fn the_revision_is_the_same_whatever_the_order_and_another_for_other_content() {
        let one = Manifest::parse(&format!("{ZERO}  a\n{ZERO}  b\n")).expect("valid").revision();
        let other = Manifest::parse(&format!("{ZERO}  b\n{ZERO}  a\n")).expect("valid").revision();
        assert_eq!(one, other);
        assert_eq!(one.len(), 64);
        let changed = ZERO.replacen('0', "1", 1);
        assert_ne!(one, Manifest::parse(&format!("{changed}  a\n{ZERO}  b\n")).expect("valid").revision());
    }

    #[test]
    fn wrong_lines_are_named_with_their_cause() {
        let short = &ZERO[1..];
        for (text, cause) in [
            (String::new(), "lists no file"),
            (ZERO.to_string(), "no path follows"),
            (format!("{ZERO}  "), "no path follows"),
            (format!("{short}  a"), "not a SHA-256 digest"),
            (format!("  {ZERO}  a"), "not a SHA-256 digest"),
            (format!("{}  a", ZERO.replacen("00", "+0", 1)), "not a SHA-256 digest"),
            (format!("{}  a", ZERO.replacen('0', "g", 1)), "not a SHA-256 digest"),
            (format!("\\{ZERO}  a\\nb"), "not a SHA-256 digest"),
            (format!("{ZERO}  /etc/passwd"), "leaves the model folder"),
            (format!("{ZERO}  ../other/model.safetensors"), "leaves the model folder"),
            (format!("{ZERO}  a/../../b"), "leaves the model folder"),
            (format!("{ZERO}  ./a"), "not plain"),
            (format!("{ZERO}  a//b"), "not plain"),
            (format!("{ZERO}  a\u{1}b"), "control character"),
            (format!("{ZERO}  SHA256SUMS"), "can not list itself"),
            (format!("{ZERO}  a\n{}  a", ZERO.replacen('0', "1", 1)), "line 2: a is listed twice"),
        ] {
            let error = Manifest::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(cause), "{text:?}: {error}");
        }
    }
}
