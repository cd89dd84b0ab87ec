//! `swap`, `rollback`: the rollout's verbs.

use super::error::{AdminError, body};
use super::{Caller, Control, Verb};
use crate::supervisor::{RolloutRefusal, Strategy, SwapRequest};
use axum::extract::State;
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use std::sync::Arc;
use std::time::Duration;

pub(super) async fn swap(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Done>, AdminError> {
    let wanted: admin::Swap = body(&bytes)?;
    let problems = crate::config::preflight::model(&wanted.model_dir, true);
    if !problems.is_empty() {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        return Err(AdminError::invalid(all.join("; ")));
    }
    let strategy = match wanted.strategy.as_deref() {
        None | Some("auto") => Strategy::Auto,
        Some("side-by-side") => Strategy::SideBySide,
        Some("stop-first") => Strategy::StopFirst,
        Some(other) => {
            let message = format!("there is no strategy {other:?}; use auto, side-by-side or stop-first");
            return Err(AdminError::invalid(message));
        }
    };
    let observe = Duration::try_from_secs_f64(wanted.observe_seconds.unwrap_or(600.0))
        .map_err(|_| AdminError::invalid("observe_seconds must be a number of seconds, 0 or more"))?;
    let detail = serde_json::to_value(&wanted).unwrap_or_default();
    let act = control.act(&caller, Verb::Swap, &wanted.model_dir.display().to_string(), detail).await?;
    let seq = act.seq();
    let request = SwapRequest {
        model_dir: wanted.model_dir,
        served_names: wanted.served_names,
        strategy,
        observe,
        canary: wanted.canary_percent.map(|p| (p.clamp(0.0, 100.0) * 100.0) as u32),
        force_unsealed: wanted.force_unsealed,
    };
    let begun = control.fleet.swap(request).await;
    act.finish(
        begun.as_ref().map(|id| serde_json::json!({ "deployment": id.to_string() })).map_err(ToString::to_string),
    )
    .await;
    let id = begun.map_err(refusal)?;
    Ok(Json(admin::Done {
        message: format!("rollout of {id} has begun; `ernie-ctl status` follows it"),
        audit: Some(seq),
    }))
}

pub(super) async fn rollback(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Done>, AdminError> {
    let wanted: admin::Rollback = body(&bytes)?;
    let reason = wanted.reason.unwrap_or_else(|| "asked for by an operator".to_owned());
    let act = control.act(&caller, Verb::Rollback, "", serde_json::json!({ "reason": reason })).await?;
    let seq = act.seq();
    let begun = control.fleet.rollback(reason).await;
    act.finish(begun.as_ref().map(|()| serde_json::json!({})).map_err(ToString::to_string)).await;
    begun.map_err(refusal)?;
    Ok(Json(admin::Done { message: "going back to the previous revision".to_owned(), audit: Some(seq) }))
}

fn refusal(refusal: RolloutRefusal) -> AdminError {
    match refusal {
        RolloutRefusal::Invalid(message) => AdminError::invalid(message),
        RolloutRefusal::Draining => AdminError::unavailable(refusal.to_string()),
        RolloutRefusal::Busy { .. } | RolloutRefusal::NothingToRollBack | RolloutRefusal::NotServing => {
            AdminError::conflict(refusal.to_string())
        }
    }
}
