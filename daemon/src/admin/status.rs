//! `status`: everything at a glance.

use super::error::AdminError;
use super::{Caller, Control};
use crate::config::ModelSource;
use crate::supervisor::{DeploymentStatus, FleetStatus, RolloutOutcome, RolloutResult, WorkerStatus};
use crate::system::memory;
use crate::telemetry::metrics::{EngineFigures, FleetFigures};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use ernie_proto::admin;
use ernie_proto::worker::{LoadPhase, Loaded};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Word of a load phase, in `status`, logs and metrics alike.
pub fn phase_word(phase: LoadPhase) -> &'static str {
    match phase {
        LoadPhase::Open => "open",
        LoadPhase::Weights => "weights",
        LoadPhase::Allocate => "allocate",
        LoadPhase::WarmUp => "warm_up",
    }
}

pub(super) async fn show(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::Status>, AdminError> {
    Ok(Json(control.status(&caller)))
}

/// The same text as `GET /metrics`, for a place without the TCP port.
pub(super) async fn metrics(State(control): State<Arc<Control>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok());
    let (content_type, text) = control.metrics.render(&figures(&control.fleet.status(), control.started), accept);
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

impl Control {
    fn status(&self, caller: &Caller) -> admin::Status {
        let fleet = self.fleet.status();
        let s = &fleet.stats;
        let loaded = fleet.active_deployment().and_then(|d| d.loaded.as_ref());
        // Before the first step a worker has told nothing; what it loaded is known.
        let blocks_total = s.blocks_total.max(loaded.map_or(0, |l| l.num_blocks));
        let blocks_free = if s.blocks_total == 0 { blocks_total } else { s.blocks_free };
        let used = blocks_total.saturating_sub(blocks_free);
        let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let workers: Vec<admin::Worker> = fleet.workers.iter().map(worker).collect();
        let ready_workers = u64::from(fleet.active_deployment().map_or(0, |d| d.workers_ready));
        let per_worker = |bytes: Option<u64>| bytes.unwrap_or(0) * ready_workers;
        admin::Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            state: fleet.state.to_string(),
            ready: fleet.is_ready(),
            reason: fleet.reason.clone(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            listening: self.listening.clone(),
            model: model(&fleet, &self.configured.borrow().dir),
            requests: admin::Requests {
                running: s.running,
                waiting: s.waiting,
                swapped: s.swapped,
                held: fleet.requests_held,
                in_flight: fleet.requests_dispatched + fleet.requests_held,
            },
            kv: admin::Kv {
                block_size: loaded.map_or(0, |l| l.block_size),
                blocks_total,
                blocks_free,
                blocks_cached: s.blocks_cached,
                usage: ratio(f64::from(used), f64::from(blocks_total)),
                prefix_hit_rate: ratio(s.prefix_hits_tokens as f64, s.prefix_queries_tokens as f64),
            },
            rates: admin::Rates {
                generated_tokens_per_second: fleet.tokens_per_second,
                prompt_tokens_per_second: fleet.prompt_tokens_per_second,
                generated_tokens: s.generated_tokens,
                prompt_tokens: s.prompt_tokens,
            },
            counters: admin::Counters {
                workers_lost: fleet.counters.workers_lost,
                workers_stalled: fleet.counters.workers_stalled,
                requests_resumed: fleet.counters.requests_resumed,
                requests_poisonous: fleet.counters.requests_poisonous,
                requests_aborted: fleet.counters.requests_aborted,
                preemptions: s.preemptions,
                log_lines_dropped: self.log.dropped(),
            },
            rollout: rollout(&fleet),
            deployments: fleet.deployments.iter().map(deployment).collect(),
            memory: admin::Memory {
                weights_bytes: per_worker(loaded.map(|l| l.weights_bytes)),
                kv_bytes: per_worker(loaded.map(|l| l.kv_bytes)),
                workspace_bytes: per_worker(loaded.map(|l| l.workspace_bytes)),
                workers_resident_bytes: workers.iter().filter_map(|w| w.resident_bytes).sum(),
                daemon_resident_bytes: memory::process(std::process::id()).map_or(0, |p| p.resident_bytes),
                limit_bytes: memory::limit_bytes().unwrap_or(0),
            },
            workers,
            your_role: caller.role.as_str().to_owned(),
            alarms: self.alarms(&fleet),
        }
    }

    fn alarms(&self, fleet: &FleetStatus) -> Vec<String> {
        let mut alarms = Vec::new();
        if !self.audit.healthy() {
            alarms.push("the audit store does not take rows: changes are refused until it is mended".to_owned());
        }
        if self.log.dropped() > 0 {
            alarms.push(format!("{} log lines were dropped (full disk or a stuck reader)", self.log.dropped()));
        }
        for w in fleet.workers.iter().filter(|w| w.state.as_str() == "crash_loop") {
            alarms.push(format!("worker slot {} of {} is in a crash loop", w.slot, w.deployment));
        }
        if let ModelSource::Dir(dir) = &self.config().model.source {
            let named = dir.canonicalize().unwrap_or_else(|_| dir.clone());
            if named != self.configured.borrow().dir {
                let named = named.display();
                alarms.push(format!(
                    "the configuration names {named}, which was not rolled out; a restart would load it"
                ));
            }
        }
        if self.keys.is_open() && !self.config().server.host.is_loopback() {
            alarms.push("the API can be reached from other machines and takes no key".to_owned());
        }
        alarms
    }
}

/// What metrics want to know at a scrape.
pub(crate) fn figures(fleet: &FleetStatus, started: Instant) -> FleetFigures {
    let active = fleet.active_deployment();
    let loaded = active.and_then(|d| d.loaded.as_ref());
    FleetFigures {
        ready: fleet.is_ready(),
        draining: fleet.state == crate::supervisor::FleetState::Draining,
        model_name: active.and_then(|d| d.served_names.first().cloned()).unwrap_or_default(),
        revision: active.map(|d| d.revision.clone()).unwrap_or_default(),
        isa: loaded.map(|l| l.isa.clone()).unwrap_or_default(),
        uptime_seconds: started.elapsed().as_secs_f64(),
        requests_in_flight: u64::from(fleet.requests_dispatched + fleet.requests_held),
        deployments: fleet.revisions(),
        canary_share: fleet.canary_share(),
        workers_stalled: fleet.counters.workers_stalled,
        moe_layers: loaded.filter(|l| l.moe).map_or(0, |l| l.layers),
        engines: fleet
            .workers
            .iter()
            .filter(|w| Some(w.deployment) == fleet.active)
            .map(|w| engine(w, loaded))
            .collect(),
    }
}

fn engine(w: &WorkerStatus, loaded: Option<&Loaded>) -> EngineFigures {
    EngineFigures {
        engine: w.slot,
        pid: w.pid,
        up: w.state.serves(),
        restarts: w.restarts,
        last_step_age_seconds: w.last_step_age.map_or(0.0, |d| d.as_secs_f64()),
        stats: w.stats.clone(),
        block_size: loaded.map_or(0, |l| l.block_size),
        num_blocks: loaded.map_or(0, |l| l.num_blocks),
        weights_bytes: loaded.map_or(0, |l| l.weights_bytes),
        kv_bytes: loaded.map_or(0, |l| l.kv_bytes),
        workspace_bytes: loaded.map_or(0, |l| l.workspace_bytes),
        load_seconds: loaded.map(|l| l.load_seconds.clone()).unwrap_or_default(),
    }
}

fn model(fleet: &FleetStatus, configured: &Path) -> Option<admin::Model> {
    let d = fleet.active_deployment()?;
    let l = d.loaded.as_ref()?;
    Some(admin::Model {
        name: d.served_names.first().cloned().unwrap_or_default(),
        aliases: d.served_names.iter().skip(1).cloned().collect(),
        deployment: d.id.to_string(),
        revision: d.revision.clone(),
        dir: d.model_dir.clone(),
        configured_dir: (d.model_dir != configured).then(|| configured.to_owned()),
        architecture: l.architecture.clone(),
        moe: l.moe,
        layers: l.layers,
        experts: l.experts,
        experts_per_token: l.experts_per_token,
        parameters: l.parameters,
        parameters_active: l.parameters_active,
        max_model_len: l.max_model_len,
        weights: l.weights.clone(),
        kv: l.kv.clone(),
        isa: l.isa.clone(),
        threads: l.threads,
        load_seconds: l.load_seconds.iter().map(|(_, s)| s).sum(),
    })
}

fn rollout(fleet: &FleetStatus) -> admin::Rollout {
    let r = &fleet.rollout;
    admin::Rollout {
        phase: r.phase.to_string(),
        candidate: r.candidate.map(|d| d.to_string()),
        seconds_left: r.phase_left.map(|d| d.as_secs_f64()),
        last: r.last.as_ref().map(sentence),
        strategy: r.strategy.map(|s| s.as_str().to_owned()),
        canary_percent: r.canary.map(|share| f64::from(share) / 100.0),
        previous: r.previous.clone(),
        outcome: r.last.as_ref().map(outcome),
    }
}

fn sentence(last: &RolloutOutcome) -> String {
    // A revision that was not verified has none.
    let what = if last.revision.is_empty() { last.model_dir.display().to_string() } else { last.revision.clone() };
    match &last.result {
        RolloutResult::Completed => format!("{what} took over"),
        RolloutResult::RolledBack { phase, reason } => format!("{what} did not take over ({phase}): {reason}"),
        RolloutResult::NotRestored { reason } => format!("{what} failed, and the old model is not back yet: {reason}"),
    }
}

fn outcome(last: &RolloutOutcome) -> admin::RolloutOutcome {
    let (result, phase, reason) = match &last.result {
        RolloutResult::Completed => ("completed", None, None),
        RolloutResult::RolledBack { phase, reason } => ("rolled_back", Some(phase.to_string()), Some(reason.clone())),
        RolloutResult::NotRestored { reason } => ("not_restored", None, Some(reason.clone())),
    };
    admin::RolloutOutcome {
        deployment: last.candidate.to_string(),
        model_dir: last.model_dir.clone(),
        revision: last.revision.clone(),
        result: result.to_owned(),
        phase,
        reason,
        seconds: last.elapsed.as_secs_f64(),
        cut_over_seconds: last.cut_over.map(|c| c.pause.as_secs_f64()),
        in_flight: last.cut_over.map(|c| c.in_flight),
        requests_old: last.requests.old,
        requests_new: last.requests.new,
        requests_failed: last.requests.failed,
    }
}

fn deployment(d: &DeploymentStatus) -> admin::DeploymentView {
    admin::DeploymentView {
        id: d.id.to_string(),
        role: d.role.as_str().to_owned(),
        name: d.served_names.first().cloned().unwrap_or_default(),
        revision: d.revision.clone(),
        dir: d.model_dir.clone(),
        workers_ready: d.workers_ready,
        workers_wanted: d.workers_wanted,
        requests: d.requests,
        requests_finished: d.requests_finished,
        requests_failed: d.requests_failed,
    }
}

pub(super) fn worker(w: &WorkerStatus) -> admin::Worker {
    let process = w.pid.and_then(memory::process);
    admin::Worker {
        id: w.id.map(|id| id.to_string()),
        deployment: w.deployment.to_string(),
        slot: w.slot,
        pid: w.pid,
        state: w.state.as_str().to_owned(),
        restarts: w.restarts,
        uptime_seconds: w.uptime.map(|d| d.as_secs_f64()),
        last_step_age_seconds: w.last_step_age.map(|d| d.as_secs_f64()),
        resident_bytes: process.map(|p| p.resident_bytes),
        cpu_seconds: process.map(|p| p.cpu_seconds),
        requests: w.requests,
        running: w.stats.running,
        waiting: w.stats.waiting,
        load: w.load.as_ref().map(|l| admin::LoadState {
            phase: phase_word(l.phase).to_owned(),
            bytes_done: l.bytes_done,
            bytes_total: l.bytes_total,
        }),
        last_failure: w.last_failure.as_ref().map(|f| admin::Failure {
            reason: f.reason.clone(),
            stderr: f.stderr.clone(),
            at: f.at,
        }),
    }
}
