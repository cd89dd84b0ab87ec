//! What a request must look like to be taken.

use super::AddError;
use crate::params::{EngineRequest, SamplingParams};

/// Bounds that a request is held against.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestBounds {
    pub(super) vocab_size: u32,
    /// Most tokens of a sequence, prompt and answer together.
    pub(super) max_len: u32,
}

/// Choices are numbered by `u16`.
const CHOICES_MAX: u32 = u16::MAX as u32;

pub(super) fn validate(request: &EngineRequest, bounds: RequestBounds) -> Result<(), AddError> {
    if request.prompt.is_empty() {
        return Err(AddError::EmptyPrompt);
    }
    let choices = request.choices.len();
    if choices == 0 || choices > CHOICES_MAX as usize {
        return Err(AddError::Choices { choices, limit: CHOICES_MAX });
    }
    if request.choices.iter().all(|choice| choice.finished) {
        return Err(AddError::NothingToDo);
    }
    known("prompt", &request.prompt, bounds)?;
    parameters(&request.sampling, bounds)?;
    for (index, choice) in request.choices.iter().enumerate().filter(|(_, choice)| !choice.finished) {
        known("generated", &choice.generated, bounds)?;
        let tokens = request.prompt.len() + choice.generated.len();
        if tokens >= bounds.max_len as usize {
            return Err(AddError::TooLong { tokens, limit: bounds.max_len });
        }
        let (generated, max_tokens) = (choice.generated.len(), request.sampling.max_tokens);
        if generated >= max_tokens as usize {
            return Err(AddError::AlreadyEnded { choice: index, generated, max_tokens });
        }
    }
    Ok(())
}

fn known(what: &'static str, tokens: &[u32], bounds: RequestBounds) -> Result<(), AddError> {
    let vocab_size = bounds.vocab_size;
    match tokens.iter().position(|&token| token >= vocab_size) {
        None => Ok(()),
        Some(index) => Err(AddError::UnknownToken { what, index, token: tokens[index], vocab_size }),
    }
}

fn parameters(params: &SamplingParams, bounds: RequestBounds) -> Result<(), AddError> {
    let finite = |field, value: f32| check(field, value, value.is_finite(), "a finite number is expected");
    check("temperature", params.temperature, params.temperature.is_finite() && params.temperature >= 0.0, "0 or more")?;
    check("top_p", params.top_p, params.top_p > 0.0 && params.top_p <= 1.0, "more than 0 and at most 1 is expected")?;
    check("min_p", params.min_p, (0.0..=1.0).contains(&params.min_p), "between 0 and 1 is expected")?;
    let penalty = params.repetition_penalty;
    check("repetition_penalty", penalty, penalty.is_finite() && penalty > 0.0, "more than 0 is expected")?;
    finite("presence_penalty", params.presence_penalty)?;
    finite("frequency_penalty", params.frequency_penalty)?;
    check("max_tokens", params.max_tokens, params.max_tokens > 0, "at least 1 is expected")?;
    let fits = params.min_tokens <= params.max_tokens;
    check("min_tokens", params.min_tokens, fits, "at most max_tokens is expected")?;
    for &(token, bias) in &params.logit_bias {
        finite("logit_bias", bias)?;
        known("logit_bias", &[token], bounds)?;
    }
    known("allowed_token_ids", &params.allowed_token_ids, bounds)?;
    let words = params.bad_words.iter().all(|word| !word.is_empty());
    check("bad_words", "an empty word", words, "at least one token each is expected")?;
    let ends = params.grammar.is_none() || !params.eos_token_ids.is_empty();
    check("grammar", "without an end-of-sequence id", ends, "an answer could not end; give eos_token_ids")
}

fn check(field: &'static str, value: impl ToString, holds: bool, expected: &'static str) -> Result<(), AddError> {
    if holds { Ok(()) } else { Err(AddError::Parameter { field, value: value.to_string(), expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ChoiceSoFar, RequestId};
    use std::sync::Arc;

    fn request(change: impl FnOnce(&mut EngineRequest)) -> Result<(), AddError> {
        let mut request = EngineRequest {
            id: RequestId(1),
            prompt: Arc::new(vec![1, 2, 3]),
            choices: vec![ChoiceSoFar::default()],
            sampling: SamplingParams::default(),
            priority: 0,
            cache_salt: 0,
            owner: 0,
        };
        change(&mut request);
        validate(&request, RequestBounds { vocab_size: 10, max_len: 8 })
    }

    #[test]
    fn a_request_that_can_not_be_served_is_refused_with_the_reason() {
        assert_eq!(request(|_| ()), Ok(()));
        let says = |change: fn(&mut EngineRequest), expected: &str| {
            let refusal = request(change).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}");
        };
        says(|r| r.prompt = Arc::default(), "the prompt is empty");
        says(|r| r.prompt = Arc::new(vec![1; 8]), "8 tokens of prompt and answer leave no room");
        says(|r| r.prompt = Arc::new(vec![1, 10]), "prompt token 1 is 10, but the model's vocabulary ends at 10");
        says(|r| r.choices.clear(), "0 choices");
        says(|r| r.choices[0].finished = true, "every choice is finished");
        says(|r| r.choices[0].generated = vec![1; 16], "leave no room");
        says(|r| (r.sampling.max_tokens, r.choices[0].generated) = (2, vec![1; 2]), "already has 2 of 2 tokens");
        says(|r| r.sampling.temperature = f32::NAN, "temperature is NaN");
        says(|r| r.sampling.top_p = 0.0, "top_p is 0");
        says(|r| r.sampling.min_p = 1.5, "min_p is 1.5");
        says(|r| r.sampling.repetition_penalty = 0.0, "repetition_penalty is 0");
        says(|r| r.sampling.presence_penalty = f32::INFINITY, "presence_penalty is inf");
        says(|r| r.sampling.max_tokens = 0, "max_tokens is 0");
        says(|r| r.sampling.min_tokens = 99, "min_tokens is 99");
        says(|r| r.sampling.logit_bias = vec![(11, 1.0)], "logit_bias token 0 is 11");
        says(|r| r.sampling.allowed_token_ids = vec![0, 12], "allowed_token_ids token 1 is 12");
        says(|r| r.sampling.bad_words = vec![vec![]], "bad_words is an empty word");
    }
}
