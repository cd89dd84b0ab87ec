//! An HTTP/1.1 client on a bare TCP or Unix socket: one connection a request, so that a test decides when it closes.

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::path::Path;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

/// Speaks to one server.
#[derive(Debug, Clone)]
pub struct Client {
    address: String,
    key: Option<String>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Response {
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("no JSON: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }
}

impl Client {
    /// `address` is `host:port`.
    pub fn new(address: impl Into<String>) -> Self {
        Self { address: address.into(), key: None }
    }

    pub fn with_key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    pub async fn get(&self, path: &str) -> Result<Response> {
        self.request("GET", path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Response> {
        self.request("POST", path, &[("content-type", "application/json")], Bytes::from(body.to_string())).await
    }

    /// Any method, headers and body; reads the whole answer.
    pub async fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Result<Response> {
        let (response, connection) = self.send(method, path, headers, body).await?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        drop(connection);
        Ok(Response { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// Begins an event stream; the answer must be 200.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<SseReader> {
        let (response, connection) =
            self.send("POST", path, &[("content-type", "application/json")], Bytes::from(body.to_string())).await?;
        let status = response.status().as_u16();
        if status != 200 {
            let text = response.into_body().collect().await?.to_bytes();
            bail!("HTTP {status}: {}", String::from_utf8_lossy(&text));
        }
        Ok(SseReader { body: response.into_body(), buffer: Vec::new(), connection, done: false })
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<(http::Response<Incoming>, Connection)> {
        let stream = TcpStream::connect(&self.address).await.with_context(|| format!("connect {}", self.address))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let mut request = http::Request::builder().method(method).uri(path).header("host", &self.address);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let response = sender.send_request(request.body(Full::new(body))?).await?;
        Ok((response, connection))
    }
}

/// GET over a Unix socket (the admin socket), as `curl --unix-socket` does it.
pub async fn unix_get(socket: &Path, path: &str) -> Result<Response> {
    unix(socket, "GET", path, Bytes::new()).await
}

/// POST over a Unix socket.
pub async fn unix_post(socket: &Path, path: &str, body: &Value) -> Result<Response> {
    unix(socket, "POST", path, Bytes::from(body.to_string())).await
}

async fn unix(socket: &Path, method: &str, path: &str, body: Bytes) -> Result<Response> {
    let stream = UnixStream::connect(socket).await.with_context(|| format!("connect {}", socket.display()))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let _connection = Connection(tokio::spawn(async move {
        let _ = connection.await;
    }));
    let request = http::Request::builder().method(method).uri(path).header("host", "ernied").body(Full::new(body))?;
    let (parts, body) = sender.send_request(request).await?.into_parts();
    Ok(Response { status: parts.status.as_u16(), headers: parts.headers, body: body.collect().await?.to_bytes() })
}

/// Closes the socket when dropped.
#[derive(Debug)]
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Reads `data:` events one by one; dropping it closes the connection.
#[derive(Debug)]
pub struct SseReader {
    body: Incoming,
    buffer: Vec<u8>,
    #[expect(dead_code, reason = "held for its Drop")]
    connection: Connection,
    done: bool,
}

impl SseReader {
    /// The next event's JSON; `None` after `[DONE]`. An end without `[DONE]` is an error.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            if self.done {
                return Ok(None);
            }
            if let Some(end) = self.buffer.windows(2).position(|w| w == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = std::str::from_utf8(&event).context("an event is no UTF-8")?.trim_end();
                if event.starts_with(':') {
                    continue; // keep-alive comment
                }
                let data = event.strip_prefix("data: ").ok_or_else(|| anyhow!("odd event {event:?}"))?;
                if data == "[DONE]" {
                    self.done = true;
                    continue;
                }
                return Ok(Some(serde_json::from_str(data)?));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                None => bail!("the stream ended without [DONE]; rest {:?}", String::from_utf8_lossy(&self.buffer)),
            }
        }
    }

    /// Reads to the end: the content of choice 0, its finish reason, and every event.
    pub async fn collect(mut self) -> Result<Collected> {
        let mut collected = Collected::default();
        while let Some(event) = self.next().await? {
            if let Some(error) = event.get("error") {
                bail!("error event: {error}");
            }
            if let Some(choice) = event["choices"].get(0) {
                let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
                collected.text.push_str(text);
                if let Some(ids) = choice["token_ids"].as_array() {
                    collected.token_ids.extend(ids.iter().filter_map(Value::as_u64));
                }
                if let Some(reason) = choice["finish_reason"].as_str() {
                    collected.finish_reason = Some(reason.to_owned());
                }
            }
            collected.events.push(event);
        }
        Ok(collected)
    }
}

/// What a finished stream said.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Collected {
    pub text: String,
    pub token_ids: Vec<u64>,
    pub finish_reason: Option<String>,
    pub events: Vec<Value>,
}
