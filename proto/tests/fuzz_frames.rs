//! Worker frames under mutation: bytes from a broken or hostile peer are an error, never a panic and never more memory than
//! they could fill. Runs for a moment; `ERNIED_FUZZ_SECONDS=600` makes it a long one, `ERNIED_FUZZ_SEED` repeats one.

use ernie_proto::frame;
use ernie_proto::ids::RequestId;
use ernie_proto::worker::{
    ChoiceSoFar, Fatal, FinishReason, FromWorker, Grammar, Hello, Load, LoadPhase, LoadProgress, PromptLogprobs,
    SamplingParams, SequenceOutput, Started, StepReport, StepStats, Submit, ToWorker, TokenLogprobs,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::io::Cursor;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn from_worker() -> Vec<FromWorker> {
    let logprobs = TokenLogprobs { logprob: -0.5, rank: 1, top: vec![(7, -0.5), (9, -1.5)] };
    let report = StepReport {
        step: 9,
        started: vec![Started { request: RequestId(1), cached_tokens: 16 }],
        prompts: vec![RequestId(1), RequestId(3)],
        outputs: vec![SequenceOutput {
            request: RequestId(1),
            choice: 0,
            token: 42,
            logprobs: Some(logprobs.clone()),
            finish: Some(FinishReason::Eos),
        }],
        prompt_logprobs: vec![PromptLogprobs { request: RequestId(1), tokens: vec![None, Some(logprobs)] }],
        failed: vec![(RequestId(2), "too long".to_owned())],
        stats: StepStats { expert_tokens: vec![vec![], vec![1, 2, 3]], ..StepStats::default() },
    };
    vec![
        FromWorker::Hello(Hello::own()),
        FromWorker::LoadProgress(LoadProgress { phase: LoadPhase::Weights, bytes_done: 1 << 20, bytes_total: 1 << 30 }),
        FromWorker::Step(Box::new(report)),
        FromWorker::Pong(77),
        FromWorker::Fatal(Fatal { phase: "load".to_owned(), message: "no such file".to_owned() }),
        FromWorker::StepFailed("a kernel did not like it".to_owned()),
        FromWorker::Beat(3),
    ]
}

fn to_worker() -> Vec<ToWorker> {
    let submit = Submit {
        request: RequestId(5),
        prompt: Arc::new((0..300).collect()),
        choices: vec![ChoiceSoFar { generated: vec![1, 2, 3], finished: false }],
        sampling: SamplingParams {
            grammar: Some(Grammar::Regex("a+".to_owned())),
            bad_words: vec![vec![1], vec![2, 3]],
            ..SamplingParams::default()
        },
        priority: -1,
        cache_salt: u64::MAX,
        owner: 7,
    };
    let mut load = Load::new("models/x");
    load.vocabulary = Arc::new((0..500u32).map(|n| n.to_le_bytes().to_vec()).collect());
    vec![
        ToWorker::Hello(Hello::own()),
        ToWorker::Load(Box::new(load)),
        ToWorker::Submit(Box::new(submit)),
        ToWorker::Abort(RequestId(5)),
        ToWorker::Ping(1),
        ToWorker::ResetPrefixCache,
        ToWorker::Shutdown,
    ]
}

fn mutate(bytes: &mut Vec<u8>, random: &mut StdRng) {
    for _ in 0..=random.random_range(0..6) {
        if bytes.is_empty() {
            bytes.push(random.random::<u8>());
            continue;
        }
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..7) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => bytes[at] = random.random::<u8>(),
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.random::<u8>()),
            // Lengths are varints: runs of 0xff claim as much as can be claimed.
            4 => bytes.splice(at..at, [0xff; 9]).for_each(drop),
            5 => {
                let end = (at + random.random_range(0..16)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                let to = random.random_range(0..bytes.len());
                bytes.splice(to..to, part).for_each(drop);
            }
            _ => bytes.extend((0..random.random_range(0..32)).map(|_| random.random::<u8>())),
        }
    }
}

fn settings() -> (Duration, u64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse().ok());
    let seconds = number("ERNIED_FUZZ_SECONDS").unwrap_or(1);
    let seed = number("ERNIED_FUZZ_SEED").unwrap_or(1);
    println!("seed {seed}");
    (Duration::from_secs(seconds), seed)
}

#[test]
fn mutated_frames_are_errors_or_messages_and_never_a_panic() {
    let (time, seed) = settings();
    let mut random = StdRng::seed_from_u64(seed);
    let ours = from_worker().into_iter().map(|m| frame::encode(&m));
    let theirs = to_worker().into_iter().map(|m| frame::encode(&m));
    let corpus: Vec<Vec<u8>> = ours.chain(theirs).map(|frame| frame.expect("encodes")).collect();
    let (begin, mut tried, mut decoded) = (Instant::now(), 0u64, 0u64);
    let mut buffer = Vec::new();
    while begin.elapsed() < time {
        for _ in 0..1000 {
            let mut bytes = corpus[random.random_range(0..corpus.len())].clone();
            mutate(&mut bytes, &mut random);
            tried += 1;
            // As a payload, in both directions.
            let payload = bytes.get(4..).unwrap_or(&bytes);
            decoded += u64::from(frame::decode::<FromWorker>(payload).is_ok());
            decoded += u64::from(frame::decode::<ToWorker>(payload).is_ok());
            // As a stream, with its length in front.
            let mut stream = Cursor::new(&bytes);
            while frame::read::<FromWorker>(&mut stream, &mut buffer).is_ok() {}
            assert!(buffer.capacity() <= frame::FRAME_BYTES_MAX, "seed {seed}");
        }
    }
    println!("{tried} frames, {decoded} decoded");
    assert!(decoded > 0, "the mutations are too wild to reach the fields");
}
