//! A request as its observers see it: ids, times and figures, never text.
//!
//! [`Card`] is made when the request is handed to the fleet and noted on while it runs; the flight recorder holds the cards
//! under way, a trace is made of a card at its end. Notes are atomics, so that a token takes no lock.

use super::metrics::RequestFigures;
use super::recorder::Recorder;
use super::steps::StepLog;
use super::traces::{TraceParent, Traces};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Who hears of requests besides the metrics.
#[derive(Debug, Clone, Default)]
pub struct Observers {
    pub recorder: Option<Arc<Recorder>>,
    pub traces: Option<Arc<Traces>>,
}

impl Observers {
    pub fn began(&self, card: &Arc<Card>) {
        if let Some(recorder) = &self.recorder {
            recorder.request_began(card);
        }
    }

    /// Whether anybody wants to know which steps computed a request.
    pub fn want_steps(&self) -> bool {
        self.traces.as_ref().is_some_and(|traces| traces.want_steps())
    }

    pub fn ended(&self, card: &Arc<Card>, figures: &RequestFigures, steps: &StepLog) {
        if let Some(recorder) = &self.recorder {
            recorder.request_ended(card, figures.finished.label());
        }
        if let Some(traces) = &self.traces {
            traces.request_ended(card, figures, steps);
        }
    }
}

/// What is known of a request before it runs, and what was noted since.
#[derive(Debug)]
pub struct Card {
    pub request_id: Arc<str>,
    /// Name of the API key.
    pub key: Arc<str>,
    /// `chat`, `text_completion`: as OpenTelemetry's GenAI conventions name it.
    pub operation: &'static str,
    pub model: String,
    pub revision: String,
    pub parent: Option<TraceParent>,
    pub arrival: SystemTime,
    pub prompt_tokens: u32,
    pub choices: u32,
    pub max_tokens: u32,
    pub temperature: f32,
    pub top_p: f32,
    pub notes: Notes,
}

/// Times are microseconds since the arrival plus one; 0: it has not happened.
#[derive(Debug, Default)]
pub struct Notes {
    /// Number in the fleet.
    pub number: AtomicU64,
    started: AtomicU64,
    first_token: AtomicU64,
    last_token: AtomicU64,
    pub cached_tokens: AtomicU32,
    pub generated: AtomicU32,
}

impl Notes {
    pub fn submitted(&self, number: u64) {
        self.number.store(number, Ordering::Relaxed);
    }

    pub fn started(&self, since_arrival: Duration, cached_tokens: u32) {
        self.started.store(coded(since_arrival), Ordering::Relaxed);
        self.cached_tokens.store(cached_tokens, Ordering::Relaxed);
    }

    pub fn token(&self, since_arrival: Duration) {
        let at = coded(since_arrival);
        if self.generated.fetch_add(1, Ordering::Relaxed) == 0 {
            self.first_token.store(at, Ordering::Relaxed);
        }
        self.last_token.store(at, Ordering::Relaxed);
    }

    /// Since the arrival: start, first token, last token.
    pub fn times(&self) -> [Option<Duration>; 3] {
        [&self.started, &self.first_token, &self.last_token].map(|note| {
            let coded = note.load(Ordering::Relaxed);
            coded.checked_sub(1).map(Duration::from_micros)
        })
    }
}

fn coded(since_arrival: Duration) -> u64 {
    u64::try_from(since_arrival.as_micros()).unwrap_or(u64::MAX - 1) + 1
}
