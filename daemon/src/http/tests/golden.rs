//! Bodies and streams beside what vLLM 0.32 answered (`tests/data/vllm`): same members, same order, same types.

use super::*;
use serde_json::json;
use std::path::Path;

/// One recorded exchange.
struct Recorded {
    path: String,
    request: Value,
    body: String,
}

fn recorded(name: &str) -> Recorded {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vllm").join(format!("{name}.txt"));
    let text = std::fs::read_to_string(&file).unwrap();
    let mut sections = text.splitn(3, "\n\n");
    let (first, _head, body) = (sections.next().unwrap(), sections.next().unwrap(), sections.next().unwrap());
    let (line, request) = first.split_once('\n').unwrap_or((first, "null"));
    let path = line.split_once(' ').unwrap().1.to_owned();
    Recorded { path, request: serde_json::from_str(request).unwrap(), body: body.trim_end().to_owned() }
}

/// Members that are ours alone, or that vLLM leaves null where we say something (vllm-compat §4).
const OURS: [&str; 3] = ["prompt_tokens_details", "revision", "state"];

/// The form of a value: names, order and types; lists by their first element.
fn form(value: &Value) -> Value {
    match value {
        Value::Null => json!("null"),
        Value::Bool(_) => json!("bool"),
        Value::Number(_) => json!("number"),
        Value::String(_) => json!("string"),
        Value::Array(items) => Value::Array(items.iter().find(|i| !i.is_null()).map(form).into_iter().collect()),
        Value::Object(members) => Value::Object(
            (members.iter())
                .filter(|(name, _)| !OURS.contains(&name.as_str()))
                .map(|(name, value)| (name.clone(), form(value)))
                .collect(),
        ),
    }
}

/// As text, so that the order of members counts.
#[track_caller]
fn assert_same_form(ours: &Value, theirs: &Value, what: &str) {
    assert_eq!(
        serde_json::to_string_pretty(&form(ours)).unwrap(),
        serde_json::to_string_pretty(&form(theirs)).unwrap(),
        "{what}\nours: {ours}\ntheirs: {theirs}"
    );
}

/// As many tokens as asked for, whose texts are never empty.
fn letters(_: &TextModel, submit: &Submit) -> Answer {
    let first = fixtures::text_model().tokenizer().id_of("<0x61>").unwrap();
    let tokens: Vec<u32> = (0..submit.sampling.max_tokens).map(|i| first + i % 20).collect();
    let mut answer = Answer::of(tokens, FinishReason::Length);
    answer.choices = vec![answer.choices[0].clone(); submit.choices.len()];
    answer
}

#[tokio::test]
async fn whole_answers_have_the_members_of_vllm_in_its_order() {
    let house = House::answering(letters).await;
    for name in [
        "chat",
        "chat-logprobs",
        "chat-json-object",
        "completion",
        "completion-n2-logprobs-echo",
        "completion-batch-token-ids",
        "completion-prompt-logprobs-token-ids",
        "tokenize-prompt",
        "tokenize-messages",
        "tokenize-token-strs",
        "detokenize",
    ] {
        let recorded = recorded(name);
        let ours = house.post(&recorded.path, &recorded.request).await.ok();
        let mut ours = ours;
        let mut theirs: Value = serde_json::from_str(&recorded.body).unwrap();
        // Maps from tokens to numbers have the tokens as names: only that there are as many.
        for value in [&mut ours, &mut theirs] {
            count_maps(value);
        }
        assert_same_form(&ours, &theirs, name);
    }
}

/// `top_logprobs` of completions and `prompt_logprobs` are maps whose names depend on the vocabulary.
fn count_maps(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, value) in members.iter_mut() {
                if matches!(name.as_str(), "top_logprobs" | "prompt_logprobs") {
                    for map in value.as_array_mut().into_iter().flatten() {
                        // Chat has lists of objects here, with fixed names.
                        if map.as_object().is_some_and(|m| !m.contains_key("token")) {
                            *map = map.as_object().and_then(|m| m.values().next().cloned()).unwrap_or(Value::Null);
                        }
                    }
                } else {
                    count_maps(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(count_maps),
        _ => {}
    }
}

#[tokio::test]
async fn a_stop_string_is_reported_as_vllm_reports_it() {
    let house = House::saying(" z").await;
    let recorded = recorded("chat-stop");
    let ours = house.post(&recorded.path, &recorded.request).await.ok();
    let theirs: Value = serde_json::from_str(&recorded.body).unwrap();
    assert_same_form(&ours, &theirs, "chat-stop");
    for member in ["/choices/0/message/content", "/choices/0/finish_reason", "/choices/0/stop_reason"] {
        assert_eq!(ours.pointer(member), theirs.pointer(member), "{member}");
    }
}

#[tokio::test]
async fn streams_have_the_events_of_vllm_in_its_order() {
    let house = House::answering(letters).await;
    for name in [
        "chat-stream",
        "chat-stream-usage",
        "chat-stream-usage-logprobs",
        "completion-stream",
        "completion-stream-usage",
        "completion-stream-usage-continuous-logprobs",
    ] {
        let recorded = recorded(name);
        let reply = house.post(&recorded.path, &recorded.request).await;
        assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
        let ours = reply.events();
        let theirs: Vec<Value> = (recorded.body.split("\n\n"))
            .filter_map(|e| e.strip_prefix("data: "))
            .filter(|e| *e != "[DONE]")
            .map(|e| serde_json::from_str(e).unwrap())
            .collect();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (i, (mut ours, mut theirs)) in ours.into_iter().zip(theirs).enumerate() {
            count_maps(&mut ours);
            count_maps(&mut theirs);
            assert_same_form(&ours, &theirs, &format!("{name}, event {i}"));
        }
    }
}

#[tokio::test]
async fn two_choices_stream_with_their_indexes_and_ends() {
    let house = House::answering(letters).await;
    let recorded = recorded("completion-stream-n2");
    let events = house.post(&recorded.path, &recorded.request).await.events();
    for index in 0..2 {
        let of: Vec<&Value> = events.iter().filter(|e| e["choices"][0]["index"] == index).collect();
        assert_eq!(of.len(), 2);
        assert_eq!(of[1]["choices"][0]["finish_reason"], "length");
        assert!(of[1]["system_fingerprint"].is_string());
    }
}

#[tokio::test]
async fn the_model_list_has_the_members_of_vllm_and_ours_at_the_end() {
    let house = House::saying("x").await;
    let ours = house.get("/v1/models").await.ok();
    let theirs: Value = serde_json::from_str(&recorded("models").body).unwrap();
    assert_same_form(&ours, &theirs, "models");
    assert_eq!(ours["data"][0]["state"], "serving");
    assert_eq!(ours["data"][0]["max_model_len"], CONTEXT);
    let one = house.get("/v1/models/ernie-0.3b").await.ok();
    assert_eq!(one, ours["data"][0]);
    let missing = house.get("/v1/models/nope").await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert_eq!(missing.json()["error"]["param"], "model");
}
