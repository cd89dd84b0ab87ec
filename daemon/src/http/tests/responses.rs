//! OpenAI's newer form, and batches of conversations.

use super::*;
use serde_json::json;

fn events(reply: &Reply) -> Vec<Value> {
    (reply.text().split("\n\n"))
        .filter(|e| !e.is_empty() && !e.starts_with(':'))
        .map(|e| {
            let (name, data) = e.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
            data
        })
        .collect()
}

#[tokio::test]
async fn a_response_comes_whole_is_kept_and_can_be_continued() {
    let house = House::saying("你好").await;
    let first =
        house.post("/v1/responses", &json!({"model": MODEL, "input": "hi", "instructions": "be brief"})).await.ok();
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(first["output"][0]["content"][0]["text"], "你好");
    let id = first["id"].as_str().unwrap();
    assert_eq!(house.get(&format!("/v1/responses/{id}")).await.ok(), first);
    let next = json!({"input": [{"role": "user", "content": "more"}], "previous_response_id": id});
    house.post("/v1/responses", &next).await.ok();
    let prompt = house.text.decode(&house.workers.submits()[1].prompt, true);
    assert_eq!(prompt, "User: hi\nAssistant: 你好User: more\nAssistant: ");
    let cancel = house.post(&format!("/v1/responses/{id}/cancel"), &json!({})).await;
    assert_eq!(cancel.status, 400);
    let gone = house.call(Request::delete(format!("/v1/responses/{id}")).body(Body::empty()).unwrap()).await;
    assert_eq!(gone.ok()["deleted"], true);
    assert_eq!(house.get(&format!("/v1/responses/{id}")).await.status, 404);
}

#[tokio::test]
async fn a_response_streams_as_typed_events_with_rising_numbers() {
    let house = House::saying("好<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>").await;
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let reply = house.post("/v1/responses", &json!({"input": "hi", "stream": true, "tools": tools})).await;
    let events = events(&reply);
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
    }
    assert_eq!(
        kinds.iter().filter(|k| !k.ends_with(".delta")).copied().collect::<Vec<_>>(),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][1]["arguments"], "{\"x\": 1}");
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 3);
}

#[tokio::test]
async fn a_response_cut_short_is_incomplete() {
    let house = House::saying("abcdef").await;
    let reply = house.post("/v1/responses", &json!({"input": "hi", "max_output_tokens": 2})).await.ok();
    assert_eq!(
        (&reply["status"], &reply["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    for (body, param) in [
        (json!({}), "body.input"),
        (json!({"input": "a", "background": true, "store": false}), "store"),
        (json!({"input": [{"type": "image_generation_call"}]}), "body.input.0.type"),
        (json!({"input": "a", "previous_response_id": "resp_x"}), "response_id"),
    ] {
        assert_eq!(house.post("/v1/responses", &body).await.json()["error"]["param"], param, "{body}");
    }
}

/// Until the response has ended.
async fn ended(house: &House, id: &str) -> Value {
    loop {
        let response = house.get(&format!("/v1/responses/{id}")).await.ok();
        if !["queued", "in_progress"].contains(&response["status"].as_str().unwrap()) {
            return response;
        }
        tokio::task::yield_now().await;
    }
}

fn in_state_dir(dir: &std::path::Path) -> Plan {
    let mut plan = Plan::default();
    plan.settings.state_dir = Some(dir.to_owned());
    plan
}

#[tokio::test]
async fn a_background_response_is_worked_on_without_its_client_and_can_be_cancelled_once() {
    let house = House::saying("好").await;
    let begun = house.post("/v1/responses", &json!({"input": "hi", "background": true})).await.ok();
    assert_eq!(
        (&begun["status"], &begun["background"], &begun["usage"]),
        (&json!("queued"), &json!(true), &Value::Null)
    );
    let id = begun["id"].as_str().unwrap();
    let done = ended(&house, id).await;
    assert_eq!((&done["status"], &done["output"][0]["content"][0]["text"]), (&json!("completed"), &json!("好")));
    assert_eq!(done["created_at"], begun["created_at"]);
    let cancelled = house.post(&format!("/v1/responses/{id}/cancel"), &json!({})).await.ok();
    assert_eq!(cancelled["status"], "completed", "what has ended stays as it is");

    let stuck = |model: &TextModel, submit: &Submit| Answer { hold: Some(Arc::default()), ..say(model, submit, "x") };
    let house = House::answering(stuck).await;
    let begun = house.post("/v1/responses", &json!({"input": "hi", "background": true})).await.ok();
    let path = format!("/v1/responses/{}", begun["id"].as_str().unwrap());
    let cancelled = house.post(&format!("{path}/cancel"), &json!({})).await.ok();
    assert_eq!(cancelled["status"], "cancelled");
    assert_eq!(house.get(&path).await.ok()["status"], "cancelled");
    house.workers.aborted.notified().await;
    assert_eq!(house.get(&format!("{path}?stream=true")).await.json()["error"]["param"], "stream");
}

#[tokio::test]
async fn a_background_response_streams_to_its_client_and_to_those_who_come_later() {
    let house = House::saying("好 abc").await;
    let body = json!({"input": "hi", "background": true, "stream": true});
    let all = events(&house.post("/v1/responses", &body).await);
    assert!(all.iter().enumerate().all(|(i, event)| event["sequence_number"] == i), "{all:?}");
    let last = all.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.completed"), &json!("completed")));
    let path = format!("/v1/responses/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(house.get(&path).await.ok(), last["response"]);
    assert_eq!(house.get(&format!("{path}?stream=true")).await.json()["error"]["param"], "stream", "it has ended");

    // The client that began it goes; another one follows from where it was.
    let hold = Arc::new(tokio::sync::Notify::new());
    let held = hold.clone();
    let house =
        House::answering(move |model, submit| Answer { hold: Some(held.clone()), ..say(model, submit, "xy") }).await;
    let response = house.router.clone().oneshot(post("/v1/responses", body.to_string())).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    let begun = futures::StreamExt::next(&mut body).await.unwrap().unwrap();
    let begun = String::from_utf8(begun.to_vec()).unwrap();
    let id = begun.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    drop(body);
    let from = format!("/v1/responses/{id}?stream=true&starting_after=1");
    let follower = Request::get(from).body(Body::empty()).unwrap();
    let response = house.router.clone().oneshot(follower).await.unwrap();
    let release = async {
        for _ in 0..1000 {
            hold.notify_one();
            tokio::task::yield_now().await;
        }
    };
    let (body, ()) = tokio::join!(response.into_body().collect(), release);
    let reply = Reply { status: StatusCode::OK, headers: http::HeaderMap::new(), body: body.unwrap().to_bytes() };
    let rest = events(&reply);
    assert_eq!(rest[0]["sequence_number"], 2, "{rest:?}");
    assert_eq!(rest.last().unwrap()["response"]["output"][0]["content"][0]["text"], "xy");
    assert_eq!(house.get(&format!("/v1/responses/{id}?stream=true&starting_after=x")).await.status, 400);
}

#[tokio::test]
async fn what_is_stored_survives_a_restart_and_what_ran_in_the_background_is_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let house = House::with(in_state_dir(dir.path()), |model, submit| say(model, submit, "a")).await;
    let first = house.post("/v1/responses", &json!({"input": "hi"})).await.ok();
    drop(house);
    let hold = |model: &TextModel, submit: &Submit| Answer { hold: Some(Arc::default()), ..say(model, submit, "x") };
    let stuck = House::with(in_state_dir(dir.path()), hold).await;
    let body = json!({"input": "more", "previous_response_id": first["id"], "background": true});
    let begun = stuck.post("/v1/responses", &body).await.ok();
    drop(stuck);
    let house = House::with(in_state_dir(dir.path()), |model, submit| say(model, submit, "b")).await;
    assert_eq!(house.get(&format!("/v1/responses/{}", first["id"].as_str().unwrap())).await.ok(), first);
    super::super::responses::background::resume(house.api.clone()).await;
    let done = ended(&house, begun["id"].as_str().unwrap()).await;
    assert_eq!(done["output"][0]["content"][0]["text"], "b");
    assert_eq!(done["previous_response_id"], first["id"]);
    let prompt = house.text.decode(&house.workers.submits()[0].prompt, true);
    assert_eq!(prompt, "User: hi\nAssistant: aUser: more\nAssistant: ");
}

#[tokio::test]
async fn a_batch_of_conversations_is_answered_in_order() {
    let house = House::saying("a").await;
    let one = |text: &str| json!([{"role": "user", "content": text}]);
    let reply = house.post("/v1/chat/completions/batch", &json!({"messages": [one("x"), one("y")]})).await.ok();
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(reply["usage"]["completion_tokens"], 4);
    for body in [json!({}), json!({"messages": []}), json!({"messages": [one("x")], "stream": true})] {
        assert_eq!(house.post("/v1/chat/completions/batch", &body).await.status, 400, "{body}");
    }
}
