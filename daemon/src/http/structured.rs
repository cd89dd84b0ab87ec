//! Constraints on the answer: `response_format`, `structured_outputs` and the older `guided_*` members to one grammar.
//!
//! Exactly one constraint per request. Sizes are bounded here, and [`check`] refuses what is no grammar before a worker hears
//! of it; building the masks is the worker's, outside its step.

use super::error::ApiError;
use super::structural_tag;
use super::validate::RequestLimits;
use ernie_proto::openai::request::{CommonFields, ResponseFormat, StructuredOutputs};
use ernie_proto::worker::Grammar;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar, ValidationResult};
use serde_json::{Value, json};

/// How JSON is spaced: one way, as `json.dumps` does it. With free white space a weak model may go on with blanks for ever.
pub(super) fn spaced(mut schema: Value, spacing: &Spacing) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Some(members) = schema.as_object_mut() {
        let options = match spacing {
            Spacing::Python => json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
            Spacing::None => json!({"whitespace_flexible": false, "item_separator": ",", "key_separator": ":"}),
            Spacing::Pattern(pattern) => json!({"whitespace_pattern": pattern}),
        };
        members.entry("x-guidance").or_insert(options);
    }
    schema
}

/// What stands between the tokens of JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Spacing {
    Python,
    /// `disable_any_whitespace`
    None,
    /// `whitespace_pattern`
    Pattern(String),
}

fn any_object(spacing: &Spacing) -> Grammar {
    Grammar::JsonSchema(spaced(json!({"type": "object"}), spacing).to_string())
}

/// The grammar that a request asks for, if any.
pub fn grammar(common: &CommonFields, limits: &RequestLimits) -> Result<Option<Grammar>, ApiError> {
    let from_format = match &common.response_format {
        None | Some(ResponseFormat::Text) => None,
        Some(ResponseFormat::JsonObject) => Some(any_object(&Spacing::Python)),
        Some(ResponseFormat::JsonSchema(Some(schema))) => {
            Some(json_schema("response_format", schema, &Spacing::Python)?)
        }
        Some(ResponseFormat::JsonSchema(None)) => {
            return Err(ApiError::value(
                "response_format",
                "When response_format type is 'json_schema', the 'json_schema' field must be provided. \
                 (parameter=response_format)",
            ));
        }
        Some(ResponseFormat::StructuralTag(tag)) => {
            Some(structural_tag::grammar("response_format", tag, limits.grammar_choices_max)?)
        }
    };
    let from_structured = common.structured_outputs.as_ref().map(|s| constraint(s, limits)).transpose()?.flatten();
    let grammar = match (from_format, from_structured) {
        (Some(_), Some(_)) => {
            return Err(ApiError::value(
                "structured_outputs",
                "response_format and structured_outputs both constrain the answer; only one of them can be used.",
            ));
        }
        (a, b) => a.or(b),
    };
    if let Some(Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) = &grammar
        && text.len() > limits.grammar_bytes_max
    {
        return Err(ApiError::value(
            "structured_outputs",
            format!("the constraint has {} bytes, the limit is {}.", text.len(), limits.grammar_bytes_max),
        ));
    }
    Ok(grammar)
}

/// Work that reading one grammar may take, in llguidance's units; some tens of milliseconds.
fn bounds() -> ParserLimits {
    ParserLimits { verbose_errors: false, max_grammar_size: 200_000, ..ParserLimits::default() }
}

/// Whether a grammar is one. Takes processor time: call it on the text pool.
pub fn check(grammar: &Grammar) -> Result<(), ApiError> {
    let refused = |cause: String| ApiError::value("structured_outputs", format!("Grammar error: {cause}"));
    let source = match grammar {
        Grammar::JsonSchema(text) => {
            TopLevelGrammar::from_json_schema(serde_json::from_str(text).map_err(|e| refused(e.to_string()))?)
        }
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
    };
    // The parser is upstream's: should it panic on a grammar, that grammar is refused and nothing else happens.
    let checked = std::panic::catch_unwind(|| GrammarInit::Serialized(source).validate(None, bounds()));
    match checked {
        Ok(ValidationResult::Valid | ValidationResult::Warnings(_)) => Ok(()),
        Ok(ValidationResult::Error(cause)) => Err(refused(cause)),
        Err(_) => Err(refused("it can not be read".to_owned())),
    }
}

fn constraint(s: &StructuredOutputs, limits: &RequestLimits) -> Result<Option<Grammar>, ApiError> {
    let given = [
        s.json.is_some(),
        s.regex.is_some(),
        s.choice.is_some(),
        s.grammar.is_some(),
        s.json_object,
        s.structural_tag.is_some(),
    ];
    match given.iter().filter(|g| **g).count() {
        0 => return Ok(None),
        1 => {}
        _ => {
            return Err(ApiError::value(
                "structured_outputs",
                "You can only use one kind of structured outputs constraint but multiple are specified.",
            ));
        }
    }
    if let Some(tag) = &s.structural_tag {
        // vLLM takes it as text; we take the object as well.
        let parsed = match tag {
            Value::String(text) => serde_json::from_str(text)
                .map_err(|e| ApiError::value("structured_outputs", format!("`structural_tag` is no JSON: {e}")))?,
            other => other.clone(),
        };
        return structural_tag::grammar("structured_outputs", &parsed, limits.grammar_choices_max).map(Some);
    }
    let spacing = match &s.whitespace_pattern {
        Some(pattern) => Spacing::Pattern(pattern.clone()),
        None if s.disable_any_whitespace => Spacing::None,
        None => Spacing::Python,
    };
    if s.json_object {
        return Ok(Some(any_object(&spacing)));
    }
    if let Some(json) = &s.json {
        // Older clients send the schema as text.
        if let Value::String(text) = json {
            let parsed: Value = serde_json::from_str(text)
                .map_err(|e| ApiError::value("structured_outputs", format!("`json` is no JSON schema: {e}")))?;
            return json_schema("structured_outputs", &parsed, &spacing).map(Some);
        }
        return json_schema("structured_outputs", json, &spacing).map(Some);
    }
    if let Some(regex) = &s.regex {
        return Ok(Some(Grammar::Regex(regex.clone())));
    }
    if let Some(grammar) = &s.grammar {
        return Ok(Some(Grammar::Lark(grammar.clone())));
    }
    match &s.choice {
        Some(choices) if choices.is_empty() || choices.len() > limits.grammar_choices_max => {
            let message = format!("`choice` must be a list of 1 to {} texts.", limits.grammar_choices_max);
            Err(ApiError::value("structured_outputs", message))
        }
        Some(choices) => {
            let alternatives: Vec<String> = choices.iter().map(|c| lark_string(c)).collect();
            Ok(Some(Grammar::Lark(format!("start: {}\n", alternatives.join(" | ")))))
        }
        None => Ok(None),
    }
}

fn json_schema(param: &str, schema: &Value, spacing: &Spacing) -> Result<Grammar, ApiError> {
    match schema {
        Value::Object(_) | Value::Bool(true) => Ok(Grammar::JsonSchema(spaced(schema.clone(), spacing).to_string())),
        _ => Err(ApiError::value(param, "a JSON schema must be an object.")),
    }
}

/// A text as a string literal of llguidance's Lark (JSON escapes).
pub(super) fn lark_string(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ernie_proto::openai::ChatCompletionRequest;

    fn of(extra: Value) -> Result<Option<Grammar>, ApiError> {
        let mut body = extra.as_object().unwrap().clone();
        body.insert("messages".into(), json!([]));
        let request = ChatCompletionRequest::read(body).map_err(ApiError::from)?;
        grammar(&request.common, &RequestLimits::default())
    }

    #[test]
    fn every_spelling_of_a_constraint_is_read() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let expected = Some(Grammar::JsonSchema(spaced(schema.clone(), &Spacing::Python).to_string()));
        let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
        assert_eq!(of(json!({"response_format": format})).unwrap(), expected);
        assert_eq!(of(json!({"structured_outputs": {"json": schema}})).unwrap(), expected);
        assert_eq!(of(json!({"guided_json": schema})).unwrap(), expected);
        assert_eq!(of(json!({"guided_json": schema.to_string()})).unwrap(), expected);
        assert_eq!(of(json!({"guided_regex": "a+"})).unwrap(), Some(Grammar::Regex("a+".into())));
        assert_eq!(
            of(json!({"structured_outputs": {"choice": ["a\"b", "北"]}})).unwrap(),
            Some(Grammar::Lark("start: \"a\\\"b\" | \"北\"\n".into()))
        );
        for none in [json!({}), json!({"response_format": null}), json!({"response_format": {"type": "text"}})] {
            assert_eq!(of(none).unwrap(), None);
        }
    }

    #[test]
    fn what_is_no_grammar_is_refused_quickly() {
        let deep = format!("{}1{}", "{\"items\":".repeat(100), "}".repeat(100));
        for grammar in [
            Grammar::JsonSchema(r#"{"type":"nosuch"}"#.into()),
            Grammar::JsonSchema(r##"{"$ref":"#/definitions/none"}"##.into()),
            Grammar::JsonSchema(deep),
            Grammar::JsonSchema(r#"{"type":"string","pattern":"(["}"#.into()),
            Grammar::Regex("([".into()),
            Grammar::Regex("(?=a)".into()),
            Grammar::Lark("start: nosuch".into()),
            Grammar::Lark("begin: \"a\"".into()),
            Grammar::Lark(String::new()),
        ] {
            let started = std::time::Instant::now();
            let e = check(&grammar).expect_err(&format!("{grammar:?}"));
            assert!(e.message.starts_with("Grammar error: "), "{e}");
            assert!(started.elapsed().as_secs() < 2, "{grammar:?}");
        }
        for grammar in [
            any_object(&Spacing::Python),
            any_object(&Spacing::None),
            any_object(&Spacing::Pattern("[ \\n]{0,4}".into())),
            Grammar::JsonSchema("{}".into()),
            Grammar::Regex("(a+)+$?".replace('$', "b")),
            Grammar::Lark("start: \"a\\\"b\" | \"北\"\n".into()),
        ] {
            check(&grammar).unwrap_or_else(|e| panic!("{grammar:?}: {e}"));
        }
    }

    #[test]
    fn two_constraints_or_a_broken_one_are_refused() {
        for (body, param) in [
            (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs"),
            (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "structured_outputs"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format"),
            (json!({"response_format": {"type": "xml"}}), "body.response_format.type"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs"),
            (json!({"guided_json": "{"}), "structured_outputs"),
            (json!({"guided_regex": "a".repeat(70_000)}), "structured_outputs"),
        ] {
            let e = of(body.clone()).unwrap_err();
            assert_eq!(e.param.as_deref(), Some(param), "{body}");
        }
    }
}
