//! Settings of the engine: bounds of a step, prefix cache, swap space. Plain values, resolved by whoever builds the engine.

use std::sync::Arc;

/// How the engine plans. Bounds that the runner was built with (`RunnerLimits`) cap these.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Most sequences that run at the same time.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
    /// Most prompt tokens in a step that also carries decodes, so that a long prompt does not stretch the others' time
    /// between tokens. A step without decodes uses the whole budget.
    pub max_prefill_chunk: u32,
    /// Reuse computed blocks between requests that share a prefix (and a salt).
    pub enable_prefix_caching: bool,
    /// Consecutive KV blocks that a sequence reserves ahead, so that attention reads long runs of memory.
    pub block_run: u32,
    /// Give owners equal shares instead of first come, first served.
    pub fair_share: bool,
    /// A sequence that has waited while so many tokens were computed joins the best priority that is present. 0: never.
    pub aging_tokens: u64,
    /// Seeds the hash of the prefix cache.
    pub seed: u64,
    pub swap: SwapConfig,
    /// The byte string of every token id, for grammars. Empty: no grammars.
    pub vocabulary: Arc<Vec<Vec<u8>>>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_prefill_chunk: 128,
            enable_prefix_caching: true,
            block_run: 8,
            fair_share: true,
            aging_tokens: 1 << 18,
            seed: 0,
            swap: SwapConfig::default(),
            vocabulary: Arc::default(),
        }
    }
}

/// Host memory for copies of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SwapConfig {
    /// Bytes of host memory; 0 is the same as `SwapPolicy::Off`.
    pub space_bytes: u64,
    pub control: SwapControl,
}

/// What of the swap space may change while the engine runs. It never changes a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwapControl {
    pub policy: SwapPolicy,
    /// Whether a copy is cheaper than computing again; else nothing is copied in either direction.
    pub copies_pay: bool,
    /// Whether that is so for copies that have to be read from the disk first; else they stay there.
    pub disk_pays: bool,
    /// Share of the space that the copies of one preempted sequence may take; what is beyond is computed again.
    pub sequence_share: f32,
    /// Evicted prefixes are taken up to this share of the space; then they make room down to the lower one, so that a burst of
    /// preemptions finds some.
    pub high_watermark: f32,
    pub low_watermark: f32,
}

impl Default for SwapControl {
    fn default() -> Self {
        Self {
            policy: SwapPolicy::Off,
            copies_pay: true,
            disk_pays: true,
            sequence_share: 1.0,
            high_watermark: 0.95,
            low_watermark: 0.85,
        }
    }
}

impl SwapControl {
    pub fn of(policy: SwapPolicy) -> Self {
        Self { policy, ..Self::default() }
    }
}

/// What goes to the swap space when a block of the KV pool is needed for something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SwapPolicy {
    /// Nothing: a preempted sequence is computed again.
    #[default]
    Off,
    /// Blocks of preempted sequences.
    OnPressure,
    /// Those, and every prefix block that is evicted: a second level of the prefix cache.
    Always,
}
