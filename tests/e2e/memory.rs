//! KV memory under pressure: tiny pools, swap policies, the swap file, fair shares; a soak with kills.

use anyhow::{Context, Result, ensure};
use ernied_tests::prometheus::skipped;
use ernied_tests::{Client, DaemonOptions, MemoryCgroup, TestDaemon};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const KEYS: [&str; 2] = ["sk-greedy-000000", "sk-modest-000000"];

fn words(seed: u64, count: u64) -> String {
    let word = |i: u64| {
        ["model", "swap", "block", "token", "worker", "记忆", "key"][((seed * 31 + i * 7 + i / 5) % 7) as usize]
    };
    (0..count).map(word).collect::<Vec<_>>().join(" ")
}

fn request(seed: u64, prompt: u64, tokens: u64) -> Value {
    json!({
        "prompt": words(seed, prompt), "max_tokens": tokens, "ignore_eos": true, "seed": seed,
        "temperature": if seed.is_multiple_of(2) { 0.0 } else { 0.9 }, "return_token_ids": true,
    })
}

/// A pool that holds one sequence of full length and little more.
fn tight(flags: &[&str]) -> DaemonOptions {
    DaemonOptions::default().flags(&["--max-model-len", "512", "--kv-cache-bytes", "1300KiB"]).flags(flags)
}

async fn tokens(client: &Client, body: &Value) -> Result<Vec<u64>> {
    let answer = client.post("/v1/completions", body).await?;
    ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
    let ids = answer.json()?["choices"][0]["token_ids"].as_array().cloned().context("token ids")?;
    Ok(ids.iter().filter_map(Value::as_u64).collect())
}

async fn all_at_once(client: &Client, count: u64) -> Result<Vec<Vec<u64>>> {
    let asked: Vec<_> = (0..count)
        .map(|seed| {
            let client = client.clone();
            tokio::spawn(async move { tokens(&client, &request(seed, 60 + seed * 11 % 90, 70)).await })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(asked.await??);
    }
    Ok(answers)
}

async fn kv(daemon: &TestDaemon) -> Result<Value> {
    let (code, out, err) = daemon.ctl(&["kv", "--json"]).await?;
    ensure!(code == 0, "{err}");
    Ok(serde_json::from_str::<Value>(&out)?["workers"][0].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_token_depends_on_where_a_sequence_was_put_while_it_waited() -> Result<()> {
    let roomy = TestDaemon::demo().await?;
    let expected = all_at_once(&roomy.client(), 16).await?;
    for (policy, flags) in [
        ("off", vec!["--swap-policy", "off"]),
        ("on-pressure", vec!["--swap-space", "64MiB", "--swap-restore", "swap"]),
        ("always", vec!["--swap-space", "64MiB", "--swap-policy", "always"]),
        (
            "disk",
            vec![
                "--swap-space",
                "1MiB",
                "--swap-policy",
                "always",
                "--swap-restore",
                "swap",
                "--swap-disk-space",
                "64MiB",
            ],
        ),
    ] {
        let daemon = TestDaemon::start(tight(&flags)).await?;
        assert!(all_at_once(&daemon.client(), 16).await? == expected, "policy {policy}");
        assert!(daemon.metric("vllm:num_preemptions_total").await? > 0.0, "{policy}: the pool is not tight");
        let kv = kv(&daemon).await?;
        assert_eq!(kv["blocks_used"], 0, "{policy}: {kv}");
        let swapped = daemon.metric("ernied_swapped_blocks_total").await?;
        assert_eq!(swapped > 0.0, policy != "off", "{policy}: {swapped} blocks, {kv}");
        if policy == "disk" {
            assert!(kv["disk_blocks_used"].as_u64() > Some(0) && kv["disk_blocks_corrupt"] == 0, "{kv}");
            let text = daemon.client().get("/metrics").await?.text();
            for series in [
                r#"ernied_swap_file_bytes{engine="0",state="used"}"#,
                r#"ernied_swap_file_blocks_total{engine="0",operation="write"}"#,
                r#"ernied_swap_file_seconds_total{engine="0",operation="write"}"#,
            ] {
                let value = text.lines().find_map(|l| l.strip_prefix(series)?.trim().parse::<f64>().ok());
                assert!(value > Some(0.0), "{series}: {value:?}");
            }
            assert_eq!(daemon.metric("ernied_swap_file_checksum_errors_total").await?, 0.0);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_swap_file_serves_the_next_worker_and_goes_with_the_daemon() -> Result<()> {
    let flags = ["--swap-space", "8MiB", "--swap-policy", "always", "--swap-disk-space", "32MiB"];
    let mut daemon = TestDaemon::start(DaemonOptions::default().flags(&flags)).await?;
    let client = daemon.client();
    let body = request(4, 300, 20);
    let expected = tokens(&client, &body).await?;
    let written =
        async |daemon: &TestDaemon| -> Result<u64> { Ok(kv(daemon).await?["disk_blocks_used"].as_u64().unwrap_or(0)) };
    let until = Instant::now() + Duration::from_secs(30);
    while written(&daemon).await? < 10 {
        ensure!(Instant::now() < until, "nothing is written: {}", kv(&daemon).await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ernied_tests::daemon::send_signal(daemon.worker_pids()[0], Signal::KILL)?;
    let answer = client.post("/v1/completions", &body).await?.json()?;
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().context("cached tokens")?;
    assert!(cached >= 160, "only {cached} tokens came from the file: {}", kv(&daemon).await?);
    assert_eq!(tokens(&client, &body).await?, expected);
    assert!(kv(&daemon).await?["disk_blocks_restored"].as_u64() >= Some(10));
    let folder = daemon.state.path().join("swap");
    assert!(folder.join("worker-0.kv").exists());
    daemon.signal(Signal::TERM)?;
    daemon.wait().await?;
    assert!(!folder.join("worker-0.kv").exists(), "the file belongs to the daemon's life");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_who_holds_the_blocks_and_switches_the_policy() -> Result<()> {
    let daemon = TestDaemon::start(DaemonOptions::default().flags(&[
        "--api-key",
        KEYS[0],
        "--swap-space",
        "16MiB",
        "--swap-policy",
        "off",
    ]))
    .await?;
    let client = daemon.client().with_key(KEYS[0]);
    let mut body = request(2, 200, 600);
    body["stream"] = json!(true);
    let mut stream = client.stream("/v1/completions", &body).await?;
    stream.next().await?;
    let now = kv(&daemon).await?;
    assert_eq!(
        (&now["keys"][0]["key"], &now["sequences"][0]["state"]),
        (&json!("config-1"), &json!("running")),
        "{now}"
    );
    assert!(now["blocks_used"].as_u64() >= Some(10) && now["swap_policy"] == "off", "{now}");
    let (code, out, err) = daemon.ctl(&["set", "swap.policy=always"]).await?;
    assert_eq!(code, 0, "{out}{err}");
    let until = Instant::now() + Duration::from_secs(30);
    while kv(&daemon).await?["swap_policy"] != "always" {
        ensure!(Instant::now() < until, "{}", kv(&daemon).await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (code, text, _) = daemon.ctl(&["kv"]).await?;
    assert!(code == 0 && text.contains("swap policy always") && text.contains("config-1"), "{text}");
    let (code, out, err) = daemon.ctl(&["set", "swap.policy=sometimes"]).await?;
    assert!(code != 0 && (out.clone() + &err).contains("on-pressure"), "{out}{err}");
    drop(stream);
    assert_eq!(daemon.ctl(&["kv", "drop-prefixes"]).await?.0, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_keys_many_long_prompts_do_not_delay_anothers_short_chat() -> Result<()> {
    let options = DaemonOptions::default().flags(&["--api-key", KEYS[0], "--api-key", KEYS[1], "--max-num-seqs", "8"]);
    let daemon = TestDaemon::start(options).await?;
    let (greedy, modest) = (daemon.client().with_key(KEYS[0]), daemon.client().with_key(KEYS[1]));
    let done = Arc::new(AtomicU64::new(0));
    let mut long = Vec::new();
    for seed in 0..80 {
        let (client, done) = (greedy.clone(), done.clone());
        long.push(tokio::spawn(async move {
            let answer = tokens(&client, &request(seed, 400, 48)).await;
            done.fetch_add(1, Ordering::Relaxed);
            answer
        }));
    }
    let until = Instant::now() + Duration::from_secs(60);
    let waiting = async || -> Result<f64> {
        let text = greedy.get("/metrics").await?.text();
        let line = text.lines().find(|l| l.starts_with("vllm:num_requests_waiting{")).context("metric")?;
        Ok(line.rsplit(' ').next().context("value")?.parse()?)
    };
    while waiting().await? < 40.0 {
        ensure!(Instant::now() < until, "no queue comes about");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = done.load(Ordering::Relaxed);
    tokens(&modest, &request(1000, 8, 4)).await?;
    let meanwhile = done.load(Ordering::Relaxed) - before;
    assert!(meanwhile <= 16, "{meanwhile} of the long ones ended before the short one");
    for asked in long {
        asked.await??;
    }
    Ok(())
}

/// A cgroup that holds the demo model and some KV. The blocks of the pool become resident as they are used: all of them are, by
/// prompts of random lengths that want more than there is.
#[tokio::test(flavor = "multi_thread")]
async fn at_the_limit_of_its_cgroup_requests_wait_and_the_kernel_kills_nobody() -> Result<()> {
    const LIMIT: u64 = 192 << 20;
    let cgroup = match MemoryCgroup::with_limit(LIMIT) {
        Ok(cgroup) => cgroup,
        Err(reason) => {
            let reason = anyhow::anyhow!(reason);
            skipped("at_the_limit_of_its_cgroup_requests_wait_and_the_kernel_kills_nobody", &reason);
            return Ok(());
        }
    };
    let flags = ["--swap-space", "24MiB", "--swap-policy", "always", "--swap-memory-floor", "8MiB"];
    let options = DaemonOptions { cgroup: Some(cgroup.dir().to_owned()), ..DaemonOptions::default().flags(&flags) };
    let mut daemon = TestDaemon::start(options).await?;
    assert_eq!(daemon.metric("ernied_memory_limit_bytes").await?, LIMIT as f64, "the limit is seen");
    let workers = daemon.worker_pids();
    let over = Arc::new(AtomicBool::new(false));
    let users: Vec<_> = (0..48u64)
        .map(|user| {
            let (client, over) = (daemon.client(), over.clone());
            tokio::spawn(async move {
                let mut ended = 0u64;
                for turn in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let seed = user * 1_000_003 + turn * 7919;
                    let ids: Vec<u64> = (0..40 + seed % 1500).map(|i| 3 + (seed + i * i) % 500).collect();
                    let body =
                        json!({"prompt": ids, "max_tokens": 1 + seed % 90, "ignore_eos": true, "temperature": 0});
                    let answer = client.post("/v1/completions", &body).await?;
                    ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
                    ended += 1;
                }
                anyhow::Ok(ended)
            })
        })
        .collect();
    let (wanted, until) =
        (kv(&daemon).await?["blocks_total"].as_f64().unwrap_or(0.0) * 16.0 * 1.5, Duration::from_secs(240));
    let began = Instant::now();
    while daemon.metric("vllm:prompt_tokens_total").await? < wanted {
        ensure!(began.elapsed() < until, "not {wanted} tokens: {}", kv(&daemon).await?);
        ensure!(daemon.worker_pids() == workers, "a worker was lost:\n{}", daemon.log_text());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let kv = kv(&daemon).await?;
    over.store(true, Ordering::Relaxed);
    let mut ended = 0;
    for user in users {
        ended += user.await?.with_context(|| format!("daemon log:\n{}", daemon.log_text()))?;
    }
    let (total, free) = (kv["blocks_total"].as_u64().unwrap_or(0), kv["blocks_free"].as_u64().unwrap_or(u64::MAX));
    println!("{ended} answers, {wanted} prompt tokens, {total} blocks; peak {} of {LIMIT} bytes", cgroup.peak_bytes()?);
    assert!(free < total / 20, "{free} of {total} blocks were never used");
    assert!(daemon.worker_pids() == workers && cgroup.oom_kills()? == 0);
    assert!(cgroup.peak_bytes()? > LIMIT * 6 / 10, "{}", cgroup.peak_bytes()?);
    daemon.signal(Signal::TERM)?;
    daemon.wait().await?;
    Ok(())
}

/// Random lengths over a tight pool, clients that hang up, workers that die. `ERNIED_TEST_SOAK_SECONDS` makes it longer.
#[tokio::test(flavor = "multi_thread")]
async fn a_soak_with_kills_loses_nothing_and_comes_back_to_where_it_began() -> Result<()> {
    let seconds = std::env::var("ERNIED_TEST_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(30);
    let flags = [
        "--swap-space",
        "16MiB",
        "--swap-policy",
        "always",
        "--swap-disk-space",
        "32MiB",
        "--max-num-seqs",
        "16",
        "--max-num-queued-reqs",
        "12",
        "--crash-loop-deaths",
        "1000",
    ];
    let daemon = TestDaemon::start(tight(&flags)).await?;
    all_at_once(&daemon.client(), 8).await?;
    let resident = async |daemon: &TestDaemon| daemon.metric("process_resident_memory_bytes").await;
    let (before, over) = (resident(&daemon).await?, Arc::new(AtomicBool::new(false)));
    let answers = Arc::new(AtomicU64::new(0));
    // For sixteen seats and a queue of twelve: about 120 %.
    let users: Vec<_> = (0..34u64)
        .map(|user| {
            let (client, over, answers) = (daemon.client(), over.clone(), answers.clone());
            tokio::spawn(async move {
                let (mut ended, mut refused, mut left) = (0u64, 0u64, 0u64);
                for turn in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let seed = user * 1_000_003 + turn * 7919;
                    let body = request(seed, 1 + seed % 200, 1 + seed % 120);
                    if seed % 9 == 0 {
                        let mut body = body;
                        body["stream"] = json!(true);
                        if let Ok(mut stream) = client.stream("/v1/completions", &body).await {
                            stream.next().await?;
                        }
                        left += 1;
                        continue;
                    }
                    let answer = client.post("/v1/completions", &body).await?;
                    match answer.status {
                        200 => {
                            ended += 1;
                            answers.fetch_add(1, Ordering::Relaxed);
                        }
                        503 => {
                            refused += 1;
                            ensure!(answer.header("retry-after").is_some(), "{}", answer.text());
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        _ => anyhow::bail!("{}: {}", answer.status, answer.text()),
                    }
                }
                anyhow::Ok((ended, refused, left))
            })
        })
        .collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut kills, mut next) = (0, 0);
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_secs(6)).await;
        // By answers and not by the clock alone: on a slow machine one request would meet so many deaths that it is given up.
        if answers.load(Ordering::Relaxed) < next {
            continue;
        }
        if let Some(worker) = daemon.worker_pids().first() {
            ernied_tests::daemon::send_signal(*worker, Signal::KILL)?;
            kills += 1;
            next = answers.load(Ordering::Relaxed) + 60;
        }
    }
    over.store(true, Ordering::Relaxed);
    let (mut ended, mut refused, mut left) = (0, 0, 0);
    for user in users {
        let (e, r, l) = user.await?.with_context(|| format!("daemon log:\n{}", daemon.log_text()))?;
        (ended, refused, left) = (ended + e, refused + r, left + l);
    }
    let until = Instant::now() + Duration::from_secs(60);
    while kv(&daemon).await?["blocks_used"] != 0 {
        ensure!(Instant::now() < until, "blocks are still in use: {}", kv(&daemon).await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let grown = (resident(&daemon).await? - before) / f64::from(1 << 20);
    println!(
        "{ended} ended, {refused} refused, {left} left, {kills} kills; the daemon grew by {grown:.1} MiB; {}",
        kv(&daemon).await?
    );
    assert!(ended > 20 && kills > 0 && grown < 96.0);
    Ok(())
}
