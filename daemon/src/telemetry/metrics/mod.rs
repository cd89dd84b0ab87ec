//! Metrics: one value, several names (three generations of vLLM's, and our own).
//!
//! `Metrics` is handed down, there is no global registry. Events are methods; what is a state rather than an event (queue
//! lengths, KV blocks, worker ages) is set from [`FleetFigures`] right before a scrape, so no gauge can be left open by
//! an abort. Every series exists from the first scrape with value 0. Older names are copies made at the scrape
//! (`ALIASES`), so two names of one value can not differ.
//!
//! Counters that come from workers are added up here from differences: a restarted worker counts from zero again, ours
//! never fall.

mod expert;
mod exposition;
mod families;
mod http;
mod own;
mod process;
mod vllm;

pub use exposition::Format;

use ernie_proto::ids::WorkerId;
use ernie_proto::worker::{LoadPhase, StepStats};
use families::Families;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Names that are copies of another family, made at the scrape. `(copy, original, only with legacy names)`.
const ALIASES: &[(&str, &str, bool)] = &[
    ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", false),
    ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds", false),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries_total", false),
    ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", false),
    ("vllm:request_success_count", "vllm:request_success_total", true),
];

/// What the metrics need to know before the first scrape.
#[derive(Debug, Clone)]
pub struct MetricsSetup {
    /// First served name: label `model_name` of every `vllm:` series.
    pub model_name: String,
    /// Number of worker slots: label `engine`, "0" and up.
    pub engines: u32,
    /// Longest sequence; bounds the token-count buckets.
    pub max_model_len: u32,
    /// Token budget of a step, for the share in use.
    pub max_num_batched_tokens: u32,
    pub cache: CacheSettings,
    /// Also export names that only the owner's documents use.
    pub legacy_names: bool,
}

/// Labels of `vllm:cache_config_info` that come from the configuration.
#[derive(Debug, Clone, Default)]
pub struct CacheSettings {
    pub enable_prefix_caching: bool,
    pub gpu_memory_utilization: String,
    /// `auto`, `bfloat16`, `int8`.
    pub cache_dtype: String,
    /// In GiB, as vLLM prints it.
    pub swap_space: String,
}

/// Why a request ended, as vLLM labels it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishedReason {
    Stop,
    Length,
    Abort,
    Error,
    Repetition,
}

impl FinishedReason {
    pub const ALL: [FinishedReason; 5] = [Self::Stop, Self::Length, Self::Abort, Self::Error, Self::Repetition];

    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
        }
    }
}

/// A finished request, whatever its end.
#[derive(Debug, Clone)]
pub struct RequestFigures {
    pub finished: FinishedReason,
    pub prompt_tokens: u32,
    /// Prompt tokens from the prefix cache.
    pub cached_tokens: u32,
    /// Of all choices together.
    pub generation_tokens: u32,
    /// Of the longest choice.
    pub generation_tokens_longest: u32,
    pub choices: u32,
    pub max_tokens: Option<u32>,
    /// Arrival to end.
    pub e2e: Duration,
    /// Arrival to the first step. `None`: never began.
    pub queue: Option<Duration>,
    /// First step to first token.
    pub prefill: Option<Duration>,
    /// First token to last.
    pub decode: Option<Duration>,
    /// Times the request went on at another worker.
    pub resumed: u32,
}

/// Why admission refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    QueuedRequests,
    QueuedTokens,
}

impl Rejection {
    const ALL: [Rejection; 2] = [Self::QueuedRequests, Self::QueuedTokens];

    fn label(self) -> &'static str {
        match self {
            Self::QueuedRequests => "max_num_queued_reqs",
            Self::QueuedTokens => "max_num_queued_tokens",
        }
    }
}

/// The fleet as it stands at a scrape.
#[derive(Debug, Clone, Default)]
pub struct FleetFigures {
    pub ready: bool,
    pub draining: bool,
    pub model_name: String,
    pub revision: String,
    pub isa: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    pub requests_in_flight: u64,
    /// Workers replaced so far because they made no progress.
    pub workers_stalled: u64,
    /// Layers of the model that serves, if it is a mixture of experts.
    pub moe_layers: u32,
    pub engines: Vec<EngineFigures>,
    /// All that are loaded or being loaded.
    pub deployments: Vec<RevisionFigures>,
    /// Share of the keys that go to a candidate, 0 to 1.
    pub canary_share: f64,
}

/// One loaded model at a scrape.
#[derive(Debug, Clone, Default)]
pub struct RevisionFigures {
    pub revision: String,
    /// `active`, `canary`, `standby`, ...
    pub role: &'static str,
    pub in_flight: u64,
    pub finished: u64,
    pub failed: u64,
}

/// One worker slot at a scrape.
#[derive(Debug, Clone, Default)]
pub struct EngineFigures {
    pub engine: u32,
    pub pid: Option<u32>,
    pub up: bool,
    pub restarts: u64,
    /// Age of the last sign of progress.
    pub last_step_age_seconds: f64,
    pub stats: StepStats,
    pub block_size: u32,
    pub num_blocks: u32,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    pub load_seconds: Vec<(LoadPhase, f64)>,
}

/// All families of this daemon.
#[derive(Debug)]
pub struct Metrics {
    setup: MetricsSetup,
    families: Families,
    vllm: vllm::Vllm,
    own: own::Own,
    http: http::Http,
    process: process::Process,
    experts: expert::Experts,
    /// Last counters of each worker, to turn "since load" into differences. Held for a few additions only.
    last: Mutex<HashMap<WorkerId, StepStats>>,
    /// Bytes of one KV block, as the last scrape knew it.
    block_bytes: AtomicU64,
    /// A layer of the model that serves had a token without an active expert.
    zero_experts: AtomicBool,
}

impl Metrics {
    pub fn new(setup: MetricsSetup) -> Self {
        let families = Families::new();
        let vllm = vllm::Vllm::new(&families, &setup);
        let own = own::Own::new(&families, &setup);
        let http = http::Http::new(&families);
        let process = process::Process::new(&families);
        let experts = expert::Experts::new(&families);
        Self {
            setup,
            families,
            vllm,
            own,
            http,
            process,
            experts,
            last: Mutex::new(HashMap::new()),
            block_bytes: AtomicU64::new(0),
            zero_experts: AtomicBool::new(false),
        }
    }

    pub fn setup(&self) -> &MetricsSetup {
        &self.setup
    }

    /// The first token of a request left for the client.
    pub fn first_token(&self, since_arrival: Duration) {
        self.vllm.time_to_first_token.observe(since_arrival.as_secs_f64());
        self.own.time_to_first_token.observe(since_arrival.as_secs_f64());
    }

    /// A later token, `gap` after the one before it of the same choice.
    pub fn next_token(&self, gap: Duration) {
        self.vllm.inter_token_latency.observe(gap.as_secs_f64());
        self.own.inter_token_latency.observe(gap.as_secs_f64());
    }

    /// A request ended.
    pub fn request_finished(&self, figures: &RequestFigures) {
        self.vllm.request_finished(figures);
        self.own.request_finished(figures);
    }

    /// Admission refused a request.
    pub fn rejected(&self, why: Rejection) {
        self.vllm.rejections[why as usize].inc();
    }

    /// An API key was refused; `reason` is a word from a fixed set (`missing`, `unknown`, `expired`, `revoked`, `limit`,
    /// `model`), anything else counts as `other`.
    pub fn key_refused(&self, reason: &str) {
        self.own.key_refused(reason);
    }

    /// An HTTP exchange ended. `handler` is the route's pattern, `none` for unknown paths.
    pub fn http_request(&self, method: &str, handler: &str, status: u16, elapsed: Duration) {
        self.http.request(method, handler, status, elapsed);
    }

    /// One engine step was reported by the worker in slot `engine`. Gives the layers that had tokens without an active expert
    /// since the last report, with in how many steps.
    pub fn step(&self, engine: u32, worker: WorkerId, stats: &StepStats) -> Vec<(usize, u64)> {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let previous = last.remove(&worker).unwrap_or_default();
        self.vllm.step(engine, stats, &previous);
        let block = self.block_bytes.load(Ordering::Relaxed);
        let stored = stats.swapped_out_blocks.saturating_sub(previous.swapped_out_blocks) * block;
        let loaded = stats.swapped_in_blocks.saturating_sub(previous.swapped_in_blocks) * block;
        self.vllm.swap_bytes(engine, stored, loaded);
        self.own.step(engine, stats, &previous, self.setup.max_num_batched_tokens);
        let mut kept = stats.clone();
        // Expert counters come about once a second; the last ones seen are the base of the next difference.
        let mut idle_layers = Vec::new();
        if stats.expert_tokens.is_empty() {
            kept.expert_tokens = previous.expert_tokens;
            kept.zero_active = previous.zero_active;
        } else {
            self.experts.step(engine, &stats.expert_tokens, &previous.expert_tokens);
            idle_layers = self.experts.zero_active(&stats.zero_active, &previous.zero_active);
            if !idle_layers.is_empty() {
                self.zero_experts.store(true, Ordering::Release);
            }
        }
        last.insert(worker, kept);
        idle_layers
    }

    /// Whether a layer of the model that serves had a token without an active expert.
    pub fn zero_experts_seen(&self) -> bool {
        self.zero_experts.load(Ordering::Acquire)
    }

    /// Another model serves from now on.
    pub fn deployment_activated(&self) {
        self.zero_experts.store(false, Ordering::Release);
    }

    /// A worker process has ended: its counters will not come again.
    pub fn worker_gone(&self, worker: WorkerId) {
        self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&worker);
    }

    /// A worker process was started again after a death.
    pub fn worker_restarted(&self, engine: u32) {
        self.own.worker_restarted(engine);
    }

    /// Requests that moved to another worker and went on.
    pub fn requests_resumed(&self, count: u64) {
        self.own.requests_resumed.inc_by(count);
    }

    /// An audit row was written, or could not be.
    pub fn audit_written(&self, ok: bool) {
        self.own.audit_writes[usize::from(!ok)].inc();
    }

    /// Usage figures that could not be stored.
    pub fn usage_dropped(&self, rows: u64) {
        self.own.usage_dropped.inc_by(rows);
    }

    /// The state of a model swap changed; `state` is a word of the rollout (`steady`, `verifying`, `loading`, ...).
    pub fn rollout_state(&self, state: &str) {
        self.own.rollout_state(state);
    }

    /// A model swap came to its end.
    pub fn rollout_ended(&self, completed: bool) {
        self.own.rollouts[usize::from(!completed)].inc();
    }

    /// A model swap moved traffic; how long new requests had to wait for it.
    pub fn swap_cutover(&self, elapsed: Duration) {
        self.own.swap_cutover.observe(elapsed.as_secs_f64());
    }

    /// Total of log lines lost so far (full disk, full queue).
    pub fn log_lines_dropped(&self, total: u64) {
        let counter = &self.own.log_dropped;
        counter.inc_by(total.saturating_sub(counter.get()));
    }

    /// Everything as text. `accept` is the scraper's `Accept` header.
    pub fn render(&self, fleet: &FleetFigures, accept: Option<&str>) -> (&'static str, String) {
        if let Some(e) = fleet.engines.iter().find(|e| e.num_blocks > 0) {
            self.block_bytes.store(e.kv_bytes / u64::from(e.num_blocks), Ordering::Relaxed);
        }
        self.vllm.fleet(fleet);
        self.own.fleet(fleet);
        self.experts.layers(fleet.moe_layers);
        self.process.refresh();
        let format = Format::negotiate(accept);
        let families = exposition::with_aliases(self.families.gather(), ALIASES, self.setup.legacy_names);
        (format.content_type(), exposition::encode(&families, format))
    }

    /// Name, type, labels and help of every family, for `docs/metrics.md`.
    pub fn describe(&self) -> Vec<FamilyDescription> {
        exposition::describe(&self.families, ALIASES)
    }
}

/// One line of the metrics reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyDescription {
    pub name: String,
    pub kind: &'static str,
    pub labels: Vec<String>,
    pub help: String,
}

#[cfg(test)]
mod tests;
