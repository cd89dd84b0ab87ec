//! Workers that die or hang under load, clients that hang up, queues that fill: all caused from outside.

use anyhow::{Context, Result};
use ernied_tests::{Client, DaemonOptions, TestDaemon};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::mpsc;

/// Streams in flight while a worker is struck: the long ones, and the many.
const STREAMS: usize = 50;
const STREAMS_MANY: usize = 200;

fn long_request(i: usize) -> Value {
    let greedy = i.is_multiple_of(2);
    json!({
        "prompt": format!("User: question number {i}, please tell me everything about swap and rollback\nAssistant: "),
        "max_tokens": 160, "ignore_eos": true, "stream": true, "return_token_ids": true,
        "temperature": if greedy { 0.0 } else { 0.8 }, "seed": i,
    })
}

/// Runs every stream; `on_token` hears of each event so that the test can strike in the middle.
async fn run_streams(client: &Client, count: usize, on_token: mpsc::Sender<()>) -> Result<Vec<Vec<u64>>> {
    let mut tasks = Vec::new();
    for i in 0..count {
        let (client, on_token) = (client.clone(), on_token.clone());
        tasks.push(tokio::spawn(async move {
            let mut stream = client.stream("/v1/completions", &long_request(i)).await?;
            let mut ids = Vec::new();
            while let Some(event) = stream.next().await? {
                anyhow::ensure!(event.get("error").is_none(), "stream {i}: {event}");
                if let Some(new) = event["choices"][0]["token_ids"].as_array() {
                    ids.extend(new.iter().filter_map(Value::as_u64));
                }
                let _ = on_token.try_send(());
            }
            anyhow::Ok(ids)
        }));
    }
    drop(on_token);
    let mut all = Vec::new();
    for (i, task) in tasks.into_iter().enumerate() {
        all.push(task.await?.with_context(|| format!("stream {i}"))?);
    }
    Ok(all)
}

/// Strikes the worker with `signal` after each of `after` events, and returns what the streams brought.
async fn struck(daemon: &TestDaemon, count: usize, signal: Signal, after: &[usize]) -> Result<Vec<Vec<u64>>> {
    let (sender, mut events) = mpsc::channel(4096);
    let client = daemon.client();
    let streams = tokio::spawn(async move { run_streams(&client, count, sender).await });
    let mut seen = 0;
    for &strike in after {
        while seen < strike && events.recv().await.is_some() {
            seen += 1;
        }
        let pids = daemon.worker_pids();
        assert!(!pids.is_empty(), "no worker to strike after {seen} events");
        for pid in pids {
            ernied_tests::daemon::send_signal(pid, signal)?;
        }
    }
    events.close();
    streams.await?
}

async fn undisturbed(daemon: &TestDaemon, count: usize) -> Result<Vec<Vec<u64>>> {
    let (sender, events) = mpsc::channel(1);
    drop(events);
    run_streams(&daemon.client(), count, sender).await
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_survive_two_kills_of_their_worker_without_a_changed_token() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let calm = undisturbed(&daemon, STREAMS_MANY).await?;
    let stormy = struck(&daemon, STREAMS_MANY, Signal::KILL, &[2000, 12000]).await?;
    assert_eq!(stormy.len(), STREAMS_MANY);
    for (i, (a, b)) in calm.iter().zip(&stormy).enumerate() {
        assert_eq!(a.len(), 160, "stream {i}");
        assert_eq!(a, b, "stream {i} differs after its worker was killed");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_survive_a_stopped_worker_without_a_changed_token() -> Result<()> {
    let daemon = TestDaemon::start(DaemonOptions::default().flags(&["--stall-timeout", "2s"])).await?;
    let calm = undisturbed(&daemon, STREAMS).await?;
    let stormy = struck(&daemon, STREAMS, Signal::STOP, &[1000]).await?;
    assert_eq!(calm, stormy);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_frees_its_blocks() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    for _ in 0..20 {
        let body =
            json!({"prompt": "User: Hello\nAssistant: ", "max_tokens": 3000, "ignore_eos": true, "stream": true});
        let mut stream = client.stream("/v1/completions", &body).await?;
        stream.next().await?;
        drop(stream);
    }
    // Nothing runs any more although each asked for thousands of tokens; the counter is the event to wait for.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let running = daemon.metric("vllm:num_requests_running").await?;
        if running == 0.0 {
            break;
        }
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "{running} requests still run");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let text = client.get("/metrics").await?.text();
    let aborted = text.lines().find(|l| l.starts_with("vllm:request_success_total") && l.contains("\"abort\""));
    let count: f64 = aborted.and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or_default();
    assert!(count >= 20.0, "{aborted:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_with_503_and_retry_after() -> Result<()> {
    let options = DaemonOptions::default().flags(&["--max-num-seqs", "2", "--max-num-queued-reqs", "4"]);
    let daemon = TestDaemon::start(options).await?;
    let client = daemon.client();
    let mut tasks = Vec::new();
    for i in 0..40 {
        let client = client.clone();
        tasks.push(tokio::spawn(async move {
            let body = json!({"prompt": format!("User: {i}\nAssistant: "), "max_tokens": 200, "ignore_eos": true});
            client.post("/v1/completions", &body).await
        }));
    }
    let (mut served, mut refused) = (0, 0);
    for task in tasks {
        let response = task.await??;
        match response.status {
            200 => served += 1,
            503 => {
                refused += 1;
                assert!(
                    response.header("retry-after").is_some_and(|v| v.parse::<u64>().is_ok()),
                    "{:?}",
                    response.headers
                );
                assert!(response.json()?["error"]["message"].is_string());
            }
            other => anyhow::bail!("HTTP {other}: {}", response.text()),
        }
    }
    assert!(served >= 6 && refused >= 10, "served {served}, refused {refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_what_runs_and_exits_with_zero() -> Result<()> {
    let mut daemon = TestDaemon::demo().await?;
    let (sender, mut events) = mpsc::channel(4096);
    let client = daemon.client();
    let streams = tokio::spawn(async move { run_streams(&client, 10, sender).await });
    for _ in 0..60 {
        events.recv().await;
    }
    daemon.signal(Signal::TERM)?;
    let status = daemon.wait().await?;
    assert!(status.success(), "{status:?}\n{}", daemon.log_text());
    for (i, ids) in streams.await??.iter().enumerate() {
        assert_eq!(ids.len(), 160, "stream {i} was cut");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_daemon_leaves_no_worker_behind() -> Result<()> {
    let mut daemon = TestDaemon::demo().await?;
    let pids = daemon.worker_pids();
    assert!(!pids.is_empty());
    daemon.signal(Signal::KILL)?;
    daemon.wait().await?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    for pid in pids {
        // The worker sees the end of file and leaves; its /proc entry is the event.
        while std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.contains("worker")) {
            anyhow::ensure!(tokio::time::Instant::now() < deadline, "worker {pid} lives on");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}
