//! `model prepare`: a second folder with the weights in kernel layout, sealed; its load packs nothing.

use super::report::{Progress, bytes, complain, show};
use super::{Calibrate, Wish};
use crate::model_store::{self, VerifyError};
use crate::text::tokenizer::Tokenizer;
use crate::worker::folder::{self, PrepareForm, Preparing, Sample};
use ernie_proto::model::Prepared;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(super) fn run(dir: &Path, out: &Path, wish: &Wish, json: bool) -> ExitCode {
    match prepare(dir, out, wish) {
        Ok(prepared) => {
            show(json, &prepared, |p| {
                format!(
                    "prepared {}: {} of {} weights, sealed\nrevision {}\n",
                    p.dir.display(),
                    bytes(p.bytes),
                    p.weights,
                    p.revision
                )
            });
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error),
    }
}

/// Why it was not prepared. Nothing is left under the name that was asked for.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("{} is there already; name a folder that is not, or remove it", path.display())]
    Taken { path: PathBuf },
    #[error("{}: {source}; check space and permissions", path.display())]
    Disk { path: PathBuf, source: std::io::Error },
    #[error("{0}")]
    Engine(String),
}

fn prepare(dir: &Path, out: &Path, wish: &Wish) -> Result<Prepared, PrepareError> {
    if fs::symlink_metadata(out).is_ok() {
        return Err(PrepareError::Taken { path: out.to_owned() });
    }
    let sample = wish.calibrate.as_ref().map(|calibrate| sample(dir, calibrate)).transpose()?;
    let form = PrepareForm { dtype: wish.dtype, quantization: wish.quantization, calibrate: sample };
    // A sealed folder has to be what its manifest says; one that is not is taken as it is, as by `serve`.
    let verified = model_store::verify_for_load(dir, true)?;
    let manifest = verified.manifest().map(|manifest| manifest.to_wire());
    let name = out.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    // Under another name until it is whole: a copy cut short is never taken for a model.
    let part = parent.join(format!(".{name}.preparing"));
    let disk = |source| PrepareError::Disk { path: part.clone(), source };
    if part.exists() {
        fs::remove_dir_all(&part).map_err(disk)?;
    }
    fs::create_dir(&part).map_err(disk)?;
    let written = fill(verified.dir(), &part, &form, manifest.as_deref());
    let (revision, weights, bytes) = match written {
        Ok(written) => written,
        Err(error) => {
            // Best effort: the error that matters is told.
            let _ = fs::remove_dir_all(&part);
            return Err(error);
        }
    };
    fs::rename(&part, out).and_then(|()| File::open(&parent)?.sync_all()).map_err(disk)?;
    Ok(Prepared { dir: out.canonicalize().unwrap_or_else(|_| out.to_owned()), revision, weights, bytes })
}

fn sample(dir: &Path, calibrate: &Calibrate) -> Result<Sample, PrepareError> {
    match calibrate {
        Calibrate::Own { tokens } => Ok(Sample::Own { tokens: *tokens }),
        Calibrate::Text(file) => {
            let text =
                fs::read_to_string(file).map_err(|e| PrepareError::Engine(format!("{}: {e}", file.display())))?;
            let ids = Tokenizer::load(dir).and_then(|tokenizer| tokenizer.encode(&text, false));
            ids.map(Sample::Ids).map_err(|error| PrepareError::Engine(error.to_string()))
        }
    }
}

fn fill(
    dir: &Path,
    part: &Path,
    form: &PrepareForm,
    manifest: Option<&[ernie_proto::worker::FileDigest]>,
) -> Result<(String, String, u64), PrepareError> {
    model_store::copy_text_side(dir, part)?;
    let (writing, packing) = (Progress::tokens("sample written"), Progress::new("packed"));
    let mut progress = |at| match at {
        Preparing::Writing { done, total } => writing.at(done, total),
        Preparing::Packing { done, total } => packing.at(done, total),
    };
    let (weights, bytes) = folder::prepare(dir, part, form, manifest, &mut progress).map_err(PrepareError::Engine)?;
    let hashing = Progress::new("hashed");
    let manifest = model_store::seal(part, &|done, total| hashing.at(done, total))?;
    Ok((manifest.revision(), weights, bytes))
}
