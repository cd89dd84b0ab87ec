//! `debug dump`.

use super::error::AdminError;
use super::{Caller, Control, Verb};
use axum::extract::State;
use axum::{Extension, Json};
use ernie_proto::admin;
use std::sync::Arc;

/// Writes the last minutes down, as is done by itself when a worker is lost.
pub(super) async fn dump(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::FlightDump>, AdminError> {
    let act = control.act(&caller, Verb::DebugDump, "", serde_json::json!({})).await?;
    let audit = Some(act.seq());
    let flight = control.recorder.flight(&format!("asked for by {}", caller.actor), None);
    let (requests, steps) = (flight.requests.len(), flight.seconds.iter().map(|s| u64::from(s.steps)).sum());
    let recorder = Arc::clone(&control.recorder);
    let written = match tokio::task::spawn_blocking(move || recorder.write(&flight)).await {
        Ok(written) => written.map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    act.finish(written.clone().map(|path| serde_json::json!({ "path": path }))).await;
    let path = written.map_err(AdminError::unavailable)?;
    Ok(Json(admin::FlightDump { path, requests, steps, audit }))
}
