//! Models and settings that change on disk: by `reload`, and by themselves with `--watch-model`.

use anyhow::{Context, Result, ensure};
use ernied_tests::models::{copy, revision, text};
use ernied_tests::{DaemonOptions, TestDaemon};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

async fn status(daemon: &TestDaemon) -> Result<Value> {
    let (code, out, errors) = daemon.ctl(&["status", "--json"]).await?;
    ensure!(code == 0, "{errors}");
    Ok(serde_json::from_str(&out)?)
}

async fn serves(daemon: &TestDaemon, dir: &Path) -> Result<()> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let now = status(daemon).await?;
        if now["model"]["dir"] == *text(dir) && now["rollout"]["phase"] == "steady" {
            return Ok(());
        }
        ensure!(
            tokio::time::Instant::now() < deadline,
            "{} does not come: {now:#}\n{}",
            dir.display(),
            daemon.log_text()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// How many rollouts have begun.
async fn rollouts(daemon: &TestDaemon) -> Result<usize> {
    let (_, rows, _) = daemon.ctl(&["audit", "list", "--act", "rollout", "-n", "1000", "--json"]).await?;
    let rows: Value = serde_json::from_str(&rows)?;
    Ok(rows["rows"].as_array().context("rows")?.iter().filter(|row| row["act"] == "rollout.began").count())
}

/// Points a link to another folder as an operator does it: by one rename.
fn point(link: &Path, to: &Path) -> Result<()> {
    let moving = link.with_extension("moving");
    symlink(to, &moving)?;
    Ok(fs::rename(moving, link)?)
}

fn config(at: &Path, model: &Path) -> Result<PathBuf> {
    let file = at.join("ernied.toml");
    let text = format!(
        "[model]\npath = \"{}\"\nserved_names = [\"ernie\"]\n[rollout]\nobserve = \"0s\"\n[logging]\nlevel = \"info\"\n",
        model.display()
    );
    fs::write(&file, text)?;
    Ok(file)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_rolls_out_what_the_configuration_names_now() -> Result<()> {
    let at = tempfile::tempdir()?;
    let (one, two, three) =
        (revision(at.path(), "r1").await?, revision(at.path(), "r2").await?, revision(at.path(), "r3").await?);
    let link = at.path().join("current");
    symlink(&one, &link)?;
    let file = config(at.path(), &link)?;
    let daemon = TestDaemon::start(DaemonOptions::default().flags(&["--config", &text(&file)])).await?;
    serves(&daemon, &one).await?;
    let (code, out, _) = daemon.ctl(&["reload"]).await?;
    assert!(code == 0 && out.contains("nothing has changed"), "{out}");

    point(&link, &two)?;
    let (code, out, errors) = daemon.ctl(&["reload"]).await?;
    assert!(code == 0 && out.contains("has begun"), "{out}{errors}");
    serves(&daemon, &two).await?;
    let (_, out, _) = daemon.ctl(&["reload"]).await?;
    assert!(out.contains("nothing has changed"), "{out}");

    // Another folder in the file.
    config(at.path(), &three)?;
    let (code, out, errors) = daemon.ctl(&["reload"]).await?;
    assert!(code == 0 && out.contains("model.path") && out.contains("has begun"), "{out}{errors}");
    serves(&daemon, &three).await?;

    let unsealed = copy(at.path(), "unsealed")?;
    config(at.path(), &unsealed)?;
    let (code, out, _) = daemon.ctl(&["reload"]).await?;
    assert!(code == 1 && out.contains("not sealed") && out.contains("ernie-ctl model seal"), "{out}");
    serves(&daemon, &three).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_revision_rolls_out_by_itself_when_it_is_complete_and_sealed() -> Result<()> {
    let at = tempfile::tempdir()?;
    let one = revision(at.path(), "r1").await?;
    let link = at.path().join("current");
    symlink(&one, &link)?;
    let file = config(at.path(), &link)?;
    let flags = ["--config", &text(&file), "--watch-model"];
    let daemon = TestDaemon::start(DaemonOptions::default().flags(&flags)).await?;
    serves(&daemon, &one).await?;

    // A link that is moved to a sealed folder.
    let two = revision(at.path(), "r2").await?;
    point(&link, &two)?;
    serves(&daemon, &two).await?;
    assert_eq!(rollouts(&daemon).await?, 1);

    // A link that is moved to a folder which is still being copied, manifest first: not before the last byte.
    let whole = revision(&at.path().canonicalize()?.join("staging"), "r3").await?;
    let three = at.path().canonicalize()?.join("r3");
    fs::create_dir(&three)?;
    fs::copy(whole.join("SHA256SUMS"), three.join("SHA256SUMS"))?;
    point(&link, &three)?;
    for name in ["config.json", "generation_config.json", "README.md", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(whole.join(name), three.join(name))?;
    }
    let weights = fs::read(whole.join("model.safetensors"))?;
    for part in 1..=4 {
        fs::write(three.join("model.safetensors"), &weights[..weights.len() * part / 5])?;
        // Long enough for the watcher to look at every piece; what it must not do has no event to wait for.
        tokio::time::sleep(Duration::from_millis(800)).await;
        assert_eq!(rollouts(&daemon).await?, 1, "after {part} fifths of the weights");
    }
    fs::write(three.join("model.safetensors"), &weights)?;
    serves(&daemon, &three).await?;
    assert_eq!(rollouts(&daemon).await?, 2);

    // A sealed folder that is renamed to the place that the configuration names.
    let four = revision(at.path(), "r4").await?;
    let place = at.path().canonicalize()?.join("place");
    config(at.path(), &place)?;
    fs::rename(&four, &place)?;
    serves(&daemon, &place).await?;

    // Another line in the file.
    let text_now = fs::read_to_string(&file)?.replace("level = \"info\"", "level = \"warn\"");
    fs::write(&file, text_now)?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let (_, out, _) = daemon.ctl(&["config", "show"]).await?;
        if out.lines().any(|l| l.contains("logging.level") && l.contains("warn")) {
            break;
        }
        ensure!(tokio::time::Instant::now() < deadline, "the file was not read again:\n{out}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
