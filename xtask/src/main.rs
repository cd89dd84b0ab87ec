//! `cargo xtask`: everything a developer or CI runs, in one place that needs cargo and nothing else.

mod arm;
mod check;
mod deb;
mod install;
mod tidy;
mod versus;

use anyhow::{Result, bail};
use std::path::PathBuf;
use xshell::Shell;

const USAGE: &str = "\
cargo xtask COMMAND

  test         build the binaries and run every test (README command 2)
  ci           test, plus fmt, clippy, tidy and deny: what .ci/run runs
  tidy         the import rules and other invariants of docs/architecture.md
  lint         fmt, clippy, tidy, deny
  arm          the kernels' tests for 64-bit Arm, compiled here and run by qemu; Debian packages, no root: --engine FILTER
  versus …     ernied against another server, interleaved; --help tells the options
  chaos …      swap: ten swaps under steady load; storm: 200 random sequences of swaps and kills; with figures
  install      binaries, units, man pages, completions: --root DIR --prefix /usr
  deb          the same as a Debian package, target/deb/ernied_*.deb: --profile release --no-build
  ab REV       interleave the engine benchmark of this tree and of REV, print the ratio
";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let sh = Shell::new()?;
    sh.change_dir(project_root());
    match command.as_str() {
        "test" => check::test(&sh),
        "ci" => {
            check::lint(&sh)?;
            check::test(&sh)
        }
        "lint" => check::lint(&sh),
        "tidy" => tidy::run(&project_root()),
        "arm" => arm::run(&sh, &project_root(), &rest),
        "versus" if rest.iter().any(|a| a == "--help") => {
            print!("{}", versus::USAGE);
            Ok(())
        }
        "versus" => versus::run(&sh, &rest),
        "chaos" => check::chaos(&sh, &rest),
        "install" => install::run(&sh, &project_root(), &rest),
        "deb" => deb::run(&sh, &project_root(), &rest),
        "ab" => check::ab(&sh, rest.first().map(String::as_str)),
        _ => {
            eprint!("{USAGE}");
            bail!("unknown command {command:?}")
        }
    }
}

/// The workspace root: the parent of this crate.
fn project_root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}
