//! `model inspect`: what a folder holds and everything that is wrong with it, from names, headers and small files.

use super::report::{bytes, complain, parameters, show};
use crate::model_store::{self, Manifest, ManifestError};
use crate::text::TextModel;
use crate::worker::folder;
use ernie_proto::model::Inspection;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(dir: &Path, blocks: u64, json: bool) -> ExitCode {
    if !dir.is_dir() {
        return complain(&format!(
            "{} is no folder; name the one that holds config.json and the weights",
            dir.display()
        ));
    }
    let found = inspect(dir, blocks);
    let sound = found.problems.is_empty();
    show(json, &found, people);
    if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn inspect(dir: &Path, blocks: u64) -> Inspection {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mut found = folder::inspect(&dir, blocks);
    match Manifest::read(&dir) {
        Ok(manifest) => {
            found.revision = Some(manifest.revision());
            found.problems.extend(model_store::unlisted(&dir, &manifest).iter().map(ToString::to_string));
        }
        Err(ManifestError::Missing { .. }) => {}
        Err(error) => found.problems.push(format!("{}: {error}", model_store::MANIFEST_FILE)),
    }
    let wide = found.shape.as_ref().map(|shape| shape.vocab_size);
    match (TextModel::load(&dir), wide) {
        (Ok(text), Some(vocab_size)) => {
            found.problems.extend(text.misfit(vocab_size).map(|cause| format!("tokenizer.json: {cause}")));
        }
        (Ok(_), None) => {}
        (Err(error), _) => found.problems.push(format!("tokenizer.json: {error}")),
    }
    match model_store::unread(&dir) {
        Ok(ignored) => found.ignored = ignored,
        Err(error) => found.problems.push(error.to_string()),
    }
    found
}

fn people(found: &Inspection) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<10} {value}");
    };
    line("folder", found.dir.display().to_string());
    line(
        "revision",
        found
            .revision
            .clone()
            .unwrap_or_else(|| format!("not sealed; `ernie-ctl model seal {}` seals it", found.dir.display())),
    );
    if let Some(s) = &found.shape {
        let kind = if s.moe {
            format!("MoE, {} of {} experts per token", s.experts_per_token, s.experts)
        } else {
            "dense".to_owned()
        };
        line("model", format!("{}, {kind}, {} layers", s.architecture, s.layers));
        line(
            "parameters",
            format!("{}, {} active per token", parameters(s.parameters), parameters(s.parameters_active)),
        );
        line("context", format!("{} tokens, vocabulary of {}", s.context, s.vocab_size));
        let forms: Vec<String> = s.memory.weights.iter().map(|(form, n)| format!("{form} {}", bytes(*n))).collect();
        line("weights", format!("in memory, about: {}", forms.join(", ")));
        line(
            "KV cache",
            format!(
                "{} a block of {} tokens (int8: {}); {} blocks: {}",
                bytes(s.memory.block_bytes),
                s.memory.block_tokens,
                bytes(s.memory.block_bytes_int8),
                s.memory.blocks,
                bytes(s.memory.blocks_bytes)
            ),
        );
    }
    for file in &found.weight_files {
        line("file", format!("{}, {}", file.name, bytes(file.bytes)));
    }
    for class in &found.tensors {
        line("tensors", format!("{}: {} of {}, {}", class.class, class.tensors, class.dtype, bytes(class.bytes)));
    }
    if !found.ignored.is_empty() {
        let scripts = found.ignored.iter().any(|name| name.ends_with(".py"));
        let note = if scripts { " (scripts are never run)" } else { "" };
        line("ignored", format!("{}{note}", found.ignored.join(", ")));
    }
    match found.problems.len() {
        0 => line("problems", "none".to_owned()),
        _ => found.problems.iter().for_each(|problem| line("problem", problem.clone())),
    }
    out
}
