//! Memory of one step, allocated once at load for the largest step and used again by every step.

use super::config::ModelConfig;
use ernie_kernels::{Acts, AlignedBuf, AttentionScratch, MoeScratch, Routing};

/// Buffers between the operations of a step. Row `i` belongs to token `i` of the batch until the sampled rows are picked,
/// then to sample row `i`.
#[derive(Debug)]
pub struct Workspace {
    /// Residual stream.
    pub(crate) x: AlignedBuf<f32>,
    pub(crate) qkv: AlignedBuf<f32>,
    /// What attention gives, all heads side by side.
    pub(crate) attended: AlignedBuf<f32>,
    /// Normed rows in f32, for the router (MoE only).
    pub(crate) normed: AlignedBuf<f32>,
    /// Converted input of the next GEMM.
    pub(crate) acts: Acts,
    /// Converted input of a down projection.
    pub(crate) inner: Acts,
    pub(crate) attention: AttentionScratch,
    pub(crate) moe: Option<MoeWorkspace>,
    pub(crate) logits: AlignedBuf<f32>,
    pub(crate) best: Vec<(u32, f32)>,
}

#[derive(Debug)]
pub struct MoeWorkspace {
    pub(crate) routing: Routing,
    pub(crate) scratch: MoeScratch,
}

impl Workspace {
    /// For steps of at most `max_tokens` tokens, with logits of `logit_rows` rows at a time.
    pub fn new(config: &ModelConfig, threads: usize, max_tokens: usize, logit_rows: usize) -> Self {
        let hidden = config.hidden_size;
        let moe = config.moe.as_ref();
        let shared = moe.map_or(0, |m| m.intermediate_size * m.num_shared_experts);
        Self {
            x: AlignedBuf::zeroed(max_tokens * hidden),
            qkv: AlignedBuf::zeroed(max_tokens * (config.q_width() + 2 * config.kv_width())),
            attended: AlignedBuf::zeroed(max_tokens * config.q_width()),
            normed: AlignedBuf::zeroed(if moe.is_some() { max_tokens * hidden } else { 0 }),
            acts: Acts::new(max_tokens, hidden.max(config.q_width())),
            inner: Acts::new(max_tokens, config.intermediate_size.max(shared)),
            attention: AttentionScratch::new(
                threads,
                max_tokens,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
            ),
            moe: moe.map(|m| MoeWorkspace {
                routing: Routing {
                    experts: vec![0; max_tokens * m.top_k],
                    weights: vec![0.0; max_tokens * m.top_k],
                    top_k: m.top_k,
                },
                scratch: MoeScratch::new(max_tokens, m.top_k, hidden, m.intermediate_size, m.num_experts),
            }),
            logits: AlignedBuf::zeroed(logit_rows * config.vocab_size),
            best: vec![(0, 0.0); max_tokens],
        }
    }

    pub fn bytes(&self) -> usize {
        let floats = self.x.len() + self.qkv.len() + self.attended.len() + self.normed.len() + self.logits.len();
        let moe = self.moe.as_ref().map_or(0, |m| m.scratch.bytes() + m.routing.experts.len() * 8);
        floats * 4 + self.acts.bytes() + self.inner.bytes() + self.attention.bytes() + moe + self.best.len() * 8
    }
}
