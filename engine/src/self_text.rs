//! A sample of what a model writes when it is left to itself, for calibrating its quantised form: no text is needed, and
//! every model gets its own languages and its own chat marks.

use crate::config::EngineConfig;
use crate::engine::{AddError, Engine, EngineError};
use crate::model::Calibration;
use crate::outputs::StepOutputs;
use crate::params::{ChoiceSoFar, EngineRequest, RequestId, SamplingParams};
use crate::runner::ModelRunner;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// Tokens of one sequence: short ones begin at more places.
const LENGTH: u32 = 256;

/// Why there is no sample.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    #[error("the model took no request: {0}")]
    Add(#[from] AddError),
    #[error(transparent)]
    Step(#[from] EngineError),
}

/// At least `tokens` tokens: sequences that begin with a token drawn from the whole vocabulary and go on with tokens drawn
/// from the model's distribution. The same seed gives the same sample.
pub fn sample<R: ModelRunner>(
    runner: R,
    tokens: usize,
    seed: u64,
    progress: &mut dyn FnMut(usize),
) -> Result<Calibration, SampleError> {
    let limits = runner.limits();
    let length = LENGTH.min(limits.max_model_len);
    let count = tokens.div_ceil(length as usize);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sequences: Vec<Vec<u32>> = (0..count).map(|_| vec![rng.random_range(0..limits.vocab_size)]).collect();
    let config = EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() };
    let mut engine = Engine::new(config, runner);
    for (i, prompt) in sequences.iter().enumerate() {
        engine.add(EngineRequest {
            id: RequestId(i as u64),
            prompt: Arc::new(prompt.clone()),
            choices: vec![ChoiceSoFar::default()],
            sampling: SamplingParams {
                temperature: 1.0,
                seed: seed.wrapping_add(i as u64),
                max_tokens: length - 1,
                ignore_eos: true,
                ..SamplingParams::default()
            },
            priority: 0,
            cache_salt: 0,
            owner: 0,
        })?;
    }
    let mut outputs = StepOutputs::default();
    let mut written = 0;
    while engine.has_work() {
        engine.step(&mut outputs)?;
        for output in &outputs.outputs {
            if output.token < limits.vocab_size {
                sequences[output.request.0 as usize].push(output.token);
                written += 1;
            }
        }
        progress(written);
    }
    Ok(Calibration::new(sequences))
}
