//! `chat`: a conversation in the terminal, streamed.

use crate::cli::ChatArgs;
use crate::client::{Admin, Api, SseParser};
use crate::output::{bold, print};
use anyhow::{Result, bail};
use http_body_util::BodyExt;
use hyper::Method;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::time::Instant;

pub(super) async fn run(admin: &Admin, args: ChatArgs) -> Result<()> {
    let (api, model) = super::api(admin, &args.api).await?;
    let mut messages: Vec<Value> = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    if let Some(message) = &args.message {
        messages.push(json!({ "role": "user", "content": message }));
        answer(&api, &model, &messages, &args).await?;
        return Ok(());
    }
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        print(&format!("{} on this machine; /new begins anew, /quit or Ctrl-D leaves\n", bold(&model)))?;
    }
    loop {
        if terminal {
            print("> ")?;
        }
        let line = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).map(|n| (n > 0).then_some(line))
        })
        .await??;
        let Some(line) = line else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/quit" | "/exit" => return Ok(()),
            "/new" => messages.retain(|m| m["role"] == "system"),
            text => {
                messages.push(json!({ "role": "user", "content": text }));
                match answer(&api, &model, &messages, &args).await {
                    Ok(reply) => messages.push(json!({ "role": "assistant", "content": reply })),
                    Err(e) => {
                        // The conversation goes on as if this had not been said.
                        messages.pop();
                        eprintln!("{e:#}");
                    }
                }
            }
        }
    }
}

async fn answer(api: &Api, model: &str, messages: &[Value], args: &ChatArgs) -> Result<String> {
    let mut body = json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "max_tokens": args.max_tokens,
        "stream_options": { "include_usage": true },
    });
    if let Some(temperature) = args.temperature {
        body["temperature"] = json!(temperature);
    }
    let began = Instant::now();
    let mut response = api.send(Method::POST, "/v1/chat/completions", Some(&body)).await?.into_body();
    let mut parser = SseParser::default();
    let mut text = String::new();
    let mut tokens = 0;
    while let Some(frame) = response.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        for event in parser.push(&data) {
            if event == "[DONE]" {
                continue;
            }
            let event: Value = serde_json::from_str(&event)?;
            if let Some(message) = event["error"]["message"].as_str() {
                print("\n")?;
                bail!("the answer broke off: {message}");
            }
            if let Some(n) = event["usage"]["completion_tokens"].as_u64() {
                tokens = n;
            }
            if let Some(piece) = event["choices"][0]["delta"]["content"].as_str() {
                text.push_str(piece);
                print(piece)?;
            }
        }
    }
    print("\n")?;
    if std::io::stdout().is_terminal() && tokens > 0 {
        let elapsed = began.elapsed().as_secs_f64();
        print(&format!("\x1b[2m{tokens} tokens in {elapsed:.1} s\x1b[0m\n"))?;
    }
    Ok(text)
}
