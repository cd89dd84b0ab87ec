//! Everything that is text: tokenizer, chat template, streaming decode, stop strings, and the defaults of a model folder.
//!
//! One [`TextModel`] per deployment, read once and shared. It knows no request and no worker; encoding and rendering take
//! processor time and are called on the blocking pool (`generate`).

pub mod chat_template;
pub mod detokenizer;
pub mod reasoning;
pub mod stop;
pub mod tokenizer;
pub mod tool_calls;

use chat_template::{ChatTemplate, Conversation, RenderError, Rendered};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// What ends a turn in the text models of the family besides the tokenizer's own end of sequence.
const TURN_ENDS: [&str; 2] = ["<|end_of_sentence|>", "<|im_end|>"];

/// Why the text side of a model folder could not be used: the operator's to fix.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("can not read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{} has tokenizer.model but no tokenizer.json; ernied reads tokenizer.json: take it from the current revision of the \
         model, or convert it with transformers (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))",
        dir.display()
    )]
    OnlySentencePiece { dir: PathBuf },
    #[error("{} can not be used: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error("the chat template in {} does not compile: {reason}", path.display())]
    Template { path: PathBuf, reason: String },
    #[error("the text can not be encoded: {reason}")]
    Encode { reason: String },
    #[error("this model has no chat template, so it can not chat; use /v1/completions")]
    NoChatTemplate,
    #[error(transparent)]
    Render(#[from] RenderError),
}

/// Sampling defaults that the folder's `generation_config.json` sets; what it does not set is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
}

/// The text side of one model.
#[derive(Debug)]
pub struct TextModel {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    eos_token_ids: Vec<u32>,
    defaults: GenerationDefaults,
}

impl TextModel {
    /// Reads tokenizer, template and defaults of a Hugging Face folder.
    pub fn load(dir: &Path) -> Result<TextModel, TextError> {
        let mut tokenizer = Tokenizer::load(dir)?;
        let config = read_json(dir, "config.json")?.unwrap_or_default();
        belongs_to_weights(dir, &tokenizer, &config)?;
        let generation = read_json(dir, "generation_config.json")?.unwrap_or_default();
        let settings = read_json(dir, "tokenizer_config.json")?.unwrap_or_default();
        let special = read_json(dir, "special_tokens_map.json")?.unwrap_or_default();

        let named_tokens = named_tokens(&special, &settings);
        let mut eos_token_ids = Vec::new();
        for ids in [&generation["eos_token_id"], &config["eos_token_id"]] {
            let many = ids.as_array().map_or(std::slice::from_ref(ids), |a| a.as_slice());
            eos_token_ids.extend(many.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        }
        let template = chat_template(dir, &settings, &named_tokens)?;
        let named = ["eos_token", "sep_token"].into_iter().filter_map(|n| named_tokens.get(n).map(String::as_str));
        // A turn mark counts where it is a token of its own: named in the settings, or written by the template.
        let written = TURN_ENDS.into_iter().filter(|end| template.as_ref().is_some_and(|t| t.mentions(end)));
        eos_token_ids.extend(named.chain(written).filter_map(|token| tokenizer.id_of(token)));
        eos_token_ids.sort_unstable();
        eos_token_ids.dedup();
        tokenizer.add_special(&eos_token_ids);
        Ok(TextModel { tokenizer, template, eos_token_ids, defaults: generation_defaults(&generation) })
    }

    /// What looks wrong for weights of this vocabulary without being impossible: a sentence.
    pub fn misfit(&self, vocab_size: u32) -> Option<String> {
        let (has, rows) = (self.tokenizer.size(), vocab_size as usize);
        (has < rows / 2).then(|| format!("it has {has} tokens, the weights {rows} rows for them: {OTHER_TOKENIZER}"))
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Ids that end an answer and are never printed.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// The bytes of every id, for grammars (see [`Tokenizer::vocabulary`]).
    pub fn vocabulary(&self) -> Vec<Vec<u8>> {
        self.tokenizer.vocabulary()
    }

    /// Encodes text as it stands.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode(text, add_special_tokens)
    }

    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        self.tokenizer.decode(ids, skip_special_tokens)
    }

    /// Renders a conversation with the model's template.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoChatTemplate)?;
        Ok(template.render(conversation, &self.tokenizer)?)
    }

    /// Encodes a rendered conversation: the template's control tokens are control tokens, those in the messages are text.
    pub fn encode_rendered(&self, rendered: &Rendered, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let (marked, mark) = rendered.parts();
        self.tokenizer.encode_marked(marked, mark, add_special_tokens)
    }
}

const OTHER_TOKENIZER: &str = "it seems to be another model's; copy the tokenizer that came with the weights";

/// A token that the embedding has no row for can never be computed.
fn belongs_to_weights(dir: &Path, tokenizer: &Tokenizer, config: &Value) -> Result<(), TextError> {
    match config["vocab_size"].as_u64() {
        Some(rows) if tokenizer.size() as u64 > rows => Err(TextError::Invalid {
            path: dir.join("tokenizer.json"),
            reason: format!(
                "it has {} tokens, config.json's vocab_size is {rows}: {OTHER_TOKENIZER}",
                tokenizer.size()
            ),
        }),
        _ => Ok(()),
    }
}

fn read_json(dir: &Path, name: &str) -> Result<Option<Value>, TextError> {
    let path = dir.join(name);
    match std::fs::read(&path) {
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Some(value)),
            Err(e) => Err(TextError::Invalid { path, reason: e.to_string() }),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path, source }),
    }
}

/// `bos_token` and the like: a string, or an object with `content`; null and absent are undefined.
fn named_tokens(special: &Value, settings: &Value) -> BTreeMap<String, String> {
    let mut named = BTreeMap::new();
    for source in [special, settings] {
        for (name, value) in source.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token")) {
            if let Some(token) = value.as_str().or_else(|| value["content"].as_str()) {
                named.insert(name.clone(), token.to_owned());
            }
        }
    }
    named
}

/// `chat_template.jinja` wins over `chat_template.json` and the one inside `tokenizer_config.json`, as in transformers.
fn chat_template(
    dir: &Path,
    settings: &Value,
    named_tokens: &BTreeMap<String, String>,
) -> Result<Option<ChatTemplate>, TextError> {
    let file = dir.join("chat_template.jinja");
    let (path, source) = match std::fs::read_to_string(&file) {
        Ok(source) => (file, Some(source)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match read_json(dir, "chat_template.json")? {
            Some(json) => (dir.join("chat_template.json"), default_template(&json["chat_template"])),
            None => (dir.join("tokenizer_config.json"), default_template(&settings["chat_template"])),
        },
        Err(source) => return Err(TextError::Read { path: file, source }),
    };
    match source {
        None => Ok(None),
        Some(source) => match ChatTemplate::new(&source, named_tokens.clone()) {
            Ok(template) => Ok(Some(template)),
            Err(reason) => Err(TextError::Template { path, reason }),
        },
    }
}

/// A template is a string, or a list of `{name, template}` of which `default` is meant.
fn default_template(value: &Value) -> Option<String> {
    match value {
        Value::String(source) => Some(source.clone()),
        Value::Array(list) => {
            let named = list.iter().find(|t| t["name"] == "default").or(list.first())?;
            named["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

fn generation_defaults(generation: &Value) -> GenerationDefaults {
    let number = |name: &str| generation[name].as_f64().map(|v| v as f32).filter(|v| v.is_finite());
    let count = |name: &str| generation[name].as_u64().and_then(|v| u32::try_from(v).ok());
    GenerationDefaults {
        temperature: number("temperature"),
        top_p: number("top_p"),
        top_k: count("top_k"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        presence_penalty: number("presence_penalty"),
        frequency_penalty: number("frequency_penalty"),
        max_new_tokens: count("max_new_tokens"),
    }
}

/// The text sides of the golden models (no weights), for tests of this crate.
#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(name)
    }

    /// GPT-2 style byte-level BPE.
    pub(crate) fn byte_level() -> Tokenizer {
        Tokenizer::load(&dir("tiny-dense")).expect("the fixture is complete")
    }

    /// SentencePiece style BPE with byte fallback: the kind that real ERNIE has.
    pub(crate) fn byte_fallback() -> Tokenizer {
        Tokenizer::load(&dir("tiny-moe-sharded")).expect("the fixture is complete")
    }

    pub(crate) fn text_model() -> TextModel {
        TextModel::load(&dir("tiny-moe-sharded")).expect("the fixture is complete")
    }

    pub(crate) fn ernie_chat_template() -> String {
        text_model().template().expect("the fixture has a template").source().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny-moe-sharded/tokenizer.json");
        std::fs::copy(fixture, dir.path().join("tokenizer.json")).unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    #[test]
    fn both_ends_of_a_turn_are_read_from_the_folder_and_not_by_number() {
        let model = fixtures::text_model();
        let t = model.tokenizer();
        let expected = [t.id_of("</s>").unwrap(), t.id_of("<|end_of_sentence|>").unwrap()];
        assert_eq!(model.eos_token_ids(), expected);
        let answer = [t.id_of("<0x41>").unwrap(), expected[1], expected[0]];
        assert_eq!(model.decode(&answer, true), "A");
    }

    #[test]
    fn a_list_of_ends_and_a_single_one_are_both_read() {
        let dir = folder(&[("generation_config.json", r#"{"eos_token_id": [7, 9], "temperature": 0.5, "top_k": 3}"#)]);
        let model = TextModel::load(dir.path()).unwrap();
        assert_eq!(model.eos_token_ids(), [7, 9]);
        assert_eq!(model.generation_defaults().temperature, Some(0.5));
        assert_eq!(model.generation_defaults().top_k, Some(3));
        assert_eq!(model.generation_defaults().top_p, None);
        assert!(matches!(model.render(&Conversation::default()), Err(TextError::NoChatTemplate)));
    }

    #[test]
    fn the_template_file_wins_over_the_one_inside_the_settings() {
        let settings =
            r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "inside"}]}"#;
        let dir = folder(&[("tokenizer_config.json", settings)]);
        assert_eq!(TextModel::load(dir.path()).unwrap().template().unwrap().source(), "inside");
        std::fs::write(dir.path().join("chat_template.jinja"), "outside").unwrap();
        assert_eq!(TextModel::load(dir.path()).unwrap().template().unwrap().source(), "outside");
    }

    #[test]
    fn a_named_token_that_is_null_stays_undefined() {
        let settings = r#"{"cls_token": null, "sep_token": {"content": "</s>"},
            "chat_template": "{{ cls_token is defined }} {{ sep_token }}"}"#;
        let dir = folder(&[("tokenizer_config.json", settings)]);
        let model = TextModel::load(dir.path()).unwrap();
        assert_eq!(model.render(&Conversation::default()).unwrap().text().to_lowercase(), "false </s>");
    }

    #[test]
    fn a_folder_with_only_a_sentencepiece_model_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.model"), "x").unwrap();
        let e = TextModel::load(dir.path()).unwrap_err().to_string();
        assert!(e.contains("tokenizer.model but no tokenizer.json") && e.contains("save_pretrained"), "{e}");
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = folder(&[("generation_config.json", "{")]);
        assert!(TextModel::load(dir.path()).unwrap_err().to_string().contains("generation_config.json"));
        let dir = folder(&[("chat_template.jinja", "{% if %}")]);
        assert!(TextModel::load(dir.path()).unwrap_err().to_string().contains("chat_template.jinja"));
        let dir = folder(&[("tokenizer.json", "{}")]);
        assert!(TextModel::load(dir.path()).unwrap_err().to_string().contains("tokenizer.json"));
    }
}
