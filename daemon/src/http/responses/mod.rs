//! `/v1/responses`: OpenAI's newer form. Create, stream with typed events, retrieve, cancel, delete.
//!
//! A response is a chat in other words: `input` and `instructions` become messages, the answer becomes output items. What is
//! kept for later (`store`, on by default) lives in [`store`]; `previous_response_id` continues from there. Those that need no
//! client (`background`) are in [`background`].

pub mod background;
pub mod store;
mod tape;

use super::assemble::Answers;
use super::call::{Caller, named_id, unix_now};
use super::chat::{self, Chat, ChatForm, Shown};
use super::error::ApiError;
use super::layers::RequestId;
use super::sse::{self, StreamForm};
use super::{Api, body, query_stream};
use crate::config::ErrorStyle;
use crate::generate::AnswerEvent;
use crate::keys::Principal;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::BytesMut;
use ernie_proto::openai::ChatCompletionRequest;
use ernie_proto::openai::fields::{FieldError, Fields, Loc};
use http::Uri;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use store::Kept;

pub async fn create(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    let owner = principal.id.clone();
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let body = body::object(&api, request).await?;
    let history = match body.get("previous_response_id").and_then(Value::as_str) {
        Some(id) => api.responses.get(&owner, id).await?.messages,
        None => Vec::new(),
    };
    let asked = Asked::read(body, history)?;
    api.unknown_members(&asked.unknown)?;
    if asked.background {
        return background::begin(&api, caller, asked).await;
    }
    let chat = ChatCompletionRequest::read(asked.chat.clone())?;
    let Chat { mut answers, form, .. } = chat::begin(&api, caller, chat, asked.stream).await?;
    let shape = Shape::new(asked, owner, api.clone());
    if shape.asked.stream {
        let first = super::call::first_event(&mut answers).await?;
        let settings = api.settings().stream();
        return Ok(sse::response(answers, first, ResponseStream::new(form, shape), settings));
    }
    let (object, messages) = collected(&mut answers, form, &shape).await?;
    if let Some(kept) = shape.kept(&object, messages) {
        api.keep_response(kept).await;
    }
    Ok(Json(object).into_response())
}

pub async fn retrieve(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let kept = api.responses.get(&principal.id, &id).await?;
    if query_stream(&uri) != Some(true) {
        return Ok(Json(kept.response).into_response());
    }
    background::follow(&api, &id, starting_after(&uri)?).ok_or_else(|| {
        ApiError::value("stream", "a response that has ended comes whole; it can not be streamed again.")
    })
}

/// Number of the first event that is wanted.
fn starting_after(uri: &Uri) -> Result<usize, ApiError> {
    let given = uri.query().and_then(|q| q.split('&').find_map(|pair| pair.strip_prefix("starting_after=")));
    match given.map(str::parse::<u32>) {
        None => Ok(0),
        Some(Ok(number)) => Ok(number as usize + 1),
        Some(Err(_)) => Err(ApiError::value("starting_after", "starting_after must be the number of an event.")),
    }
}

pub async fn delete(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    api.responses.remove(&principal.id, &id).await?;
    background::forget(&api, &id);
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// Only background responses can be cancelled; one that has ended stays as it is.
pub async fn cancel(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(background::cancel(&api, &principal.id, &id).await?))
}

/// A request, read.
#[derive(Debug, Clone, Default)]
struct Asked {
    chat: Map<String, Value>,
    messages: Vec<Value>,
    stream: bool,
    store: bool,
    background: bool,
    /// Repeated in the answer as they were sent.
    repeated: Map<String, Value>,
    unknown: Vec<String>,
}

/// Members that the answer repeats, with what they are when absent.
fn repeated_defaults() -> [(&'static str, Value); 11] {
    [
        ("instructions", Value::Null),
        ("metadata", Value::Null),
        ("parallel_tool_calls", json!(true)),
        ("temperature", Value::Null),
        ("top_p", Value::Null),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("max_output_tokens", Value::Null),
        ("previous_response_id", Value::Null),
        ("text", Value::Null),
        ("user", Value::Null),
    ]
}

impl Asked {
    /// `history`: the conversation of the response that this one continues.
    fn read(body: Map<String, Value>, mut history: Vec<Value>) -> Result<Asked, ApiError> {
        let mut repeated = Map::new();
        for (name, default) in repeated_defaults() {
            repeated.insert(name.into(), body.get(name).filter(|v| !v.is_null()).cloned().unwrap_or(default));
        }
        let mut f = Fields::new(Loc::body(), body);
        let background = f.bool("background")?.unwrap_or(false);
        f.string("previous_response_id")?;
        // Instructions are of this request alone; those of earlier ones do not carry over.
        history.retain(|m| m["role"] != "system");
        let input_loc = f.loc("input");
        let Some(input) = f.value("input") else { return Err(f.missing("input").into()) };
        let mut messages = Vec::new();
        if let Some(instructions) = f.string("instructions")? {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        messages.append(&mut history);
        items_to_messages(&input_loc, input, &mut messages)?;

        let mut chat = Map::new();
        for (from, to) in [
            ("model", "model"),
            ("max_output_tokens", "max_tokens"),
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("seed", "seed"),
            ("stop", "stop"),
            ("parallel_tool_calls", "parallel_tool_calls"),
            ("user", "user"),
            ("presence_penalty", "presence_penalty"),
            ("frequency_penalty", "frequency_penalty"),
            ("priority", "priority"),
            ("cache_salt", "cache_salt"),
            ("chat_template_kwargs", "chat_template_kwargs"),
            ("truncate_history", "truncate_history"),
            ("ignore_eos", "ignore_eos"),
        ] {
            if let Some(value) = f.value(from) {
                chat.insert(to.into(), value);
            }
        }
        if let Some(mut text) = f.object("text")?
            && let Some(mut format) = text.object("format")?
        {
            let kind = format.value("type").unwrap_or(json!("text"));
            let schema = json!({"schema": format.value("schema"), "name": format.value("name")});
            chat.insert("response_format".into(), json!({"type": kind, "json_schema": schema}));
        }
        if let Some(tools) = f.list("tools")? {
            chat.insert("tools".into(), Value::Array(tools.into_iter().map(tool_to_chat).collect()));
        }
        if let Some(choice) = f.value("tool_choice") {
            let named = choice["name"].as_str().map(|name| json!({"type": "function", "function": {"name": name}}));
            // `auto` without tools is what clients send by habit.
            let wanted = named.unwrap_or(choice);
            let empty = chat.get("tools").and_then(Value::as_array).is_none_or(Vec::is_empty);
            if !(empty && wanted == "auto") {
                chat.insert("tool_choice".into(), wanted);
            }
        }
        if let Some(mut reasoning) = f.object("reasoning")?
            && let Some(effort) = reasoning.value("effort")
        {
            chat.insert("reasoning_effort".into(), effort);
        }
        let stream = f.bool("stream")?.unwrap_or(false);
        let store = f.bool("store")?.unwrap_or(true);
        for silent in [
            "metadata",
            "service_tier",
            "truncation",
            "include",
            "max_tool_calls",
            "top_logprobs",
            "prompt_cache_key",
            "stream_options",
            "safety_identifier",
            "request_id",
        ] {
            f.value(silent);
        }
        chat.insert("messages".into(), Value::Array(messages.clone()));
        Ok(Asked { chat, messages, stream, store, background, repeated, unknown: f.unknown() })
    }

    /// One that was written down by [`background`].
    fn remembered(asked: &Value) -> Asked {
        let map = |name: &str| asked[name].as_object().cloned().unwrap_or_default();
        let messages = asked["messages"].as_array().cloned().unwrap_or_default();
        Asked {
            chat: map("chat"),
            repeated: map("repeated"),
            messages,
            store: true,
            background: true,
            ..Asked::default()
        }
    }
}

fn tool_to_chat(tool: Value) -> Value {
    if tool["type"] != "function" || tool.get("function").is_some() {
        return tool;
    }
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.shift_remove("type");
    json!({"type": "function", "function": function})
}

/// `input`: a text, or items.
fn items_to_messages(loc: &Loc, input: Value, out: &mut Vec<Value>) -> Result<(), FieldError> {
    let items = match input {
        Value::String(text) => {
            out.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Value::Array(items) => items,
        other => {
            return Err(FieldError::new("string_type", loc.clone(), "Input should be a valid string or list", &other));
        }
    };
    for (i, item) in items.into_iter().enumerate() {
        match item["type"].as_str() {
            None | Some("message") => out.push(item),
            Some("function_call") => out.push(json!({"role": "assistant", "content": null, "tool_calls": [{
                "id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]}
            }]})),
            Some("function_call_output") => {
                out.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}));
            }
            Some("reasoning") => {}
            Some(_) => {
                let rule = "Input should be 'message', 'function_call', 'function_call_output' or 'reasoning'";
                return Err(FieldError::new("literal_error", loc.item(i).member("type"), rule, &item["type"]));
            }
        }
    }
    Ok(())
}

/// What the answer object is made of besides the answer.
#[derive(Debug)]
struct Shape {
    id: String,
    asked: Asked,
    created: u64,
    owner: Arc<str>,
    api: Arc<Api>,
}

impl Shape {
    /// The id is ours alone: a client's request id might name another response.
    fn new(asked: Asked, owner: Arc<str>, api: Arc<Api>) -> Self {
        Self { id: named_id("resp_"), asked, created: unix_now(), owner, api }
    }

    fn object(&self, form: &ChatForm, status: &str, reason: Option<&str>, output: &[Value]) -> Value {
        let mut object = Map::new();
        object.insert("id".into(), json!(self.id));
        object.insert("created_at".into(), json!(self.created));
        object.insert("incomplete_details".into(), reason.map_or(Value::Null, |r| json!({"reason": r})));
        object.insert("model".into(), json!(form.identity.model));
        object.insert("object".into(), json!("response"));
        object.insert("output".into(), json!(output));
        object.extend(self.asked.repeated.clone());
        object.insert("background".into(), json!(self.asked.background));
        object.insert("error".into(), Value::Null);
        object.insert("service_tier".into(), json!("auto"));
        object.insert("status".into(), json!(status));
        object.insert("truncation".into(), json!("disabled"));
        let counts = &form.counts;
        let usage = (!matches!(status, "queued" | "in_progress")).then(|| {
            json!({
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens.unwrap_or(0)},
                "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            })
        });
        object.insert("usage".into(), usage.unwrap_or(Value::Null));
        Value::Object(object)
    }

    /// What is to be kept of the finished response, if it is.
    fn kept(&self, object: &Value, messages: Vec<Value>) -> Option<Kept> {
        let kept = Kept { owner: self.owner.clone(), response: object.clone(), messages, asked: None };
        self.asked.store.then_some(kept)
    }

    /// The conversation with the answer at its end.
    fn continued(&self, output: &[Value]) -> Vec<Value> {
        let mut messages = self.asked.messages.clone();
        let text: String = output.iter().filter_map(|o| o["content"][0]["text"].as_str()).collect();
        let calls: Vec<Value> = (output.iter())
            .filter(|o| o["type"] == "function_call")
            .map(|o| json!({"id": o["call_id"], "type": "function", "function": {"name": o["name"], "arguments": o["arguments"]}}))
            .collect();
        let mut answer = json!({"role": "assistant", "content": text});
        if !calls.is_empty() {
            answer["tool_calls"] = Value::Array(calls);
        }
        messages.push(answer);
        messages
    }
}

fn text_item(id: &str, status: &str, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.iter().map(|t| text_part(t)).collect();
    json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning_item(id: &str, text: &str) -> Value {
    json!({"id": id, "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, "status": status})
}

fn ended(finish: Option<&str>) -> (&'static str, Option<&'static str>) {
    match finish {
        Some("length") => ("incomplete", Some("max_output_tokens")),
        _ => ("completed", None),
    }
}

/// Waits for the whole answer: its object, and the conversation that it ends.
async fn collected(answers: &mut Answers, mut form: ChatForm, shape: &Shape) -> Result<(Value, Vec<Value>), ApiError> {
    let mut output = Vec::new();
    let mut finish = None;
    while let Some((_, event)) = answers.next().await {
        let Some(shown) = form.take(event, u32::MAX)? else { continue };
        finish = shown.finish_reason;
        let status = ended(finish).0;
        if !shown.reasoning.is_empty() {
            output.push(reasoning_item(&named_id("rs_"), &shown.reasoning));
        }
        if !shown.text.is_empty() || shown.calls.is_empty() {
            output.push(text_item(&named_id("msg_"), status, Some(&shown.text)));
        }
        for call in shown.whole_calls() {
            output.push(call_item(&named_id("fc_"), &named_id("call_"), &call.name, &call.arguments, status));
        }
    }
    let (status, reason) = ended(finish);
    Ok((shape.object(&form, status, reason, &output), shape.continued(&output)))
}

/// The item that is open in a stream.
#[derive(Debug)]
enum Open {
    Nothing,
    Reasoning { id: String, text: String },
    Text { id: String, text: String },
    Call { id: String, call_id: String, name: String, arguments: String },
}

struct ResponseStream {
    form: ChatForm,
    shape: Shape,
    open: Open,
    output: Vec<Value>,
    finish: Option<&'static str>,
    sequence: u64,
}

impl ResponseStream {
    fn new(form: ChatForm, shape: Shape) -> Self {
        Self { form, shape, open: Open::Nothing, output: Vec::new(), finish: None, sequence: 0 }
    }

    fn send(&mut self, kind: &str, members: Value, out: &mut BytesMut) {
        let mut event = Map::new();
        event.insert("type".into(), json!(kind));
        event.insert("sequence_number".into(), json!(self.sequence));
        event.extend(members.as_object().cloned().unwrap_or_default());
        self.sequence += 1;
        sse::named(out, kind, &event);
    }

    fn index(&self) -> usize {
        self.output.len()
    }

    fn begin(&mut self, open: Open, item: &Value, out: &mut BytesMut) {
        let index = self.index();
        self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
        self.open = open;
    }

    /// Ends the open item.
    fn leave(&mut self, out: &mut BytesMut) {
        let index = self.index();
        let item = match std::mem::replace(&mut self.open, Open::Nothing) {
            Open::Nothing => return,
            Open::Reasoning { id, text } => {
                let members = json!({"item_id": id, "output_index": index, "content_index": 0, "text": text});
                self.send("response.reasoning_text.done", members, out);
                reasoning_item(&id, &text)
            }
            Open::Text { id, text } => {
                let at = json!({"item_id": id, "output_index": index, "content_index": 0});
                let mut done = at.clone();
                done["text"] = json!(text);
                done["logprobs"] = json!([]);
                self.send("response.output_text.done", done, out);
                let mut part = at;
                part["part"] = text_part(&text);
                self.send("response.content_part.done", part, out);
                text_item(&id, "completed", Some(&text))
            }
            Open::Call { id, call_id, name, arguments } => {
                let members = json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
                self.send("response.function_call_arguments.done", members, out);
                call_item(&id, &call_id, &name, &arguments, "completed")
            }
        };
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.output.push(item);
    }

    fn show(&mut self, shown: Shown, out: &mut BytesMut) {
        if !shown.reasoning.is_empty() {
            if !matches!(self.open, Open::Reasoning { .. }) {
                self.leave(out);
                let id = named_id("rs_");
                let item = json!({"id": id, "type": "reasoning", "summary": [], "content": []});
                self.begin(Open::Reasoning { id, text: String::new() }, &item, out);
            }
            self.delta("response.reasoning_text.delta", &shown.reasoning, out);
        }
        if !shown.text.is_empty() {
            if !matches!(self.open, Open::Text { .. }) {
                self.leave(out);
                let id = named_id("msg_");
                let item = text_item(&id, "in_progress", None);
                let part =
                    json!({"item_id": id, "output_index": self.index(), "content_index": 0, "part": text_part("")});
                self.begin(Open::Text { id, text: String::new() }, &item, out);
                self.send("response.content_part.added", part, out);
            }
            self.delta("response.output_text.delta", &shown.text, out);
        }
        for call in shown.calls {
            if let Some(name) = call.function.name {
                self.leave(out);
                let (id, call_id) = (named_id("fc_"), named_id("call_"));
                let item = call_item(&id, &call_id, &name, "", "in_progress");
                self.begin(Open::Call { id, call_id, name, arguments: String::new() }, &item, out);
            }
            if let Some(arguments) = call.function.arguments.filter(|a| !a.is_empty()) {
                self.delta("response.function_call_arguments.delta", &arguments, out);
            }
        }
        if shown.finish_reason.is_some() {
            self.finish = shown.finish_reason;
        }
    }

    fn delta(&mut self, kind: &str, delta: &str, out: &mut BytesMut) {
        let index = self.index();
        let members = match &mut self.open {
            Open::Nothing => return,
            Open::Call { id, arguments, .. } => {
                arguments.push_str(delta);
                json!({"item_id": id, "output_index": index, "delta": delta})
            }
            Open::Reasoning { id, text } => {
                text.push_str(delta);
                json!({"item_id": id, "output_index": index, "content_index": 0, "delta": delta})
            }
            Open::Text { id, text } => {
                text.push_str(delta);
                json!({"item_id": id, "output_index": index, "content_index": 0, "delta": delta, "logprobs": []})
            }
        };
        self.send(kind, members, out);
    }
}

impl StreamForm for ResponseStream {
    fn open(&mut self, out: &mut BytesMut) {
        let object = self.shape.object(&self.form, "in_progress", None, &[]);
        self.send("response.created", json!({"response": object}), out);
        self.send("response.in_progress", json!({"response": object}), out);
    }

    fn event(&mut self, _: usize, event: AnswerEvent, out: &mut BytesMut) -> Result<(), ApiError> {
        if let Some(shown) = self.form.take(event, 1)? {
            self.show(shown, out);
        }
        Ok(())
    }

    fn close(&mut self, out: &mut BytesMut) {
        self.leave(out);
        if self.output.is_empty() {
            self.output.push(text_item(&named_id("msg_"), "completed", Some("")));
        }
        let (status, reason) = ended(self.finish);
        let object = self.shape.object(&self.form, status, reason, &self.output);
        if let Some(kept) = self.shape.kept(&object, self.shape.continued(&self.output)) {
            // Readers find it from now on; the stream does not wait for the disk.
            drop(self.shape.api.keep_response(kept));
        }
        let kind = if status == "completed" { "response.completed" } else { "response.incomplete" };
        self.send(kind, json!({"response": object}), out);
    }

    /// Their streams end with `response.completed`.
    fn done(&mut self, _: &mut BytesMut) {}

    fn error(&mut self, error: &ApiError, style: ErrorStyle, out: &mut BytesMut) {
        let body = error.body(style).error;
        let mut object = self.shape.object(&self.form, "failed", None, &self.output);
        object["error"] = json!({"code": "server_error", "message": body.message});
        self.send("error", json!({"code": body.code, "message": body.message, "param": body.param}), out);
        self.send("response.failed", json!({"response": object}), out);
    }
}
