//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a chat, whole and streamed.
//!
//! A message request is turned into a chat request and goes its way; what comes back is spelled in Anthropic's objects and
//! typed events. Thinking, text and tool use are content blocks that open and close one after the other.

use super::assemble::Answers;
use super::call::{Caller, named_id};
use super::chat::{self, Chat, Shown};
use super::error::ApiError;
use super::layers::RequestId;
use super::sse::{self, StreamForm};
use super::{Api, body};
use crate::config::ErrorStyle;
use crate::generate::AnswerEvent;
use crate::keys::Principal;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::BytesMut;
use ernie_proto::openai::ChatCompletionRequest;
use ernie_proto::openai::fields::{FieldError, Fields, Loc, as_list};
use ernie_proto::openai::response::StopReason;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn create(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Response {
    match try_create(&api, principal, request_id, request).await {
        Ok(response) => response,
        Err(error) => refusal(&error),
    }
}

async fn try_create(
    api: &Arc<Api>,
    principal: Principal,
    request_id: RequestId,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::new(api, principal, request_id, request.headers())?;
    let body = body::object(api, request).await?;
    let (chat_body, unknown) = to_chat(body)?;
    api.unknown_members(&unknown)?;
    let chat = ChatCompletionRequest::read(chat_body)?;
    let stream = chat.common.stream.unwrap_or(false);
    let Chat { mut answers, form, .. } = chat::begin(api, caller, chat, stream).await?;
    if stream {
        let first = super::call::first_event(&mut answers).await?;
        return Ok(sse::response(answers, first, MessageStream::new(form), api.settings().stream()));
    }
    let message = collect(&mut answers, form).await?;
    Ok(Json(message).into_response())
}

/// Tokens of the prompt that a message request would make.
pub async fn count_tokens(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Response {
    let counted = async {
        let caller = Caller::new(&api, principal, request_id, request.headers())?;
        let mut body = body::object(&api, request).await?;
        // Counting needs no bound on the answer.
        body.entry("max_tokens").or_insert(json!(1));
        let (chat_body, _) = to_chat(body)?;
        let chat = ChatCompletionRequest::read(chat_body)?;
        let tokens = super::tokenize::chat_tokens(&api, &caller, chat).await?;
        Ok::<_, ApiError>(Json(json!({"input_tokens": tokens.len()})).into_response())
    };
    match counted.await {
        Ok(response) => response,
        Err(error) => refusal(&error),
    }
}

/// Anthropic's error object, with the same status and words.
fn error_body(error: &ApiError) -> Value {
    let kind = match error.status().as_u16() {
        400 | 405 | 415 | 422 => "invalid_request_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

fn refusal(error: &ApiError) -> Response {
    let mut response = error.render(ErrorStyle::Vllm);
    *response.body_mut() = axum::body::Body::from(error_body(error).to_string());
    response.headers_mut().remove(http::header::CONTENT_LENGTH);
    response
}

/// The chat request of a message request, and the members nobody knows.
fn to_chat(body: Map<String, Value>) -> Result<(Map<String, Value>, Vec<String>), FieldError> {
    let mut f = Fields::new(Loc::body(), body);
    let mut chat = Map::new();
    let Some(max_tokens) = f.value("max_tokens") else { return Err(f.missing("max_tokens")) };
    chat.insert("max_tokens".into(), max_tokens);
    for (from, to) in [
        ("model", "model"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("stream", "stream"),
        ("stop_sequences", "stop"),
        ("chat_template_kwargs", "chat_template_kwargs"),
    ] {
        if let Some(value) = f.value(from) {
            chat.insert(to.into(), value);
        }
    }
    let mut messages = Vec::new();
    let system_loc = f.loc("system");
    if let Some(system) = f.value("system") {
        messages.push(json!({"role": "system", "content": text_of(&system_loc, system)?}));
    }
    let loc = f.loc("messages");
    let Some(list) = f.list("messages")? else { return Err(f.missing("messages")) };
    for (i, message) in list.into_iter().enumerate() {
        to_messages(loc.item(i), message, &mut messages)?;
    }
    chat.insert("messages".into(), Value::Array(messages));
    if let Some(tools) = f.list("tools")? {
        let tools = tools.into_iter().map(|t| {
            json!({"type": "function", "function": {
                "name": t["name"], "description": t["description"], "parameters": t["input_schema"]
            }})
        });
        chat.insert("tools".into(), Value::Array(tools.collect()));
    }
    if let Some(choice) = f.value("tool_choice") {
        if choice["disable_parallel_tool_use"] == true {
            chat.insert("parallel_tool_calls".into(), json!(false));
        }
        let to = match choice["type"].as_str() {
            Some("any") => json!("required"),
            Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
            Some(word) => json!(word),
            None => Value::Null,
        };
        chat.insert("tool_choice".into(), to);
    }
    for silent in ["metadata", "thinking", "service_tier", "container", "context_management", "mcp_servers"] {
        f.value(silent);
    }
    Ok((chat, f.unknown()))
}

/// A text, or a list of text blocks.
fn text_of(loc: &Loc, value: Value) -> Result<String, FieldError> {
    if let Value::String(text) = value {
        return Ok(text);
    }
    let blocks = as_list(loc.clone(), value)?;
    let mut texts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        match block["text"].as_str() {
            Some(text) => texts.push(text.to_owned()),
            None => {
                return Err(FieldError::new("missing", loc.item(i).member("text"), "Field required", &block));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// One message of theirs can be several of ours: tool results are messages of their own here.
fn to_messages(loc: Loc, message: Value, out: &mut Vec<Value>) -> Result<(), FieldError> {
    let mut f = Fields::of(loc, message)?;
    let Some(role) = f.string("role")? else { return Err(f.missing("role")) };
    let content_loc = f.loc("content");
    let Some(content) = f.value("content") else { return Err(f.missing("content")) };
    if content.is_string() {
        out.push(json!({"role": role, "content": content}));
        return Ok(());
    }
    let (mut parts, mut calls, mut thoughts) = (Vec::new(), Vec::new(), String::new());
    for (i, block) in as_list(content_loc.clone(), content)?.into_iter().enumerate() {
        match block["type"].as_str() {
            Some("tool_use") => calls.push(json!({
                "id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"].to_string()}
            })),
            Some("tool_result") => {
                let loc = content_loc.item(i).member("content");
                let text = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(inner) => text_of(&loc, inner.clone())?,
                };
                out.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}));
            }
            Some("thinking") => thoughts.push_str(block["thinking"].as_str().unwrap_or_default()),
            Some("redacted_thinking") => {}
            // Text stays as it is; what is not text is refused by the chat with the place and the kind.
            _ => parts.push(block),
        }
    }
    if parts.is_empty() && calls.is_empty() && thoughts.is_empty() {
        return Ok(());
    }
    let mut ours = json!({"role": role, "content": parts});
    if !calls.is_empty() {
        ours["tool_calls"] = Value::Array(calls);
    }
    if !thoughts.is_empty() {
        ours["reasoning"] = Value::String(thoughts);
    }
    out.push(ours);
    Ok(())
}

/// Their name of how it ended, and the stop sequence.
fn stop_reason(shown: &Shown) -> (Value, Value) {
    match (shown.finish_reason, &shown.stop_reason) {
        (Some("length"), _) => (json!("max_tokens"), Value::Null),
        (Some("tool_calls"), _) => (json!("tool_use"), Value::Null),
        (_, Some(StopReason::Text(text))) => (json!("stop_sequence"), json!(text)),
        (Some(_), _) => (json!("end_turn"), Value::Null),
        (None, _) => (Value::Null, Value::Null),
    }
}

fn usage(form: &chat::ChatForm) -> Value {
    let counts = &form.counts;
    json!({
        "input_tokens": counts.prompt_tokens.saturating_sub(counts.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
    })
}

fn envelope(form: &chat::ChatForm, content: Vec<Value>, stop: (Value, Value)) -> Value {
    json!({
        "id": form.identity.id.replacen("chatcmpl-", "msg_", 1),
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": form.identity.model,
        "stop_reason": stop.0,
        "stop_sequence": stop.1,
        "usage": usage(form),
    })
}

/// The whole message.
async fn collect(answers: &mut Answers, mut form: chat::ChatForm) -> Result<Value, ApiError> {
    let mut content = Vec::new();
    let mut stop = (Value::Null, Value::Null);
    while let Some((_, event)) = answers.next().await {
        if let Some(shown) = form.take(event, u32::MAX)? {
            stop = stop_reason(&shown);
            if !shown.reasoning.is_empty() {
                content.push(json!({"type": "thinking", "thinking": shown.reasoning, "signature": ""}));
            }
            if !shown.text.is_empty() || shown.calls.is_empty() {
                content.push(json!({"type": "text", "text": shown.text}));
            }
            for call in shown.whole_calls() {
                let input: Value = serde_json::from_str(&call.arguments).unwrap_or(json!({}));
                content.push(json!({"type": "tool_use", "id": named_id("toolu_"), "name": call.name, "input": input}));
            }
        }
    }
    Ok(envelope(&form, content, stop))
}

/// Which block is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    None,
    Thinking,
    Text,
    Tool(u32),
}

struct MessageStream {
    form: chat::ChatForm,
    block: Block,
    index: u32,
    stop: (Value, Value),
}

impl MessageStream {
    fn new(form: chat::ChatForm) -> Self {
        Self { form, block: Block::None, index: 0, stop: (Value::Null, Value::Null) }
    }

    fn enter(&mut self, block: Block, content: Value, out: &mut BytesMut) {
        if self.block == block {
            return;
        }
        self.leave(out);
        let event = json!({"type": "content_block_start", "index": self.index, "content_block": content});
        sse::named(out, "content_block_start", &event);
        self.block = block;
    }

    fn leave(&mut self, out: &mut BytesMut) {
        if self.block != Block::None {
            let event = json!({"type": "content_block_stop", "index": self.index});
            sse::named(out, "content_block_stop", &event);
            self.index += 1;
            self.block = Block::None;
        }
    }

    fn delta(&self, delta: Value, out: &mut BytesMut) {
        let event = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        sse::named(out, "content_block_delta", &event);
    }
}

impl StreamForm for MessageStream {
    fn open(&mut self, out: &mut BytesMut) {
        let message = envelope(&self.form, Vec::new(), (Value::Null, Value::Null));
        sse::named(out, "message_start", &json!({"type": "message_start", "message": message}));
    }

    fn event(&mut self, _: usize, event: AnswerEvent, out: &mut BytesMut) -> Result<(), ApiError> {
        let Some(shown) = self.form.take(event, 1)? else { return Ok(()) };
        if !shown.reasoning.is_empty() {
            self.enter(Block::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}), out);
            self.delta(json!({"type": "thinking_delta", "thinking": shown.reasoning}), out);
        }
        if !shown.text.is_empty() {
            self.enter(Block::Text, json!({"type": "text", "text": ""}), out);
            self.delta(json!({"type": "text_delta", "text": shown.text}), out);
        }
        for call in &shown.calls {
            if let Some(name) = &call.function.name {
                let content = json!({"type": "tool_use", "id": named_id("toolu_"), "name": name, "input": {}});
                self.enter(Block::Tool(call.index), content, out);
            }
            if let Some(arguments) = call.function.arguments.as_ref().filter(|a| !a.is_empty()) {
                self.delta(json!({"type": "input_json_delta", "partial_json": arguments}), out);
            }
        }
        if shown.finish_reason.is_some() {
            self.stop = stop_reason(&shown);
        }
        Ok(())
    }

    fn close(&mut self, out: &mut BytesMut) {
        self.leave(out);
        let delta = json!({"stop_reason": self.stop.0, "stop_sequence": self.stop.1});
        sse::named(out, "message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage(&self.form)}));
        sse::named(out, "message_stop", &json!({"type": "message_stop"}));
    }

    /// Their streams end with `message_stop`.
    fn done(&mut self, _: &mut BytesMut) {}

    fn error(&mut self, error: &ApiError, _: ErrorStyle, out: &mut BytesMut) {
        sse::named(out, "error", &error_body(error));
    }
}
