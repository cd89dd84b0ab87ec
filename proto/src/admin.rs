//! JSON of the admin socket: what `ernie-ctl` (and `curl --unix-socket`) send and get.
//!
//! Replies only grow: a field is added, never renamed, so that an older ernie-ctl goes on working.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Environment variable that names the admin socket for clients.
pub const SOCKET_VARIABLE: &str = "ERNIED_ADMIN_SOCKET";

/// Where a client looks for the socket when it is not told, best first. `xdg_runtime_dir`, `xdg_state_home` and `home` are
/// the variables of those names.
pub fn socket_candidates(
    xdg_runtime_dir: Option<PathBuf>,
    xdg_state_home: Option<PathBuf>,
    home: Option<PathBuf>,
) -> Vec<PathBuf> {
    let state = xdg_state_home.or_else(|| home.map(|h| h.join(".local/state")));
    let mut places = Vec::new();
    places.extend(xdg_runtime_dir.map(|d| d.join("ernied/admin.sock")));
    places.push(PathBuf::from("/run/ernied/admin.sock"));
    places.extend(state.map(|d| d.join("ernied/run/admin.sock")));
    places
}

/// Any refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    pub error: ErrorBody,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// `forbidden`, `not_found`, `invalid`, `conflict`, `audit_unavailable`, `unavailable`, `internal`.
    pub code: String,
    /// A sentence an operator can act on.
    pub message: String,
}

/// `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    /// `starting`, `serving`, `recovering`, `switching`, `draining`, `stopped`, `failed`.
    pub state: String,
    pub ready: bool,
    pub reason: Option<String>,
    pub uptime_seconds: f64,
    /// URLs of the API.
    pub listening: Vec<String>,
    pub model: Option<Model>,
    pub workers: Vec<Worker>,
    pub requests: Requests,
    pub kv: Kv,
    pub rates: Rates,
    pub counters: Counters,
    pub rollout: Rollout,
    /// All that are loaded or being loaded.
    #[serde(default)]
    pub deployments: Vec<DeploymentView>,
    pub memory: Memory,
    /// Role of the one who asks: `admin`, `operator`, `viewer`.
    pub your_role: String,
    /// What an operator should know: the audit store refuses, log lines were dropped, a crash loop.
    pub alarms: Vec<String>,
}

/// The model that serves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Model {
    pub name: String,
    pub aliases: Vec<String>,
    pub deployment: String,
    /// SHA-256 of the manifest.
    pub revision: String,
    pub dir: PathBuf,
    /// What the configuration names, when another model was swapped in since.
    #[serde(default)]
    pub configured_dir: Option<PathBuf>,
    pub architecture: String,
    pub moe: bool,
    pub layers: u32,
    pub experts: u32,
    pub experts_per_token: u32,
    pub parameters: u64,
    pub parameters_active: u64,
    pub max_model_len: u32,
    /// `bf16`, `f32`, `int8`, `int4`.
    pub weights: String,
    /// K and V: `bf16`, `f32`, `int8`.
    #[serde(default)]
    pub kv: String,
    pub isa: String,
    pub threads: u32,
    pub load_seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    pub id: Option<String>,
    pub deployment: String,
    pub slot: u32,
    pub pid: Option<u32>,
    pub state: String,
    pub restarts: u64,
    pub uptime_seconds: Option<f64>,
    pub last_step_age_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub cpu_seconds: Option<f64>,
    pub requests: u32,
    pub running: u32,
    pub waiting: u32,
    pub load: Option<LoadState>,
    pub last_failure: Option<Failure>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadState {
    pub phase: String,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub reason: String,
    /// Last lines of the worker's standard error.
    pub stderr: Vec<String>,
    /// Seconds since 1970.
    pub at: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// Sequences in the running batch.
    pub running: u32,
    /// Sequences waiting for a place in it.
    pub waiting: u32,
    pub swapped: u32,
    /// Requests that wait for a worker.
    pub held: u32,
    pub in_flight: u32,
}

/// `GET /v1/kv`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvDetails {
    /// Tokens per block.
    pub block_size: u32,
    pub workers: Vec<KvWorker>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvWorker {
    pub worker: String,
    pub blocks_total: u32,
    /// Holding nothing.
    pub blocks_free: u32,
    /// Free, but holding a prefix that may be hit.
    pub blocks_cached: u32,
    pub blocks_used: u32,
    /// Of these, referred to by several sequences.
    pub blocks_shared: u32,
    pub swap_blocks_total: u32,
    pub swap_blocks_used: u32,
    /// Of these, copies that preempted sequences will want back.
    pub swap_blocks_preempted: u32,
    /// Blocks in the swap file.
    #[serde(default)]
    pub disk_blocks_total: u32,
    #[serde(default)]
    pub disk_blocks_used: u32,
    /// Found from an earlier worker of the same model.
    #[serde(default)]
    pub disk_blocks_restored: u32,
    /// Did not read back as written, and were computed again.
    #[serde(default)]
    pub disk_blocks_corrupt: u64,
    /// Blocks read from and written to the swap file since the worker loaded, and those that the disk was too slow for.
    #[serde(default)]
    pub disk_reads: u64,
    #[serde(default)]
    pub disk_writes: u64,
    #[serde(default)]
    pub disk_writes_skipped: u64,
    /// Whether blocks come back from the file now, or it is slower than computing them.
    #[serde(default)]
    pub disk_pays: bool,
    /// `off`, `on-pressure`, `always`.
    pub swap_policy: String,
    /// `swap`, `recompute`, `auto (swap)`, `auto (recompute)`.
    pub swap_restore: String,
    /// Out and back, as measured.
    pub copy_seconds_per_block: Option<f64>,
    /// Read from the swap file.
    #[serde(default)]
    pub disk_seconds_per_block: Option<f64>,
    pub compute_seconds_per_block: Option<f64>,
    /// Those with the most blocks.
    pub sequences: Vec<KvSequence>,
    /// Keys whose sequences refer to the most blocks; shared ones count for each.
    pub keys: Vec<KvKey>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSequence {
    pub request: u64,
    pub choice: u16,
    /// Name of the API key.
    pub key: String,
    /// `waiting`, `running`, `preempted`.
    pub state: String,
    pub blocks: u32,
    pub tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvKey {
    pub key: String,
    pub sequences: u32,
    pub blocks: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Kv {
    pub block_size: u32,
    pub blocks_total: u32,
    pub blocks_free: u32,
    pub blocks_cached: u32,
    /// Share in use, 0 to 1.
    pub usage: f64,
    pub prefix_hit_rate: f64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub generated_tokens_per_second: f64,
    pub prompt_tokens_per_second: f64,
    pub generated_tokens: u64,
    pub prompt_tokens: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub workers_lost: u64,
    pub workers_stalled: u64,
    pub requests_resumed: u64,
    pub requests_poisonous: u64,
    pub requests_aborted: u64,
    pub preemptions: u64,
    pub log_lines_dropped: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// `steady`, `verifying`, `clearing`, `loading`, `probing`, `soaking`, `restoring`.
    pub phase: String,
    pub candidate: Option<String>,
    pub seconds_left: Option<f64>,
    pub last: Option<String>,
    /// `side-by-side` or `stop-first`, once it is known.
    #[serde(default)]
    pub strategy: Option<String>,
    /// Share of the keys that go to the candidate.
    #[serde(default)]
    pub canary_percent: Option<f64>,
    /// Folder that `rollback` goes back to while nothing is under way.
    #[serde(default)]
    pub previous: Option<PathBuf>,
    /// How the last one ended, for programs.
    #[serde(default)]
    pub outcome: Option<RolloutOutcome>,
}

/// The end of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutOutcome {
    pub deployment: String,
    pub model_dir: PathBuf,
    /// Empty when it was not verified.
    pub revision: String,
    /// `completed`, `rolled_back`, `not_restored`.
    pub result: String,
    /// Where it failed, and why.
    pub phase: Option<String>,
    pub reason: Option<String>,
    pub seconds: f64,
    /// From the last request that could go to the old model to the first that could go to the new one.
    pub cut_over_seconds: Option<f64>,
    /// Requests that were under way on the old model at that moment; they end there.
    pub in_flight: Option<u32>,
    /// Requests that ended on each side while the new model was observed.
    pub requests_old: u64,
    pub requests_new: u64,
    pub requests_failed: u64,
}

/// One loaded model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentView {
    pub id: String,
    /// `candidate`, `canary`, `active`, `standby`, `parked`, `retiring`.
    pub role: String,
    pub name: String,
    pub revision: String,
    pub dir: PathBuf,
    pub workers_ready: u32,
    pub workers_wanted: u32,
    /// Under way.
    pub requests: u32,
    pub requests_finished: u64,
    pub requests_failed: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    pub workers_resident_bytes: u64,
    pub daemon_resident_bytes: u64,
    /// Of the cgroup or the machine.
    pub limit_bytes: u64,
}

/// `GET /v1/workers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Workers {
    pub workers: Vec<Worker>,
}

/// `POST /v1/workers/restart`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartWorker {
    /// As shown: `w3`.
    pub worker: String,
    /// Let its running requests end first.
    #[serde(default)]
    pub graceful: bool,
}

/// `POST /v1/drain`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Drain {
    /// Seconds the running requests may take. Default: `server.drain_timeout`.
    #[serde(default)]
    pub patience_seconds: Option<f64>,
    /// Leave when drained; else the daemon stays, refusing requests until `POST /v1/resume`.
    #[serde(default)]
    pub exit: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    pub finished: u64,
    pub failed: u64,
}

/// A plain "done".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// What was done, in a sentence.
    pub message: String,
    /// Sequence number of the audit row.
    #[serde(default)]
    pub audit: Option<i64>,
}

/// A rollout that has begun, or whose way back has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    pub message: String,
    #[serde(default)]
    pub audit: Option<i64>,
    /// Its deployment; `rollout.outcome.deployment` of the status names it at the end.
    #[serde(default)]
    pub deployment: Option<String>,
}

/// `GET /v1/config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigReply {
    pub settings: Vec<SettingView>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingView {
    pub key: String,
    /// Secrets as `(secret)`.
    pub value: Option<String>,
    pub origin: String,
    /// `reload`, `workers`, `restart`: what a change needs.
    pub change: String,
    pub help: String,
}

/// `GET /v1/config/diff`, and the answer to `POST /v1/reload`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// Whether the new configuration is in force (or would be, for a diff).
    pub applied: bool,
    pub changes: Vec<ConfigChange>,
    /// Why nothing was applied, one sentence each.
    pub refused: Vec<String>,
    /// What became of the model that the configuration names, when it is another one now: a sentence.
    #[serde(default)]
    pub model: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigChange {
    pub key: String,
    pub before: Option<String>,
    pub after: Option<String>,
    /// `applied`, `needs a model load`, `needs a restart`.
    pub effect: String,
}

/// `POST /v1/config/set`: at run time, until the next restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetConfig {
    pub key: String,
    /// `None` goes back to file and flags.
    pub value: Option<String>,
}

/// `POST /v1/logs/level`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLevel {
    pub level: String,
}

/// `GET /v1/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogState {
    pub level: String,
    pub file: Option<PathBuf>,
    pub lines_dropped: u64,
}

/// `GET /v1/keys`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Keys {
    pub keys: Vec<Key>,
}

/// A key without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    pub id: String,
    pub name: String,
    pub scope: String,
    #[serde(flatten)]
    pub limits: KeyLimits,
    pub models: Vec<String>,
    /// Seconds since 1970.
    pub created_at: i64,
    pub expires_at: Option<i64>,
    pub revoked_at: Option<i64>,
    /// `active`, `expired`, `revoked`.
    pub state: String,
    pub last_used_day: Option<String>,
}

/// 0 or absent: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyLimits {
    pub requests_per_minute: u32,
    pub tokens_per_minute: u32,
    pub tokens_per_day: u64,
    pub concurrent_requests: u32,
}

/// `POST /v1/keys`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewKey {
    pub name: String,
    #[serde(default)]
    pub scope: Option<String>,
    #[serde(flatten)]
    pub limits: KeyLimits,
    /// Empty: all models.
    #[serde(default)]
    pub models: Vec<String>,
    /// Seconds from now.
    #[serde(default)]
    pub expires_in_seconds: Option<u64>,
}

/// The only reply that ever holds a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedKey {
    pub key: Key,
    pub secret: String,
}

/// `GET /v1/usage?days=N`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReply {
    pub rows: Vec<UsageRow>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    pub key: String,
    pub name: String,
    /// UTC day, `2026-01-26`.
    pub day: String,
    pub requests: i64,
    pub prompt_tokens: i64,
    pub cached_tokens: i64,
    pub completion_tokens: i64,
}

/// `POST /v1/debug/dump`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightDump {
    /// On the daemon's machine.
    pub path: PathBuf,
    pub requests: usize,
    pub steps: u64,
    pub audit: Option<i64>,
}

/// One row of the audit store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditRow {
    pub seq: i64,
    /// RFC 3339.
    pub at: String,
    /// `intent`, `outcome`, `event`, `checkpoint`.
    pub kind: String,
    /// Who: `uid 0 (pid 4711, /usr/bin/ernie-ctl)`, `key k_…`, `daemon`.
    pub actor: String,
    pub role: String,
    /// `key.create`, `config.reload`, `worker.lost`, ...
    pub act: String,
    pub subject: String,
    /// For an outcome: the intent it belongs to.
    pub intent: Option<i64>,
    /// For an outcome: `ok` or `failed`.
    pub outcome: Option<String>,
    pub duration_ms: Option<i64>,
    pub detail: serde_json::Value,
    pub version: String,
    /// Hex.
    pub hash: String,
}

/// `GET /v1/audit`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditRows {
    pub rows: Vec<AuditRow>,
}

/// `GET /v1/audit/verify`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditVerdict {
    pub intact: bool,
    pub rows: i64,
    pub first: Option<i64>,
    pub last: Option<i64>,
    /// First row that does not fit.
    pub broken_at: Option<i64>,
    pub reason: Option<String>,
    /// Acts that were begun and whose end is not recorded.
    pub unfinished: Vec<i64>,
}

/// `GET /v1/models`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Models {
    pub models: Vec<KnownModel>,
}

/// A model folder that has a name, or a part in what is being served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownModel {
    /// `None`: nobody gave it one.
    pub name: Option<String>,
    pub dir: PathBuf,
    /// As its manifest says now; `None`: it can not be read.
    pub revision: Option<String>,
    pub sealed: bool,
    pub bytes: u64,
    /// `serving`, `candidate`, `previous`, `configured`.
    pub roles: Vec<String>,
}

/// `POST /v1/models/add`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddModel {
    pub dir: PathBuf,
    /// Default: the folder's name.
    #[serde(default)]
    pub name: Option<String>,
}

/// `POST /v1/swap`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swap {
    /// A folder, or a name that `POST /v1/models/add` gave to one.
    pub model_dir: PathBuf,
    /// Default: the names of the model that serves now.
    #[serde(default)]
    pub served_names: Option<Vec<String>>,
    /// `auto`, `side-by-side`, `stop-first`.
    #[serde(default)]
    pub strategy: Option<String>,
    /// How long the new one serves while the old one stays warm. Default 600.
    #[serde(default)]
    pub observe_seconds: Option<f64>,
    /// Share of the keys that go to the new one while it is observed. Default: all.
    #[serde(default)]
    pub canary_percent: Option<f64>,
    /// Take a model without a manifest.
    #[serde(default)]
    pub force_unsealed: bool,
}

/// `POST /v1/rollback`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    #[serde(default)]
    pub reason: Option<String>,
}
