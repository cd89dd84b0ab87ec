//! What the engine does with a model folder without serving it: a look at its headers, a copy in prepared form.

use ernie_engine::model::{self, Calibration, ModelConfig};
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{BLOCK_SIZE, Dtype, LoadOptions, Quantization};
use ernie_engine::runner::prepare;
use ernie_engine::self_text;
use ernie_kernels::{KvCache, KvKind};
use ernie_proto::model::{Inspection, Memory, Shape, TensorClass, WeightFile};
use ernie_proto::worker::{self, FileDigest};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

/// Reads `config.json` and the headers of the weight files. `blocks`: KV blocks whose memory is asked for; 0: those of one
/// sequence of full length. Revision, ignored files and the tokenizer's problems are others' to add.
pub fn inspect(dir: &Path, blocks: u64) -> Inspection {
    let found = model::inspect(dir);
    Inspection {
        dir: dir.to_owned(),
        shape: found.config.as_ref().map(|config| shape(config, blocks)),
        tensors: found
            .classes
            .into_iter()
            .map(|class| TensorClass {
                class: class.class.to_owned(),
                dtype: class.dtype,
                tensors: class.tensors as u64,
                bytes: class.bytes,
            })
            .collect(),
        weight_files: found.weight_files.into_iter().map(|(name, bytes)| WeightFile { name, bytes }).collect(),
        problems: found.problems.iter().map(ToString::to_string).collect(),
        ..Inspection::default()
    }
}

fn shape(config: &ModelConfig, blocks: u64) -> Shape {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let moe = config.moe.as_ref();
    Shape {
        architecture: config.architecture.clone(),
        moe: moe.is_some(),
        layers: narrow(config.num_layers),
        experts: moe.map_or(0, |moe| narrow(moe.num_experts)),
        experts_per_token: moe.map_or(0, |moe| narrow(moe.top_k)),
        parameters: config.parameters(),
        parameters_active: config.parameters_active(),
        vocab_size: narrow(config.vocab_size),
        context: narrow(config.max_position_embeddings),
        memory: memory(config, blocks),
    }
}

fn memory(config: &ModelConfig, blocks: u64) -> Memory {
    let all = config.parameters();
    let table = config.vocab_size as u64 * config.hidden_size as u64;
    // Quantised: the embedding stays in bf16, a tied head is a table of its own in 8 bits; scales are a few per cent.
    let head = if config.tie_word_embeddings { table } else { 0 };
    let quantised = |bits: u64| (all - table) * bits / 8 + table * 2 + head;
    let block_bytes =
        |kind| KvCache::bytes_per_block(kind, config.num_layers, config.num_kv_heads, config.head_dim) as u64;
    let blocks = match blocks {
        0 => (config.max_position_embeddings as u64).div_ceil(u64::from(BLOCK_SIZE)),
        given => given,
    };
    Memory {
        weights: vec![
            ("bf16".to_owned(), all * 2),
            ("int8".to_owned(), quantised(8)),
            ("int4".to_owned(), quantised(4)),
        ],
        block_tokens: BLOCK_SIZE,
        block_bytes: block_bytes(KvKind::Bf16),
        block_bytes_int8: block_bytes(KvKind::Int8),
        blocks,
        blocks_bytes: block_bytes(KvKind::Bf16).saturating_mul(blocks),
    }
}

/// In which form weights are prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareForm {
    pub dtype: worker::Dtype,
    pub quantization: worker::Quantization,
    /// What quantised weights are rounded for; without it for themselves.
    pub calibrate: Option<Sample>,
}

/// Text that stands for what a model will read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sample {
    /// So many tokens that the model writes by itself.
    Own { tokens: usize },
    /// A text in the model's tokens.
    Ids(Vec<u32>),
}

/// Their residual stream is held in memory while a model is prepared.
pub const OWN_TOKENS: RangeInclusive<usize> = Calibration::TOKENS_MIN..=1 << 20;
/// A first draw like any other, and the same on every machine.
const SAMPLE_SEED: u64 = 1;

impl Sample {
    /// Makes it for the model of `dir`. `progress` is told tokens written and tokens wanted.
    fn take(&self, dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Calibration, String> {
        match self {
            Self::Ids(ids) => Ok(Calibration::new([ids.clone()])),
            Self::Own { tokens } => {
                let options =
                    LoadOptions { max_model_len: Some(OWN_LENGTH), memory_bytes: u64::MAX, ..LoadOptions::new(dir) };
                let runner = CpuRunner::load(&options, &mut |_| {}).map_err(|error| error.to_string())?;
                let wanted = *tokens as u64;
                let mut written = |tokens: usize| progress((tokens as u64).min(wanted), wanted);
                self_text::sample(runner, *tokens, SAMPLE_SEED, &mut written).map_err(|error| error.to_string())
            }
        }
    }
}

/// Longest sequence of the model's own writing.
const OWN_LENGTH: u32 = 256;

/// How far [`prepare`] is.
#[derive(Debug, Clone, Copy)]
pub enum Preparing {
    /// Tokens of the sample that the model writes.
    Writing { done: u64, total: u64 },
    /// Bytes of weights.
    Packing { done: u64, total: u64 },
}

/// Packs the weights of `dir` into `out`; they have to be what the manifest says. Gives the form's name and the bytes.
pub fn prepare(
    dir: &Path,
    out: &Path,
    form: &PrepareForm,
    manifest: Option<&[FileDigest]>,
    progress: &mut dyn FnMut(Preparing),
) -> Result<(String, u64), String> {
    let calibration = match &form.calibrate {
        Some(_) if form.quantization == worker::Quantization::None => {
            return Err("--calibrate is for quantised weights: give --quantization int8 or int4 too".to_owned());
        }
        Some(sample) => {
            Some(Arc::new(sample.take(dir, &mut |done, total| progress(Preparing::Writing { done, total }))?))
        }
        None => None,
    };
    let digests = |files: &[FileDigest]| files.iter().map(|file| (file.path.clone(), file.sha256)).collect();
    let options = LoadOptions {
        dtype: match form.dtype {
            worker::Dtype::Auto => Dtype::Auto,
            worker::Dtype::Bfloat16 => Dtype::Bfloat16,
            worker::Dtype::Float32 => Dtype::Float32,
        },
        quantization: match form.quantization {
            worker::Quantization::None => Quantization::None,
            worker::Quantization::Int8 => Quantization::Int8,
            worker::Quantization::Int4 => Quantization::Int4,
        },
        verify: manifest.map(|files| model::Manifest { digests: digests(files) }),
        calibration,
        ..LoadOptions::new(dir)
    };
    let mut packed = |done, total| progress(Preparing::Packing { done, total });
    let report = prepare::prepare(&options, out, &mut packed).map_err(|error| error.to_string())?;
    Ok((report.weights.to_owned(), report.bytes))
}
