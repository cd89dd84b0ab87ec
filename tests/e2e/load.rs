//! A mixed load: answers that stop, answers that are cut, clients that go away, requests that are refused.

use anyhow::Result;
use ernied_tests::Client;
use serde_json::json;
use std::time::Duration;
use tokio::task::JoinSet;

/// Runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    _tasks: JoinSet<()>,
}

impl Load {
    /// `long`: clients that ask for so many tokens each that KV blocks run out.
    pub(crate) fn start(client: &Client, long: usize) -> Self {
        let mut tasks = JoinSet::new();
        for i in 0..long {
            let client = client.clone();
            tasks.spawn(async move {
                for n in 0.. {
                    let prompt = format!("User: {i} {n} {}\nAssistant: ", "tell me about swap space ".repeat(20));
                    let body = json!({"prompt": prompt, "max_tokens": 400, "ignore_eos": true});
                    pause_after(client.post("/v1/completions", &body).await).await;
                }
            });
        }
        let short = client.clone();
        tasks.spawn(async move {
            for n in 0.. {
                let _ = one_of_each(&short, n).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { _tasks: tasks }
    }
}

async fn pause_after<T>(answer: Result<T>) {
    if answer.is_err() {
        // The server is being struck by the test.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn one_of_each(client: &Client, n: usize) -> Result<()> {
    let question =
        json!({"messages": [{"role": "user", "content": "What is a hot swap?"}], "max_tokens": 60, "stop": ["."]});
    client.post("/v1/chat/completions", &question).await?;
    client.post("/v1/completions", &json!({"prompt": format!("{n}"), "max_tokens": 8, "ignore_eos": true})).await?;
    let streamed = json!({"prompt": format!("{n} more"), "max_tokens": 800, "ignore_eos": true, "stream": true});
    let mut stream = client.stream("/v1/completions", &streamed).await?;
    stream.next().await?;
    stream.next().await?;
    drop(stream);
    client.post("/v1/completions", &json!({"prompt": 7, "max_tokens": "many"})).await?;
    client.post("/v1/completions", &json!({"model": "unknown", "prompt": "x"})).await?;
    Ok(())
}
