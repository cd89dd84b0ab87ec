//! Prompts of a wanted length, each new to the server's prefix cache unless a shared prefix is asked for.

use super::LoadPlan;
use super::stream::Target;
use anyhow::{Result, ensure};
use serde_json::{Value, json};

const WORDS: &[&str] = &[
    "river", "light", "stone", "garden", "paper", "window", "morning", "table", "music", "letter", "bridge", "winter",
    "market", "forest", "island", "number", "silver", "summer", "button", "doctor", "engine", "farmer", "hammer",
    "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "school", "ticket", "valley", "wagon",
    "yellow", "basket", "candle",
];

/// Ids used for prompts of random token ids: beyond special tokens and byte pieces in every ERNIE vocabulary.
const TOKEN_IDS: std::ops::Range<u64> = 1_000..90_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PromptKind {
    /// Random words; the length in tokens is measured first.
    Words,
    /// Random token ids (completions only): exact lengths, no tokeniser in between.
    TokenIds,
}

#[derive(Debug)]
pub(super) struct Prompts {
    kind: PromptKind,
    tokens: usize,
    spread: f64,
    shared: usize,
    seed: u64,
    words_per_token: f64,
    overhead_tokens: f64,
}

impl Prompts {
    pub(super) fn new(plan: &LoadPlan) -> Self {
        Self {
            kind: plan.prompt_kind,
            tokens: plan.prompt_tokens,
            spread: plan.prompt_spread,
            shared: plan.shared_prefix_tokens.min(plan.prompt_tokens),
            seed: plan.seed,
            words_per_token: 1.0,
            overhead_tokens: 0.0,
        }
    }

    pub(super) fn kind(&self) -> PromptKind {
        self.kind
    }

    /// The `prompt` of request `index`: text or an array of ids.
    pub(super) fn make(&self, index: u64) -> Value {
        self.sized(self.shared, index)
    }

    /// A prompt as long as the others that begins as none of them: nothing of theirs is in a cache afterwards.
    pub(super) fn warm_up(&self) -> Value {
        // u64::MAX itself would draw what the shared part is made of.
        self.sized(0, u64::MAX - 3)
    }

    fn sized(&self, shared_tokens: usize, index: u64) -> Value {
        let scale = if self.kind == PromptKind::Words { self.words_per_token } else { 1.0 };
        // Evenly spread around the mean; a seed of its own, so that the words do not depend on it.
        let draw = SplitMix(self.seed ^ !index.wrapping_mul(0x2545_f491_4f6c_dd1d)).next() as f64 / u64::MAX as f64;
        let tokens = self.tokens as f64 * (1.0 + self.spread * (2.0 * draw - 1.0));
        let total = (((tokens - self.overhead_tokens) * scale).round() as usize).max(1);
        let shared = ((shared_tokens as f64 * scale).round() as usize).min(total);
        self.units(total, shared, index)
    }

    /// Words of about so many tokens, the same for the same index.
    pub(super) fn words(&self, tokens: usize, index: u64) -> String {
        let total = ((tokens as f64 * self.words_per_token).round() as usize).max(1);
        self.units(total, 0, index).as_str().unwrap_or_default().to_owned()
    }

    fn units(&self, total: usize, shared: usize, index: u64) -> Value {
        let mut common = SplitMix(self.seed);
        let mut own = SplitMix(self.seed ^ index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let draws = (0..total).map(|i| if i < shared { common.next() } else { own.next() });
        match self.kind {
            PromptKind::Words => {
                let words: Vec<&str> = draws.map(|d| WORDS[(d % WORDS.len() as u64) as usize]).collect();
                json!(words.join(" "))
            }
            PromptKind::TokenIds => {
                let span = TOKEN_IDS.end - TOKEN_IDS.start;
                json!(draws.map(|d| TOKEN_IDS.start + d % span).collect::<Vec<u64>>())
            }
        }
    }

    /// Learns how many words make a token here, from the usage of two short requests.
    pub(super) async fn calibrate(&mut self, target: &Target) -> Result<()> {
        let (short, long) = (16, 144);
        let few = target.once(self.units(short, 0, u64::MAX - 1), 1).await?.prompt_tokens as f64;
        let many = target.once(self.units(long, 0, u64::MAX - 2), 1).await?.prompt_tokens as f64;
        ensure!(many > few, "the server counts {many} tokens for {long} words and {few} for {short}");
        let tokens_per_word = (many - few) / (long - short) as f64;
        self.words_per_token = 1.0 / tokens_per_word;
        self.overhead_tokens = (few - tokens_per_word * short as f64).max(0.0);
        Ok(())
    }
}

/// Small, seedable, the same everywhere; prompts need no better numbers.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn plan(shared: usize) -> LoadPlan {
        LoadPlan {
            url: "http://127.0.0.1:8000".into(),
            api_key: None,
            model: None,
            users: 1,
            requests: 1,
            prompt_tokens: 32,
            prompt_spread: 0.0,
            output_tokens: 4,
            shared_prefix_tokens: shared,
            prompt_kind: PromptKind::TokenIds,
            chat: false,
            seed: 5,
            ramp: Duration::ZERO,
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn prompts_share_exactly_the_prefix_asked_for() {
        let prompts = Prompts::new(&plan(20));
        let (a, b) = (prompts.make(0), prompts.make(1));
        let (a, b) = (a.as_array().expect("ids"), b.as_array().expect("ids"));
        assert_eq!((a.len(), b.len()), (32, 32));
        assert_eq!(a[..20], b[..20]);
        assert_ne!(a[20..], b[20..]);
    }

    #[test]
    fn spread_prompts_keep_their_mean() {
        let prompts = Prompts::new(&LoadPlan { prompt_tokens: 320, prompt_spread: 0.5, ..plan(0) });
        let lengths: Vec<usize> = (0..400).map(|i| prompts.make(i).as_array().expect("ids").len()).collect();
        let mean = lengths.iter().sum::<usize>() as f64 / 400.0;
        assert!((310.0..330.0).contains(&mean), "{mean}");
        assert!(lengths.iter().any(|l| *l < 180) && lengths.iter().any(|l| *l > 460));
    }

    #[test]
    fn a_seed_gives_the_same_prompts_again() {
        assert_eq!(Prompts::new(&plan(0)).make(7), Prompts::new(&plan(0)).make(7));
    }
}
