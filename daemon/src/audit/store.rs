//! The SQLite file: opening, migrating with a backup, appending rows, keys, usage. One connection writes.

use super::Usage;
use super::chain::{GENESIS, Row, hash};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Row as _, SqliteConnection};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../migrations");

/// Another process (a backup, a person with sqlite3) may hold the file this long before an act is refused.
const BUSY_PATIENCE: Duration = Duration::from_secs(2);
const READERS_MAX: u32 = 2;

/// The store can not be used at start.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("audit store {path}: {source}; check space and permissions, or give another folder with --state-dir DIR")]
    Open { path: PathBuf, source: sqlx::Error },
    #[error(
        "audit store {path} is damaged: {what}; move it away (the daemon makes a new one) and keep it for inspection"
    )]
    Damaged { path: PathBuf, what: String },
    #[error(
        "audit store {path} was made by a newer ernied (its schema {found} is not known here): {source}; upgrade this one"
    )]
    Newer { path: PathBuf, found: i64, source: sqlx::migrate::MigrateError },
    #[error("audit store {path} could not be migrated: {source}; the backup {backup} has it as it was")]
    Migrate { path: PathBuf, backup: PathBuf, source: sqlx::migrate::MigrateError },
    #[error("audit store: {0}")]
    Query(#[from] sqlx::Error),
}

/// A key as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredKey {
    pub id: String,
    pub name: String,
    pub scope: String,
    pub hash: [u8; 32],
    pub limits: ernie_proto::admin::KeyLimits,
    pub models: Vec<String>,
    pub created_at: i64,
    pub expires_at: Option<i64>,
    pub revoked_at: Option<i64>,
}

/// The writing connection. The end of the chain is read in every transaction, so that a failed commit can not mislead it.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    connection: SqliteConnection,
}

impl Store {
    pub(super) async fn open(path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Open { path: path.to_owned(), source };
        let existed = path.exists();
        let mut connection = SqliteConnection::connect_with(&options(path)).await.map_err(fail)?;
        restrict(path);
        let check: String =
            sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&mut connection).await.map_err(fail)?;
        if check != "ok" {
            return Err(StoreError::Damaged { path: path.to_owned(), what: check });
        }
        migrate(path, existed, &mut connection).await?;
        Ok(Self { path: path.to_owned(), connection })
    }

    /// Connections that only read, beside the writer.
    pub(super) async fn reader(&self) -> Result<SqlitePool, StoreError> {
        let options = options(&self.path).read_only(true).create_if_missing(false);
        Ok(SqlitePoolOptions::new().max_connections(READERS_MAX).connect_with(options).await?)
    }

    /// Appends rows in one transaction; `seq` of each is set here. Answers with the last number.
    pub(super) async fn append(&mut self, rows: &mut [Row]) -> Result<i64, sqlx::Error> {
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        let head = sqlx::query("SELECT seq, hash FROM audit_head").fetch_optional(&mut *tx).await?;
        let (mut seq, mut prev): (i64, Vec<u8>) = head.map_or((0, GENESIS.to_vec()), |row| (row.get(0), row.get(1)));
        for row in rows.iter_mut() {
            seq += 1;
            row.seq = seq;
            let digest = hash(row, &prev);
            insert(&mut tx, row, &prev, &digest).await?;
            prev = digest.to_vec();
        }
        sqlx::query("INSERT INTO audit_head (one, seq, hash) VALUES (1, ?, ?) ON CONFLICT (one) DO UPDATE SET seq = excluded.seq, hash = excluded.hash")
            .bind(seq)
            .bind(&prev)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(seq)
    }

    pub(super) async fn store_key(&mut self, key: &StoredKey) -> Result<(), sqlx::Error> {
        sqlx::query(
            "INSERT INTO api_key (id, name, scope, hash, requests_per_minute, tokens_per_minute, tokens_per_day, \
             concurrent_requests, models, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&key.id)
        .bind(&key.name)
        .bind(&key.scope)
        .bind(key.hash.as_slice())
        .bind(key.limits.requests_per_minute)
        .bind(key.limits.tokens_per_minute)
        .bind(i64::try_from(key.limits.tokens_per_day).unwrap_or(i64::MAX))
        .bind(key.limits.concurrent_requests)
        .bind(serde_json::to_string(&key.models).unwrap_or_else(|_| "[]".to_owned()))
        .bind(key.created_at)
        .bind(key.expires_at)
        .execute(&mut self.connection)
        .await
        .map(|_| ())
    }

    pub(super) async fn revoke_key(&mut self, id: &str, at: i64) -> Result<(), sqlx::Error> {
        sqlx::query("UPDATE api_key SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL")
            .bind(at)
            .bind(id)
            .execute(&mut self.connection)
            .await
            .map(|_| ())
    }

    /// Adds a batch of usage to a day.
    pub(super) async fn add_usage(
        &mut self,
        day: &str,
        usage: &BTreeMap<Arc<str>, (u64, Usage)>,
    ) -> Result<(), sqlx::Error> {
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        for (key, (requests, sum)) in usage {
            let int = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            sqlx::query(
                "INSERT INTO usage_day (key_id, day, requests, prompt_tokens, cached_tokens, completion_tokens) \
                 VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key_id, day) DO UPDATE SET \
                 requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, \
                 cached_tokens = cached_tokens + excluded.cached_tokens, \
                 completion_tokens = completion_tokens + excluded.completion_tokens",
            )
            .bind(&**key)
            .bind(day)
            .bind(int(*requests))
            .bind(int(sum.prompt_tokens))
            .bind(int(sum.cached_tokens))
            .bind(int(sum.completion_tokens))
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await
    }

    /// Number and hash of the row before the first one that is kept, and how many rows go, for a time limit.
    pub(super) async fn prunable(&mut self, older_than_ms: i64) -> Result<Option<(i64, Vec<u8>, i64)>, sqlx::Error> {
        // The last row always stays: the chain goes on from it.
        let row = sqlx::query(
            "SELECT seq, hash, (SELECT count(*) FROM audit b WHERE b.seq <= a.seq) FROM audit a \
             WHERE at_ms < ? AND seq < (SELECT seq FROM audit_head) ORDER BY seq DESC LIMIT 1",
        )
        .bind(older_than_ms)
        .fetch_optional(&mut self.connection)
        .await?;
        Ok(row.map(|r| (r.get(0), r.get(1), r.get(2))))
    }

    /// The same for a number of rows to keep.
    pub(super) async fn prunable_keeping(&mut self, keep: i64) -> Result<Option<(i64, Vec<u8>, i64)>, sqlx::Error> {
        let row = sqlx::query(
            "SELECT seq, hash, (SELECT count(*) FROM audit b WHERE b.seq <= a.seq) FROM audit a \
             WHERE seq <= (SELECT seq FROM audit_head) - ? ORDER BY seq DESC LIMIT 1",
        )
        .bind(keep.max(1))
        .fetch_optional(&mut self.connection)
        .await?;
        Ok(row.map(|r| (r.get(0), r.get(1), r.get(2))))
    }

    pub(super) async fn prune(&mut self, through: i64) -> Result<(), sqlx::Error> {
        sqlx::query("DELETE FROM audit WHERE seq <= ?").bind(through).execute(&mut self.connection).await.map(|_| ())
    }

    /// Rows and bytes of the file.
    pub(super) async fn size(&mut self) -> Result<(i64, u64), sqlx::Error> {
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM audit").fetch_one(&mut self.connection).await?;
        let pages: i64 = sqlx::query_scalar("PRAGMA page_count").fetch_one(&mut self.connection).await?;
        let free: i64 = sqlx::query_scalar("PRAGMA freelist_count").fetch_one(&mut self.connection).await?;
        let page: i64 = sqlx::query_scalar("PRAGMA page_size").fetch_one(&mut self.connection).await?;
        Ok((rows, u64::try_from((pages - free) * page).unwrap_or(0)))
    }

    pub(super) async fn close(self) {
        // What could not be closed well is replayed from the write-ahead log at the next start.
        let _ = self.connection.close().await;
    }
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // An intent that was answered for must survive a power cut.
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(BUSY_PATIENCE)
        .disable_statement_logging()
}

/// Key hashes and names are nobody else's business.
fn restrict(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
}

/// Brings an older store up to date, with a copy of it as it was.
async fn migrate(path: &Path, existed: bool, connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let have: Option<i64> = if existed {
        // No such table: never migrated, so nothing worth a backup.
        sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(&mut *connection).await.ok().flatten()
    } else {
        None
    };
    let newest = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
    let backup = path.with_extension(format!("schema-{}.db", have.unwrap_or(0)));
    if let Some(have) = have
        && have < newest
        && !backup.exists()
    {
        sqlx::query("VACUUM INTO ?").bind(backup.display().to_string()).execute(&mut *connection).await?;
        restrict(&backup);
        tracing::info!(backup = %backup.display(), from = have, to = newest, "audit store copied before its migration");
    }
    MIGRATIONS.run(&mut *connection).await.map_err(|source| match have {
        Some(found) if found > newest => StoreError::Newer { path: path.to_owned(), found, source },
        _ => StoreError::Migrate { path: path.to_owned(), backup, source },
    })
}

async fn insert(tx: &mut SqliteConnection, row: &Row, prev: &[u8], digest: &[u8; 32]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO audit (seq, at_ms, kind, actor, role, act, subject, intent, outcome, duration_ms, detail, version, \
         prev, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(row.seq)
    .bind(row.at_ms)
    .bind(&row.kind)
    .bind(&row.actor)
    .bind(&row.role)
    .bind(&row.act)
    .bind(&row.subject)
    .bind(row.intent)
    .bind(&row.outcome)
    .bind(row.duration_ms)
    .bind(&row.detail)
    .bind(&row.version)
    .bind(prev)
    .bind(digest.as_slice())
    .execute(tx)
    .await
    .map(|_| ())
}
