//! What a step brings: the engine's side of `ernie_proto::worker::StepReport`, and its figures.

use crate::kv::disk_tier::DiskStats;
use crate::params::RequestId;

/// Everything one step brought. Reused between steps: `Engine::step` empties it first and keeps the memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutputs {
    /// Counts steps since the engine was built.
    pub step: u64,
    /// Requests that left the waiting queue for the first time in this step.
    pub started: Vec<Started>,
    /// Requests of whose prompts a part was computed in this step, or of an answer that had to be computed again.
    pub prompts: Vec<RequestId>,
    pub outputs: Vec<SequenceOutput>,
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Requests that the engine gives up, with the reason.
    pub failed: Vec<(RequestId, String)>,
    /// Tokens computed in this step.
    pub tokens: u32,
    /// Of these, tokens that were not the one new token of a running answer.
    pub prefill_tokens: u32,
    /// Sequences in this step. 0: there was nothing that could run.
    pub sequences: u32,
}

impl StepOutputs {
    /// Empties it and keeps the memory.
    pub fn clear(&mut self) {
        let Self { step: _, started, prompts, outputs, prompt_logprobs, failed, tokens, prefill_tokens, sequences } =
            self;
        started.clear();
        prompts.clear();
        outputs.clear();
        prompt_logprobs.clear();
        failed.clear();
        (*tokens, *prefill_tokens, *sequences) = (0, 0, 0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    pub request: RequestId,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
}

/// One new token of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOutput {
    pub request: RequestId,
    pub choice: u16,
    /// [`NO_TOKEN`] when `finish` is [`FinishReason::Error`]: nothing was chosen.
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<FinishReason>,
}

/// Stands for the token of an output that ended without one.
pub const NO_TOKEN: u32 = u32::MAX;

#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// Of the chosen token among all, 1 is the most likely.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Given once per request, when its prompt is computed; the first entry is `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLogprobs {
    pub request: RequestId,
    pub tokens: Vec<Option<TokenLogprobs>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token; it is the last token of the output.
    Eos,
    /// One of `stop_token_ids`; it is the last token of the output.
    StopToken,
    /// `max_tokens` or the model's limit.
    Length,
    /// `repetition_detection`.
    Repetition,
    /// The grammar allows nothing more, or a logit was not finite. There is no token.
    Error,
}

/// Who holds the KV blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvReport {
    pub blocks_total: u32,
    /// Blocks that no sequence refers to and that hold nothing worth keeping.
    pub blocks_empty: u32,
    /// Free, but still holding a prefix that may be hit.
    pub blocks_cached: u32,
    /// Blocks that sequences refer to.
    pub blocks_used: u32,
    /// Of these, blocks that several refer to.
    pub blocks_shared: u32,
    pub swap_blocks_total: u32,
    pub swap_blocks_used: u32,
    /// Of these, copies of preempted sequences.
    pub swap_blocks_preempted: u32,
    /// The file below the swap space.
    pub disk: DiskStats,
    /// All sequences that have not ended.
    pub sequences: Vec<KvSequence>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSequence {
    pub request: RequestId,
    pub choice: u16,
    pub owner: u64,
    pub state: KvState,
    pub blocks: u32,
    /// Of prompt and answer, as far as known.
    pub tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvState {
    Waiting,
    Running,
    Preempted,
}

/// Figures of the engine; counters are since it was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub steps: u64,
    pub running: u32,
    /// Sequences that wait for their first turn.
    pub waiting: u32,
    /// Sequences that were preempted and wait for their next turn.
    pub preempted: u32,
    pub blocks_total: u32,
    /// Blocks that no sequence refers to, cached ones included.
    pub blocks_free: u32,
    /// Free, but still holding a prefix that may be hit.
    pub blocks_cached: u32,
    pub preemptions: u64,
    pub prefix_queries_tokens: u64,
    pub prefix_hits_tokens: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub swap_blocks_total: u32,
    pub swap_blocks_used: u32,
    pub swapped_out_blocks: u64,
    pub swapped_in_blocks: u64,
    /// The file below the swap space.
    pub disk: DiskStats,
    /// Choices that ended because a logit was not finite.
    pub nan_sequences: u64,
}
