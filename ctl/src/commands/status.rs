//! `status`.

use crate::client::Admin;
use crate::output::{bad, bold, bytes, count, good, print, seconds, show, table, warn};
use anyhow::Result;
use ernie_proto::admin::{Status, Worker};
use std::fmt::Write;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// `status --check`: not ready.
const EXIT_NOT_READY: u8 = 4;

pub(super) async fn run(admin: &Admin, json: bool, check: bool, watch: Option<f64>) -> Result<ExitCode> {
    loop {
        let status: Status = admin.get("/v1/status").await?;
        if watch.is_some() && !json && std::io::stdout().is_terminal() {
            print("\x1b[2J\x1b[H")?;
        }
        show(json, &status, people)?;
        match watch {
            Some(every) => tokio::time::sleep(Duration::from_secs_f64(every.clamp(0.1, 3600.0))).await,
            None if check && !status.ready => return Ok(ExitCode::from(EXIT_NOT_READY)),
            None => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn people(s: &Status) -> String {
    let mut out = String::new();
    let state = match s.state.as_str() {
        state @ "serving" if s.ready => good(state),
        state @ "failed" => bad(state),
        state => warn(state),
    };
    let _ =
        writeln!(out, "{} {} is {state}, pid {}, up {}", bold("ernied"), s.version, s.pid, seconds(s.uptime_seconds));
    if let Some(reason) = &s.reason {
        let _ = writeln!(out, "  {reason}");
    }
    for alarm in &s.alarms {
        let _ = writeln!(out, "  {} {alarm}", bad("!"));
    }
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<10} {value}");
    };
    line("API", s.listening.join(" "));
    if let Some(m) = &s.model {
        let kind = if m.moe {
            format!(
                "MoE, {} of {} experts per token, {} parameters ({} active)",
                m.experts_per_token,
                m.experts,
                count(m.parameters),
                count(m.parameters_active)
            )
        } else {
            format!("dense, {} parameters", count(m.parameters))
        };
        let aliases = if m.aliases.is_empty() { String::new() } else { format!(" (also {})", m.aliases.join(", ")) };
        line("model", format!("{}{aliases}", bold(&m.name)));
        line("", format!("{}, {} layers, {kind}", m.architecture, m.layers));
        line(
            "",
            format!(
                "weights {}, KV {}, up to {} tokens, loaded in {}",
                m.weights,
                m.kv,
                m.max_model_len,
                seconds(m.load_seconds)
            ),
        );
        line("revision", m.revision.clone());
        line("folder", m.dir.display().to_string());
        if let Some(configured) = &m.configured_dir {
            line("", format!("swapped in; the configuration names {}", configured.display()));
        }
        line("compute", format!("{}, {} threads per worker", m.isa, m.threads));
    }
    line(
        "requests",
        format!(
            "{} running, {} waiting{}{}, {} in flight",
            s.requests.running,
            s.requests.waiting,
            if s.requests.swapped > 0 { format!(", {} swapped", s.requests.swapped) } else { String::new() },
            if s.requests.held > 0 { format!(", {} held for a worker", s.requests.held) } else { String::new() },
            s.requests.in_flight
        ),
    );
    line(
        "tokens",
        format!(
            "{:.1} generated/s, {:.1} prompt/s (10 s mean); {} generated, {} prompt since start",
            s.rates.generated_tokens_per_second,
            s.rates.prompt_tokens_per_second,
            count(s.rates.generated_tokens),
            count(s.rates.prompt_tokens)
        ),
    );
    line(
        "KV cache",
        format!(
            "{:.1} % of {} blocks of {} tokens in use, {} hold cached prefixes, prefix hits {:.1} %",
            s.kv.usage * 100.0,
            s.kv.blocks_total,
            s.kv.block_size,
            s.kv.blocks_cached,
            s.kv.prefix_hit_rate * 100.0
        ),
    );
    line(
        "memory",
        format!(
            "weights {}, KV {}, workspace {}; resident {} (daemon {}) of {}",
            bytes(s.memory.weights_bytes),
            bytes(s.memory.kv_bytes),
            bytes(s.memory.workspace_bytes),
            bytes(s.memory.workers_resident_bytes),
            bytes(s.memory.daemon_resident_bytes),
            bytes(s.memory.limit_bytes)
        ),
    );
    if s.rollout.phase != "steady" {
        let left = s.rollout.seconds_left.map(|l| format!(", {} left", seconds(l))).unwrap_or_default();
        let strategy = s.rollout.strategy.as_ref().map(|w| format!(", {w}")).unwrap_or_default();
        let canary = s.rollout.canary_percent.map(|p| format!(", {p} % of the keys")).unwrap_or_default();
        let candidate = s.rollout.candidate.as_deref().unwrap_or("?");
        line("rollout", format!("{} of {candidate}{strategy}{canary}{left}", s.rollout.phase));
    } else if let Some(last) = &s.rollout.last {
        line("rollout", format!("the last one: {last}"));
    }
    if let Some(previous) = s.rollout.previous.as_ref().filter(|_| s.rollout.phase == "steady") {
        line("previous", format!("{} (`ernie-ctl rollback` goes back to it)", previous.display()));
    }
    if s.deployments.len() > 1 {
        for d in &s.deployments {
            let revision: String = d.revision.chars().take(16).collect();
            line(
                "",
                format!(
                    "{} {}: revision {revision}, {} requests under way, {} ended, {} failed",
                    d.id, d.role, d.requests, d.requests_finished, d.requests_failed
                ),
            );
        }
    }
    let c = &s.counters;
    let mut events = Vec::new();
    for (n, what) in [
        (c.workers_lost, "workers lost"),
        (c.workers_stalled, "workers stalled"),
        (c.requests_resumed, "requests resumed"),
        (c.requests_poisonous, "poisonous requests"),
        (c.requests_aborted, "requests aborted"),
        (c.preemptions, "preemptions"),
        (c.log_lines_dropped, "log lines dropped"),
    ] {
        if n > 0 {
            events.push(format!("{n} {what}"));
        }
    }
    if !events.is_empty() {
        line("so far", events.join(", "));
    }
    out.push('\n');
    out.push_str(&workers(&s.workers));
    out
}

/// The table of workers, also for `workers`.
pub(super) fn workers(workers: &[Worker]) -> String {
    let dash = || "-".to_owned();
    let rows = workers.iter().map(|w| {
        let state = match &w.load {
            Some(l) if w.state == "loading" && l.bytes_total > 0 => {
                format!("loading {} % ({})", l.bytes_done.min(l.bytes_total) * 100 / l.bytes_total, l.phase)
            }
            _ => w.state.clone(),
        };
        vec![
            w.id.clone().unwrap_or_else(dash),
            format!("{}/{}", w.deployment, w.slot),
            w.pid.map_or_else(dash, |p| p.to_string()),
            state,
            w.requests.to_string(),
            w.running.to_string(),
            w.waiting.to_string(),
            w.last_step_age_seconds.map_or_else(dash, seconds),
            w.resident_bytes.map_or_else(dash, bytes),
            w.cpu_seconds.map_or_else(dash, seconds),
            w.restarts.to_string(),
            w.uptime_seconds.map_or_else(dash, seconds),
        ]
    });
    let header = [
        "WORKER", "SLOT", "PID", "STATE", "REQUESTS", "RUNNING", "WAITING", "STEP AGE", "RESIDENT", "CPU", "RESTARTS",
        "UP",
    ];
    let mut out = table(&header, rows);
    for w in workers {
        if let Some(f) = &w.last_failure {
            let at = crate::output::moment(i64::try_from(f.at).unwrap_or(0));
            let _ = writeln!(out, "  slot {}/{} lost a worker at {at}: {}", w.deployment, w.slot, f.reason);
            for line in &f.stderr {
                let _ = writeln!(out, "    | {line}");
            }
        }
    }
    out
}
