//! Messages of a request to the conversation that a template renders.
//!
//! Parts of type text are joined, null becomes an empty text, `developer` is `system`, a tool call's arguments become an
//! object (templates print it), and thinking inside of an earlier answer moves to its own member.

use super::error::ApiError;
use super::validate::RequestLimits;
use crate::text::chat_template::{ChatTemplate, Conversation};
use ernie_proto::openai::{ChatCompletionRequest, ChatMessage, Content, ContentPart};
use serde_json::{Map, Value};

/// What to do with a system message when the template has no place for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemPolicy {
    /// Put it in front of the first user message.
    Merge,
    Refuse,
}

/// Builds the conversation of a request, without tools.
pub fn conversation(
    request: &ChatCompletionRequest,
    template: &ChatTemplate,
    model: &str,
    system: SystemPolicy,
    limits: &RequestLimits,
) -> Result<Conversation, ApiError> {
    if request.messages.is_empty() {
        return Err(ApiError::value(
            "messages",
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ));
    }
    if request.messages.len() > limits.messages_max {
        return Err(ApiError::value("messages", format!("at most {} messages are taken.", limits.messages_max)));
    }
    if request.chat_template.is_some() {
        return Err(ApiError::value(
            "chat_template",
            "Chat template is passed with request, but this server uses the model's own only.",
        ));
    }
    let continue_final = request.continue_final_message;
    if continue_final && request.add_generation_prompt == Some(true) {
        return Err(ApiError::value(
            "continue_final_message",
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ));
    }
    let mut messages = Vec::with_capacity(request.messages.len());
    for (i, message) in request.messages.iter().enumerate() {
        messages.push(self::message(message, i, model)?);
    }
    if !template.shows_system() {
        place_system(&mut messages, system)?;
    }
    let mut kwargs = request.chat_template_kwargs.clone();
    if let Some(effort) = &request.reasoning_effort {
        kwargs.entry("reasoning_effort").or_insert_with(|| Value::String(effort.clone()));
    }
    Ok(Conversation {
        messages,
        tools: None,
        documents: request.documents.clone(),
        add_generation_prompt: Some(request.add_generation_prompt.unwrap_or(!continue_final)),
        continue_final_message: continue_final,
        kwargs,
    })
}

fn message(message: &ChatMessage, index: usize, model: &str) -> Result<Value, ApiError> {
    let mut text = match &message.content {
        None => String::new(),
        Some(Content::Text(text)) => text.clone(),
        Some(Content::Parts(parts)) => join(parts, index, model)?,
    };
    let role = if message.role == "developer" { "system" } else { &message.role };
    let mut reasoning = message.reasoning.clone();
    if role == "assistant"
        && reasoning.is_none()
        && let Some((thoughts, rest)) = text.split_once("</think>")
    {
        let thoughts = thoughts.trim_start_matches("<think>").trim_matches('\n').to_owned();
        text = rest.trim_start_matches('\n').to_owned();
        reasoning = Some(thoughts);
    }
    let mut out = Map::new();
    out.insert("role".into(), Value::String(role.to_owned()));
    out.insert("content".into(), Value::String(text));
    if let Some(name) = &message.name {
        out.insert("name".into(), Value::String(name.clone()));
    }
    if let Some(reasoning) = reasoning {
        out.insert("reasoning_content".into(), Value::String(reasoning.clone()));
        out.insert("reasoning".into(), Value::String(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(call_with_object).collect();
        out.insert("tool_calls".into(), Value::Array(calls));
    }
    if let Some(id) = &message.tool_call_id {
        out.insert("tool_call_id".into(), Value::String(id.clone()));
    }
    for (name, value) in &message.extra {
        out.entry(name.clone()).or_insert_with(|| value.clone());
    }
    Ok(Value::Object(out))
}

fn join(parts: &[ContentPart], index: usize, model: &str) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        match part {
            ContentPart::Text(text) => texts.push(text.as_str()),
            ContentPart::Other(kind) => {
                let param = format!("messages.{index}.content.{i}.type");
                let media = ["image", "audio", "video", "file"].iter().any(|m| kind.contains(m));
                let message = if media {
                    format!("{model} is not a multimodal model")
                } else {
                    format!("content part type `{kind}` is not known; send {{\"type\": \"text\", \"text\": ...}}")
                };
                return Err(ApiError::value(&param, message));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// Templates walk through arguments; clients send them as JSON text.
fn call_with_object(call: &Value) -> Value {
    let mut call = call.clone();
    let parsed = call["function"]["arguments"].as_str().and_then(|a| serde_json::from_str::<Value>(a).ok());
    if let (Some(arguments), Some(function)) = (parsed, call.get_mut("function").and_then(Value::as_object_mut)) {
        function.insert("arguments".into(), arguments);
    }
    call
}

fn place_system(messages: &mut Vec<Value>, policy: SystemPolicy) -> Result<(), ApiError> {
    if !messages.iter().any(|m| m["role"] == "system") {
        return Ok(());
    }
    if policy == SystemPolicy::Refuse {
        return Err(ApiError::value("messages", "this model's chat template has no system role."));
    }
    let system: Vec<String> = messages
        .extract_if(.., |m| m["role"] == "system")
        .map(|m| m["content"].as_str().unwrap_or_default().to_owned())
        .collect();
    let system = system.join("\n");
    match messages.iter_mut().find(|m| m["role"] == "user") {
        Some(user) => {
            let text = format!("{system}\n\n{}", user["content"].as_str().unwrap_or_default());
            user["content"] = Value::String(text);
        }
        None => messages.insert(0, serde_json::json!({"role": "user", "content": system})),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn build(body: Value, template: &str, policy: SystemPolicy) -> Result<Conversation, ApiError> {
        let request = ChatCompletionRequest::read(body.as_object().unwrap().clone()).map_err(ApiError::from)?;
        let template = ChatTemplate::new(template, BTreeMap::new()).unwrap();
        conversation(&request, &template, "ernie", policy, &RequestLimits::default())
    }

    fn plain(body: Value) -> Result<Conversation, ApiError> {
        build(body, "{% for m in messages %}{{ m.content }}{% endfor %}", SystemPolicy::Merge)
    }

    #[test]
    fn text_parts_are_joined_and_null_is_empty() {
        let c = plain(json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\":1}"}}]},
            {"role": "developer", "content": "d"},
        ]}))
        .unwrap();
        assert_eq!(c.messages[0]["content"], "a\nb\nc");
        assert_eq!(c.messages[1]["content"], "");
        assert_eq!(c.messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(c.messages[2]["role"], "system");
        assert_eq!(c.add_generation_prompt, Some(true));
    }

    #[test]
    fn pictures_and_unknown_parts_are_refused_by_place() {
        for (part, expected) in [
            (json!({"type": "image_url", "image_url": {"url": "http://x"}}), "ernie is not a multimodal model"),
            (json!({"type": "xyz", "text": "a"}), "content part type `xyz` is not known"),
        ] {
            let e = plain(json!({"messages": [{"role": "user", "content": [part]}]})).unwrap_err();
            assert!(e.message.starts_with(expected), "{e}");
            assert_eq!(e.param.as_deref(), Some("messages.0.content.0.type"));
        }
    }

    #[test]
    fn a_template_without_system_role_gets_it_in_the_first_user_turn_or_refuses() {
        let body = json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]});
        let template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
        let c = build(body.clone(), template, SystemPolicy::Merge).unwrap();
        assert_eq!(c.messages, [json!({"role": "user", "content": "S\n\nU"})]);
        assert!(build(body, template, SystemPolicy::Refuse).unwrap_err().message.contains("no system role"));
    }

    #[test]
    fn thinking_in_an_earlier_answer_moves_to_its_own_member() {
        let c = plain(json!({"messages": [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}]})).unwrap();
        assert_eq!(c.messages[0]["content"], "yes");
        assert_eq!(c.messages[0]["reasoning_content"], "hm");
    }

    #[test]
    fn templates_from_requests_and_contradictions_are_refused() {
        let messages = json!([{"role": "user", "content": "x"}]);
        for (body, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": messages, "chat_template": "{{ 1 }}"}), "chat_template"),
            (
                json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true}),
                "continue_final_message",
            ),
        ] {
            assert_eq!(plain(body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
