//! What a request asks of the engine. The worker makes these from the wire types of `proto`.

use std::sync::Arc;

/// Names a request for its whole life; the engine never sees it twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// How tokens are chosen and when a choice ends. Field meanings as in `ernie_proto::worker::SamplingParams`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub seed: u64,
    pub logit_bias: Vec<(u32, f32)>,
    pub allowed_token_ids: Vec<u32>,
    pub bad_words: Vec<Vec<u32>>,
    pub eos_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
    pub min_tokens: u32,
    pub max_tokens: u32,
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    pub grammar: Option<Grammar>,
    pub repetition_detection: Option<RepetitionDetection>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            max_tokens: 16,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
            repetition_detection: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grammar {
    JsonSchema(String),
    Regex(String),
    Lark(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepetitionDetection {
    pub min_pattern: u32,
    pub max_pattern: u32,
    pub min_count: u32,
}

/// A request as the engine takes it. `choices` holds what each choice has generated so far (empty when new).
#[derive(Debug, Clone)]
pub struct EngineRequest {
    pub id: RequestId,
    pub prompt: Arc<Vec<u32>>,
    pub choices: Vec<ChoiceSoFar>,
    pub sampling: SamplingParams,
    /// Lower is earlier; ties go by arrival.
    pub priority: i32,
    pub cache_salt: u64,
    /// Whose request it is; owners get equal shares while they compete.
    pub owner: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChoiceSoFar {
    pub generated: Vec<u32>,
    pub finished: bool,
}
