//! Administrative acts while the daemon is killed at random moments: the chain of the audit store stays whole, and at most
//! the act in flight is left without an end.
//!
//! A short run is part of the suite; `ERNIED_TEST_ACTS=10000 cargo test -p ernied-tests --test e2e -- acts_survive` is the
//! long one (about ten minutes), `ERNIED_TEST_SEED` repeats a run.

use anyhow::{Result, ensure};
use ernied_tests::client::{unix_get, unix_post};
use ernied_tests::storm::Dice;
use ernied_tests::{DaemonOptions, TestDaemon};
use serde_json::json;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Acts of the short run; one kill comes per this many at the least.
const ACTS: u64 = 400;
const ACTS_PER_KILL: u64 = 130;
const PATIENCE: Duration = Duration::from_secs(60);

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// The control plane answers long before the model is loaded.
async fn answers(socket: &Path) -> Result<()> {
    let since = Instant::now();
    while !unix_get(socket, "/v1/status").await.is_ok_and(|r| r.status == 200) {
        ensure!(since.elapsed() < PATIENCE, "the admin socket does not answer");
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn acts_survive_kills_of_the_daemon_with_an_unbroken_chain() -> Result<()> {
    let wanted = number("ERNIED_TEST_ACTS", ACTS);
    let seed = number("ERNIED_TEST_SEED", 1);
    println!("seed {seed}");
    let mut dice = Dice::new(seed);
    let mut daemon = TestDaemon::spawn(DaemonOptions::default().flags(&["--log-level", "error"])).await?;
    answers(&daemon.socket).await?;
    let (mut done, mut kills) = (0, 0);
    while done < wanted {
        // Until a moment that is drawn: within an act, or between two.
        let moment = Duration::from_micros(dice.below(1_500_000));
        let socket = daemon.socket.clone();
        let acting = tokio::spawn(async move {
            let mut done = 0u64;
            for n in 0.. {
                let level = ["error", "error,ernied=error"][n % 2];
                let answer = unix_post(&socket, "/v1/logs/level", &json!({ "level": level })).await;
                match answer {
                    Ok(answer) if answer.status == 200 => done += 1,
                    // Struck: the daemon is gone.
                    _ => break,
                }
                if done >= ACTS_PER_KILL * 2 {
                    break;
                }
            }
            done
        });
        sleep(moment).await;
        daemon.respawn().await?;
        kills += 1;
        done += acting.await?;
        answers(&daemon.socket).await?;
        let verdict = unix_get(&daemon.socket, "/v1/audit/verify").await?.json()?;
        ensure!(verdict["intact"] == true, "after {done} acts and {kills} kills: {verdict}");
        let unfinished = verdict["unfinished"].as_array().map_or(0, Vec::len);
        ensure!(unfinished <= kills, "{unfinished} acts without an end after {kills} kills: {verdict}");
        // Two rows per act that was answered, whatever came besides.
        let rows = verdict["rows"].as_u64().unwrap_or_default();
        ensure!(rows >= 2 * done, "{rows} rows for {done} acts: an act that was answered is gone");
    }
    println!("{done} acts, {kills} kills");
    ensure!(kills >= 1, "nothing was killed");
    Ok(())
}
