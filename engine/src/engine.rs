//! The engine: `add`, `abort`, `step`. Owns the scheduler, the KV blocks' book-keeping, the sampler and the runner.

use crate::config::EngineConfig;
use crate::outputs::{EngineStats, StepOutputs};
use crate::params::{EngineRequest, RequestId};
use crate::runner::{ModelRunner, RunnerError};

/// Why a request is not taken. All are the caller's to mend; none may be retried as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    #[error("request {0:?} is already in the engine: every request needs an id of its own")]
    Duplicate(RequestId),
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    #[error("{what} token {index} is {token}, but the model's vocabulary ends at {vocab_size}")]
    UnknownToken { what: &'static str, index: usize, token: u32, vocab_size: u32 },
    #[error("{tokens} tokens of prompt and answer leave no room for another: a sequence holds at most {limit}")]
    TooLong { tokens: usize, limit: u32 },
    #[error("{choices} choices: a request has between 1 and {limit}")]
    Choices { choices: usize, limit: u32 },
    #[error("{field} is {value}: {expected}")]
    Parameter { field: &'static str, value: String, expected: &'static str },
    #[error("choice {choice} already has {generated} of {max_tokens} tokens: mark it finished instead")]
    AlreadyEnded { choice: usize, generated: usize, max_tokens: u32 },
    #[error("the grammar can not be used: {0}")]
    Grammar(String),
}

/// Why a step could not be made. The engine's state is as before the step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("step {step} could not be computed: {cause}")]
    Runner { step: u64, cause: RunnerError },
}

#[derive(Debug)]
pub struct Engine<R> {
    config: EngineConfig,
    runner: R,
}

impl<R: ModelRunner> Engine<R> {
    /// An engine without requests. Bounds in `config` beyond the runner's limits are lowered to these.
    pub fn new(config: EngineConfig, runner: R) -> Self {
        Self { config, runner }
    }

    /// Takes a request; its first step comes with one of the next calls of [`Engine::step`].
    pub fn add(&mut self, request: EngineRequest) -> Result<(), AddError> {
        Err(AddError::Duplicate(request.id))
    }

    /// Forgets a request and frees its blocks before the next step. False if it is not (or no longer) here.
    pub fn abort(&mut self, _request: RequestId) -> bool {
        false
    }

    /// Whether any request is unfinished.
    pub fn has_work(&self) -> bool {
        false
    }

    /// Plans one step, computes it, samples, and puts what it brought into `out` (emptied first).
    pub fn step(&mut self, out: &mut StepOutputs) -> Result<(), EngineError> {
        out.clear();
        Ok(())
    }

    pub fn stats(&self) -> EngineStats {
        EngineStats { blocks_total: self.runner.limits().num_blocks, ..EngineStats::default() }
    }

    /// Forgets every cached prefix; running sequences keep what they have.
    pub fn reset_prefix_cache(&mut self) {}

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    pub fn runner(&self) -> &R {
        &self.runner
    }
}
