//! Each alert fires because its condition was caused on a running daemon. Windows are shortened from minutes to seconds,
//! thresholds are the real ones; `boards` tests the real windows with promtool.

use crate::boards::{alert_names, shortened};
use anyhow::{Context, Result, bail, ensure};
use ernied_tests::prometheus::{Prometheus, Tools, skipped};
use ernied_tests::{Client, DaemonOptions, TestDaemon, models};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// From cause to alert: a window, some evaluations, and a busy two-core machine.
const PATIENCE: Duration = Duration::from_secs(60);

const KEY: &str = "a-key-for-the-test";

/// What would take too much here; `dashboards/prometheus/ernied-alerts.test.yml` makes it with promtool.
const BY_PROMTOOL_ALONE: &[&str] = &["ErniedSwapThrash"];

struct Scene {
    prometheus: Prometheus,
    /// Alert, what caused it, seconds until it fired.
    seen: BTreeMap<String, (String, f64)>,
    /// Those that fired before anybody asked, and when.
    began: Instant,
}

impl Scene {
    /// Waits until all of them fire.
    async fn fire(&mut self, alerts: &[&str], cause: &str) -> Result<()> {
        let since = Instant::now();
        loop {
            let firing = self.prometheus.firing().await?;
            for alert in alerts.iter().filter(|a| firing.iter().any(|f| f == **a)) {
                let seconds = since.elapsed().as_secs_f64();
                self.seen.entry((*alert).to_owned()).or_insert_with(|| (cause.to_owned(), seconds));
            }
            let missing: Vec<_> = alerts.iter().filter(|a| !self.seen.contains_key(**a)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            ensure!(since.elapsed() < PATIENCE, "{missing:?} did not fire although {cause}; firing are {firing:?}");
            sleep(Duration::from_millis(200)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes and a quiet machine: cargo test -p ernied-tests --test e2e -- --ignored every_alert"]
async fn every_alert_fires_when_its_condition_is_caused() -> Result<()> {
    let tools = match Tools::find().await {
        Ok(tools) => tools,
        Err(reason) => {
            skipped("every_alert_fires_when_its_condition_is_caused", &reason);
            return Ok(());
        }
    };
    let folder = tempfile::tempdir()?;
    let broken = models::with_broken_router(folder.path(), 1)?;
    let full = folder.path().join("ernied.log");
    std::os::unix::fs::symlink("/dev/full", &full)?;
    let strong = DaemonOptions::default().flags(&[
        "--max-num-seqs",
        "4",
        "--kv-cache-bytes",
        "1MiB",
        "--max-model-len",
        "640",
        "--max-num-queued-reqs",
        "60",
        "--stall-timeout",
        "2s",
        "--log-file",
        &full.display().to_string(),
        "--api-key",
        KEY,
    ]);
    let mut strong = TestDaemon::start(strong).await?;
    let sick =
        DaemonOptions { model: Some(broken.clone()), ..DaemonOptions::default().flags(&["--stall-timeout", "300s"]) };
    let sick = TestDaemon::start(sick).await?;
    let targets = [strong.address.clone(), sick.address.clone()];
    let prometheus = Prometheus::start(&tools, &targets, &shortened()?, Some(KEY)).await?;
    let mut scene = Scene { prometheus, seen: BTreeMap::new(), began: Instant::now() };
    for instance in &targets {
        while scene.prometheus.query(&format!("ernied_ready{{instance=\"{instance}\"}} == 1")).await?.is_empty() {
            ensure!(scene.began.elapsed() < PATIENCE, "{instance} is not scraped");
            sleep(Duration::from_millis(200)).await;
        }
    }

    let sick_client = sick.client();
    let answered = background(move || ask(sick_client.clone(), "Hello", 8), Duration::from_millis(100));
    let router = "the router of a layer gives no numbers";
    scene.fire(&["ErniedZeroActiveExperts", "ErniedCorruptedLogits"], router).await?;
    drop(answered);
    // Work that nobody takes up: half a minute later it is an alert, so the rest goes on meanwhile.
    strike(&sick, Signal::STOP)?;
    let waiting_client = sick.client();
    let _waits = background(move || ask(waiting_client.clone(), "Hello", 8), Duration::from_secs(1));

    let client = strong.client().with_key(KEY);
    let asking = client.clone();
    let load = background(
        move || ask(asking.clone(), "User: tell me everything\nAssistant: ", 600),
        Duration::from_millis(60),
    );
    let crowd = "more requests came than were served";
    scene.fire(&["ErniedQueueGrowing", "ErniedRejecting", "ErniedErrorRate", "ErniedKvCacheFull"], crowd).await?;
    scene.fire(&["ErniedTtftMean", "ErniedTtftP99"], crowd).await?;
    scene.fire(&["ErniedLogLinesDropped"], "the log file is on a full disk").await?;

    let pulse = pulse(&strong)?;
    scene.fire(&["ErniedInterTokenLatency"], "the worker got 3 ms of every 203 ms").await?;
    drop(pulse);
    strike(&strong, Signal::STOP)?;
    scene.fire(&["ErniedWorkerStalled"], "the worker was stopped with SIGSTOP").await?;
    for _ in 0..3 {
        while strike(&strong, Signal::KILL).is_err() {
            sleep(Duration::from_millis(50)).await;
        }
        strong_again(&client).await?;
    }
    scene.fire(&["ErniedCrashLoop"], "the worker was killed three times").await?;
    drop(load);

    let wrong = strong.client().with_key("not-the-key");
    let refused = background(move || ask(wrong.clone(), "Hello", 8), Duration::from_millis(50));
    scene.fire(&["ErniedKeyRefusals"], "twenty requests a second had a wrong key").await?;
    drop(refused);

    let folder = broken.display().to_string();
    let (code, out, errors) = strong.ctl(&["swap", &folder, "--force-unsealed", "--observe", "1"]).await?;
    ensure!(code != 0, "a model without numbers was taken: {out}{errors}");
    scene.fire(&["ErniedRolledBack"], "a swap to a model that gives no numbers did not pass its probes").await?;

    let lock = lock(&strong.state.path().join("audit.db")).await?;
    let (code, ..) = strong.ctl(&["logs", "level", "info"]).await?;
    ensure!(code != 0, "an act went through although the audit store is locked");
    scene.fire(&["ErniedAuditFailing"], "another process locked the audit store").await?;
    drop(lock);

    strong.ctl(&["drain", "--timeout", "0"]).await?;
    scene.fire(&["ErniedNotReady"], "the daemon was drained").await?;
    strong.signal(Signal::KILL)?;
    strong.wait().await?;
    scene.fire(&["ErniedDown"], "the daemon was killed").await?;
    scene.fire(&["ErniedNoProgress"], "a worker with work was stopped for more than 30 s").await?;
    report(&scene)
}

fn report(scene: &Scene) -> Result<()> {
    let rules = shortened()?.concat();
    let mut table = String::from("| alert | caused by | fired after |\n|---|---|---:|\n");
    for alert in alert_names(&rules) {
        match scene.seen.get(alert) {
            Some((cause, seconds)) => {
                let _ = writeln!(table, "| {alert} | {cause} | {seconds:.1} s |");
            }
            None if BY_PROMTOOL_ALONE.contains(&alert) => {
                let _ = writeln!(table, "| {alert} | (a made history, by promtool) | |");
            }
            None => bail!("nothing here causes {alert}"),
        }
    }
    println!("{table}in {:.0} s", scene.began.elapsed().as_secs_f64());
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/alerts.md");
        std::fs::write(path, format!("{}\n{table}", include_str!("alerts_head.md")))?;
    }
    Ok(())
}

async fn ask(client: Client, prompt: &str, max_tokens: u32) -> Result<()> {
    let body: Value = json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true});
    client.post("/v1/completions", &body).await?;
    Ok(())
}

/// Begins one more request every `gap`, until it is dropped.
fn background<F>(mut request: impl FnMut() -> F + Send + 'static, gap: Duration) -> JoinSet<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut under_way = JoinSet::new();
        loop {
            under_way.spawn(request());
            while under_way.try_join_next().is_some() {}
            sleep(gap).await;
        }
    });
    tasks
}

fn strike(daemon: &TestDaemon, signal: Signal) -> Result<()> {
    let pid = daemon.worker_pids().first().copied().context("there is no worker")?;
    ernied_tests::daemon::send_signal(pid, signal)
}

/// Waits until a request is served.
async fn strong_again(client: &Client) -> Result<()> {
    let since = Instant::now();
    while client.get("/health").await?.status != 200 {
        ensure!(since.elapsed() < PATIENCE, "the daemon does not recover");
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// A machine that gives the worker little time: stopped, let go for a moment, stopped again.
fn pulse(daemon: &TestDaemon) -> Result<Pulse> {
    let pid = daemon.worker_pids().first().copied().context("there is no worker")?;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        loop {
            for (signal, time) in [(Signal::STOP, 200), (Signal::CONT, 3)] {
                let _ = ernied_tests::daemon::send_signal(pid, signal);
                sleep(Duration::from_millis(time)).await;
            }
        }
    });
    Ok(Pulse { pid, tasks })
}

struct Pulse {
    pid: i32,
    tasks: JoinSet<()>,
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.tasks.abort_all();
        let _ = ernied_tests::daemon::send_signal(self.pid, Signal::CONT);
    }
}

/// Another process that holds the database, as a backup tool might. Let go when dropped.
async fn lock(database: &Path) -> Result<tokio::process::Child> {
    let script = "import sqlite3, sys, time\nc = sqlite3.connect(sys.argv[1], isolation_level=None)\n\
                  c.execute('BEGIN IMMEDIATE')\nprint('locked', flush=True)\ntime.sleep(300)";
    let mut child = Command::new("python3")
        .args(["-c", script])
        .arg(database)
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("python3")?;
    let mut said = [0; 6];
    let out = child.stdout.as_mut().context("stdout")?;
    tokio::io::AsyncReadExt::read_exact(out, &mut said).await.context("the database could not be locked")?;
    Ok(child)
}
