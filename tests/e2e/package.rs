//! The Debian package: `cargo xtask deb` makes it of the binaries at hand, and it holds what an installation needs.

use anyhow::{Context, Result, ensure};
use ernied_tests::binary;
use ernied_tests::prometheus::skipped;
use std::collections::BTreeMap;
use std::path::Path;
use tokio::process::Command;

const TEST: &str = "the_debian_package_holds_all_that_an_installation_needs";

async fn said(command: &mut Command) -> Result<String> {
    let output = command.output().await.with_context(|| format!("{:?}", command.as_std()))?;
    ensure!(output.status.success(), "{:?}: {}", command.as_std(), String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

#[tokio::test]
async fn the_debian_package_holds_all_that_an_installation_needs() -> Result<()> {
    if !Path::new("/usr/bin/dpkg-deb").exists() {
        skipped(TEST, &anyhow::anyhow!("/usr/bin/dpkg-deb is not there: not a Debian"));
        return Ok(());
    }
    // The package lands beside the binaries: in a target folder of our own that has theirs in it.
    let built = binary("ernied")?.parent().context("target folder")?.canonicalize()?;
    binary("ernie-ctl")?;
    let profile = built.file_name().and_then(|n| n.to_str()).context("profile")?.to_owned();
    let target = tempfile::tempdir()?;
    std::os::unix::fs::symlink(&built, target.path().join(&profile))?;
    said(
        Command::new(binary("xtask")?)
            .args(["deb", "--profile", &profile, "--no-build"])
            .env("CARGO_TARGET_DIR", target.path())
            // Debug binaries are large; how they are packed is not what is tested.
            .env("DPKG_DEB_COMPRESSOR_TYPE", "none"),
    )
    .await?;
    let folder = target.path().join("deb");
    let package = std::fs::read_dir(&folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("no package was made")?;

    let list = said(Command::new("dpkg-deb").arg("--contents").arg(&package)).await?;
    // mode, owner, size, day, time, path
    let files: BTreeMap<&str, (&str, &str)> = list
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            Some((words.get(5)?.strip_prefix('.')?, (*words.first()?, *words.get(1)?)))
        })
        .collect();
    for (path, mode) in [
        ("/usr/bin/ernied", "-rwxr-xr-x"),
        ("/usr/bin/ernie-ctl", "-rwxr-xr-x"),
        ("/usr/lib/systemd/system/ernied.service", "-rw-r--r--"),
        ("/usr/lib/systemd/system/ernied.socket", "-rw-r--r--"),
        ("/usr/lib/sysusers.d/ernied.conf", "-rw-r--r--"),
        ("/usr/lib/tmpfiles.d/ernied.conf", "-rw-r--r--"),
        ("/usr/share/man/man8/ernied.8", "-rw-r--r--"),
        ("/usr/share/man/man1/ernie-ctl.1", "-rw-r--r--"),
        ("/usr/share/man/man1/ernie-ctl-swap.1", "-rw-r--r--"),
        ("/usr/share/bash-completion/completions/ernie-ctl", "-rw-r--r--"),
        ("/usr/share/zsh/site-functions/_ernie-ctl", "-rw-r--r--"),
        ("/usr/share/fish/vendor_completions.d/ernie-ctl.fish", "-rw-r--r--"),
        ("/usr/share/doc/ernied/ernied.toml.example", "-rw-r--r--"),
        ("/etc/ernied/ernied.toml", "-rw-r--r--"),
    ] {
        let found = files.get(path);
        ensure!(found == Some(&(mode, "root/root")), "{path}: {found:?}, expected {mode} root/root\n{list}");
    }
    ensure!(!list.contains(".part"), "what was half written is in it:\n{list}");

    let control = target.path().join("control");
    said(Command::new("dpkg-deb").arg("--control").arg(&package).arg(&control)).await?;
    ensure!(std::fs::read_to_string(control.join("conffiles"))? == "/etc/ernied/ernied.toml\n");
    for script in ["postinst", "prerm", "postrm"] {
        said(Command::new("sh").arg("-n").arg(control.join(script))).await?;
    }
    let unpacked = target.path().join("unpacked");
    said(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&unpacked)).await?;
    let unit = std::fs::read_to_string(unpacked.join("usr/lib/systemd/system/ernied.service"))?;
    ensure!(unit.contains("ExecStart=/usr/bin/ernied"), "{unit}");
    // The configuration that it brings is one that its own daemon takes.
    let config = unpacked.join("etc/ernied/ernied.toml");
    said(Command::new(unpacked.join("usr/bin/ernied")).args(["check-config", "--config"]).arg(config)).await?;
    Ok(())
}
