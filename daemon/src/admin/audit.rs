//! `audit list | show | verify`; `export` is `list` in a loop.

use super::Control;
use super::error::AdminError;
use crate::audit::AuditFilter;
use axum::Json;
use axum::extract::{Query, State};
use ernie_proto::admin;
use std::collections::HashMap;
use std::sync::Arc;

pub(super) async fn list(
    State(control): State<Arc<Control>>,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<admin::AuditRows>, AdminError> {
    let number = |name: &str| -> Result<Option<i64>, AdminError> {
        let Some(text) = query.get(name) else { return Ok(None) };
        let parsed = text.parse().ok().filter(|n| *n >= 0);
        parsed.map(Some).ok_or_else(|| AdminError::invalid(format!("{name}={text} is not a number")))
    };
    if let Some(seq) = number("seq")? {
        let row = control.audit.reader().row(seq).await?;
        let row = row.ok_or_else(|| AdminError::missing(format!("there is no audit row {seq}")))?;
        return Ok(Json(admin::AuditRows { rows: vec![row] }));
    }
    let filter = AuditFilter {
        after: number("after")?,
        act: query.get("act").cloned(),
        limit: number("limit")?.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        oldest_first: query.get("order").is_some_and(|o| o == "oldest"),
    };
    Ok(Json(admin::AuditRows { rows: control.audit.reader().rows(&filter).await? }))
}

pub(super) async fn verify(State(control): State<Arc<Control>>) -> Result<Json<admin::AuditVerdict>, AdminError> {
    let verdict = control.audit.reader().verify().await?;
    let unfinished = control.audit.reader().unfinished().await?;
    Ok(Json(admin::AuditVerdict {
        intact: verdict.broken.is_none(),
        rows: verdict.rows,
        first: verdict.first,
        last: verdict.last,
        broken_at: verdict.broken.as_ref().map(|(seq, _)| *seq),
        reason: verdict.broken.map(|(_, reason)| reason),
        unfinished,
    }))
}
