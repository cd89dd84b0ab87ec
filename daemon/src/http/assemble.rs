//! Pieces of answers put together: several answers as one stream of events, and the parts of one choice until they are shown.

use super::error::ApiError;
use crate::generate::{Answer, AnswerEvent, Finish, Matched, Piece, Timings};
use crate::telemetry::metrics::FinishedReason;
use ernie_proto::openai::response::{CompletionTokensDetails, PromptTokensDetails, RequestMetrics, StopReason, Usage};
use ernie_proto::worker::TokenLogprobs;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;

type Turn = (usize, Option<AnswerEvent>, Answer);

/// The answers of one HTTP request: one per prompt.
pub struct Answers {
    /// The usual case goes without a box per event.
    one: Option<Answer>,
    many: FuturesUnordered<BoxFuture<'static, Turn>>,
    timings: Option<Timings>,
}

impl std::fmt::Debug for Answers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answers").field("one", &self.one).field("many", &self.many.len()).finish()
    }
}

fn turn(index: usize, mut answer: Answer) -> BoxFuture<'static, Turn> {
    Box::pin(async move {
        let event = answer.next().await;
        (index, event, answer)
    })
}

impl Answers {
    pub fn new(mut answers: Vec<Answer>) -> Self {
        let one = if answers.len() == 1 { answers.pop() } else { None };
        Self { one, many: answers.into_iter().enumerate().map(|(i, a)| turn(i, a)).collect(), timings: None }
    }

    /// The next event and whose it is; `None` when all have ended.
    pub async fn next(&mut self) -> Option<(usize, AnswerEvent)> {
        if let Some(answer) = &mut self.one {
            let event = answer.next().await;
            self.timings = Some(answer.timings());
            return event.map(|e| (0, e));
        }
        loop {
            let (index, event, answer) = self.many.next().await?;
            match event {
                Some(event) => {
                    self.many.push(turn(index, answer));
                    return Some((index, event));
                }
                None => drop(answer),
            }
        }
    }

    /// Times of the request; only for a single answer.
    pub fn timings(&self) -> Option<Timings> {
        self.timings
    }
}

/// vLLM's `metrics` member.
pub fn request_metrics(t: Timings) -> RequestMetrics {
    let ms = |d: Option<std::time::Duration>| d.map_or(0.0, |d| d.as_secs_f64() * 1e3);
    let generation = ms(t.generation);
    let gaps = f64::from(t.tokens.saturating_sub(1));
    RequestMetrics {
        time_to_first_token_ms: ms(t.to_first_token),
        generation_time_ms: generation,
        queue_time_ms: ms(t.queue),
        mean_itl_ms: if gaps > 0.0 { generation / gaps } else { 0.0 },
        tokens_per_second: if generation > 0.0 { gaps / (generation / 1e3) } else { 0.0 },
    }
}

/// Counts of one HTTP request.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    /// `None`: the model does not think.
    pub reasoning_tokens: Option<u64>,
}

impl Counts {
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            completion_tokens: self.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: self.cached_tokens },
            completion_tokens_details: (self.reasoning_tokens)
                .map(|reasoning_tokens| Some(CompletionTokensDetails { reasoning_tokens })),
        }
    }

    /// As a whole answer has it, which names what is null.
    pub fn whole_usage(&self) -> Usage {
        let usage = self.usage();
        Usage { completion_tokens_details: Some(usage.completion_tokens_details.flatten()), ..usage }
    }

    pub fn piece(&mut self, piece: &Piece) {
        self.completion_tokens += u64::from(piece.token.is_some());
        if let (Some(n), true, Some(_)) = (&mut self.reasoning_tokens, piece.in_reasoning, piece.token) {
            *n += 1;
        }
    }
}

/// What of one choice has come and was not shown yet.
#[derive(Debug, Clone, Default)]
pub struct Part {
    pub text: String,
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<(u32, TokenLogprobs)>,
    pub finish: Option<Finish>,
    pieces: u32,
}

impl Part {
    pub fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.reasoning.push_str(&piece.reasoning);
        if let Some(token) = piece.token {
            self.tokens.push(token);
            if let Some(logprobs) = piece.logprobs {
                self.logprobs.push((token, logprobs));
            }
        }
        self.finish = piece.finish;
        self.pieces += 1;
    }

    /// Whether it is worth a chunk: it ends the choice, or it has something to show after `interval` tokens.
    pub fn is_due(&self, interval: u32, tokens_are_shown: bool) -> bool {
        let shows = !self.text.is_empty()
            || !self.reasoning.is_empty()
            || !self.logprobs.is_empty()
            || (tokens_are_shown && !self.tokens.is_empty());
        self.finish.is_some() || (shows && self.pieces >= interval)
    }
}

/// OpenAI's `finish_reason`, and vLLM's for the rest. A choice that ended in an error has none: the request fails.
pub fn finish_reason(finish: &Finish) -> Result<&'static str, ApiError> {
    match finish.reason {
        FinishedReason::Stop => Ok("stop"),
        FinishedReason::Length => Ok("length"),
        FinishedReason::Repetition => Ok("repetition"),
        FinishedReason::Abort => Ok("abort"),
        FinishedReason::Error => Err(ApiError::internal(
            "the model could not go on: its output was not finite, or the constraint on the answer allows nothing more",
        )),
    }
}

pub fn stop_reason(finish: &Finish) -> Option<StopReason> {
    match &finish.matched {
        Matched::Nothing => None,
        Matched::Text(text) => Some(StopReason::Text(text.clone())),
        Matched::Token(id) => Some(StopReason::Token(*id)),
    }
}
