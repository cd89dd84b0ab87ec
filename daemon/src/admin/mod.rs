//! The control plane: HTTP and JSON on a Unix socket. Only from here is anything changed; the TCP port serves and reports.
//!
//! Every verb is one row of [`Verb`], with the role it takes. Peer credentials decide who may (`peer`); what changes
//! something goes through the audit store first (`Control::act`).

mod audit;
mod config;
mod debug;
mod error;
mod follow;
mod keys;
mod kv;
mod logs;
mod models;
mod peer;
mod status;
mod watcher;
mod workers;

pub use status::phase_word;
pub use watcher::watch as watch_disk;

use crate::audit::{Act, Actor, AuditHandle, Intent};
use crate::config::{Config, Sources};
use crate::keys::KeyStore;
use crate::model_store::{Configured, Registry};
use crate::supervisor::FleetHandle;
use crate::telemetry::logging::LogControl;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::recorder::Recorder;
use axum::Router;
use axum::extract::{ConnectInfo, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use error::AdminError;
use peer::{Peer, Role};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// Requests of a client that is not ernie-ctl are small too.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// What can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Status,
    Workers,
    RestartWorker,
    Drain,
    Resume,
    Reload,
    ConfigShow,
    ConfigDiff,
    ConfigSet,
    LogShow,
    LogLevel,
    LogRotate,
    KeyList,
    KeyCreate,
    KeyRevoke,
    KeyRotate,
    Usage,
    AuditList,
    AuditVerify,
    Metrics,
    Kv,
    ResetPrefixCache,
    Swap,
    Rollback,
    ModelList,
    ModelAdd,
    ModelRemove,
    DebugDump,
}

impl Verb {
    /// The least role that may.
    fn role(self) -> Role {
        match self {
            Self::Status | Self::Workers | Self::ConfigShow | Self::ConfigDiff | Self::LogShow | Self::Metrics => {
                Role::Viewer
            }
            Self::Kv | Self::Usage | Self::AuditList | Self::AuditVerify | Self::KeyList | Self::ModelList => {
                Role::Viewer
            }
            Self::RestartWorker | Self::Drain | Self::Resume | Self::Reload => Role::Operator,
            Self::LogLevel | Self::LogRotate => Role::Operator,
            Self::ResetPrefixCache | Self::Swap | Self::Rollback | Self::ModelAdd | Self::ModelRemove => Role::Operator,
            Self::DebugDump => Role::Operator,
            Self::ConfigSet | Self::KeyCreate | Self::KeyRevoke | Self::KeyRotate => Role::Admin,
        }
    }

    /// Name in the audit store.
    fn act(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Workers => "workers",
            Self::RestartWorker => "worker.restart",
            Self::Drain => "daemon.drain",
            Self::Resume => "daemon.resume",
            Self::Reload => "config.reload",
            Self::ConfigShow => "config.show",
            Self::ConfigDiff => "config.diff",
            Self::ConfigSet => "config.set",
            Self::LogShow => "log.show",
            Self::LogLevel => "log.level",
            Self::LogRotate => "log.rotate",
            Self::KeyList => "key.list",
            Self::KeyCreate => "key.create",
            Self::KeyRevoke => "key.revoke",
            Self::KeyRotate => "key.rotate",
            Self::Usage => "usage",
            Self::AuditList => "audit.list",
            Self::AuditVerify => "audit.verify",
            Self::Metrics => "metrics",
            Self::Kv => "kv",
            Self::ResetPrefixCache => "prefix_cache.reset",
            Self::Swap => "model.swap",
            Self::Rollback => "model.rollback",
            Self::ModelList => "model.list",
            Self::ModelAdd => "model.add",
            Self::ModelRemove => "model.remove",
            Self::DebugDump => "debug.dump",
        }
    }
}

/// What the control plane is built from.
#[derive(Debug)]
pub struct Parts {
    pub config: Config,
    pub sources: Sources,
    pub fleet: FleetHandle,
    pub metrics: Arc<Metrics>,
    pub recorder: Arc<Recorder>,
    pub audit: AuditHandle,
    pub keys: KeyStore,
    pub log: LogControl,
    pub listening: Vec<String>,
    pub started: Instant,
    /// The model that the configuration names, as it was found at the start.
    pub configured: Configured,
}

/// The configuration in force and where it came from; replaced as a whole.
#[derive(Debug, Clone)]
struct InForce {
    config: Arc<Config>,
    sources: Arc<Sources>,
}

/// The control plane's state.
#[derive(Debug)]
pub struct Control {
    in_force: watch::Sender<InForce>,
    /// One change of the configuration at a time.
    changing: Semaphore,
    fleet: FleetHandle,
    metrics: Arc<Metrics>,
    recorder: Arc<Recorder>,
    audit: AuditHandle,
    keys: KeyStore,
    log: LogControl,
    listening: Vec<String>,
    started: Instant,
    leave: watch::Sender<bool>,
    /// The model that the configuration named when it last had its way: at the start, or by a rollout that completed.
    configured: watch::Sender<Configured>,
    registry: Registry,
}

impl Control {
    pub fn new(parts: Parts) -> Arc<Self> {
        let registry = Registry::new(&parts.config.paths.state_dir);
        let in_force = InForce { config: Arc::new(parts.config), sources: Arc::new(parts.sources) };
        Arc::new(Self {
            in_force: watch::Sender::new(in_force),
            changing: Semaphore::new(1),
            fleet: parts.fleet,
            metrics: parts.metrics,
            recorder: parts.recorder,
            audit: parts.audit,
            keys: parts.keys,
            log: parts.log,
            listening: parts.listening,
            started: parts.started,
            leave: watch::Sender::new(false),
            configured: watch::Sender::new(parts.configured),
            registry,
        })
    }

    /// The configuration in force.
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.in_force.borrow().config)
    }

    /// Calls `apply` with the configuration in force, now and after every reload.
    pub fn follow(&self, apply: impl Fn(&Config) + Send + 'static) {
        let mut in_force = self.in_force.subscribe();
        tokio::spawn(async move {
            loop {
                let config = Arc::clone(&in_force.borrow_and_update().config);
                apply(&config);
                if in_force.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    pub fn log(&self) -> &LogControl {
        &self.log
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Becomes true when somebody asked the daemon to leave.
    pub fn asked_to_leave(&self) -> watch::Receiver<bool> {
        self.leave.subscribe()
    }

    /// Tells a newcomer what to type.
    pub fn say_how_to_try(&self, url: &str) {
        let config = self.config();
        let key = if self.keys.is_open() { "" } else { " -H 'Authorization: Bearer KEY'" };
        let name = &config.model.served_names[0];
        tracing::info!(
            "Try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d \
             '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", \"content\": \"请用一句话介绍人工智能\"}}]}}'"
        );
        if self.keys.is_open() && !config.server.host.is_loopback() {
            tracing::warn!(host = %config.server.host, "the API can be reached from other machines and takes no key; \
                           make one with `ernie-ctl key create NAME`");
        }
    }

    /// Flushes what must last.
    pub async fn close(&self) {
        self.audit.close().await;
    }

    /// Commits the intent of an act; only then may it begin.
    async fn act(
        &self,
        caller: &Caller,
        verb: Verb,
        subject: &str,
        detail: serde_json::Value,
    ) -> Result<Act, AdminError> {
        let intent = Intent {
            actor: caller.actor.clone(),
            role: caller.role.as_str(),
            act: verb.act(),
            subject: subject.to_owned(),
            detail,
        };
        Ok(self.audit.begin(intent).await?)
    }
}

/// Who speaks, and what he may.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) actor: Actor,
    pub(crate) role: Role,
}

/// Answers on the socket from now on; must be called inside a runtime.
pub fn serve(listener: std::os::unix::net::UnixListener, control: &Arc<Control>) -> std::io::Result<()> {
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let service = router(control).into_make_service_with_connect_info::<Peer>();
    tokio::spawn(async move {
        if let Err(e) = axum::serve(listener, service).await {
            tracing::error!("the admin socket is closed: {e}");
        }
    });
    Ok(())
}

/// All verbs with their paths.
pub(crate) fn router(control: &Arc<Control>) -> Router {
    let gate = |verb: Verb| from_fn_with_state((Arc::clone(control), verb), admit);
    Router::new()
        .route("/v1/status", get(status::show).layer(gate(Verb::Status)))
        .route("/v1/workers", get(workers::list).layer(gate(Verb::Workers)))
        .route("/v1/workers/restart", post(workers::restart).layer(gate(Verb::RestartWorker)))
        .route("/v1/drain", post(workers::drain).layer(gate(Verb::Drain)))
        .route("/v1/resume", post(workers::resume).layer(gate(Verb::Resume)))
        .route("/v1/prefix-cache/reset", post(workers::reset_prefix_cache).layer(gate(Verb::ResetPrefixCache)))
        .route("/v1/kv", get(kv::show).layer(gate(Verb::Kv)))
        .route("/v1/metrics", get(status::metrics).layer(gate(Verb::Metrics)))
        .route("/v1/reload", post(config::reload).layer(gate(Verb::Reload)))
        .route("/v1/config", get(config::show).layer(gate(Verb::ConfigShow)))
        .route("/v1/config/diff", get(config::diff).layer(gate(Verb::ConfigDiff)))
        .route("/v1/config/set", post(config::set).layer(gate(Verb::ConfigSet)))
        .route("/v1/logs", get(logs::show).layer(gate(Verb::LogShow)))
        .route("/v1/logs/level", post(logs::level).layer(gate(Verb::LogLevel)))
        .route("/v1/logs/rotate", post(logs::rotate).layer(gate(Verb::LogRotate)))
        .route("/v1/keys", get(keys::list).layer(gate(Verb::KeyList)))
        .route("/v1/keys/create", post(keys::create).layer(gate(Verb::KeyCreate)))
        .route("/v1/keys/{key}", delete(keys::revoke).layer(gate(Verb::KeyRevoke)))
        .route("/v1/keys/{key}/rotate", post(keys::rotate).layer(gate(Verb::KeyRotate)))
        .route("/v1/usage", get(keys::usage).layer(gate(Verb::Usage)))
        .route("/v1/audit", get(audit::list).layer(gate(Verb::AuditList)))
        .route("/v1/audit/verify", get(audit::verify).layer(gate(Verb::AuditVerify)))
        .route("/v1/models", get(models::list).layer(gate(Verb::ModelList)))
        .route("/v1/models/add", post(models::add).layer(gate(Verb::ModelAdd)))
        .route("/v1/models/{name}", delete(models::remove).layer(gate(Verb::ModelRemove)))
        .route("/v1/swap", post(models::swap).layer(gate(Verb::Swap)))
        .route("/v1/rollback", post(models::rollback).layer(gate(Verb::Rollback)))
        .route("/v1/debug/dump", post(debug::dump).layer(gate(Verb::DebugDump)))
        .fallback(error::not_found)
        .layer(axum::extract::DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Arc::clone(control))
}

/// Decides by peer credentials; a refusal is recorded.
async fn admit(
    State((control, verb)): State<(Arc<Control>, Verb)>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    mut request: axum::extract::Request,
    next: Next,
) -> Response {
    let actor = peer.actor();
    match peer.role(&control.config().admin) {
        Some(role) if role >= verb.role() => {
            request.extensions_mut().insert(Caller { actor, role });
            next.run(request).await
        }
        role => {
            let has = role.map_or("none", Role::as_str);
            let detail = serde_json::json!({ "needs": verb.role().as_str(), "has": has });
            control.audit.event_of(actor.clone(), has, "access.refused", verb.act(), detail);
            tracing::warn!(%actor, verb = verb.act(), "refused at the admin socket");
            AdminError::forbidden(&actor, verb.role(), has).into_response()
        }
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
