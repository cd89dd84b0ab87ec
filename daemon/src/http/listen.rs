//! The listener's loop: connections with time limits, counted, ended on demand.
//!
//! hyper reads requests; what is ours is how long a client may take for its headers, how many connections there may be, and
//! that a shutdown lets every exchange end.

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Bounds of connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenSettings {
    pub connections_max: usize,
    /// From the first byte of a request to the end of its headers; also how long an idle connection is kept.
    pub header_timeout: Duration,
    pub header_bytes_max: usize,
    pub headers_max: usize,
}

impl Default for ListenSettings {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            header_timeout: Duration::from_secs(30),
            header_bytes_max: 64 << 10,
            headers_max: 100,
        }
    }
}

/// Serves until `stop`; then takes no more connections and returns when the open ones have ended their exchange. Drop the
/// future to end them at once.
pub async fn serve(mut listener: impl Listener, router: Router, settings: ListenSettings, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(settings.connections_max));
    let connections = TaskTracker::new();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(settings.header_timeout)
        .max_buf_size(settings.header_bytes_max.max(8192))
        .max_headers(settings.headers_max);
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = places.clone().acquire_owned() => match place {
                Ok(place) => place,
                Err(_) => break,
            },
        };
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            (stream, _) = listener.accept() => stream,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let stop = stop.clone();
        connections.spawn(async move {
            let _place = place;
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                result = connection.as_mut() => log_end(result),
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    log_end(connection.await);
                }
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

fn log_end(result: Result<(), hyper::Error>) {
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn start(settings: ListenSettings) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = Router::new().route("/", get(|| async { "hello" }));
        (address, stop.clone(), tokio::spawn(serve(listener, router, settings, stop)))
    }

    async fn answer(address: SocketAddr, request: &[u8]) -> String {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        // A reset is an end as well.
        let _ = client.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn a_client_that_never_ends_its_headers_is_let_go() {
        let settings = ListenSettings { header_timeout: Duration::from_millis(50), ..ListenSettings::default() };
        let (address, _stop, _served) = start(settings).await;
        let text = answer(address, b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ").await;
        assert!(!text.contains("200 OK"), "{text}");
        let idle = answer(address, b"").await;
        assert_eq!(idle, "");
        let text = answer(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        assert!(text.ends_with("hello"), "{text}");
    }

    #[tokio::test]
    async fn headers_are_bounded_in_number_and_size() {
        let (address, _stop, _served) = start(ListenSettings::default()).await;
        let many: String = (0..200).map(|i| format!("X-{i}: 1\r\n")).collect();
        let text =
            answer(address, format!("GET / HTTP/1.1\r\nHost: x\r\n{many}Connection: close\r\n\r\n").as_bytes()).await;
        assert!(text.starts_with("HTTP/1.1 431"), "{text}");
        let long = "a".repeat(200 << 10);
        let text = answer(address, format!("GET / HTTP/1.1\r\nHost: x\r\nX: {long}\r\n\r\n").as_bytes()).await;
        assert!(!text.contains("200 OK"), "{text}");
    }

    #[tokio::test]
    async fn a_stop_takes_no_more_and_returns() {
        let (address, stop, served) = start(ListenSettings::default()).await;
        let text = answer(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        assert!(text.starts_with("HTTP/1.1 200 OK"));
        stop.cancel();
        served.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }
}
