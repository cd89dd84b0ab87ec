//! The load generator behind `ernie-ctl bench`: closed-loop streaming users against any OpenAI-compatible server.
//!
//! Each user sends its next request when the last one ended. Definitions, as the field uses them:
//! TTFT: request sent to first event with text. ITL: gap between two events with text, over all requests.
//! TPOT: (last text - first text) / (output tokens - 1), one value a request. Throughput: output tokens of completed
//! requests / wall time. Token counts are the server's own (`usage`).

mod prompts;
pub(crate) mod steady;
mod stream;
pub(crate) mod turns;
mod watch;

pub(crate) use prompts::PromptKind;

use anyhow::{Context, Result, bail};
use prompts::Prompts;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stream::{Outcome, Target};

/// What to send and how much of it.
#[derive(Debug, Clone)]
pub(crate) struct LoadPlan {
    /// `http://host:port`, without `/v1`.
    pub(crate) url: String,
    pub(crate) api_key: Option<String>,
    /// `None`: the first of `/v1/models`.
    pub(crate) model: Option<String>,
    pub(crate) users: usize,
    pub(crate) requests: usize,
    pub(crate) prompt_tokens: usize,
    /// Lengths lie evenly within this share below and above `prompt_tokens`.
    pub(crate) prompt_spread: f64,
    pub(crate) output_tokens: usize,
    /// That many leading prompt tokens are the same in every request.
    pub(crate) shared_prefix_tokens: usize,
    pub(crate) prompt_kind: PromptKind,
    pub(crate) chat: bool,
    pub(crate) seed: u64,
    /// Users start spread over this time instead of all at once.
    pub(crate) ramp: Duration,
    pub(crate) timeout: Duration,
}

/// Percentiles in milliseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Summary {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

/// What one level of load brought.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LoadReport {
    pub(crate) url: String,
    pub(crate) model: String,
    pub(crate) users: usize,
    pub(crate) requests: usize,
    pub(crate) failed: usize,
    /// The first error, word for word.
    pub(crate) first_error: Option<String>,
    pub(crate) wall_seconds: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) output_tokens_per_second: f64,
    pub(crate) prompt_tokens_mean: f64,
    pub(crate) output_tokens_mean: f64,
    pub(crate) ttft_ms: Summary,
    pub(crate) itl_ms: Summary,
    pub(crate) tpot_ms: Summary,
    pub(crate) latency_ms: Summary,
    /// As the server's metrics have it.
    pub(crate) server: watch::Seen,
}

/// Runs one level to its end. `on_request` hears of every finished request (for a progress bar).
pub(crate) async fn run(plan: &LoadPlan, on_request: impl Fn() + Send + Sync + 'static) -> Result<LoadReport> {
    let mut target = Target::new(&plan.url, plan.api_key.clone(), plan.timeout)?;
    let model = match &plan.model {
        Some(model) => model.clone(),
        None => target.first_model().await?,
    };
    target.model = model.clone();
    target.chat = plan.chat;
    let mut prompts = Prompts::new(plan);
    if prompts.kind() == PromptKind::Words {
        prompts.calibrate(&target).await?;
    }
    // One unmeasured request: connections, caches, page faults.
    target.once(prompts.warm_up(), plan.output_tokens.min(8)).await.context("the warm-up request")?;

    let target = Arc::new(target);
    let prompts = Arc::new(prompts);
    let next = Arc::new(AtomicUsize::new(0));
    let on_request = Arc::new(on_request);
    let watch = watch::Watch::start(target.clone());
    let begin = Instant::now();
    let mut users = Vec::new();
    for user in 0..plan.users {
        let (target, prompts, next, on_request) = (target.clone(), prompts.clone(), next.clone(), on_request.clone());
        let (requests, output_tokens) = (plan.requests, plan.output_tokens);
        let delay = plan.ramp.mul_f64(user as f64 / plan.users.max(1) as f64);
        users.push(tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let mut outcomes = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= requests {
                    return outcomes;
                }
                outcomes
                    .push(target.once(prompts.make(index as u64), output_tokens).await.map_err(|e| format!("{e:#}")));
                on_request();
            }
        }));
    }
    let mut outcomes = Vec::new();
    for user in users {
        outcomes.extend(user.await?);
    }
    let elapsed = begin.elapsed();
    Ok(LoadReport { server: watch.end().await, ..report(plan, model, elapsed, outcomes)? })
}

fn report(
    plan: &LoadPlan,
    model: String,
    wall: Duration,
    outcomes: Vec<Result<Outcome, String>>,
) -> Result<LoadReport> {
    let first_error = outcomes.iter().find_map(|o| o.as_ref().err().cloned());
    let done: Vec<&Outcome> = outcomes.iter().filter_map(|o| o.as_ref().ok()).collect();
    if done.is_empty() {
        bail!("no request succeeded: {}", first_error.unwrap_or_else(|| "nothing was sent".into()));
    }
    let seconds = wall.as_secs_f64();
    let total = |of: fn(&Outcome) -> usize| done.iter().map(|o| of(o)).sum::<usize>() as f64;
    let output_tokens = total(|o| o.output_tokens);
    let per_request = |of: &dyn Fn(&Outcome) -> Option<f64>| summary(done.iter().filter_map(|o| of(o)).collect());
    Ok(LoadReport {
        url: plan.url.clone(),
        model,
        users: plan.users,
        requests: outcomes.len(),
        failed: outcomes.len() - done.len(),
        first_error,
        wall_seconds: seconds,
        requests_per_second: done.len() as f64 / seconds,
        output_tokens_per_second: output_tokens / seconds,
        prompt_tokens_mean: total(|o| o.prompt_tokens) / done.len() as f64,
        output_tokens_mean: output_tokens / done.len() as f64,
        ttft_ms: per_request(&|o| Some(o.ttft.as_secs_f64())),
        itl_ms: summary(done.iter().flat_map(|o| o.gaps.iter().map(Duration::as_secs_f64)).collect()),
        tpot_ms: per_request(&|o| {
            let gaps: Duration = o.gaps.iter().sum();
            (o.output_tokens > 1).then(|| gaps.as_secs_f64() / (o.output_tokens - 1) as f64)
        }),
        latency_ms: per_request(&|o| Some(o.latency.as_secs_f64())),
        server: watch::Seen::default(),
    })
}

/// Linear interpolation between the two nearest values, as numpy does it.
fn summary(mut seconds: Vec<f64>) -> Summary {
    if seconds.is_empty() {
        return Summary::default();
    }
    seconds.sort_by(f64::total_cmp);
    let at = |q: f64| {
        let place = q * (seconds.len() - 1) as f64;
        let (low, high) = (place.floor() as usize, place.ceil() as usize);
        1e3 * (seconds[low] + (seconds[high] - seconds[low]) * place.fract())
    };
    let mean = 1e3 * seconds.iter().sum::<f64>() / seconds.len() as f64;
    Summary { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), max: at(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        let s = summary(vec![0.004, 0.001, 0.003, 0.002]);
        assert!((s.p50 - 2.5).abs() < 1e-9 && (s.max - 4.0).abs() < 1e-9 && (s.mean - 2.5).abs() < 1e-9, "{s:?}");
    }

    #[test]
    fn nothing_measured_is_zero_and_not_a_crash() {
        assert_eq!(summary(Vec::new()).p99, 0.0);
    }
}
