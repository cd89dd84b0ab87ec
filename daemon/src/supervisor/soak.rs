//! The rules of the window of observation: when a candidate that serves is worse than what it replaced.
//!
//! Pure: figures in, verdict out. Each rule compares with the old deployment's own figures and waits until there is enough
//! to compare.

use super::dispatch::Figures;
use std::time::Duration;

/// Limits, each against the old deployment.
#[derive(Debug, Clone, PartialEq)]
pub struct SoakRules {
    /// Share of requests that may fail beyond the old deployment's share.
    pub error_rate_more: f64,
    /// Times the old deployment's time to the first token.
    pub first_token_times: f64,
    /// Times the old deployment's time between tokens.
    pub next_token_times: f64,
    /// Share of experts without a token beyond the old deployment's share.
    pub idle_experts_more: f64,
    /// Requests that must have ended before rates are judged.
    pub requests_min: u64,
}

impl Default for SoakRules {
    fn default() -> Self {
        Self {
            error_rate_more: 0.05,
            first_token_times: 5.0,
            next_token_times: 3.0,
            idle_experts_more: 0.25,
            requests_min: 20,
        }
    }
}

/// What a deployment has done in the time that counts.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Observed {
    pub(super) figures: Figures,
    pub(super) nan_sequences: u64,
    /// Per MoE layer, tokens per expert.
    pub(super) expert_tokens: Vec<Vec<u64>>,
}

/// Times under this differ by chance.
const TIME_THAT_COUNTS: Duration = Duration::from_millis(5);

/// Tokens per expert and layer, on average, before an expert without any says something.
const TOKENS_PER_EXPERT: u64 = 50;

/// Why the candidate has to go, if it has to.
pub(super) fn breach(rules: &SoakRules, old: &Observed, new: &Observed) -> Option<String> {
    if new.nan_sequences > old.nan_sequences && new.nan_sequences > 0 {
        return Some(format!("{} answers ended because logits were not finite", new.nan_sequences));
    }
    let ended = new.figures.finished + new.figures.failed;
    if ended >= rules.requests_min {
        let (was, is) = (error_rate(&old.figures), error_rate(&new.figures));
        if is > was + rules.error_rate_more {
            return Some(format!("{:.1} % of its requests failed, {:.1} % before", 100.0 * is, 100.0 * was));
        }
    }
    let first = slower(
        (old.figures.first_token_time, old.figures.first_tokens),
        (new.figures.first_token_time, new.figures.first_tokens),
        (rules.requests_min, rules.first_token_times),
    );
    if let Some((was, is)) = first {
        return Some(format!("first tokens take {} ms, {} ms before", is.as_millis(), was.as_millis()));
    }
    let next = slower(
        (old.figures.next_token_time, old.figures.next_tokens),
        (new.figures.next_token_time, new.figures.next_tokens),
        (rules.requests_min * 5, rules.next_token_times),
    );
    if let Some((was, is)) = next {
        return Some(format!("tokens are {} ms apart, {} ms before", is.as_millis(), was.as_millis()));
    }
    let (was, is) = (idle_experts(&old.expert_tokens), idle_experts(&new.expert_tokens)?);
    let was = was.unwrap_or(0.0);
    (is > was + rules.idle_experts_more)
        .then(|| format!("{:.0} % of its experts get no token, {:.0} % before", 100.0 * is, 100.0 * was))
}

fn error_rate(figures: &Figures) -> f64 {
    let ended = figures.finished + figures.failed;
    if ended == 0 { 0.0 } else { figures.failed as f64 / ended as f64 }
}

/// Both means, when the new one is too long.
fn slower(old: (Duration, u64), new: (Duration, u64), (least, times): (u64, f64)) -> Option<(Duration, Duration)> {
    let mean = |(total, count): (Duration, u64)| (count >= least).then(|| total.div_f64(count as f64));
    let (was, is) = (mean(old)?, mean(new)?);
    (is > was.mul_f64(times) && is > TIME_THAT_COUNTS).then_some((was, is))
}

/// Share of experts that no token went to; `None` while there are too few tokens to say.
fn idle_experts(layers: &[Vec<u64>]) -> Option<f64> {
    let experts: usize = layers.iter().map(Vec::len).sum();
    let tokens: u64 = layers.iter().flatten().sum();
    if experts == 0 || tokens < TOKENS_PER_EXPERT * experts as u64 {
        return None;
    }
    let idle = layers.iter().flatten().filter(|tokens| **tokens == 0).count();
    Some(idle as f64 / experts as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(finished: u64, failed: u64, first_ms: u64, next_ms: u64) -> Observed {
        let figures = Figures {
            finished,
            failed,
            tokens: finished * 10,
            first_tokens: finished,
            first_token_time: Duration::from_millis(first_ms * finished),
            next_tokens: finished * 9,
            next_token_time: Duration::from_millis(next_ms * finished * 9),
        };
        Observed { figures, ..Observed::default() }
    }

    fn judged(new: &Observed) -> Option<String> {
        breach(&SoakRules::default(), &observed(1000, 10, 100, 20), new)
    }

    #[test]
    fn a_candidate_as_good_as_the_old_one_stays() {
        assert_eq!(judged(&observed(1000, 10, 100, 20)), None);
        assert_eq!(judged(&observed(1000, 30, 400, 55)), None, "within the limits");
        assert_eq!(judged(&Observed::default()), None, "nothing has happened yet");
    }

    #[test]
    fn more_errors_or_more_time_are_named_with_both_figures() {
        assert_eq!(judged(&observed(90, 10, 100, 20)).as_deref(), Some("10.0 % of its requests failed, 1.0 % before"));
        assert_eq!(judged(&observed(100, 0, 600, 20)).as_deref(), Some("first tokens take 600 ms, 100 ms before"));
        assert_eq!(judged(&observed(100, 0, 100, 100)).as_deref(), Some("tokens are 100 ms apart, 20 ms before"));
        assert_eq!(judged(&observed(5, 5, 9999, 9999)), None, "too few to judge");
    }

    #[test]
    fn one_answer_that_is_not_finite_is_enough() {
        let new = Observed { nan_sequences: 1, ..Observed::default() };
        assert!(judged(&new).expect("a breach").contains("not finite"));
    }

    #[test]
    fn experts_that_get_no_token_are_noticed() {
        let with = |idle: usize| Observed {
            expert_tokens: vec![(0..8).map(|e| if e < idle { 0 } else { 1000 }).collect()],
            ..observed(1000, 0, 100, 20)
        };
        let rules = SoakRules::default();
        assert_eq!(breach(&rules, &with(1), &with(3)), None);
        let reason = breach(&rules, &with(1), &with(4)).expect("a breach");
        assert_eq!(reason, "50 % of its experts get no token, 12 % before");
        let few = Observed { expert_tokens: vec![vec![0, 0, 0, 5]], ..Observed::default() };
        assert_eq!(breach(&rules, &with(1), &few), None, "too few tokens to say");
    }
}
