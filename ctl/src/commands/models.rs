//! `swap`, `rollback`: begins, follows to the end, says how it went and what to do.

use crate::cli::SwapArgs;
use crate::client::Admin;
use crate::output::{print, seconds, show};
use anyhow::{Context, Result, bail};
use ernie_proto::admin::{Begun, Rollback, RolloutOutcome, Status, Swap};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

pub(super) async fn swap(admin: &Admin, json: bool, args: SwapArgs) -> Result<ExitCode> {
    let wanted = Swap {
        model_dir: folder(&args.model)?,
        served_names: (!args.served_model_name.is_empty()).then_some(args.served_model_name),
        strategy: Some(args.strategy),
        observe_seconds: args.observe,
        canary_percent: args.canary,
        force_unsealed: args.force_unsealed,
    };
    let begun: Begun = admin.post("/v1/swap", &wanted).await?;
    end(admin, json, begun, args.no_wait, false).await
}

pub(super) async fn rollback(admin: &Admin, json: bool, reason: Option<String>, no_wait: bool) -> Result<ExitCode> {
    let before: Status = admin.get("/v1/status").await?;
    // What is under way ends as rolled back, which is what was asked for.
    let under_way = before.rollout.phase != "steady";
    let begun: Begun = admin.post("/v1/rollback", &Rollback { reason }).await?;
    end(admin, json, begun, no_wait, under_way).await
}

/// A folder that is there, or a bare word for the daemon to know.
pub(super) fn folder(given: &Path) -> Result<PathBuf> {
    match given.canonicalize() {
        Ok(dir) => Ok(dir),
        Err(_) if given.components().count() == 1 && !given.is_absolute() => Ok(given.to_owned()),
        Err(error) => Err(error).with_context(|| format!("model folder {}", given.display())),
    }
}

async fn end(admin: &Admin, json: bool, begun: Begun, no_wait: bool, back_is_good: bool) -> Result<ExitCode> {
    let candidate = begun.deployment.clone();
    if no_wait || candidate.is_none() {
        show(json, &begun, |b| format!("{}\n", b.message))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !json {
        print(&format!("{}\n", begun.message))?;
    }
    let outcome = follow(admin, json, candidate.as_deref().unwrap_or_default()).await?;
    let good = outcome.result == if back_is_good { "rolled_back" } else { "completed" };
    show(json, &outcome, |o| people(o, good))?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tells each phase once, until the rollout of `candidate` has ended.
pub(super) async fn follow(admin: &Admin, quiet: bool, candidate: &str) -> Result<RolloutOutcome> {
    let mut told = String::new();
    loop {
        let now: Status = admin.get("/v1/status").await.context(
            "the daemon went away; when it is back it serves the last good revision, see `ernie-ctl status`",
        )?;
        match now.rollout.outcome {
            Some(outcome) if outcome.deployment == candidate => return Ok(outcome),
            Some(later) if number(&later.deployment) > number(candidate) => {
                bail!(
                    "{} has ended since; `ernie-ctl audit list --act rollout` says how {candidate} did",
                    later.deployment
                )
            }
            _ => {}
        }
        let mut line = now.rollout.phase.clone();
        if line == "soaking" {
            match now.rollout.canary_percent {
                Some(share) => drop(write!(line, ": the new model takes {share} % of the keys")),
                None => line.push_str(": the new model serves, the old one stays warm"),
            }
        }
        if let Some(strategy) = now.rollout.strategy.filter(|_| now.rollout.phase == "loading") {
            let _ = write!(line, " ({strategy})");
        }
        if line != told && line != "steady" && !quiet {
            print(&format!("  {line}\n"))?;
        }
        told = line;
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}

/// Deployments are numbered in the order in which they were wished for: d7.
fn number(deployment: &str) -> u64 {
    deployment.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or_default()
}

fn people(o: &RolloutOutcome, good: bool) -> String {
    let mut out = String::new();
    let dir = o.model_dir.display();
    if o.result == "completed" {
        let _ =
            writeln!(out, "{} serves revision {} from {dir}, after {}", o.deployment, o.revision, seconds(o.seconds));
        if let Some(pause) = o.cut_over_seconds {
            let _ = writeln!(
                out,
                "  cut-over took {:.3} ms; {} requests were under way on the old model and ended there",
                pause * 1e3,
                o.in_flight.unwrap_or_default()
            );
            let _ = writeln!(
                out,
                "  since then {} requests ended on the old model, {} on the new one, {} were lost",
                o.requests_old, o.requests_new, o.requests_failed
            );
        }
        out.push_str("  back with `ernie-ctl rollback`\n");
        return out;
    }
    let phase = o.phase.as_deref().unwrap_or("restoring");
    let reason = o.reason.as_deref().unwrap_or("no reason is known");
    if good {
        let _ = writeln!(out, "{} was taken back ({phase}): {reason}", o.deployment);
        return out;
    }
    let _ = writeln!(out, "{dir} did not take over ({phase}): {reason}");
    if o.result == "not_restored" {
        out.push_str("  the old model is not back yet; the daemon goes on trying: `ernie-ctl status`\n");
    } else {
        out.push_str("  the model that served before serves on\n");
    }
    let _ = writeln!(out, "  to do: {}", advice(phase, reason, &o.model_dir));
    out
}

/// What an operator does next, by where it failed.
fn advice(phase: &str, reason: &str, dir: &Path) -> String {
    let dir = dir.display();
    match phase {
        "verifying" if reason.contains("ernie-ctl model seal") && reason.contains("has no SHA256SUMS") => {
            format!(
                "`ernie-ctl model inspect {dir}`, then `ernie-ctl model seal {dir}`, then swap again; or --force-unsealed"
            )
        }
        "verifying" if reason.contains("MiB") => {
            "give more memory, quantise, or swap with --strategy stop-first".to_owned()
        }
        "verifying" => format!(
            "`ernie-ctl model verify {dir}` names every file that differs; copy those again, or seal anew if the change was meant"
        ),
        "loading" => format!(
            "`ernie-ctl model inspect {dir}` and `ernie-ctl model verify {dir}`; the worker's last words: `ernie-ctl audit list \
             --act worker`"
        ),
        "probing" => format!(
            "the model loads and does not answer as it should: check that {dir} is what you meant, and its smoke.json; then \
             `ernie-ctl audit list --act rollout`"
        ),
        "soaking" => {
            "`ernie-ctl audit list --act rollout` and `ernie-ctl audit list --act worker` say what was measured; the \
                      rules are rollout.* of `ernie-ctl config show`"
                .to_owned()
        }
        _ => "`ernie-ctl status` and `ernie-ctl audit list --act rollout`".to_owned(),
    }
}
