//! Helpers of the model tests: golden folders, small random models, and a driver that runs token sequences on a runner in
//! any cut and order.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use ernie_engine::model::ModelConfig;
use ernie_engine::model::parameters::parameters;
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{Dtype, LoadOptions};
use ernie_engine::runner::{BatchSequence, ModelRunner, Row, SampleRow, StepBatch, Want};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype as FileDtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub const GOLDEN: [&str; 3] = ["tiny-dense", "tiny-moe", "tiny-moe-sharded"];

/// A golden checkpoint of the repository.
pub fn golden_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

pub fn golden(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden_dir(name).join("golden.json")).unwrap()).unwrap()
}

/// Options for a small model: little memory, two threads.
pub fn small(dir: &Path) -> LoadOptions {
    LoadOptions {
        max_model_len: Some(512),
        max_num_seqs: 40,
        max_num_batched_tokens: 512,
        memory_bytes: 1 << 30,
        kv_cache_bytes: Some(24 << 20),
        threads: 2,
        ..LoadOptions::new(dir)
    }
}

pub fn small_f32(dir: &Path) -> LoadOptions {
    LoadOptions { dtype: Dtype::Float32, ..small(dir) }
}

pub fn load(options: &LoadOptions) -> CpuRunner {
    CpuRunner::load(options, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// A tensor out of a file, in f32, with its type in the file.
#[derive(Clone)]
pub struct Stored {
    pub dtype: FileDtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Stored {
    pub fn bf16(shape: &[usize], values: impl Iterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(bytes.len(), shape.iter().product::<usize>() * 2);
        Self { dtype: FileDtype::BF16, shape: shape.to_vec(), bytes }
    }

    pub fn f32(shape: &[usize], values: impl Iterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len(), shape.iter().product::<usize>() * 4);
        Self { dtype: FileDtype::F32, shape: shape.to_vec(), bytes }
    }

    pub fn values(&self) -> Vec<f32> {
        match self.dtype {
            FileDtype::BF16 => {
                self.bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            FileDtype::F32 => {
                self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}

pub type Tensors = BTreeMap<String, Stored>;

/// All tensors of a folder's safetensors files.
pub fn read_tensors(dir: &Path) -> Tensors {
    let mut all = Tensors::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let stored = Stored { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
                all.insert(name, stored);
            }
        }
    }
    all
}

pub fn write_file(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(n, t)| (n, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A folder with one `model.safetensors`.
pub fn write_model(dir: &Path, config: &Value, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write_file(&dir.join("model.safetensors"), tensors);
}

/// A copy of a golden model with edited tensors.
pub fn edited(name: &str, edit: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let from = golden_dir(name);
    let config = serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    let mut tensors = read_tensors(&from);
    edit(&mut tensors);
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config, &tensors);
    dir
}

/// Config of a small random model whose shapes need every path: head sizes of the published models, tied head.
pub fn random_config(moe: bool) -> Value {
    let mut config = json!({"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 128,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 515, "max_position_embeddings": 1024, "tie_word_embeddings": true,
        "rope_theta": 10000.0});
    if moe {
        config["architectures"] = json!(["Ernie4_5_MoeForCausalLM"]);
        config["model_type"] = json!("ernie4_5_moe");
        config["moe_num_experts"] = json!(8);
        config["moe_k"] = json!(2);
        config["moe_intermediate_size"] = json!(64);
        config["moe_num_shared_experts"] = json!(1);
    }
    config
}

/// Seeded weights for a config.
pub fn random_tensors(config: &Value, seed: u64) -> Tensors {
    let parsed = ModelConfig::parse(Path::new("config.json"), &config.to_string()).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut tensors = Tensors::new();
    for p in parameters(&parsed) {
        let n = p.shape.iter().product::<usize>();
        let tensor = if p.name.ends_with("norm.weight") {
            Stored::bf16(&p.shape, (0..n).map(|_| 1.0 + 0.2 * normal(&mut rng)))
        } else if p.name.contains("mlp.gate.weight") || p.name.ends_with("bias") {
            Stored::f32(&p.shape, (0..n).map(|_| 0.1 * normal(&mut rng)))
        } else {
            Stored::bf16(&p.shape, (0..n).map(|_| 0.08 * normal(&mut rng)))
        };
        tensors.insert(p.name, tensor);
    }
    tensors
}

pub fn random_model(moe: bool, seed: u64) -> tempfile::TempDir {
    let (config, dir) = (random_config(moe), tempfile::tempdir().unwrap());
    write_model(dir.path(), &config, &random_tensors(&config, seed));
    dir
}

/// Sum of twelve uniforms: normal enough, and the same on every machine.
pub fn normal(rng: &mut impl Rng) -> f32 {
    (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0
}

pub fn random_tokens(seed: u64, len: usize, vocab: u32) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(0..vocab)).collect()
}

/// A part of a sequence that one step computes.
#[derive(Debug, Clone)]
pub struct Piece {
    pub sequence: usize,
    pub tokens: Range<usize>,
}

/// Block tables for sequences of these lengths: consecutive, or scattered over the pool by a seed.
pub fn tables(runner: &CpuRunner, lengths: &[usize], scatter: Option<u64>) -> Vec<Vec<u32>> {
    let mut free: Vec<u32> = (0..runner.limits().num_blocks).collect();
    if let Some(seed) = scatter {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for i in (1..free.len()).rev() {
            free.swap(i, rng.random_range(0..=i));
        }
    }
    let mut free = free.into_iter();
    lengths.iter().map(|len| free.by_ref().take(len.div_ceil(16)).collect()).collect()
}

/// Builds the batch of one step; every token is a sample row when `want` is given.
pub fn batch(sequences: &[Vec<u32>], tables: &[Vec<u32>], pieces: &[Piece], want: Option<Want>) -> StepBatch {
    let mut batch = StepBatch::default();
    for piece in pieces {
        let (ids, table) = (&sequences[piece.sequence], &tables[piece.sequence]);
        let token_start = batch.tokens.len() as u32;
        for position in piece.tokens.clone() {
            if let Some(want) = want {
                batch.sample_rows.push(SampleRow { token: batch.tokens.len() as u32, want });
            }
            batch.tokens.push(ids[position]);
            batch.positions.push(position as u32);
            batch.slots.push(table[position / 16] * 16 + (position % 16) as u32);
        }
        let used = piece.tokens.end.div_ceil(16);
        batch.sequences.push(BatchSequence {
            token_start,
            token_len: piece.tokens.len() as u32,
            context_len: piece.tokens.end as u32,
            table_start: batch.block_tables.len() as u32,
            table_len: used as u32,
        });
        batch.block_tables.extend_from_slice(&table[..used]);
    }
    batch
}

/// Logits at each position of each sequence.
pub type AllLogits = Vec<HashMap<usize, Vec<f32>>>;

/// Runs steps and collects the logits of every token.
pub fn run(runner: &mut CpuRunner, sequences: &[Vec<u32>], tables: &[Vec<u32>], steps: &[Vec<Piece>]) -> AllLogits {
    let mut all = vec![HashMap::new(); sequences.len()];
    for pieces in steps {
        runner.execute(&batch(sequences, tables, pieces, Some(Want::Logits))).unwrap();
        let mut i = 0;
        for piece in pieces {
            for position in piece.tokens.clone() {
                let Row::Logits(row) = runner.row(i) else { panic!("logits were wanted") };
                all[piece.sequence].insert(position, row.to_vec());
                i += 1;
            }
        }
    }
    all
}

/// Logits of a whole sequence, computed alone in one step.
pub fn alone(runner: &mut CpuRunner, ids: &[u32]) -> HashMap<usize, Vec<f32>> {
    let sequences = [ids.to_vec()];
    let tables = tables(runner, &[ids.len()], None);
    run(runner, &sequences, &tables, &[vec![Piece { sequence: 0, tokens: 0..ids.len() }]]).remove(0)
}

/// Continues a prompt greedily, one token a step.
pub fn greedy(runner: &mut CpuRunner, prompt: &[u32], steps: usize) -> Vec<u32> {
    let tables = tables(runner, &[prompt.len() + steps], None);
    let mut sequences = [prompt.to_vec()];
    let mut from = 0;
    for _ in 0..steps {
        let len = sequences[0].len();
        let mut step = batch(&sequences, &tables, &[Piece { sequence: 0, tokens: from..len }], None);
        step.sample_rows.push(SampleRow { token: (len - from - 1) as u32, want: Want::Greedy });
        runner.execute(&step).unwrap();
        let Row::Greedy { token, logit } = runner.row(0) else { panic!("greedy was wanted") };
        assert!(logit.is_finite());
        sequences[0].push(token);
        from = len;
    }
    sequences[0][prompt.len()..].to_vec()
}

pub fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}
