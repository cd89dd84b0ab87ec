//! `cargo xtask deb`: what `install` puts into place, as a Debian package.
//!
//! Made with dpkg-deb, which every Debian has, from the same tree that `install` makes, so that the two can not differ.

use crate::install;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use xshell::{Shell, cmd};

/// After unpacking: the user, the folders; a running daemon is restarted only by who decides to.
const POSTINST: &str = "#!/bin/sh
set -e
if [ \"$1\" = configure ]; then
    systemd-sysusers ernied.conf || true
    systemd-tmpfiles --create ernied.conf || true
    chgrp ernied /etc/ernied/ernied.toml 2>/dev/null && chmod 640 /etc/ernied/ernied.toml || true
    [ -d /run/systemd/system ] && systemctl daemon-reload || true
fi
";

const PRERM: &str = "#!/bin/sh
set -e
if [ \"$1\" = remove ] && [ -d /run/systemd/system ]; then
    systemctl stop ernied.socket ernied.service || true
fi
";

/// systemd forgets the units; folders with state, logs and configuration stay until the package is purged.
const POSTRM: &str = "#!/bin/sh
set -e
[ -d /run/systemd/system ] && systemctl daemon-reload || true
if [ \"$1\" = purge ]; then
    rm -rf /etc/ernied /var/lib/ernied /var/log/ernied
fi
";

/// `--profile release --no-build`.
pub(crate) fn run(sh: &Shell, source: &Path, arguments: &[String]) -> Result<()> {
    if let Some(bad) = arguments.iter().find(|a| a.starts_with("--root") || a.starts_with("--prefix")) {
        bail!("{bad} is chosen by the package; usage: cargo xtask deb [--profile release] [--no-build]");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| source.join("target"), Into::into);
    let folder = target.join("deb");
    let root = folder.join("root");
    sh.remove_path(&root)?;
    fs::create_dir_all(&root)?;
    let place = root.display().to_string();
    let mut install_arguments = vec!["--root".to_owned(), place, "--prefix".to_owned(), "/usr".to_owned()];
    install_arguments.extend_from_slice(arguments);
    install::run(sh, source, &install_arguments)?;

    let architecture = cmd!(sh, "dpkg --print-architecture").read().context("a Debian package is made on Debian")?;
    let version = env!("CARGO_PKG_VERSION");
    let control = root.join("DEBIAN");
    fs::create_dir_all(&control)?;
    fs::write(control.join("control"), control_file(version, &architecture, &libc(sh), kibibytes(&root)?))?;
    fs::write(control.join("conffiles"), "/etc/ernied/ernied.toml\n")?;
    for (name, script) in [("postinst", POSTINST), ("prerm", PRERM), ("postrm", POSTRM)] {
        fs::write(control.join(name), script)?;
        fs::set_permissions(control.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let package = folder.join(format!("ernied_{version}_{architecture}.deb"));
    cmd!(sh, "dpkg-deb --root-owner-group --build {root} {package}").run()?;
    println!("{}", package.display());
    Ok(())
}

/// What is linked here does not start with an older C library than the one here.
fn libc(sh: &Shell) -> String {
    let format = "${Version}";
    let version = cmd!(sh, "dpkg-query --show --showformat={format} libc6").quiet().ignore_stderr().read();
    let upstream = version.ok().and_then(|v| v.split(['-', '+']).next().map(str::to_owned)).filter(|v| !v.is_empty());
    upstream.map_or_else(|| "libc6".to_owned(), |v| format!("libc6 (>= {v})"))
}

fn control_file(version: &str, architecture: &str, libc: &str, kibibytes: u64) -> String {
    format!(
        "Package: ernied
Version: {version}
Architecture: {architecture}
Maintainer: the ernied project <ernied@localhost>
Installed-Size: {kibibytes}
Depends: {libc}, libgcc-s1, libstdc++6, systemd
Section: net
Priority: optional
Description: serves ERNIE-4.5 models on CPUs
 An OpenAI-compatible API with supervised engine workers, verified hot swaps of
 the model, API keys and limits, an audit store and metrics; ernie-ctl looks
 after it.
"
    )
}

fn kibibytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { kibibytes(&entry.path())? * 1024 } else { entry.metadata()?.len() };
    }
    Ok(bytes.div_ceil(1024))
}
