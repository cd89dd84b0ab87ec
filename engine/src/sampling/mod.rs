//! From a row of logits to a token. Order as in vLLM: masks (grammar, allowed ids), bias, bad words, minimum length,
//! penalties; then temperature, min-p, top-k, top-p, draw. Log-probabilities are of the logits as the model gave them.
//!
//! A [`Sampler`] holds what one choice remembers; it can be rebuilt from the generated ids alone, so a choice that moves to
//! another worker goes on as if nothing had happened.

pub mod filters;
pub mod grammar;
pub mod penalties;
pub mod rng;
pub mod stop;

use crate::outputs::TokenLogprobs;
use crate::params::SamplingParams;
use crate::runner::{Row, Want};
use ernie_kernels::sample;
use filters::{Buffers, Candidate, Filters};
use grammar::GrammarState;
use penalties::{Edits, Seen};
use std::sync::{Arc, Mutex, PoisonError};

/// Below this temperature the most likely token is taken (as in vLLM).
const GREEDY: f32 = 1e-5;
/// Temperatures between are raised to this, for the sake of the numbers (as in vLLM).
const COLDEST: f32 = 0.01;

/// What one choice remembers for its sampling.
#[derive(Debug)]
pub struct Sampler {
    choice: u16,
    seen: Option<Seen>,
    /// Behind a lock only because computing a mask changes it, while rows are sampled side by side.
    grammar: Option<Mutex<GrammarState>>,
}

/// Memory of a row's sampling, kept between steps.
#[derive(Debug, Default)]
pub struct Scratch {
    buffers: Buffers,
    /// A row's copy, to be changed.
    copy: Vec<f32>,
}

/// A token, and what was asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a choice ends without a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoChoice {
    /// A logit is NaN or infinite.
    NotFinite,
    /// Every token is banned.
    DeadEnd,
}

impl Sampler {
    /// The sampler of a choice that has generated this much. `distinct` are the prompt's tokens by [`Seen::distinct`].
    pub fn new(
        params: &SamplingParams,
        distinct: &Arc<[u32]>,
        choice: u16,
        generated: &[u32],
        grammar: Option<GrammarState>,
    ) -> Self {
        let mut seen = Seen::new(params, distinct, params.max_tokens.min(RESERVE) as usize);
        if let Some(seen) = &mut seen {
            generated.iter().for_each(|&token| seen.push(token));
        }
        Self { choice, seen, grammar: grammar.map(Mutex::new) }
    }

    pub fn constrained(&self) -> bool {
        self.grammar.is_some()
    }

    /// What the runner must give for the next token.
    pub fn want(&self, params: &SamplingParams, generated: usize) -> Want {
        let plain = params.temperature < GREEDY
            && params.logprobs.is_none()
            && self.seen.is_none()
            && self.grammar.is_none()
            && params.allowed_token_ids.is_empty()
            && !Edits::any_bias(params, generated);
        if plain { Want::Greedy } else { Want::Logits }
    }

    /// Chooses the token at `position` from its row.
    pub fn choose(
        &self,
        params: &SamplingParams,
        generated: &[u32],
        position: usize,
        row: &Row<'_>,
        scratch: &mut Scratch,
    ) -> Result<Chosen, NoChoice> {
        let row = match row {
            Row::Greedy { token, logit } if logit.is_finite() => return Ok(Chosen { token: *token, logprobs: None }),
            Row::Greedy { .. } => return Err(NoChoice::NotFinite),
            Row::Logits(row) => *row,
        };
        let best = sample::argmax(row);
        if best.1.is_nan() {
            return Err(NoChoice::NotFinite);
        }
        let Scratch { buffers, copy } = scratch;
        let (edited, best) = match self.edit(params, generated, row, copy)? {
            true => (copy.as_slice(), filters::argmax(copy).ok_or(NoChoice::DeadEnd)?),
            false => (row, best),
        };
        let token = self.pick(params, position, edited, best, buffers);
        let logprobs = params.logprobs.and_then(|top| logprobs(row, token, top as usize));
        Ok(Chosen { token, logprobs })
    }

    /// Copies the row and changes the copy. False if there is nothing to change.
    fn edit(
        &self,
        params: &SamplingParams,
        generated: &[u32],
        row: &[f32],
        copy: &mut Vec<f32>,
    ) -> Result<bool, NoChoice> {
        let masked = self.mask(params, row, copy)?;
        if !masked {
            if self.seen.is_none() && !Edits::any_bias(params, generated.len()) {
                return Ok(false);
            }
            copy.clear();
            copy.extend_from_slice(row);
        }
        let mut edits = Edits::new(copy);
        edits.biases(params, generated);
        if let Some(seen) = &self.seen {
            edits.penalties(params, seen);
        }
        Ok(true)
    }

    /// A token was chosen.
    pub fn push(&mut self, token: u32) {
        if let Some(seen) = &mut self.seen {
            seen.push(token);
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.get_mut().unwrap_or_else(PoisonError::into_inner).push(token);
        }
    }

    /// Copies a row whose tokens are mostly banned, without the banned ones. False if the row is open.
    fn mask(&self, params: &SamplingParams, row: &[f32], masked: &mut Vec<f32>) -> Result<bool, NoChoice> {
        if let Some(grammar) = &self.grammar {
            let mut grammar = grammar.lock().unwrap_or_else(PoisonError::into_inner);
            if !grammar.mask(row, &params.eos_token_ids, masked) {
                return Err(NoChoice::DeadEnd);
            }
            if !params.allowed_token_ids.is_empty() {
                for (token, logit) in (0u32..).zip(masked.iter_mut()) {
                    if *logit > f32::NEG_INFINITY && !params.allowed_token_ids.contains(&token) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            return Ok(true);
        }
        if params.allowed_token_ids.is_empty() {
            return Ok(false);
        }
        masked.clear();
        masked.resize(row.len(), f32::NEG_INFINITY);
        for &token in &params.allowed_token_ids {
            masked[token as usize] = row[token as usize];
        }
        Ok(true)
    }

    fn pick(
        &self,
        params: &SamplingParams,
        position: usize,
        row: &[f32],
        best: Candidate,
        buffers: &mut Buffers,
    ) -> u32 {
        if params.temperature < GREEDY {
            return best.0;
        }
        let filters = Filters {
            temperature: params.temperature.max(COLDEST),
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
        };
        filters.draw(row, best, rng::uniform(params.seed, self.choice, position as u64), buffers)
    }
}

/// Entries to reserve ahead for what a choice will generate; longer answers grow their memory.
pub const RESERVE: u32 = 4096;

/// Log-probabilities of a token and of the `top` most likely ones. `None` if a logit is not finite.
pub fn logprobs(row: &[f32], token: u32, top: usize) -> Option<TokenLogprobs> {
    let total = sample::log_sum_exp(row);
    if !total.is_finite() || sample::argmax(row).1.is_nan() {
        return None;
    }
    let logit = row[token as usize];
    let mut best = Vec::new();
    sample::top_k(row, top, &mut best);
    for (_, logit) in &mut best {
        *logit -= total;
    }
    Some(TokenLogprobs { logprob: logit - total, rank: filters::rank(row, logit), top: best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(params: &SamplingParams, row: &[f32], generated: &[u32]) -> Result<Chosen, NoChoice> {
        let sampler = Sampler::new(params, &Seen::distinct(params, &[1]), 0, generated, None);
        let position = 1 + generated.len();
        sampler.choose(params, generated, position, &Row::Logits(row), &mut Scratch::default())
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_after_all_masks() {
        let row = [3.0, 5.0, 5.0, 4.0];
        let params = SamplingParams::default();
        assert_eq!(choose(&params, &row, &[]).unwrap().token, 1);
        let allowed = SamplingParams { allowed_token_ids: vec![3, 0], ..params.clone() };
        assert_eq!(choose(&allowed, &row, &[]).unwrap().token, 3);
        let biased = SamplingParams { logit_bias: vec![(0, 10.0)], ..params.clone() };
        assert_eq!(choose(&biased, &row, &[]).unwrap().token, 0);
        let banned = SamplingParams { allowed_token_ids: vec![3], bad_words: vec![vec![3]], ..params };
        assert_eq!(choose(&banned, &row, &[]), Err(NoChoice::DeadEnd));
    }

    #[test]
    fn log_probabilities_are_of_the_models_own_logits() {
        let row = [0.0, 1.0, 2.0, 3.0];
        let params = SamplingParams {
            logprobs: Some(2),
            logit_bias: vec![(0, 100.0)],
            temperature: 0.5,
            top_k: 1,
            ..SamplingParams::default()
        };
        let chosen = choose(&params, &row, &[]).unwrap();
        let total = row.iter().map(|l: &f32| l.exp()).sum::<f32>().ln();
        let logprobs = chosen.logprobs.unwrap();
        assert_eq!((chosen.token, logprobs.rank), (0, 4));
        assert!((logprobs.logprob + total).abs() < 1e-5);
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [3, 2]);
        assert!((logprobs.top[0].1 - (3.0 - total)).abs() < 1e-5);
    }

    #[test]
    fn a_logit_that_is_no_number_ends_the_choice() {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, logprobs: Some(0), ..SamplingParams::default() };
            assert_eq!(choose(&params, &[1.0, f32::NAN, 2.0], &[]), Err(NoChoice::NotFinite));
        }
        let sampler = Sampler::new(&SamplingParams::default(), &Arc::default(), 0, &[], None);
        let row = Row::Greedy { token: 0, logit: f32::NAN };
        let chosen = sampler.choose(&SamplingParams::default(), &[], 1, &row, &mut Scratch::default());
        assert_eq!(chosen, Err(NoChoice::NotFinite));
    }

    #[test]
    fn only_a_plain_greedy_choice_does_without_logits() {
        let plain = SamplingParams { min_tokens: 2, ..SamplingParams::default() };
        let sampler = Sampler::new(&plain, &Arc::default(), 0, &[], None);
        assert_eq!(sampler.want(&plain, 1), Want::Logits, "an end may have to be banned");
        assert_eq!(sampler.want(&plain, 2), Want::Greedy);
        let penalised = SamplingParams { frequency_penalty: 0.1, ..SamplingParams::default() };
        let sampler = Sampler::new(&penalised, &Arc::default(), 0, &[], None);
        assert_eq!(sampler.want(&penalised, 0), Want::Logits);
    }
}
