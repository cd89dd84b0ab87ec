//! The demo model's own questions, from the file it was trained on.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use std::path::PathBuf;

/// One line of `daemon/demo/qa.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub struct Question {
    pub messages: Vec<Value>,
    pub answer: String,
}

pub fn demo_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../daemon/demo")
}

/// Every question-answer pair of the demo model.
pub fn questions() -> Result<Vec<Question>> {
    let path = demo_dir().join("qa.jsonl");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    text.lines().filter(|l| !l.trim().is_empty()).map(|line| Ok(serde_json::from_str(line)?)).collect()
}
