//! `bench`: puts a load on an API and measures what its clients would see.
//!
//! A fixed number of clients, each with one request at a time; prompts of a wanted length made of words that differ from
//! request to request, so that the prefix cache does not answer for the engine; the answer's length is forced
//! (`ignore_eos`, `min_tokens`), so two runs do the same work.

use crate::cli::BenchArgs;
use crate::client::{Admin, Api, SseParser};
use crate::output::{bold, seconds, show, table};
use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// What is asked for.
#[derive(Debug, Clone, Copy, Serialize)]
struct Load {
    concurrency: u32,
    input: u32,
    output: u32,
    requests: u32,
    /// Chooses the prompts: the same seed sends the same ones, another seed meets no cached prefix of an earlier run.
    seed: u64,
}

/// Named loads of the owner's documents, and two of ours.
const PROFILES: &[(&str, Load)] = &[
    ("a10-512-256", Load { concurrency: 16, input: 512, output: 256, requests: 64, seed: 0 }),
    ("batch8", Load { concurrency: 8, input: 128, output: 128, requests: 64, seed: 0 }),
    ("c100-320", Load { concurrency: 100, input: 320, output: 128, requests: 300, seed: 0 }),
    ("chat", Load { concurrency: 4, input: 64, output: 64, requests: 32, seed: 0 }),
    ("long", Load { concurrency: 2, input: 2048, output: 128, requests: 8, seed: 0 }),
];

/// One request as its client saw it.
#[derive(Debug, Clone)]
struct Sample {
    first_token: Duration,
    gaps: Vec<Duration>,
    total: Duration,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
}

/// Figures of one server.
#[derive(Debug, Clone, Serialize)]
struct Report {
    server: String,
    model: String,
    load: Load,
    failed: u32,
    first_failure: Option<String>,
    seconds: f64,
    requests_per_second: f64,
    output_tokens_per_second: f64,
    prompt_tokens_per_second: f64,
    prompt_tokens_mean: f64,
    cached_tokens: u64,
    first_token_seconds: Percentiles,
    token_gap_seconds: Percentiles,
    request_seconds: Percentiles,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Percentiles {
    mean: f64,
    p50: f64,
    p95: f64,
    p99: f64,
}

pub(super) async fn run(admin: &Admin, json: bool, args: BenchArgs) -> Result<()> {
    let load = load(&args)?;
    let (api, model) = super::api(admin, &args.api).await?;
    let name = args.api.url.clone().unwrap_or_else(|| "this daemon".to_owned());
    let mut reports = vec![measure(&api, &name, &model, load).await?];
    if let Some(url) = &args.compare {
        let other = Api::new(url, args.api.api_key.clone())?;
        let model = other.first_model().await?;
        reports.push(measure(&other, url, &model, load).await?);
    }
    show(json, &reports, |r| people(r))
}

fn load(args: &BenchArgs) -> Result<Load> {
    let profile = args.profile.as_deref().unwrap_or("chat");
    let known = || PROFILES.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    let (_, mut load) = PROFILES
        .iter()
        .find(|(n, _)| *n == profile)
        .with_context(|| format!("there is no profile {profile:?}; there are {}", known()))?;
    load.concurrency = args.concurrency.unwrap_or(load.concurrency).max(1);
    load.input = args.input.unwrap_or(load.input).max(1);
    load.output = args.output.unwrap_or(load.output).max(1);
    load.requests = args.requests.unwrap_or(load.requests).max(1);
    load.seed = args.seed;
    Ok(load)
}

async fn measure(api: &Api, name: &str, model: &str, load: Load) -> Result<Report> {
    let words = words_per_token(api, model).await;
    // One request first: it pays for what only the first one pays for, and tells early when the server refuses.
    let warm = Load { output: load.output.min(8), ..load };
    request(api, model, &prompt(load.seed, 0, (f64::from(load.input) * words) as u32), warm.output).await?;
    let bar = progress(load.requests);
    let next = Arc::new(AtomicU32::new(0));
    let began = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..load.concurrency.min(load.requests) {
        let (api, model, next, bar) = (api.clone(), model.to_owned(), Arc::clone(&next), bar.clone());
        clients.spawn(async move {
            let mut outcomes = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= load.requests {
                    return outcomes;
                }
                let prompt = prompt(load.seed, index + 1, (f64::from(load.input) * words) as u32);
                outcomes.push(request(&api, &model, &prompt, load.output).await);
                bar.inc(1);
            }
        });
    }
    let outcomes: Vec<Result<Sample>> = clients.join_all().await.into_iter().flatten().collect();
    let elapsed = began.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let failures: Vec<String> = outcomes.iter().filter_map(|o| o.as_ref().err()).map(|e| format!("{e:#}")).collect();
    let samples: Vec<&Sample> = outcomes.iter().filter_map(|o| o.as_ref().ok()).collect();
    if samples.is_empty() {
        bail!("every request failed: {}", failures.first().map_or("", String::as_str));
    }
    let sum = |f: fn(&Sample) -> u64| samples.iter().map(|s| f(s)).sum::<u64>();
    let output = sum(|s| s.output_tokens);
    let prompt = sum(|s| s.prompt_tokens);
    Ok(Report {
        server: name.to_owned(),
        model: model.to_owned(),
        load,
        failed: u32::try_from(failures.len()).unwrap_or(u32::MAX),
        first_failure: failures.into_iter().next(),
        seconds: elapsed,
        requests_per_second: samples.len() as f64 / elapsed,
        output_tokens_per_second: output as f64 / elapsed,
        prompt_tokens_per_second: prompt as f64 / elapsed,
        prompt_tokens_mean: prompt as f64 / samples.len() as f64,
        cached_tokens: sum(|s| s.cached_tokens),
        first_token_seconds: percentiles(samples.iter().map(|s| s.first_token).collect()),
        token_gap_seconds: percentiles(samples.iter().flat_map(|s| s.gaps.clone()).collect()),
        request_seconds: percentiles(samples.iter().map(|s| s.total).collect()),
    })
}

async fn request(api: &Api, model: &str, prompt: &str, output: u32) -> Result<Sample> {
    let body = json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": true,
        "temperature": 0,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let began = Instant::now();
    let mut response = api.send(Method::POST, "/v1/completions", Some(&body)).await?.into_body();
    let mut parser = SseParser::default();
    let mut arrivals = Vec::new();
    let mut usage = Value::Null;
    while let Some(frame) = response.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let now = Instant::now();
        for event in parser.push(&data) {
            if event == "[DONE]" {
                continue;
            }
            let mut event: Value = serde_json::from_str(&event)?;
            if let Some(message) = event["error"]["message"].as_str() {
                bail!("the answer broke off: {message}");
            }
            if event["usage"].is_object() {
                usage = event["usage"].take();
            }
            if event["choices"].as_array().is_some_and(|c| !c.is_empty()) {
                arrivals.push(now);
            }
        }
    }
    let total = began.elapsed();
    let first = *arrivals.first().context("the answer had no token")?;
    Ok(Sample {
        first_token: first - began,
        gaps: arrivals.windows(2).map(|w| w[1] - w[0]).collect(),
        total,
        prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
        output_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
    })
}

const WORDS: [&str; 16] = [
    "river", "stone", "light", "model", "north", "paper", "table", "green", "water", "music", "seven", "orange", "window",
    "garden", "silver", "letter",
];

/// Words in an order that a small generator draws from the request's number: the same in every run, never shared beginnings.
fn prompt(seed: u64, index: u32, words: u32) -> String {
    let mut state = (u64::from(index) ^ seed.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = String::new();
    for _ in 0..words.max(1) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.push_str(WORDS[(state >> 60) as usize]);
        out.push(' ');
    }
    out
}

/// How many of our words make a token of this model; 1 when the server can not tell.
async fn words_per_token(api: &Api, model: &str) -> f64 {
    let body = json!({ "model": model, "prompt": prompt(0, 1, 256) });
    match api.json(Method::POST, "/tokenize", Some(&body)).await {
        Ok(reply) => reply["count"].as_u64().filter(|n| *n > 0).map_or(1.0, |n| 256.0 / n as f64),
        Err(_) => 1.0,
    }
}

fn percentiles(mut values: Vec<Duration>) -> Percentiles {
    if values.is_empty() {
        return Percentiles::default();
    }
    values.sort();
    let at = |q: f64| {
        let rank = (q * values.len() as f64).ceil() as usize;
        values[rank.clamp(1, values.len()) - 1].as_secs_f64()
    };
    let mean = values.iter().map(Duration::as_secs_f64).sum::<f64>() / values.len() as f64;
    Percentiles { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) }
}

fn progress(requests: u32) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {eta} left");
    ProgressBar::new(u64::from(requests)).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn people(reports: &[Report]) -> String {
    let load = reports[0].load;
    let mut out = format!(
        "{} requests, {} at a time, {} tokens in, {} out\n\n",
        load.requests, load.concurrency, load.input, load.output
    );
    let mut header = vec![""];
    header.extend(reports.iter().map(|r| r.server.as_str()));
    let row = |name: &str, f: &dyn Fn(&Report) -> String| {
        let mut cells = vec![name.to_owned()];
        cells.extend(reports.iter().map(f));
        cells
    };
    let spread = |p: Percentiles| format!("{} / {} / {}", seconds(p.p50), seconds(p.p95), seconds(p.p99));
    let rows = vec![
        row("model", &|r| r.model.clone()),
        row("requests/s", &|r| bold(&format!("{:.2}", r.requests_per_second))),
        row("generated tokens/s", &|r| bold(&format!("{:.1}", r.output_tokens_per_second))),
        row("prompt tokens/s", &|r| format!("{:.1}", r.prompt_tokens_per_second)),
        row("first token P50/P95/P99", &|r| spread(r.first_token_seconds)),
        row("token gap P50/P95/P99", &|r| spread(r.token_gap_seconds)),
        row("request P50/P95/P99", &|r| spread(r.request_seconds)),
        row("prompt tokens, mean", &|r| format!("{:.0} ({} cached in all)", r.prompt_tokens_mean, r.cached_tokens)),
        row("failed", &|r| r.failed.to_string()),
        row("seconds", &|r| format!("{:.1}", r.seconds)),
    ];
    out.push_str(&table(&header, rows));
    for r in reports {
        if let Some(failure) = &r.first_failure {
            out.push_str(&format!("first failure at {}: {failure}\n", r.server));
        }
    }
    if let [a, b] = reports {
        let ratio = a.output_tokens_per_second / b.output_tokens_per_second;
        out.push_str(&format!("\n{} generates {ratio:.2} times the tokens per second of {}\n", a.server, b.server));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let p = percentiles((1..=100).map(Duration::from_secs).collect());
        assert_eq!((p.p50, p.p95, p.p99, p.mean), (50.0, 95.0, 99.0, 50.5));
        let one = percentiles(vec![Duration::from_secs(3)]);
        assert_eq!((one.p50, one.p99), (3.0, 3.0));
    }

    #[test]
    fn prompts_are_the_same_in_every_run_and_differ_from_each_other() {
        assert_eq!(prompt(0, 3, 50), prompt(0, 3, 50));
        let beginnings: std::collections::HashSet<String> = (1..64).map(|i| prompt(0, i, 8)).collect();
        assert_eq!(beginnings.len(), 63);
    }
}
