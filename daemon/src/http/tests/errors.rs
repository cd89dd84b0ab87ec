//! The odd requests that vLLM was asked (`tests/data/vllm/errors.txt`), asked again here: same status, type and words, or
//! a difference that is named below with its reason.

use super::*;
use std::collections::BTreeMap;
use std::path::Path;

struct Case {
    name: String,
    method: String,
    path: String,
    body: String,
    status: u16,
    answer: Value,
}

fn cases() -> Vec<Case> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vllm/errors.txt");
    let text = std::fs::read_to_string(file).unwrap();
    text.split("\n## ")
        .map(|section| section.strip_prefix("## ").unwrap_or(section))
        .filter(|section| !section.trim().is_empty())
        .map(|section| {
            let mut lines = section.split('\n');
            let name = lines.next().unwrap().to_owned();
            let (method, path) = lines.next().unwrap().split_once(' ').unwrap();
            let rest: Vec<&str> = lines.collect();
            let http = rest.iter().position(|l| l.starts_with("HTTP ")).unwrap();
            let body = rest[..http].join("\n");
            let status = rest[http].strip_prefix("HTTP ").unwrap().parse().unwrap();
            let answer = rest[http..].iter().find(|l| l.starts_with('{')).unwrap();
            Case {
                name,
                method: method.to_owned(),
                path: path.to_owned(),
                // The record abbreviates long prompts.
                body: body.trim_end_matches('\n').replace("\" time\" * 5000", &format!("{:?}", " time".repeat(5000))),
                status,
                answer: serde_json::from_str(answer).unwrap(),
            }
        })
        .collect()
}

/// Where we differ on purpose, and why.
fn differences() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([
        ("prompt too long", "we count all tokens of the prompt, vLLM stops counting one past the limit"),
        ("prompt too long (chat)", "as above"),
        ("error in a stream request (prompt too long)", "as above"),
        ("malformed JSON", "the cause is in our parser's words"),
        ("content part of unknown type", "one sentence instead of seven validators' opinions"),
        ("too many stops (5)", "one error, not also that a list is no string"),
        ("bad response_format", "one error instead of one per alternative"),
        ("negative prompt token id", "one error instead of one per alternative"),
        ("tokenize without prompt", "one error instead of one per alternative"),
        ("top_logprobs 100", "same words, no difference but kept here as the parameter is `logprobs` there too"),
        ("bad regex (structured_outputs)", "the regex is read as such, vLLM wraps it in a grammar and quotes that"),
        ("unknown path", "the error object instead of FastAPI's `detail`"),
        ("wrong method", "the error object instead of FastAPI's `detail`"),
        ("unknown model id", "this endpoint exists here; the error object"),
        ("tool_choice required", "tools work without a flag here"),
        ("image for a text model", "the part is named in `param`"),
    ])
}

/// One line of `docs/compat.md`.
fn row(case: &Case, ours: &Reply, reason: Option<&&str>) -> String {
    let words = |answer: &Value| {
        let error = &answer["error"];
        let text = error["message"].as_str().map_or_else(|| answer.to_string(), str::to_owned);
        let text = text.replace('\n', " ").replace('|', "\\|");
        let short: String = text.chars().take(160).collect();
        if short.len() < text.len() { format!("{short}…") } else { short }
    };
    let cell = |status: u16, answer: &Value| match status {
        200 => "200".to_owned(),
        _ => format!(
            "{status} {} `{}`",
            answer["error"]["type"].as_str().unwrap_or("-"),
            words(answer).replace('`', "'")
        ),
    };
    let (theirs, ours_cell) = (cell(case.status, &case.answer), cell(ours.status.as_u16(), &ours.json()));
    match theirs == ours_cell {
        true => format!("| {} | {theirs} | the same | |\n", case.name),
        false => format!("| {} | {theirs} | {ours_cell} | {} |\n", case.name, reason.unwrap_or(&"")),
    }
}

const TABLE_HEAD: &str = "# What vLLM refuses, and what ernied does\n\n\
    Every request of which vLLM 0.32's answer was recorded (`daemon/tests/data/vllm/errors.txt`), asked again here by a test \n\
    (`cargo test -p ernied --lib -- what_vllm_refused`). This page is written by it; `ERNIED_TEST_BLESS=1` renews it and the \n\
    golden file with our full answers, `daemon/tests/data/vllm/errors-ours.txt`. Long messages are cut. `param` is always set here.\n\n\
    | request | vLLM 0.32 | ernied | why |\n|---|---|---|---|\n";

/// Holds `text` against a file of the repository, or renews it.
fn held_as_golden(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(kept, text, "{} is not what is answered now; ERNIED_TEST_BLESS=1 renews it", path.display());
}

#[tokio::test]
async fn what_vllm_refused_is_refused_alike_or_the_difference_is_named() {
    let house = House::saying("x").await;
    let differences = differences();
    let (mut table, mut golden) = (TABLE_HEAD.to_owned(), String::new());
    let mut seen = 0;
    for case in cases() {
        seen += 1;
        let content_type = if case.name == "wrong content type" { "text/plain" } else { "application/json" };
        let request = Request::builder()
            .method(case.method.as_str())
            .uri(&case.path)
            .header("content-type", content_type)
            .body(Body::from(case.body.clone()))
            .unwrap();
        let reply = house.call(request).await;
        table.push_str(&row(&case, &reply, differences.get(case.name.as_str())));
        // What a model says, and when, is no refusal.
        let said = if reply.status == 200 { String::new() } else { reply.text() };
        golden.push_str(&format!("## {}\nHTTP {}\n{said}\n\n", case.name, reply.status.as_u16()));
        if case.name == "tool_choice required" {
            continue;
        }
        assert_eq!(reply.status.as_u16(), case.status, "{}: {}", case.name, reply.text());
        if case.status == 200 {
            continue;
        }
        let (ours, theirs) = (&reply.json()["error"], &case.answer["error"]);
        if theirs.is_null() {
            assert!(differences.contains_key(case.name.as_str()), "{}", case.name);
            assert_eq!(ours["code"], case.status);
            continue;
        }
        assert_eq!(ours["type"], theirs["type"], "{}: {ours}", case.name);
        assert_eq!(ours["code"], theirs["code"], "{}", case.name);
        if !theirs["param"].is_null() {
            assert_eq!(ours["param"], theirs["param"], "{}", case.name);
        }
        if !differences.contains_key(case.name.as_str()) {
            assert_eq!(ours["message"], theirs["message"], "{}", case.name);
        }
    }
    assert!(seen > 55, "only {seen} cases were read");
    held_as_golden("tests/data/vllm/errors-ours.txt", &golden);
    held_as_golden("../docs/compat.md", &table);
}

#[tokio::test]
async fn a_request_over_the_context_is_told_in_the_words_that_clients_match() {
    let house = House::saying("x").await;
    let long = "a".repeat(4000);
    let reply = house.complete(serde_json::json!({"prompt": long, "max_tokens": 200})).await;
    assert_eq!(reply.status, 400);
    let error = reply.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with(
            "This model's maximum context length is 4096 tokens. However, you requested 200 output tokens"
        ),
        "{message}"
    );
    assert_eq!(error["param"], "input_tokens");
    assert!(house.workers.submits().is_empty(), "nothing reached the engine");
}

#[tokio::test]
async fn the_openai_style_names_codes_in_words() {
    let mut plan = Plan::default();
    plan.settings.error_style = crate::config::ErrorStyle::Openai;
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    let reply = house.complete(serde_json::json!({"model": "nope"})).await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.json()["error"]["code"], "model_not_found");
    assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
    let reply = house.complete(serde_json::json!({"prompt": "a".repeat(5000)})).await;
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
}

#[tokio::test]
async fn with_keys_every_path_but_the_probes_wants_one() {
    let plan = Plan { keys: vec!["sk-good"], ..Plan::default() };
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    for path in ["/health", "/ping", "/version", "/livez", "/readyz", "/health/live"] {
        assert_eq!(house.get(path).await.status, 200, "{path}");
    }
    let closed = [
        "/v1/models",
        "//v1/models",
        "/V1/models",
        "/v1%2fmodels",
        "/./v1/models",
        "/v1/models/",
        "/metrics",
        "/tokenize",
        "/load",
        "/nope",
        "/health/",
        "//health",
        "/v1/models?x=/health",
        "http://elsewhere/v1/models",
    ];
    for path in closed {
        for method in ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "TRACE"] {
            for key in [None, Some("sk-bad"), Some("sk-goo"), Some("sk-good ")] {
                let mut request = Request::builder().method(method).uri(path);
                if let Some(key) = key.filter(|k| *k != "sk-good ") {
                    request = request.header("authorization", format!("Bearer {key}"));
                }
                let reply = house.call(request.body(Body::empty()).unwrap()).await;
                assert_eq!(reply.status, 401, "{method} {path} {key:?}");
                assert_eq!(reply.headers["www-authenticate"], "Bearer");
            }
        }
    }
    let good = |path: &str| Request::get(path).header("authorization", "Bearer sk-good").body(Body::empty()).unwrap();
    assert_eq!(house.call(good("/v1/models")).await.status, 200);
    assert_eq!(house.call(good("//v1/models")).await.status, 404);
    assert_eq!(house.call(good("/metrics")).await.status, 200);
    let preflight = Request::options("/v1/models").body(Body::empty()).unwrap();
    let preflight = house.call(preflight).await;
    assert_eq!((preflight.status.as_u16(), &preflight.headers["allow"]), (204, &"GET,HEAD".parse().unwrap()));
    let nowhere = Request::options("/nope").body(Body::empty()).unwrap();
    assert_eq!(house.call(nowhere).await.status, 404);
    let upgrade = Request::get("/health").header("upgrade", "websocket").body(Body::empty()).unwrap();
    assert_eq!(house.call(upgrade).await.status, 400);
}

#[tokio::test]
async fn every_answer_carries_a_request_id_and_takes_a_sane_one() {
    let house = House::saying("x").await;
    for (path, status) in [("/health", 200), ("/nope", 404)] {
        let request = Request::get(path).header("x-request-id", "abc-1").body(Body::empty()).unwrap();
        let reply = house.call(request).await;
        assert_eq!((reply.status.as_u16(), reply.headers["x-request-id"].to_str().unwrap()), (status, "abc-1"));
    }
    let mut request = post("/v1/completions", r#"{"prompt": "a"}"#);
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    let reply = house.call(request).await;
    assert_eq!(reply.ok()["id"], "cmpl-mine");
    let odd = Request::get("/health").header("x-request-id", "a".repeat(500)).body(Body::empty()).unwrap();
    assert_eq!(house.call(odd).await.headers["x-request-id"].len(), 16);
}

#[tokio::test]
async fn probes_tell_the_truth_while_nothing_is_loaded() {
    let mut plan = Plan { loads: false, ..Plan::default() };
    plan.settings.model_patience = Duration::from_millis(1);
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    assert_eq!(house.get("/health/live").await.status, 200);
    for path in ["/health", "/ready", "/readyz", "/ping", "/health/ready", "/health/startup"] {
        let reply = house.get(path).await;
        assert_eq!(reply.status, 503, "{path}");
        assert!(reply.text().starts_with("starting: "), "{}", reply.text());
    }
    let verbose = house.get("/health?verbose").await;
    assert_eq!(verbose.json()["state"], "starting");
    let reply = house.chat(serde_json::json!({})).await;
    assert_eq!(reply.status, 503);
    assert!(reply.headers.contains_key("retry-after"));
    house.workers.loads.cancel();
    house.api.fleet.pick_or_wait(None, Duration::from_secs(60)).await.unwrap();
    let mut status = house.api.fleet.watch();
    status.wait_for(|s| s.is_ready()).await.unwrap();
    let reply = house.get("/health").await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
    assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    house.chat(serde_json::json!({})).await.ok();
}

#[tokio::test]
async fn other_kinds_of_model_are_not_offered_and_said_so() {
    let house = House::saying("x").await;
    let reply = house.post("/v1/embeddings", &serde_json::json!({"input": "x"})).await;
    assert_eq!(reply.status, 501);
    assert_eq!(reply.json()["error"]["type"], "NotImplementedError");
    let reply = house.get("/v1/completions").await;
    assert_eq!(reply.status, 405);
    assert!(reply.headers.contains_key("allow"), "{:?}", reply.headers);
}

#[tokio::test]
async fn the_document_and_the_router_know_the_same_paths() {
    let house = House::saying("x").await;
    let document = house.get("/openapi.json").await.ok();
    assert_eq!(document, super::super::openapi::parsed());
    let source = include_str!("../mod.rs");
    let paths = document["paths"].as_object().unwrap();
    for (path, operations) in paths {
        assert!(source.contains(&format!(".route(\"{path}\"")), "{path} is described but not served");
        for method in operations.as_object().unwrap().keys() {
            let request = Request::builder().method(method.to_uppercase().as_str()).uri(path.replace("{id}", "x"));
            let reply = house.call(request.body(Body::empty()).unwrap()).await;
            let unknown = reply.status == 405 || (reply.status == 404 && reply.text().contains("there is no"));
            assert!(!unknown, "{method} {path}: {}", reply.text());
        }
    }
    for line in source.lines().filter_map(|l| l.trim().strip_prefix(".route(\"")) {
        let path = line.split('"').next().unwrap();
        assert!(paths.contains_key(path.trim_end_matches('/')), "{path} is served but not described");
    }
}

#[tokio::test]
async fn changed_settings_count_from_the_next_request() {
    let house = House::saying("x").await;
    let odd = serde_json::json!({"no_such_field": 1});
    house.chat(odd.clone()).await.ok();
    let strict = HttpSettings { strict_requests: true, ..(*house.api.settings()).clone() };
    house.api.settings.send_replace(Arc::new(strict));
    assert_eq!(house.chat(odd).await.status, 400);
    let none = AdmissionLimits { running_max: 0, queued_max: 1, queued_tokens_max: None };
    house.api.admission.set_limits(none);
    let _held = house.api.admission.admit(1).unwrap();
    assert_eq!(house.chat(serde_json::json!({})).await.status, 503);
}
