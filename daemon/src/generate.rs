//! The one file that knows a request's whole way: permit → prompt ids → fleet → tokens → text.
//!
//! An [`Answer`] is a request under way. It owns everything that has to be given back (permit, the fleet's `Generation`), so
//! that dropping it, as happens when a client hangs up, ends the work everywhere. It also owns the figures of the request
//! and reports them once, whatever the end.
//!
//! Not here: the forms of requests and answers (`http`), which worker computes (`supervisor`).

use crate::admission::Permit;
use crate::keys::{KeyPermit, KeyStore, Principal, Usage};
use crate::supervisor::{Deployment, FleetHandle, Generation, GenerationEvent, Submission, SubmitRefusal};
use crate::telemetry::metrics::{FinishedReason, Metrics, RequestFigures};
use crate::telemetry::requests::{Card, Notes, Observers};
use crate::telemetry::steps::{Step, StepLog};
use crate::telemetry::traces::TraceParent;
use crate::text::TextModel;
use crate::text::detokenizer::Detokenizer;
use crate::text::reasoning::ReasoningSplitter;
use crate::text::stop::StopWatcher;
use ernie_proto::worker::{FinishReason as EngineFinish, NO_TOKEN, SamplingParams, SequenceOutput, TokenLogprobs};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Rendering and encoding, off the event loop and never more at once than there are cores to spare.
#[derive(Debug, Clone)]
pub struct TextPool {
    places: Arc<Semaphore>,
}

impl TextPool {
    /// `places`: texts in work at the same time. Waiting ones hold a permit of admission, so their number is bounded.
    pub fn new(places: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(places.max(1))) }
    }

    /// Runs `work` on the blocking pool. `None`: it panicked, which is a bug and is logged by the runtime.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let _place = self.places.clone().acquire_owned().await.ok()?;
        tokio::task::spawn_blocking(work).await.ok()
    }
}

/// What a request was granted: a place in the house and one in its key's limits. Given back on drop.
#[derive(Debug)]
pub struct Admitted {
    pub permit: Permit,
    pub key: KeyPermit,
    pub keys: KeyStore,
    pub principal: Principal,
}

/// A request with everything decided.
#[derive(Debug)]
pub struct GenerateRequest {
    pub deployment: Arc<Deployment>,
    pub prompt: Arc<Vec<u32>>,
    pub choices: u16,
    pub sampling: SamplingParams,
    pub stops: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    /// Splits thinking from content; stop strings then apply to the content only.
    pub reasoning: Option<ReasoningSplitter>,
    pub priority: i32,
    pub cache_salt: u64,
    /// Whose it is, for fair shares.
    pub owner: u64,
    /// When the request came in.
    pub arrival: Instant,
    /// It ends here, with an error.
    pub deadline: Option<Instant>,
    /// As the client gave it or as we made it; for the log line.
    pub request_id: Arc<str>,
    /// `chat` or `text_completion`.
    pub operation: &'static str,
    /// The caller's span.
    pub parent: Option<TraceParent>,
    /// Whether its end is worth a line.
    pub log: bool,
    /// Its end is worth a warning when it took longer.
    pub slow: Option<Duration>,
}

/// What an answer brings, in order.
#[derive(Debug)]
pub enum AnswerEvent {
    Started {
        cached_tokens: u32,
    },
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    Piece(Piece),
    /// It ends here, unfinished.
    Failed(AnswerFailure),
}

/// What one token added to one choice.
#[derive(Debug, Default)]
pub struct Piece {
    pub choice: u16,
    /// `None`: the choice ended without a token.
    pub token: Option<u32>,
    /// New content that may be shown; often empty while a character or a stop string is incomplete.
    pub text: String,
    pub reasoning: String,
    pub in_reasoning: bool,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<Finish>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishedReason,
    pub matched: Matched,
}

/// What a `stop` finish was due to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Matched {
    /// End of sequence, or no stop at all.
    Nothing,
    Text(String),
    Token(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerFailure {
    #[error("{message}")]
    Engine { message: String, retryable: bool },
    #[error("the request took longer than its deadline of {} s", .0.as_secs_f64())]
    Deadline(Duration),
}

/// A request under way.
#[derive(Debug)]
pub struct Answer {
    generation: Generation,
    text: Arc<TextModel>,
    choices: Vec<ChoiceText>,
    open: usize,
    figures: Figures,
    deadline: Option<Instant>,
    failed: bool,
    admitted: Arc<Admitted>,
}

/// Hands a request to the fleet.
pub async fn generate(
    fleet: &FleetHandle,
    metrics: &Arc<Metrics>,
    observers: &Observers,
    request: GenerateRequest,
    admitted: Arc<Admitted>,
) -> Result<Answer, SubmitRefusal> {
    let figures = Figures::new(metrics.clone(), observers.clone(), &request, admitted.clone());
    let submission = Submission {
        prompt: request.prompt,
        choices: request.choices,
        sampling: request.sampling.clone(),
        priority: request.priority,
        cache_salt: request.cache_salt,
        owner: request.owner,
    };
    let min_tokens = request.sampling.min_tokens;
    let choice = ChoiceText {
        detokenizer: Detokenizer::new(request.skip_special_tokens),
        reasoning: request.reasoning,
        stops: StopWatcher::new(request.stops, request.include_stop),
        include_stop: request.include_stop,
        min_tokens,
        tokens: 0,
        ended: false,
    };
    let generation = fleet.submit(&request.deployment, submission).await?;
    figures.card.notes.submitted(generation.id().0);
    Ok(Answer {
        generation,
        text: request.deployment.text.clone(),
        open: usize::from(request.choices),
        choices: vec![choice; usize::from(request.choices)],
        figures,
        deadline: request.deadline,
        failed: false,
        admitted,
    })
}

impl Answer {
    /// The next event; `None` when all choices have ended or the request has failed.
    pub async fn next(&mut self) -> Option<AnswerEvent> {
        loop {
            if self.open == 0 || self.failed {
                return None;
            }
            let event = match self.deadline {
                None => self.generation.next().await,
                Some(deadline) => match tokio::time::timeout_at(deadline, self.generation.next()).await {
                    Ok(event) => event,
                    Err(_) => {
                        let limit = deadline.duration_since(self.figures.arrival);
                        return Some(self.fail(AnswerFailure::Deadline(limit)));
                    }
                },
            };
            match event {
                Some(GenerationEvent::Started { cached_tokens }) => {
                    self.figures.started(cached_tokens);
                    self.admitted.permit.begun();
                    return Some(AnswerEvent::Started { cached_tokens });
                }
                Some(GenerationEvent::PromptLogprobs(tokens)) => return Some(AnswerEvent::PromptLogprobs(tokens)),
                Some(GenerationEvent::Computed(step)) => self.figures.computed(step),
                Some(GenerationEvent::Output(output, step)) => {
                    self.figures.computed(step);
                    if let Some(piece) = self.take(output) {
                        return Some(AnswerEvent::Piece(piece));
                    }
                }
                Some(GenerationEvent::Failed(failure)) => {
                    return Some(
                        self.fail(AnswerFailure::Engine { message: failure.message, retryable: failure.retryable }),
                    );
                }
                None => {
                    let message = "the request was given up by the server before its end".to_owned();
                    return Some(self.fail(AnswerFailure::Engine { message, retryable: true }));
                }
            }
        }
    }

    /// Prompt tokens that came from the prefix cache, as far as known.
    pub fn cached_tokens(&self) -> u32 {
        self.figures.cached_tokens
    }

    /// Tokens generated so far, of all choices.
    pub fn generated_tokens(&self) -> u32 {
        self.figures.generated
    }

    /// Times of this request so far.
    pub fn timings(&self) -> Timings {
        self.figures.timings()
    }

    fn fail(&mut self, failure: AnswerFailure) -> AnswerEvent {
        self.failed = true;
        self.figures.end(FinishedReason::Error);
        AnswerEvent::Failed(failure)
    }

    fn take(&mut self, output: SequenceOutput) -> Option<Piece> {
        let choice = self.choices.get_mut(usize::from(output.choice)).filter(|c| !c.ended)?;
        // A stop string ends a choice here; the engine knows nothing of it.
        let (choice_index, output_went_on) = (output.choice, output.finish.is_none());
        if output.token != NO_TOKEN {
            self.figures.token(output.choice, choice.tokens == 0);
        }
        let piece = choice.take(output, &self.text);
        if let Some(finish) = &piece.finish {
            self.open -= 1;
            if self.open > 0 && output_went_on {
                self.generation.end_choice(choice_index);
            }
            // The first choice to end names the end of the request, unless a later one ends worse.
            if self.open == 0 {
                self.figures.end(finish.reason);
            }
        }
        Some(piece)
    }
}

/// One choice from tokens to text.
#[derive(Debug, Clone)]
struct ChoiceText {
    detokenizer: Detokenizer,
    reasoning: Option<ReasoningSplitter>,
    stops: StopWatcher,
    include_stop: bool,
    min_tokens: u32,
    tokens: u32,
    ended: bool,
}

impl ChoiceText {
    fn take(&mut self, output: SequenceOutput, text: &TextModel) -> Piece {
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

/// Times of one request, in the terms of vLLM's `metrics` member.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    pub queue: Option<Duration>,
    pub to_first_token: Option<Duration>,
    pub generation: Option<Duration>,
    pub tokens: u32,
}

/// Figures of a request; reported once, as an abort when nobody said otherwise.
#[derive(Debug)]
struct Figures {
    metrics: Arc<Metrics>,
    observers: Observers,
    card: Arc<Card>,
    admitted: Arc<Admitted>,
    log: bool,
    slow: Option<Duration>,
    arrival: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    last_by_choice: Vec<Option<Instant>>,
    tokens_by_choice: Vec<u32>,
    prompt_tokens: u32,
    cached_tokens: u32,
    generated: u32,
    max_tokens: u32,
    /// Which steps computed it, when somebody wants to know.
    steps: Option<StepLog>,
    reported: bool,
}

impl Figures {
    fn new(metrics: Arc<Metrics>, observers: Observers, request: &GenerateRequest, admitted: Arc<Admitted>) -> Self {
        let card = Arc::new(card(request, &admitted));
        observers.began(&card);
        let steps = observers.want_steps().then(StepLog::default);
        Self {
            metrics,
            observers,
            card,
            admitted,
            log: request.log,
            slow: request.slow,
            arrival: request.arrival,
            started: None,
            first_token: None,
            last_token: None,
            last_by_choice: vec![None; usize::from(request.choices)],
            tokens_by_choice: vec![0; usize::from(request.choices)],
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: 0,
            generated: 0,
            max_tokens: request.sampling.max_tokens,
            steps,
            reported: false,
        }
    }

    fn started(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
        let started = *self.started.get_or_insert_with(Instant::now);
        self.card.notes.started(started - self.arrival, cached_tokens);
    }

    /// A step worked on it: on its prompt up to the first token, which the step that ends the prompt brings.
    fn computed(&mut self, step: Arc<Step>) {
        let Some(steps) = &mut self.steps else { return };
        if self.first_token.is_none() { &mut steps.prefill } else { &mut steps.decode }.note(step);
    }

    fn token(&mut self, choice: u16, first_of_choice: bool) {
        let now = Instant::now();
        let choice = usize::from(choice);
        self.generated += 1;
        self.card.notes.token(now - self.arrival);
        self.tokens_by_choice[choice] += 1;
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.metrics.first_token(now - self.arrival);
        } else if !first_of_choice && let Some(last) = self.last_by_choice[choice] {
            self.metrics.next_token(now - last);
        }
        self.last_by_choice[choice] = Some(now);
        self.last_token = Some(now);
    }

    fn timings(&self) -> Timings {
        Timings {
            queue: self.started.map(|s| s - self.arrival),
            to_first_token: self.first_token.map(|f| f - self.arrival),
            generation: self.first_token.zip(self.last_token).map(|(f, l)| l - f),
            tokens: self.generated,
        }
    }

    fn end(&mut self, finished: FinishedReason) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        let now = Instant::now();
        let figures = RequestFigures {
            finished,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            generation_tokens: self.generated,
            generation_tokens_longest: self.tokens_by_choice.iter().copied().max().unwrap_or(0),
            choices: u32::try_from(self.tokens_by_choice.len()).unwrap_or(u32::MAX),
            max_tokens: Some(self.max_tokens),
            e2e: now - self.arrival,
            queue: self.started.map(|s| s - self.arrival),
            prefill: self.started.zip(self.first_token).map(|(s, f)| f.saturating_duration_since(s)),
            decode: self.first_token.zip(self.last_token).map(|(f, l)| l - f),
            resumed: 0,
        };
        self.metrics.request_finished(&figures);
        let usage = Usage {
            prompt_tokens: u64::from(self.prompt_tokens),
            cached_tokens: u64::from(self.cached_tokens),
            completion_tokens: u64::from(self.generated),
        };
        self.admitted.keys.record(&self.admitted.principal, usage);
        self.observers.ended(&self.card, &figures, &self.steps.take().unwrap_or_default());
        let slow = self.slow.is_some_and(|limit| figures.e2e > limit);
        // One macro call per level: a level is part of the place in the code.
        macro_rules! line {
            ($level:ident, $text:literal) => {
                tracing::$level!(
                    target: "ernied::requests",
                    request_id = &*self.card.request_id,
                    key = &*self.card.key,
                    finished = finished.label(),
                    prompt_tokens = figures.prompt_tokens,
                    cached_tokens = figures.cached_tokens,
                    generation_tokens = figures.generation_tokens,
                    queue_ms = figures.queue.map(millis),
                    prefill_ms = figures.prefill.map(millis),
                    decode_ms = figures.decode.map(millis),
                    elapsed_ms = millis(figures.e2e),
                    revision = short(&self.card.revision),
                    $text
                )
            };
        }
        if slow {
            line!(warn, "slow request finished");
        } else if self.log {
            line!(info, "request finished");
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// As much of a revision as tells it from others.
fn short(revision: &str) -> &str {
    revision.get(..12).unwrap_or(revision)
}

fn card(request: &GenerateRequest, admitted: &Admitted) -> Card {
    Card {
        request_id: request.request_id.clone(),
        key: admitted.principal.name.clone(),
        operation: request.operation,
        model: request.deployment.name().to_owned(),
        revision: request.deployment.revision.clone(),
        parent: request.parent.clone(),
        // The way back on the wall clock; the arrival was moments ago.
        arrival: SystemTime::now().checked_sub(request.arrival.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH),
        prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
        choices: u32::from(request.choices),
        max_tokens: request.sampling.max_tokens,
        temperature: request.sampling.temperature,
        top_p: request.sampling.top_p,
        notes: Notes::default(),
    }
}

impl Drop for Figures {
    fn drop(&mut self) {
        self.end(FinishedReason::Abort);
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
