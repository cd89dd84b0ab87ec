//! Files and batches.

use super::*;
use serde_json::json;

async fn house(dir: &std::path::Path) -> House {
    let mut plan = Plan::default();
    plan.settings.state_dir = Some(dir.to_owned());
    House::with(plan, |model, submit| say(model, submit, "a")).await
}

async fn upload(house: &House, content: &str) -> Value {
    let body = format!(
        "--B\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--B\r\nContent-Disposition: form-data; \
         name=\"file\"; filename=\"in.jsonl\"\r\n\r\n{content}\r\n--B--\r\n"
    );
    let request =
        Request::post("/v1/files").header("content-type", "multipart/form-data; boundary=B").body(Body::from(body));
    house.call(request.unwrap()).await.ok()
}

fn input(lines: usize) -> String {
    let line = |i: usize| {
        json!({"custom_id": format!("c{i}"), "method": "POST", "url": "/v1/chat/completions",
               "body": {"messages": [{"role": "user", "content": format!("{i}")}]}})
    };
    (0..lines).map(|i| line(i).to_string() + "\n").collect()
}

/// Until the batch has one of the states.
async fn wait(house: &House, id: &str, states: &[&str]) -> Value {
    loop {
        let batch = house.get(&format!("/v1/batches/{id}")).await.ok();
        if states.contains(&batch["status"].as_str().unwrap()) {
            return batch;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_batch_is_worked_off_and_its_results_are_files() {
    let dir = tempfile::tempdir().unwrap();
    let house = house(dir.path()).await;
    tokio::spawn(super::super::batches::run(house.api.clone()));
    let content = input(20) + "{\"custom_id\": \"bad\", \"body\": {\"messages\": 7}}\nnot json\n";
    let file = upload(&house, &content).await;
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    let batch = house.post("/v1/batches", &body).await.ok();
    let done = wait(&house, batch["id"].as_str().unwrap(), &["completed", "failed"]).await;
    assert_eq!(done["request_counts"], json!({"total": 22, "completed": 20, "failed": 2}), "{done}");
    let output = house.get(&format!("/v1/files/{}/content", done["output_file_id"].as_str().unwrap())).await.text();
    let mut ids: Vec<String> = Vec::new();
    for line in output.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["response"]["body"]["choices"][0]["message"]["content"], "a");
        ids.push(line["custom_id"].as_str().unwrap().to_owned());
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 20);
    let errors = house.get(&format!("/v1/files/{}/content", done["error_file_id"].as_str().unwrap())).await.text();
    assert!(errors.contains("\"status_code\":400") && errors.contains("\"custom_id\":\"bad\""), "{errors}");
    assert!(house.workers.submits().iter().all(|s| s.priority == 1_000_000), "behind everything else");
    assert_eq!(house.get("/v1/batches").await.ok()["data"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_batch_goes_on_after_a_restart_without_doing_a_line_twice() {
    let dir = tempfile::tempdir().unwrap();
    let house = house(dir.path()).await;
    let file = upload(&house, &input(5)).await;
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/chat/completions"});
    let id = house.post("/v1/batches", &body).await.ok()["id"].as_str().unwrap().to_owned();
    // As a daemon leaves it that dies in the middle: two results, one of them cut off.
    let done = "{\"custom_id\":\"c1\",\"response\":{}}\n{\"custom_id\":\"c2\",\"resp";
    std::fs::write(dir.path().join("batches").join(&id).join("output.jsonl"), done).unwrap();
    tokio::spawn(super::super::batches::run(house.api.clone()));
    let batch = wait(&house, &id, &["completed"]).await;
    assert_eq!(batch["request_counts"]["completed"], 5);
    assert_eq!(house.workers.submits().len(), 4);
}

#[tokio::test]
async fn a_batch_can_be_cancelled_and_odd_ones_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let house = house(dir.path()).await;
    let file = upload(&house, &input(3)).await;
    let body = json!({"input_file_id": file["id"], "endpoint": "/v1/chat/completions"});
    let id = house.post("/v1/batches", &body).await.ok()["id"].as_str().unwrap().to_owned();
    assert_eq!(house.post(&format!("/v1/batches/{id}/cancel"), &json!({})).await.ok()["status"], "cancelling");
    tokio::spawn(super::super::batches::run(house.api.clone()));
    wait(&house, &id, &["cancelled"]).await;
    assert!(house.workers.submits().is_empty());
    for (body, status) in [
        (json!({}), 400),
        (json!({"input_file_id": "file-x", "endpoint": "/v1/chat/completions"}), 404),
        (json!({"input_file_id": file["id"], "endpoint": "/v1/embeddings"}), 400),
    ] {
        assert_eq!(house.post("/v1/batches", &body).await.status, status, "{body}");
    }
    assert_eq!(house.get("/v1/files/..%2f..%2fetc").await.status, 404);
    let without = House::saying("x").await;
    assert_eq!(without.get("/v1/files").await.status, 501);
}
