//! What a [`CpuRunner`](super::cpu::CpuRunner) is asked to load, how that becomes a weight plan and a number of KV blocks,
//! and why it may be refused. Decides only; nothing here reads a file or allocates.

use crate::model::config::{ConfigDtype, ConfigError, ModelConfig};
use crate::model::weights::WeightsError;
use crate::model::{Calibration, CheckpointError, Manifest, Turn, WeightPlan};
use ernie_kernels::{KvCache, KvKind, WeightKind};
use std::path::PathBuf;
use std::sync::Arc;

/// Tokens per KV block.
pub const BLOCK_SIZE: u32 = 16;

/// Slots are numbered in 32 bits.
const BLOCKS_MAX: u64 = u32::MAX as u64 / BLOCK_SIZE as u64;

/// Number type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dtype {
    /// What the checkpoint's config says (float16 is held as bfloat16).
    #[default]
    Auto,
    Bfloat16,
    Float32,
}

/// Weight form to use in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quantization {
    #[default]
    None,
    Int8,
    Int4,
}

/// Everything that loading depends on.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    pub model_dir: PathBuf,
    pub dtype: Dtype,
    pub quantization: Quantization,
    /// How K and V are kept. `None`: as the weights compute, f32 or bf16.
    pub kv: Option<KvKind>,
    /// Longest sequence. `None`: the model's own limit, or what the KV memory holds if that is less.
    pub max_model_len: Option<u32>,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    /// Bytes for KV blocks. `None`: what `memory_bytes` leaves.
    pub kv_cache_bytes: Option<u64>,
    /// What weights, workspace and KV blocks may take together.
    pub memory_bytes: u64,
    /// Compute threads, the caller's included; 0: one per core that this process may use.
    pub threads: usize,
    pub pin: bool,
    /// Digests that the files must have.
    pub verify: Option<Manifest>,
    /// What quantised weights are rounded for; without it they are rounded for themselves.
    pub calibration: Option<Arc<Calibration>>,
    /// Overrides what dtype and quantization choose (quality and speed measurements).
    pub plan: Option<WeightPlan>,
}

impl LoadOptions {
    /// Defaults of a small server: for tests, benches and as a base to change fields of.
    pub fn new(model_dir: impl Into<PathBuf>) -> Self {
        Self {
            model_dir: model_dir.into(),
            dtype: Dtype::Auto,
            quantization: Quantization::None,
            kv: None,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 1024,
            kv_cache_bytes: None,
            memory_bytes: 4 << 30,
            threads: 0,
            pin: false,
            verify: None,
            calibration: None,
            plan: None,
        }
    }

    /// The weight forms that dtype and quantization mean for this model.
    pub(crate) fn weight_plan(&self, config: &ModelConfig) -> Result<WeightPlan, LoadError> {
        self.check_calibration(config)?;
        if let Some(plan) = self.plan {
            return Ok(plan);
        }
        let float32 = match self.dtype {
            Dtype::Auto => config.dtype == ConfigDtype::Float32,
            Dtype::Bfloat16 => false,
            Dtype::Float32 => true,
        };
        match self.quantization {
            Quantization::None if float32 => Ok(WeightPlan::float32()),
            Quantization::None => Ok(WeightPlan::uniform(WeightKind::Bf16)),
            Quantization::Int8 | Quantization::Int4 if self.dtype == Dtype::Float32 => {
                let cause = "quantised weights compute with bfloat16 embeddings and KV blocks";
                Err(LoadError::Option {
                    option: "dtype",
                    value: "float32".into(),
                    cause,
                    remedy: "use auto or bfloat16",
                })
            }
            // Turned, neither side has outliers that a scale per row would suffer from (docs/quantization.md).
            Quantization::Int8 => Ok(WeightPlan::uniform(WeightKind::Int8).turned(Turn::All)),
            // Four bits do not bear the turn unless they are rounded for their inputs; then they gain by it.
            Quantization::Int4 => {
                let small = config.parameters() < INT4_LARGE;
                let plan = WeightPlan::uniform(if small { INT4 } else { INT4_OF_LARGE }).with_head(INT4_HEAD).grouped();
                Ok(if self.calibration.is_some() { plan.turned(Turn::All) } else { plan })
            }
        }
    }
}

impl LoadOptions {
    fn check_calibration(&self, config: &ModelConfig) -> Result<(), LoadError> {
        let Some(calibration) = &self.calibration else { return Ok(()) };
        let refused = |value: String, cause, remedy| LoadError::Option { option: "calibrate", value, cause, remedy };
        if calibration.tokens() < Calibration::TOKENS_MIN {
            let cause = "fewer than 2048 tokens say too little about what a matrix will read";
            return Err(refused(format!("{} tokens", calibration.tokens()), cause, "give a longer text"));
        }
        if let Some(id) = calibration.foreign_id(config.vocab_size) {
            let cause = "the sample holds a token that the model does not have";
            return Err(refused(format!("token {id}"), cause, "make it with the model's own tokenizer"));
        }
        if self.plan.is_none() && self.quantization == Quantization::None {
            let cause = "only quantised weights are rounded for a sample";
            return Err(refused(format!("{} tokens", calibration.tokens()), cause, "give quantization int8 or int4"));
        }
        Ok(())
    }

    /// The plan of prepared weights, unless something else was asked for. A quantization stands for its number of bits: what
    /// was prepared with a sample, or by an ernied that chose other groups, is still what was asked for.
    pub(crate) fn agree_with(&self, prepared: &WeightPlan, config: &ModelConfig) -> Result<WeightPlan, LoadError> {
        let asked = self.plan.is_some() || self.dtype != Dtype::Auto || self.quantization != Quantization::None;
        let fits = |plan: WeightPlan| {
            if self.plan.is_some() { plan == *prepared } else { plan.name() == prepared.name() }
        };
        if asked && !fits(self.weight_plan(config)?) {
            return Err(LoadError::Option {
                option: "model",
                value: self.model_dir.display().to_string(),
                cause: "it was prepared in another weight form than dtype and quantization ask for",
                remedy: "prepare it again with the same settings, or leave dtype and quantization at their defaults",
            });
        }
        Ok(*prepared)
    }
}

/// The head decides between close tokens; 8 bits cost it little time and keep its order.
const INT4_HEAD: WeightKind = WeightKind::Int8Group { group: 128 };
/// Small models lose too much in groups of 128 without zero points (docs/quantization.md).
const INT4: WeightKind = WeightKind::Int4 { group: 32, zero_point: true };
/// Large ones bear them better, and it is memory that they want: 21 billion weights take 11 GB instead of 14.
const INT4_OF_LARGE: WeightKind = WeightKind::Int4 { group: 128, zero_point: false };
/// Parameters from which a model counts as large.
const INT4_LARGE: u64 = 4_000_000_000;

/// A number of bytes that weights in this plan take at least, before any is read.
pub(crate) fn weights_bytes_at_least(config: &ModelConfig, plan: &WeightPlan) -> u64 {
    let bits = |kind: WeightKind| match kind {
        WeightKind::F32 => 32,
        WeightKind::Bf16 => 16,
        WeightKind::Int8 | WeightKind::Int8Group { .. } => 8,
        WeightKind::Int4 { .. } => 4,
    };
    let table = config.vocab_size as u64 * config.hidden_size as u64;
    let tables = if config.tie_word_embeddings { table } else { 2 * table };
    (config.parameters() - tables) * bits(plan.experts.weights).min(bits(plan.linear.weights)) / 8
        + table * bits(plan.head.weights) / 8
}

/// KV blocks and the longest sequence that they allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvPlan {
    pub(crate) num_blocks: u32,
    pub(crate) max_model_len: u32,
}

/// Divides what memory is left into blocks. `taken` is what weights and workspace use.
pub(crate) fn plan_kv(
    options: &LoadOptions,
    config: &ModelConfig,
    kv: KvKind,
    weights: u64,
    workspace: u64,
) -> Result<KvPlan, LoadError> {
    let per_block = KvCache::bytes_per_block(kv, config.num_layers, config.num_kv_heads, config.head_dim) as u64;
    let left = options.memory_bytes.saturating_sub(weights + workspace);
    let wanted_len = options.max_model_len.unwrap_or(u32::try_from(config.max_position_embeddings).unwrap_or(u32::MAX));
    let useful = u64::from(options.max_num_seqs) * u64::from(wanted_len.div_ceil(BLOCK_SIZE));
    let blocks = match options.kv_cache_bytes {
        Some(bytes) => bytes / per_block,
        // More blocks than all sequences can fill together would only be taken from others.
        None => (left / per_block).min(useful),
    };
    let blocks = blocks.min(BLOCKS_MAX);
    let holds = blocks * u64::from(BLOCK_SIZE);
    let refused = |needed: u32| LoadError::KvTooSmall {
        weights,
        workspace,
        memory: options.memory_bytes,
        kv: options.kv_cache_bytes.unwrap_or(left),
        holds,
        max_model_len: needed,
        needed: u64::from(needed.div_ceil(BLOCK_SIZE)) * per_block,
    };
    match options.max_model_len {
        Some(asked) if holds < u64::from(asked) => Err(refused(asked)),
        None if holds < u64::from(MODEL_LEN_MIN.min(wanted_len)) => Err(refused(MODEL_LEN_MIN.min(wanted_len))),
        _ => Ok(KvPlan {
            num_blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            max_model_len: u32::try_from(holds).unwrap_or(u32::MAX).min(wanted_len),
        }),
    }
}

/// A server that can not hold even this many tokens of one sequence is of no use.
const MODEL_LEN_MIN: u32 = 256;

/// Why a model could not be loaded. Nothing stays allocated.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{option} = {value}: {cause}; {remedy}")]
    Option { option: &'static str, value: String, cause: &'static str, remedy: &'static str },
    #[error(
        "{what} take at least {} MiB, the memory budget is {} MiB; quantise (--quantization int8 or int4), lower \
         --max-num-batched-tokens, or give more memory",
        mib(*needed), mib(*memory)
    )]
    Memory { what: &'static str, needed: u64, memory: u64 },
    #[error(
        "the KV cache can not hold one sequence of max_model_len = {max_model_len} tokens, which takes {} MiB: it has {} MiB \
         = {holds} tokens (memory budget {} MiB, weights {} MiB, workspace {} MiB); lower --max-model-len, quantise the \
         weights, or give more memory",
        mib(*needed), mib(*kv), mib(*memory), mib(*weights), mib(*workspace)
    )]
    KvTooSmall { weights: u64, workspace: u64, memory: u64, kv: u64, holds: u64, max_model_len: u32, needed: u64 },
}

/// Whole mebibytes, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
