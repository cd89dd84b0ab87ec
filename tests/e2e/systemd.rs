//! The unit under a real systemd: `systemd/walk.sh` in a private one that `systemd/sandbox.sh` boots.

use anyhow::{Context, Result, ensure};
use ernied_tests::binary;
use ernied_tests::prometheus::skipped;
use std::path::Path;
use tokio::process::Command;

const TEST: &str = "the_unit_lives_as_it_should_under_a_real_systemd";

/// The walk takes about a minute; a busy two-core machine may need many times that.
const SECONDS: &str = "300";

/// Why the walk can not be made here.
fn hindrance() -> Option<anyhow::Error> {
    if !rustix::process::geteuid().is_root() {
        return Some(anyhow::anyhow!("it boots a private systemd, which takes root"));
    }
    for program in ["/lib/systemd/systemd", "/usr/bin/systemd-analyze", "/usr/bin/unshare", "/usr/bin/curl"] {
        if !Path::new(program).exists() {
            return Some(anyhow::anyhow!("{program} is not there (apt-get install systemd curl)"));
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn the_unit_lives_as_it_should_under_a_real_systemd() -> Result<()> {
    if let Some(reason) = hindrance() {
        skipped(TEST, &reason);
        return Ok(());
    }
    let systemd = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd").canonicalize()?;
    let source = systemd.parent().context("the source tree")?;
    let bin = binary("ernied")?.parent().context("target folder")?.canonicalize()?;
    let target = bin.parent().context("target folder")?;
    binary("ernie-ctl")?;
    binary("xtask")?;
    // Loopback is shared with the sandbox, so the port has to be free here.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let bind = |path: &Path| format!("{0}:{0}", path.display());
    let output = Command::new(systemd.join("sandbox.sh"))
        .args(["-t", SECONDS, "-b", &bind(source), "-b", &bind(target), "--"])
        .arg(systemd.join("walk.sh"))
        .arg(&bin)
        .arg(port)
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(125) {
        // No namespaces, no overlay: a container that may not. Said by the sandbox before anything of ours ran.
        skipped(TEST, &anyhow::anyhow!("{}", errors.trim()));
        return Ok(());
    }
    println!("{text}");
    ensure!(output.status.success(), "{:?}\n{text}\n{errors}", output.status);
    ensure!(text.matches("\nok ").count() + usize::from(text.starts_with("ok ")) >= 17, "steps are missing:\n{text}");
    Ok(())
}
