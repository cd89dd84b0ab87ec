//! The five properties, on the mirror runner, under random arrivals, aborts, lengths, choices, priorities, shared prefixes,
//! tiny pools and tiny swap spaces:
//!
//! 1. Free and referenced blocks are all blocks.
//! 2. No budget is ever exceeded (the mirror refuses such a batch).
//! 3. Every sequence ends, and no step is idle while something waits.
//! 4. The output equals the same request's alone.
//! 5. An abort leaks nothing.
//!
//! And a request that goes on from what another engine generated ends as the undisturbed one.
//!
//! `PROPTEST_CASES` raises the number of cases, `PROPTEST_RNG_SEED` repeats a run.

use ernie_engine::kv::disk_tier::{DiskConfig, DiskTier};
use ernie_engine::params::{ChoiceSoFar, EngineRequest, RepetitionDetection, RequestId, SamplingParams};
use ernie_engine::runner::RunnerLimits;
use ernie_engine::runner::mirror::{FAILED_ON_PURPOSE, Faults, MirrorRunner};
use ernie_engine::{
    Engine, EngineConfig, EngineStats, FinishReason, SequenceOutput, StepOutputs, SwapConfig, SwapControl, SwapPolicy,
    TokenLogprobs,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

const VOCABULARY: u32 = 40;
const BLOCK: u32 = 4;
const LONGEST: u32 = 48;

/// What came of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<Option<TokenLogprobs>>,
    finish: Option<FinishReason>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Answers {
    choices: BTreeMap<u16, Answer>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
}

impl Answers {
    fn push(&mut self, output: &SequenceOutput) {
        let answer = self.choices.entry(output.choice).or_default();
        assert_eq!(answer.finish, None, "nothing comes after the end");
        if output.finish != Some(FinishReason::Error) {
            answer.tokens.push(output.token);
            answer.logprobs.push(output.logprobs.clone());
        }
        answer.finish = output.finish;
    }
}

/// A request, when it comes, and what happens to it.
#[derive(Debug, Clone)]
struct Visit {
    request: EngineRequest,
    arrives: u32,
    /// Steps after its arrival.
    aborted: Option<u32>,
    /// How much of each choice another engine has done before, in parts of 8.
    resumed: Option<[u8; 4]>,
}

#[derive(Debug, Clone)]
struct World {
    blocks: u32,
    tokens: u32,
    sequences: u32,
    config: EngineConfig,
    faults: Faults,
    /// Blocks in a file below the swap space; its bytes are damaged now and then.
    disk: Option<u8>,
    /// What an operator, or the measured costs, change while it runs: so many steps after the one before.
    switches: Vec<(u32, SwapControl)>,
    visits: Vec<Visit>,
}

fn limits(world: &World) -> RunnerLimits {
    RunnerLimits {
        vocab_size: VOCABULARY,
        block_size: BLOCK,
        num_blocks: world.blocks,
        max_num_batched_tokens: world.tokens,
        max_num_seqs: world.sequences,
        max_model_len: LONGEST.min(world.blocks * BLOCK),
    }
}

/// The same request with the engine to itself, and room for everything.
fn alone(request: &EngineRequest, world: &World) -> Answers {
    let roomy = RunnerLimits { num_blocks: 256, max_num_batched_tokens: 512, max_num_seqs: 256, ..limits(world) };
    let faults = Faults { fail_every: None, ..world.faults };
    let mut engine = Engine::new(EngineConfig::default(), MirrorRunner::with_faults(roomy, faults));
    engine.add(request.clone()).unwrap();
    let mut answers = Answers::default();
    let mut out = StepOutputs::default();
    while engine.has_work() {
        engine.step(&mut out).unwrap();
        out.outputs.iter().for_each(|output| answers.push(output));
        answers.prompt_logprobs = answers.prompt_logprobs.or(out.prompt_logprobs.pop().map(|p| p.tokens));
    }
    answers
}

/// The request as it would be submitted after its first worker died, and what is left to come; `None` if nothing is.
fn resumed(request: &EngineRequest, whole: &Answers, parts: [u8; 4]) -> Option<(EngineRequest, Answers)> {
    let mut request = request.clone();
    let mut rest = whole.clone();
    for ((number, so_far), part) in (0u16..).zip(&mut request.choices).zip(parts) {
        let answer = rest.choices.get_mut(&number).unwrap();
        let cut = answer.tokens.len() * usize::from(part) / 8;
        let finished = part == 8 || (cut == answer.tokens.len() && cut > 0);
        if finished {
            *so_far = ChoiceSoFar { generated: answer.tokens.clone(), finished: true };
            rest.choices.remove(&number);
            continue;
        }
        *so_far = ChoiceSoFar { generated: answer.tokens[..cut].to_vec(), finished: false };
        answer.tokens.drain(..cut);
        answer.logprobs.drain(..cut);
    }
    if request.choices.iter().any(|choice| choice.finished || !choice.generated.is_empty()) {
        rest.prompt_logprobs = None;
    }
    (!rest.choices.is_empty()).then_some((request, rest))
}

/// Runs a world and holds it to the properties.
fn run(world: &World) -> Result<EngineStats, TestCaseError> {
    let mut engine = Engine::new(world.config.clone(), MirrorRunner::with_faults(limits(world), world.faults));
    let folder = world.disk.map(|slots| {
        let folder = tempfile::tempdir().unwrap();
        let config = DiskConfig {
            path: folder.path().join("kv"),
            bytes: u64::from(slots) * 4096,
            identity: 7,
            now: || Duration::ZERO,
        };
        engine.attach_disk(DiskTier::open(&config, BLOCK as usize * 8, BLOCK).unwrap());
        folder
    });
    let mut visits = Vec::new();
    for visit in &world.visits {
        if visit.request.prompt.len() + 1 > engine.max_len() as usize {
            continue;
        }
        let whole = alone(&visit.request, world);
        let (request, expected) = match visit.resumed {
            None => (visit.request.clone(), whole),
            Some(parts) => match resumed(&visit.request, &whole, parts) {
                None => continue,
                Some(pair) => pair,
            },
        };
        visits.push((visit, request, expected));
    }
    let mut answers: BTreeMap<RequestId, Answers> = BTreeMap::new();
    let mut out = StepOutputs::default();
    let last_arrival = visits.iter().map(|(visit, ..)| visit.arrives).max().unwrap_or(0);
    // Everything one after the other, one token a step, eight times over, would end before this.
    let work: usize = visits.iter().map(|(_, r, _)| r.choices.len() * 2 * LONGEST as usize).sum();
    let bound = last_arrival + 8 * u32::try_from(work).unwrap() + 100;
    let mut switches = world.switches.iter().scan(0, |at, &(after, control)| {
        *at += after;
        Some((*at, control))
    });
    let mut switches = switches.by_ref().peekable();
    let mut step = 0;
    while step <= last_arrival || engine.has_work() {
        for (visit, request, expected) in &visits {
            if visit.arrives == step {
                engine.add(request.clone()).unwrap();
            }
            if visit.aborted.is_some_and(|after| visit.arrives + after == step) {
                let ended = |answers: &Answers| answers.choices.values().filter(|c| c.finish.is_some()).count();
                let done = answers.get(&request.id).map_or(0, ended) == expected.choices.len();
                prop_assert_eq!(engine.abort(request.id), !done);
                prop_assert!(!engine.abort(request.id));
            }
        }
        if switches.peek().is_some_and(|(at, _)| *at <= step)
            && let Some((_, control)) = switches.next()
        {
            engine.set_swap(control);
        }
        if let Some(folder) = folder.as_ref().filter(|_| step % 37 == 11) {
            flip(&folder.path().join("kv"), u64::from(step));
        }
        let busy = engine.has_work();
        match engine.step(&mut out) {
            Ok(()) => {
                prop_assert!(!busy || out.sequences > 0, "an idle step while something waits: {:?}", engine.stats())
            }
            Err(failure) => prop_assert!(failure.to_string().contains(FAILED_ON_PURPOSE), "{failure}"),
        }
        engine.check().map_err(TestCaseError::fail)?;
        for output in &out.outputs {
            answers.entry(output.request).or_default().push(output);
        }
        for given in out.prompt_logprobs.drain(..) {
            answers.entry(given.request).or_default().prompt_logprobs = Some(given.tokens);
        }
        prop_assert!(out.failed.is_empty());
        step += 1;
        prop_assert!(step < bound, "no end after {step} steps: {:?}", engine.stats());
    }
    let stats = engine.stats();
    prop_assert_eq!(stats.blocks_free, stats.blocks_total);
    for (visit, request, expected) in &visits {
        if visit.aborted.is_none() {
            prop_assert_eq!(answers.get(&request.id), Some(expected), "request {:?}", request);
        } else if let Some(partial) = answers.get(&request.id) {
            for (choice, answer) in &partial.choices {
                prop_assert!(expected.choices[choice].tokens.starts_with(&answer.tokens));
            }
        }
    }
    engine.reset_prefix_cache();
    let after = engine.stats();
    prop_assert_eq!((after.blocks_cached, after.swap_blocks_used), (0, 0));
    engine.check().map_err(TestCaseError::fail)?;
    Ok(stats)
}

/// Damages a byte of a file, somewhere.
fn flip(path: &std::path::Path, seed: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let at = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % file.metadata().unwrap().len().max(1);
    let mut byte = [0];
    if file.read_exact_at(&mut byte, at).is_ok() {
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let draw = prop_oneof![
        2 => Just((0.0, 1.0, 0, 0.0)),
        2 => Just((1.0, 1.0, 0, 0.0)),
        1 => Just((0.8, 0.8, 0, 0.0)),
        1 => Just((1.5, 0.95, 10, 0.05)),
    ];
    let penalties = prop_oneof![4 => Just((1.0, 0.0, 0.0)), 1 => Just((1.2, 0.3, 0.2))];
    let ends = (proptest::collection::vec(0..VOCABULARY, 0..3), 0..6u32, 1..24u32, any::<bool>());
    let asked = (proptest::option::weighted(0.2, 0..4u32), proptest::option::weighted(0.1, 0..3u32));
    let circles =
        proptest::option::weighted(0.1, Just(RepetitionDetection { min_pattern: 1, max_pattern: 2, min_count: 2 }));
    (draw, penalties, ends, asked, circles, any::<u64>()).prop_map(
        |((temperature, top_p, top_k, min_p), penalties, (eos, min, max, ignore_eos), asked, circles, seed)| {
            SamplingParams {
                temperature,
                top_p,
                top_k,
                min_p,
                repetition_penalty: penalties.0,
                presence_penalty: penalties.1,
                frequency_penalty: penalties.2,
                seed,
                bad_words: vec![vec![3], vec![5, 6]],
                eos_token_ids: eos,
                ignore_eos,
                min_tokens: min.min(max),
                max_tokens: max,
                logprobs: asked.0,
                prompt_logprobs: asked.1,
                repetition_detection: circles,
                ..SamplingParams::default()
            }
        },
    )
}

/// Prompts begin with one of three common texts, cut anywhere.
fn prompt() -> impl Strategy<Value = Vec<u32>> {
    (0..2u32, 0..32usize, proptest::collection::vec(0..VOCABULARY, 1..8)).prop_map(|(text, shared, own)| {
        let common = (0..).map(|i| (i * 7 + text * 13) % VOCABULARY);
        common.take(shared).chain(own).collect()
    })
}

fn visit() -> impl Strategy<Value = Visit> {
    let whose = (0..2u64, 0..3u64);
    let fate = (0..24u32, proptest::option::weighted(0.2, 0..30u32), proptest::option::weighted(0.2, any::<[u8; 4]>()));
    (prompt(), sampling(), 1..5usize, -1..2i32, whose, fate).prop_map(
        |(prompt, sampling, n, priority, (cache_salt, owner), (arrives, aborted, resumed))| Visit {
            request: EngineRequest {
                id: RequestId(0),
                prompt: Arc::new(prompt),
                choices: vec![ChoiceSoFar::default(); n],
                sampling,
                priority,
                cache_salt,
                owner,
            },
            arrives,
            aborted,
            resumed: resumed.map(|parts| parts.map(|part| part % 9)),
        },
    )
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let policy = prop_oneof![Just(SwapPolicy::Off), Just(SwapPolicy::OnPressure), Just(SwapPolicy::Always)];
    let turns = (any::<bool>(), prop_oneof![Just(0u64), 1..200u64]);
    (any::<bool>(), 1..20u32, 1..9u32, policy, 0..20u64, any::<u64>(), turns).prop_map(
        |(enable_prefix_caching, max_prefill_chunk, block_run, policy, slots, seed, turns)| EngineConfig {
            fair_share: turns.0,
            aging_tokens: turns.1,
            enable_prefix_caching,
            max_prefill_chunk,
            block_run,
            seed,
            swap: SwapConfig { control: SwapControl::of(policy), space_bytes: slots * u64::from(BLOCK) * 8 },
            ..EngineConfig::default()
        },
    )
}

fn control() -> impl Strategy<Value = SwapControl> {
    let policy = prop_oneof![Just(SwapPolicy::Off), Just(SwapPolicy::OnPressure), Just(SwapPolicy::Always)];
    (policy, any::<bool>(), any::<bool>(), 0.0..1.0f32, 0.2..1.2f32, 0.0..1.0f32).prop_map(
        |(policy, copies_pay, disk_pays, sequence_share, high_watermark, low_watermark)| SwapControl {
            policy,
            copies_pay,
            disk_pays,
            sequence_share,
            high_watermark,
            low_watermark,
        },
    )
}

fn world() -> impl Strategy<Value = World> {
    let faults = (proptest::option::weighted(0.1, 0..VOCABULARY), proptest::option::weighted(0.1, 40..80u64))
        .prop_map(|(not_finite_after, fail_every)| Faults { not_finite_after, fail_every });
    let sizes = (3..32u32, 1..48u32, 1..12u32);
    let switches = proptest::collection::vec((1..30u32, control()), 0..4);
    let disk = proptest::option::weighted(0.25, 0..12u8);
    (sizes, config(), faults, (switches, disk), proptest::collection::vec(visit(), 1..16)).prop_map(
        |((blocks, tokens, sequences), config, faults, (switches, disk), mut visits)| {
            for (visit, id) in visits.iter_mut().zip(0..) {
                visit.request.id = RequestId(id);
                // A bad logit in a prompt fails its request as a whole; `a_bad_logit_in_a_prompt_fails_the_request` has it.
                if faults.not_finite_after.is_some() {
                    visit.request.sampling.prompt_logprobs = None;
                }
            }
            World { blocks, tokens, sequences, config, faults, disk, switches, visits }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(400), max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_every_request_gets_the_answer_it_would_get_alone(world in world()) {
        run(&world)?;
    }
}

#[test]
fn the_worlds_are_hard_enough_to_mean_something() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut preemptions, mut swapped, mut hits, mut generated) = (0, 0, 0, 0);
    for _ in 0..200 {
        let stats = run(&world().new_tree(&mut runner).unwrap().current()).unwrap();
        preemptions += stats.preemptions;
        swapped += stats.swapped_in_blocks;
        hits += stats.prefix_hits_tokens;
        generated += stats.generated_tokens;
    }
    println!("{preemptions} preemptions, {swapped} blocks back, {hits} tokens from the cache, {generated} generated");
    assert!(preemptions > 300 && swapped > 200 && hits > 1_000 && generated > 10_000);
}

fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}
