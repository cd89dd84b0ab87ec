//! Dropping old rows without breaking the chain: a checkpoint row first answers for what goes, then the rows go.

use super::chain::Row;
use super::store::Store;
use crate::config::AuditConfig;

/// Prunes by age and by size; answers with the number of rows that went.
pub(super) async fn apply(store: &mut Store, config: &AuditConfig, now_ms: i64) -> Result<i64, sqlx::Error> {
    let mut gone = 0;
    if let Some(age) = config.retention {
        let limit = now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        let found = store.prunable(limit).await?;
        gone += cut(store, found, "age", now_ms).await?;
    }
    if let Some(max) = config.max_bytes {
        let (rows, bytes) = store.size().await?;
        if bytes > max && rows > 1 {
            // Down to three quarters, so that this does not happen with every row.
            let keep = (rows as f64 * 0.75 * max as f64 / bytes as f64) as i64;
            let found = store.prunable_keeping(keep).await?;
            gone += cut(store, found, "size", now_ms).await?;
        }
    }
    Ok(gone)
}

async fn cut(
    store: &mut Store,
    found: Option<(i64, Vec<u8>, i64)>,
    why: &str,
    now_ms: i64,
) -> Result<i64, sqlx::Error> {
    let Some((through, hash, rows)) = found else { return Ok(0) };
    let detail = serde_json::json!({ "through": through, "hash": crate::audit::hex(&hash), "rows": rows, "why": why });
    let checkpoint = Row {
        seq: 0,
        at_ms: now_ms,
        kind: "checkpoint".to_owned(),
        actor: "daemon".to_owned(),
        role: "daemon".to_owned(),
        act: "audit.pruned".to_owned(),
        subject: format!("rows through {through}"),
        intent: None,
        outcome: None,
        duration_ms: None,
        detail: detail.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    store.append(&mut [checkpoint]).await?;
    store.prune(through).await?;
    Ok(rows)
}
