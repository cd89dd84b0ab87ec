//! Looks at a model folder without loading it: what it is, what its tensors are, everything that is wrong with it.
//!
//! Only `config.json`, the index and the headers of the weight files are read. A load stops at the first damaged file; this
//! goes on and lists every problem, each in one line with its file, cause and remedy.

use super::checkpoint::{COPY_SHARDS, locate, read_header, weight_files};
use super::checkpoint::{CheckpointError, Declared, INDEX, SINGLE, TensorProblem, TensorProblemKind};
use super::config::{ConfigError, ModelConfig};
use super::prepared::Prepared;
use super::weights::MappedFile;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// What a folder holds.
#[derive(Debug, Default)]
pub struct Inspection {
    /// `None`: it can not be read; the problems say why.
    pub config: Option<ModelConfig>,
    pub classes: Vec<TensorClass>,
    pub weight_files: Vec<(String, u64)>,
    pub problems: Vec<Finding>,
}

/// Tensors of one kind and one element type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorClass {
    /// `embedding`, `attention`, `mlp`, `experts`, `shared experts`, `router`, `norm`, `head`, `other`; `prepared`.
    pub class: &'static str,
    /// As the file spells it: `BF16`.
    pub dtype: String,
    pub tensors: usize,
    pub bytes: u64,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub file: String,
    /// Cause, then `; `, then remedy.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.text)
    }
}

/// Looks at `dir`.
pub fn inspect(dir: &Path) -> Inspection {
    let mut found = Inspection::default();
    match ModelConfig::read(dir) {
        Ok((config, _)) => found.config = Some(config),
        Err(error) => found.problems.extend(of_config(error)),
    }
    match Prepared::open(dir) {
        Ok(None) => {}
        Ok(Some(prepared)) => {
            found.weight_files = prepared.sizes();
            found.classes = vec![TensorClass {
                class: "prepared",
                dtype: prepared.plan().name().to_owned(),
                tensors: prepared.items(),
                bytes: prepared.bytes(),
            }];
            return found;
        }
        Err(error) => {
            found.problems.push(of_checkpoint(&error, dir));
            return found;
        }
    }
    let files = match weight_files(dir) {
        Ok(files) => files,
        Err(error) => {
            found.problems.push(of_checkpoint(&error, dir));
            return found;
        }
    };
    // Tensors that can not be known: their files are not there or not readable.
    let mut unreadable: BTreeSet<String> = files.absent.iter().cloned().collect();
    for absent in files.absent {
        let text = format!("is named in {INDEX}, but the folder does not have it; {COPY_SHARDS}");
        found.problems.push(Finding { file: absent, text });
    }
    let (mut names, mut headers) = (Vec::new(), Vec::new());
    for name in files.names {
        let opened = MappedFile::open(&dir.join(&name), &name);
        match opened.and_then(|file| Ok((file.length(), read_header(&file)?))) {
            Ok((length, header)) => {
                found.weight_files.push((name.clone(), length));
                names.push(name);
                headers.push(header);
            }
            Err(error) => {
                found.problems.push(of_checkpoint(&error, dir));
                unreadable.insert(name);
            }
        }
    }
    found.classes = classes(&headers);
    let Some(config) = &found.config else { return found };
    let single_is_bad = files.index.is_none() && !unreadable.is_empty();
    let (_, problems) = locate(config, &names, headers, files.index.as_ref());
    for problem in problems {
        let home = files.index.as_ref().and_then(|index| index.map.get(&problem.name));
        let lost = single_is_bad || home.is_some_and(|home| unreadable.contains(home));
        let follows = matches!(problem.kind, TensorProblemKind::Missing | TensorProblemKind::NotInItsFile);
        if !(lost && follows) {
            found.problems.push(of_tensor(&problem, files.index.is_some()));
        }
    }
    found
}

fn of_config(error: ConfigError) -> Vec<Finding> {
    let file = "config.json".to_owned();
    match error {
        ConfigError::Refused { problems, .. } => problems
            .into_iter()
            .map(|problem| Finding { file: file.clone(), text: one_line(&problem.to_string()) })
            .collect(),
        other => {
            let text = match &other {
                ConfigError::Read { source, .. } => format!("can not be read: {source}; a model folder needs it"),
                ConfigError::TooLarge { bytes, .. } => {
                    format!("{bytes} bytes are more than a config has; check that the file is what its name says")
                }
                ConfigError::Json { source, .. } => {
                    format!("is not valid JSON: {source}; copy the file again from its source")
                }
                _ => "is not a JSON object; copy the file again from its source".to_owned(),
            };
            vec![Finding { file, text: one_line(&text) }]
        }
    }
}

fn of_checkpoint(error: &CheckpointError, dir: &Path) -> Finding {
    let name = |path: &Path| path.strip_prefix(dir).unwrap_or(path).display().to_string();
    let (file, text) = match error {
        CheckpointError::Malformed { file, cause, remedy } => (name(file), format!("{cause}; {remedy}")),
        CheckpointError::NoWeights { cause, remedy, .. } => {
            (SINGLE.to_owned(), format!("no weights can be loaded: {cause}; {remedy}"))
        }
        CheckpointError::Read { path, source } => {
            (name(path), format!("can not be read: {source}; check that it is there and its permissions"))
        }
        other => (SINGLE.to_owned(), other.to_string()),
    };
    Finding { file, text: one_line(&text) }
}

fn of_tensor(problem: &TensorProblem, sharded: bool) -> Finding {
    let fallback = if sharded { INDEX } else { SINGLE };
    let file = problem.file.clone().unwrap_or_else(|| fallback.to_owned());
    let text = TensorProblem { file: None, ..problem.clone() }.to_string();
    Finding { file, text: one_line(&text) }
}

/// Messages may quote what a file holds; a finding stays one line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn classes(headers: &[Vec<(String, Declared)>]) -> Vec<TensorClass> {
    let mut sums: BTreeMap<(&'static str, String), (usize, u64)> = BTreeMap::new();
    for (name, tensor) in headers.iter().flatten() {
        let sum = sums.entry((class(name), format!("{:?}", tensor.dtype))).or_default();
        sum.0 += 1;
        sum.1 += tensor.range.len() as u64;
    }
    let class = |((class, dtype), (tensors, bytes))| TensorClass { class, dtype, tensors, bytes };
    sums.into_iter().map(class).collect()
}

fn class(name: &str) -> &'static str {
    const CLASSES: [(&str, &str); 9] = [
        (".shared_experts.", "shared experts"),
        (".experts.", "experts"),
        (".mlp.gate.weight", "router"),
        (".moe_statics.", "router"),
        (".self_attn.", "attention"),
        (".mlp.", "mlp"),
        ("norm.weight", "norm"),
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
    ];
    CLASSES.iter().find(|(part, _)| name.contains(part)).map_or("other", |(_, class)| class)
}
