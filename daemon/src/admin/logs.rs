//! `logs level | rotate`.

use super::error::{AdminError, body};
use super::{Caller, Control, Verb};
use axum::extract::State;
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use std::sync::Arc;

pub(super) async fn show(State(control): State<Arc<Control>>) -> Json<admin::LogState> {
    Json(admin::LogState { level: control.log.level(), file: control.log.file(), lines_dropped: control.log.dropped() })
}

pub(super) async fn level(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Done>, AdminError> {
    let wanted: admin::LogLevel = body(&bytes)?;
    crate::config::parse::level(&wanted.level)
        .map_err(|expected| AdminError::invalid(format!("{:?} is no level: {expected}", wanted.level)))?;
    let before = control.log.level();
    let act = control.act(&caller, Verb::LogLevel, &wanted.level, serde_json::json!({ "before": before })).await?;
    let seq = act.seq();
    let result = control.log.set_level(&wanted.level).map_err(|e| e.to_string());
    act.finish(result.clone().map(|()| serde_json::json!({}))).await;
    result.map_err(AdminError::invalid)?;
    Ok(Json(admin::Done { message: format!("log level {} (was {before})", control.log.level()), audit: Some(seq) }))
}

pub(super) async fn rotate(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::Done>, AdminError> {
    let Some(file) = control.log.file() else {
        return Err(AdminError::conflict("there is no log file, only standard output; give one with --log-file PATH"));
    };
    let act = control.act(&caller, Verb::LogRotate, &file.display().to_string(), serde_json::json!({})).await?;
    let seq = act.seq();
    control.log.rotate();
    act.finish(Ok(serde_json::json!({}))).await;
    Ok(Json(admin::Done { message: format!("{} begins anew with the next line", file.display()), audit: Some(seq) }))
}
