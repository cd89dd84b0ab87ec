//! Between the engine's types and those of the worker protocol. They mirror each other; the engine knows no serde.

use ernie_engine as engine;
use ernie_engine::params;
use ernie_proto::ids::RequestId;
use ernie_proto::worker as wire;

pub(super) fn request(submit: wire::Submit) -> params::EngineRequest {
    let wire::Submit { request, prompt, choices, sampling, priority, cache_salt } = submit;
    params::EngineRequest {
        id: params::RequestId(request.0),
        prompt,
        choices: choices
            .into_iter()
            .map(|wire::ChoiceSoFar { generated, finished }| params::ChoiceSoFar { generated, finished })
            .collect(),
        sampling: self::sampling(sampling),
        priority,
        cache_salt,
    }
}

fn sampling(sampling: wire::SamplingParams) -> params::SamplingParams {
    let wire::SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        logit_bias,
        allowed_token_ids,
        bad_words,
        eos_token_ids,
        ignore_eos,
        stop_token_ids,
        min_tokens,
        max_tokens,
        logprobs,
        prompt_logprobs,
        grammar,
        repetition_detection,
    } = sampling;
    params::SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        logit_bias,
        allowed_token_ids,
        bad_words,
        eos_token_ids,
        ignore_eos,
        stop_token_ids,
        min_tokens,
        max_tokens,
        logprobs,
        prompt_logprobs,
        grammar: grammar.map(|grammar| match grammar {
            wire::Grammar::JsonSchema(text) => params::Grammar::JsonSchema(text),
            wire::Grammar::Regex(text) => params::Grammar::Regex(text),
            wire::Grammar::Lark(text) => params::Grammar::Lark(text),
        }),
        repetition_detection: repetition_detection.map(
            |wire::RepetitionDetection { min_pattern, max_pattern, min_count }| params::RepetitionDetection {
                min_pattern,
                max_pattern,
                min_count,
            },
        ),
    }
}

/// What a step brought, moved out of `outputs` (its vectors are refilled by the next step).
pub(super) fn report(outputs: &mut engine::StepOutputs, stats: wire::StepStats) -> wire::StepReport {
    wire::StepReport {
        step: outputs.step,
        started: outputs
            .started
            .drain(..)
            .map(|s| wire::Started { request: id(s.request), cached_tokens: s.cached_tokens })
            .collect(),
        outputs: outputs
            .outputs
            .drain(..)
            .map(|output| wire::SequenceOutput {
                request: id(output.request),
                choice: output.choice,
                token: output.token,
                logprobs: output.logprobs.map(logprobs),
                finish: output.finish.map(finish),
            })
            .collect(),
        prompt_logprobs: outputs
            .prompt_logprobs
            .drain(..)
            .map(|given| wire::PromptLogprobs {
                request: id(given.request),
                tokens: given.tokens.into_iter().map(|token| token.map(logprobs)).collect(),
            })
            .collect(),
        failed: outputs.failed.drain(..).map(|(request, reason)| (id(request), reason)).collect(),
        stats,
    }
}

pub(super) fn stats(stats: &engine::EngineStats) -> wire::StepStats {
    wire::StepStats {
        running: stats.running,
        waiting: stats.waiting,
        swapped: stats.preempted,
        blocks_total: stats.blocks_total,
        blocks_free: stats.blocks_free,
        blocks_cached: stats.blocks_cached,
        preemptions: stats.preemptions,
        prefix_queries_tokens: stats.prefix_queries_tokens,
        prefix_hits_tokens: stats.prefix_hits_tokens,
        prompt_tokens: stats.prompt_tokens,
        generated_tokens: stats.generated_tokens,
        swap_blocks_total: stats.swap_blocks_total,
        swap_blocks_used: stats.swap_blocks_used,
        swapped_out_blocks: stats.swapped_out_blocks,
        swapped_in_blocks: stats.swapped_in_blocks,
        nan_sequences: stats.nan_sequences,
        ..wire::StepStats::default()
    }
}

fn id(request: params::RequestId) -> RequestId {
    RequestId(request.0)
}

fn logprobs(logprobs: engine::TokenLogprobs) -> wire::TokenLogprobs {
    let engine::TokenLogprobs { logprob, rank, top } = logprobs;
    wire::TokenLogprobs { logprob, rank, top }
}

fn finish(finish: engine::FinishReason) -> wire::FinishReason {
    match finish {
        engine::FinishReason::Eos => wire::FinishReason::Eos,
        engine::FinishReason::StopToken => wire::FinishReason::StopToken,
        engine::FinishReason::Length => wire::FinishReason::Length,
        engine::FinishReason::Repetition => wire::FinishReason::Repetition,
        engine::FinishReason::Error => wire::FinishReason::Error,
    }
}
