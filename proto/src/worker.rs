//! The worker protocol: what the supervisor says to an engine worker and what comes back.
//!
//! Tokens in, tokens out: no text crosses this boundary, except the vocabulary's bytes once in [`Load`] (for grammars).
//! All settings travel in one [`Load`]: a worker has no flags and reads no environment.

use crate::ids::RequestId;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// Raised with every change of these types.
pub const PROTOCOL_VERSION: u32 = 2;

/// Supervisor to worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ToWorker {
    /// Variant 0 for ever: the first frame in both directions.
    Hello(Hello),
    Load(Box<Load>),
    Submit(Box<Submit>),
    Abort(RequestId),
    /// Answered by the engine loop itself, so that a hung step is a missed pong.
    Ping(u64),
    /// Drop every cached prefix (answered by nothing; shows in the statistics).
    ResetPrefixCache,
    /// Finish nothing more, leave.
    Shutdown,
    /// One choice of a request has said enough (a stop string); the others go on.
    EndChoice(RequestId, u16),
    /// Answered by [`FromWorker::Kv`].
    AskKv,
    SetSwap(SwapSettings),
}

/// Worker to supervisor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum FromWorker {
    /// Variant 0 for ever.
    Hello(Hello),
    LoadProgress(LoadProgress),
    Loaded(Box<Loaded>),
    Step(Box<StepReport>),
    Pong(u64),
    /// The worker can not go on (model does not load, a kernel failed); it exits after this.
    Fatal(Fatal),
    /// A step could not be computed and had no effect; the worker tries again.
    StepFailed(String),
    /// Progress within a step that takes long: a number that rises as layers are computed.
    Beat(u64),
    /// Who holds the KV blocks.
    Kv(Box<KvReport>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u32,
    /// Build identity; both ends are the same executable, so a difference is a bug and is refused.
    pub build: String,
}

impl Hello {
    /// Of the executable this is compiled into.
    pub fn own() -> Self {
        Self { version: PROTOCOL_VERSION, build: concat!("ernied ", env!("CARGO_PKG_VERSION")).to_string() }
    }
}

/// Number type of weights and activations as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// What the checkpoint's config says.
    Auto,
    Bfloat16,
    Float32,
}

/// Weight form to use in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quantization {
    None,
    Int8,
    Int4,
}

/// Number type of K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvDtype {
    /// As the weights compute: bfloat16, or float32 with float32 weights.
    Auto,
    Bfloat16,
    /// Eight bits with a scale per token and head.
    Int8,
}

/// Everything a worker needs to know, in one message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Load {
    pub model_dir: PathBuf,
    pub dtype: Dtype,
    pub quantization: Quantization,
    pub kv_dtype: KvDtype,
    /// Longest sequence, prompt and answer together, in tokens. `None`: the checkpoint's own limit.
    pub max_model_len: Option<u32>,
    /// Most sequences in one step.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
    /// Most prompt tokens in a step that also carries decodes. `None`: the worker measures what takes about 50 ms.
    pub max_prefill_chunk: Option<u32>,
    /// Bytes for KV blocks. `None`: what `memory_bytes` leaves.
    pub kv_cache_bytes: Option<u64>,
    /// What weights, workspace and KV blocks of this worker may take together. The daemon works it out from the memory limit
    /// (cgroup or host), the configured fraction and the number of workers.
    pub memory_bytes: u64,
    pub enable_prefix_caching: bool,
    /// Compute threads, the engine thread included. 0: one per core that this process may use.
    pub threads: u32,
    /// Pin compute threads to cores.
    pub pin_threads: bool,
    /// Seed for requests that bring none.
    pub seed: u64,
    /// Host memory for swapped KV blocks, in bytes.
    pub swap_space_bytes: u64,
    pub swap: SwapSettings,
    /// A file below the host memory for swapped KV blocks.
    pub swap_disk: Option<SwapDisk>,
    /// Equal shares for owners instead of first come, first served.
    pub fair_share: bool,
    /// A sequence that has waited while so many tokens were computed joins the best priority. 0: never.
    pub aging_tokens: u64,
    /// Digests that the files must have; hashed in the pass that loads them. Empty: not verified.
    pub manifest: Vec<FileDigest>,
    /// The byte string of every token id, for grammars. Empty: no grammars.
    pub vocabulary: Arc<Vec<Vec<u8>>>,
}

impl Load {
    /// Defaults of a small server, to change fields of.
    pub fn new(model_dir: impl Into<PathBuf>) -> Self {
        Self {
            model_dir: model_dir.into(),
            dtype: Dtype::Auto,
            quantization: Quantization::None,
            kv_dtype: KvDtype::Auto,
            max_model_len: None,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_prefill_chunk: None,
            kv_cache_bytes: None,
            memory_bytes: 4 << 30,
            enable_prefix_caching: true,
            threads: 0,
            pin_threads: false,
            seed: 0,
            swap_space_bytes: 0,
            swap: SwapSettings::default(),
            swap_disk: None,
            fair_share: true,
            aging_tokens: 1 << 18,
            manifest: Vec::new(),
            vocabulary: Arc::default(),
        }
    }
}

/// What goes to the swap space when a KV block is needed for something else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwapPolicy {
    #[default]
    Off,
    /// Blocks of preempted sequences.
    OnPressure,
    /// Those, and every prefix block that is evicted.
    Always,
}

/// What of the swap space may change while a worker runs. No token depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SwapSettings {
    pub policy: SwapPolicy,
    pub restore: SwapRestore,
    /// Share of the space that the copies of one preempted sequence may take.
    pub sequence_share: f32,
    /// Evicted prefixes are taken up to this share of the space, then they make room down to the lower one.
    pub high_watermark: f32,
    pub low_watermark: f32,
}

impl Default for SwapSettings {
    fn default() -> Self {
        Self {
            policy: SwapPolicy::Off,
            restore: SwapRestore::Auto,
            sequence_share: 1.0,
            high_watermark: 0.95,
            low_watermark: 0.85,
        }
    }
}

/// Where swapped KV blocks go beside memory. Files in the folder belong to the daemon, which deletes them at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapDisk {
    pub dir: PathBuf,
    /// Of one worker.
    pub bytes: u64,
}

/// How a sequence gets back what it lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwapRestore {
    /// Whichever is cheaper by this worker's measured rates.
    #[default]
    Auto,
    Swap,
    Recompute,
}

/// Who holds the KV blocks of a worker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KvReport {
    pub blocks_total: u32,
    pub blocks_empty: u32,
    pub blocks_cached: u32,
    pub blocks_used: u32,
    pub blocks_shared: u32,
    pub swap_blocks_total: u32,
    pub swap_blocks_used: u32,
    pub swap_blocks_preempted: u32,
    pub disk: DiskStats,
    pub swap: SwapSettings,
    /// Seconds to copy a block out and back, to read it from the swap file, and to compute its tokens again, as measured.
    /// `None`: not yet.
    pub copy_seconds: Option<f64>,
    pub disk_seconds: Option<f64>,
    pub compute_seconds: Option<f64>,
    /// Whether copies are made and fetched now.
    pub copies_pay: bool,
    /// Whether those in the swap file are.
    pub disk_pays: bool,
    /// Those with the most blocks, at most [`KV_SEQUENCES_MAX`].
    pub sequences: Vec<KvSequence>,
    /// Owners with the most blocks, at most [`KV_SEQUENCES_MAX`].
    pub owners: Vec<KvOwner>,
}

/// What a worker's swap file holds and what was moved; counters are since the worker loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskStats {
    pub blocks_total: u32,
    pub blocks_used: u32,
    /// Found from an earlier worker of the same model.
    pub blocks_restored: u32,
    /// Did not read back as written.
    pub blocks_corrupt: u64,
    pub reads: u64,
    pub read_seconds: f64,
    pub writes: u64,
    pub write_seconds: f64,
    /// Blocks that the disk was too slow for.
    pub writes_skipped: u64,
}

/// Rows of a [`KvReport`].
pub const KV_SEQUENCES_MAX: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSequence {
    pub request: RequestId,
    pub choice: u16,
    pub owner: u64,
    pub state: KvState,
    pub blocks: u32,
    pub tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvOwner {
    pub owner: u64,
    pub sequences: u32,
    /// Shared blocks count for everyone who refers to them.
    pub blocks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvState {
    Waiting,
    Running,
    Preempted,
}

/// One line of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileDigest {
    /// Relative to the model folder.
    pub path: String,
    pub sha256: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    pub phase: LoadPhase,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadPhase {
    /// Reading config, headers, checking names and shapes.
    Open,
    /// Reading, hashing and packing weights.
    Weights,
    /// Allocating KV blocks and workspace.
    Allocate,
    /// A first step, so that the first user does not pay for page faults.
    WarmUp,
}

/// What was loaded, and what it takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Loaded {
    pub architecture: String,
    pub moe: bool,
    pub layers: u32,
    pub experts: u32,
    pub experts_per_token: u32,
    pub parameters: u64,
    pub parameters_active: u64,
    pub vocab_size: u32,
    pub max_model_len: u32,
    /// As it is in memory: `bf16`, `f32`, `int8`, `int4`.
    pub weights: String,
    /// K and V: `bf16`, `f32`, `int8`.
    pub kv: String,
    /// Instruction set in use: `avx512bf16`, `avx512`, `avx2`, `scalar`, ...
    pub isa: String,
    pub threads: u32,
    pub block_size: u32,
    pub num_blocks: u32,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    /// Seconds spent per phase.
    pub load_seconds: Vec<(LoadPhase, f64)>,
}

/// One request for the engine. `choices` says how many answers are wanted and what each has generated so far: empty for a
/// new request, filled when another worker began it and died.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Submit {
    pub request: RequestId,
    pub prompt: Arc<Vec<u32>>,
    pub choices: Vec<ChoiceSoFar>,
    pub sampling: SamplingParams,
    /// Lower is earlier.
    pub priority: i32,
    /// Part of every prefix-cache key of this request: equal salts share, others never meet.
    pub cache_salt: u64,
    /// Whose it is (a number made from the API key's id); owners get equal shares while they compete.
    pub owner: u64,
}

/// State of one choice when its request is submitted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceSoFar {
    pub generated: Vec<u32>,
    /// This choice had already ended on the worker that died; it is not run again.
    pub finished: bool,
}

/// How tokens are chosen and when to stop. Strings (stop strings, bad words) never come here: the daemon turns them into
/// ids or watches for them itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off; over prompt and answer.
    pub repetition_penalty: f32,
    /// 0 is off; over the answer.
    pub presence_penalty: f32,
    /// 0 is off; over the answer.
    pub frequency_penalty: f32,
    /// Choice `i` draws with a key made of this, `i` and the position. Always set by the daemon, so that a request that moves
    /// to another worker draws the same numbers.
    pub seed: u64,
    pub logit_bias: Vec<(u32, f32)>,
    /// Empty: every token is allowed.
    pub allowed_token_ids: Vec<u32>,
    /// Token sequences that must never be completed.
    pub bad_words: Vec<Vec<u32>>,
    /// End-of-sequence ids of the model: end the choice, unless `ignore_eos`.
    pub eos_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    /// Ids that end the choice besides end-of-sequence.
    pub stop_token_ids: Vec<u32>,
    /// Before this many generated tokens no eos and no stop id is chosen.
    pub min_tokens: u32,
    pub max_tokens: u32,
    /// Log-probabilities of that many most likely tokens, and of the chosen one. `None`: none at all.
    pub logprobs: Option<u32>,
    /// The same for every prompt token.
    pub prompt_logprobs: Option<u32>,
    /// Constraint on the answer.
    pub grammar: Option<Grammar>,
    /// End a choice that goes round in circles (finish reason `repetition`).
    pub repetition_detection: Option<RepetitionDetection>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            max_tokens: 16,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
            repetition_detection: None,
        }
    }
}

/// A constraint for llguidance, checked and bounded by the daemon before it comes here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    JsonSchema(String),
    Regex(String),
    Lark(String),
}

/// vLLM's `repetition_detection`: a pattern of `min_pattern..=max_pattern` tokens repeated `min_count` times ends the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepetitionDetection {
    pub min_pattern: u32,
    pub max_pattern: u32,
    pub min_count: u32,
}

/// Everything one engine step brought.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Counts steps since load.
    pub step: u64,
    /// Requests that left the waiting queue for the first time in this step.
    pub started: Vec<Started>,
    /// Requests of whose prompts a part was computed in this step, or of an answer that had to be computed again.
    pub prompts: Vec<RequestId>,
    pub outputs: Vec<SequenceOutput>,
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Requests that the engine refuses or gives up, with the reason.
    pub failed: Vec<(RequestId, String)>,
    pub stats: StepStats,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    pub request: RequestId,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
}

/// One new token of one choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SequenceOutput {
    pub request: RequestId,
    pub choice: u16,
    /// [`NO_TOKEN`] when `finish` is [`FinishReason::Error`]: nothing was chosen.
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<FinishReason>,
}

/// Stands for the token of an output that ended without one.
pub const NO_TOKEN: u32 = u32::MAX;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// Of the chosen token among all, 1 is the most likely.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Sent once per request, when its prompt is computed; the first entry is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    pub request: RequestId,
    pub tokens: Vec<Option<TokenLogprobs>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// An end-of-sequence token; it is the last token of the output.
    Eos,
    /// One of `stop_token_ids`; it is the last token of the output.
    StopToken,
    /// `max_tokens` or the model's limit.
    Length,
    /// `repetition_detection`.
    Repetition,
    /// The grammar allows nothing more, or a logit was not finite.
    Error,
}

/// Figures of the engine after a step; counters are since load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepStats {
    pub running: u32,
    pub waiting: u32,
    pub swapped: u32,
    pub tokens: u32,
    pub prefill_tokens: u32,
    pub sequences: u32,
    pub step_seconds: f64,
    pub blocks_total: u32,
    pub blocks_free: u32,
    /// Free, but still holding a prefix that may be hit.
    pub blocks_cached: u32,
    pub preemptions: u64,
    pub prefix_queries_tokens: u64,
    pub prefix_hits_tokens: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub swap_blocks_total: u32,
    pub swap_blocks_used: u32,
    pub swapped_out_blocks: u64,
    pub swapped_in_blocks: u64,
    pub disk: DiskStats,
    pub nan_sequences: u64,
    /// Per layer, tokens per expert since load; empty for dense layers and dense models. Sent about once a second.
    pub expert_tokens: Vec<Vec<u64>>,
    /// Per layer, steps since load in which a token had no active expert. Sent with `expert_tokens`.
    pub zero_active: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fatal {
    pub phase: String,
    /// A sentence an operator can act on.
    pub message: String,
}
