//! What `ernied model` (and `ernie-ctl model`, which runs it) says about a model folder, as JSON.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `model inspect`: nothing was loaded, no code was run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    pub dir: PathBuf,
    /// SHA-256 of the manifest. `None`: the folder is not sealed.
    pub revision: Option<String>,
    /// Absent when `config.json` can not be used; the problems say why.
    pub shape: Option<Shape>,
    pub tensors: Vec<TensorClass>,
    pub weight_files: Vec<WeightFile>,
    /// Files that nothing reads; scripts are never run.
    pub ignored: Vec<String>,
    /// One line each: file, cause, remedy.
    pub problems: Vec<String>,
}

/// From `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    pub architecture: String,
    pub moe: bool,
    pub layers: u32,
    pub experts: u32,
    pub experts_per_token: u32,
    pub parameters: u64,
    pub parameters_active: u64,
    pub vocab_size: u32,
    /// Longest sequence.
    pub context: u32,
    pub memory: Memory,
}

/// What it takes when it is loaded, per worker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// By form: `bf16`, `int8`, `int4`; about.
    pub weights: Vec<(String, u64)>,
    pub block_tokens: u32,
    pub block_bytes: u64,
    /// The same with `--kv-cache-dtype int8`.
    #[serde(default)]
    pub block_bytes_int8: u64,
    /// KV blocks asked about; by default those of one sequence of full length.
    pub blocks: u64,
    pub blocks_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorClass {
    pub class: String,
    pub dtype: String,
    pub tensors: u64,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightFile {
    pub name: String,
    pub bytes: u64,
}

/// `model seal`, `model verify`: the folder is what its manifest says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    pub dir: PathBuf,
    pub revision: String,
    pub files: u64,
    pub bytes: u64,
    pub seconds: f64,
}

/// `model prepare`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    pub dir: PathBuf,
    pub revision: String,
    /// `bf16`, `f32`, `int8`, `int4`.
    pub weights: String,
    pub bytes: u64,
}
