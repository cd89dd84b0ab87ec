//! Reading the store: rows, verification, keys, usage. Beside the writer, never in its way.

use super::chain::{Checker, Linked, Row, Verdict};
use super::store::{StoreError, StoredKey};
use ernie_proto::admin::{AuditRow, KeyLimits, UsageRow};
use futures::TryStreamExt;
use sqlx::Row as _;
use sqlx::sqlite::{SqlitePool, SqliteRow};

/// Rows of one answer at most.
const ROWS_MAX: u32 = 10_000;

/// What rows to show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Only rows after this number.
    pub after: Option<i64>,
    /// An act, or the beginning of one up to a dot: `key`, `key.create`.
    pub act: Option<String>,
    /// Most rows.
    pub limit: Option<u32>,
    /// Take the first rows after `after`, not the newest; for walking through all of them.
    pub oldest_first: bool,
}

/// Reads beside the writer. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AuditReader {
    pool: SqlitePool,
}

impl AuditReader {
    pub(super) fn new(pool: SqlitePool) -> Self {
        Self { pool }
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    /// Rows in the order of their numbers.
    pub async fn rows(&self, filter: &AuditFilter) -> Result<Vec<AuditRow>, StoreError> {
        let limit = filter.limit.unwrap_or(100).min(ROWS_MAX);
        let mut rows: Vec<AuditRow> = sqlx::query(
            "SELECT seq, at_ms, kind, actor, role, act, subject, intent, outcome, duration_ms, detail, version, prev, hash \
             FROM audit WHERE seq > ?1 AND (?2 IS NULL OR act = ?2 OR act LIKE ?2 || '.%') \
             ORDER BY CASE WHEN ?4 THEN seq ELSE -seq END LIMIT ?3",
        )
        .bind(filter.after.unwrap_or(0))
        .bind(&filter.act)
        .bind(limit)
        .bind(filter.oldest_first)
        .fetch_all(&self.pool)
        .await?
        .iter()
        .map(|row| shown(&linked(row)))
        .collect();
        if !filter.oldest_first {
            rows.reverse();
        }
        Ok(rows)
    }

    /// A single row.
    pub async fn row(&self, seq: i64) -> Result<Option<AuditRow>, StoreError> {
        let row = sqlx::query(
            "SELECT seq, at_ms, kind, actor, role, act, subject, intent, outcome, duration_ms, detail, version, prev, hash \
             FROM audit WHERE seq = ?",
        )
        .bind(seq)
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map(|row| shown(&linked(&row))))
    }

    /// Checks the whole chain.
    pub async fn verify(&self) -> Result<Verdict, StoreError> {
        // One snapshot for rows and head, whatever is appended meanwhile.
        let mut tx = self.pool.begin().await?;
        let mut checker = Checker::default();
        {
            let mut rows = sqlx::query(
                "SELECT seq, at_ms, kind, actor, role, act, subject, intent, outcome, duration_ms, detail, version, prev, hash \
                 FROM audit ORDER BY seq",
            )
            .fetch(&mut *tx);
            while let Some(row) = rows.try_next().await? {
                checker.take(&linked(&row));
            }
        }
        let head = sqlx::query("SELECT seq, hash FROM audit_head").fetch_optional(&mut *tx).await?;
        Ok(checker.finish(head.map(|row| (row.get(0), row.get(1)))))
    }

    /// Intents whose end is not recorded.
    pub async fn unfinished(&self) -> Result<Vec<i64>, StoreError> {
        Ok(sqlx::query_scalar(
            "SELECT seq FROM audit a WHERE kind = 'intent' AND NOT EXISTS (SELECT 1 FROM audit b WHERE b.intent = a.seq) \
             ORDER BY seq DESC LIMIT 100",
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// All keys, revoked ones included.
    pub async fn keys(&self) -> Result<Vec<StoredKey>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, name, scope, hash, requests_per_minute, tokens_per_minute, tokens_per_day, concurrent_requests, \
             models, created_at, expires_at, revoked_at FROM api_key ORDER BY created_at, id",
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.iter().map(key).collect())
    }

    /// Usage of days from `since` (UTC, `2026-01-26`) on.
    pub async fn usage(&self, since: &str) -> Result<Vec<UsageRow>, StoreError> {
        let rows = sqlx::query(
            "SELECT u.key_id, coalesce(k.name, u.key_id), u.day, u.requests, u.prompt_tokens, u.cached_tokens, \
             u.completion_tokens FROM usage_day u LEFT JOIN api_key k ON k.id = u.key_id WHERE u.day >= ? \
             ORDER BY u.day, 2",
        )
        .bind(since)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .iter()
            .map(|r| UsageRow {
                key: r.get(0),
                name: r.get(1),
                day: r.get(2),
                requests: r.get(3),
                prompt_tokens: r.get(4),
                cached_tokens: r.get(5),
                completion_tokens: r.get(6),
            })
            .collect())
    }
}

fn linked(row: &SqliteRow) -> Linked {
    Linked {
        row: Row {
            seq: row.get(0),
            at_ms: row.get(1),
            kind: row.get(2),
            actor: row.get(3),
            role: row.get(4),
            act: row.get(5),
            subject: row.get(6),
            intent: row.get(7),
            outcome: row.get(8),
            duration_ms: row.get(9),
            detail: row.get(10),
            version: row.get(11),
        },
        prev: row.get(12),
        hash: row.get(13),
    }
}

fn shown(linked: &Linked) -> AuditRow {
    let row = &linked.row;
    let at = jiff::Timestamp::from_millisecond(row.at_ms).map_or_else(|_| row.at_ms.to_string(), |t| t.to_string());
    AuditRow {
        seq: row.seq,
        at,
        kind: row.kind.clone(),
        actor: row.actor.clone(),
        role: row.role.clone(),
        act: row.act.clone(),
        subject: row.subject.clone(),
        intent: row.intent,
        outcome: row.outcome.clone(),
        duration_ms: row.duration_ms,
        detail: serde_json::from_str(&row.detail).unwrap_or(serde_json::Value::Null),
        version: row.version.clone(),
        hash: crate::audit::hex(&linked.hash),
    }
}

fn key(row: &SqliteRow) -> StoredKey {
    let bytes: Vec<u8> = row.get(3);
    let mut hash = [0; 32];
    // A hash of another length matches nothing.
    if bytes.len() == 32 {
        hash.copy_from_slice(&bytes);
    }
    let per_day: i64 = row.get(6);
    let models: String = row.get(8);
    StoredKey {
        id: row.get(0),
        name: row.get(1),
        scope: row.get(2),
        hash,
        limits: KeyLimits {
            requests_per_minute: row.get(4),
            tokens_per_minute: row.get(5),
            tokens_per_day: u64::try_from(per_day).unwrap_or(0),
            concurrent_requests: row.get(7),
        },
        models: serde_json::from_str(&models).unwrap_or_default(),
        created_at: row.get(9),
        expires_at: row.get(10),
        revoked_at: row.get(11),
    }
}
