//! Structural tags: free text in which certain openings, once written, bind what follows (a JSON schema, say) up to their end.
//!
//! Both of vLLM's spellings: the older `{structures: [{begin, schema, end}], triggers}`, and the newer `{format: {type, …}}`,
//! a tree. Either becomes one Lark grammar. A trigger is a lazy lexeme: as soon as its text has been written, the tag begins.

use super::error::ApiError;
use super::structured::{Spacing, lark_string, spaced};
use ernie_proto::worker::Grammar;
use serde_json::Value;

/// Depth of a tree of formats.
const DEPTH_MAX: usize = 32;

/// Any text, the empty one too.
const ANY_TEXT: &str = "/(.|\\n)*/";

/// The grammar of a structural tag. At most `nodes_max` parts.
pub fn grammar(param: &str, tag: &Value, nodes_max: usize) -> Result<Grammar, ApiError> {
    let mut rules = Rules { param, text: String::new(), next: 0, nodes_max };
    let start = match (&tag["format"], tag["structures"].as_array()) {
        (Value::Object(_), None) => rules.format(&tag["format"], 0)?,
        (Value::Null, Some(structures)) => {
            let tags: Vec<Tag<'_>> = structures.iter().map(|s| rules.older_tag(s)).collect::<Result<_, _>>()?;
            rules.triggered(&tags, &tag["triggers"], Bounds::default(), 0)?
        }
        _ => return Err(rules.refused("it needs either `format`, or `structures` and `triggers`")),
    };
    Ok(Grammar::Lark(format!("start: {start}\n{}", rules.text)))
}

/// The rules written so far.
struct Rules<'a> {
    param: &'a str,
    text: String,
    next: usize,
    nodes_max: usize,
}

#[derive(Clone, Copy)]
struct Tag<'v> {
    begin: &'v str,
    content: Content<'v>,
    end: &'v str,
}

#[derive(Clone, Copy)]
enum Content<'v> {
    Schema(&'v Value),
    Format(&'v Value),
}

#[derive(Clone, Copy, Default)]
struct Bounds {
    at_least_one: bool,
    stop_after_first: bool,
}

impl Bounds {
    fn of(format: &Value) -> Self {
        Self { at_least_one: format["at_least_one"] == true, stop_after_first: format["stop_after_first"] == true }
    }
}

impl<'a> Rules<'a> {
    fn refused(&self, cause: &str) -> ApiError {
        ApiError::value(self.param, format!("the structural tag can not be used: {cause}."))
    }

    /// Adds a rule under a new name that begins with `kind`.
    fn rule(&mut self, kind: &str, attributes: &str, body: &str) -> Result<String, ApiError> {
        self.next += 1;
        if self.next > self.nodes_max {
            return Err(self.refused(&format!("it has more than {} parts", self.nodes_max)));
        }
        let name = format!("{kind}_{}", self.next);
        self.text.push_str(&format!("{name}{attributes}: {body}\n"));
        Ok(name)
    }

    fn string<'v>(&self, of: &'v Value, name: &str) -> Result<&'v str, ApiError> {
        of[name].as_str().ok_or_else(|| self.refused(&format!("`{name}` must be a text")))
    }

    fn list<'v>(&self, of: &'v Value, name: &str) -> Result<&'v [Value], ApiError> {
        match of[name].as_array() {
            Some(list) if !list.is_empty() => Ok(list),
            _ => Err(self.refused(&format!("`{name}` must be a list with at least one entry"))),
        }
    }

    fn older_tag<'v>(&self, tag: &'v Value) -> Result<Tag<'v>, ApiError> {
        Ok(Tag {
            begin: self.string(tag, "begin")?,
            content: Content::Schema(&tag["schema"]),
            end: self.string(tag, "end")?,
        })
    }

    fn tag<'v>(&self, tag: &'v Value) -> Result<Tag<'v>, ApiError> {
        // Several possible ends are a later addition upstream; the first one is as good as any to write.
        let end = match &tag["end"] {
            Value::Array(ends) => ends.first().and_then(Value::as_str).unwrap_or_default(),
            _ => self.string(tag, "end")?,
        };
        Ok(Tag { begin: self.string(tag, "begin")?, content: Content::Format(&tag["content"]), end })
    }

    /// The name of a rule for one format.
    fn format(&mut self, format: &Value, depth: usize) -> Result<String, ApiError> {
        if depth > DEPTH_MAX {
            return Err(self.refused(&format!("it is nested more than {DEPTH_MAX} levels deep")));
        }
        match format["type"].as_str().unwrap_or_default() {
            "const_string" => {
                let text = lark_string(self.string(format, "value")?);
                self.rule("text", "", &text)
            }
            "json_schema" => self.schema(&format["json_schema"]),
            "any_text" => self.rule("ANY", "", ANY_TEXT),
            "regex" => {
                let pattern = self.string(format, "pattern")?.replace('/', "\\/");
                if pattern.contains('\n') || pattern.is_empty() {
                    return Err(self.refused("a regex is one line that is not empty"));
                }
                self.rule("REGEX", "", &format!("/{pattern}/"))
            }
            kind @ ("sequence" | "or") => {
                let mut names = Vec::new();
                for element in self.list(format, "elements")? {
                    names.push(self.format(element, depth + 1)?);
                }
                self.rule("part", "", &names.join(if kind == "or" { " | " } else { " " }))
            }
            "tag" => {
                let tag = self.tag(format)?;
                let begin = lark_string(tag.begin);
                self.tag_rule(&begin, tag, depth)
            }
            "triggered_tags" => {
                let tags: Vec<Tag<'_>> =
                    self.list(format, "tags")?.iter().map(|t| self.tag(t)).collect::<Result<_, _>>()?;
                self.triggered(&tags, &format["triggers"], Bounds::of(format), depth)
            }
            "tags_with_separator" => {
                let mut names = Vec::new();
                for tag in self.list(format, "tags")? {
                    names.push(self.format(tag, depth + 1)?);
                }
                let one = self.rule("part", "", &names.join(" | "))?;
                let separator = lark_string(self.string(format, "separator")?);
                let Bounds { at_least_one, stop_after_first } = Bounds::of(format);
                let several = if stop_after_first { one } else { format!("{one} ({separator} {one})*") };
                self.rule("part", "", &if at_least_one { several } else { format!("({several})?") })
            }
            other => Err(self.refused(&format!(
                "`{other}` is no format; there are const_string, json_schema, any_text, regex, sequence, or, tag, \
                 triggered_tags, tags_with_separator"
            ))),
        }
    }

    fn schema(&mut self, schema: &Value) -> Result<String, ApiError> {
        match schema {
            Value::Object(_) | Value::Bool(true) => {
                let schema = spaced(schema.clone(), &Spacing::Python);
                self.rule("json", "", &format!("%json {schema}"))
            }
            _ => Err(self.refused("a JSON schema must be an object")),
        }
    }

    /// Free text in which each trigger begins one of the tags that open with it.
    fn triggered(
        &mut self,
        tags: &[Tag<'_>],
        triggers: &Value,
        bounds: Bounds,
        depth: usize,
    ) -> Result<String, ApiError> {
        let triggers: Option<Vec<&str>> = triggers.as_array().map(|t| t.iter().filter_map(Value::as_str).collect());
        let triggers = triggers.unwrap_or_default();
        if triggers.is_empty() || triggers.iter().any(|t| t.is_empty()) || tags.is_empty() {
            return Err(self.refused("`triggers` must be a list of texts, and there must be tags"));
        }
        let mut alternatives = Vec::new();
        for trigger in &triggers {
            let lexeme = self.rule("trigger", "[lazy]", &format!("/(.|\\n)*{}/", escaped(trigger)))?;
            for &tag in tags.iter().filter(|t| t.begin.starts_with(trigger)) {
                let rest = &tag.begin[trigger.len()..];
                let begin = if rest.is_empty() { lexeme.clone() } else { format!("{lexeme} {}", lark_string(rest)) };
                alternatives.push(self.tag_rule(&begin, tag, depth)?);
            }
        }
        if let Some(tag) = tags.iter().find(|tag| !triggers.iter().any(|t| tag.begin.starts_with(t))) {
            return Err(self.refused(&format!("no trigger begins {:?}", tag.begin)));
        }
        let any = self.rule("part", "", &alternatives.join(" | "))?;
        let text = self.rule("REST", "", ANY_TEXT)?;
        let body = match (bounds.at_least_one, bounds.stop_after_first) {
            (false, false) => format!("{any}* {text}"),
            (true, false) => format!("{any}+ {text}"),
            (false, true) => format!("{any} | {text}"),
            (true, true) => any,
        };
        self.rule("part", "", &body)
    }

    fn tag_rule(&mut self, begin: &str, tag: Tag<'_>, depth: usize) -> Result<String, ApiError> {
        let free = matches!(tag.content, Content::Format(format) if format["type"] == "any_text");
        // Free text goes up to the end of its tag and no further.
        let body = if free && !tag.end.is_empty() {
            let until = self.rule("until", "[lazy]", &format!("/(.|\\n)*{}/", escaped(tag.end)))?;
            format!("{begin} {until}")
        } else {
            let content = match tag.content {
                Content::Schema(schema) => self.schema(schema)?,
                Content::Format(format) => self.format(format, depth + 1)?,
            };
            let end = if tag.end.is_empty() { String::new() } else { lark_string(tag.end) };
            format!("{begin} {content} {end}")
        };
        self.rule("tag", "", &body)
    }
}

/// A text as a regex that matches nothing else.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(2 * text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // No others: `\<` and its like mean something.
            c if "\\.+*?()|[]{}^$/".contains(c) => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::structured;
    use super::*;
    use serde_json::json;

    fn checked(tag: &Value) -> Result<String, ApiError> {
        let grammar = grammar("response_format", tag, 100)?;
        structured::check(&grammar)?;
        let Grammar::Lark(lark) = grammar else { panic!("{grammar:?}") };
        Ok(lark)
    }

    #[test]
    fn both_spellings_are_grammars() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        let older = json!({
            "type": "structural_tag", "triggers": ["<function="],
            "structures": [
                {"begin": "<function=f>", "schema": schema, "end": "</function>"},
                {"begin": "<function=g>", "schema": schema, "end": "</function>"},
            ],
        });
        let lark = checked(&older).unwrap();
        assert!(lark.contains("/(.|\\n)*<function=/"), "{lark}");
        let tag = json!({"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</t>"});
        for format in [
            tag.clone(),
            json!({"type": "triggered_tags", "triggers": ["<t"], "tags": [tag], "at_least_one": true}),
            json!({"type": "triggered_tags", "triggers": ["<t"], "tags": [tag], "stop_after_first": true}),
            json!({"type": "tags_with_separator", "separator": "\n", "tags": [tag, tag]}),
            json!({"type": "sequence", "elements": [
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "[a/b]+"}]},
            ]}),
        ] {
            checked(&json!({"format": format})).unwrap_or_else(|e| panic!("{format}: {e}"));
        }
    }

    #[test]
    fn what_is_no_structural_tag_is_refused_with_the_reason() {
        let deep = (0..100).fold(json!({"type": "any_text"}), |f, _| json!({"type": "sequence", "elements": [f]}));
        let tag = json!({"begin": "<f>", "schema": {}, "end": ""});
        for (tag, cause) in [
            (json!({}), "either `format`"),
            (json!({"format": {"type": "poem"}}), "no format"),
            (json!({"format": {"type": "sequence", "elements": []}}), "at least one"),
            (json!({"format": deep}), "levels deep"),
            (json!({"structures": [tag], "triggers": []}), "`triggers`"),
            (json!({"structures": [tag], "triggers": ["<g"]}), "no trigger begins"),
            (json!({"structures": [{"begin": 7}], "triggers": ["<g"]}), "`begin`"),
            (json!({"format": {"type": "json_schema", "json_schema": 7}}), "must be an object"),
            (json!({"format": {"type": "sequence", "elements": vec![json!({"type": "any_text"}); 200]}}), "parts"),
        ] {
            let error = checked(&tag).unwrap_err();
            assert!(error.message.contains(cause), "{tag}: {error}");
            assert_eq!(error.param.as_deref(), Some("response_format"));
        }
    }
}
