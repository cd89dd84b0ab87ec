//! Path × method × state of the key: closed unless a key opens it, whatever the spelling.

use super::*;
use crate::audit::Actor;
use crate::http::auth::{is_in_scope, is_open_path};
use crate::keys::Scope;
use ernie_proto::admin::{KeyLimits, NewKey};
use http::Method;

/// As the client sends it, and what it is worth.
#[derive(Debug, Clone)]
struct Presented {
    what: &'static str,
    header: Option<(&'static str, String)>,
    /// `None`: not accepted.
    scope: Option<Scope>,
}

const PATHS: &[&str] = &[
    // Every route.
    "/health",
    "/health/live",
    "/health/ready",
    "/health/startup",
    "/ping",
    "/ready",
    "/readyz",
    "/livez",
    "/healthz",
    "/version",
    "/load",
    "/metrics",
    "/metrics/",
    "/v1/models",
    "/v1/models/ernie-0.3b",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/files",
    "/v1/files/file-1",
    "/v1/files/file-1/content",
    "/v1/batches",
    "/v1/batches/batch_1",
    "/v1/batches/batch_1/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/openapi.json",
    "/tokenize",
    "/detokenize",
    // What is not there, and what must not be mistaken for something that is.
    "/",
    "/v1",
    "/v1/",
    "/nothing",
    "/invocations",
    "/sleep",
    "/reset_prefix_cache",
    "/v1/status",
    "/v1/drain",
    "//v1/models",
    "/V1/models",
    "/v1/Models",
    "/v1/models/",
    "/v1%2fmodels",
    "/%76%31/models",
    "/./v1/models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/v1/models;/health",
    "/v1/models?path=/health",
    "/health/",
    "/health//",
    "/Health",
    "/%68ealth",
    "/health/live/",
    "/health%00",
    "/ping/../v1/completions",
    "http://localhost/v1/models",
    "http://localhost/v1/completions",
    "http://health/v1/models",
    "//health/v1/models",
];

async fn presented(house: &House) -> Vec<Presented> {
    let configured = [Secret::new("the-configured-key".to_owned())];
    let make = |name: &str, scope: &str, expires: Option<u64>| NewKey {
        name: name.to_owned(),
        scope: Some(scope.to_owned()),
        expires_in_seconds: expires,
        ..NewKey::default()
    };
    let keys = &house.api.keys;
    let mut made = Vec::new();
    for new in [
        make("good", "inference", None),
        make("monitor", "monitor", None),
        make("expired", "inference", Some(0)),
        make("revoked", "inference", None),
    ] {
        made.push(keys.create(&new, Actor::Daemon, "admin", &configured).await.expect("made").1);
    }
    keys.revoke("revoked", Actor::Daemon, "admin", &configured).await.expect("revoked");
    let bearer = |key: &str| Some(("authorization", format!("Bearer {key}")));
    let one = |what, header, scope| Presented { what, header, scope };
    vec![
        one("none", None, None),
        one("unknown", bearer("not-a-key-of-ours"), None),
        one("empty", bearer(""), None),
        one("another scheme", Some(("authorization", format!("Basic {}", made[0]))), None),
        one("a part of a key", bearer(&made[0][..20]), None),
        one("expired", bearer(&made[2]), None),
        one("revoked", bearer(&made[3]), None),
        one("in the query's place", Some(("x-forwarded-authorization", format!("Bearer {}", made[0]))), None),
        one("monitor", bearer(&made[1]), Some(Scope::Monitor)),
        one("good", bearer(&made[0]), Some(Scope::Inference)),
        one("good, as Anthropic's clients send it", Some(("x-api-key", made[0].clone())), Some(Scope::Inference)),
        one("configured", bearer("the-configured-key"), Some(Scope::Inference)),
    ]
}

#[tokio::test]
async fn whatever_the_path_the_method_and_the_key_the_door_is_closed_unless_it_is_opened() {
    let plan = Plan { keys: vec!["the-configured-key"], ..Plan::default() };
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    let keys = presented(&house).await;
    let methods =
        [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS];
    let mut combinations = 0;
    for path in PATHS {
        // What is no request target does not come as far as us.
        let Ok(uri) = path.parse::<http::Uri>() else { continue };
        for method in &methods {
            for key in &keys {
                let mut request = Request::builder().method(method).uri(&uri);
                if let Some((name, value)) = &key.header {
                    request = request.header(*name, value);
                }
                let before = house.workers.submits().len();
                let reply = house.call(request.body(Body::empty()).unwrap()).await;
                let case = format!("{method} {path} with key {}: {}", key.what, reply.status);
                combinations += 1;
                assert_eq!(house.workers.submits().len(), before, "{case}: work was begun without a body");
                let status = reply.status.as_u16();
                if *method == Method::OPTIONS {
                    // Answered before any handler: a preflight, or that there is nothing of that name or method.
                    assert!(matches!(status, 204 | 404 | 405), "{case}");
                } else if is_open_path(method, uri.path()) {
                    assert_ne!(status, 401, "{case}");
                } else {
                    match key.scope {
                        None => assert_eq!(status, 401, "{case}"),
                        Some(scope) if !is_in_scope(scope, uri.path()) => assert_eq!(status, 403, "{case}"),
                        Some(_) => assert!(!matches!(status, 401 | 403 | 500), "{case}"),
                    }
                }
                if matches!(status, 401 | 403) && *method != Method::HEAD {
                    assert!(reply.json()["error"]["message"].is_string(), "{case}: {}", reply.text());
                }
            }
        }
    }
    assert!(combinations >= 400, "{combinations}");
    println!("{combinations} combinations");
}

#[tokio::test]
async fn a_limited_key_is_told_what_is_left_and_an_unlimited_one_nothing() {
    let house = House::saying("ok").await;
    let limits = KeyLimits { requests_per_minute: 2, tokens_per_minute: 1000, ..KeyLimits::default() };
    let make = async |name: &str, limits| {
        let new = NewKey { name: name.to_owned(), limits, ..NewKey::default() };
        house.api.keys.create(&new, Actor::Daemon, "admin", &[]).await.expect("made").1
    };
    let (limited, free) = (make("limited", limits).await, make("free", KeyLimits::default()).await);
    let ask = async |key: &str| {
        let body = with_messages(serde_json::json!({"max_tokens": 4})).to_string();
        let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
        house.call(request.header("authorization", format!("Bearer {key}")).body(body.into()).unwrap()).await
    };
    let told = |reply: &Reply, name: &str| {
        reply.headers.get(format!("x-ratelimit-{name}")).map(|v| v.to_str().unwrap().to_owned())
    };
    for left in ["1", "0"] {
        let reply = ask(&limited).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.text());
        assert_eq!(told(&reply, "limit-requests").as_deref(), Some("2"));
        assert_eq!(told(&reply, "remaining-requests").as_deref(), Some(left));
        assert_eq!(told(&reply, "limit-tokens").as_deref(), Some("1000"));
        let tokens: u32 = told(&reply, "remaining-tokens").expect("told").parse().expect("a number");
        assert!((900..1000).contains(&tokens), "prompt and answer were taken: {tokens}");
    }
    let refused = ask(&limited).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(told(&refused, "remaining-requests").as_deref(), Some("0"));
    assert_eq!(told(&refused, "reset-requests").as_deref(), Some("60s"));
    assert!(refused.headers.contains_key("retry-after"));
    let reply = ask(&free).await;
    assert!(!reply.headers.keys().any(|name| name.as_str().starts_with("x-ratelimit")), "{:?}", reply.headers);
}
