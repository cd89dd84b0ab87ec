//! Looks at what a valid configuration points to, before anything is started: folders, the model's files, the state
//! directory. Reads names and sizes only.

use super::{Config, ConfigError, ModelSource};
use std::path::Path;

/// Everything that would stop the start.
pub fn check(config: &Config) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    if let ModelSource::Dir(dir) = &config.model.source {
        errors.extend(model(dir, config.model.tokenizer.is_none()));
    }
    if let Some(dir) = &config.model.tokenizer
        && !dir.join("tokenizer.json").is_file()
    {
        errors.push(error(
            "model.tokenizer",
            dir,
            format!("has no tokenizer.json; {}", contents(dir)),
            "name the folder that holds tokenizer.json",
        ));
    }
    errors
}

/// Problems of a model folder that names show. `with_tokenizer`: the tokenizer must lie in it too.
pub fn model(dir: &Path, with_tokenizer: bool) -> Vec<ConfigError> {
    let fail = |message: String, remedy: &str| vec![error("model.path", dir, message, remedy)];
    if !dir.exists() {
        let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let near = format!("does not exist; {} {}", parent.display(), contents(parent));
        return fail(near, "name the folder that holds config.json and *.safetensors; models are never downloaded");
    }
    if !dir.is_dir() {
        return fail("is a file, not a folder".to_owned(), "name the folder that holds config.json and *.safetensors");
    }
    let mut errors = Vec::new();
    for name in ["config.json", "tokenizer.json"] {
        let is_tokenizer = name == "tokenizer.json";
        if !(dir.join(name).is_file() || (is_tokenizer && !with_tokenizer)) {
            let remedy = if is_tokenizer {
                "copy the tokenizer's files into the folder, or name theirs with --tokenizer DIR"
            } else {
                "name the folder that holds config.json and *.safetensors"
            };
            errors.push(error("model.path", dir, format!("has no {name}; it {}", contents(dir)), remedy));
        }
    }
    let names = names(dir);
    let weights = |n: &String| n.ends_with(".safetensors") || n == "prepared.json";
    if !names.iter().any(weights) {
        let pickle = names.iter().find(|n| n.ends_with(".bin") || n.ends_with(".pt") || n.ends_with(".pth"));
        errors.push(match pickle {
            Some(p) => error(
                "model.path",
                dir,
                format!("has no *.safetensors, only {p}: a pickle can run code when it is read, so it is never opened"),
                "convert it once, in a sandbox: `python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('DIR').save_pretrained('OUT', safe_serialization=True)\"`",
            ),
            None => error(
                "model.path",
                dir,
                format!("has no *.safetensors; it {}", contents(dir)),
                "name the folder that holds config.json and *.safetensors",
            ),
        });
    }
    errors
}

fn error(key: &str, value: &Path, message: String, remedy: &str) -> ConfigError {
    ConfigError {
        key: key.to_owned(),
        origin: "looked at".to_owned(),
        value: Some(value.display().to_string()),
        message,
        remedy: remedy.to_owned(),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

/// "has a, b, c and 4 more", for error texts.
fn contents(dir: &Path) -> String {
    match std::fs::read_dir(dir) {
        Err(e) => format!("can not be read ({e})"),
        Ok(_) => {
            let names = names(dir);
            match names.len() {
                0 => "is empty".to_owned(),
                n if n > 8 => format!("has {} and {} more", names[..8].join(", "), n - 8),
                _ => format!("has {}", names.join(", ")),
            }
        }
    }
}
