//! What is kept of responses: a SQLite file of its own in the state directory, or memory where there is none.
//!
//! Bounded by number and bytes, the oldest go first. [`Stored::keep`] never makes a stream wait for the disk: what is not
//! written yet is found in `pending`. An answer of one key is never shown to another.

use super::super::error::{ApiError, ErrorKind};
use serde_json::Value;
use sqlx::Row as _;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OnceCell;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../migrations/responses");

/// Bytes of all kept responses together.
const BYTES_MAX: i64 = 256 << 20;

/// Responses that wait for the disk. When it is this far behind, new ones are not kept.
const PENDING_MAX: usize = 1024;

/// One kept response.
#[derive(Debug, Clone)]
pub struct Kept {
    pub owner: Arc<str>,
    pub response: Value,
    /// The conversation up to and including the answer.
    pub messages: Vec<Value>,
    /// Of a background response that has not ended: what to do after a restart.
    pub asked: Option<Value>,
}

impl Kept {
    pub fn id(&self) -> &str {
        self.response["id"].as_str().unwrap_or_default()
    }
}

/// The store. Opened at the first use.
#[derive(Debug, Clone)]
pub struct Stored {
    path: Option<PathBuf>,
    pool: Arc<OnceCell<SqlitePool>>,
    /// Held for a look-up only, never across a wait. The number tells versions of one response apart.
    pending: Arc<Mutex<HashMap<String, (u64, Kept)>>>,
}

impl Stored {
    pub fn new(state_dir: Option<&Path>) -> Self {
        Self { path: state_dir.map(|dir| dir.join("responses.db")), pool: Arc::default(), pending: Arc::default() }
    }

    /// Keeps a response, or a new version of it, at once for readers and soon on disk; await the handle to know that it is
    /// there. At most `most` are kept.
    pub fn keep(&self, kept: Kept, most: u32) -> tokio::task::JoinHandle<()> {
        let id = kept.id().to_owned();
        let version = {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            let version = pending.get(&id).map_or(0, |(version, _)| version + 1);
            if pending.len() >= PENDING_MAX && version == 0 {
                tracing::warn!(response = id, "a response is not kept: {PENDING_MAX} others wait for the disk");
                return tokio::spawn(async {});
            }
            pending.insert(id.clone(), (version, kept.clone()));
            version
        };
        let store = self.clone();
        tokio::spawn(async move {
            if let Err(error) = store.write(&kept, most).await {
                tracing::warn!(response = id, %error, "a response could not be kept");
            }
            let mut pending = store.pending.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.get(&id).is_some_and(|(newest, _)| *newest == version) {
                pending.remove(&id);
            }
        })
    }

    pub async fn get(&self, owner: &str, id: &str) -> Result<Kept, ApiError> {
        let kept = match self.waiting(id) {
            Some(kept) => Some(kept),
            None => self.read(id).await?,
        };
        kept.filter(|k| &*k.owner == owner).ok_or_else(|| {
            ApiError::new(ErrorKind::NotFound, format!("Response with id '{id}' not found.")).with_param("response_id")
        })
    }

    pub async fn remove(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        self.get(owner, id).await?;
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        sqlx::query("DELETE FROM response WHERE id = ? AND owner = ?")
            .bind(id)
            .bind(owner)
            .execute(self.pool().await?)
            .await
            .map_err(unusable)?;
        Ok(())
    }

    /// Background responses that an earlier life of the daemon did not end, oldest first.
    pub async fn unfinished(&self) -> Result<Vec<Kept>, ApiError> {
        let rows =
            sqlx::query("SELECT owner, object, messages, asked FROM response WHERE asked IS NOT NULL ORDER BY seq")
                .fetch_all(self.pool().await?)
                .await
                .map_err(unusable)?;
        Ok(rows.iter().filter_map(kept).collect())
    }

    fn waiting(&self, id: &str) -> Option<Kept> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).get(id).map(|(_, kept)| kept.clone())
    }

    async fn read(&self, id: &str) -> Result<Option<Kept>, ApiError> {
        let row = sqlx::query("SELECT owner, object, messages, asked FROM response WHERE id = ?")
            .bind(id)
            .fetch_optional(self.pool().await?)
            .await
            .map_err(unusable)?;
        Ok(row.as_ref().and_then(kept))
    }

    async fn write(&self, kept: &Kept, most: u32) -> Result<(), ApiError> {
        let pool = self.pool().await?;
        // A newer version may have overtaken this one, or the response was deleted meanwhile.
        let Some(newest) = self.waiting(kept.id()) else { return Ok(()) };
        let (object, messages) = (newest.response.to_string(), Value::from(newest.messages).to_string());
        let asked = newest.asked.map(|asked| asked.to_string());
        let bytes = object.len() + messages.len() + asked.as_ref().map_or(0, String::len);
        sqlx::query(
            "INSERT INTO response (id, owner, object, messages, asked, bytes) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) \
             DO UPDATE SET object = excluded.object, messages = excluded.messages, asked = excluded.asked, \
             bytes = excluded.bytes WHERE owner = excluded.owner",
        )
        .bind(kept.id())
        .bind(&*kept.owner)
        .bind(object)
        .bind(messages)
        .bind(asked)
        .bind(i64::try_from(bytes).unwrap_or(i64::MAX))
        .execute(pool)
        .await
        .map_err(unusable)?;
        self.prune(pool, most).await.map_err(unusable)
    }

    async fn prune(&self, pool: &SqlitePool, most: u32) -> Result<(), sqlx::Error> {
        let (count, bytes): (i64, i64) =
            sqlx::query_as("SELECT count(*), coalesce(sum(bytes), 0) FROM response").fetch_one(pool).await?;
        // By bytes a tenth goes at once, so that not every new response makes room for itself alone.
        let too_many = (count - i64::from(most)).max(if bytes > BYTES_MAX { count / 10 } else { 0 });
        if too_many > 0 {
            sqlx::query("DELETE FROM response WHERE seq IN (SELECT seq FROM response ORDER BY seq LIMIT ?)")
                .bind(too_many)
                .execute(pool)
                .await?;
        }
        Ok(())
    }

    async fn pool(&self) -> Result<&SqlitePool, ApiError> {
        self.pool.get_or_try_init(|| open(self.path.as_deref())).await.map_err(|error| {
            let place = self.path.as_deref().map_or_else(|| "memory".into(), |p| p.display().to_string());
            tracing::error!(path = place, %error, "the store of responses can not be opened; move it away to begin a new one");
            ApiError::internal("the store of responses can not be opened")
        })
    }
}

async fn open(path: Option<&Path>) -> Result<SqlitePool, sqlx::Error> {
    let options = match path {
        None => SqliteConnectOptions::new().in_memory(true),
        Some(path) => SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // A power cut may cost the last answers; they are no promises like audit rows.
            .synchronous(SqliteSynchronous::Normal),
    };
    // One connection, never closed: it is the data base where there is no file.
    let pool = SqlitePoolOptions::new().max_connections(1).idle_timeout(None).max_lifetime(None);
    let pool = pool.connect_with(options).await?;
    MIGRATIONS.run(&pool).await?;
    if let Some(path) = path {
        // What people wrote is nobody else's business.
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
    }
    Ok(pool)
}

fn kept(row: &sqlx::sqlite::SqliteRow) -> Option<Kept> {
    let asked: Option<String> = row.get("asked");
    Some(Kept {
        owner: Arc::from(row.get::<&str, _>("owner")),
        response: serde_json::from_str(row.get("object")).ok()?,
        messages: serde_json::from_str(row.get("messages")).ok()?,
        asked: asked.and_then(|asked| serde_json::from_str(&asked).ok()),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unusable(error: sqlx::Error) -> ApiError {
    ApiError::internal(format!("the store of responses can not be used: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(owner: &str, number: usize, text: &str) -> Kept {
        let response = json!({"id": format!("resp_{number}"), "text": text});
        Kept { owner: Arc::from(owner), response, messages: vec![json!({"role": "user"})], asked: None }
    }

    #[tokio::test]
    async fn the_oldest_go_when_there_are_too_many_and_the_rest_outlives_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let store = Stored::new(Some(dir.path()));
        for number in 0..10 {
            store.keep(of("a", number, "x"), 4).await.unwrap();
        }
        drop(store);
        let store = Stored::new(Some(dir.path()));
        for number in 0..10 {
            assert_eq!(store.get("a", &format!("resp_{number}")).await.is_ok(), number >= 6, "{number}");
        }
        assert_eq!(store.get("b", "resp_9").await.unwrap_err().kind, ErrorKind::NotFound);
        assert!(store.remove("b", "resp_9").await.is_err());
        store.remove("a", "resp_9").await.unwrap();
        assert!(store.get("a", "resp_9").await.is_err());
        let mode = std::fs::metadata(dir.path().join("responses.db")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_response_is_there_at_once_and_its_newest_version_wins() {
        let store = Stored::new(None);
        let first = store.keep(Kept { asked: Some(json!({})), ..of("a", 1, "begun") }, 10);
        assert_eq!(store.get("a", "resp_1").await.unwrap().response["text"], "begun");
        let second = store.keep(of("a", 1, "ended"), 10);
        assert_eq!(store.get("a", "resp_1").await.unwrap().response["text"], "ended");
        first.await.unwrap();
        second.await.unwrap();
        assert_eq!(store.get("a", "resp_1").await.unwrap().response["text"], "ended");
        assert!(store.unfinished().await.unwrap().is_empty());
    }
}
