//! Thinking and content apart, for models whose answer begins with thoughts: `...\n</think>\n\n<response>\n...\n</response>\n`.
//!
//! What comes before `</think>` is reasoning; newlines right after the mark are dropped; `<response>` and `</response>` with
//! the newlines that belong to them are dropped from the content. A missing close tag is tolerated: an answer cut short is
//! all reasoning, an answer without any mark from a model that was not made to think is all content. The verdict does not
//! depend on how the text was cut: a possible beginning of a mark is held back.

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const RESPONSE: &str = "<response>";
const RESPONSE_END: &str = "</response>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before anything else: an opening `<think>` may come.
    Start,
    /// After an opening `<think>`: newlines are dropped until text comes.
    BeforeThoughts,
    Thinking,
    /// After `</think>` or `<response>`: newlines are dropped until text comes.
    BeforeContent,
    Content,
}

/// Splits one answer.
#[derive(Debug, Clone)]
pub struct ReasoningSplitter {
    place: Place,
    /// Whether text without an opening mark counts as thinking.
    thinking_from_start: bool,
    held: String,
}

impl ReasoningSplitter {
    /// `thinking_from_start`: the prompt already ended in `<think>`, as ERNIE's thinking template makes it.
    pub fn new(thinking_from_start: bool) -> Self {
        Self { place: Place::Start, thinking_from_start, held: String::new() }
    }

    /// Whether what comes next would be reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.place, Place::Thinking | Place::BeforeThoughts)
            || (self.place == Place::Start && self.thinking_from_start)
    }

    /// Takes the next text; appends what is certain.
    pub fn push(&mut self, text: &str, reasoning: &mut String, content: &mut String) {
        self.held.push_str(text);
        self.work(false, reasoning, content);
    }

    /// The answer has ended: what was held back goes where it belongs.
    pub fn finish(&mut self, reasoning: &mut String, content: &mut String) {
        self.work(true, reasoning, content);
    }

    fn work(&mut self, last: bool, reasoning: &mut String, content: &mut String) {
        loop {
            match self.place {
                Place::Start => {
                    let trimmed = self.held.trim_start_matches('\n');
                    if let Some(rest) = trimmed.strip_prefix(THINK) {
                        self.held = rest.to_owned();
                        self.place = Place::BeforeThoughts;
                    } else if !last && (THINK.starts_with(trimmed)) {
                        return;
                    } else if self.thinking_from_start || trimmed.starts_with(THINK_END) {
                        self.place = Place::Thinking;
                    } else if !last && THINK_END.starts_with(trimmed) {
                        return;
                    } else {
                        self.place = Place::Content;
                    }
                }
                Place::BeforeThoughts => {
                    let skipped = self.held.len() - self.held.trim_start_matches('\n').len();
                    self.held.drain(..skipped);
                    if self.held.is_empty() {
                        return;
                    }
                    self.place = Place::Thinking;
                }
                Place::Thinking => {
                    if let Some(at) = self.held.find(THINK_END) {
                        reasoning.push_str(self.held[..at].trim_end_matches('\n'));
                        self.held.drain(..at + THINK_END.len());
                        self.place = Place::BeforeContent;
                        continue;
                    }
                    // Newlines are held as well: those before the mark are dropped.
                    let keep = if last { 0 } else { held_end(&self.held, &[THINK_END]) };
                    let show = self.held.len() - keep;
                    let end = if last { show } else { self.held[..show].trim_end_matches('\n').len() };
                    reasoning.push_str(&self.held[..end]);
                    self.held.drain(..end);
                    return;
                }
                Place::BeforeContent => {
                    let skipped = self.held.len() - self.held.trim_start_matches('\n').len();
                    self.held.drain(..skipped);
                    if self.held.starts_with(RESPONSE) {
                        self.held.drain(..RESPONSE.len());
                    } else if self.held.is_empty() || (!last && RESPONSE.starts_with(self.held.as_str())) {
                        return;
                    } else {
                        self.place = Place::Content;
                    }
                }
                Place::Content => {
                    if let Some(at) = self.held.find(RESPONSE_END) {
                        content.push_str(self.held[..at].trim_end_matches('\n'));
                        self.held.drain(..at + RESPONSE_END.len());
                        self.place = Place::BeforeContent;
                        continue;
                    }
                    let keep = if last { 0 } else { held_end(&self.held, &[RESPONSE_END]) };
                    let show = self.held.len() - keep;
                    let end = if last { show } else { self.held[..show].trim_end_matches('\n').len() };
                    content.push_str(&self.held[..end]);
                    self.held.drain(..end);
                    return;
                }
            }
        }
    }
}

/// Length of the longest end of `text` that begins one of the marks.
pub(super) fn held_end(text: &str, marks: &[&str]) -> usize {
    (marks.iter()).filter_map(|mark| (1..mark.len()).rev().find(|&n| text.ends_with(&mark[..n]))).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(thinking: bool, pieces: &[&str]) -> (String, String) {
        let mut s = ReasoningSplitter::new(thinking);
        let (mut reasoning, mut content) = (String::new(), String::new());
        for piece in pieces {
            s.push(piece, &mut reasoning, &mut content);
        }
        s.finish(&mut reasoning, &mut content);
        (reasoning, content)
    }

    /// Every cut into two, and one character at a time.
    fn everywhere(thinking: bool, text: &str, reasoning: &str, content: &str) {
        let expected = (reasoning.to_owned(), content.to_owned());
        for (at, _) in text.char_indices() {
            assert_eq!(split(thinking, &[&text[..at], &text[at..]]), expected, "cut at {at}");
        }
        let single: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(split(thinking, &single.iter().map(String::as_str).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn the_forms_of_the_thinking_model_split_alike_at_every_cut() {
        everywhere(true, "abc</think>\n\n<response>\ndef\n</response>\n", "abc", "def");
        everywhere(true, "abc\n</think>\n\n<response>\ndef\n</response>\n", "abc", "def");
        everywhere(true, "想一想\n\n再想</think>\n答案\n\n第二段", "想一想\n\n再想", "答案\n\n第二段");
        everywhere(true, "<think>\nabc</think>def", "abc", "def");
        everywhere(true, "</think>\n\ndirect", "", "direct");
    }

    #[test]
    fn a_missing_close_tag_is_tolerated() {
        everywhere(true, "cut short while thinking", "cut short while thinking", "");
        everywhere(true, "a</think>\n<response>\nnever closed", "a", "never closed");
        everywhere(true, "almost </thin", "almost </thin", "");
    }

    #[test]
    fn without_thoughts_all_is_content() {
        everywhere(false, "plain answer", "", "plain answer");
        everywhere(false, "<think>t</think>c", "t", "c");
        everywhere(false, "1 < 2 and </b>", "", "1 < 2 and </b>");
    }
}
