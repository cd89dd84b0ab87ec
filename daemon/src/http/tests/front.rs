//! What the front end costs by itself: requests and streams against a worker that answers at once, all on one core, the
//! worker's share included. A short run checks that memory stays flat; as a benchmark:
//! `ERNIED_FRONT_REQUESTS=200000 cargo test --release -p ernied --lib -- front_ --nocapture --test-threads 1`.

use super::*;
use futures::stream::{self, StreamExt};
use serde_json::json;
use std::sync::Mutex;
use std::time::Instant;
use tokio::sync::Notify;

/// Streams at the same time.
const STREAMS: usize = 64;

/// Requests between two looks.
const CHUNK: usize = 1000;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn resident_mib() -> f64 {
    crate::system::memory::process(std::process::id()).map_or(0.0, |p| p.resident_bytes as f64 / f64::from(1 << 20))
}

async fn house() -> House {
    let mut plan = Plan {
        limits: AdmissionLimits { running_max: 256, queued_max: 256, queued_tokens_max: None },
        ..Plan::default()
    };
    plan.settings.log_requests = false;
    House::with(plan, |model, submit| say(model, submit, "All is well, thank you.")).await
}

#[tokio::test]
async fn front_memory_is_flat_over_many_short_requests() {
    let requests = number("ERNIED_FRONT_REQUESTS", 400);
    let house = house().await;
    let once = |_| async {
        house.chat(json!({"max_tokens": 8})).await.ok();
    };
    stream::iter(0..requests / 10).map(once).buffer_unordered(STREAMS).for_each(|()| async {}).await;
    house.workers.forget();
    let (before, began) = (resident_mib(), Instant::now());
    for _ in 0..requests.div_ceil(CHUNK) {
        stream::iter(0..CHUNK.min(requests)).map(once).buffer_unordered(STREAMS).for_each(|()| async {}).await;
        // What was asked is kept by the scripted worker, for other tests.
        house.workers.forget();
    }
    let took = began.elapsed().as_secs_f64();
    let grown = resident_mib() - before;
    println!(
        "{requests} requests in {took:.1} s: {:.0} a second, resident {before:.0} MiB and {grown:+.1}",
        requests as f64 / took
    );
    assert!(grown < 48.0, "the front end grew by {grown:.1} MiB over {requests} requests");
}

#[tokio::test]
async fn front_streams_many_tokens_on_one_core() {
    let house = house().await;
    let streams = number("ERNIED_FRONT_REQUESTS", 400).min(20_000);
    let began = Instant::now();
    let tokens: usize = stream::iter(0..streams)
        .map(|_| async {
            // The role, the tokens, the end.
            let events = house.chat(json!({"stream": true, "max_tokens": 64})).await.events();
            events
                .iter()
                .filter(|e| e["choices"][0]["delta"]["content"].as_str().is_some_and(|t| !t.is_empty()))
                .count()
        })
        .buffer_unordered(STREAMS)
        .fold(0, |sum, n| async move { sum + n })
        .await;
    let took = began.elapsed().as_secs_f64();
    println!(
        "{tokens} streamed tokens of {streams} streams, {STREAMS} at a time, in {took:.1} s: {:.0} a second",
        tokens as f64 / took
    );
    assert_eq!(tokens, streams * "All is well, thank you.".len());
}

/// What the issue asks for: tokens a second, of all streams together.
const PACE: u32 = 3000;

/// Whether all streams have their token in the same moment, as one step of an engine brings them, or one after the other.
#[derive(Debug, Clone, Copy)]
enum Beat {
    Together,
    InTurn,
}

/// From the moment in which the worker has a token to the moment in which the client reads its event.
async fn added_per_token(beat: Beat, rounds: usize) -> Vec<Duration> {
    let (held, released) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(vec![Vec::new(); STREAMS])));
    let plan = Plan {
        limits: AdmissionLimits { running_max: 256, queued_max: 256, queued_tokens_max: None },
        settings: HttpSettings { log_requests: false, ..HttpSettings::default() },
        ..Plan::default()
    };
    let holds = held.clone();
    let house = House::with(plan, move |model, submit| {
        let hold = Arc::new(Notify::new());
        holds.lock().unwrap().push((submit.sampling.seed, hold.clone()));
        Answer { hold: Some(hold), ..say(model, submit, &"x".repeat(rounds)) }
    })
    .await;
    let house = Arc::new(house);
    let clients: Vec<_> = (0..STREAMS)
        .map(|stream| {
            let (house, released) = (house.clone(), released.clone());
            tokio::spawn(async move {
                let body = with_messages(json!({"stream": true, "max_tokens": rounds + 1, "seed": stream}));
                let request = post("/v1/chat/completions", body.to_string());
                let response = house.router.clone().oneshot(request).await.expect("the router never fails");
                let mut events = response.into_body().into_data_stream();
                let mut added: Vec<Duration> = Vec::with_capacity(rounds);
                while let Some(event) = events.next().await {
                    // What is ready is written at once: there may be several events in it.
                    let written = event.expect("our bodies never fail");
                    for _ in written.windows(13).filter(|w| w == br#""content":"x""#) {
                        let since: Instant = released.lock().unwrap()[stream][added.len()];
                        added.push(since.elapsed());
                    }
                }
                added
            })
        })
        .collect();
    while held.lock().unwrap().len() < STREAMS {
        tokio::task::yield_now().await;
    }
    let mut holds = held.lock().unwrap().clone();
    holds.sort_by_key(|(stream, _)| *stream);
    let (beats, at_once) = match beat {
        Beat::Together => (rounds + 1, STREAMS),
        Beat::InTurn => ((rounds + 1) * STREAMS, 1),
    };
    let mut clock = tokio::time::interval(Duration::from_secs(1) * at_once as u32 / PACE);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for n in 0..beats {
        clock.tick().await;
        for stream in (n * at_once..(n + 1) * at_once).map(|k| k % STREAMS) {
            released.lock().unwrap()[stream].push(Instant::now());
            holds[stream].1.notify_one();
        }
    }
    let mut added = Vec::new();
    for client in clients {
        added.extend(client.await.expect("no panic"));
    }
    assert_eq!(added.len(), rounds * STREAMS);
    added.sort();
    added
}

#[tokio::test]
async fn front_adds_little_to_each_token() {
    // The long run is 64 000 tokens, a third of a minute, each way.
    let rounds = (number("ERNIED_FRONT_REQUESTS", 400) / 20).min(1000);
    for beat in [Beat::Together, Beat::InTurn] {
        let began = Instant::now();
        let added = added_per_token(beat, rounds).await;
        let rate = added.len() as f64 / began.elapsed().as_secs_f64();
        let at = |share: f64| added[((added.len() - 1) as f64 * share) as usize];
        println!(
            "{} tokens of {STREAMS} streams, {beat:?}, {rate:.0} a second: added P50 {:?}, P99 {:?}, longest {:?}",
            added.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
        // Unoptimised code on a machine that does other things as well: only that nothing is held back.
        assert!(at(0.5) < Duration::from_secs(1), "half of the tokens took longer than {:?}", at(0.5));
    }
}
