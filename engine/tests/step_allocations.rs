//! Steps of running answers allocate nothing: the engine keeps and uses its memory again. Alone in its binary, because the
//! counting allocator counts every thread.

mod counting;

use counting::ALLOCATIONS;
use ernie_engine::params::{ChoiceSoFar, EngineRequest, RequestId, SamplingParams};
use ernie_engine::runner::RunnerLimits;
use ernie_engine::runner::mirror::MirrorRunner;
use ernie_engine::{Engine, EngineConfig, StepOutputs};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn a_step_of_running_answers_allocates_nothing() {
    let limits = RunnerLimits {
        vocab_size: 5000,
        block_size: 16,
        num_blocks: 400,
        max_num_batched_tokens: 512,
        max_num_seqs: 32,
        max_model_len: 1024,
    };
    let mut engine = Engine::new(EngineConfig::default(), MirrorRunner::new(limits));
    let plain = SamplingParams { max_tokens: 300, ..SamplingParams::default() };
    let drawn = SamplingParams { temperature: 0.8, top_p: 0.8, top_k: 50, ..plain.clone() };
    let open = SamplingParams { temperature: 1.0, top_p: 0.9, ..plain.clone() };
    let penalised = SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, min_tokens: 200, ..open.clone() };
    for (id, sampling) in (0..).zip([plain, drawn, open, penalised].into_iter().cycle().take(16)) {
        let request = EngineRequest {
            id: RequestId(id),
            prompt: Arc::new((0..40).map(|i| (i * 17 + u32::try_from(id).unwrap() * 5) % 5000).collect()),
            choices: vec![ChoiceSoFar::default(); if id == 0 { 2 } else { 1 }],
            sampling,
            priority: 0,
            cache_salt: 0,
            owner: 0,
        };
        engine.add(request).unwrap();
    }
    let mut out = StepOutputs::default();
    for _ in 0..40 {
        engine.step(&mut out).unwrap();
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..200 {
        engine.step(&mut out).unwrap();
        assert_eq!(out.outputs.len(), 17);
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "allocations in 200 steps");
}
