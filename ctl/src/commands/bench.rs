//! `bench`: puts a load on an API and shows what its clients would see; the load itself is `load`'s.

use super::bench_swap;
use crate::cli::BenchArgs;
use crate::client::Admin;
use crate::load::turns::{self, TurnsReport};
use crate::load::{self, LoadPlan, LoadReport, PromptKind, Summary};
use crate::output::{bold, bytes, show, table};
use anyhow::{Context, Result};
use ernie_proto::admin::Status;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// A request that takes longer is a failure.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A named load: users, prompt tokens, answer tokens, requests.
type Profile = (&'static str, [u32; 4]);

/// Profiles whose prompts are of many lengths, half as long to half as long again.
const SPREAD: &[&str] = &["burst"];

/// The profile that grows chats turn by turn instead of sending single prompts.
const PREFIX: &str = "prefix";

/// Loads of the owner's documents (requirements N2, E3, N6), and two of ours.
const PROFILES: &[Profile] = &[
    ("a10-512-256", [16, 512, 256, 64]),
    ("batch8", [8, 128, 128, 64]),
    ("c100-320", [100, 320, 128, 300]),
    ("chat", [4, 64, 64, 32]),
    ("long", [2, 2048, 128, 8]),
    // 100 at once, each once.
    ("burst", [100, 320, 128, 100]),
    // 50 chats behind a system prompt of 1024 tokens.
    (PREFIX, [50, 1024, 16, 50]),
];

pub(super) async fn run(admin: &Admin, json: bool, args: BenchArgs) -> Result<ExitCode> {
    let url = match &args.api.url {
        Some(url) => url.clone(),
        None => {
            let status: Status = admin.get("/v1/status").await.context("give the API with --url, or")?;
            status.listening.into_iter().next().context("the daemon listens nowhere")?
        }
    };
    if args.profile.as_deref() == Some("swap") {
        return bench_swap::run(admin, json, &args, &url).await;
    }
    let plan = plan(&args, url)?;
    if args.profile.as_deref() == Some(PREFIX) {
        let bar = progress(turns::requests(plan.users));
        let ticks = bar.clone();
        let report = turns::run(&plan, move || ticks.inc(1)).await;
        bar.finish_and_clear();
        show(json, &report?, turn_by_turn)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut reports = vec![measure(&plan).await?];
    if let Some(url) = &args.compare {
        reports.push(measure(&LoadPlan { url: url.clone(), model: None, ..plan.clone() }).await?);
    }
    show(json, &reports, |r| people(&plan, r))?;
    Ok(ExitCode::SUCCESS)
}

fn plan(args: &BenchArgs, url: String) -> Result<LoadPlan> {
    let profile = args.profile.as_deref().unwrap_or("chat");
    let known = || PROFILES.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    let (_, [users, input, output, requests]) = PROFILES
        .iter()
        .find(|(n, _)| *n == profile)
        .with_context(|| format!("there is no profile {profile:?}; there are {}, swap", known()))?;
    let size = |given: Option<u32>, default: u32| given.unwrap_or(default).max(1) as usize;
    Ok(LoadPlan {
        // A listener on every interface is reached through the loopback one.
        url: url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        api_key: args.api.api_key.clone(),
        model: args.api.model.clone(),
        users: size(args.concurrency, *users),
        requests: size(args.requests, *requests),
        prompt_tokens: size(args.input, *input),
        prompt_spread: if SPREAD.contains(&profile) { 0.5 } else { 0.0 },
        output_tokens: size(args.output, *output),
        shared_prefix_tokens: match profile {
            PREFIX => size(args.shared_prefix.or(args.input), *input),
            _ => args.shared_prefix.unwrap_or(0) as usize,
        },
        prompt_kind: if args.token_ids { PromptKind::TokenIds } else { PromptKind::Words },
        chat: false,
        seed: args.seed,
        ramp: Duration::ZERO,
        timeout: TIMEOUT,
    })
}

async fn measure(plan: &LoadPlan) -> Result<LoadReport> {
    let bar = progress(plan.requests);
    let ticks = bar.clone();
    let report = load::run(plan, move || ticks.inc(1)).await;
    bar.finish_and_clear();
    report
}

fn progress(requests: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {eta} left");
    ProgressBar::new(requests as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What the server's metrics say, if they do.
fn seen(value: Option<f64>, shown: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), shown)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn turn_by_turn(r: &TurnsReport) -> String {
    let mut out = format!("{} chats behind a system prompt of {} tokens\n\n", r.chats, r.system_tokens);
    let rows = r.uncached.iter().zip(&r.cached).map(|(without, with)| {
        let time = |t: &turns::Turn| format!("{:.0} / {:.0} ms", t.ttft_ms.p50, t.ttft_ms.p95);
        let share = format!("{:.0} of {:.0}", with.cached_tokens, with.prompt_tokens);
        let gain = format!("{:.1}", without.ttft_ms.p50 / with.ttft_ms.p50.max(f64::EPSILON));
        vec![with.turn.to_string(), time(without), time(with), gain, share]
    });
    let header = ["TURN", "TTFT P50/P95 WITHOUT CACHE", "WITH", "TIMES FASTER", "TOKENS CACHED"];
    out.push_str(&table(&header, rows));
    out
}

fn people(plan: &LoadPlan, reports: &[LoadReport]) -> String {
    let mut out = format!(
        "{} requests by {} users, {} tokens in, {} out\n\n",
        plan.requests, plan.users, plan.prompt_tokens, plan.output_tokens
    );
    let mut header = vec![""];
    header.extend(reports.iter().map(|r| r.url.as_str()));
    let row = |name: &str, f: &dyn Fn(&LoadReport) -> String| {
        let mut cells = vec![name.to_owned()];
        cells.extend(reports.iter().map(f));
        cells
    };
    let spread = |s: Summary| format!("{:.0} / {:.0} / {:.0} ms", s.p50, s.p95, s.p99);
    let rows = vec![
        row("model", &|r| r.model.clone()),
        row("requests/s", &|r| bold(&format!("{:.2}", r.requests_per_second))),
        row("generated tokens/s", &|r| bold(&format!("{:.1}", r.output_tokens_per_second))),
        row("first token P50/P95/P99", &|r| spread(r.ttft_ms)),
        row("token gap P50/P95/P99", &|r| spread(r.itl_ms)),
        row("per token P50/P95/P99", &|r| spread(r.tpot_ms)),
        row("request P50/P95/P99", &|r| spread(r.latency_ms)),
        row("tokens in/out, mean", &|r| format!("{:.0} / {:.0}", r.prompt_tokens_mean, r.output_tokens_mean)),
        row("failed", &|r| r.failed.to_string()),
        row("worker memory, peak", &|r| seen(r.server.resident_bytes_peak, |b| bytes(b as u64))),
        row("KV in use, peak", &|r| seen(r.server.kv_usage_peak, percent)),
        row("swap space in use, peak", &|r| seen(r.server.swap_usage_peak, percent)),
        row("preemptions", &|r| seen(r.server.preemptions, |n| format!("{n:.0}"))),
        row("blocks swapped out/in", &|r| {
            let number = |n: Option<f64>| seen(n, |n| format!("{n:.0}"));
            format!("{} / {}", number(r.server.swapped_out_blocks), number(r.server.swapped_in_blocks))
        }),
        row("seconds", &|r| format!("{:.1}", r.wall_seconds)),
    ];
    out.push_str(&table(&header, rows));
    for r in reports {
        if let Some(error) = &r.first_error {
            out.push_str(&format!("first failure at {}: {error}\n", r.url));
        }
    }
    if let [a, b] = reports {
        let ratio = a.output_tokens_per_second / b.output_tokens_per_second;
        out.push_str(&format!("\n{} generates {ratio:.2} times the tokens per second of {}\n", a.url, b.url));
    }
    out
}
