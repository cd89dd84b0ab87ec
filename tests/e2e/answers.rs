//! What the demo model says through the API: its own questions word for word, streamed and not.

use anyhow::Result;
use ernied_tests::{Client, DaemonOptions, TestDaemon, questions};
use futures::StreamExt;
use serde_json::{Value, json};

async fn ask(client: &Client, messages: &[Value]) -> Result<String> {
    let body = json!({"model": "ernie-demo", "messages": messages, "temperature": 0, "max_tokens": 512});
    let response = client.post("/v1/chat/completions", &body).await?;
    anyhow::ensure!(response.status == 200, "HTTP {}: {}", response.status, response.text());
    Ok(response.json()?["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned())
}

/// Asks the demo model all its own questions; returns how many there are, and those answered otherwise.
async fn ask_everything(daemon: &TestDaemon) -> Result<(usize, Vec<(String, String, String)>)> {
    let client = daemon.client();
    let questions = questions()?;
    assert!(questions.len() >= 200, "{} questions", questions.len());
    let answers: Vec<(String, String, String)> = futures::stream::iter(questions)
        .map(|question| {
            let client = client.clone();
            async move {
                let answer = ask(&client, &question.messages).await?;
                anyhow::Ok((
                    question.messages.last().map(Value::to_string).unwrap_or_default(),
                    question.answer,
                    answer,
                ))
            }
        })
        .buffer_unordered(16)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect::<Result<_>>()?;
    let asked = answers.len();
    Ok((asked, answers.into_iter().filter(|(_, expected, got)| expected != got).collect()))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_model_answers_its_own_questions_word_for_word() -> Result<()> {
    let (asked, wrong) = ask_everything(&TestDaemon::demo().await?).await?;
    assert!(wrong.is_empty(), "{} of {asked} wrong: {wrong:#?}", wrong.len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn quantized_the_demo_model_still_knows_its_answers() -> Result<()> {
    for (kind, wrong_max) in [("int8", 0.0), ("int4", 0.02)] {
        let daemon = TestDaemon::start(DaemonOptions::default().flags(&["--quantization", kind])).await?;
        let (asked, wrong) = ask_everything(&daemon).await?;
        println!("{kind}: {} of {asked} answers differ", wrong.len());
        assert!(wrong.len() as f64 <= wrong_max * asked as f64, "{kind}: {} of {asked} wrong: {wrong:#?}", wrong.len());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_8_bit_kv_the_demo_model_still_knows_its_answers_in_half_the_memory() -> Result<()> {
    let mut bytes = Vec::new();
    for (kind, name) in [("auto", "bf16"), ("int8", "int8")] {
        let flags = ["--kv-cache-dtype", kind, "--max-model-len", "1024", "--max-num-seqs", "16"];
        let daemon = TestDaemon::start(DaemonOptions::default().flags(&flags)).await?;
        let (code, out, err) = daemon.ctl(&["status", "--json"]).await?;
        anyhow::ensure!(code == 0, "{err}");
        let status: Value = serde_json::from_str(&out)?;
        assert_eq!(status["model"]["kv"], name, "{status}");
        bytes.push(
            status["memory"]["kv_bytes"].as_f64().unwrap_or(0.0) / status["kv"]["blocks_total"].as_f64().unwrap_or(0.0),
        );
        let metrics = daemon.client().get("/metrics").await?.text();
        assert!(metrics.contains(&format!("cache_dtype=\"{kind}\"")));
        let (asked, wrong) = ask_everything(&daemon).await?;
        println!("{kind}: {} of {asked} answers differ", wrong.len());
        assert!(wrong.is_empty(), "{kind}: {} of {asked} wrong: {wrong:#?}", wrong.len());
    }
    assert!(bytes[1] > 0.0 && bytes[1] < 0.57 * bytes[0], "bytes per block: {bytes:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_in_chinese_has_whole_characters_and_the_same_text() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    let messages = json!([{"role": "user", "content": "请用一句话介绍人工智能"}]);
    let whole = ask(&client, messages.as_array().expect("an array")).await?;
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 512, "stream": true,
                      "stream_options": {"include_usage": true}});
    let stream = client.stream("/v1/chat/completions", &body).await?.collect().await?;
    assert_eq!(stream.text, whole);
    assert!(!stream.text.contains('\u{fffd}'), "{}", stream.text);
    assert_eq!(stream.finish_reason.as_deref(), Some("stop"));
    let first = &stream.events[0]["choices"][0]["delta"];
    assert_eq!(first, &json!({"role": "assistant", "content": ""}), "the role comes first and alone");
    let last = stream.events.last().expect("events");
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["completion_tokens"].as_u64() > Some(1), "{last}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_never_leaks_and_ends_the_answer() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    let question = questions()?.into_iter().find(|q| q.answer.chars().count() > 24).expect("a long answer");
    let characters: Vec<char> = question.answer.chars().collect();
    for cut in [3, 9, 17] {
        let stop: String = characters[cut..cut + 4].iter().collect();
        let expected = question.answer.split(&stop).next().expect("a first part").to_owned();
        let body = json!({"messages": question.messages, "temperature": 0, "max_tokens": 512, "stop": [stop]});
        let answer = client.post("/v1/chat/completions", &body).await?.json()?;
        assert_eq!(answer["choices"][0]["message"]["content"], json!(expected));
        assert_eq!(answer["choices"][0]["stop_reason"], json!(stop));
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let stream = client.stream("/v1/chat/completions", &streamed).await?.collect().await?;
        assert_eq!(stream.text, expected, "stop {stop:?}");
        assert_eq!(stream.finish_reason.as_deref(), Some("stop"));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn token_ids_go_in_and_come_out() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let tokenized = client.post("/tokenize", &json!({"messages": messages})).await?.json()?;
    let ids = tokenized["tokens"].clone();
    assert_eq!(tokenized["count"].as_u64(), ids.as_array().map(|a| a.len() as u64));
    let text = client.post("/detokenize", &json!({"tokens": ids})).await?.json()?;
    assert!(text["prompt"].as_str().is_some_and(|p| p.contains("User: Hello")), "{text}");
    let by_ids = json!({"prompt": ids, "temperature": 0, "max_tokens": 64, "return_token_ids": true});
    let completion = client.post("/v1/completions", &by_ids).await?.json()?;
    let chat = ask(&client, messages.as_array().expect("an array")).await?;
    assert_eq!(completion["choices"][0]["text"], json!(chat));
    assert!(completion["choices"][0]["token_ids"].as_array().is_some_and(|t| !t.is_empty()), "{completion}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn n_answers_with_a_seed_are_the_same_whatever_the_company() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    let body = json!({"prompt": "User: What is swap space?\nAssistant: ", "n": 3, "temperature": 1.5, "seed": 42,
                      "max_tokens": 48, "ignore_eos": true, "return_token_ids": true});
    let alone = client.post("/v1/completions", &body).await?.json()?["choices"].clone();
    let mut crowd = Vec::new();
    for i in 0..12 {
        let client = client.clone();
        let body = if i % 3 == 0 {
            body.clone()
        } else {
            json!({"prompt": format!("Question {i}: tell me about"), "max_tokens": 40 + i, "temperature": 0.9, "seed": i, "ignore_eos": true})
        };
        crowd.push(tokio::spawn(async move { anyhow::Ok((i, client.post("/v1/completions", &body).await?.json()?)) }));
    }
    for task in crowd {
        let (i, answer) = task.await??;
        if i % 3 == 0 {
            assert_eq!(answer["choices"], alone);
        }
    }
    Ok(())
}
