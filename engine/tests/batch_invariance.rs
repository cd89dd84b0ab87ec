//! The promise on the real runner: a request's tokens are the same alone, in company, in chunks, from the prefix cache, after a
//! preemption, out of the swap space, or taken over from another worker. Greedy and drawn, dense and with experts, on one
//! thread and on two.

mod common;

use common::{golden, golden_dir, load, random_model, small, small_f32};
use ernie_engine::kv::disk_tier::{DiskConfig, DiskTier};
use ernie_engine::model::WeightPlan;
use ernie_engine::params::{ChoiceSoFar, EngineRequest, RequestId, SamplingParams};
use ernie_engine::runner::ModelRunner;
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::LoadOptions;
use ernie_engine::{Engine, EngineConfig, StepOutputs, SwapConfig, SwapControl, SwapPolicy};
use ernie_kernels::KvKind;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

type Answers = BTreeMap<(u64, u16), Vec<u32>>;

const ANSWER: u32 = 24;

fn text(kind: u32, len: usize) -> Vec<u32> {
    (0..).map(|i: u32| (i.wrapping_mul(i) * 7 + i * 31 + kind * 131) % 500 + 3).take(len).collect()
}

fn request(id: u64, prompt: Vec<u32>) -> EngineRequest {
    EngineRequest {
        id: RequestId(id),
        prompt: Arc::new(prompt),
        choices: vec![ChoiceSoFar::default()],
        sampling: SamplingParams { max_tokens: ANSWER, ..SamplingParams::default() },
        priority: 0,
        cache_salt: 0,
        owner: 0,
    }
}

fn drawn(mut request: EngineRequest) -> EngineRequest {
    let sampling = SamplingParams {
        temperature: 1.0,
        top_p: 0.95,
        top_k: 40,
        repetition_penalty: 1.05,
        seed: 1234,
        logprobs: Some(1),
        ..request.sampling
    };
    request.sampling = sampling;
    request
}

/// The two whose answers are compared: one takes the most likely token, one draws for two choices.
fn subjects() -> [EngineRequest; 2] {
    let mut second = drawn(request(1, text(2, 45)));
    second.choices.push(ChoiceSoFar::default());
    [request(0, text(1, 70)), second]
}

fn company(count: u32) -> impl Iterator<Item = EngineRequest> {
    (0..count).map(|i| {
        let other = request(100 + u64::from(i), text(10 + i, 5 + (i as usize * 37) % 90));
        if i % 2 == 0 { drawn(other) } else { other }
    })
}

fn run(engine: &mut Engine<CpuRunner>, requests: impl IntoIterator<Item = EngineRequest>) -> Answers {
    requests.into_iter().for_each(|request| engine.add(request).unwrap());
    let mut answers = Answers::new();
    let mut out = StepOutputs::default();
    while engine.has_work() {
        engine.step(&mut out).unwrap();
        assert!(out.sequences > 0);
        for output in &out.outputs {
            answers.entry((output.request.0, output.choice)).or_default().push(output.token);
        }
    }
    engine.check().unwrap();
    answers
}

fn of_subjects(answers: Answers) -> Answers {
    answers.into_iter().filter(|&((id, _), _)| id < 2).collect()
}

/// Loads once per case: the KV memory must not know what was computed before.
fn engine(options: &LoadOptions, config: EngineConfig) -> Engine<CpuRunner> {
    Engine::new(config, load(options))
}

fn blocks(options: &LoadOptions, blocks: u64) -> LoadOptions {
    let runner = load(&LoadOptions { kv_cache_bytes: Some(16 << 20), ..options.clone() });
    let bytes = (16u64 << 20) / u64::from(ernie_engine::runner::ModelRunner::limits(&runner).num_blocks);
    LoadOptions { kv_cache_bytes: Some(bytes * blocks), max_model_len: Some(128), ..options.clone() }
}

/// For the swap file's figures.
fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

fn holds_the_promise(options: &LoadOptions) {
    let one = LoadOptions { threads: 1, ..options.clone() };
    let mut alone = Answers::new();
    for subject in subjects() {
        alone.extend(run(&mut engine(&one, EngineConfig::default()), [subject]));
    }
    assert!(alone.len() == 3 && alone.values().all(|answer| answer.len() == ANSWER as usize));
    assert_ne!(alone[&(1, 0)], alone[&(1, 1)], "the choices draw their own numbers");

    for threads in [1, 2] {
        let options = LoadOptions { threads, ..options.clone() };
        for others in [0, 6, 31] {
            let mut together = engine(&options, EngineConfig::default());
            let answers = of_subjects(run(&mut together, company(others).chain(subjects())));
            assert_eq!(answers, alone, "with {others} others on {threads} threads");
        }
    }
    for tokens in [1, 3, 16, 33] {
        let config =
            EngineConfig { max_num_batched_tokens: tokens, max_prefill_chunk: tokens, ..EngineConfig::default() };
        let answers = run(&mut engine(options, config), subjects());
        assert_eq!(answers, alone, "{tokens} tokens a step");
    }
    let mut again = engine(options, EngineConfig::default());
    for turn in ["first", "second", "third"] {
        assert_eq!(run(&mut again, subjects()), alone, "the {turn} time");
    }
    assert!(again.stats().prefix_hits_tokens > 0);
    let uncached = EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() };
    assert_eq!(run(&mut engine(options, uncached), subjects()), alone, "without a prefix cache");

    let tight = blocks(options, 16);
    for (policy, swapped) in [(SwapPolicy::Off, false), (SwapPolicy::OnPressure, true), (SwapPolicy::Always, true)] {
        let config = EngineConfig {
            swap: SwapConfig { control: SwapControl::of(policy), space_bytes: 8 << 20 },
            ..EngineConfig::default()
        };
        let mut squeezed = engine(&tight, config);
        let answers = of_subjects(run(&mut squeezed, company(4).chain(subjects())));
        assert_eq!(answers, alone, "with {policy:?} in 16 blocks");
        let stats = squeezed.stats();
        assert!(stats.preemptions > 0 && (stats.swapped_in_blocks > 0) == swapped, "{policy:?}: {stats:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    for life in 0..2 {
        let control = SwapControl::of(SwapPolicy::Always);
        let space_bytes = 8 * engine(&tight, EngineConfig::default()).runner().block_bytes() as u64;
        let config = EngineConfig { swap: SwapConfig { control, space_bytes }, ..EngineConfig::default() };
        let mut squeezed = engine(&tight, config);
        let disk = DiskConfig { path: folder.path().join("kv"), bytes: 8 << 20, identity: 1, now };
        let block_bytes = squeezed.runner().block_bytes();
        squeezed.attach_disk(DiskTier::open(&disk, block_bytes, 16).unwrap());
        let answers = of_subjects(run(&mut squeezed, company(4).chain(subjects())));
        assert_eq!(answers, alone, "with a file below 8 blocks of memory, life {life}");
        let report = squeezed.kv_report();
        assert!(report.disk.blocks_used > 8 && report.disk.blocks_corrupt == 0, "{report:?}");
        // In its first life it may find everything in memory, or still on the way.
        let read = report.disk.reads > 0 && report.disk.read_time > Duration::ZERO;
        assert!(read || life == 0, "nothing came back from the file: {report:?}");
        assert_eq!(report.disk.blocks_restored > 0, life == 1, "{report:?}");
    }
    for cut in [1, 2, 11, 23] {
        let mut taken_over = engine(options, EngineConfig::default());
        let resumed = subjects().map(|mut subject| {
            for (choice, so_far) in (0..).zip(&mut subject.choices) {
                so_far.generated = alone[&(subject.id.0, choice)][..cut].to_vec();
            }
            subject
        });
        for (key, rest) in run(&mut taken_over, company(3).chain(resumed)) {
            if key.0 < 2 {
                assert_eq!(rest, alone[&key][cut..], "{key:?} resumed after {cut}");
            }
        }
    }
}

#[test]
fn a_dense_model_in_bf16_answers_the_same_in_any_company() {
    holds_the_promise(&small(&golden_dir("tiny-dense")));
}

#[test]
fn a_model_with_experts_in_bf16_answers_the_same_in_any_company() {
    holds_the_promise(&small(&golden_dir("tiny-moe")));
}

#[test]
fn a_dense_model_with_8_bit_kv_answers_the_same_in_any_company() {
    holds_the_promise(&narrow_kv(small(&golden_dir("tiny-dense"))));
}

#[test]
fn a_model_with_experts_and_8_bit_kv_answers_the_same_in_any_company() {
    holds_the_promise(&narrow_kv(small(&golden_dir("tiny-moe"))));
}

/// What `--quantization` chooses, and one of every other kind of scale.
const QUANTISED: [&str; 5] = ["int8-rr", "int8g128-ag-r", "int8-dg", "int4g32zp-ag", "int4g128-dg"];

#[test]
fn a_dense_model_answers_the_same_in_any_company_in_every_quantised_form() {
    for plan in QUANTISED {
        holds_the_promise(&quantised(small(&golden_dir("tiny-dense")), plan));
    }
}

#[test]
fn a_model_with_experts_answers_the_same_in_any_company_in_every_quantised_form() {
    for plan in QUANTISED {
        holds_the_promise(&quantised(small(&golden_dir("tiny-moe")), plan));
    }
}

fn quantised(options: LoadOptions, plan: &str) -> LoadOptions {
    println!("{plan}");
    LoadOptions { plan: WeightPlan::parse(plan), ..options }
}

/// With K and V in 8 bits.
fn narrow_kv(options: LoadOptions) -> LoadOptions {
    let narrow = LoadOptions { kv: Some(KvKind::Int8), ..options };
    let [wide, half] = [None, narrow.kv].map(|kv| load(&LoadOptions { kv, ..narrow.clone() }));
    assert_eq!((wide.report().kv, half.report().kv), ("bf16", "int8"));
    // Scales weigh more beside these small heads than the 3 % of heads of 128.
    assert!(half.block_bytes() * 100 < wide.block_bytes() * 63, "{} of {}", half.block_bytes(), wide.block_bytes());
    narrow
}

#[test]
fn a_dense_model_in_f32_answers_the_same_in_any_company() {
    holds_the_promise(&small_f32(random_model(false, 3).path()));
}

#[test]
fn a_model_with_experts_in_f32_answers_the_same_in_any_company() {
    holds_the_promise(&small_f32(random_model(true, 3).path()));
}

#[test]
fn a_prompt_cut_at_every_place_gets_the_answer_of_the_whole() {
    for name in ["tiny-dense", "tiny-moe"] {
        let options = small(&golden_dir(name));
        let subject = || request(0, text(4, 40));
        let mut once = engine(&options, EngineConfig::default());
        let whole = run(&mut once, [subject()]);
        for chunk in 1..40 {
            let config = EngineConfig { max_num_batched_tokens: chunk, ..EngineConfig::default() };
            assert_eq!(run(&mut engine(&options, config), [subject()]), whole, "{name}: chunks of {chunk}");
        }
    }
}

#[test]
fn the_golden_greedy_answers_come_out_of_the_engine() {
    for name in ["tiny-dense", "tiny-moe", "tiny-moe-sharded"] {
        let golden = golden(name);
        let ids = |value: &serde_json::Value| -> Vec<u32> {
            value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
        };
        let prompts = golden["prompts"].as_array().unwrap();
        let mut together = engine(&small_f32(Path::new(&golden_dir(name))), EngineConfig::default());
        let fits = |ids: &Vec<u32>| ids.len() + 33 < 512;
        let requests: Vec<EngineRequest> = (0..)
            .zip(prompts)
            .map(|(id, prompt)| {
                let mut request = request(id, ids(&prompt["ids"]));
                request.sampling.max_tokens = u32::try_from(ids(&prompt["greedy"]).len()).unwrap();
                request
            })
            .filter(|request| fits(&request.prompt))
            .collect();
        assert!(!requests.is_empty());
        for ((id, _), answer) in run(&mut together, requests) {
            let expected = ids(&prompts[usize::try_from(id).unwrap()]["greedy"]);
            assert_eq!(answer, expected, "{name}: {}", prompts[usize::try_from(id).unwrap()]["name"]);
        }
    }
}
