//! `logs show | level | rotate | tail`.

use crate::cli::LogsAct;
use crate::client::Admin;
use crate::output::{print, show};
use anyhow::{Context, Result, bail};
use ernie_proto::admin::{Done, LogLevel, LogState};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// How often a followed file is looked at.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);
/// Read from the end for `tail`; the lines wanted lie in it or are cut.
const TAIL_BYTES_MAX: u64 = 4 << 20;

pub(super) async fn run(admin: &Admin, json: bool, act: LogsAct) -> Result<()> {
    match act {
        LogsAct::Show => {
            let state: LogState = admin.get("/v1/logs").await?;
            show(json, &state, |s| {
                let file =
                    s.file.as_ref().map_or_else(|| "standard output only".to_owned(), |f| f.display().to_string());
                format!("level {}\nfile {file}\nlines dropped {}\n", s.level, s.lines_dropped)
            })
        }
        LogsAct::Level { level } => {
            let done: Done = admin.post("/v1/logs/level", &LogLevel { level }).await?;
            show(json, &done, |d| format!("{}\n", d.message))
        }
        LogsAct::Rotate => {
            let done: Done = admin.post("/v1/logs/rotate", &serde_json::json!({})).await?;
            show(json, &done, |d| format!("{}\n", d.message))
        }
        LogsAct::Tail { lines, follow } => {
            let state: LogState = admin.get("/v1/logs").await?;
            let Some(path) = state.file else {
                bail!("there is no log file, only standard output; under systemd: journalctl -u ernied -n {lines}");
            };
            tail(&path, lines, follow).await
        }
    }
}

async fn tail(path: &Path, lines: usize, follow: bool) -> Result<()> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES_MAX)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    for line in &all[all.len().saturating_sub(lines)..] {
        print(&format!("{line}\n"))?;
    }
    let mut inode = file.metadata()?.ino();
    if !follow {
        return Ok(());
    }
    loop {
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        let mut more = Vec::new();
        file.read_to_end(&mut more)?;
        if !more.is_empty() {
            print(&String::from_utf8_lossy(&more))?;
        }
        // After a rotation the name belongs to a new file; the rest of the old one was read above.
        if let Ok(meta) = std::fs::metadata(path)
            && meta.ino() != inode
        {
            let mut rest = Vec::new();
            file.read_to_end(&mut rest)?;
            print(&String::from_utf8_lossy(&rest))?;
            file = File::open(path).with_context(|| path.display().to_string())?;
            inode = file.metadata()?.ino();
        }
    }
}
