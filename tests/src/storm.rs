//! Random sequences of swaps, rollbacks, cancelled rollouts and kills of worker and daemon, and what has to be true after
//! each: one wanted worker, no process left over, the last good revision serving, memory back where it was.
//!
//! Everything is done from outside: `ernie-ctl`, SIGKILL. The seed decides what is done and when.

use crate::daemon::{DaemonOptions, TestDaemon, children, send_signal};
use crate::models::{revision, text};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// How long everything may take to come to rest.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory that comes and goes by chance: allocator caches, page tables.
const MEMORY_SLACK: u64 = 96 << 20;

/// Numbers from a seed (splitmix64): the same storm every time.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// One thing that is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    Swap { to: usize, stop_first: bool, observe_ms: u64, wait: bool },
    Rollback { wait: bool },
    KillWorker,
    KillDaemon,
    Pause { ms: u64 },
}

impl Act {
    fn roll(dice: &mut Dice, models: usize) -> Self {
        match dice.below(10) {
            0..=3 => Self::Swap {
                to: dice.below(models as u64) as usize,
                stop_first: dice.below(4) == 0,
                observe_ms: [0, 0, 200, 1000][dice.below(4) as usize],
                wait: dice.below(2) == 0,
            },
            4 | 5 => Self::Rollback { wait: dice.below(2) == 0 },
            6 => Self::KillWorker,
            7 => Self::KillDaemon,
            _ => Self::Pause { ms: dice.below(400) },
        }
    }
}

/// What a storm was like.
#[derive(Debug, Clone, Default)]
pub struct StormReport {
    pub sequences: u32,
    pub swaps: u32,
    pub rollbacks: u32,
    pub workers_killed: u32,
    pub daemons_killed: u32,
    /// Acts that were refused because another rollout was under way or nothing was there to go back to.
    pub refused: u32,
    pub memory_base: u64,
    pub memory_end: u64,
}

/// A daemon in a storm.
struct Storm {
    daemon: TestDaemon,
    models: Vec<PathBuf>,
    /// What certainly serves when nothing more is done; `None`: a rollout may be under way.
    sure: Option<PathBuf>,
    /// Workers that must be gone at the next rest.
    doomed: BTreeSet<i32>,
    report: StormReport,
}

/// Runs `sequences` of up to `acts` acts each. `told` hears of every sequence.
pub async fn run(seed: u64, sequences: u32, acts: u64, mut told: impl FnMut(u32)) -> Result<StormReport> {
    let folder = tempfile::tempdir()?;
    let mut models = Vec::new();
    for note in ["r1", "r2", "r3"] {
        models.push(revision(folder.path(), note).await?);
    }
    let options = DaemonOptions { model: Some(models[0].clone()), ..DaemonOptions::default() };
    // So many kills in a row would rightly be taken for a crash loop.
    let flags = ["--served-model-name", "ernie", "--crash-loop-deaths", "1000"];
    let daemon = TestDaemon::start(options.flags(&flags)).await?;
    let mut storm = Storm {
        sure: Some(models[0].clone()),
        daemon,
        models,
        doomed: BTreeSet::new(),
        report: StormReport::default(),
    };
    storm.rest().await?;
    storm.report.memory_base = storm.memory();
    let mut dice = Dice::new(seed);
    for number in 0..sequences {
        let acts: Vec<_> = (0..1 + dice.below(acts)).map(|_| Act::roll(&mut dice, storm.models.len())).collect();
        let done = async {
            for act in &acts {
                storm.act(act).await.with_context(|| format!("{act:?}"))?;
            }
            storm.rest().await
        };
        done.await.with_context(|| format!("seed {seed}, sequence {number}: {acts:?}\n{}", storm.daemon.log_text()))?;
        storm.report.sequences += 1;
        told(number + 1);
    }
    storm.report.memory_end = storm.memory();
    let (base, end) = (storm.report.memory_base, storm.report.memory_end);
    ensure!(end < base + MEMORY_SLACK, "memory grew from {base} to {end} bytes");
    Ok(storm.report)
}

impl Storm {
    async fn act(&mut self, act: &Act) -> Result<()> {
        match act {
            Act::Swap { to, stop_first, observe_ms, wait } => {
                self.report.swaps += 1;
                let to = self.models[*to].clone();
                let (dir, observe) = (text(&to), format!("{observe_ms}ms"));
                let mut line = vec!["swap", &dir, "--observe", &observe];
                line.extend(stop_first.then_some(["--strategy", "stop-first"]).into_iter().flatten());
                line.extend((!wait).then_some("--no-wait"));
                let (code, out, errors) = self.daemon.ctl(&line).await?;
                self.learn(code, &(out + &errors), *wait, Some(to)).await
            }
            Act::Rollback { wait } => {
                self.report.rollbacks += 1;
                let mut line = vec!["rollback"];
                line.extend((!wait).then_some("--no-wait"));
                let (code, out, errors) = self.daemon.ctl(&line).await?;
                self.learn(code, &(out + &errors), *wait, None).await
            }
            Act::KillWorker => {
                self.report.workers_killed += 1;
                let pids = self.daemon.worker_pids();
                if let Some(pid) = pids.first() {
                    self.doomed.insert(*pid);
                    // It may have ended since.
                    let _ = send_signal(*pid, Signal::KILL);
                }
                Ok(())
            }
            Act::KillDaemon => {
                self.report.daemons_killed += 1;
                self.doomed.extend(self.daemon.worker_pids());
                self.daemon.restart().await
            }
            Act::Pause { ms } => {
                tokio::time::sleep(Duration::from_millis(*ms)).await;
                Ok(())
            }
        }
    }

    /// What an act's answer says about who serves.
    async fn learn(&mut self, code: i32, said: &str, waited: bool, to: Option<PathBuf>) -> Result<()> {
        let refusals = ["a rollout is under way", "there is no previous revision", "no model is being served yet"];
        if code != 0 && refusals.iter().any(|refusal| said.contains(refusal)) {
            self.report.refused += 1;
            return Ok(());
        }
        // A rollback that came just too late finds the new model serving.
        ensure!(code == 0 || said.contains("did not take over") || said.contains(" serves revision "), "{said}");
        self.sure = match (waited, code, to) {
            (true, 0, Some(to)) => Some(to),
            // Back to wherever; or a failure, after which what served before serves on.
            _ => None,
        };
        Ok(())
    }

    /// Waits until nothing moves any more, then checks everything.
    async fn rest(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let now = loop {
            let (code, out, errors) = self.daemon.ctl(&["status", "--json"]).await?;
            ensure!(code == 0, "{errors}");
            let now: Value = serde_json::from_str(&out)?;
            let alone = now["deployments"].as_array().is_some_and(|d| d.len() == 1);
            let calm = now["rollout"]["phase"] == "steady" && now["ready"] == true && alone;
            let workers: Vec<i32> = now["workers"]
                .as_array()
                .context("workers")?
                .iter()
                .filter_map(|w| i32::try_from(w["pid"].as_i64()?).ok())
                .collect();
            // A worker that was killed an instant ago may still stand in the status.
            let children = children(self.daemon.pid());
            let left_over: Vec<_> =
                self.doomed.iter().filter(|pid| !workers.contains(pid) && is_worker(**pid)).collect();
            if calm && workers.len() == 1 && children == workers && left_over.is_empty() {
                break now;
            }
            ensure!(
                Instant::now() < deadline,
                "it does not come to rest: children {children:?}, workers {workers:?}, left over {left_over:?}, {now:#}"
            );
            tokio::time::sleep(Duration::from_millis(30)).await;
        };
        self.doomed.clear();

        let serves = PathBuf::from(now["model"]["dir"].as_str().context("a model")?);
        if let Some(sure) = &self.sure {
            ensure!(*sure == serves, "{} serves, {} was the last good one", serves.display(), sure.display());
        }
        let record = self.daemon.state.path().join("models/serving/current");
        let recorded = std::fs::read_link(record).unwrap_or_else(|_| self.models[0].clone());
        ensure!(recorded == serves, "{} serves, the record says {}", serves.display(), recorded.display());
        self.sure = Some(serves);

        let body = json!({"prompt": "User: Hello\nAssistant: ", "max_tokens": 4});
        let answer = self.daemon.client().post("/v1/completions", &body).await?;
        ensure!(answer.status == 200, "{}", answer.text());
        Ok(())
    }

    /// Resident bytes of daemon and worker.
    fn memory(&self) -> u64 {
        let resident = |pid: i32| -> u64 {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
            line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() << 10
        };
        resident(self.daemon.pid()) + self.daemon.worker_pids().into_iter().map(resident).sum::<u64>()
    }
}

fn is_worker(pid: i32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.split(|b| *b == 0).any(|word| word == b"worker"))
}
