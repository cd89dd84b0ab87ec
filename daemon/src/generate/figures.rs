//! What a request took: its times and counts, noted while it runs and reported once, whatever its end.

use super::{Admitted, GenerateRequest};
use crate::keys::Usage;
use crate::telemetry::metrics::{FinishedReason, Metrics, RequestFigures};
use crate::telemetry::requests::{Card, Notes, Observers};
use crate::telemetry::steps::{Step, StepLog};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

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
pub(super) struct Figures {
    metrics: Arc<Metrics>,
    observers: Observers,
    pub(super) card: Arc<Card>,
    admitted: Arc<Admitted>,
    log: bool,
    slow: Option<Duration>,
    pub(super) arrival: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    last_by_choice: Vec<Option<Instant>>,
    tokens_by_choice: Vec<u32>,
    prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) generated: u32,
    max_tokens: u32,
    /// Which steps computed it, when somebody wants to know.
    steps: Option<StepLog>,
    reported: bool,
}

impl Figures {
    pub(super) fn new(
        metrics: Arc<Metrics>,
        observers: Observers,
        request: &GenerateRequest,
        admitted: Arc<Admitted>,
    ) -> Self {
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

    pub(super) fn started(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
        let started = *self.started.get_or_insert_with(Instant::now);
        self.card.notes.started(started - self.arrival, cached_tokens);
    }

    /// A step worked on it: on its prompt up to the first token, which the step that ends the prompt brings.
    pub(super) fn computed(&mut self, step: Arc<Step>) {
        let Some(steps) = &mut self.steps else { return };
        if self.first_token.is_none() { &mut steps.prefill } else { &mut steps.decode }.note(step);
    }

    pub(super) fn token(&mut self, choice: u16, first_of_choice: bool) {
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

    pub(super) fn timings(&self) -> Timings {
        Timings {
            queue: self.started.map(|s| s - self.arrival),
            to_first_token: self.first_token.map(|f| f - self.arrival),
            generation: self.first_token.zip(self.last_token).map(|(f, l)| l - f),
            tokens: self.generated,
        }
    }

    pub(super) fn end(&mut self, finished: FinishedReason) {
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
