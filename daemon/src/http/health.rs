//! Whether the service is alive and ready, in the spellings that probes use, and the load and version beside it.
//!
//! *Live*: this process answers. *Ready*: a request that comes now will be worked on. *Started*: a model has been loaded
//! once. All answer from published state, never by asking a worker, so a busy engine can not make them slow.

use super::Api;
use crate::supervisor::{FleetState, FleetStatus};
use crate::telemetry::metrics::{EngineFigures, FleetFigures};
use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/health`, `/ping`, `/ready`, `/readyz`, `/health/ready`: 200 and `OK`, or 503 and one line of reason.
pub async fn ready(State(api): State<Arc<Api>>, RawQuery(query): RawQuery) -> Response {
    let status = api.fleet.status();
    let distrusted = api.is_distrusted();
    let is_ready = status.is_ready() && !api.is_leaving() && !distrusted;
    let code = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut response = if query.as_deref().is_some_and(wants_verbose) {
        (code, Json(verbose(&status, is_ready))).into_response()
    } else {
        (code, if distrusted { DISTRUSTED.to_owned() } else { line(&status, is_ready) }).into_response()
    };
    if code != StatusCode::OK {
        response.headers_mut().insert(header::RETRY_AFTER, http::HeaderValue::from_static("5"));
    }
    response
}

/// For probes, and for whoever reads them.
const DISTRUSTED: &str = "routing: a MoE layer had a token without an active expert; roll back, see the log\n";

/// `/health/live`, `/livez`: this answer is the proof.
pub async fn live() -> &'static str {
    "OK"
}

/// `/health/startup`: 200 once a model has been loaded, whatever has happened since.
pub async fn startup(State(api): State<Arc<Api>>) -> Response {
    let status = api.fleet.status();
    if status.state == FleetState::Starting {
        (StatusCode::SERVICE_UNAVAILABLE, line(&status, false)).into_response()
    } else {
        "OK".into_response()
    }
}

pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

pub async fn load(State(api): State<Arc<Api>>) -> Json<Value> {
    Json(json!({"server_load": api.admission.in_flight()}))
}

/// `/metrics`, in the format that the scraper accepts.
pub async fn metrics(State(api): State<Arc<Api>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok());
    let (content_type, text) = api.metrics.render(&figures(&api), accept);
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

fn wants_verbose(query: &str) -> bool {
    query.split('&').any(|p| matches!(p, "verbose" | "verbose=1" | "verbose=true" | "verbose="))
}

/// One line for people and for `grep OK`.
fn line(status: &FleetStatus, is_ready: bool) -> String {
    if is_ready {
        return "OK".to_owned();
    }
    if status.is_ready() {
        return "leaving: the server is shutting down\n".to_owned();
    }
    let progress = (status.workers.iter().filter_map(|w| w.load.as_ref()))
        .filter(|l| l.bytes_total > 0)
        .map(|l| l.bytes_done * 100 / l.bytes_total)
        .min();
    let reason = status.reason.as_deref().unwrap_or("no worker is ready");
    match progress {
        Some(percent) => format!("{}: {reason} ({percent} % loaded)\n", status.state),
        None => format!("{}: {reason}\n", status.state),
    }
}

fn verbose(status: &FleetStatus, is_ready: bool) -> Value {
    let workers: Vec<Value> = status
        .workers
        .iter()
        .map(|w| {
            json!({
                "slot": w.slot,
                "state": w.state.as_str(),
                "restarts": w.restarts,
                "last_step_age_seconds": w.last_step_age.map(|d| d.as_secs_f64()),
                "last_pong_age_seconds": w.last_pong_age.map(|d| d.as_secs_f64()),
                "load_bytes_done": w.load.as_ref().map(|l| l.bytes_done),
                "load_bytes_total": w.load.as_ref().map(|l| l.bytes_total),
                "running": w.stats.running,
                "waiting": w.stats.waiting,
            })
        })
        .collect();
    json!({
        "status": if is_ready { "ok" } else { "unavailable" },
        "state": status.state.as_str(),
        "reason": status.reason,
        "last_step_age_seconds": status.last_step_age().map(|d| d.as_secs_f64()),
        "requests_dispatched": status.requests_dispatched,
        "requests_held": status.requests_held,
        "workers": workers,
    })
}

/// The fleet as the metrics want it.
fn figures(api: &Api) -> FleetFigures {
    let status = api.fleet.status();
    let active = status.active_deployment();
    let loaded = active.and_then(|d| d.loaded.as_ref());
    let engines = (status.workers.iter())
        .filter(|w| Some(w.deployment) == status.active)
        .map(|w| EngineFigures {
            engine: w.slot,
            pid: w.pid,
            up: w.state.serves(),
            restarts: w.restarts,
            last_step_age_seconds: w.last_step_age.map_or(0.0, |d| d.as_secs_f64()),
            stats: w.stats.clone(),
            block_size: loaded.map_or(16, |l| l.block_size),
            num_blocks: loaded.map_or(0, |l| l.num_blocks),
            weights_bytes: loaded.map_or(0, |l| l.weights_bytes),
            kv_bytes: loaded.map_or(0, |l| l.kv_bytes),
            workspace_bytes: loaded.map_or(0, |l| l.workspace_bytes),
            load_seconds: loaded.map_or_else(Vec::new, |l| l.load_seconds.clone()),
        })
        .collect();
    FleetFigures {
        ready: status.is_ready() && !api.is_leaving() && !api.is_distrusted(),
        draining: status.state == FleetState::Draining || api.is_leaving(),
        model_name: active.and_then(|d| d.served_names.first().cloned()).unwrap_or_default(),
        revision: active.map_or_else(String::new, |d| d.revision.clone()),
        isa: loaded.map_or_else(String::new, |l| l.isa.clone()),
        uptime_seconds: api.started.elapsed().as_secs_f64(),
        requests_in_flight: api.admission.in_flight() as u64,
        deployments: status.revisions(),
        canary_share: status.canary_share(),
        workers_stalled: status.counters.workers_stalled,
        moe_layers: loaded.filter(|l| l.moe).map_or(0, |l| l.layers),
        engines,
    }
}
