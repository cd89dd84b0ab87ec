//! Who is let in, and how much.

use super::*;
use crate::config::AuditConfig;
use crate::telemetry::metrics::{CacheSettings, Metrics, MetricsSetup};
use ernie_proto::admin::KeyLimits;
use http::HeaderValue;
use std::path::Path;

async fn store(dir: &Path, configured: &[Secret]) -> KeyStore {
    let metrics = Arc::new(Metrics::new(MetricsSetup {
        model_name: "m".to_owned(),
        engines: 1,
        max_model_len: 100,
        max_num_batched_tokens: 100,
        cache: CacheSettings::default(),
        legacy_names: false,
    }));
    let config = AuditConfig { retention: None, max_bytes: None };
    let audit = crate::audit::start(dir, &config, metrics).await.expect("a store");
    KeyStore::start(configured, &audit).await.expect("keys")
}

fn bearer(key: &str) -> HeaderMap {
    HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).expect("a header"))])
}

fn named(name: &str, limits: KeyLimits) -> NewKey {
    NewKey { name: name.to_owned(), limits, ..NewKey::default() }
}

#[tokio::test]
async fn without_keys_everybody_is_anonymous_and_a_first_key_closes_the_door() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[]).await;
    assert_eq!(&*keys.authenticate(&HeaderMap::new()).expect("open").id, "anonymous");
    let (key, secret, _) =
        keys.create(&named("app", KeyLimits::default()), Actor::Daemon, "admin", &[]).await.expect("made");
    assert_eq!(keys.authenticate(&HeaderMap::new()), Err(KeyRefusal::Missing));
    assert_eq!(keys.authenticate(&bearer("ek-wrong")), Err(KeyRefusal::Unknown));
    assert_eq!(*keys.authenticate(&bearer(&secret)).expect("known").id, *key.id);
    keys.revoke("app", Actor::Daemon, "admin", &[]).await.expect("revoked");
    assert_eq!(keys.authenticate(&bearer(&secret)), Err(KeyRefusal::Revoked), "at once");
    assert!(!keys.is_open(), "a revoked last key does not open the door");
}

#[tokio::test]
async fn keys_outlive_a_restart_and_their_secret_is_nowhere_on_disk() {
    let dir = tempfile::tempdir().expect("temp");
    let first = store(dir.path(), &[]).await;
    let (_, secret, _) =
        first.create(&named("app", KeyLimits::default()), Actor::Daemon, "admin", &[]).await.expect("made");
    first.audit.close().await;
    let again = store(dir.path(), &[]).await;
    assert_eq!(&*again.authenticate(&bearer(&secret)).expect("known").name, "app");
    for entry in std::fs::read_dir(dir.path()).expect("listed").flatten() {
        let bytes = std::fs::read(entry.path()).unwrap_or_default();
        let found = bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
        assert!(!found, "{:?} holds the key", entry.path());
    }
}

#[tokio::test]
async fn a_rotated_key_keeps_its_limits_and_the_old_secret_ends() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[]).await;
    let limits = KeyLimits { requests_per_minute: 3, ..KeyLimits::default() };
    let (_, old, _) = keys.create(&named("app", limits), Actor::Daemon, "admin", &[]).await.expect("made");
    let (key, new, _) = keys.rotate("app", Actor::Daemon, "admin", &[]).await.expect("rotated");
    assert_eq!(key.limits, limits);
    assert_eq!(keys.authenticate(&bearer(&old)), Err(KeyRefusal::Revoked));
    assert!(keys.authenticate(&bearer(&new)).is_ok());
}

#[tokio::test]
async fn names_are_unique_and_sane_and_scopes_known() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[]).await;
    keys.create(&named("app", KeyLimits::default()), Actor::Daemon, "admin", &[]).await.expect("made");
    let again = keys.create(&named("app", KeyLimits::default()), Actor::Daemon, "admin", &[]).await;
    assert!(matches!(again, Err(KeyError::Exists(_))));
    for name in ["", "a b", "x/y", "é", &"n".repeat(65)] {
        let bad = keys.create(&named(name, KeyLimits::default()), Actor::Daemon, "admin", &[]).await;
        assert!(matches!(bad, Err(KeyError::Invalid(_))), "{name:?}");
    }
    let scope = NewKey { scope: Some("root".into()), ..named("x", KeyLimits::default()) };
    assert!(matches!(keys.create(&scope, Actor::Daemon, "admin", &[]).await, Err(KeyError::Invalid(_))));
    assert!(matches!(keys.revoke("nobody", Actor::Daemon, "admin", &[]).await, Err(KeyError::NotFound(_))));
}

#[tokio::test]
async fn each_limit_refuses_with_its_name_and_a_time_to_come_back() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[]).await;
    let principal = |keys: &KeyStore, secret: &str| keys.authenticate(&bearer(secret)).expect("known");
    let make = async |name: &str, limits: KeyLimits| {
        keys.create(&named(name, limits), Actor::Daemon, "admin", &[]).await.expect("made").1
    };

    let rpm = make("rpm", KeyLimits { requests_per_minute: 2, ..KeyLimits::default() }).await;
    let p = principal(&keys, &rpm);
    drop((keys.admit(&p).expect("1"), keys.admit(&p).expect("2")));
    let refusal = keys.admit(&p).expect_err("3");
    assert_eq!((refusal.what, refusal.limit), ("requests per minute", 2));
    assert!(refusal.retry_after > Duration::from_secs(1) && refusal.retry_after <= Duration::from_secs(60));

    let tpm = make("tpm", KeyLimits { tokens_per_minute: 100, ..KeyLimits::default() }).await;
    let permit = keys.admit(&principal(&keys, &tpm)).expect("admitted");
    permit.take_tokens(60).expect("there is room");
    assert_eq!(permit.take_tokens(60).expect_err("not for that").what, "tokens per minute");

    let one = make("one", KeyLimits { concurrent_requests: 1, ..KeyLimits::default() }).await;
    let p = principal(&keys, &one);
    let held = keys.admit(&p).expect("the first");
    assert_eq!(keys.admit(&p).expect_err("the second").what, "concurrent requests");
    drop(held);
    keys.admit(&p).expect("given back");

    let daily = make("daily", KeyLimits { tokens_per_day: 50, ..KeyLimits::default() }).await;
    let p = principal(&keys, &daily);
    drop(keys.admit(&p).expect("nothing used yet"));
    keys.record(&p, Usage { prompt_tokens: 40, cached_tokens: 0, completion_tokens: 10 });
    let refusal = keys.admit(&p).expect_err("used up");
    assert_eq!(refusal.what, "tokens per day");
    assert!(refusal.retry_after <= Duration::from_secs(86_400));
}

#[tokio::test]
async fn tokens_of_the_day_survive_a_restart_and_a_reload() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[]).await;
    let limits = KeyLimits { tokens_per_day: 50, ..KeyLimits::default() };
    let (_, secret, _) = keys.create(&named("app", limits), Actor::Daemon, "admin", &[]).await.expect("made");
    keys.record(&keys.authenticate(&bearer(&secret)).expect("known"), Usage { prompt_tokens: 60, ..Usage::default() });
    keys.reload(&[]).await.expect("reloaded");
    assert!(keys.admit(&keys.authenticate(&bearer(&secret)).expect("known")).is_err());
    keys.audit.close().await;
    let again = store(dir.path(), &[]).await;
    assert!(again.admit(&again.authenticate(&bearer(&secret)).expect("known")).is_err());
}

#[tokio::test]
async fn keys_never_share_a_prefix_cache() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[Secret::new("config-key-one".into()), Secret::new("config-key-two".into())]).await;
    let salt = |k: &str| keys.authenticate(&bearer(k)).expect("known").cache_salt;
    assert_ne!(salt("config-key-one"), salt("config-key-two"));
    assert_eq!(salt("config-key-one"), salt("config-key-one"));
}

#[tokio::test]
async fn what_is_not_a_key_is_refused() {
    let dir = tempfile::tempdir().expect("temp");
    let keys = store(dir.path(), &[Secret::new("sk-one-long-enough".into())]).await;
    for value in [
        "Bearer",
        "Bearer ",
        "Basic sk-one-long-enough",
        "sk-one-long-enough",
        "Bearer sk-one-long-enoug",
        "Bearersk-one-long-enough",
    ] {
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(value).expect("a header"))]);
        assert!(keys.authenticate(&headers).is_err(), "{value:?}");
    }
    let mut anthropic = HeaderMap::new();
    anthropic.insert("x-api-key", HeaderValue::from_static("sk-one-long-enough"));
    assert!(keys.authenticate(&anthropic).is_ok());
}
