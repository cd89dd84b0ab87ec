//! Requests of the OpenAI-compatible API, read from JSON objects. Form only: ranges are the server's business.

use super::fields::{FieldError, Fields, Loc, as_integer, as_list, as_number, as_string};
use serde_json::{Map, Value};

/// Members that completions and chat share.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CommonFields {
    pub model: Option<String>,
    pub n: Option<i64>,
    pub best_of: Option<i64>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// `max_completion_tokens`, which wins, or `max_tokens`; with the name that was used.
    pub max_tokens: Option<(&'static str, i64)>,
    pub min_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub length_penalty: Option<f64>,
    pub use_beam_search: Option<bool>,
    pub seed: Option<i64>,
    /// Keys as they were sent: token ids in decimal.
    pub logit_bias: Vec<(String, f64)>,
    pub bad_words: Vec<String>,
    pub allowed_token_ids: Option<Vec<i64>>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<i64>,
    pub include_stop_str_in_output: bool,
    pub ignore_eos: bool,
    pub repetition_detection: Option<RepetitionDetection>,
    pub skip_special_tokens: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub echo: bool,
    pub prompt_logprobs: Option<i64>,
    pub return_token_ids: bool,
    pub return_tokens_as_token_ids: bool,
    pub return_prompt_text: bool,
    pub return_metrics: bool,
    pub stream_interval: Option<i64>,
    pub truncate_prompt_tokens: Option<i64>,
    pub truncation_side: Option<String>,
    pub response_format: Option<ResponseFormat>,
    pub structured_outputs: Option<StructuredOutputs>,
    pub priority: Option<i64>,
    pub cache_salt: Option<String>,
    pub request_id: Option<String>,
    pub user: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub include_usage: bool,
    pub continuous_usage_stats: bool,
}

/// vLLM's `repetition_detection`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepetitionDetection {
    pub min_pattern_size: i64,
    pub max_pattern_size: i64,
    pub min_count: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum ResponseFormat {
    Text,
    JsonObject,
    /// `None`: the member `json_schema` is missing.
    JsonSchema(Option<Value>),
    StructuralTag(Value),
}

/// Constraints on the answer; the older `guided_*` members are read into this.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StructuredOutputs {
    pub json: Option<Value>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    pub grammar: Option<String>,
    pub json_object: bool,
    pub structural_tag: Option<Value>,
    pub disable_any_whitespace: bool,
    pub whitespace_pattern: Option<String>,
}

/// Members that are legal and without effect here; they are not worth a log line.
const SILENT: [&str; 17] = [
    "metadata",
    "store",
    "service_tier",
    "spaces_between_special_tokens",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "include_reasoning",
    "prediction",
    "modalities",
    "safety_identifier",
    "prompt_cache_key",
    "session_id",
    "kv_transfer_params",
    "vllm_xargs",
    "verbosity",
    "mm_processor_kwargs",
    "return_token_offsets",
];

fn common(f: &mut Fields) -> Result<CommonFields, FieldError> {
    let max_tokens = match (f.integer("max_completion_tokens")?, f.integer("max_tokens")?) {
        (Some(n), _) => Some(("max_completion_tokens", n)),
        (None, Some(n)) => Some(("max_tokens", n)),
        (None, None) => None,
    };
    for name in SILENT {
        f.value(name);
    }
    Ok(CommonFields {
        model: f.string("model")?,
        n: f.integer("n")?,
        best_of: f.integer("best_of")?,
        stream: f.bool("stream")?,
        stream_options: stream_options(f)?,
        max_tokens,
        min_tokens: f.integer("min_tokens")?,
        temperature: f.number("temperature")?,
        top_p: f.number("top_p")?,
        top_k: f.integer("top_k")?,
        min_p: f.number("min_p")?,
        presence_penalty: f.number("presence_penalty")?,
        frequency_penalty: f.number("frequency_penalty")?,
        repetition_penalty: f.number("repetition_penalty")?,
        length_penalty: f.number("length_penalty")?,
        use_beam_search: f.bool("use_beam_search")?,
        seed: f.integer("seed")?,
        logit_bias: logit_bias(f)?,
        bad_words: f.strings("bad_words")?.unwrap_or_default(),
        allowed_token_ids: f.integers("allowed_token_ids")?,
        stop: stop(f)?,
        stop_token_ids: f.integers("stop_token_ids")?.unwrap_or_default(),
        include_stop_str_in_output: f.bool("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: f.bool("ignore_eos")?.unwrap_or(false),
        repetition_detection: repetition_detection(f)?,
        skip_special_tokens: f.bool("skip_special_tokens")?,
        add_special_tokens: f.bool("add_special_tokens")?,
        echo: f.bool("echo")?.unwrap_or(false),
        prompt_logprobs: f.integer("prompt_logprobs")?,
        return_token_ids: f.bool("return_token_ids")?.unwrap_or(false),
        return_tokens_as_token_ids: f.bool("return_tokens_as_token_ids")?.unwrap_or(false),
        return_prompt_text: f.bool("return_prompt_text")?.unwrap_or(false),
        return_metrics: f.bool("return_metrics")?.unwrap_or(false),
        stream_interval: f.integer("stream_interval")?,
        truncate_prompt_tokens: f.integer("truncate_prompt_tokens")?,
        truncation_side: f.string("truncation_side")?,
        response_format: response_format(f)?,
        structured_outputs: structured_outputs(f)?,
        priority: f.integer("priority")?,
        cache_salt: f.string("cache_salt")?,
        request_id: f.string("request_id")?,
        user: f.string("user")?,
    })
}

fn stream_options(f: &mut Fields) -> Result<Option<StreamOptions>, FieldError> {
    let Some(mut f) = f.object("stream_options")? else { return Ok(None) };
    Ok(Some(StreamOptions {
        include_usage: f.bool("include_usage")?.unwrap_or(false),
        continuous_usage_stats: f.bool("continuous_usage_stats")?.unwrap_or(false),
    }))
}

fn repetition_detection(f: &mut Fields) -> Result<Option<RepetitionDetection>, FieldError> {
    let Some(mut f) = f.object("repetition_detection")? else { return Ok(None) };
    Ok(Some(RepetitionDetection {
        min_pattern_size: f.integer("min_pattern_size")?.unwrap_or(0),
        max_pattern_size: f.integer("max_pattern_size")?.unwrap_or(0),
        min_count: f.integer("min_count")?.unwrap_or(0),
    }))
}

fn logit_bias(f: &mut Fields) -> Result<Vec<(String, f64)>, FieldError> {
    let loc = f.loc("logit_bias");
    let Some(members) = f.map("logit_bias")? else { return Ok(Vec::new()) };
    members
        .into_iter()
        .map(|(id, bias)| Ok((as_number(&loc.member(&id), &bias)?, id)))
        .map(|r| r.map(|(b, id)| (id, b)))
        .collect()
}

fn stop(f: &mut Fields) -> Result<Vec<String>, FieldError> {
    let loc = f.loc("stop");
    match f.value("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(s)) => Ok(vec![s]),
        Some(other) => {
            let items = as_list(loc.clone(), other)?;
            items.into_iter().enumerate().map(|(i, v)| as_string(&loc.item(i), v)).collect()
        }
    }
}

fn response_format(f: &mut Fields) -> Result<Option<ResponseFormat>, FieldError> {
    let loc = f.loc("response_format");
    let Some(mut f) = f.object("response_format")? else { return Ok(None) };
    let Some(kind) = f.string("type")? else { return Err(f.missing("type")) };
    Ok(Some(match kind.as_str() {
        "text" => ResponseFormat::Text,
        "json_object" => ResponseFormat::JsonObject,
        "json_schema" => match f.object("json_schema")? {
            None => ResponseFormat::JsonSchema(None),
            Some(mut inner) => ResponseFormat::JsonSchema(Some(
                // A format without a schema asks for any object.
                inner.value("schema").unwrap_or_else(|| serde_json::json!({"type": "object"})),
            )),
        },
        "structural_tag" => ResponseFormat::StructuralTag(Value::Object(f.rest())),
        _ => {
            return Err(FieldError::new(
                "literal_error",
                loc.member("type"),
                "Input should be 'text', 'json_object', 'json_schema' or 'structural_tag'",
                &Value::String(kind),
            ));
        }
    }))
}

fn structured_outputs(f: &mut Fields) -> Result<Option<StructuredOutputs>, FieldError> {
    let mut found = false;
    let mut out = StructuredOutputs::default();
    if let Some(mut f) = f.object("structured_outputs")? {
        found = true;
        out = StructuredOutputs {
            json: f.value("json"),
            regex: f.string("regex")?,
            choice: f.strings("choice")?,
            grammar: f.string("grammar")?,
            json_object: f.bool("json_object")?.unwrap_or(false),
            structural_tag: f.value("structural_tag"),
            disable_any_whitespace: f.bool("disable_any_whitespace")?.unwrap_or(false),
            whitespace_pattern: f.string("whitespace_pattern")?,
        };
    }
    for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"] {
        found |= f.has(name);
    }
    out.json = f.value("guided_json").or(out.json);
    out.regex = f.string("guided_regex")?.or(out.regex);
    out.choice = f.strings("guided_choice")?.or(out.choice);
    out.grammar = f.string("guided_grammar")?.or(out.grammar);
    out.json_object |= f.bool("guided_json_object")?.unwrap_or(false);
    Ok(found.then_some(out))
}

/// The prompts of `/v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<i64>),
}

#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    pub common: CommonFields,
    /// `None`: the member is missing.
    pub prompts: Option<Vec<Prompt>>,
    pub logprobs: Option<i64>,
    pub suffix: Option<String>,
    /// Members nobody here knows.
    pub unknown: Vec<String>,
}

impl CompletionRequest {
    pub fn read(body: Map<String, Value>) -> Result<Self, FieldError> {
        let mut f = Fields::new(Loc::body(), body);
        let common = common(&mut f)?;
        let loc = f.loc("prompt");
        let prompts = f.value("prompt").map(|v| prompts(loc, v)).transpose()?;
        let logprobs = f.integer("logprobs")?;
        let suffix = f.string("suffix")?;
        Ok(Self { common, prompts, logprobs, suffix, unknown: f.unknown() })
    }
}

/// A string, ids, a list of strings, a list of lists of ids, or a mixed list.
fn prompts(loc: Loc, value: Value) -> Result<Vec<Prompt>, FieldError> {
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        other => match other {
            Value::Array(items) => items,
            other => return Err(FieldError::new("string_type", loc, "Input should be a valid string", &other)),
        },
    };
    if items.first().is_some_and(Value::is_number) {
        return Ok(vec![Prompt::Tokens(ids(&loc, &items)?)]);
    }
    items
        .into_iter()
        .enumerate()
        .map(|(i, item)| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(list) => Ok(Prompt::Tokens(ids(&loc.item(i), &list)?)),
            other => Err(FieldError::new("string_type", loc.item(i), "Input should be a valid string", &other)),
        })
        .collect()
}

fn ids(loc: &Loc, items: &[Value]) -> Result<Vec<i64>, FieldError> {
    items
        .iter()
        .enumerate()
        .map(|(i, v)| match as_integer(&loc.item(i), v)? {
            id if id < 0 => {
                Err(FieldError::new("greater_than_equal", loc.item(i), "Input should be greater than or equal to 0", v))
            }
            id => Ok(id),
        })
        .collect()
}

#[derive(Debug, Clone, PartialEq)]
pub struct ChatCompletionRequest {
    pub common: CommonFields,
    pub messages: Vec<ChatMessage>,
    pub logprobs: bool,
    pub top_logprobs: Option<i64>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: bool,
    pub chat_template: Option<String>,
    pub chat_template_kwargs: Map<String, Value>,
    pub documents: Option<Vec<Value>>,
    /// `None`: absent or null. An empty list is legal and means none.
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning_effort: Option<String>,
    /// ours: `truncate_history: {max_tokens}`; `Some(None)`: as much as the context holds.
    pub truncate_history: Option<Option<i64>>,
    pub unknown: Vec<String>,
}

impl ChatCompletionRequest {
    pub fn read(body: Map<String, Value>) -> Result<Self, FieldError> {
        let mut f = Fields::new(Loc::body(), body);
        let common = common(&mut f)?;
        let loc = f.loc("messages");
        let Some(messages) = f.list("messages")? else { return Err(f.missing("messages")) };
        let messages = messages.into_iter().enumerate().map(|(i, m)| ChatMessage::read(loc.item(i), m));
        let mut request = Self {
            common,
            messages: messages.collect::<Result<_, _>>()?,
            logprobs: f.bool("logprobs")?.unwrap_or(false),
            top_logprobs: f.integer("top_logprobs")?,
            add_generation_prompt: f.bool("add_generation_prompt")?,
            continue_final_message: f.bool("continue_final_message")?.unwrap_or(false),
            chat_template: f.string("chat_template")?,
            chat_template_kwargs: f.map("chat_template_kwargs")?.unwrap_or_default(),
            documents: f.list("documents")?,
            tools: tools(&mut f)?,
            tool_choice: tool_choice(&mut f)?,
            parallel_tool_calls: f.bool("parallel_tool_calls")?,
            reasoning_effort: f.string("reasoning_effort")?,
            truncate_history: match f.object("truncate_history")? {
                None => None,
                Some(mut inner) => Some(inner.integer("max_tokens")?),
            },
            unknown: Vec::new(),
        };
        request.unknown = f.unknown();
        Ok(request)
    }
}

/// One message. Members that only templates know stay in `extra`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    pub role: String,
    /// `None`: absent or null, as in an assistant's tool calls.
    pub content: Option<Content>,
    pub name: Option<String>,
    pub tool_calls: Vec<Value>,
    pub tool_call_id: Option<String>,
    pub reasoning: Option<String>,
    pub extra: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Clone, PartialEq)]
pub enum ContentPart {
    Text(String),
    /// Something this server does not read, by its `type`.
    Other(String),
}

impl ChatMessage {
    pub fn read(loc: Loc, value: Value) -> Result<Self, FieldError> {
        let mut f = Fields::of(loc, value)?;
        let Some(role) = f.string("role")? else { return Err(f.missing("role")) };
        let content_loc = f.loc("content");
        let content = f.value("content").map(|v| content(content_loc, v)).transpose()?;
        let name = f.string("name")?;
        let tool_calls = f.list("tool_calls")?.unwrap_or_default();
        if let Some((at, call)) = tool_calls.iter().enumerate().find(|(_, call)| !call.is_object()) {
            let loc = f.loc("tool_calls").item(at);
            return Err(FieldError::new("dict_type", loc, "Input should be a valid dictionary", call));
        }
        let tool_call_id = f.string("tool_call_id")?;
        let reasoning = f.string("reasoning_content")?;
        let reasoning = f.string("reasoning")?.or(reasoning);
        Ok(Self { role, content, name, tool_calls, tool_call_id, reasoning, extra: f.rest() })
    }
}

fn content(loc: Loc, value: Value) -> Result<Content, FieldError> {
    let items = match value {
        Value::String(text) => return Ok(Content::Text(text)),
        Value::Array(items) => items,
        other => {
            return Err(FieldError::new("string_type", loc, "Input should be a valid string or list of parts", &other));
        }
    };
    let parts = items.into_iter().enumerate().map(|(i, item)| {
        let loc = loc.item(i);
        if let Value::String(text) = item {
            return Ok(ContentPart::Text(text));
        }
        let mut f = Fields::of(loc, item)?;
        let kind = f.string("type")?;
        match kind.as_deref() {
            Some("text" | "input_text" | "output_text") => {
                f.string("text")?.map(ContentPart::Text).ok_or_else(|| f.missing("text"))
            }
            Some("refusal") => f.string("refusal")?.map(ContentPart::Text).ok_or_else(|| f.missing("refusal")),
            Some(other) => Ok(ContentPart::Other(other.to_owned())),
            None => match f.string("text")? {
                Some(text) => Ok(ContentPart::Text(text)),
                None => Err(f.missing("type")),
            },
        }
    });
    Ok(Content::Parts(parts.collect::<Result<_, _>>()?))
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of the arguments; `None`: no arguments described.
    pub parameters: Option<Value>,
    pub strict: bool,
    /// As it was sent: what the template shows.
    pub raw: Value,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

fn tools(f: &mut Fields) -> Result<Option<Vec<Tool>>, FieldError> {
    let loc = f.loc("tools");
    let Some(items) = f.list("tools")? else { return Ok(None) };
    items.into_iter().enumerate().map(|(i, v)| Tool::read(loc.item(i), v)).collect::<Result<_, _>>().map(Some)
}

impl Tool {
    pub fn read(loc: Loc, value: Value) -> Result<Self, FieldError> {
        let raw = value.clone();
        let mut outer = Fields::of(loc.clone(), value)?;
        let kind = outer.string("type")?;
        if kind.as_deref().is_some_and(|k| k != "function") {
            let input = Value::String(kind.unwrap_or_default());
            return Err(FieldError::new("literal_error", loc.member("type"), "Input should be 'function'", &input));
        }
        let Some(mut f) = outer.object("function")? else { return Err(outer.missing("function")) };
        let Some(name) = f.string("name")? else { return Err(f.missing("name")) };
        let parameters_loc = f.loc("parameters");
        let parameters = f.value("parameters");
        if let Some(other) = parameters.as_ref().filter(|p| !p.is_object()) {
            return Err(FieldError::new("dict_type", parameters_loc, "Input should be a valid dictionary", other));
        }
        Ok(Self {
            name,
            description: f.string("description")?,
            parameters,
            strict: f.bool("strict")?.unwrap_or(false),
            raw,
        })
    }
}

fn tool_choice(f: &mut Fields) -> Result<Option<ToolChoice>, FieldError> {
    let loc = f.loc("tool_choice");
    let unknown = |value: &Value| {
        let rule =
            "Input should be 'none', 'auto', 'required' or {\"type\": \"function\", \"function\": {\"name\": ...}}";
        FieldError::new("literal_error", loc.clone(), rule, value)
    };
    match f.value("tool_choice") {
        None => Ok(None),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok(Some(ToolChoice::None)),
            "auto" => Ok(Some(ToolChoice::Auto)),
            "required" => Ok(Some(ToolChoice::Required)),
            _ => Err(unknown(&Value::String(word))),
        },
        Some(value) => match value["function"]["name"].as_str() {
            Some(name) => Ok(Some(ToolChoice::Named(name.to_owned()))),
            None => Err(unknown(&value)),
        },
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct TokenizeRequest {
    pub model: Option<String>,
    pub input: TokenizeInput,
    pub add_special_tokens: Option<bool>,
    pub return_token_strs: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum TokenizeInput {
    Text(String),
    Chat(Box<ChatCompletionRequest>),
}

impl TokenizeRequest {
    pub fn read(mut body: Map<String, Value>) -> Result<Self, FieldError> {
        if body.get("messages").is_some_and(|m| !m.is_null()) && !body.contains_key("prompt") {
            let strs = body.shift_remove("return_token_strs").filter(|v| !v.is_null());
            let loc = Loc::body().member("return_token_strs");
            let return_token_strs = strs.map(|v| super::fields::as_bool(&loc, &v)).transpose()?.unwrap_or(false);
            let chat = ChatCompletionRequest::read(body)?;
            return Ok(Self {
                model: chat.common.model.clone(),
                add_special_tokens: chat.common.add_special_tokens,
                input: TokenizeInput::Chat(Box::new(chat)),
                return_token_strs,
            });
        }
        let mut f = Fields::new(Loc::body(), body);
        let Some(prompt) = f.string("prompt")? else { return Err(f.missing("prompt")) };
        Ok(Self {
            model: f.string("model")?,
            input: TokenizeInput::Text(prompt),
            add_special_tokens: f.bool("add_special_tokens")?,
            return_token_strs: f.bool("return_token_strs")?.unwrap_or(false),
        })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct DetokenizeRequest {
    pub model: Option<String>,
    pub tokens: Vec<i64>,
}

impl DetokenizeRequest {
    pub fn read(body: Map<String, Value>) -> Result<Self, FieldError> {
        let mut f = Fields::new(Loc::body(), body);
        let loc = f.loc("tokens");
        let Some(tokens) = f.list("tokens")? else { return Err(f.missing("tokens")) };
        Ok(Self { model: f.string("model")?, tokens: ids(&loc, &tokens)? })
    }
}
