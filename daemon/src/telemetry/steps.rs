//! Engine steps as the requests that they computed refer to them, for traces.
//!
//! The supervisor makes one [`Step`] per report of a worker and gives it along with what the report brought; a traced request
//! keeps those of each of its phases in a bounded [`StepLog`]. A step becomes a span when the first traced request that it
//! computed has ended, and every other one links to the same span.

use ernie_proto::ids::WorkerId;
use ernie_proto::worker::StepStats;
use opentelemetry::trace::SpanContext;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Steps that only computed a part of a prompt, as told to its request; a longer prompt is not told the rest.
pub const PROMPT_STEPS_MAX: u32 = 64;
/// Of a phase with more steps the first and the last are kept, so many each.
const KEPT_AT_EITHER_END: usize = 32;

/// One step of a worker's engine.
#[derive(Debug, PartialEq)]
pub struct Step {
    pub worker: WorkerId,
    /// Counts the worker's steps.
    pub number: u64,
    /// When its report came.
    pub ended: SystemTime,
    pub took: Duration,
    pub sequences: u32,
    pub tokens: u32,
    pub prefill_tokens: u32,
    /// Set when it became a span.
    pub(super) span: OnceLock<SpanContext>,
}

impl Step {
    pub fn new(worker: WorkerId, number: u64, stats: &StepStats) -> Self {
        Self {
            worker,
            number,
            ended: SystemTime::now(),
            // A worker's word: it may be anything.
            took: Duration::try_from_secs_f64(stats.step_seconds).unwrap_or_default().min(Duration::from_secs(3600)),
            sequences: stats.sequences,
            tokens: stats.tokens,
            prefill_tokens: stats.prefill_tokens,
            span: OnceLock::new(),
        }
    }
}

/// The steps of one request, by phase.
#[derive(Debug, Default)]
pub struct StepLog {
    pub prefill: PhaseSteps,
    pub decode: PhaseSteps,
}

/// The steps of one phase: all of a short one, both ends of a long one.
#[derive(Debug, Default)]
pub struct PhaseSteps {
    first: Vec<Arc<Step>>,
    last: VecDeque<Arc<Step>>,
    count: u64,
}

impl PhaseSteps {
    /// Several choices may have a token of the same step: it counts once.
    pub fn note(&mut self, step: Arc<Step>) {
        if self.last.back().or(self.first.last()).is_some_and(|last| Arc::ptr_eq(last, &step)) {
            return;
        }
        self.count += 1;
        if self.first.len() < KEPT_AT_EITHER_END {
            self.first.push(step);
            return;
        }
        if self.last.len() == KEPT_AT_EITHER_END {
            self.last.pop_front();
        }
        self.last.push_back(step);
    }

    /// All of them, those that were not kept included.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Those that were kept, in order.
    pub fn kept(&self) -> impl Iterator<Item = &Arc<Step>> {
        self.first.iter().chain(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_phase_keeps_both_ends_and_counts_all() {
        let mut steps = PhaseSteps::default();
        for number in 0..1000 {
            let step = Arc::new(Step::new(WorkerId(1), number, &StepStats::default()));
            // Two choices of the request had a token in it.
            steps.note(step.clone());
            steps.note(step);
        }
        assert_eq!(steps.count(), 1000);
        let kept: Vec<u64> = steps.kept().map(|s| s.number).collect();
        assert_eq!(kept, (0..32).chain(968..1000).collect::<Vec<_>>());
    }

    #[test]
    fn a_worker_may_say_any_duration() {
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            let stats = StepStats { step_seconds: seconds, ..StepStats::default() };
            assert!(Step::new(WorkerId(1), 1, &stats).took <= Duration::from_secs(3600));
        }
    }
}
