//! Changes to logits before anything is drawn: bias, bans, penalties. They are made on a copy of the row: log-probabilities
//! are of the model's own logits, and several choices may share a row.

use crate::params::SamplingParams;
use std::sync::Arc;

/// How often a choice has generated each token, and which tokens its prompt has. Kept only when a penalty asks for it.
#[derive(Debug, Default)]
pub struct Seen {
    /// Token and count, ascending by token.
    generated: Vec<(u32, u32)>,
    /// Ascending, each once.
    prompt: Arc<[u32]>,
}

impl Seen {
    pub fn new(params: &SamplingParams, prompt: &Arc<[u32]>, capacity: usize) -> Option<Self> {
        let wanted = repeats(params) || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        wanted.then(|| Self { generated: Vec::with_capacity(capacity), prompt: prompt.clone() })
    }

    /// The distinct tokens of a prompt, for all choices of a request; empty when no penalty looks at them.
    pub fn distinct(params: &SamplingParams, prompt: &[u32]) -> Arc<[u32]> {
        if !repeats(params) {
            return Arc::default();
        }
        let mut distinct = prompt.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into()
    }

    pub fn push(&mut self, token: u32) {
        match self.generated.binary_search_by_key(&token, |&(token, _)| token) {
            Ok(at) => self.generated[at].1 += 1,
            Err(at) => self.generated.insert(at, (token, 1)),
        }
    }
}

fn repeats(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
}

/// A choice's own copy of a row of logits, to be changed.
#[derive(Debug)]
pub struct Edits<'a> {
    row: &'a mut [f32],
}

impl<'a> Edits<'a> {
    pub fn new(row: &'a mut [f32]) -> Self {
        Self { row }
    }

    /// Whether [`Edits::biases`] would change anything.
    pub fn any_bias(params: &SamplingParams, generated: usize) -> bool {
        !params.logit_bias.is_empty() || !params.bad_words.is_empty() || generated < params.min_tokens as usize
    }

    /// Everything that depends on ids alone: bias, bad words, and no end before `min_tokens`.
    pub fn biases(&mut self, params: &SamplingParams, generated: &[u32]) {
        for &(token, bias) in &params.logit_bias {
            self.change(token, |logit| logit + bias);
        }
        for word in &params.bad_words {
            if let Some((&last, before)) = word.split_last()
                && generated.ends_with(before)
            {
                self.change(last, |_| f32::NEG_INFINITY);
            }
        }
        if generated.len() < params.min_tokens as usize {
            for &token in params.eos_token_ids.iter().chain(&params.stop_token_ids) {
                self.change(token, |_| f32::NEG_INFINITY);
            }
        }
    }

    /// As vLLM: repetition over prompt and answer, then frequency and presence over the answer.
    pub fn penalties(&mut self, params: &SamplingParams, seen: &Seen) {
        if repeats(params) {
            let penalty = params.repetition_penalty;
            let damp = |logit: f32| if logit > 0.0 { logit / penalty } else { logit * penalty };
            for &token in seen.prompt.iter() {
                self.change(token, damp);
            }
            for &(token, _) in &seen.generated {
                if seen.prompt.binary_search(&token).is_err() {
                    self.change(token, damp);
                }
            }
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            for &(token, count) in &seen.generated {
                // Counts are far below 2^24.
                let penalty = params.frequency_penalty * count as f32 + params.presence_penalty;
                self.change(token, |logit| logit - penalty);
            }
        }
    }

    fn change(&mut self, token: u32, to: impl Fn(f32) -> f32) {
        // Ids beyond the vocabulary (a stop id of another tokenizer) can not be chosen anyway.
        if let Some(logit) = self.row.get_mut(token as usize) {
            *logit = to(*logit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(params: &SamplingParams, prompt: &[u32], generated: &[u32]) -> Vec<f32> {
        let mut row = vec![1.0, -1.0, 2.0, 0.5];
        let mut edits = Edits::new(&mut row);
        edits.biases(params, generated);
        if let Some(mut seen) = Seen::new(params, &Seen::distinct(params, prompt), 0) {
            generated.iter().for_each(|&token| seen.push(token));
            edits.penalties(params, &seen);
        }
        row
    }

    #[test]
    fn repetition_divides_positive_and_multiplies_negative_logits_once() {
        let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() };
        assert_eq!(edited(&params, &[0, 0, 1], &[0, 2]), [0.5, -2.0, 1.0, 0.5]);
    }

    #[test]
    fn presence_and_frequency_look_at_the_answer_alone() {
        let params = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..SamplingParams::default() };
        assert_eq!(edited(&params, &[3], &[0, 0, 1]), [0.0, -1.75, 2.0, 0.5]);
    }

    #[test]
    fn a_bad_word_is_banned_when_only_its_last_token_is_missing() {
        let params = SamplingParams { bad_words: vec![vec![3], vec![1, 2, 0]], ..SamplingParams::default() };
        let ban = f32::NEG_INFINITY;
        assert_eq!(edited(&params, &[1, 2], &[]), [1.0, -1.0, 2.0, ban]);
        assert_eq!(edited(&params, &[], &[3, 1, 2]), [ban, -1.0, 2.0, ban]);
    }

    #[test]
    fn no_end_is_chosen_before_min_tokens() {
        let params = SamplingParams {
            eos_token_ids: vec![2],
            stop_token_ids: vec![0, 99],
            min_tokens: 2,
            ..SamplingParams::default()
        };
        let ban = f32::NEG_INFINITY;
        assert_eq!(edited(&params, &[], &[1]), [ban, -1.0, ban, 0.5]);
        assert_eq!(edited(&params, &[], &[1, 1]), [1.0, -1.0, 2.0, 0.5]);
    }

    #[test]
    fn bias_is_added() {
        let params = SamplingParams { logit_bias: vec![(1, 5.0), (1, 1.0)], ..SamplingParams::default() };
        assert_eq!(edited(&params, &[], &[]), [1.0, 5.0, 2.0, 0.5]);
    }
}
