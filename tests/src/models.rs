//! Model folders for tests: revisions of the demo model, and what can be wrong with one.

use crate::daemon::ctl;
use crate::demo::demo_dir;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Files of the demo model that belong to a folder; its manifest is made anew.
const FILES: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// A copy of the demo model that is another revision: its README says `note`. Not sealed.
pub fn copy(parent: &Path, note: &str) -> Result<PathBuf> {
    let dir = parent.join(note);
    fs::create_dir_all(&dir)?;
    for file in FILES {
        fs::copy(demo_dir().join(file), dir.join(file)).with_context(|| file.to_owned())?;
    }
    fs::write(dir.join("README.md"), note)?;
    Ok(dir.canonicalize()?)
}

/// As [`copy`], sealed by `ernie-ctl model seal`.
pub async fn revision(parent: &Path, note: &str) -> Result<PathBuf> {
    let dir = copy(parent, note)?;
    seal(&dir).await?;
    Ok(dir)
}

/// Seals a folder; gives its revision.
pub async fn seal(dir: &Path) -> Result<String> {
    let (code, out, errors) = ctl(Path::new("/nonexistent"), &["model", "seal", "--json", &text(dir)]).await?;
    ensure!(code == 0, "{out}{errors}");
    let sealed: Value = serde_json::from_str(&out)?;
    Ok(sealed["revision"].as_str().context("a revision")?.to_owned())
}

pub fn text(dir: &Path) -> String {
    dir.display().to_string()
}

/// Where a tensor's bytes lie in `model.safetensors`.
pub fn tensor(dir: &Path, name: &str) -> Result<std::ops::Range<usize>> {
    let bytes = fs::read(dir.join("model.safetensors"))?;
    let header = u64::from_le_bytes(*bytes.first_chunk().context("a header")?) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header])?;
    let at = |i: usize| table[name]["data_offsets"][i].as_u64().map(|n| n as usize + 8 + header);
    Ok(at(0).with_context(|| name.to_owned())?..at(1).context("an end")?)
}

/// Changes bytes of a file in place.
pub fn poke(file: &Path, change: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
    let mut bytes = fs::read(file)?;
    change(&mut bytes);
    Ok(fs::write(file, bytes)?)
}

/// A copy, not sealed, whose router in `layer` gives no numbers.
pub fn with_broken_router(parent: &Path, layer: usize) -> Result<PathBuf> {
    let dir = copy(parent, "broken-router")?;
    let range = tensor(&dir, &format!("model.layers.{layer}.mlp.gate.weight"))?;
    poke(&dir.join("model.safetensors"), |bytes| {
        for value in bytes[range].chunks_exact_mut(4) {
            value.copy_from_slice(&f32::NAN.to_le_bytes());
        }
    })?;
    Ok(dir)
}
