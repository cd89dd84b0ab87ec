//! A short storm (`cargo xtask chaos storm` is the long one), and a worker that shouts.

use anyhow::Result;
use ernied_tests::{TestDaemon, storm};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SEED: u64 = 20_260_112;

#[tokio::test(flavor = "multi_thread")]
async fn after_any_sequence_of_swaps_and_kills_the_last_good_revision_serves() -> Result<()> {
    let report = storm::run(SEED, 8, 6, |_| {}).await?;
    assert_eq!(report.sequences, 8);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_floods_its_standard_error_blocks_nothing() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let pid = daemon.worker_pids()[0];
    // The worker's end of the pipe, opened from outside: what is written there is what the worker would write.
    let mut pipe = std::fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/fd/2"))?;
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let flood = std::thread::spawn({
        let (stop, written) = (Arc::clone(&stop), Arc::clone(&written));
        move || -> std::io::Result<()> {
            let lines = "a line of a worker that has lost its mind\n".repeat(1000);
            while !stop.load(Ordering::Relaxed) {
                pipe.write_all(lines.as_bytes())?;
                written.fetch_add(lines.len() as u64, Ordering::Relaxed);
            }
            // One line without an end, too.
            pipe.write_all(&vec![b'x'; 8 << 20])
        }
    });
    for i in 0..50 {
        let body = json!({"prompt": format!("User: {i}\nAssistant: "), "max_tokens": 16, "ignore_eos": true});
        let answer = daemon.client().post("/v1/completions", &body).await?;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    stop.store(true, Ordering::Relaxed);
    tokio::task::spawn_blocking(move || flood.join()).await?.expect("no panic")?;
    assert!(written.load(Ordering::Relaxed) > 0);
    assert_eq!(daemon.worker_pids(), [pid], "the worker was replaced");
    let resident = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid()))?;
    let kib = resident.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<u64>().ok());
    assert!(kib.is_some_and(|kib| kib < 1 << 20), "the daemon keeps what the worker wrote: {kib:?} KiB");
    Ok(())
}
