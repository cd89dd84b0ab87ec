//! Anthropic's form.

use super::*;
use serde_json::json;

fn message(extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// (name, data) of every event.
fn named(reply: &Reply) -> Vec<(String, Value)> {
    (reply.text().split("\n\n"))
        .filter(|e| !e.is_empty() && !e.starts_with(':'))
        .map(|e| {
            let (name, data) = e.split_once('\n').unwrap();
            let name = name.strip_prefix("event: ").unwrap().to_owned();
            (name, serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap())
        })
        .collect()
}

#[tokio::test]
async fn a_message_comes_whole_and_as_typed_events() {
    let house = House::saying("你好").await;
    let whole = house.post("/v1/messages", &message(json!({"system": "be brief"}))).await.ok();
    assert_eq!(whole["content"], json!([{"type": "text", "text": "你好"}]));
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("end_turn"))
    );
    assert!(whole["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(whole["usage"]["cache_read_input_tokens"], 2);
    let prompt = house.text.decode(&house.workers.submits()[0].prompt, true);
    assert!(prompt.starts_with("be brief\nUser: hi"), "{prompt}");

    let events = named(&house.post("/v1/messages", &message(json!({"stream": true}))).await);
    let names: Vec<&str> = events.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names.first(), Some(&"message_start"));
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert!(events.iter().all(|(n, d)| d["type"] == n.as_str()));
    let text: String = events.iter().filter_map(|(_, d)| d["delta"]["text"].as_str()).collect();
    assert_eq!(text, "你好");
}

#[tokio::test]
async fn tools_are_used_and_their_results_taken() {
    let house = House::saying("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>").await;
    let body = message(json!({
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 0}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]},
        ],
    }));
    let whole = house.post("/v1/messages", &body).await.ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    assert_eq!((&whole["content"][0]["name"], &whole["content"][0]["input"]), (&json!("f"), &json!({"x": 1})));
    let prompt = house.text.decode(&house.workers.submits()[0].prompt, true);
    assert!(prompt.contains("<tool_response>\n42"), "{prompt}");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = named(&house.post("/v1/messages", &streamed).await);
    let input: String = events.iter().filter_map(|(_, d)| d["delta"]["partial_json"].as_str()).collect();
    assert_eq!(input, "{\"x\": 1}");
}

#[tokio::test]
async fn tokens_are_counted_and_refusals_have_their_form() {
    let house = House::saying("x").await;
    let counted =
        house.post("/v1/messages/count_tokens", &json!({"messages": [{"role": "user", "content": "hi"}]})).await.ok();
    house.post("/v1/messages", &message(json!({}))).await.ok();
    assert_eq!(counted["input_tokens"], house.workers.submits()[0].prompt.len());
    for (body, status, kind) in [
        (json!({"messages": []}), 400, "invalid_request_error"),
        (message(json!({"model": "nope"})), 404, "not_found_error"),
        (
            message(json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]})),
            400,
            "invalid_request_error",
        ),
    ] {
        let reply = house.post("/v1/messages", &body).await;
        assert_eq!(reply.status, status);
        assert_eq!((&reply.json()["type"], &reply.json()["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    }
}
