//! The demo model: part of the executable, unpacked into the state directory when it is asked for.

use crate::audit::hex;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

/// Name and bytes of every file.
const FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../../demo/config.json")),
    ("generation_config.json", include_bytes!("../../demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../../demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo/tokenizer_config.json")),
    ("SHA256SUMS", include_bytes!("../../demo/SHA256SUMS")),
];

/// The demo model can not be unpacked.
#[derive(Debug, thiserror::Error)]
#[error("the demo model can not be unpacked to {path}: {source}; check space and permissions, or give --state-dir DIR")]
pub(super) struct UnpackError {
    path: PathBuf,
    source: io::Error,
}

/// Puts the files into `state_dir/demo-model/<digest>` unless they are there already, and answers with that folder. The
/// digest in the path makes an upgraded daemon use its own demo model, whatever an older one left.
pub(super) fn unpack(state_dir: &Path) -> Result<PathBuf, UnpackError> {
    let dir = state_dir.join("demo-model").join(&digest()[..16]);
    let fail = |path: &Path, source| UnpackError { path: path.to_owned(), source };
    std::fs::create_dir_all(&dir).map_err(|e| fail(&dir, e))?;
    for (name, bytes) in files() {
        let path = dir.join(name);
        if std::fs::metadata(&path).is_ok_and(|m| m.len() == bytes.len() as u64) {
            continue;
        }
        // Renamed into place, so that an interrupted start leaves no half file under the name.
        let part = dir.join(format!("{name}.part"));
        std::fs::write(&part, &bytes).and_then(|()| std::fs::rename(&part, &path)).map_err(|e| fail(&path, e))?;
    }
    Ok(dir)
}

/// What is unpacked: the manifest without the lines of files that are not part of the executable (the model's questions).
fn files() -> impl Iterator<Item = (&'static str, Cow<'static, [u8]>)> {
    FILES.iter().map(|&(name, bytes)| match (name, std::str::from_utf8(bytes)) {
        ("SHA256SUMS", Ok(text)) => {
            let ours = |line: &&str| FILES.iter().any(|(n, _)| line.ends_with(&format!(" {n}")));
            let lines: String = text.lines().filter(ours).map(|l| format!("{l}\n")).collect();
            (name, Cow::Owned(lines.into_bytes()))
        }
        _ => (name, Cow::Borrowed(bytes)),
    })
}

/// SHA-256 over all files, in hex.
fn digest() -> String {
    let mut hash = Sha256::new();
    for (name, bytes) in FILES {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hex(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_unpacks_once_and_mends_a_cut_file() {
        let dir = tempfile::tempdir().expect("temp");
        let model = unpack(dir.path()).expect("unpacked");
        let weights = model.join("model.safetensors");
        let whole = std::fs::read(&weights).expect("there");
        std::fs::write(&weights, b"cut").expect("cut");
        assert_eq!(unpack(dir.path()).expect("again"), model);
        assert_eq!(std::fs::read(&weights).expect("there"), whole);
        crate::model_store::verify_all(&model, &|_, _| {}).expect("as its manifest says");
    }

    #[test]
    fn the_demo_models_files_are_those_of_its_manifest() {
        let sums = std::str::from_utf8(FILES.last().expect("files").1).expect("text");
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").expect("sha256sum's format");
            if let Some((_, bytes)) = FILES.iter().find(|(n, _)| *n == name.trim_start_matches("./")) {
                assert_eq!(hex(&Sha256::digest(bytes)), sum, "{name}");
            }
        }
    }
}
