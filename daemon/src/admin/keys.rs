//! `key create | list | revoke | rotate`, `usage`.

use super::error::{AdminError, body};
use super::{Caller, Control};
use axum::extract::{Path, Query, State};
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use jiff::ToSpan;
use std::collections::HashMap;
use std::sync::Arc;

/// Usage is kept by day; nobody asks for more than ten years.
const DAYS_MAX: i64 = 3660;

pub(super) async fn list(State(control): State<Arc<Control>>) -> Json<admin::Keys> {
    Json(admin::Keys { keys: control.keys.list() })
}

pub(super) async fn create(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::CreatedKey>, AdminError> {
    let new: admin::NewKey = body(&bytes)?;
    let configured = control.config().server.api_keys.clone();
    let (key, secret, _) = control.keys.create(&new, caller.actor, caller.role.as_str(), &configured).await?;
    Ok(Json(admin::CreatedKey { key, secret }))
}

pub(super) async fn revoke(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    Path(which): Path<String>,
) -> Result<Json<admin::Done>, AdminError> {
    let configured = control.config().server.api_keys.clone();
    let (key, seq) = control.keys.revoke(&which, caller.actor, caller.role.as_str(), &configured).await?;
    Ok(Json(admin::Done { message: format!("key {} ({}) is revoked", key.name, key.id), audit: Some(seq) }))
}

pub(super) async fn rotate(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    Path(which): Path<String>,
) -> Result<Json<admin::CreatedKey>, AdminError> {
    let configured = control.config().server.api_keys.clone();
    let (key, secret, _) = control.keys.rotate(&which, caller.actor, caller.role.as_str(), &configured).await?;
    Ok(Json(admin::CreatedKey { key, secret }))
}

pub(super) async fn usage(
    State(control): State<Arc<Control>>,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<admin::UsageReply>, AdminError> {
    let days: i64 = match query.get("days") {
        None => 7,
        Some(text) => text
            .parse()
            .ok()
            .filter(|d| (1..=DAYS_MAX).contains(d))
            .ok_or_else(|| AdminError::invalid(format!("days={text} is not a number from 1 to {DAYS_MAX}")))?,
    };
    let today = jiff::ZonedDateTime::now().with_time_zone(jiff::tz::TimeZone::UTC).date();
    let since = today.saturating_sub((days - 1).days());
    Ok(Json(admin::UsageReply { rows: control.audit.reader().usage(&since.to_string()).await? }))
}
