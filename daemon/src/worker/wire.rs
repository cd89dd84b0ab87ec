//! Between the engine's types and those of the worker protocol. They mirror each other; the engine knows no serde.

use ernie_engine as engine;
use ernie_engine::params;
use ernie_proto::ids::RequestId;
use ernie_proto::worker as wire;

pub(super) fn request(submit: wire::Submit) -> params::EngineRequest {
    let wire::Submit { request, prompt, choices, sampling, priority, cache_salt, owner } = submit;
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
        owner,
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
        prompts: outputs.prompts.drain(..).map(id).collect(),
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

/// Who holds the KV blocks, cut down to the largest.
pub(super) fn kv(report: engine::KvReport) -> wire::KvReport {
    let mut owners: Vec<wire::KvOwner> = Vec::new();
    for sequence in &report.sequences {
        let place = owners.iter().position(|o| o.owner == sequence.owner).unwrap_or_else(|| {
            owners.push(wire::KvOwner { owner: sequence.owner, sequences: 0, blocks: 0 });
            owners.len() - 1
        });
        owners[place].sequences += 1;
        owners[place].blocks += sequence.blocks;
    }
    owners.sort_by_key(|o| std::cmp::Reverse((o.blocks, o.sequences)));
    owners.truncate(wire::KV_SEQUENCES_MAX);
    let mut sequences: Vec<wire::KvSequence> = report
        .sequences
        .iter()
        .map(|s| wire::KvSequence {
            request: id(s.request),
            choice: s.choice,
            owner: s.owner,
            state: match s.state {
                engine::KvState::Waiting => wire::KvState::Waiting,
                engine::KvState::Running => wire::KvState::Running,
                engine::KvState::Preempted => wire::KvState::Preempted,
            },
            blocks: s.blocks,
            tokens: s.tokens,
        })
        .collect();
    sequences.sort_by_key(|s| std::cmp::Reverse((s.blocks, s.tokens)));
    sequences.truncate(wire::KV_SEQUENCES_MAX);
    wire::KvReport {
        blocks_total: report.blocks_total,
        blocks_empty: report.blocks_empty,
        blocks_cached: report.blocks_cached,
        blocks_used: report.blocks_used,
        blocks_shared: report.blocks_shared,
        swap_blocks_total: report.swap_blocks_total,
        swap_blocks_used: report.swap_blocks_used,
        swap_blocks_preempted: report.swap_blocks_preempted,
        disk: disk(&report.disk),
        sequences,
        owners,
        ..wire::KvReport::default()
    }
}

fn disk(stats: &engine::kv::disk_tier::DiskStats) -> wire::DiskStats {
    wire::DiskStats {
        blocks_total: stats.blocks_total,
        blocks_used: stats.blocks_used,
        blocks_restored: stats.blocks_restored,
        blocks_corrupt: stats.blocks_corrupt,
        reads: stats.reads,
        read_seconds: stats.read_time.as_secs_f64(),
        writes: stats.writes,
        write_seconds: stats.write_time.as_secs_f64(),
        writes_skipped: stats.writes_skipped,
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
        disk: disk(&stats.disk),
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
