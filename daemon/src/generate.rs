//! The one file that knows a request's whole way: permit → prompt ids → fleet → tokens → text.
//!
//! An [`Answer`] is a request under way. It owns everything that has to be given back (permit, the fleet's `Generation`), so
//! that dropping it, as happens when a client hangs up, ends the work everywhere. It also owns the figures of the request
//! and reports them once, whatever the end.
//!
//! Not here: the forms of requests and answers (`http`), which worker computes (`supervisor`).

mod choice;
mod figures;

pub use figures::Timings;

use crate::admission::Permit;
use crate::keys::{KeyPermit, KeyStore, Principal};
use crate::supervisor::{Deployment, FleetHandle, Generation, GenerationEvent, Submission, SubmitRefusal};
use crate::telemetry::metrics::{FinishedReason, Metrics};
use crate::telemetry::requests::Observers;
use crate::telemetry::traces::TraceParent;
use crate::text::TextModel;
use crate::text::detokenizer::Detokenizer;
use crate::text::reasoning::ReasoningSplitter;
use crate::text::stop::StopWatcher;
use choice::ChoiceText;
use ernie_proto::worker::{NO_TOKEN, SamplingParams, SequenceOutput, TokenLogprobs};
use figures::Figures;
use std::sync::Arc;
use std::time::Duration;
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
