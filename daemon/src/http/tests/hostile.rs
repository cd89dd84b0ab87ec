//! Bodies that mean harm, or make no sense: always 4xx in the error shape, quickly, and never a word to the engine.

use super::*;
use serde_json::json;

/// Values that fit no field.
fn odd_values() -> Vec<&'static str> {
    vec![
        "\"x\"",
        "-1e308",
        "1e309",
        "NaN",
        "Infinity",
        "9223372036854775808",
        "-9223372036854775809",
        "[]",
        "[[]]",
        "{}",
        "[1,\"a\"]",
        "\"\\ud800\"",
        "1.5.2",
        "tru",
        "0x10",
        "[null]",
    ]
}

#[tokio::test]
async fn two_hundred_bad_bodies_are_all_refused_in_shape() {
    let house = House::saying("x").await;
    let mut bodies: Vec<Vec<u8>> = Vec::new();
    // A value that is wrong for each numeric field.
    for field in [
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "priority",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "stream_interval",
    ] {
        for value in odd_values() {
            let harmless = (field == "temperature" || field.contains("penalty")) && value == "-1e308";
            let _ = harmless;
            bodies.push(format!("{{\"prompt\": \"a\", \"{field}\": {value}}}").into_bytes());
        }
    }
    for (field, value) in [
        ("stop", "7"),
        ("stop", "[1]"),
        ("stop", "{}"),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "\"a\""),
        ("logit_bias", "[]"),
        ("logit_bias", "{\"a\":1}"),
        ("logit_bias", "{\"1\":\"x\"}"),
        ("bad_words", "[\"\"]"),
        ("bad_words", "\"a\""),
        ("allowed_token_ids", "[]"),
        ("allowed_token_ids", "[999999]"),
        ("stream", "\"maybe\""),
        ("stream", "[]"),
        ("echo", "3"),
        ("model", "7"),
        ("model", "[]"),
        ("prompt", "{}"),
        ("prompt", "[{}]"),
        ("prompt", "[[\"a\"]]"),
        ("prompt", "[1,[2]]"),
        ("prompt", "[[]]"),
        ("response_format", "\"json\""),
        ("response_format", "{\"type\":\"xml\"}"),
        ("structured_outputs", "[]"),
        ("guided_choice", "\"a\""),
        ("cache_salt", "\"\""),
        ("cache_salt", "7"),
        ("stream_options", "[]"),
        ("suffix", "\"x\""),
        ("use_beam_search", "true"),
        ("repetition_detection", "{\"max_pattern_size\": 9999, \"min_count\": 2}"),
        ("truncation_side", "\"up\""),
        ("logprobs", "true"),
        ("logprobs", "99"),
    ] {
        bodies.push(format!("{{\"prompt\": \"a\", \"{field}\": {value}}}").into_bytes());
    }
    bodies.extend([
        b"".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"prompt\"".to_vec(),
        b"{".to_vec(),
        b"{\"prompt\": \"a\"".to_vec(),
        b"{\"prompt\": \"a\",}".to_vec(),
        b"{\"prompt\": \"a\"} x".to_vec(),
        b"{\"prompt\": \"a\", \"prompt\": \"b\"}".to_vec(),
        b"\xef\xbb\xbf{\"prompt\": \"a\"}".to_vec(),
        b"{\"prompt\": \"\xff\xfe\"}".to_vec(),
        b"\xff\xfe{\0}\0".to_vec(),
        b"{\"prompt\": \"\\udead\"}".to_vec(),
        b"{'prompt': 'a'}".to_vec(),
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00".to_vec(),
        format!("{{\"prompt\": {}1{}}}", "[".repeat(10_000), "]".repeat(10_000)).into_bytes(),
        format!("{{\"prompt\": {}}}", "{\"a\":".repeat(10_000)).into_bytes(),
        format!("{{\"prompt\": [{}1]}}", "1,".repeat(1_100_000)).into_bytes(),
        format!("{{\"prompt\": [{}\"a\"]}}", "\"a\",".repeat(2000)).into_bytes(),
        format!(
            "{{\"prompt\": \"a\", \"logit_bias\": {{{}\"0\":1}}}}",
            (1..3000).map(|i| format!("\"{i}\":1,")).collect::<String>()
        )
        .into_bytes(),
    ]);
    assert!(bodies.len() >= 200, "{}", bodies.len());
    let mut accepted = Vec::new();
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(100)]).into_owned();
        let reply = house.call(post("/v1/completions", body)).await;
        if reply.status == 200 {
            accepted.push(shown);
            continue;
        }
        assert!(reply.status.is_client_error(), "{shown}: {} {}", reply.status, reply.text());
        let error = &reply.json()["error"];
        assert!(error["message"].is_string() && error["code"] == reply.status.as_u16(), "{shown}: {error}");
        assert!(error["param"].is_string(), "{shown}: {error}");
    }
    assert_eq!(accepted, Vec::<String>::new(), "these are refused by nobody");
    assert!(house.workers.submits().is_empty());
}

/// Bodies that are no request to any endpoint.
fn no_json() -> Vec<Vec<u8>> {
    let nested = |open: &str, close: &str| format!("{{\"messages\": {}1{}}}", open.repeat(5000), close.repeat(5000));
    vec![
        b"".to_vec(),
        b"[]".to_vec(),
        b"{".to_vec(),
        b"{} {}".to_vec(),
        b"\xef\xbb\xbf{}".to_vec(),
        b"\xff\xfe{}".to_vec(),
        b"{\"model\": \"\xc3\x28\"}".to_vec(),
        b"{\"model\": \"\\ud800\"}".to_vec(),
        b"{\"max_tokens\": 1e400}".to_vec(),
        b"{\"max_tokens\": NaN}".to_vec(),
        b"{\"max_tokens\": 01}".to_vec(),
        b"{\"a\": 1, \"a\": 1}".to_vec(),
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00".to_vec(),
        nested("[", "]").into_bytes(),
        nested("{\"a\":", "}").into_bytes(),
        vec![0; 4096],
    ]
}

#[tokio::test]
async fn every_endpoint_refuses_what_is_no_json_in_its_own_shape() {
    let dir = tempfile::tempdir().unwrap();
    let mut plan = Plan::default();
    plan.settings.state_dir = Some(dir.path().to_owned());
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    for path in [
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/batches",
        "/tokenize",
        "/detokenize",
    ] {
        for body in no_json() {
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
            let reply = house.call(post(path, body)).await;
            assert_eq!(reply.status, 400, "{path} {shown}: {}", reply.text());
            assert!(reply.json()["error"]["message"].is_string(), "{path} {shown}: {}", reply.text());
        }
    }
    for body in no_json() {
        let upload = Request::post("/v1/files").header("content-type", "multipart/form-data; boundary=B");
        assert_eq!(house.call(upload.body(Body::from(body)).unwrap()).await.status, 400);
    }
    assert!(house.workers.submits().is_empty());
}

#[tokio::test]
async fn bad_chats_name_the_message_they_are_about() {
    let house = House::saying("x").await;
    for (messages, param) in [
        (json!([{"content": "x"}]), "body.messages.0.role"),
        (json!([{"role": 7, "content": "x"}]), "body.messages.0.role"),
        (json!(["hi"]), "body.messages.0"),
        (json!([{"role": "user", "content": 7}]), "body.messages.0.content"),
        (json!([{"role": "", "content": "", "tool_calls": [null]}]), "body.messages.0.tool_calls.0"),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "body.messages.0.content.0.text"),
        (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages.0.content.0.type"),
        (json!({}), "body.messages"),
        (json!([]), "messages"),
    ] {
        let reply = house.chat(json!({"messages": messages})).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!(param)), "{messages}");
    }
    for (extra, param) in [
        (json!({"chat_template_kwargs": {"messages": []}}), "messages"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "body.tools.0.function.name"),
        (json!({"tools": [{"type": "code"}]}), "body.tools.0.type"),
        (json!({"tool_choice": "sometimes"}), "body.tool_choice"),
        (json!({"truncate_history": {"max_tokens": 0}}), "truncate_history.max_tokens"),
        (json!({"n": 1_000_000, "temperature": 1}), "n"),
    ] {
        let reply = house.chat(extra.clone()).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!(param)), "{extra}");
    }
    assert!(house.workers.submits().is_empty());
}

#[tokio::test]
async fn bodies_are_bounded_in_size_encoding_and_time() {
    let mut plan = Plan::default();
    plan.settings.max_body_bytes = 1000;
    plan.settings.body_timeout = Duration::from_millis(20);
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    let large = house.complete(json!({"prompt": "a".repeat(2000)})).await;
    assert_eq!(large.status, 413);
    assert_eq!(large.json()["error"]["param"], "body");
    let chunks = futures::stream::iter((0..100).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 100]))));
    assert_eq!(house.call(post("/v1/completions", Body::from_stream(chunks))).await.status, 413);
    let never = futures::stream::pending::<Result<Bytes, std::io::Error>>();
    assert_eq!(house.call(post("/v1/completions", Body::from_stream(never))).await.status, 408);
    let mut gzip = post("/v1/completions", vec![0x1f, 0x8b]);
    gzip.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
    assert_eq!(house.call(gzip).await.status, 415);
    let broken = futures::stream::iter([Err::<Bytes, _>(std::io::Error::other("gone"))]);
    assert_eq!(house.call(post("/v1/completions", Body::from_stream(broken))).await.status, 400);
}

#[tokio::test]
async fn unknown_fields_are_refused_when_requests_are_strict() {
    let mut plan = Plan::default();
    plan.settings.strict_requests = true;
    let house = House::with(plan, |model, submit| say(model, submit, "x")).await;
    let reply = house.chat(json!({"no_such_field": 1})).await;
    assert_eq!(reply.json()["error"]["param"], "no_such_field");
    house.chat(json!({"metadata": {}})).await.ok();
}
