//! From a model folder to everything that a deployment needs besides workers: verified files, text side, probes.

use super::probe::Probe;
use crate::model_store::{self, SmokeSuite, SmokeText, VerifiedModel};
use crate::text::TextModel;
use crate::text::chat_template::Conversation;
use ernie_proto::worker::FileDigest;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens model folders. The seam at which tests replace the disk.
pub trait OpenModel: Send + Sync + 'static {
    /// Verifies and reads what the daemon needs; blocks. The error is a sentence for the operator.
    fn open(&self, dir: &Path, unsealed: bool) -> Result<OpenedModel, String>;
}

/// A model that may be loaded.
#[derive(Debug, Clone)]
pub struct OpenedModel {
    pub model_dir: PathBuf,
    pub revision: String,
    pub text: Arc<TextModel>,
    /// The digests that the worker compares with while it loads. Empty: unsealed.
    pub manifest: Vec<FileDigest>,
    /// Bytes of the weight files.
    pub weights_bytes: u64,
    pub probes: Vec<Probe>,
    /// Slower is a failure.
    pub min_tokens_per_second: Option<f64>,
}

/// Opens folders on disk.
#[derive(Debug, Default, Clone, Copy)]
pub struct StoredModels;

impl OpenModel for StoredModels {
    fn open(&self, dir: &Path, unsealed: bool) -> Result<OpenedModel, String> {
        let before = model_store::verify_for_load(dir, unsealed).map_err(|error| error.to_string())?;
        let text = TextModel::load(before.dir()).map_err(|error| error.to_string())?;
        let suite = SmokeSuite::read(before.dir()).map_err(|error| error.to_string())?;
        // What was read in between is what both looks agree on.
        let verified = model_store::verify_for_load(dir, unsealed).map_err(|error| error.to_string())?;
        if verified != before {
            return Err(format!("{} changed while it was read; wait until it is complete", dir.display()));
        }
        let probes = probes(&text, &suite)?;
        let VerifiedParts { model_dir, revision, manifest, weights_bytes } = parts(&verified);
        let min_tokens_per_second = suite.min_tokens_per_second;
        Ok(OpenedModel {
            model_dir,
            revision,
            text: Arc::new(text),
            manifest,
            weights_bytes,
            probes,
            min_tokens_per_second,
        })
    }
}

struct VerifiedParts {
    model_dir: PathBuf,
    revision: String,
    manifest: Vec<FileDigest>,
    weights_bytes: u64,
}

fn parts(verified: &VerifiedModel) -> VerifiedParts {
    VerifiedParts {
        model_dir: verified.dir().to_path_buf(),
        revision: verified.revision().to_string(),
        manifest: verified.manifest().map(|manifest| manifest.to_wire()).unwrap_or_default(),
        weights_bytes: verified.weights_bytes(),
    }
}

/// The suite's prompts as token ids. A model without a chat template is asked the text of the last message.
fn probes(text: &TextModel, suite: &SmokeSuite) -> Result<Vec<Probe>, String> {
    let encoded = suite.prompts.iter().map(|prompt| {
        let ids = match &prompt.text {
            SmokeText::Prompt(plain) => text.encode(plain, true),
            SmokeText::Messages(messages) if text.template().is_some() => {
                let conversation = Conversation {
                    messages: messages
                        .iter()
                        .map(|(role, content)| json!({"role": role, "content": content}))
                        .collect(),
                    add_generation_prompt: Some(true),
                    ..Conversation::default()
                };
                text.render(&conversation).and_then(|rendered| text.encode_rendered(&rendered, false))
            }
            SmokeText::Messages(messages) => {
                text.encode(messages.last().map_or("", |(_, content)| content.as_str()), true)
            }
        };
        let ids = ids.map_err(|error| format!("a smoke prompt can not be encoded: {error}"))?;
        Ok(Probe { prompt: Arc::new(ids), expect_any: prompt.expect_any.clone(), max_tokens: prompt.max_tokens })
    });
    encoded.collect()
}
