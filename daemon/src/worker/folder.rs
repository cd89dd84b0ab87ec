//! What the engine does with a model folder without serving it: a look at its headers, a copy in prepared form.

use ernie_engine::model::{self, ModelConfig};
use ernie_engine::runner::options::{BLOCK_SIZE, Dtype, LoadOptions, Quantization};
use ernie_engine::runner::prepare;
use ernie_kernels::{KvCache, KvKind};
use ernie_proto::model::{Inspection, Memory, Shape, TensorClass, WeightFile};
use ernie_proto::worker::{self, FileDigest};
use std::path::Path;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrepareForm {
    pub dtype: worker::Dtype,
    pub quantization: worker::Quantization,
}

/// Packs the weights of `dir` into `out`; they have to be what the manifest says. Gives the form's name and the bytes.
pub fn prepare(
    dir: &Path,
    out: &Path,
    form: PrepareForm,
    manifest: Option<&[FileDigest]>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(String, u64), String> {
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
        ..LoadOptions::new(dir)
    };
    let report = prepare::prepare(&options, out, progress).map_err(|error| error.to_string())?;
    Ok((report.weights.to_owned(), report.bytes))
}
