//! One choice of an answer, from its tokens to the text that is shown.

use super::{Finish, Matched, Piece};
use crate::telemetry::metrics::FinishedReason;
use crate::text::TextModel;
use crate::text::detokenizer::Detokenizer;
use crate::text::reasoning::ReasoningSplitter;
use crate::text::stop::StopWatcher;
use ernie_proto::worker::{FinishReason as EngineFinish, NO_TOKEN, SequenceOutput};

/// One choice from tokens to text.
#[derive(Debug, Clone)]
pub(super) struct ChoiceText {
    pub(super) detokenizer: Detokenizer,
    pub(super) reasoning: Option<ReasoningSplitter>,
    pub(super) stops: StopWatcher,
    pub(super) include_stop: bool,
    pub(super) min_tokens: u32,
    pub(super) tokens: u32,
    pub(super) ended: bool,
}

impl ChoiceText {
    pub(super) fn take(&mut self, output: SequenceOutput, text: &TextModel) -> Piece {
        let mut piece = Piece { choice: output.choice, logprobs: output.logprobs, ..Piece::default() };
        piece.in_reasoning = self.reasoning.as_ref().is_some_and(ReasoningSplitter::in_reasoning);
        let ends_turn = matches!(output.finish, Some(EngineFinish::Eos | EngineFinish::StopToken));
        if output.token != NO_TOKEN {
            self.tokens += 1;
            piece.token = Some(output.token);
            // What ends a turn is no part of it, unless it was asked for.
            if !ends_turn || self.include_stop {
                let mut new = String::new();
                self.detokenizer.push(text.tokenizer(), output.token, &mut new);
                if let Some(matched) = self.show(&new, &mut piece) {
                    self.ended = true;
                    piece.finish = Some(Finish { reason: FinishedReason::Stop, matched: Matched::Text(matched) });
                    return piece;
                }
            }
        }
        if let Some(finish) = output.finish {
            self.ended = true;
            let finish = match finish {
                EngineFinish::Eos => Finish { reason: FinishedReason::Stop, matched: Matched::Nothing },
                EngineFinish::StopToken => {
                    Finish { reason: FinishedReason::Stop, matched: Matched::Token(output.token) }
                }
                EngineFinish::Length => Finish { reason: FinishedReason::Length, matched: Matched::Nothing },
                EngineFinish::Repetition => Finish { reason: FinishedReason::Repetition, matched: Matched::Nothing },
                EngineFinish::Error => Finish { reason: FinishedReason::Error, matched: Matched::Nothing },
            };
            if let Some(matched) = self.flush(&mut piece) {
                piece.finish = Some(Finish { reason: FinishedReason::Stop, matched: Matched::Text(matched) });
            } else {
                piece.finish = Some(finish);
            }
        }
        piece
    }

    /// New characters through the splitter and the stop watcher. The stop string, if one is complete.
    fn show(&mut self, new: &str, piece: &mut Piece) -> Option<String> {
        let content = match &mut self.reasoning {
            None => std::borrow::Cow::Borrowed(new),
            Some(splitter) => {
                let mut content = String::new();
                splitter.push(new, &mut piece.reasoning, &mut content);
                std::borrow::Cow::Owned(content)
            }
        };
        if self.tokens <= self.min_tokens {
            self.stops.pass(&content, &mut piece.text);
            return None;
        }
        let stopped = self.stops.push(&content, &mut piece.text)?;
        Some(self.stops.stops()[stopped.which].clone())
    }

    /// The end of the text: what was held back is shown after all.
    fn flush(&mut self, piece: &mut Piece) -> Option<String> {
        if let Some(splitter) = &mut self.reasoning {
            let mut content = String::new();
            splitter.finish(&mut piece.reasoning, &mut content);
            if let Some(stopped) = self.stops.push(&content, &mut piece.text) {
                return Some(self.stops.stops()[stopped.which].clone());
            }
        }
        self.stops.finish(&mut piece.text);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::fixtures;

    fn choice(stops: &[&str], include_stop: bool, min_tokens: u32) -> ChoiceText {
        ChoiceText {
            detokenizer: Detokenizer::new(true),
            reasoning: None,
            stops: StopWatcher::new(stops.iter().map(|s| s.to_string()).collect(), include_stop),
            include_stop,
            min_tokens,
            tokens: 0,
            ended: false,
        }
    }

    fn output(token: u32, finish: Option<EngineFinish>) -> SequenceOutput {
        SequenceOutput { request: ernie_proto::ids::RequestId(1), choice: 0, token, logprobs: None, finish }
    }

    /// Feeds the bytes of `text` one token per byte, then ends with `last`.
    fn run(mut choice: ChoiceText, text: &str, last: Option<(u32, EngineFinish)>) -> (String, Option<Finish>) {
        let model = fixtures::text_model();
        let mut shown = String::new();
        for byte in text.bytes() {
            let token = model.tokenizer().id_of(&format!("<0x{byte:02X}>")).unwrap();
            let piece = choice.take(output(token, None), &model);
            shown.push_str(&piece.text);
            if piece.finish.is_some() {
                return (shown, piece.finish);
            }
        }
        let (token, finish) = last.unwrap();
        let piece = choice.take(output(token, Some(finish)), &model);
        shown.push_str(&piece.text);
        (shown, piece.finish)
    }

    #[test]
    fn characters_split_over_tokens_come_out_whole_and_the_end_token_is_not_printed() {
        let eos = fixtures::text_model().eos_token_ids()[0];
        let (shown, finish) = run(choice(&[], false, 0), "北京 👨‍👩‍👧 龘", Some((eos, EngineFinish::Eos)));
        assert_eq!(shown, "北京 👨‍👩‍👧 龘");
        assert_eq!(finish, Some(Finish { reason: FinishedReason::Stop, matched: Matched::Nothing }));
    }

    #[test]
    fn a_stop_string_over_byte_tokens_ends_the_choice_and_never_shows() {
        let (shown, finish) = run(choice(&["。京"], false, 0), "你好。京都", None);
        assert_eq!(shown, "你好");
        assert_eq!(finish.unwrap().matched, Matched::Text("。京".into()));
        let (shown, _) = run(choice(&["。京"], true, 0), "你好。京都", None);
        assert_eq!(shown, "你好。京");
    }

    #[test]
    fn max_tokens_in_the_middle_of_a_character_drops_the_part() {
        let model = fixtures::text_model();
        let half = model.tokenizer().id_of("<0xE5>").unwrap();
        let (shown, finish) = run(choice(&["xyz"], false, 0), "a北xy", Some((half, EngineFinish::Length)));
        assert_eq!(shown, "a北xy", "what was held for the stop string is text after all");
        assert_eq!(finish.unwrap().reason, FinishedReason::Length);
    }

    #[test]
    fn a_stop_token_is_named_and_printed_only_on_demand() {
        let a = fixtures::text_model().tokenizer().id_of("<0x41>").unwrap();
        let (shown, finish) = run(choice(&[], false, 0), "x", Some((a, EngineFinish::StopToken)));
        assert_eq!((shown.as_str(), finish.unwrap().matched), ("x", Matched::Token(a)));
        let (shown, _) = run(choice(&[], true, 0), "x", Some((a, EngineFinish::StopToken)));
        assert_eq!(shown, "xA");
    }

    #[test]
    fn no_stop_string_counts_before_min_tokens() {
        let (shown, finish) = run(choice(&["b"], false, 3), "abcab", None);
        assert_eq!(shown, "abca");
        assert_eq!(finish.unwrap().matched, Matched::Text("b".into()));
    }
}
