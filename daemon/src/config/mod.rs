//! The resolved configuration: plain values, checked, with no trace of where they came from.
//!
//! `settings` lists every setting once (key, flag, environment variable, default, what a change needs); `file` reads TOML
//! with positions; `layers` chooses the winning origin of every setting; `resolve` checks all of them and builds the
//! types below, reporting every error at once. `reload` compares two configurations.

pub mod file;
pub mod layers;
pub mod parse;
pub mod preflight;
pub mod reload;
mod resolve;
pub mod settings;
pub mod show;

pub use layers::Sources;
pub use resolve::{Environment, resolve};

use ernie_proto::worker::{Dtype, KvDtype, Quantization, SwapPolicy, SwapRestore};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Everything the daemon was told.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub server: ServerConfig,
    pub model: ModelConfig,
    pub engine: EngineConfig,
    pub swap: SwapConfig,
    pub workers: WorkersConfig,
    pub rollout: RolloutConfig,
    pub limits: LimitsConfig,
    pub logging: LoggingConfig,
    pub metrics: MetricsConfig,
    pub traces: TracesConfig,
    pub admin: AdminConfig,
    pub audit: AuditConfig,
    pub paths: PathsConfig,
}

/// The HTTP side.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerConfig {
    pub host: IpAddr,
    /// 0: chosen by the system.
    pub port: u16,
    /// Serve the API on this Unix socket as well.
    pub uds: Option<PathBuf>,
    /// Plain keys of simple setups; real ones live in the store (`ernie-ctl key create`).
    pub api_keys: Vec<Secret>,
    pub error_style: ErrorStyle,
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: u64,
    /// How long `SIGTERM` lets requests run.
    pub drain_timeout: Duration,
    /// How long the listener still accepts after readiness was withdrawn.
    pub lame_duck: Duration,
    /// A request that takes longer is ended. `None`: no limit.
    pub request_timeout: Option<Duration>,
    /// Between comments on a silent stream.
    pub keep_alive: Duration,
    /// How long a client may take for the headers of a request.
    pub header_timeout: Duration,
    /// How long a client may take for a body.
    pub body_timeout: Duration,
    /// Refuse fields that nobody knows.
    pub strict_requests: bool,
    /// A routing bug makes the server unready.
    pub unready_on_zero_experts: bool,
    /// Name thinking `reasoning_content` as well.
    pub reasoning_content: bool,
}

/// Shape of error bodies, `vllm-compat` §5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorStyle {
    /// `code` is the HTTP status as a number.
    Vllm,
    /// `code` is a word.
    Openai,
}

/// Which model, and how it is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub source: ModelSource,
    /// The first is the name, the rest are aliases. Never empty.
    pub served_names: Vec<String>,
    /// Tokenizer folder when it is not the model's own.
    pub tokenizer: Option<PathBuf>,
    pub dtype: Dtype,
    pub quantization: Quantization,
    /// `None`: the checkpoint's own limit.
    pub max_model_len: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    Dir(PathBuf),
    /// The embedded demo model, unpacked into the state directory.
    Demo,
}

/// What travels to the workers in `Load`.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    /// `None`: measured by the worker.
    pub max_prefill_chunk: Option<u32>,
    pub memory_fraction: f32,
    pub kv_cache_bytes: Option<u64>,
    pub kv_dtype: KvDtype,
    pub swap_space_bytes: u64,
    pub enable_prefix_caching: bool,
    /// 0: one per core.
    pub threads: u32,
    pub pin_threads: bool,
    pub seed: u64,
    pub fair_share: bool,
    pub aging_tokens: u64,
}

/// What goes to the swap space.
#[derive(Debug, Clone, PartialEq)]
pub struct SwapConfig {
    pub policy: SwapChoice,
    /// Minutes of the day in UTC, from and to; over midnight when from is the later one.
    pub window: Option<(u16, u16)>,
    pub restore: SwapRestore,
    pub sequence_share: f32,
    pub high_watermark: f32,
    pub low_watermark: f32,
    pub memory_floor_bytes: u64,
    /// Of each worker's file; 0: none.
    pub disk_bytes: u64,
    /// `None`: in the state directory.
    pub disk_dir: Option<PathBuf>,
}

/// A policy, or one that goes by the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapChoice {
    Fixed(SwapPolicy),
    Window,
}

/// How workers are watched and restarted.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkersConfig {
    pub count: u32,
    /// No progress for this long while there is work: the worker is stalled and replaced.
    pub stall_timeout: Duration,
    /// Loading without a byte of progress for this long is a failure.
    pub load_timeout: Duration,
    pub ping_interval: Duration,
    pub restart_backoff: Duration,
    pub restart_backoff_max: Duration,
    /// That many deaths within `crash_loop_window` make a crash loop.
    pub crash_loop_deaths: u32,
    pub crash_loop_window: Duration,
}

/// How one model replaces another.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutConfig {
    /// How long the old model stays warm, unless the swap says otherwise.
    pub observe: Duration,
    /// Follow changes on disk without being asked.
    pub watch: bool,
    /// How long a request waits for a model that is coming.
    pub hold: Duration,
    pub rules: RolloutRules,
    pub verify_timeout: Duration,
    pub clear_timeout: Duration,
    pub load_timeout: Duration,
    pub probe_timeout: Duration,
    pub restore_timeout: Duration,
}

/// Limits for a new model, each against the old one's figures.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRules {
    pub error_rate_more: f64,
    pub first_token_times: f64,
    pub next_token_times: f64,
    pub idle_experts_more: f64,
    pub requests_min: u32,
    pub probe_slowdown_max: f64,
}

/// Bounds of what is taken on.
#[derive(Debug, Clone, PartialEq)]
pub struct LimitsConfig {
    /// Requests waiting for the engine; more are refused with 503.
    pub max_queued_requests: u32,
    /// Prompt tokens waiting; more are refused with 503.
    pub max_queued_tokens: u64,
    /// Choices per request.
    pub max_choices: u32,
    /// Alternatives per token.
    pub max_logprobs: u32,
    /// Responses kept for later.
    pub stored_responses: u32,
    /// Bound of every chat's history in tokens.
    pub truncate_history: Option<u32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LoggingConfig {
    pub format: LogFormat,
    /// An env-filter directive list, `info` or `info,ernied::supervisor=debug`.
    pub level: String,
    /// Log file beside standard output. `None`: standard output only.
    pub file: Option<PathBuf>,
    pub rotate_bytes: u64,
    /// Begin a new file when a stretch of this length ends, counted from midnight. `None`: by size only.
    pub rotate_every: Option<Duration>,
    /// Old files kept.
    pub rotate_keep: u32,
    /// All log files together; the oldest go first. `None`: only their number is bounded.
    pub total_bytes: Option<u64>,
    pub compress: bool,
    /// One line per finished request.
    pub requests: bool,
    /// A warning for requests that take longer.
    pub slow_request: Option<Duration>,
    /// vLLM's line of averages every ten seconds.
    pub stats: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
    Vllm,
    Bracket,
}

#[derive(Debug, Clone, PartialEq)]
pub struct MetricsConfig {
    /// Also export the names that only the owner's documents use (`vllm:request_success_count`).
    pub legacy_names: bool,
    /// What the flight recorder reaches back.
    pub flight_window: Duration,
}

/// Where spans of requests go.
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// An OTLP/HTTP collector. `None`: there are no traces.
    pub endpoint: Option<String>,
    /// Share of the requests without a parent that is sampled.
    pub sample_ratio: f32,
    /// Link requests to spans of the engine steps that computed them.
    pub steps: bool,
}

/// The control side.
#[derive(Debug, Clone, PartialEq)]
pub struct AdminConfig {
    pub socket: PathBuf,
    /// 0o600 or 0o660.
    pub mode: u32,
    /// Who may change things besides root and the daemon's own user.
    pub admin_uids: Vec<u32>,
    /// Members of these groups may look and drain, not change configuration and keys.
    pub operator_gids: Vec<u32>,
    /// Members of these groups may look.
    pub viewer_gids: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AuditConfig {
    pub retention: Option<Duration>,
    pub max_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct PathsConfig {
    /// Holds everything the daemon writes.
    pub state_dir: PathBuf,
    pub runtime_dir: PathBuf,
    /// The file given with `--config`, re-read on reload.
    pub config_file: Option<PathBuf>,
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// One thing that is wrong: which key, said where, what value, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    pub key: String,
    pub origin: String,
    /// `None`: absent, or a secret.
    pub value: Option<String>,
    pub message: String,
    pub remedy: String,
}

impl ConfigError {
    /// About the file itself.
    pub(crate) fn file(path: &std::path::Path, line: Option<usize>, message: String, remedy: &str) -> Self {
        let place = path.display();
        Self {
            key: String::new(),
            origin: line.map_or_else(|| place.to_string(), |l| format!("{place}:{l}")),
            value: None,
            message,
            remedy: remedy.to_owned(),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            write!(f, "{}: {}", self.origin, self.message)?;
        } else if let Some(value) = &self.value {
            write!(f, "{} = {value:?} ({}): {}", self.key, self.origin, self.message)?;
        } else {
            write!(f, "{} ({}): {}", self.key, self.origin, self.message)?;
        }
        write!(f, "; {}", self.remedy)
    }
}

/// Everything that is wrong, never the first only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => write!(f, "the configuration has an error: {one}"),
            many => {
                write!(f, "the configuration has {} errors:", many.len())?;
                many.iter().try_for_each(|e| write!(f, "\n  {e}"))
            }
        }
    }
}

impl std::error::Error for ConfigErrors {}

#[cfg(test)]
mod tests;
