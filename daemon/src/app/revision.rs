//! Names what is served: the digest of a model folder's manifest, or a stand-in when it has none.

use crate::audit::hex;
use sha2::{Digest, Sha256};
use std::path::Path;

/// `sha256:<digest of the manifest>`, or `unsealed:<digest of names, sizes and config>`.
pub(super) fn of(dir: &Path) -> String {
    for manifest in ["ernie-manifest.json", "SHA256SUMS"] {
        if let Ok(bytes) = std::fs::read(dir.join(manifest)) {
            return format!("sha256:{}", hex(&Sha256::digest(&bytes)));
        }
    }
    let mut files: Vec<(String, u64, u128)> = std::fs::read_dir(dir)
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|e| {
                    let meta = std::fs::metadata(e.path()).ok().filter(std::fs::Metadata::is_file)?;
                    let modified = meta.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?.as_nanos();
                    Some((e.file_name().to_string_lossy().into_owned(), meta.len(), modified))
                })
                .collect()
        })
        .unwrap_or_default();
    files.sort();
    let mut hash = Sha256::new();
    for (name, length, modified) in &files {
        hash.update(format!("{name}\0{length}\0{modified}\0"));
    }
    hash.update(std::fs::read(dir.join("config.json")).unwrap_or_default());
    format!("unsealed:{}", hex(&hash.finalize()))
}
