//! `cargo xtask chaos`: the long versions of what the end-to-end tests do briefly, with figures.
//!
//! `chaos swap [--swaps 10] [--observe 5s] [--rate 50]`: swaps between two revisions of the demo model under steady load.
//! `chaos storm [--sequences 200] [--acts 6] [--seed 1]`: random sequences of swaps, rollbacks and kills.

use anyhow::{Context, Result, bail, ensure};
use ernied_tests::models::{revision, text};
use ernied_tests::{DaemonOptions, TestDaemon, binary, storm};
use std::collections::HashMap;
use std::time::Instant;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    match what.as_str() {
        "swap" => swap(&rest).await,
        "storm" => {
            let options = options(&rest)?;
            let number = |name: &str, default: u64| -> Result<u64> {
                options.get(name).map_or(Ok(default), |text| text.parse().with_context(|| format!("--{name} {text}")))
            };
            storm(number("seed", 1)?, number("sequences", 200)?, number("acts", 6)?).await
        }
        _ => bail!(
            "chaos swap [options of `ernie-ctl bench --profile swap`] | storm [--sequences N] [--acts N] [--seed N]"
        ),
    }
}

fn options(words: &[String]) -> Result<HashMap<String, String>> {
    words
        .chunks(2)
        .map(|pair| match pair {
            [name, value] if name.starts_with("--") => Ok((name[2..].to_owned(), value.clone())),
            _ => bail!("options are --name value, not {pair:?}"),
        })
        .collect()
}

async fn swap(more: &[String]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (one, two) = (revision(folder.path(), "r1").await?, revision(folder.path(), "r2").await?);
    let options = DaemonOptions { model: Some(one.clone()), ..DaemonOptions::default() };
    let flags = ["--served-model-name", "ernie", "--log-requests=false"];
    let daemon = TestDaemon::start(options.flags(&flags)).await?;
    let models = format!("{},{}", text(&two), text(&one));
    let status = tokio::process::Command::new(binary("ernie-ctl")?)
        .arg("--socket")
        .arg(&daemon.socket)
        .args(["bench", "--profile", "swap", "--models", &models])
        .args(more)
        .status()
        .await?;
    ensure!(status.success(), "a promise was broken; the daemon said:\n{}", daemon.log_text());
    Ok(())
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "its output is what the command is for")]
async fn storm(seed: u64, sequences: u64, acts: u64) -> Result<()> {
    let began = Instant::now();
    let sequences = u32::try_from(sequences)?;
    let report = storm::run(seed, sequences, acts, |number| {
        if number % 20 == 0 {
            eprintln!("{number} of {sequences} sequences, {:.0} s", began.elapsed().as_secs_f64());
        }
    })
    .await?;
    println!(
        "seed {seed}: {} sequences in {:.0} s: {} swaps, {} rollbacks, {} workers and {} daemons killed, {} acts refused\n\
         after each: one worker, no process left over, the last good revision serving\n\
         memory of daemon and worker: {:.1} MiB at the beginning, {:.1} MiB at the end",
        report.sequences,
        began.elapsed().as_secs_f64(),
        report.swaps,
        report.rollbacks,
        report.workers_killed,
        report.daemons_killed,
        report.refused,
        report.memory_base as f64 / f64::from(1 << 20),
        report.memory_end as f64 / f64::from(1 << 20),
    );
    Ok(())
}
