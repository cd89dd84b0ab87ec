//! The engine of ernied: scheduler, paged KV cache, ERNIE-4.5 model and sampler.
//!
//! A pure library: no process, socket, clock or text. Its life is `add`, `abort`, `step`; everything it knows comes in
//! through those calls, so a test can walk it step by step and compare bit for bit.

pub mod config;
pub mod engine;
pub mod kv;
pub mod model;
pub mod outputs;
pub mod params;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod self_text;
pub mod sequence;

pub use config::{EngineConfig, SwapConfig, SwapControl, SwapPolicy};
pub use engine::{AddError, Engine, EngineError};
pub use outputs::{
    EngineStats, FinishReason, KvReport, KvSequence, KvState, PromptLogprobs, SequenceOutput, Started, StepOutputs,
    TokenLogprobs,
};
