//! The official OpenAI Python client against the real binary, in a virtual environment of pinned packages.

use anyhow::{Context, Result, ensure};
use ernied_tests::TestDaemon;
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// The environment lives in the target folder and is made once; a change of the pins makes a new one.
async fn environment() -> Result<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python");
    let pins = std::fs::read_to_string(here.join("requirements.txt"))?;
    let root = ernied_tests::binary("ernied")?;
    let venv = root.parent().context("target folder")?.join("python-env");
    let stamp = venv.join("pins.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == pins) {
        return Ok(venv);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).await?;
    run(Command::new(venv.join("bin/pip"))
        .args(["install", "-q", "--disable-pip-version-check", "-r"])
        .arg(here.join("requirements.txt")))
    .await?;
    std::fs::write(&stamp, pins)?;
    Ok(venv)
}

async fn run(command: &mut Command) -> Result<()> {
    let output = command.output().await?;
    ensure!(
        output.status.success(),
        "{:?}\n{}\n{}",
        command.as_std(),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_client_chats_and_streams() -> Result<()> {
    let environment = environment().await?;
    let daemon = TestDaemon::demo().await?;
    run(Command::new(environment.join("bin/python")).arg(script("openai_client.py")).arg(daemon.url())).await
}
