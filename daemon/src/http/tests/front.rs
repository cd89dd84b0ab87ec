//! What the front end costs by itself: requests and streams against a worker that answers at once, all on one core, the
//! worker's share included. A short run checks that memory stays flat; as a benchmark:
//! `ERNIED_FRONT_REQUESTS=200000 cargo test --release -p ernied --lib -- front_ --nocapture`.

use super::*;
use futures::stream::{self, StreamExt};
use serde_json::json;
use std::time::Instant;

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
