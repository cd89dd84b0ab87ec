//! `model`: names of folders are the daemon's to keep; what looks at a folder or writes into it is done by `ernied model`,
//! which needs no daemon.

use crate::cli::ModelAct;
use crate::client::Admin;
use crate::output::{bytes, show, table};
use anyhow::{Context, Result, bail};
use ernie_proto::admin::{AddModel, Done, Models};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

pub(super) async fn run(admin: &Admin, json: bool, act: ModelAct) -> Result<ExitCode> {
    match act {
        ModelAct::Add { dir, name } => {
            let dir = dir.canonicalize().with_context(|| format!("model folder {}", dir.display()))?;
            let done: Done = admin.post("/v1/models/add", &AddModel { dir, name }).await?;
            show(json, &done, |d| format!("{}\n", d.message))?;
        }
        ModelAct::List => {
            let models: Models = admin.get("/v1/models").await?;
            show(json, &models, people)?;
        }
        ModelAct::Remove { name } => {
            let done: Done = admin.delete(&format!("/v1/models/{name}")).await?;
            show(json, &done, |d| format!("{}\n", d.message))?;
        }
        ModelAct::Inspect { dir, blocks } => {
            let blocks = blocks.map(|n| format!("--blocks={n}").into());
            return offline("inspect", &[dir], blocks.into_iter().collect(), json);
        }
        ModelAct::Seal { dir } => return offline("seal", &[dir], Vec::new(), json),
        ModelAct::Prepare { dir, out, quantization, dtype, calibrate } => {
            let quantization = quantization.map(|word| format!("--quantization={word}").into());
            let dtype = dtype.map(|word| format!("--dtype={word}").into());
            let calibrate = calibrate.map(|sample| [OsStr::new("--calibrate="), &sample].into_iter().collect());
            let options = [quantization, dtype, calibrate].into_iter().flatten().collect();
            return offline("prepare", &[dir, out], options, json);
        }
        ModelAct::Verify { dir } => return offline("verify", &[dir], Vec::new(), json),
    }
    Ok(ExitCode::SUCCESS)
}

fn people(models: &Models) -> String {
    let dash = || "-".to_owned();
    let rows = models.models.iter().map(|m| {
        let revision = m.revision.as_ref().map_or_else(|| "not readable".to_owned(), |r| r.chars().take(16).collect());
        vec![
            m.name.clone().unwrap_or_else(dash),
            if m.roles.is_empty() { dash() } else { m.roles.join(", ") },
            revision,
            if m.sealed { "sealed".to_owned() } else { "not sealed".to_owned() },
            bytes(m.bytes),
            m.dir.display().to_string(),
        ]
    });
    table(&["NAME", "ROLE", "REVISION", "SEAL", "SIZE", "FOLDER"], rows)
}

/// Becomes `ernied model VERB …`: the engine and the tokenizer live there, and its exit status is ours.
fn offline(verb: &str, folders: &[PathBuf], options: Vec<OsString>, json: bool) -> Result<ExitCode> {
    let program = ernied();
    #[allow(clippy::disallowed_methods, reason = "ctl becomes that program; the daemon's rule is about workers")]
    let mut command = Command::new(&program);
    command.arg("model").arg(verb).args(folders).args(options);
    if json {
        command.arg("--json");
    }
    let error = command.exec();
    if error.kind() == std::io::ErrorKind::NotFound {
        bail!(
            "{} is not there: this verb is done by ernied, which is looked for beside ernie-ctl and in PATH",
            program.display()
        );
    }
    Err(error).with_context(|| program.display().to_string())
}

/// The daemon's executable: beside this one, else whatever PATH has.
fn ernied() -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(|dir| dir.join("ernied"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("ernied"))
}
