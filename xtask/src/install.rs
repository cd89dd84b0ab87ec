//! `cargo xtask install`: binaries, units, man pages, completions and an example configuration into a root, as a package
//! would. Nothing is enabled or started.

use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use xshell::{Shell, cmd};

/// Where things go.
#[derive(Debug)]
struct Places {
    root: PathBuf,
    prefix: PathBuf,
}

impl Places {
    fn under(&self, absolute: &Path) -> PathBuf {
        self.root.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    fn prefixed(&self, relative: &str) -> PathBuf {
        self.under(&self.prefix.join(relative))
    }
}

/// `--root DIR --prefix /usr --no-build --profile release`.
pub(crate) fn run(sh: &Shell, source: &Path, arguments: &[String]) -> Result<()> {
    let mut places = Places { root: PathBuf::from("/"), prefix: PathBuf::from("/usr") };
    let (mut build, mut profile) = (true, "release".to_owned());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--root" => places.root = PathBuf::from(value()?),
            "--prefix" => places.prefix = PathBuf::from(value()?),
            "--profile" => value()?.clone_into(&mut profile),
            "--no-build" => build = false,
            other => bail!(
                "unknown argument {other:?}; usage: cargo xtask install [--root DIR] [--prefix /usr] [--profile release] [--no-build]"
            ),
        }
    }
    if build {
        let cargo_profile = if profile == "debug" { "dev".to_owned() } else { profile.clone() };
        cmd!(sh, "cargo build --locked --profile {cargo_profile} -p ernied -p ernie-ctl --bins").run()?;
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| source.join("target"), PathBuf::from);
    let built = target.join(&profile);
    for name in ["ernied", "ernie-ctl"] {
        copy(&built.join(name), &places.prefixed(&format!("bin/{name}")), 0o755)?;
    }
    let bin = places.prefix.join("bin").display().to_string();
    for (name, to) in [
        ("ernied.service", "lib/systemd/system/ernied.service"),
        ("ernied.socket", "lib/systemd/system/ernied.socket"),
        ("ernied.sysusers", "lib/sysusers.d/ernied.conf"),
        ("ernied.tmpfiles", "lib/tmpfiles.d/ernied.conf"),
        ("ernied.8", "share/man/man8/ernied.8"),
    ] {
        let text = fs::read_to_string(source.join("systemd").join(name)).with_context(|| name.to_owned())?;
        write(&places.prefixed(to), &text.replace("/usr/bin", &bin), 0o644)?;
    }
    let config = places.under(Path::new("/etc/ernied/ernied.toml"));
    if config.exists() {
        println!("kept {}", config.display());
    } else {
        copy(&source.join("systemd/ernied.toml"), &config, 0o644)?;
    }
    let ernied = built.join("ernied");
    let ctl = built.join("ernie-ctl");
    let example = cmd!(sh, "{ernied} check-config --example").quiet().read()?;
    write(&places.prefixed("share/doc/ernied/ernied.toml.example"), &(example + "\n"), 0o644)?;
    let man = places.prefixed("share/man/man1");
    fs::create_dir_all(&man)?;
    cmd!(sh, "{ctl} man {man}").quiet().run()?;
    for (shell, to) in [
        ("bash", "share/bash-completion/completions/ernie-ctl"),
        ("zsh", "share/zsh/site-functions/_ernie-ctl"),
        ("fish", "share/fish/vendor_completions.d/ernie-ctl.fish"),
    ] {
        let script = cmd!(sh, "{ctl} completions {shell}").quiet().read()?;
        write(&places.prefixed(to), &(script + "\n"), 0o644)?;
    }
    println!("installed below {}", places.root.display());
    println!("next: systemd-sysusers && systemd-tmpfiles --create && systemctl enable --now ernied");
    Ok(())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
    // A running binary can not be written over, but replaced.
    let part = to.with_extension("part");
    fs::copy(from, &part).with_context(|| format!("{} is not there; build it first", from.display()))?;
    fs::set_permissions(&part, fs::Permissions::from_mode(mode))?;
    fs::rename(&part, to)?;
    Ok(())
}

fn write(to: &Path, text: &str, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
    fs::write(to, text).with_context(|| to.display().to_string())?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}
