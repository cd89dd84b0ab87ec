//! One streamed request, timed event by event.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// The server under load.
#[derive(Debug)]
pub(super) struct Target {
    address: String,
    api_key: Option<String>,
    timeout: Duration,
    pub(super) model: String,
    pub(super) chat: bool,
}

/// A request that ran to its end.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) ttft: Duration,
    pub(super) gaps: Vec<Duration>,
    pub(super) latency: Duration,
    pub(super) prompt_tokens: usize,
    pub(super) output_tokens: usize,
    /// `system_fingerprint`: which build and revision answered. One for the whole answer.
    pub(super) fingerprint: Option<String>,
    pub(super) cached_tokens: usize,
    pub(super) text: String,
}

impl Target {
    pub(super) fn new(url: &str, api_key: Option<String>, timeout: Duration) -> Result<Self> {
        let rest =
            url.strip_prefix("http://").with_context(|| format!("{url:?}: only http:// URLs can be measured"))?;
        let address = rest.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let address = if address.contains(':') { address } else { format!("{address}:80") };
        Ok(Self { address, api_key, timeout, model: String::new(), chat: false })
    }

    pub(super) async fn first_model(&self) -> Result<String> {
        let response = self.send("GET", "/v1/models", Bytes::new()).await?;
        let body: Value = serde_json::from_slice(&response.into_body().collect().await?.to_bytes())?;
        body["data"][0]["id"].as_str().map(str::to_owned).with_context(|| format!("/v1/models names no model: {body}"))
    }

    /// Sends one request and reads its stream; an error event or an HTTP error is an error.
    pub(super) async fn once(&self, prompt: Value, output_tokens: usize) -> Result<Outcome> {
        tokio::time::timeout(self.timeout, self.stream(prompt, output_tokens))
            .await
            .with_context(|| format!("no end within {:?}", self.timeout))?
    }

    /// The same for a chat whose messages (and what else it wants) are in `body`.
    pub(super) async fn chat_once(&self, body: Value, output_tokens: usize) -> Result<Outcome> {
        tokio::time::timeout(self.timeout, self.stream_of("/v1/chat/completions", body, output_tokens))
            .await
            .with_context(|| format!("no end within {:?}", self.timeout))?
    }

    /// The server's metrics. `None`: it has none, or none for us.
    pub(super) async fn metrics(&self) -> Option<String> {
        let response = self.send("GET", "/metrics", Bytes::new()).await.ok().filter(|r| r.status().is_success())?;
        let body = response.into_body().collect().await.ok()?.to_bytes();
        String::from_utf8(body.to_vec()).ok()
    }

    async fn stream(&self, prompt: Value, output_tokens: usize) -> Result<Outcome> {
        if self.chat {
            let body = json!({"messages": [{"role": "user", "content": prompt}]});
            return self.stream_of("/v1/chat/completions", body, output_tokens).await;
        }
        self.stream_of("/v1/completions", json!({"prompt": prompt}), output_tokens).await
    }

    async fn stream_of(&self, path: &str, mut body: Value, output_tokens: usize) -> Result<Outcome> {
        for (name, value) in [
            ("model", json!(self.model)),
            ("max_tokens", json!(output_tokens)),
            ("temperature", json!(0)),
            ("ignore_eos", json!(true)),
            ("stream", json!(true)),
            ("stream_options", json!({"include_usage": true})),
        ] {
            body[name] = value;
        }
        let begin = Instant::now();
        let response = self.send("POST", path, Bytes::from(body.to_string())).await?;
        let status = response.status();
        if !status.is_success() {
            let text = response.into_body().collect().await?.to_bytes();
            bail!("HTTP {}: {}", status.as_u16(), String::from_utf8_lossy(&text[..text.len().min(300)]));
        }
        let mut events = Events { body: response.into_body(), buffer: Vec::new() };
        let (mut first, mut last, mut gaps, mut usage) = (None, begin, Vec::new(), (0, 0, 0));
        let mut text = String::new();
        // Control tokens have no text: an answer of nothing else is timed by its first event with a choice.
        let mut answered = None;
        let mut fingerprint: Option<String> = None;
        while let Some(event) = events.next().await? {
            let now = Instant::now();
            ensure!(event.get("error").is_none(), "error event: {event}");
            if let Some(given) = event["system_fingerprint"].as_str() {
                let before = fingerprint.get_or_insert_with(|| given.to_owned());
                ensure!(before == given, "{MIXED}: it began with {before} and went on with {given}");
            }
            if let Some(u) = event.get("usage").filter(|u| u.is_object()) {
                let count = |key: &str| u[key].as_u64().unwrap_or_default() as usize;
                let cached = u["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default() as usize;
                usage = (count("prompt_tokens"), count("completion_tokens"), cached);
            }
            if event["choices"].get(0).is_some() {
                answered.get_or_insert(now - begin);
            }
            text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
            if has_text(&event) {
                if first.is_none() {
                    first = Some(now - begin);
                } else {
                    gaps.push(now - last);
                }
                last = now;
            }
        }
        let ttft = first.or(answered.filter(|_| usage.1 > 0)).context("the stream ended without a token")?;
        let output_tokens = if usage.1 > 0 { usage.1 } else { gaps.len() + 1 };
        let (prompt_tokens, _, cached_tokens) = usage;
        Ok(Outcome {
            ttft,
            gaps,
            latency: begin.elapsed(),
            prompt_tokens,
            output_tokens,
            cached_tokens,
            text,
            fingerprint,
        })
    }

    async fn send(&self, method: &str, path: &str, body: Bytes) -> Result<http::Response<Incoming>> {
        let stream = TcpStream::connect(&self.address).await.with_context(|| format!("connect to {}", self.address))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = http::Request::builder().method(method).uri(path).header("host", &self.address);
        if method == "POST" {
            request = request.header("content-type", "application/json");
        }
        if let Some(key) = &self.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        Ok(sender.send_request(request.body(Full::new(body))?).await?)
    }
}

fn has_text(event: &Value) -> bool {
    let choice = &event["choices"][0];
    [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning"]]
        .iter()
        .any(|t| t.as_str().is_some_and(|t| !t.is_empty()))
}

/// How the error of an answer of two revisions begins.
pub(super) const MIXED: &str = "mixed answer";

/// `data:` events of a response body.
struct Events {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Events {
    async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let Some(data) = line.strip_prefix(b"data:") else { continue };
                let data = data.trim_ascii();
                if data == b"[DONE]" {
                    return Ok(None);
                }
                return Ok(Some(serde_json::from_slice(data)?));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                None => bail!("the stream ended without [DONE]"),
            }
        }
    }
}
