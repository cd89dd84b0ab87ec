//! Stories of single steps on the mirror runner: who is computed when, what is computed once, who makes room.

use ernie_engine::kv::ChainHash;
use ernie_engine::params::{ChoiceSoFar, EngineRequest, Grammar, RequestId, SamplingParams};
use ernie_engine::runner::RunnerLimits;
use ernie_engine::runner::mirror::{Faults, MirrorRunner};
use ernie_engine::{AddError, Engine, EngineConfig, FinishReason, StepOutputs, SwapConfig, SwapControl, SwapPolicy};
use std::collections::BTreeMap;
use std::sync::Arc;

type Answers = BTreeMap<(u64, u16), (Vec<u32>, Option<FinishReason>)>;

fn limits() -> RunnerLimits {
    RunnerLimits {
        vocab_size: 300,
        block_size: 16,
        num_blocks: 256,
        max_num_batched_tokens: 512,
        max_num_seqs: 64,
        max_model_len: 1024,
    }
}

fn engine(config: EngineConfig, limits: RunnerLimits) -> Engine<MirrorRunner> {
    Engine::new(config, MirrorRunner::new(limits))
}

fn request(id: u64, prompt: Vec<u32>, max_tokens: u32) -> EngineRequest {
    EngineRequest {
        id: RequestId(id),
        prompt: Arc::new(prompt),
        choices: vec![ChoiceSoFar::default()],
        sampling: SamplingParams { max_tokens, ..SamplingParams::default() },
        priority: 0,
        cache_salt: 0,
        owner: 0,
    }
}

/// A text of its own for every `kind`.
fn text(kind: u32, len: usize) -> Vec<u32> {
    (0..).map(|i| (i * 11 + kind * 97) % 290).take(len).collect()
}

fn step(engine: &mut Engine<MirrorRunner>) -> StepOutputs {
    let mut out = StepOutputs::default();
    engine.step(&mut out).unwrap();
    engine.check().unwrap();
    out
}

fn finish(engine: &mut Engine<MirrorRunner>) -> Answers {
    let mut answers = Answers::new();
    let mut steps = 0;
    while engine.has_work() {
        for output in step(engine).outputs {
            let answer = answers.entry((output.request.0, output.choice)).or_default();
            if output.finish != Some(FinishReason::Error) {
                answer.0.push(output.token);
            }
            answer.1 = output.finish;
        }
        steps += 1;
        assert!(steps < 20_000, "no end: {:?}", engine.stats());
    }
    answers
}

#[test]
fn running_answers_get_a_token_in_every_step_while_a_long_prompt_is_computed() {
    let config = EngineConfig { max_prefill_chunk: 32, ..EngineConfig::default() };
    let mut engine = engine(config, limits());
    for id in 0..4 {
        engine.add(request(id, text(id as u32, 20), 100)).unwrap();
    }
    assert_eq!(step(&mut engine).tokens, 80, "without decodes the whole budget is used");
    engine.add(request(9, text(9, 600), 4)).unwrap();
    let mut steps = 0;
    loop {
        let out = step(&mut engine);
        for id in 0..4 {
            assert!(out.outputs.iter().any(|output| output.request == RequestId(id)));
        }
        assert!(out.prefill_tokens <= 32);
        steps += 1;
        if out.outputs.iter().any(|output| output.request == RequestId(9)) {
            break;
        }
    }
    assert_eq!(steps, 600usize.div_ceil(32));
}

#[test]
fn requests_wait_for_a_prefix_that_another_is_just_computing() {
    let config = EngineConfig { max_num_batched_tokens: 64, ..EngineConfig::default() };
    let mut engine = engine(config, limits());
    for id in 0..8 {
        let mut prompt = text(0, 300);
        prompt.extend(text(id as u32 + 1, 20));
        engine.add(request(id, prompt, 1)).unwrap();
    }
    let mut first = Vec::new();
    while engine.has_work() {
        first.extend(step(&mut engine).started.iter().map(|started| started.cached_tokens));
    }
    assert_eq!(first, [0, 300, 300, 300, 300, 300, 300, 300], "18 blocks, and 12 tokens of the one where they part");
    assert_eq!(engine.runner().tokens(), 320 + 7 * 20);
    let stats = engine.stats();
    assert_eq!((stats.prefix_queries_tokens, stats.prefix_hits_tokens), (8 * 320, 7 * 300));
}

#[test]
fn what_a_block_has_in_common_with_a_prompt_is_copied() {
    let prompt = |common: usize, kind: u32| [text(0, common), text(kind, 30)].concat();
    let run = |enable_prefix_caching: bool| {
        let mut engine = engine(EngineConfig { enable_prefix_caching, ..EngineConfig::default() }, limits());
        let mut cached = Vec::new();
        let mut answers = Vec::new();
        for (id, (common, kind)) in [(40, 1), (40, 2), (37, 3), (33, 4), (40, 5), (12, 6)].into_iter().enumerate() {
            engine.add(request(id as u64, prompt(common, kind), 20)).unwrap();
            cached.push(step(&mut engine).started[0].cached_tokens);
            answers.push(finish(&mut engine));
        }
        (cached, answers)
    };
    let (none, plain) = run(false);
    let (cached, answers) = run(true);
    assert_eq!(none, [0; 6]);
    // Of the third block the last one computed is known: one token in common with it is not worth a copy, nor are two.
    assert_eq!(cached, [0, 40, 37, 32, 32, 12]);
    assert_eq!(answers, plain);
}

#[test]
fn a_block_that_is_copied_from_stays_while_others_are_admitted() {
    // Room for two sequences of three blocks, and all of it holds something.
    let mut engine = engine(EngineConfig::default(), RunnerLimits { num_blocks: 7, ..limits() });
    engine.add(request(0, text(0, 48), 1)).unwrap();
    finish(&mut engine);
    engine.add(request(1, text(1, 48), 1)).unwrap();
    finish(&mut engine);
    engine.add(request(2, [text(0, 40), text(7, 6)].concat(), 1)).unwrap();
    engine.add(request(3, text(2, 48), 1)).unwrap();
    let answers = finish(&mut engine);
    let mut alone = self::engine(EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() }, limits());
    alone.add(request(2, [text(0, 40), text(7, 6)].concat(), 1)).unwrap();
    alone.add(request(3, text(2, 48), 1)).unwrap();
    assert_eq!(answers, finish(&mut alone));
}

#[test]
fn a_prefix_whose_computation_is_aborted_is_computed_by_who_waited_for_it() {
    let config = EngineConfig { max_num_batched_tokens: 32, ..EngineConfig::default() };
    let mut engine = engine(config, limits());
    engine.add(request(0, text(0, 200), 1)).unwrap();
    engine.add(request(1, text(0, 200), 1)).unwrap();
    step(&mut engine);
    assert_eq!(engine.stats().running, 1);
    assert!(engine.abort(RequestId(0)));
    assert_eq!(step(&mut engine).started[0].cached_tokens, 32);
    assert_eq!(finish(&mut engine).len(), 1);
}

#[test]
fn choices_share_one_computation_of_their_prompt() {
    let mut engine = engine(EngineConfig::default(), limits());
    let mut request = request(0, text(0, 100), 8);
    request.choices = vec![ChoiceSoFar::default(); 4];
    (request.sampling.temperature, request.sampling.seed) = (1.0, 7);
    engine.add(request.clone()).unwrap();
    let out = step(&mut engine);
    assert_eq!((out.tokens, out.outputs.len()), (100, 4));
    assert_eq!(engine.stats().blocks_total - engine.stats().blocks_free, 7, "and its blocks");
    let mut answers = finish(&mut engine);
    assert_eq!(engine.runner().tokens(), 100 + 4 * 7);
    for output in out.outputs {
        answers.get_mut(&(0, output.choice)).unwrap().0.insert(0, output.token);
    }
    assert!(answers[&(0, 0)] != answers[&(0, 1)], "but draw their own numbers");

    // With fewer seats than choices the others come later, with the same answers.
    let mut narrow = self::engine(EngineConfig { max_num_seqs: 2, ..EngineConfig::default() }, limits());
    narrow.add(request).unwrap();
    assert_eq!(finish(&mut narrow), answers);
}

#[test]
fn equal_prompts_of_different_salts_share_nothing() {
    let mut engine = engine(EngineConfig::default(), limits());
    engine.add(request(0, text(0, 64), 1)).unwrap();
    finish(&mut engine);
    engine.add(EngineRequest { cache_salt: 1, ..request(1, text(0, 64), 1) }).unwrap();
    assert_eq!(step(&mut engine).started[0].cached_tokens, 0);
    engine.add(request(2, text(0, 64), 1)).unwrap();
    assert_eq!(step(&mut engine).started[0].cached_tokens, 63, "one token must be computed");
    engine.reset_prefix_cache();
    engine.add(request(3, text(0, 64), 1)).unwrap();
    assert_eq!(step(&mut engine).started[0].cached_tokens, 0, "after a reset");
}

#[test]
fn answers_stay_right_when_all_prefix_hashes_collide() {
    let run = |chain: ChainHash| {
        let config = EngineConfig {
            swap: SwapConfig { control: SwapControl::of(SwapPolicy::Always), space_bytes: 16 * 8 * 20 },
            ..EngineConfig::default()
        };
        let limits = RunnerLimits { num_blocks: 24, ..limits() };
        let mut engine = Engine::with_chain(config, MirrorRunner::new(limits), chain);
        for id in 0..40 {
            let mut prompt = text(id as u32 % 3, 20 + id as usize * 3);
            prompt.extend(text(id as u32, 10));
            engine.add(request(id, prompt, 40)).unwrap();
        }
        finish(&mut engine)
    };
    let honest = run(ChainHash::new(5));
    assert_eq!(run(ChainHash::masked(5, 0)), honest);
    assert_eq!(run(ChainHash::masked(5, 7)), honest);
}

#[test]
fn a_tiny_pool_and_a_tiny_swap_space_finish_long_answers_of_many_choices() {
    // As vllm-project/vllm#546 and its kin: 64 blocks, swap 16 blocks, 32 requests with 4 long answers each.
    let mut undisturbed = None;
    for (policy, slots) in [(SwapPolicy::Off, 0), (SwapPolicy::OnPressure, 16), (SwapPolicy::Always, 16)] {
        let config = EngineConfig {
            swap: SwapConfig { control: SwapControl::of(policy), space_bytes: slots * 16 * 8 },
            ..EngineConfig::default()
        };
        let mut engine = engine(config, RunnerLimits { num_blocks: 64, ..limits() });
        for id in 0..32 {
            let mut request = request(id, text(id as u32, 30), 200);
            request.choices = vec![ChoiceSoFar::default(); 4];
            (request.sampling.temperature, request.sampling.seed) = (1.0, id);
            engine.add(request).unwrap();
        }
        let answers = finish(&mut engine);
        assert_eq!(answers.len(), 128);
        assert!(answers.values().all(|answer| answer.0.len() == 200));
        let stats = engine.stats();
        assert!(stats.preemptions > 0 && stats.preemptions < 128 * 10, "{stats:?}");
        assert_eq!(stats.swapped_in_blocks > 0, policy != SwapPolicy::Off, "{stats:?}");
        assert_eq!(undisturbed.get_or_insert(answers.clone()), &answers);
    }
}

#[test]
fn two_sequences_that_each_need_most_of_the_pool_both_end() {
    let mut engine = engine(EngineConfig::default(), RunnerLimits { num_blocks: 20, ..limits() });
    for id in 0..2 {
        engine.add(request(id, text(id as u32, 10), 182)).unwrap();
    }
    let answers = finish(&mut engine);
    assert!(answers.values().all(|answer| answer.0.len() == 182));
    assert!(engine.stats().preemptions <= 2, "{:?}", engine.stats());
}

#[test]
fn swapped_blocks_come_back_instead_of_being_computed_again() {
    let run = |policy| {
        let config = EngineConfig {
            swap: SwapConfig { control: SwapControl::of(policy), space_bytes: 16 * 8 * 64 },
            ..EngineConfig::default()
        };
        let mut engine = engine(config, RunnerLimits { num_blocks: 20, ..limits() });
        for id in 0..2 {
            engine.add(request(id, text(id as u32, 10), 200)).unwrap();
        }
        let answers = finish(&mut engine);
        (answers, engine.runner().tokens(), engine.stats())
    };
    let (computed, tokens, _) = run(SwapPolicy::Off);
    let (swapped, fewer, stats) = run(SwapPolicy::OnPressure);
    assert_eq!(computed, swapped);
    assert!(fewer < tokens && stats.swapped_in_blocks > 0, "{fewer} of {tokens} tokens, {stats:?}");
}

#[test]
fn lower_priority_numbers_go_first() {
    let mut engine = engine(EngineConfig { max_num_seqs: 1, ..EngineConfig::default() }, limits());
    for (id, priority) in [(0, 5), (1, 0), (2, -3)] {
        engine.add(EngineRequest { priority, ..request(id, text(id as u32, 10), 1) }).unwrap();
    }
    let mut order = Vec::new();
    while engine.has_work() {
        order.extend(step(&mut engine).outputs.iter().map(|output| output.request.0));
    }
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn an_aborted_request_frees_its_blocks_at_once() {
    let mut engine = engine(EngineConfig::default(), limits());
    let mut request = request(0, text(0, 100), 100);
    request.choices = vec![ChoiceSoFar::default(); 3];
    engine.add(request).unwrap();
    step(&mut engine);
    step(&mut engine);
    assert!(engine.abort(RequestId(0)));
    assert_eq!(engine.stats().blocks_free, engine.stats().blocks_total);
    assert!(!engine.has_work() && !engine.abort(RequestId(0)));
}

#[test]
fn sequences_lie_in_long_runs_of_blocks() {
    let mut engine = engine(EngineConfig::default(), limits());
    for id in 0..8 {
        engine.add(request(id, text(id as u32, 40), 280)).unwrap();
    }
    for _ in 0..270 {
        step(&mut engine);
    }
    for runs in engine.block_runs() {
        assert!(runs <= 3, "20 blocks in {runs} runs");
    }
}

#[test]
fn the_logits_that_are_no_numbers_end_one_choice_and_leave_the_others() {
    let mut engine = Engine::new(
        EngineConfig::default(),
        MirrorRunner::with_faults(limits(), Faults { not_finite_after: Some(299), fail_every: None }),
    );
    engine.add(request(0, [text(0, 10), vec![299]].concat(), 5)).unwrap();
    engine.add(request(1, text(1, 10), 5)).unwrap();
    let answers = finish(&mut engine);
    assert_eq!(answers[&(0, 0)], (Vec::new(), Some(FinishReason::Error)));
    assert_eq!((answers[&(1, 0)].0.len(), answers[&(1, 0)].1), (5, Some(FinishReason::Length)));
    assert_eq!(engine.stats().nan_sequences, 1);
}

#[test]
fn a_bad_logit_in_a_prompt_fails_the_request() {
    let mut engine = Engine::new(
        EngineConfig::default(),
        MirrorRunner::with_faults(limits(), Faults { not_finite_after: Some(299), fail_every: None }),
    );
    let mut request = request(0, vec![1, 299, 2, 3], 5);
    request.sampling.prompt_logprobs = Some(1);
    engine.add(request).unwrap();
    let out = step(&mut engine);
    assert_eq!(out.failed, [(RequestId(0), "a logit at position 1 of the prompt is not a finite number".to_owned())]);
    assert!(!engine.has_work());
}

#[test]
fn log_probabilities_of_a_long_prompt_take_no_more_rows_than_there_are() {
    let run = |max_num_seqs, chunk| {
        let config = EngineConfig { max_prefill_chunk: chunk, ..EngineConfig::default() };
        let mut engine = engine(config, RunnerLimits { max_num_seqs, ..limits() });
        engine.add(request(0, text(0, 10), 30)).unwrap();
        let mut asked = request(1, text(1, 100), 2);
        asked.sampling.prompt_logprobs = Some(2);
        engine.add(asked.clone()).unwrap();
        engine.add(EngineRequest { id: RequestId(2), ..asked }).unwrap();
        let mut given = Vec::new();
        while engine.has_work() {
            given.append(&mut step(&mut engine).prompt_logprobs);
        }
        given
    };
    let given = run(64, 512);
    assert_eq!(given.len(), 2);
    assert_eq!(given[0].tokens, given[1].tokens);
    assert_eq!((given[0].tokens.len(), given[0].tokens.iter().flatten().count()), (100, 99));
    assert!(given[0].tokens[1..].iter().flatten().all(|token| token.top.len() == 2 && token.logprob < 0.0));
    assert_eq!(run(2, 7), given);
    assert_eq!(run(3, 512), given);
}

/// The bytes of every token: 256 bytes, then nothing (control tokens).
fn vocabulary() -> Arc<Vec<Vec<u8>>> {
    Arc::new((0..300).map(|id: u32| u8::try_from(id).map_or(Vec::new(), |byte| vec![byte])).collect())
}

fn constrained(id: u64, grammar: Grammar) -> EngineRequest {
    let mut request = request(id, text(id as u32, 10), 60);
    request.sampling.grammar = Some(grammar);
    request.sampling.eos_token_ids = vec![290];
    (request.sampling.temperature, request.sampling.seed) = (1.0, id);
    request
}

#[test]
fn a_grammar_holds_its_answer_and_no_other_and_survives_a_change_of_workers() {
    let config = EngineConfig { vocabulary: vocabulary(), ..EngineConfig::default() };
    let mut first = engine(config.clone(), limits());
    first.add(constrained(0, Grammar::Regex("[a-z]{3}-[0-9]{2}".into()))).unwrap();
    let schema =
        r#"{"type":"object","properties":{"n":{"enum":[1,2,3]}},"required":["n"],"additionalProperties":false}"#;
    first.add(constrained(1, Grammar::JsonSchema(schema.into()))).unwrap();
    first.add(request(2, text(2, 10), 60)).unwrap();
    let answers = finish(&mut first);
    let text =
        |id| -> String { answers[&(id, 0)].0.iter().filter_map(|&t| char::from_u32(t).filter(|_| t < 256)).collect() };
    let code = text(0);
    assert!(code.len() == 6 && code.as_bytes()[3] == b'-', "{code}");
    assert!(text(1).starts_with('{') && text(1).ends_with('}'), "{}", text(1));
    assert_eq!((answers[&(0, 0)].1, answers[&(0, 0)].0.last()), (Some(FinishReason::Eos), Some(&290)));

    let mut second = engine(config, limits());
    let mut resumed = constrained(0, Grammar::Regex("[a-z]{3}-[0-9]{2}".into()));
    resumed.choices[0].generated = answers[&(0, 0)].0[..4].to_vec();
    second.add(resumed).unwrap();
    assert_eq!(finish(&mut second)[&(0, 0)].0, answers[&(0, 0)].0[4..]);
}

#[test]
fn a_dead_end_of_a_grammar_ends_only_its_request() {
    let mut engine = engine(EngineConfig { vocabulary: vocabulary(), ..EngineConfig::default() }, limits());
    let mut dead = constrained(0, Grammar::Regex("ab".into()));
    dead.sampling.bad_words = vec![vec![u32::from(b'b')]];
    engine.add(dead).unwrap();
    engine.add(request(1, text(1, 10), 6)).unwrap();
    let answers = finish(&mut engine);
    assert_eq!(answers[&(0, 0)], (vec![u32::from(b'a')], Some(FinishReason::Error)));
    assert_eq!(answers[&(1, 0)].0.len(), 6);
}

#[test]
fn grammars_are_refused_when_they_can_not_work() {
    let mut blind = engine(EngineConfig::default(), limits());
    assert!(matches!(blind.add(constrained(0, Grammar::Regex("a".into()))), Err(AddError::Grammar(_))));
    let mut engine = engine(EngineConfig { vocabulary: vocabulary(), ..EngineConfig::default() }, limits());
    assert!(matches!(engine.add(constrained(0, Grammar::Regex("(".into()))), Err(AddError::Grammar(_))));
    let mut endless = constrained(0, Grammar::Regex("a".into()));
    endless.sampling.eos_token_ids.clear();
    assert!(matches!(engine.add(endless), Err(AddError::Parameter { field: "grammar", .. })));
    assert!(!engine.has_work());
}

/// Steps from now until the request has its first token.
fn steps_to_first_token(engine: &mut Engine<MirrorRunner>, id: u64) -> usize {
    for steps in 1.. {
        if step(engine).outputs.iter().any(|output| output.request == RequestId(id)) {
            return steps;
        }
        assert!(steps < 20_000, "no token: {:?}", engine.stats());
    }
    unreachable!()
}

fn of(owner: u64, request: EngineRequest) -> EngineRequest {
    EngineRequest { owner, ..request }
}

#[test]
fn a_short_chat_waits_a_few_steps_behind_five_hundred_long_prompts_of_another_owner() {
    let config = EngineConfig { max_prefill_chunk: 64, ..EngineConfig::default() };
    let mut fair = engine(config.clone(), limits());
    let mut unfair = engine(EngineConfig { fair_share: false, ..config }, limits());
    for engine in [&mut fair, &mut unfair] {
        for id in 0..500 {
            engine.add(of(1, request(id, text(id as u32, 300 + id as usize), 64))).unwrap();
        }
        // Until seats or blocks are taken and answers are under way.
        for _ in 0..200 {
            step(engine);
        }
        engine.add(of(2, request(1000, text(7, 30), 8))).unwrap();
    }
    let steps = steps_to_first_token(&mut fair, 1000);
    assert!(steps <= 3, "{steps} steps");
    assert!(steps_to_first_token(&mut unfair, 1000) > 300, "this is what first come, first served would be");
    // It is not the first alone that is well served, and nobody pays with his answer.
    for id in 1001..1020 {
        fair.add(of(2, request(id, text(id as u32, 30), 8))).unwrap();
        let steps = steps_to_first_token(&mut fair, id);
        assert!(steps <= 12, "{steps} steps for {id}");
    }
    let stats = fair.stats();
    assert!(stats.preemptions < 100, "{stats:?}");
    finish(&mut fair);
    assert_eq!(fair.stats().blocks_free, stats.blocks_total);
}

#[test]
fn owners_who_compete_get_equal_shares_of_tokens() {
    let mut engine = engine(EngineConfig { max_num_seqs: 8, ..EngineConfig::default() }, limits());
    for id in 0..200 {
        engine.add(of(1, request(id, text(id as u32, 100), 32))).unwrap();
    }
    for id in 1000..1200 {
        engine.add(of(2, request(id, text(id as u32, 20), 32))).unwrap();
    }
    let mut done = [0u64; 2];
    for _ in 0..600 {
        for output in step(&mut engine).outputs {
            let small = output.request.0 >= 1000;
            done[usize::from(small)] += u64::from(output.finish.is_some()) * if small { 52 } else { 132 };
        }
    }
    let ratio = done[0] as f64 / done[1] as f64;
    assert!((0.7..1.4).contains(&ratio), "tokens of finished requests: {done:?}");
}

#[test]
fn a_low_priority_waits_its_time_and_then_goes_first() {
    let config = EngineConfig { max_num_seqs: 1, aging_tokens: 200, ..EngineConfig::default() };
    let mut engine = engine(config, limits());
    engine.add(EngineRequest { priority: 9, ..request(0, text(0, 10), 4) }).unwrap();
    for id in 1..100 {
        engine.add(request(id, text(id as u32, 10), 10)).unwrap();
    }
    let mut before = Vec::new();
    while !before.contains(&0) {
        before.extend(step(&mut engine).outputs.iter().filter(|o| o.finish.is_some()).map(|o| o.request.0));
    }
    assert!((8..30).contains(&before.len()), "{} went before", before.len());
}

#[test]
fn whoever_goes_before_a_running_prompt_leaves_it_a_row() {
    let narrow = RunnerLimits { max_num_seqs: 3, max_num_batched_tokens: 40, ..limits() };
    let mut engine = engine(EngineConfig { max_prefill_chunk: 16, ..EngineConfig::default() }, narrow);
    engine.add(of(1, request(0, text(0, 200), 4))).unwrap();
    step(&mut engine);
    for id in 1..6 {
        let mut before = of(id, request(id, text(id as u32, 6), 3));
        (before.priority, before.sampling.prompt_logprobs) = (-1, Some(1));
        engine.add(before).unwrap();
    }
    assert_eq!(finish(&mut engine).len(), 6);
}
