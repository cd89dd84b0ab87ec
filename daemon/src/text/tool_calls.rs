//! Tool calls in the text of an answer: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, as ERNIE's thinking
//! model writes them and as [`instructions`] ask other models to.
//!
//! The parser is fed text in pieces of any size. Of a call it gives the whole name first, then the arguments as raw JSON text
//! while they come; what is not a call is content. A body that is no call (broken JSON, no name) comes back as content, so
//! nothing the model said is lost. The verdict does not depend on how the text was cut.

use super::reasoning::held_end;
use serde_json::Value;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// A model that keeps writing calls is stopped being listened to here.
const CALLS_MAX: u32 = 128;

/// Something a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolEvent {
    Content(String),
    /// A call begins; counted from 0.
    Call {
        index: u32,
        name: String,
    },
    /// More of the arguments of the call that began last.
    Arguments {
        index: u32,
        text: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Content,
    /// Inside of a call, before the arguments.
    Head,
    Arguments(Scanner),
    /// After the arguments, before the end mark.
    Tail,
}

/// Watches one choice for calls.
#[derive(Debug, Clone)]
pub struct ToolParser {
    place: Place,
    held: String,
    calls: u32,
    /// Nothing but this has come since the last call began.
    space: Option<String>,
    /// Calls after the first are dropped.
    single: bool,
}

impl ToolParser {
    /// `parallel`: more than one call per answer is wanted.
    pub fn new(parallel: bool) -> Self {
        Self { place: Place::Content, held: String::new(), calls: 0, space: None, single: !parallel }
    }

    /// How many calls have begun.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Takes the next text.
    pub fn push(&mut self, text: &str, out: &mut Vec<ToolEvent>) {
        self.held.push_str(text);
        self.work(false, out);
    }

    /// The answer has ended: what was held back goes where it belongs.
    pub fn finish(&mut self, out: &mut Vec<ToolEvent>) {
        self.work(true, out);
        if self.place == Place::Head {
            // Never closed. A whole call all the same, or text.
            let body = std::mem::take(&mut self.held);
            self.whole_call(&body, out, CALL);
            self.place = Place::Content;
        }
    }

    fn work(&mut self, last: bool, out: &mut Vec<ToolEvent>) {
        loop {
            match &mut self.place {
                Place::Content => {
                    if let Some(at) = self.held.find(CALL) {
                        let before = self.held[..at].trim_end_matches('\n').to_owned();
                        self.content(&before, out);
                        self.held.drain(..at + CALL.len());
                        self.place = Place::Head;
                        continue;
                    }
                    let keep = if last { 0 } else { held_end(&self.held, &[CALL]) };
                    let show = self.held.len() - keep;
                    // Newlines in front of a call belong to the mark.
                    let end = if last { show } else { self.held[..show].trim_end_matches('\n').len() };
                    let text: String = self.held.drain(..end).collect();
                    self.content(&text, out);
                    return;
                }
                Place::Head => {
                    if let Some((name, from)) = head(&self.held) {
                        self.held.drain(..from);
                        self.place = Place::Arguments(Scanner::default());
                        if self.begin() {
                            out.push(ToolEvent::Call { index: self.calls - 1, name });
                        }
                        continue;
                    }
                    let Some(at) = self.held.find(CALL_END) else { return };
                    let body = self.held[..at].to_owned();
                    self.held.drain(..at + CALL_END.len());
                    self.whole_call(&body, out, "");
                    self.place = Place::Content;
                }
                Place::Arguments(scanner) => {
                    let (taken, complete) = scanner.take(&self.held);
                    let text: String = self.held.drain(..taken).collect();
                    if complete {
                        self.place = Place::Tail;
                    }
                    if !text.is_empty() && self.is_wanted() {
                        out.push(ToolEvent::Arguments { index: self.calls - 1, text });
                    }
                    if !complete {
                        return;
                    }
                }
                Place::Tail => {
                    let Some(at) = self.held.find(CALL_END) else {
                        // What follows the arguments inside of a call is brackets; a new call may begin without an end mark.
                        if let Some(next) = self.held.find(CALL) {
                            self.held.drain(..next);
                            self.place = Place::Content;
                            continue;
                        }
                        let keep = held_end(&self.held, &[CALL_END, CALL]);
                        self.held.drain(..self.held.len() - keep);
                        return;
                    };
                    self.held.drain(..at + CALL_END.len());
                    self.place = Place::Content;
                }
            }
        }
    }

    /// Counts a call that begins; false when it is one too many.
    fn begin(&mut self) -> bool {
        self.calls += 1;
        self.space = Some(String::new());
        self.is_wanted()
    }

    fn is_wanted(&self) -> bool {
        self.calls <= if self.single { 1 } else { CALLS_MAX }
    }

    /// Content; between and after calls only what is more than space, however it is cut.
    fn content(&mut self, text: &str, out: &mut Vec<ToolEvent>) {
        if let Some(space) = &mut self.space {
            space.push_str(text);
            if space.trim().is_empty() {
                return;
            }
            let text = self.space.take().unwrap_or_default();
            out.push(ToolEvent::Content(text));
        } else if !text.is_empty() {
            out.push(ToolEvent::Content(text.to_owned()));
        }
    }

    /// A body that could not be streamed: members in another order, arguments as text, or no call at all.
    fn whole_call(&mut self, body: &str, out: &mut Vec<ToolEvent>, opening: &str) {
        let parsed: Option<Value> = serde_json::from_str(body.trim()).ok();
        let name = parsed.as_ref().and_then(|v| v["name"].as_str());
        let (Some(name), Some(value)) = (name, &parsed) else {
            let closing = if opening.is_empty() { CALL_END } else { "" };
            self.content(&format!("{CALL}{body}{closing}"), out);
            return;
        };
        let arguments = match value.get("arguments").or(value.get("parameters")) {
            None | Some(Value::Null) => "{}".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        if self.begin() {
            let index = self.calls - 1;
            out.push(ToolEvent::Call { index, name: name.to_owned() });
            out.push(ToolEvent::Arguments { index, text: arguments });
        }
    }
}

/// `{"name": "f", "arguments": {`: the name, and where the arguments begin. `None`: not yet, or another form.
fn head(text: &str) -> Option<(String, usize)> {
    let mut rest = Cursor { text, at: 0 };
    rest.literal("{")?;
    rest.literal("\"name\"")?;
    rest.literal(":")?;
    let name = rest.string()?;
    rest.literal(",")?;
    rest.literal("\"arguments\"")?;
    rest.literal(":")?;
    rest.space();
    text[rest.at..].starts_with('{').then_some((name, rest.at))
}

struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

impl Cursor<'_> {
    fn space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn literal(&mut self, literal: &str) -> Option<()> {
        self.space();
        self.text[self.at..].starts_with(literal).then(|| self.at += literal.len())
    }

    fn string(&mut self) -> Option<String> {
        self.space();
        let mut values = serde_json::Deserializer::from_str(&self.text[self.at..]).into_iter::<String>();
        // A string is known to be whole by its closing quote.
        let value = values.next()?.ok()?;
        self.at += values.byte_offset();
        Some(value)
    }
}

/// Finds the end of a JSON object in a stream of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Scanner {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Scanner {
    /// How much of the text belongs to the object, and whether it is complete.
    fn take(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (text.len(), false)
    }
}

/// What to tell a model whose template knows no tools.
pub fn instructions(tools: &[Value]) -> String {
    let list: Vec<String> = tools.iter().map(|t| t.get("function").unwrap_or(t).to_string()).collect();
    format!(
        "You may call functions. These are offered, one JSON object per line:\n{}\n\nTo call one, answer with \
         {CALL}\n{{\"name\": NAME, \"arguments\": OBJECT}}\n{CALL_END}, one block per call and nothing else.",
        list.join("\n")
    )
}

/// A call as it stands in a conversation, for templates that know no tools.
pub fn written(name: &str, arguments: &Value) -> String {
    let name = Value::String(name.to_owned());
    format!("{CALL}\n{{\"name\": {name}, \"arguments\": {arguments}}}\n{CALL_END}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_after_a_call_is_content_as_soon_as_more_follows_however_it_is_cut() {
        let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n and then. ";
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let whole = parse(true, &[text]);
        assert_eq!(whole.0, "\n and then. ");
        assert_eq!(parse(true, &pieces), whole);
        assert_eq!(parse(true, &[&text[..text.len() - 10], " \n "]).0, "", "space alone is none");
    }

    /// Content and calls, pieces joined.
    fn parse(parallel: bool, pieces: &[&str]) -> (String, Vec<(String, String)>) {
        let mut parser = ToolParser::new(parallel);
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, &mut events);
        }
        parser.finish(&mut events);
        let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
        for event in events {
            match event {
                ToolEvent::Content(text) => content.push_str(&text),
                ToolEvent::Call { index, name } => {
                    assert_eq!(index as usize, calls.len());
                    calls.push((name, String::new()));
                }
                ToolEvent::Arguments { index, text } => calls[index as usize].1.push_str(&text),
            }
        }
        (content, calls)
    }

    fn everywhere(text: &str, content: &str, calls: &[(&str, &str)]) {
        let calls: Vec<_> = calls.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect();
        let expected = (content.to_owned(), calls);
        for (at, _) in text.char_indices() {
            assert_eq!(parse(true, &[&text[..at], &text[at..]]), expected, "cut at {at}");
        }
        let single: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(parse(true, &single.iter().map(String::as_str).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn two_calls_come_out_alike_at_every_cut() {
        everywhere(
            "好的\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"北京 }\\\"\", \"n\": [1, {}]}}\n\
             </tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>\n",
            "好的",
            &[("weather", "{\"city\": \"北京 }\\\"\", \"n\": [1, {}]}"), ("f", "{}")],
        );
    }

    #[test]
    fn other_orders_and_text_arguments_are_understood() {
        everywhere("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", "", &[("f", "{\"a\":1}")]);
        everywhere(
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        );
        everywhere("<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]);
    }

    #[test]
    fn what_is_no_call_is_content() {
        everywhere("a < b <tool_cat>", "a < b <tool_cat>", &[]);
        everywhere("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", &[]);
        everywhere("x <tool_call>{\"name\": 3}", "x <tool_call>{\"name\": 3}", &[]);
        everywhere("ends in newline\n\n", "ends in newline\n\n", &[]);
    }

    #[test]
    fn a_missing_close_tag_is_tolerated() {
        everywhere("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]);
        everywhere("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": ", "", &[("f", "{\"a\": ")]);
        everywhere(
            "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}",
            "",
            &[("f", "{}"), ("g", "{}")],
        );
    }

    #[test]
    fn one_call_is_kept_when_parallel_calls_are_not_wanted() {
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        assert_eq!(parse(false, &[call, call]).1.len(), 1);
        assert_eq!(parse(true, &[&call.repeat(1000)]).1.len(), CALLS_MAX as usize);
    }

    #[test]
    fn the_name_comes_whole_and_first() {
        let mut parser = ToolParser::new(true);
        let mut events = Vec::new();
        parser.push("<tool_call>\n{\"name\": \"get_wea", &mut events);
        assert!(events.is_empty());
        parser.push("ther\", \"arguments\": {\"ci", &mut events);
        assert_eq!(
            events,
            [
                ToolEvent::Call { index: 0, name: "get_weather".into() },
                ToolEvent::Arguments { index: 0, text: "{\"ci".into() }
            ]
        );
    }

    #[test]
    fn what_is_written_for_a_template_reads_back() {
        let text = written("f", &serde_json::json!({"a": "b"}));
        everywhere(&text, "", &[("f", "{\"a\":\"b\"}")]);
    }
}
