//! `workers`, `drain`, `resume`, `prefix-cache reset`.

use super::error::{AdminError, body};
use super::{Caller, Control, Verb, status};
use crate::supervisor::DrainEnd;
use axum::extract::State;
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use ernie_proto::ids::WorkerId;
use std::sync::Arc;
use std::time::Duration;

pub(super) async fn list(State(control): State<Arc<Control>>) -> Json<admin::Workers> {
    Json(admin::Workers { workers: control.fleet.status().workers.iter().map(status::worker).collect() })
}

pub(super) async fn restart(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Done>, AdminError> {
    let wanted: admin::RestartWorker = body(&bytes)?;
    let id = wanted.worker.strip_prefix('w').and_then(|n| n.parse().ok()).map(WorkerId);
    let id = id.ok_or_else(|| AdminError::invalid(format!("{:?} is no worker; they look like w3", wanted.worker)))?;
    let detail = serde_json::json!({ "graceful": wanted.graceful });
    let act = control.act(&caller, Verb::RestartWorker, &wanted.worker, detail).await?;
    let seq = act.seq();
    match control.fleet.restart_worker(id, wanted.graceful).await {
        Ok(true) => {
            act.finish(Ok(serde_json::json!({}))).await;
            let message = if wanted.graceful {
                format!("{id} ends its requests and is replaced then")
            } else {
                format!("{id} is being replaced; its requests go on at the next one")
            };
            Ok(Json(admin::Done { message, audit: Some(seq) }))
        }
        Ok(false) => {
            let message = format!("there is no living worker {id}; `ernie-ctl workers` shows them");
            act.finish(Err(message.clone())).await;
            Err(AdminError::missing(message))
        }
        Err(e) => {
            act.finish(Err(e.to_string())).await;
            Err(AdminError::unavailable(e.to_string()))
        }
    }
}

pub(super) async fn drain(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Drained>, AdminError> {
    let wanted: admin::Drain = body(&bytes)?;
    let patience = match wanted.patience_seconds {
        Some(s) => Duration::try_from_secs_f64(s)
            .map_err(|_| AdminError::invalid("patience_seconds must be a number of seconds, 0 or more"))?,
        None => control.config().server.drain_timeout,
    };
    let detail = serde_json::json!({ "patience_seconds": patience.as_secs_f64(), "exit": wanted.exit });
    let act = control.act(&caller, Verb::Drain, "", detail).await?;
    let report = control.fleet.drain(patience, if wanted.exit { DrainEnd::Leave } else { DrainEnd::Open }).await;
    act.finish(Ok(serde_json::json!({ "finished": report.finished, "failed": report.failed }))).await;
    if wanted.exit {
        control.leave.send_replace(true);
    }
    Ok(Json(admin::Drained { finished: report.finished, failed: report.failed }))
}

pub(super) async fn resume(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::Done>, AdminError> {
    let act = control.act(&caller, Verb::Resume, "", serde_json::json!({})).await?;
    let seq = act.seq();
    let refused = match control.fleet.resume().await {
        Ok(true) => None,
        Ok(false) => Some(AdminError::conflict("the daemon does not drain, or it is about to leave")),
        Err(e) => Some(AdminError::unavailable(e.to_string())),
    };
    match refused {
        None => {
            act.finish(Ok(serde_json::json!({}))).await;
            Ok(Json(admin::Done { message: "requests are taken again".to_owned(), audit: Some(seq) }))
        }
        Some(refused) => {
            act.finish(Err(refused.message().to_owned())).await;
            Err(refused)
        }
    }
}

pub(super) async fn reset_prefix_cache(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::Done>, AdminError> {
    let act = control.act(&caller, Verb::ResetPrefixCache, "", serde_json::json!({})).await?;
    let seq = act.seq();
    let result = control.fleet.reset_prefix_cache().await;
    act.finish(result.map(|()| serde_json::json!({})).map_err(|e| e.to_string())).await;
    result.map_err(|e| AdminError::unavailable(e.to_string()))?;
    Ok(Json(admin::Done { message: "the workers drop their cached prefixes".to_owned(), audit: Some(seq) }))
}
