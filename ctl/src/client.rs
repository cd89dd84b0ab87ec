//! Speaks to the admin socket, and to the API over TCP for `chat` and `bench`. Plain HTTP/1.1.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use ernie_proto::admin::{ErrorReply, socket_candidates};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};
use tokio::net::{TcpStream, UnixStream};

/// No daemon answers.
#[derive(Debug)]
pub(crate) struct Unreachable(String);

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreachable {}

/// The admin socket.
#[derive(Debug, Clone)]
pub(crate) struct Admin {
    socket: PathBuf,
}

impl Admin {
    /// `told`: from `--socket` or its variable; else the first place where a socket lies.
    pub(crate) fn new(told: Option<PathBuf>) -> Self {
        let dir = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let places = socket_candidates(dir("XDG_RUNTIME_DIR"), dir("XDG_STATE_HOME"), dir("HOME"));
        let found = || places.iter().find(|p| p.exists()).or(places.first()).cloned();
        Self { socket: told.or_else(found).unwrap_or_else(|| PathBuf::from("/run/ernied/admin.sock")) }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::GET, path, Bytes::new()).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.json(Method::POST, path, serde_json::to_vec(body)?.into()).await
    }

    pub(crate) async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::DELETE, path, Bytes::new()).await
    }

    pub(crate) async fn text(&self, path: &str) -> Result<String> {
        let bytes = self.call(Method::GET, path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn json<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T> {
        let bytes = self.call(method, path, body).await?;
        serde_json::from_slice(&bytes).context("the daemon's answer is not understood; is ernie-ctl older than ernied?")
    }

    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| {
            let place = self.socket.display();
            let remedy = match e.kind() {
                std::io::ErrorKind::NotFound => {
                    "is ernied running? (`systemctl status ernied`); another socket is named with --socket PATH"
                }
                std::io::ErrorKind::PermissionDenied => {
                    "this user may not use it; become root, or see admin.socket_mode and admin.admin_uids"
                }
                std::io::ErrorKind::ConnectionRefused => "the daemon that made it is gone; `systemctl start ernied`",
                _ => "`ernie-ctl doctor` looks for the cause",
            };
            Unreachable(format!("admin socket {place}: {e}; {remedy}"))
        })?;
        let mut sender = handshake(stream).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "ernied")
            .header("content-type", "application/json")
            .body(Full::new(body))?;
        let response = sender.send_request(request).await.context("the daemon closed the connection")?;
        let status = response.status();
        let bytes = response.into_body().collect().await.context("the daemon's answer broke off")?.to_bytes();
        if status.is_success() {
            return Ok(bytes);
        }
        match serde_json::from_slice::<ErrorReply>(&bytes) {
            Ok(reply) => bail!("{}", reply.error.message),
            Err(_) => bail!("the daemon answered {status}: {}", String::from_utf8_lossy(&bytes)),
        }
    }
}

/// An OpenAI-compatible API over TCP.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    host: String,
    port: u16,
    base: String,
    key: Option<String>,
}

impl Api {
    pub(crate) fn new(url: &str, key: Option<String>) -> Result<Self> {
        let rest = url.strip_prefix("http://").with_context(|| {
            format!("{url} can not be used: only http:// URLs (put TLS in front of the server, not in this tool)")
        })?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().with_context(|| format!("{url}: {port} is no port"))?)
            }
            _ => (authority, 80),
        };
        // A listener on every interface is reached through the loopback one.
        let host = match host.trim_matches(['[', ']']) {
            "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            host => host,
        };
        let base = path.trim_end_matches('/').trim_end_matches("v1").trim_end_matches('/');
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        Ok(Self { host: host.to_owned(), port, base, key })
    }

    pub(crate) async fn connect(&self) -> Result<SendRequest<Full<Bytes>>> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| {
            Unreachable(format!(
                "http://{}:{}: {e}; is the server running there? --url names another",
                self.host, self.port
            ))
        })?;
        stream.set_nodelay(true)?;
        handshake(stream).await
    }

    pub(crate) fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("host", format!("{}:{}", self.host, self.port))
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let bytes = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        Ok(request.body(Full::new(bytes.into()))?)
    }

    /// One exchange on its own connection; an error status is an error with the server's message.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<Response<Incoming>> {
        let mut sender = self.connect().await?;
        let response = sender.send_request(self.request(method, path, body)?).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        let message = serde_json::from_slice::<serde_json::Value>(&bytes)
            .ok()
            .and_then(|v| v["error"]["message"].as_str().map(str::to_owned))
            .unwrap_or_else(|| String::from_utf8_lossy(&bytes).into_owned());
        bail!("the API answered {status}: {message}")
    }

    pub(crate) async fn json(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<serde_json::Value> {
        let response = self.send(method, path, body).await?;
        Ok(serde_json::from_slice(&response.into_body().collect().await?.to_bytes())?)
    }

    /// The first name that the API lists.
    pub(crate) async fn first_model(&self) -> Result<String> {
        let list = self.json(Method::GET, "/v1/models", None).await?;
        list["data"][0]["id"].as_str().map(str::to_owned).context("the API lists no model")
    }
}

async fn handshake<S>(stream: S) -> Result<SendRequest<Full<Bytes>>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Its error shows at the request as well.
    tokio::spawn(connection);
    Ok(sender)
}

/// Takes server-sent events apart, however the bytes are cut.
#[derive(Debug, Default)]
pub(crate) struct SseParser {
    pending: Vec<u8>,
}

impl SseParser {
    /// The `data` of every event that is complete now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.pending.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.pending.windows(2).position(|w| w == b"\n\n") {
            let event: Vec<u8> = self.pending.drain(..end + 2).collect();
            for line in event.split(|b| *b == b'\n') {
                if let Some(data) = line.strip_prefix(b"data:") {
                    events.push(String::from_utf8_lossy(data.trim_ascii()).into_owned());
                }
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_however_the_bytes_are_cut() {
        let text = "data: {\"a\": \"北京\"}\n\ndata: [DONE]\n\n".as_bytes();
        for cut in 0..text.len() {
            let mut parser = SseParser::default();
            let mut events = parser.push(&text[..cut]);
            events.extend(parser.push(&text[cut..]));
            assert_eq!(events, ["{\"a\": \"北京\"}", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn urls_are_taken_as_people_write_them() {
        for (url, host, port, base) in [
            ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
            ("http://0.0.0.0:8000/v1", "127.0.0.1", 8000, ""),
            ("http://[::1]:9000/", "::1", 9000, ""),
            ("http://host/prefix/v1/", "host", 80, "/prefix"),
        ] {
            let api = Api::new(url, None).expect(url);
            assert_eq!((api.host.as_str(), api.port, api.base.as_str()), (host, port, base), "{url}");
        }
        assert!(Api::new("https://x", None).is_err());
    }
}
