//! An open-loop load: requests at a steady rate, whatever the server does. What `bench --profile swap` measures under.

use super::stream::{MIXED, Target};
use super::{Summary, summary};
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// What to send.
#[derive(Debug, Clone)]
pub(crate) struct SteadyPlan {
    pub(crate) url: String,
    pub(crate) api_key: Option<String>,
    pub(crate) per_second: f64,
    pub(crate) output_tokens: usize,
    /// A request that takes longer hangs.
    pub(crate) patience: Duration,
}

/// What it brought.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct SteadyReport {
    pub(crate) requests: usize,
    pub(crate) failed: usize,
    pub(crate) hung: usize,
    /// Answers that two revisions wrote parts of.
    pub(crate) mixed: usize,
    pub(crate) first_error: Option<String>,
    /// Whole answers by revision, as its fingerprint names it.
    pub(crate) by_fingerprint: BTreeMap<String, usize>,
    pub(crate) ttft_ms: Summary,
    pub(crate) latency_ms: Summary,
}

/// A load under way.
#[derive(Debug)]
pub(crate) struct Steady {
    stop: Arc<AtomicBool>,
    task: JoinHandle<SteadyReport>,
}

impl Steady {
    /// Begins; the first request has come back well.
    pub(crate) async fn begin(plan: SteadyPlan) -> Result<Self> {
        let mut target = Target::new(&plan.url, plan.api_key.clone(), plan.patience)?;
        target.model = target.first_model().await?;
        target.once("User: Hello\nAssistant: ".into(), plan.output_tokens).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(send(Arc::new(target), plan, Arc::clone(&stop)));
        Ok(Self { stop, task })
    }

    /// Sends no more, waits for what is under way.
    pub(crate) async fn end(self) -> Result<SteadyReport> {
        self.stop.store(true, Ordering::Relaxed);
        Ok(self.task.await?)
    }
}

async fn send(target: Arc<Target>, plan: SteadyPlan, stop: Arc<AtomicBool>) -> SteadyReport {
    let mut ticks = interval(Duration::from_secs_f64(1.0 / plan.per_second.max(0.01)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut running = JoinSet::new();
    let mut sent = 0u64;
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let (target, tokens, number) = (Arc::clone(&target), plan.output_tokens, sent);
        running.spawn(async move {
            let began = Instant::now();
            let prompt = format!("User: question number {number}, please\nAssistant: ");
            (target.once(prompt.into(), tokens).await, began.elapsed())
        });
        sent += 1;
    }
    let mut report = SteadyReport::default();
    let (mut first_tokens, mut latencies) = (Vec::new(), Vec::new());
    while let Some(ended) = running.join_next().await {
        report.requests += 1;
        match ended {
            Ok((Ok(outcome), _)) => {
                let fingerprint = outcome.fingerprint.unwrap_or_else(|| "none".to_owned());
                *report.by_fingerprint.entry(fingerprint).or_default() += 1;
                first_tokens.push(outcome.ttft.as_secs_f64());
                latencies.push(outcome.latency.as_secs_f64());
            }
            Ok((Err(error), took)) => {
                let error = format!("{error:#}");
                match () {
                    () if error.contains(MIXED) => report.mixed += 1,
                    () if took >= plan.patience => report.hung += 1,
                    () => report.failed += 1,
                }
                report.first_error.get_or_insert(error);
            }
            Err(_) => report.failed += 1,
        }
    }
    (report.ttft_ms, report.latency_ms) = (summary(first_tokens), summary(latencies));
    report
}
