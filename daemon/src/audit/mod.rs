//! The audit store: who did what, on what, and how it ended; and what else must survive (API keys, usage).
//!
//! One task writes; everybody else holds an [`AuditHandle`]. An administrative act is two rows: [`AuditHandle::begin`]
//! commits the intent before the first effect and refuses the act if it can not, [`Act::finish`] records the end. What
//! merely happens (a worker's death, a refused access) is one `event` row and is never waited for. Rows form a hash chain
//! (`chain`); a cut, an edit or an exchange shows in `verify`.

mod chain;
mod queries;
mod retention;
mod store;
mod writer;

pub use chain::Verdict;
pub use queries::{AuditFilter, AuditReader};
pub use store::{StoreError, StoredKey};

use crate::config::AuditConfig;
use crate::telemetry::metrics::Metrics;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};
use writer::Command;

/// Commands that wait for the writer. Acts wait for room; events are dropped (and counted) when a disk is this far behind.
const COMMANDS_MAX: usize = 1024;

/// Who does something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actor {
    /// Someone at the admin socket.
    Peer { uid: u32, gid: u32, pid: Option<i32>, exe: Option<String> },
    /// An API key.
    Key(String),
    /// A signal, whose sender is not known.
    Signal(&'static str),
    /// The daemon itself.
    Daemon,
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer { uid, gid, pid, exe } => {
                write!(f, "uid {uid} gid {gid}")?;
                if let Some(pid) = pid {
                    write!(f, " pid {pid}")?;
                }
                exe.as_ref().map_or(Ok(()), |exe| write!(f, " {exe}"))
            }
            Self::Key(id) => write!(f, "key {id}"),
            Self::Signal(name) => write!(f, "signal {name}"),
            Self::Daemon => f.write_str("daemon"),
        }
    }
}

/// What is about to be done.
#[derive(Debug, Clone)]
pub struct Intent {
    pub actor: Actor,
    pub role: &'static str,
    /// `key.create`, `config.reload`, `model.swap`, ...
    pub act: &'static str,
    pub subject: String,
    pub detail: Value,
}

/// The store does not take rows; acts are refused while that lasts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the audit store does not take rows ({reason}), so nothing may be changed; free space or mend it, then try again"
)]
pub struct AuditUnavailable {
    pub reason: String,
}

/// Tokens of one finished request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Use of the store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AuditHandle {
    commands: mpsc::Sender<Command>,
    metrics: Arc<Metrics>,
    healthy: Arc<AtomicBool>,
    reader: AuditReader,
}

/// Opens or makes the store below `state_dir` and starts its writer; must be called inside a runtime.
pub async fn start(state_dir: &Path, config: &AuditConfig, metrics: Arc<Metrics>) -> Result<AuditHandle, StoreError> {
    let store = store::Store::open(&state_dir.join("audit.db")).await?;
    let reader = AuditReader::new(store.reader().await?);
    let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
    let healthy = Arc::new(AtomicBool::new(true));
    tokio::spawn(writer::run(store, inbox, config.clone(), Arc::clone(&metrics), Arc::clone(&healthy)));
    let handle = AuditHandle { commands, metrics, healthy, reader };
    let unfinished = handle.reader.unfinished().await?;
    if !unfinished.is_empty() {
        tracing::warn!(rows = ?unfinished, "acts were begun whose end is not recorded: the last end was unclean");
    }
    handle.event(
        "daemon.started",
        env!("CARGO_PKG_VERSION"),
        serde_json::json!({ "pid": std::process::id(), "unfinished": unfinished }),
    );
    Ok(handle)
}

impl AuditHandle {
    /// Commits the intent; only then may the act begin.
    pub async fn begin(&self, intent: Intent) -> Result<Act, AuditUnavailable> {
        let (reply, answer) = oneshot::channel();
        let gone = || AuditUnavailable { reason: "its writer has ended".to_owned() };
        self.commands.send(Command::Begin { intent: Box::new(intent.clone()), reply }).await.map_err(|_| gone())?;
        let seq = answer.await.map_err(|_| gone())??;
        Ok(Act { handle: self.clone(), intent, seq, began: Instant::now() })
    }

    /// Records what happened; never waits.
    pub fn event(&self, act: &'static str, subject: &str, detail: Value) {
        self.event_of(Actor::Daemon, "daemon", act, subject, detail);
    }

    /// The same for somebody: a refused access, say.
    pub fn event_of(&self, actor: Actor, role: &'static str, act: &'static str, subject: &str, detail: Value) {
        let intent = Intent { actor, role, act, subject: subject.to_owned(), detail };
        if self.commands.try_send(Command::Event(Box::new(intent))).is_err() {
            self.metrics.audit_written(false);
            tracing::warn!(act, subject, "an audit event was dropped: the store is too far behind");
        }
    }

    /// Adds to today's usage of a key; written within a second, never waited for.
    pub fn usage(&self, key: Arc<str>, usage: Usage) {
        if self.commands.try_send(Command::Usage { key, usage }).is_err() {
            self.metrics.usage_dropped(1);
        }
    }

    /// Changes what is kept, from now on.
    pub fn keep(&self, config: &AuditConfig) {
        if self.commands.try_send(Command::Keep(config.clone())).is_err() {
            tracing::warn!("the audit store is too far behind to take a changed retention; reload once more");
        }
    }

    /// Stores a key. The caller holds an [`Act`].
    pub async fn store_key(&self, key: StoredKey) -> Result<(), AuditUnavailable> {
        self.ask(|reply| Command::StoreKey { key: Box::new(key), reply }).await
    }

    /// Marks a key revoked. The caller holds an [`Act`].
    pub async fn revoke_key(&self, id: String, at: i64) -> Result<(), AuditUnavailable> {
        self.ask(|reply| Command::RevokeKey { id, at, reply }).await
    }

    /// Writes what is pending and records a clean end.
    pub async fn close(&self) {
        // Readers first: the last connection to go folds the write-ahead log into the file.
        self.reader.close().await;
        let (reply, answer) = oneshot::channel();
        if self.commands.send(Command::Close { reply }).await.is_ok() {
            let _ = answer.await;
        }
    }

    /// Whether the last write went well.
    pub fn healthy(&self) -> bool {
        self.healthy.load(Ordering::Acquire)
    }

    pub fn reader(&self) -> &AuditReader {
        &self.reader
    }

    async fn ask(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<(), AuditUnavailable>>) -> Command,
    ) -> Result<(), AuditUnavailable> {
        let (reply, answer) = oneshot::channel();
        let gone = || AuditUnavailable { reason: "its writer has ended".to_owned() };
        self.commands.send(command(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// An act under way. Dropping it without [`Act::finish`] leaves the intent visibly unfinished.
#[derive(Debug)]
#[must_use]
pub struct Act {
    handle: AuditHandle,
    intent: Intent,
    seq: i64,
    began: Instant,
}

impl Act {
    /// Sequence number of the intent.
    pub fn seq(&self) -> i64 {
        self.seq
    }

    /// Records the end. The effect has happened whether or not this can be written, so it is not an error for the caller.
    pub async fn finish(self, outcome: Result<Value, String>) {
        let (outcome, detail) = match outcome {
            Ok(detail) => ("ok", detail),
            Err(reason) => ("failed", serde_json::json!({ "reason": reason })),
        };
        let elapsed = i64::try_from(self.began.elapsed().as_millis()).unwrap_or(i64::MAX);
        tracing::info!(act = self.intent.act, subject = self.intent.subject, actor = %self.intent.actor, outcome, audit = self.seq, "administrative act");
        let (reply, answer) = oneshot::channel();
        let command = Command::Finish {
            intent: Box::new(Intent { detail, ..self.intent }),
            seq: self.seq,
            outcome,
            duration_ms: elapsed,
            reply,
        };
        if self.handle.commands.send(command).await.is_ok()
            && let Ok(Err(e)) = answer.await
        {
            tracing::error!(audit = self.seq, "the end of an act could not be recorded: {e}");
        }
    }
}

#[cfg(test)]
mod tests;
