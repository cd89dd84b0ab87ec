//! The one task that writes. Takes what waits in one go, so that a burst of events is one transaction.

use super::Usage;
use super::chain::Row;
use super::store::{Store, StoredKey};
use super::{AuditUnavailable, Intent, retention};
use crate::config::AuditConfig;
use crate::telemetry::metrics::Metrics;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};

/// Usage is lost for at most this long by a kill -9.
const USAGE_INTERVAL: Duration = Duration::from_millis(500);
const RETENTION_INTERVAL: Duration = Duration::from_secs(600);
/// Commands of one transaction at most.
const BATCH_MAX: usize = 256;
/// Keys whose usage waits for a store that does not take it; beyond that it is dropped and counted.
const USAGE_KEYS_MAX: usize = 10_000;

type Reply<T> = oneshot::Sender<Result<T, AuditUnavailable>>;

#[derive(Debug)]
pub(super) enum Command {
    Begin {
        intent: Box<Intent>,
        reply: Reply<i64>,
    },
    Finish {
        intent: Box<Intent>,
        seq: i64,
        outcome: &'static str,
        duration_ms: i64,
        reply: Reply<()>,
    },
    Event(Box<Intent>),
    Usage {
        key: Arc<str>,
        usage: Usage,
    },
    /// A reload changed what is kept.
    Keep(AuditConfig),
    StoreKey {
        key: Box<StoredKey>,
        reply: Reply<()>,
    },
    RevokeKey {
        id: String,
        at: i64,
        reply: Reply<()>,
    },
    Close {
        reply: oneshot::Sender<()>,
    },
}

struct Writer {
    store: Store,
    keep: AuditConfig,
    metrics: Arc<Metrics>,
    healthy: Arc<AtomicBool>,
    usage: BTreeMap<Arc<str>, (u64, Usage)>,
}

/// Writes until it is closed or nobody is left to ask.
pub(super) async fn run(
    store: Store,
    mut inbox: mpsc::Receiver<Command>,
    keep: AuditConfig,
    metrics: Arc<Metrics>,
    healthy: Arc<AtomicBool>,
) {
    let mut writer = Writer { store, keep, metrics, healthy, usage: BTreeMap::new() };
    let mut usage = interval(USAGE_INTERVAL);
    usage.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retention = interval(RETENTION_INTERVAL);
    let mut batch = Vec::with_capacity(BATCH_MAX);
    loop {
        tokio::select! {
            n = inbox.recv_many(&mut batch, BATCH_MAX) => {
                let closed = writer.take(&mut batch).await;
                if n == 0 || closed.is_some() {
                    writer.flush_usage().await;
                    let event = Intent {
                        actor: super::Actor::Daemon,
                        role: "daemon",
                        act: "daemon.stopped",
                        subject: env!("CARGO_PKG_VERSION").to_owned(),
                        detail: serde_json::json!({ "pid": std::process::id() }),
                    };
                    writer.append(vec![row(&event, "event")]).await.ok();
                    writer.store.close().await;
                    if let Some(reply) = closed {
                        let _ = reply.send(());
                    }
                    return;
                }
            }
            _ = usage.tick() => writer.flush_usage().await,
            _ = retention.tick() => writer.prune().await,
        }
    }
}

impl Writer {
    /// Carries out a batch in order; rows that follow each other share a transaction.
    async fn take(&mut self, batch: &mut Vec<Command>) -> Option<oneshot::Sender<()>> {
        let mut rows: Vec<Row> = Vec::new();
        let mut replies: Vec<(usize, Waiting)> = Vec::new();
        let mut closed = None;
        for command in batch.drain(..) {
            match command {
                Command::Begin { intent, reply } => {
                    replies.push((rows.len(), Waiting::Begin(reply)));
                    rows.push(row(&intent, "intent"));
                }
                Command::Finish { intent, seq, outcome, duration_ms, reply } => {
                    replies.push((rows.len(), Waiting::Plain(reply)));
                    let row = row(&intent, "outcome");
                    rows.push(Row {
                        intent: Some(seq),
                        outcome: Some(outcome.to_owned()),
                        duration_ms: Some(duration_ms),
                        ..row
                    });
                }
                Command::Event(intent) => rows.push(row(&intent, "event")),
                Command::Usage { key, usage } => self.count(key, usage),
                Command::Keep(keep) => {
                    self.flush(&mut rows, &mut replies).await;
                    self.keep = keep;
                    self.prune().await;
                }
                Command::StoreKey { key, reply } => {
                    self.flush(&mut rows, &mut replies).await;
                    let result = self.store.store_key(&key).await;
                    let _ = reply.send(self.judge(result));
                }
                Command::RevokeKey { id, at, reply } => {
                    self.flush(&mut rows, &mut replies).await;
                    let result = self.store.revoke_key(&id, at).await;
                    let _ = reply.send(self.judge(result));
                }
                Command::Close { reply } => closed = Some(reply),
            }
        }
        self.flush(&mut rows, &mut replies).await;
        closed
    }

    async fn prune(&mut self) {
        match retention::apply(&mut self.store, &self.keep, now_ms()).await {
            Ok(0) => {}
            Ok(rows) => tracing::info!(rows, "old audit rows dropped, a checkpoint answers for them"),
            Err(e) => tracing::warn!("old audit rows could not be dropped: {e}"),
        }
    }

    async fn flush(&mut self, rows: &mut Vec<Row>, replies: &mut Vec<(usize, Waiting)>) {
        if rows.is_empty() {
            return;
        }
        let count = i64::try_from(rows.len()).unwrap_or(i64::MAX);
        let result = self.append(std::mem::take(rows)).await;
        for (index, waiting) in replies.drain(..) {
            let seq = result.clone().map(|last| last - count + 1 + i64::try_from(index).unwrap_or(0));
            // Whoever asked may have gone; the row stands all the same.
            match waiting {
                Waiting::Begin(reply) => drop(reply.send(seq)),
                Waiting::Plain(reply) => drop(reply.send(seq.map(|_| ()))),
            }
        }
    }

    async fn append(&mut self, mut rows: Vec<Row>) -> Result<i64, AuditUnavailable> {
        let result = self.store.append(&mut rows).await;
        for _ in &rows {
            self.metrics.audit_written(result.is_ok());
        }
        self.judge(result)
    }

    /// Notes whether the store takes writes, and says so when that changes.
    fn judge<T>(&self, result: Result<T, sqlx::Error>) -> Result<T, AuditUnavailable> {
        let was_healthy = self.healthy.swap(result.is_ok(), Ordering::AcqRel);
        match result {
            Ok(value) => {
                if !was_healthy {
                    tracing::info!("the audit store takes rows again");
                }
                Ok(value)
            }
            Err(e) => {
                let reason = e.to_string();
                if was_healthy {
                    tracing::error!(
                        "the audit store does not take rows: {reason}; serving goes on, changes are refused"
                    );
                }
                Err(AuditUnavailable { reason })
            }
        }
    }

    fn count(&mut self, key: Arc<str>, usage: Usage) {
        if self.usage.len() >= USAGE_KEYS_MAX && !self.usage.contains_key(&key) {
            self.metrics.usage_dropped(1);
            return;
        }
        let (requests, sum) = self.usage.entry(key).or_default();
        *requests += 1;
        sum.prompt_tokens += usage.prompt_tokens;
        sum.cached_tokens += usage.cached_tokens;
        sum.completion_tokens += usage.completion_tokens;
    }

    /// What can not be written now is kept and tried again.
    async fn flush_usage(&mut self) {
        if self.usage.is_empty() {
            return;
        }
        let result = self.store.add_usage(&today(), &self.usage).await;
        if self.judge(result).is_ok() {
            self.usage.clear();
        }
    }
}

enum Waiting {
    Begin(Reply<i64>),
    Plain(Reply<()>),
}

fn row(intent: &Intent, kind: &str) -> Row {
    Row {
        seq: 0,
        at_ms: now_ms(),
        kind: kind.to_owned(),
        actor: intent.actor.to_string(),
        role: intent.role.to_owned(),
        act: intent.act.to_owned(),
        subject: intent.subject.clone(),
        intent: None,
        outcome: None,
        duration_ms: None,
        detail: intent.detail.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

pub(super) fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// UTC day.
pub(crate) fn today() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d").to_string()
}
