//! `model seal`, `model verify`.

use super::report::{Progress, bytes, complain, show};
use crate::model_store::{self, Manifest};
use ernie_proto::model::Sealed;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

pub(super) fn seal(dir: &Path, json: bool) -> ExitCode {
    let began = Instant::now();
    let progress = Progress::new("hashed");
    let sealed = model_store::seal(dir, &|done, total| progress.at(done, total));
    match sealed {
        Ok(manifest) => {
            show(json, &told(dir, &manifest, began), |s| format!("sealed {}{}", s.dir.display(), figures(s)));
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error),
    }
}

pub(super) fn verify(dir: &Path, json: bool) -> ExitCode {
    let began = Instant::now();
    let progress = Progress::new("hashed");
    let verified = model_store::verify_all(dir, &|done, total| progress.at(done, total));
    match verified {
        Ok(model) => {
            let manifest = model.manifest().cloned().unwrap_or_default();
            let sealed = told(model.dir(), &manifest, began);
            show(json, &sealed, |s| format!("{} is what its manifest says{}", s.dir.display(), figures(s)));
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error),
    }
}

fn figures(s: &Sealed) -> String {
    format!(": {} files, {} in {:.1} s\nrevision {}\n", s.files, bytes(s.bytes), s.seconds, s.revision)
}

fn told(dir: &Path, manifest: &Manifest, began: Instant) -> Sealed {
    let sizes = manifest.files().filter_map(|(path, _)| Some(std::fs::metadata(dir.join(path)).ok()?.len()));
    Sealed {
        dir: dir.canonicalize().unwrap_or_else(|_| dir.to_owned()),
        revision: manifest.revision(),
        files: manifest.files().count() as u64,
        bytes: sizes.sum(),
        seconds: began.elapsed().as_secs_f64(),
    }
}
