//! The admin JSON under mutation: whatever comes, the answer is JSON with a status that blames the right side, and the daemon
//! goes on. Runs for a moment; `ERNIED_FUZZ_SECONDS=600` makes it a long one, `ERNIED_FUZZ_SEED` repeats one.

use super::tests::House;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Bodies that are right, to begin with. Not the drain: it would end the test.
fn corpus() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("POST", "/v1/workers/restart", json!({"worker": "w1", "graceful": true})),
        ("POST", "/v1/config/set", json!({"key": "logging.level", "value": "info"})),
        ("POST", "/v1/config/set", json!({"key": "limits.max_queued_requests", "value": "7"})),
        ("POST", "/v1/logs/level", json!({"level": "info,ernied=debug"})),
        ("POST", "/v1/logs/rotate", json!({})),
        ("POST", "/v1/reload", json!({})),
        ("POST", "/v1/resume", json!({})),
        ("POST", "/v1/prefix-cache/reset", json!({})),
        (
            "POST",
            "/v1/keys/create",
            json!({"name": "app", "scope": "inference", "requests_per_minute": 5, "models": ["m"], "expires_in_seconds": 60}),
        ),
        ("DELETE", "/v1/keys/app", json!({})),
        ("POST", "/v1/keys/app/rotate", json!({})),
        (
            "POST",
            "/v1/swap",
            json!({"model_dir": "/nowhere", "strategy": "auto", "observe_seconds": 1.0, "canary_percent": 10.0, "served_names": ["x"], "force_unsealed": true}),
        ),
        ("POST", "/v1/rollback", json!({"reason": "why not"})),
        ("POST", "/v1/debug/dump", json!({})),
        ("GET", "/v1/audit?limit=5&after=1&act=key", json!({})),
        ("GET", "/v1/usage?days=3", json!({})),
        ("GET", "/v1/audit?seq=1", json!({})),
    ]
}

fn odd(random: &mut StdRng) -> Value {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e300),
        json!(u64::MAX),
        json!(""),
        json!("\u{0}\u{202e}💥"),
        json!("x".repeat(5000)),
        json!("../../etc/passwd"),
        json!("'; DROP TABLE audit; --"),
        json!([]),
        json!([[[]]]),
        json!({"a": {"b": []}}),
    ];
    values[random.random_range(0..values.len())].clone()
}

/// Changes a body in shape; the caller may then change the text as well.
fn mutate(body: &mut Value, random: &mut StdRng) {
    let Some(members) = body.as_object_mut() else { return };
    let names: Vec<String> = members.keys().cloned().collect();
    match random.random_range(0..4) {
        0 if !names.is_empty() => {
            members.remove(&names[random.random_range(0..names.len())]);
        }
        1 => {
            members.insert("surprise".to_owned(), odd(random));
        }
        _ if !names.is_empty() => {
            members.insert(names[random.random_range(0..names.len())].clone(), odd(random));
        }
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_bodies_and_paths_are_refused_in_shape_and_the_daemon_goes_on() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse().ok());
    let time = Duration::from_secs(number("ERNIED_FUZZ_SECONDS").unwrap_or(2));
    let seed = number("ERNIED_FUZZ_SEED").unwrap_or(1);
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let house = House::open().await;
    let corpus = corpus();
    let (begin, mut tried, mut taken) = (Instant::now(), 0u64, 0u64);
    while begin.elapsed() < time {
        let (method, path, body) = &corpus[random.random_range(0..corpus.len())];
        let mut body = body.clone();
        for _ in 0..random.random_range(0..3) {
            mutate(&mut body, &mut random);
        }
        let mut text = body.to_string().into_bytes();
        if random.random_bool(0.3) && !text.is_empty() {
            let at = random.random_range(0..text.len());
            text[at] = random.random();
        }
        let mut path = (*path).to_owned();
        if random.random_bool(0.2) {
            path.push_str(
                ["/", "%00", "%2e%2e", "?days=99999999999999999999", "&limit=-1", "é"][random.random_range(0..5)],
            );
        }
        let (code, reply) = house.exchange(method, &path, &text).await;
        tried += 1;
        let shown = || format!("seed {seed}: {method} {path} {}: {code} {reply}", String::from_utf8_lossy(&text));
        assert!(matches!(code, 200 | 400 | 404 | 405 | 409 | 413 | 503), "{}", shown());
        taken += u64::from(code == 200);
        if code != 200 && code != 405 {
            assert!(reply["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{}", shown());
        }
    }
    println!("{tried} exchanges, {taken} taken");
    assert_eq!(house.exchange("GET", "/v1/status", b"").await.0, 200, "it goes on");
    let (_, verdict) = house.exchange("GET", "/v1/audit/verify", b"").await;
    assert_eq!(verdict["intact"], true, "seed {seed}: {verdict}");
}
