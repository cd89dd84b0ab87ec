//! The draw from a row of logits under temperature, min-p, top-k and top-p.
//!
//! The vocabulary is large (103 424) and is never sorted: top-k keeps candidates above a threshold, top-p works inside
//! candidates, and only a row so flat that thousands of tokens share the mass falls back to a histogram. The scans are those of
//! `ernie_kernels::sample`. Every sum has one order, so equal rows give equal tokens. Order everywhere: larger logit first,
//! lower id on ties.

use ernie_kernels::sample;

/// A token and its logit.
pub type Candidate = (u32, f32);

/// Memory of a row's sampling, kept between steps.
#[derive(Debug, Default)]
pub struct Buffers {
    candidates: Vec<Candidate>,
    bins: Vec<f64>,
}

/// Logits that are looked at together.
const CHUNK: usize = 1024;
const LANES: usize = 8;

/// How a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filters {
    /// Above 0.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
}

/// Tokens that may still be drawn: with larger logits than `logit`, or with the same and no higher id than `token`.
#[derive(Debug, Clone, Copy)]
struct Cut {
    logit: f32,
    token: u32,
}

impl Filters {
    /// Draws a token with `uniform` from [0, 1). `best` is the most likely token and its logit; the others are finite, or -inf
    /// when they are banned.
    pub fn draw(&self, row: &[f32], best: Candidate, uniform: f64, buffers: &mut Buffers) -> u32 {
        let (first, max) = best;
        let scale = 1.0 / self.temperature;
        let floor = if self.min_p > 0.0 { max + self.temperature * self.min_p.ln() } else { f32::MIN };
        let above = Cut { logit: floor, token: u32::MAX };
        let Buffers { candidates, bins } = buffers;
        let token = if self.top_k > 0 && (self.top_k as usize) < row.len() {
            sample::top_k(row, self.top_k as usize, candidates);
            let kept = candidates.partition_point(|&(_, logit)| logit >= floor);
            candidates.truncate(kept);
            let total: f64 = candidates.iter().map(|&(_, logit)| weight(logit, max, scale)).sum();
            cut_mass(candidates, max, scale, f64::from(self.top_p) * total);
            draw_candidate(candidates, max, scale, uniform)
        } else if self.top_p < 1.0 {
            let goal = f64::from(self.top_p) * mass(row, max, scale, above);
            match self.nucleus(row, max, floor, goal, candidates) {
                true => draw_candidate(candidates, max, scale, uniform),
                false => {
                    let cut = histogram_cut(row, max, scale, above, goal, bins, candidates);
                    draw_from_row(row, max, scale, cut, uniform)
                }
            }
        } else {
            draw_from_row(row, max, scale, above, uniform)
        };
        token.unwrap_or(first)
    }

    /// Collects the fewest most likely tokens that together have `goal`. False if these are too many.
    fn nucleus(&self, row: &[f32], max: f32, floor: f32, goal: f64, candidates: &mut Vec<Candidate>) -> bool {
        let scale = 1.0 / self.temperature;
        for k in [64, 1024] {
            sample::top_k(row, k, candidates);
            let kept = candidates.partition_point(|&(_, logit)| logit >= floor);
            let all = kept < candidates.len() || candidates.len() < k;
            candidates.truncate(kept);
            if cut_mass(candidates, max, scale, goal) || all {
                return true;
            }
        }
        false
    }
}

/// The most likely token that is not banned, and its logit. Logits are finite, or -inf when they are banned.
pub fn argmax(row: &[f32]) -> Option<Candidate> {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
    let at = row.iter().position(|&logit| logit == max && max > f32::NEG_INFINITY)?;
    Some((u32::try_from(at).ok()?, max))
}

/// Place of a logit among all, 1 for the largest; equal ones count as before it (as vLLM counts).
pub fn rank(row: &[f32], logit: f32) -> u32 {
    let mut lanes = [0u32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &other) in lanes.iter_mut().zip(chunk) {
            *lane += u32::from(other >= logit);
        }
    }
    lanes.iter().sum::<u32>() + rest.iter().map(|&other| u32::from(other >= logit)).sum::<u32>()
}

fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn weight(logit: f32, max: f32, scale: f32) -> f64 {
    f64::from(exp((logit - max) * scale))
}

/// e to the `x`, for `x` up to 0: below 1e-7 off, and simple enough for the compiler to do eight at once.
fn exp(x: f32) -> f32 {
    const TO_INTEGER: f32 = 12_582_912.0;
    let clamped = if x < -87.0 { -87.0 } else { x };
    let power = (clamped * std::f32::consts::LOG2_E + TO_INTEGER) - TO_INTEGER;
    let rest = (clamped - power * 0.693_359_4) - power * -2.121_944_4e-4;
    let series = 1.987_569_1e-4;
    let series = series * rest + 1.398_199_9e-3;
    let series = series * rest + 8.333_452e-3;
    let series = series * rest + 4.166_579_6e-2;
    let series = series * rest + 0.166_666_66;
    let series = series * rest + 0.5;
    let series = series * rest * rest + rest + 1.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an integer between -126 and 0")]
    let scale = f32::from_bits(((power as i32 + 127) as u32) << 23);
    if x < -87.0 { 0.0 } else { series * scale }
}

/// Sum of the weights of the tokens that `cut` keeps, in the order of chunks and lanes.
fn mass(row: &[f32], max: f32, scale: f32, cut: Cut) -> f64 {
    row.chunks(CHUNK).zip((0u32..).step_by(CHUNK)).map(|(chunk, base)| chunk_mass(chunk, base, max, scale, cut)).sum()
}

fn chunk_mass(chunk: &[f32], base: u32, max: f32, scale: f32, cut: Cut) -> f64 {
    if cut.logit <= f32::MIN {
        return f64::from(sample::sum_exp(chunk, max, scale));
    }
    let mut lanes = [0.0f32; LANES];
    let (groups, rest) = chunk.as_chunks::<LANES>();
    for (group, at) in groups.iter().zip((base..).step_by(LANES)) {
        for ((lane, &logit), token) in lanes.iter_mut().zip(group).zip(at..) {
            let weight = exp((logit - max) * scale);
            *lane += if cut.keeps(token, logit) { weight } else { 0.0 };
        }
    }
    let mut sum = f64::from(lanes.iter().sum::<f32>());
    let first = base + u32::try_from(groups.len() * LANES).unwrap_or(u32::MAX);
    for (&logit, token) in rest.iter().zip(first..) {
        if cut.keeps(token, logit) {
            sum += weight(logit, max, scale);
        }
    }
    sum
}

impl Cut {
    fn keeps(self, token: u32, logit: f32) -> bool {
        logit > self.logit || (logit == self.logit && token <= self.token)
    }
}

/// Keeps the fewest candidates that together have `goal`. False if all have less.
fn cut_mass(candidates: &mut Vec<Candidate>, max: f32, scale: f32, goal: f64) -> bool {
    let mut sum = 0.0;
    for (index, &(_, logit)) in candidates.iter().enumerate() {
        sum += weight(logit, max, scale);
        if sum >= goal {
            candidates.truncate(index + 1);
            return true;
        }
    }
    false
}

fn draw_candidate(candidates: &[Candidate], max: f32, scale: f32, uniform: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|&(_, logit)| weight(logit, max, scale)).sum();
    let mut left = uniform * total;
    for &(token, logit) in candidates {
        left -= weight(logit, max, scale);
        if left < 0.0 {
            return Some(token);
        }
    }
    // Rounding used up the last bit.
    candidates.last().map(|&(token, _)| token)
}

/// Draws among all tokens that `cut` keeps, walking them by id.
fn draw_from_row(row: &[f32], max: f32, scale: f32, cut: Cut, uniform: f64) -> Option<u32> {
    let mut left = uniform * mass(row, max, scale, cut);
    let mut last = None;
    for (chunk, base) in row.chunks(CHUNK).zip((0u32..).step_by(CHUNK)) {
        let here = chunk_mass(chunk, base, max, scale, cut);
        if here == 0.0 {
            continue;
        }
        if left >= here {
            left -= here;
            last = Some((chunk, base));
            continue;
        }
        return draw_from_chunk(chunk, base, max, scale, cut, left);
    }
    last.and_then(|(chunk, base)| draw_from_chunk(chunk, base, max, scale, cut, f64::INFINITY))
}

fn draw_from_chunk(chunk: &[f32], base: u32, max: f32, scale: f32, cut: Cut, mut left: f64) -> Option<u32> {
    let mut last = None;
    for (&logit, token) in chunk.iter().zip(base..) {
        let here = if cut.keeps(token, logit) { weight(logit, max, scale) } else { 0.0 };
        if here > 0.0 {
            last = Some(token);
            left -= here;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

/// Where top-p ends in a flat row: the mass per bin of logits first, then exactly inside the bin where `goal` is reached.
fn histogram_cut(
    row: &[f32],
    max: f32,
    scale: f32,
    above: Cut,
    goal: f64,
    bins: &mut Vec<f64>,
    candidates: &mut Vec<Candidate>,
) -> Cut {
    bins.clear();
    bins.resize(1 << BIN_BITS, 0.0);
    for (&logit, token) in row.iter().zip(0..) {
        if above.keeps(token, logit) {
            bins[bin(logit)] += weight(logit, max, scale);
        }
    }
    let mut sum = 0.0;
    let Some(edge) = (0..bins.len()).rev().find(|&bin| {
        let reached = sum + bins[bin] >= goal;
        sum += if reached { 0.0 } else { bins[bin] };
        reached
    }) else {
        return above;
    };
    candidates.clear();
    candidates.extend(
        (0..)
            .zip(row)
            .map(|(token, &logit)| (token, logit))
            .filter(|&(token, logit)| bin(logit) == edge && above.keeps(token, logit)),
    );
    candidates.sort_unstable_by(order);
    cut_mass(candidates, max, scale, goal - sum);
    candidates.last().map_or(above, |&(token, logit)| Cut { logit, token })
}

const BIN_BITS: u32 = 14;

/// Bins in the order of the numbers.
fn bin(logit: f32) -> usize {
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    (ordered >> (32 - BIN_BITS)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::rng::uniform;
    use proptest::prelude::*;

    /// The definition, by sorting everything: tokens that may be drawn, with their probabilities.
    fn reference(row: &[f32], filters: Filters) -> Vec<(u32, f64)> {
        let mut all: Vec<Candidate> = (0..).zip(row.iter().copied()).filter(|c| c.1 > f32::NEG_INFINITY).collect();
        all.sort_by(order);
        let max = all[0].1;
        let probability = |logit: f32| (f64::from(logit - max) / f64::from(filters.temperature)).exp();
        all.retain(|&(_, logit)| probability(logit) >= f64::from(filters.min_p) * 0.999_999);
        if filters.top_k > 0 {
            all.truncate(filters.top_k as usize);
        }
        let total: f64 = all.iter().map(|c| probability(c.1)).sum();
        let (mut kept, mut sum) = (Vec::new(), 0.0);
        for (token, logit) in all {
            if !kept.is_empty() && sum >= f64::from(filters.top_p) * total - 1e-6 * total {
                break;
            }
            sum += probability(logit);
            kept.push((token, probability(logit)));
        }
        kept.iter().map(|&(token, p)| (token, p / sum)).collect()
    }

    fn row(len: usize, spread: f32, seed: u64) -> Vec<f32> {
        #[expect(clippy::cast_possible_truncation, reason = "test data")]
        (0..len as u64).map(|i| (uniform(seed, 0, i) as f32 - 0.5) * spread).collect()
    }

    #[test]
    fn the_draw_follows_the_definition() {
        let mut buffers = Buffers::default();
        let cases = [
            Filters { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 },
            Filters { temperature: 0.7, top_p: 0.8, top_k: 0, min_p: 0.0 },
            Filters { temperature: 1.3, top_p: 0.9, top_k: 20, min_p: 0.0 },
            Filters { temperature: 1.0, top_p: 1.0, top_k: 5, min_p: 0.0 },
            Filters { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.3 },
            Filters { temperature: 0.5, top_p: 0.95, top_k: 50, min_p: 0.05 },
        ];
        for filters in cases {
            let mut row = row(300, 8.0, 5);
            row[17] = f32::NEG_INFINITY;
            let expected = reference(&row, filters);
            let draws = 40_000;
            let mut counts = vec![0u32; row.len()];
            for i in 0..draws {
                counts[filters.draw(&row, argmax(&row).unwrap(), uniform(1, 0, i), &mut buffers) as usize] += 1;
            }
            for &(token, probability) in &expected {
                let seen = f64::from(counts[token as usize]) / draws as f64;
                let sigma = (probability * (1.0 - probability) / draws as f64).sqrt();
                assert!(
                    (seen - probability).abs() < 5.0 * sigma + 1e-4,
                    "{filters:?} {token}: {seen} for {probability}"
                );
                counts[token as usize] = 0;
            }
            assert_eq!(counts.iter().sum::<u32>(), 0, "{filters:?} drew a token that is filtered out");
        }
    }

    #[test]
    fn a_flat_row_is_cut_where_the_definition_cuts_it() {
        let row = row(20_000, 0.5, 6);
        let filters = Filters { temperature: 1.0, top_p: 0.9, top_k: 0, min_p: 0.0 };
        let expected: std::collections::HashSet<u32> = reference(&row, filters).iter().map(|c| c.0).collect();
        let mut buffers = Buffers::default();
        let mut outside = 0;
        for i in 0..2_000 {
            outside += u32::from(!expected.contains(&filters.draw(
                &row,
                argmax(&row).unwrap(),
                uniform(1, 0, i),
                &mut buffers,
            )));
        }
        // One token at the edge may fall either way by rounding.
        assert!(outside <= 1, "{outside} draws outside of top-p");
    }

    #[test]
    fn the_ends_of_the_unit_interval_draw_a_token_that_may_be_drawn() {
        let mut row = row(5_000, 4.0, 7);
        row[0] = f32::NEG_INFINITY;
        row[4_999] = f32::NEG_INFINITY;
        let mut buffers = Buffers::default();
        for (top_p, top_k) in [(1.0, 0), (0.999, 0), (1.0, 3), (1e-6, 0)] {
            let filters = Filters { temperature: 1.0, top_p, top_k, min_p: 0.0 };
            for uniform in [0.0, 1.0 - f64::EPSILON / 2.0] {
                let token = filters.draw(&row, argmax(&row).unwrap(), uniform, &mut buffers);
                assert!(token != 0 && token != 4_999);
            }
        }
    }

    proptest! {
        #[test]
        fn argmax_and_rank_agree_with_their_definitions(values in proptest::collection::vec(-20i8..20, 1..300)) {
            let mut row: Vec<f32> = values.iter().map(|&v| f32::from(v)).collect();
            row[0] = f32::NEG_INFINITY;
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = row.iter().position(|&v| v == best && best > f32::NEG_INFINITY);
            prop_assert_eq!(argmax(&row).map(|(token, _)| token as usize), first);
            for logit in [best, 0.0] {
                prop_assert_eq!(rank(&row, logit) as usize, row.iter().filter(|&&v| v >= logit).count());
            }
        }

        #[test]
        fn exp_is_precise(x in -87f32..=0.0) {
            let exact = f64::from(x).exp();
            prop_assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2e-7);
        }
    }
}
