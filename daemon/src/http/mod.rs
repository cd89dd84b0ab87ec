//! The HTTP API: bytes to domain and back.
//!
//! [`Api`] is all that handlers share; [`router`] declares every route once. Nothing here knows workers, and nothing here
//! changes the daemon: that is the admin socket's.

pub mod assemble;
pub mod auth;
pub mod batches;
pub mod body;
pub mod call;
pub mod chat;
pub mod chat_batch;
pub mod completions;
pub mod conversation;
pub mod error;
pub mod files;
pub mod health;
pub mod history;
pub mod layers;
pub mod listen;
pub mod logprobs;
pub mod messages;
pub mod models;
pub mod openapi;
pub mod responses;
pub mod sse;
pub mod structural_tag;
pub mod structured;
pub mod tokenize;
pub mod tools;
pub mod validate;

#[cfg(test)]
mod tests;

use crate::admission::{Admission, AdmissionLimits};
use crate::config::{Config, ErrorStyle};
use crate::generate::TextPool;
use crate::keys::KeyStore;
use crate::supervisor::FleetHandle;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::requests::Observers;
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{any, get, post};
use conversation::SystemPolicy;
use http::{HeaderValue, Uri, header};
use listen::ListenSettings;
use sse::StreamSettings;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use validate::RequestLimits;

/// How the API behaves.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    pub error_style: ErrorStyle,
    /// Origins that browsers may call from; `*` is any. Empty: none.
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: u64,
    /// A body has to come within this.
    pub body_timeout: Duration,
    /// A request that takes longer is ended. `None`: no limit but the client's own.
    pub request_timeout: Option<Duration>,
    /// Between comments on a silent stream.
    pub keep_alive: Duration,
    /// How long a request waits for a model that is being loaded.
    pub model_patience: Duration,
    pub limits: RequestLimits,
    /// Refuse fields that nobody knows.
    pub strict_requests: bool,
    /// A MoE layer without an active expert withdraws readiness.
    pub unready_on_zero_experts: bool,
    /// Thinking under its older name as well (`reasoning_content`).
    pub reasoning_content: bool,
    pub system_policy: SystemPolicy,
    /// Bound of every chat's history in tokens; requests may ask for their own.
    pub truncate_history: Option<u32>,
    /// Responses kept for later; the oldest go first.
    pub stored_responses: u32,
    /// Where files, batches and responses are kept. `None`: the former are not offered, responses are kept in memory.
    pub state_dir: Option<PathBuf>,
    /// One log line per finished request.
    pub log_requests: bool,
    /// A warning for requests that take longer.
    pub slow_request: Option<Duration>,
    /// Texts that are rendered or encoded at the same time.
    pub text_places: usize,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            error_style: ErrorStyle::Vllm,
            allowed_origins: Vec::new(),
            max_body_bytes: 16 << 20,
            body_timeout: Duration::from_secs(30),
            request_timeout: None,
            keep_alive: Duration::from_secs(10),
            model_patience: Duration::from_secs(10),
            limits: RequestLimits::default(),
            strict_requests: false,
            unready_on_zero_experts: false,
            reasoning_content: true,
            system_policy: SystemPolicy::Merge,
            truncate_history: None,
            stored_responses: 10_000,
            state_dir: None,
            log_requests: true,
            slow_request: None,
            text_places: 2,
        }
    }
}

impl HttpSettings {
    fn stream(&self) -> StreamSettings {
        StreamSettings { keep_alive: self.keep_alive, error_style: self.error_style }
    }
}

/// What all handlers share.
#[derive(Debug)]
pub struct Api {
    pub fleet: FleetHandle,
    pub admission: Arc<Admission>,
    pub metrics: Arc<Metrics>,
    /// Who hears of requests besides the metrics.
    pub observers: Observers,
    pub keys: KeyStore,
    settings: watch::Sender<Arc<HttpSettings>>,
    listen: ListenSettings,
    responses: responses::store::Stored,
    running: responses::background::Running,
    files: Option<files::Files>,
    batches: Option<batches::Batches>,
    texts: TextPool,
    started: Instant,
    started_unix: u64,
    /// Readiness is withdrawn although the fleet still serves.
    leaving: AtomicBool,
}

impl Api {
    pub fn new(
        fleet: FleetHandle,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        keys: KeyStore,
        settings: HttpSettings,
    ) -> Arc<Self> {
        Self::with_listen(fleet, admission, metrics, Observers::default(), keys, settings, ListenSettings::default())
    }

    fn with_listen(
        fleet: FleetHandle,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        observers: Observers,
        keys: KeyStore,
        settings: HttpSettings,
        listen: ListenSettings,
    ) -> Arc<Self> {
        let texts = TextPool::new(settings.text_places);
        let state_dir = settings.state_dir.clone();
        Arc::new(Self {
            fleet,
            admission,
            metrics,
            observers,
            keys,
            settings: watch::Sender::new(Arc::new(settings)),
            listen,
            responses: responses::store::Stored::new(state_dir.as_deref()),
            running: responses::background::Running::default(),
            files: state_dir.as_deref().map(files::Files::new),
            batches: state_dir.as_deref().map(batches::Batches::new),
            texts,
            started: Instant::now(),
            started_unix: call::unix_now(),
            leaving: AtomicBool::new(false),
        })
    }

    /// The settings in force; one request reads them where it needs them, so a reload counts from the next one on.
    pub fn settings(&self) -> Arc<HttpSettings> {
        self.settings.borrow().clone()
    }

    /// Takes what a reload of the configuration may change.
    pub fn apply(&self, config: &Config) {
        self.admission.set_limits(admission_limits(config));
        self.settings.send_replace(Arc::new(http_settings(config)));
    }

    pub(crate) fn files(&self) -> Result<&files::Files, error::ApiError> {
        self.files.as_ref().ok_or_else(no_state_dir)
    }

    pub(crate) fn batches(&self) -> Result<&batches::Batches, error::ApiError> {
        self.batches.as_ref().ok_or_else(no_state_dir)
    }

    /// Keeps a response for later; await the handle to know that it is on disk.
    fn keep_response(&self, kept: responses::store::Kept) -> impl Future<Output = ()> + use<> {
        let writing = self.responses.keep(kept, self.settings().stored_responses);
        async move { drop(writing.await) }
    }

    /// Bounds of connections, as configured at the start.
    pub fn listen_settings(&self) -> ListenSettings {
        self.listen.clone()
    }

    /// From now on probes say that this server is leaving, so that load balancers stop sending; requests are still taken.
    pub fn withdraw_readiness(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Whether the model that serves was seen to route tokens nowhere, and that is to count (requirements F9).
    pub fn is_distrusted(&self) -> bool {
        self.metrics.zero_experts_seen() && self.settings().unready_on_zero_experts
    }
}

/// The API of a daemon, from its configuration.
pub fn build(
    config: &Config,
    fleet: &FleetHandle,
    metrics: &Arc<Metrics>,
    observers: &Observers,
    keys: &KeyStore,
) -> Arc<Api> {
    let admission = Admission::new(admission_limits(config));
    let listen = ListenSettings { header_timeout: config.server.header_timeout, ..ListenSettings::default() };
    Api::with_listen(
        fleet.clone(),
        admission,
        metrics.clone(),
        observers.clone(),
        keys.clone(),
        http_settings(config),
        listen,
    )
}

fn no_state_dir() -> error::ApiError {
    error::ApiError::new(error::ErrorKind::NotImplemented, "files and batches need a state directory (--state-dir)")
}

fn admission_limits(config: &Config) -> AdmissionLimits {
    AdmissionLimits {
        running_max: config.engine.max_num_seqs as usize * config.workers.count.max(1) as usize,
        queued_max: config.limits.max_queued_requests as usize,
        queued_tokens_max: Some(config.limits.max_queued_tokens).filter(|n| *n > 0),
    }
}

fn http_settings(config: &Config) -> HttpSettings {
    let (server, limits) = (&config.server, &config.limits);
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    HttpSettings {
        error_style: server.error_style,
        allowed_origins: server.allowed_origins.clone(),
        max_body_bytes: server.max_body_bytes,
        body_timeout: server.body_timeout,
        request_timeout: server.request_timeout,
        keep_alive: server.keep_alive,
        model_patience: config.rollout.hold,
        strict_requests: server.strict_requests,
        unready_on_zero_experts: server.unready_on_zero_experts,
        reasoning_content: server.reasoning_content,
        state_dir: Some(config.paths.state_dir.clone()),
        log_requests: config.logging.requests,
        slow_request: config.logging.slow_request,
        truncate_history: limits.truncate_history,
        stored_responses: limits.stored_responses,
        limits: RequestLimits {
            choices_max: limits.max_choices,
            logprobs_max: limits.max_logprobs,
            ..RequestLimits::default()
        },
        text_places: cores.div_ceil(2),
        ..HttpSettings::default()
    }
}

/// Every route of the public listener.
pub fn router(api: Arc<Api>) -> Router {
    let mut routes = health_routes()
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{id}", get(models::one))
        .route("/v1/chat/completions/batch", post(chat_batch::completions))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/files", get(files::list).post(files::upload))
        .route("/v1/files/{id}", get(files::describe).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(batches::list).post(batches::create))
        .route("/v1/batches/{id}", get(batches::describe))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/openapi.json", get(openapi::document))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize));
    for path in [
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/rerank",
        "/score",
        "/pooling",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/moderations",
    ] {
        routes = routes.route(path, any(layers::not_offered));
    }
    finished(routes, api)
}

/// Health, load, version and metrics alone: for a listener and a runtime of their own, so that they answer while every core
/// is busy with requests.
pub fn health_router(api: Arc<Api>) -> Router {
    finished(health_routes(), api)
}

fn health_routes() -> Router<Arc<Api>> {
    Router::new()
        .route("/health", get(health::ready))
        .route("/health/ready", get(health::ready))
        .route("/health/live", get(health::live))
        .route("/health/startup", get(health::startup))
        .route("/ping", get(health::ready).post(health::ready))
        .route("/ready", get(health::ready))
        .route("/readyz", get(health::ready))
        .route("/livez", get(health::live))
        .route("/healthz", get(health::live))
        .route("/version", get(health::version))
        .route("/load", get(health::load))
        .route("/metrics", get(health::metrics))
        .route("/metrics/", get(health::metrics))
}

fn finished(routes: Router<Arc<Api>>, api: Arc<Api>) -> Router {
    let routes = routes
        .fallback(layers::unknown_path)
        .method_not_allowed_fallback(layers::method_not_allowed)
        .layer(from_fn_with_state(api.clone(), layers::finish));
    let routes = match cors(&api.settings().allowed_origins) {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes.with_state(api)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let origins = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()))
    };
    let exposed = [header::HeaderName::from_static("x-request-id"), header::RETRY_AFTER];
    Some(
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods(AllowMethods::mirror_request())
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(exposed)
            .max_age(Duration::from_secs(600)),
    )
}

/// `?stream=true` in the URL counts when the body does not say.
fn query_stream(uri: &Uri) -> Option<bool> {
    uri.query()?.split('&').find_map(|pair| match pair {
        "stream=true" | "stream=True" | "stream=1" => Some(true),
        "stream=false" | "stream=False" | "stream=0" => Some(false),
        _ => None,
    })
}
