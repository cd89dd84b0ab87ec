//! `bench --profile swap`: swaps between models under a steady load, and what its clients saw of them.

use super::models::{folder, follow};
use crate::cli::BenchArgs;
use crate::client::Admin;
use crate::load::steady::{Steady, SteadyPlan, SteadyReport};
use crate::output::{bad, good, show, table};
use anyhow::{Result, ensure};
use ernie_proto::admin::{Begun, RolloutOutcome, Status, Swap};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// A request that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Load before the first and after the last swap.
const MARGIN: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize)]
struct Report {
    swaps: Vec<RolloutOutcome>,
    cut_over_ms_p99: f64,
    cut_over_ms_max: f64,
    load: SteadyReport,
}

impl Report {
    /// What the product promises of a swap.
    fn kept(&self) -> bool {
        let l = &self.load;
        self.swaps.iter().all(|s| s.result == "completed") && l.failed + l.hung + l.mixed == 0
    }
}

pub(super) async fn run(admin: &Admin, json: bool, args: &BenchArgs, url: &str) -> Result<ExitCode> {
    ensure!(
        args.models.len() >= 2,
        "swapping needs two models or more: --models DIR,DIR (sealed folders, or names of `ernie-ctl model list`)"
    );
    let plan = SteadyPlan {
        url: url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        api_key: args.api.api_key.clone(),
        per_second: args.rate,
        output_tokens: args.output.unwrap_or(16) as usize,
        patience: PATIENCE,
    };
    let load = Steady::begin(plan).await?;
    tokio::time::sleep(MARGIN).await;
    let mut swaps = Vec::new();
    for number in 0..args.swaps as usize {
        let model = folder(&args.models[number % args.models.len()])?;
        let wanted = Swap {
            model_dir: model,
            served_names: None,
            strategy: None,
            observe_seconds: Some(args.observe),
            canary_percent: None,
            force_unsealed: false,
        };
        let begun: Begun = admin.post("/v1/swap", &wanted).await?;
        let outcome = follow(admin, true, begun.deployment.as_deref().unwrap_or_default()).await?;
        if !json {
            eprintln!("swap {}: {} {}", number + 1, outcome.result, outcome.reason.as_deref().unwrap_or_default());
        }
        swaps.push(outcome);
        settle(admin).await?;
    }
    tokio::time::sleep(MARGIN).await;
    let load = load.end().await?;
    let mut pauses: Vec<f64> = swaps.iter().filter_map(|s| s.cut_over_seconds).map(|s| s * 1e3).collect();
    pauses.sort_by(f64::total_cmp);
    let at = |share: f64| pauses.get(((pauses.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
    let report = Report {
        cut_over_ms_p99: at(0.99).unwrap_or_default(),
        cut_over_ms_max: pauses.last().copied().unwrap_or_default(),
        swaps,
        load,
    };
    show(json, &report, people)?;
    Ok(if report.kept() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The old model's workers have left: each swap begins as the first one did.
async fn settle(admin: &Admin) -> Result<()> {
    loop {
        let status: Status = admin.get("/v1/status").await?;
        if status.deployments.len() <= 1 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn people(report: &Report) -> String {
    let l = &report.load;
    let rows = report.swaps.iter().enumerate().map(|(number, s)| {
        vec![
            (number + 1).to_string(),
            s.revision.chars().take(12).collect(),
            s.result.clone(),
            s.cut_over_seconds.map_or_else(|| "-".to_owned(), |p| format!("{:.3} ms", p * 1e3)),
            s.in_flight.unwrap_or_default().to_string(),
            s.requests_old.to_string(),
            s.requests_new.to_string(),
            s.requests_failed.to_string(),
            format!("{:.1} s", s.seconds),
        ]
    });
    let header = ["SWAP", "TO", "RESULT", "CUT-OVER", "IN FLIGHT", "OLD SIDE", "NEW SIDE", "LOST", "TOOK"];
    let mut out = table(&header, rows);
    out.push_str(&format!("\n{} requests: {} failed, {} hung, {} mixed\n", l.requests, l.failed, l.hung, l.mixed));
    for (fingerprint, count) in &l.by_fingerprint {
        out.push_str(&format!("  {count} wholly from {fingerprint}\n"));
    }
    out.push_str(&format!(
        "cut-over P99 {:.3} ms, longest {:.3} ms\nfirst token P50/P99/longest {:.0} / {:.0} / {:.0} ms, whole answer {:.0} / {:.0} / {:.0} ms\n",
        report.cut_over_ms_p99,
        report.cut_over_ms_max,
        l.ttft_ms.p50,
        l.ttft_ms.p99,
        l.ttft_ms.max,
        l.latency_ms.p50,
        l.latency_ms.p99,
        l.latency_ms.max
    ));
    if let Some(error) = &l.first_error {
        out.push_str(&format!("first failure: {error}\n"));
    }
    out.push_str(&if report.kept() {
        format!("{}\n", good("no request was lost, hung or mixed"))
    } else {
        format!("{}\n", bad("a promise was broken"))
    });
    out
}
