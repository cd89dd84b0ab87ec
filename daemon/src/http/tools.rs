//! What `tools` and `tool_choice` of a chat mean for the prompt, the grammar and the reading of the answer.

use super::error::ApiError;
use super::structured::{Spacing, lark_string, spaced};
use super::validate::RequestLimits;
use crate::text::chat_template::{ChatTemplate, Conversation};
use crate::text::tool_calls::{self, ToolParser};
use ernie_proto::openai::{ChatCompletionRequest, Tool, ToolChoice};
use ernie_proto::worker::Grammar;
use serde_json::{Value, json};

/// How a chat uses tools.
#[derive(Debug, Clone)]
pub struct ToolPlan {
    tools: Vec<Tool>,
    choice: ToolChoice,
    parallel: bool,
}

impl ToolPlan {
    /// `None`: no tools, or none wanted.
    pub fn of(request: &ChatCompletionRequest, limits: &RequestLimits) -> Result<Option<ToolPlan>, ApiError> {
        let tools = request.tools.as_deref().unwrap_or_default();
        let choice = match (&request.tool_choice, tools.is_empty()) {
            (None | Some(ToolChoice::None), true) => return Ok(None),
            (Some(_), true) => {
                return Err(ApiError::value(
                    "tool_choice",
                    "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
                ));
            }
            (Some(ToolChoice::None), false) => return Ok(None),
            (None, false) => ToolChoice::Auto,
            (Some(choice), false) => choice.clone(),
        };
        if tools.len() > limits.tools_max {
            return Err(ApiError::value("tools", format!("at most {} tools are taken.", limits.tools_max)));
        }
        for (i, tool) in tools.iter().enumerate() {
            let fits = !tool.name.is_empty()
                && tool.name.len() <= 64
                && tool.name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
            if !fits {
                return Err(ApiError::value(
                    &format!("tools.{i}.function.name"),
                    "a function name has 1 to 64 letters, digits, `_`, `-` or `.`.",
                ));
            }
        }
        if let ToolChoice::Named(name) = &choice
            && !tools.iter().any(|t| &t.name == name)
        {
            return Err(ApiError::value(
                "tool_choice",
                format!("The tool specified in `tool_choice` does not match any of the specified `tools`: `{name}`."),
            ));
        }
        let parallel = request.parallel_tool_calls.unwrap_or(true);
        Ok(Some(ToolPlan { tools: tools.to_vec(), choice, parallel }))
    }

    /// Reads the calls of one choice.
    pub fn parser(&self) -> ToolParser {
        ToolParser::new(self.parallel && !matches!(self.choice, ToolChoice::Named(_)))
    }

    /// OpenAI's finish reason of an answer with calls: a named function that was called is a plain `stop`.
    pub fn finish_reason(&self) -> &'static str {
        if matches!(self.choice, ToolChoice::Named(_)) { "stop" } else { "tool_calls" }
    }

    /// Puts the tools into the conversation: as the template's variable, or as instructions when it knows none.
    pub fn place(&self, conversation: &mut Conversation, template: &ChatTemplate) {
        let tools: Vec<Value> = self.tools.iter().map(|t| t.raw.clone()).collect();
        if template.reads_tools() {
            conversation.tools = Some(tools);
            return;
        }
        let text = tool_calls::instructions(&tools);
        match conversation.messages.first_mut().filter(|m| m["role"] == "system") {
            Some(system) => {
                let text = format!("{}\n\n{text}", system["content"].as_str().unwrap_or_default());
                system["content"] = Value::String(text);
            }
            None => conversation.messages.insert(0, json!({"role": "system", "content": text})),
        }
    }

    /// The grammar that makes a call certain. `thinks`: the answer begins inside of `<think>`.
    pub fn grammar(&self, thinks: bool, limits: &RequestLimits) -> Result<Option<Grammar>, ApiError> {
        let wanted: Vec<&Tool> = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => return Ok(None),
            ToolChoice::Required => self.tools.iter().collect(),
            ToolChoice::Named(name) => self.tools.iter().filter(|t| &t.name == name).take(1).collect(),
        };
        let several = self.parallel && self.choice == ToolChoice::Required;
        let mut lark = String::new();
        let begin = if thinks { "thought " } else { "" };
        let more = if several { " (\"\\n\" call)*" } else { "" };
        lark.push_str(&format!("start: {begin}call{more}\n"));
        if thinks {
            lark.push_str("thought[lazy]: /(.|\\n)*<\\/think>\\n*/\n");
        }
        let names: Vec<String> = (0..wanted.len()).map(|i| format!("f{i}")).collect();
        lark.push_str(&format!(
            "call: {} ({}) {}\n",
            lark_string("<tool_call>\n"),
            names.join(" | "),
            lark_string("\n</tool_call>")
        ));
        for (name, tool) in names.iter().zip(&wanted) {
            let any = || json!({"type": "object"});
            let schema = json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": tool.parameters.clone().unwrap_or_else(any)},
                "required": ["name", "arguments"],
                "additionalProperties": false,
            });
            let schema = spaced(schema, &Spacing::Python);
            lark.push_str(&format!("{name}: %json {schema}\n"));
        }
        if lark.len() > limits.grammar_bytes_max {
            return Err(ApiError::value(
                "tools",
                format!(
                    "the schemas of the tools have {} bytes, the limit is {}.",
                    lark.len(),
                    limits.grammar_bytes_max
                ),
            ));
        }
        Ok(Some(Grammar::Lark(lark)))
    }
}

/// Tool messages for a template that knows no tools: calls as the model wrote them, results as a user's turn.
pub fn flatten(conversation: &mut Conversation, template: &ChatTemplate) {
    let knows_calls = template.mentions("tool_calls");
    let knows_results =
        template.mentions("tool_response") || template.mentions("'tool'") || template.mentions("\"tool\"");
    for message in &mut conversation.messages {
        if !knows_calls && message["role"] == "assistant" && message["tool_calls"].is_array() {
            let calls: Vec<String> = message["tool_calls"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|c| {
                    let name = c["function"]["name"].as_str().unwrap_or_default();
                    tool_calls::written(name, &c["function"]["arguments"])
                })
                .collect();
            let text = message["content"].as_str().unwrap_or_default();
            let text = if text.is_empty() { calls.join("\n") } else { format!("{text}\n{}", calls.join("\n")) };
            message["content"] = Value::String(text);
        }
        if !knows_results && message["role"] == "tool" {
            let text = message["content"].as_str().unwrap_or_default();
            message["content"] = Value::String(format!("<tool_response>\n{text}\n</tool_response>"));
            message["role"] = Value::String("user".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn plan(extra: Value) -> Result<Option<ToolPlan>, ApiError> {
        let mut body = json!({"messages": []}).as_object().unwrap().clone();
        body.extend(extra.as_object().unwrap().clone());
        ToolPlan::of(&ChatCompletionRequest::read(body).map_err(ApiError::from)?, &RequestLimits::default())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}})
    }

    #[test]
    fn a_choice_needs_tools_and_a_name_has_to_be_among_them() {
        assert!(plan(json!({"tools": []})).unwrap().is_none());
        assert!(plan(json!({"tools": [tool("f")], "tool_choice": "none"})).unwrap().is_none());
        for (body, message) in [
            (json!({"tool_choice": "auto"}), "When using `tool_choice`, `tools` must be set"),
            (json!({"tools": [tool("f")], "tool_choice": {"function": {"name": "g"}}}), "does not match any"),
            (json!({"tools": [tool("a b")]}), "a function name has"),
        ] {
            assert!(plan(body.clone()).unwrap_err().message.contains(message), "{body}");
        }
    }

    #[test]
    fn a_call_that_is_required_is_made_certain_by_a_grammar() {
        let limits = RequestLimits::default();
        let required = plan(json!({"tools": [tool("f"), tool("g")], "tool_choice": "required"})).unwrap().unwrap();
        let Some(Grammar::Lark(text)) = required.grammar(false, &limits).unwrap() else { panic!() };
        super::super::structured::check(&Grammar::Lark(text.clone())).unwrap();
        assert!(
            text.starts_with("start: call (\"\\n\" call)*\ncall: \"<tool_call>\\n\" (f0 | f1) \"\\n</tool_call>\"\n"),
            "{text}"
        );
        assert!(
            text.contains(r#"f1: %json {"type":"object","properties":{"name":{"const":"g"},"arguments""#),
            "{text}"
        );
        let choice = json!({"type": "function", "function": {"name": "g"}});
        let named = plan(json!({"tools": [tool("f"), tool("g")], "tool_choice": choice})).unwrap().unwrap();
        let Some(Grammar::Lark(text)) = named.grammar(true, &limits).unwrap() else { panic!() };
        super::super::structured::check(&Grammar::Lark(text.clone())).unwrap();
        assert!(text.starts_with("start: thought call\n") && !text.contains("\"f\""), "{text}");
        let auto = plan(json!({"tools": [tool("f")]})).unwrap().unwrap();
        assert_eq!(auto.grammar(false, &limits).unwrap(), None);
    }

    #[test]
    fn a_template_without_tools_is_told_in_words() {
        let template =
            ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}", BTreeMap::new()).unwrap();
        let mut c = Conversation {
            messages: vec![
                json!({"role": "user", "content": "q"}),
                json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}),
                json!({"role": "tool", "content": "42"}),
            ],
            ..Conversation::default()
        };
        plan(json!({"tools": [tool("f")]})).unwrap().unwrap().place(&mut c, &template);
        flatten(&mut c, &template);
        assert!(c.tools.is_none());
        assert!(c.messages[0]["content"].as_str().unwrap().contains(r#"{"name":"f""#));
        assert_eq!(c.messages[2]["content"], "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>");
        assert_eq!(c.messages[3], json!({"role": "user", "content": "<tool_response>\n42\n</tool_response>"}));
        let knowing = ChatTemplate::new("{{ tools }}", BTreeMap::new()).unwrap();
        let mut c = Conversation::default();
        plan(json!({"tools": [tool("f")]})).unwrap().unwrap().place(&mut c, &knowing);
        assert_eq!(c.tools.unwrap().len(), 1);
    }
}
