//! The listener's loop: connections with time limits, counted, ended on demand.
//!
//! hyper reads requests; what is ours is how long a client may take for its headers, how many connections there may be, and
//! that a shutdown lets every exchange end: one under way, and the first one of a connection that came before the stop.

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
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

/// Where connections come from.
pub trait Connections: Send {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// The next one; `None`: there will be no more.
    fn next(&mut self) -> impl Future<Output = Option<Self::Stream>> + Send;

    /// After the stop: the next of those that came before it; `None`: that was the last.
    fn rest(&mut self) -> impl Future<Output = Option<Self::Stream>> + Send;
}

/// After an accept error (out of descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// After the stop, a connection that has not asked for anything yet may do so within this.
const FIRST_REQUEST_PATIENCE: Duration = Duration::from_secs(1);
/// After the stop, a request that was on its way on a connection between two exchanges comes within this.
const NEXT_REQUEST_PATIENCE: Duration = Duration::from_millis(20);
/// A connection in the queue of a socket shows within this.
const QUEUE_PATIENCE: Duration = Duration::from_millis(10);

impl Connections for UnixListener {
    type Stream = UnixStream;

    async fn next(&mut self) -> Option<UnixStream> {
        loop {
            match self.accept().await {
                Ok((stream, _)) => return Some(stream),
                Err(e) => {
                    tracing::warn!("a connection could not be accepted: {e}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn rest(&mut self) -> Option<UnixStream> {
        tokio::time::timeout(QUEUE_PATIENCE, self.next()).await.ok().flatten()
    }
}

/// Serves until `stop`; then takes no more connections than had come before, and returns when the open ones have ended their
/// exchange. Drop the future to end them at once.
pub async fn serve(mut listener: impl Connections, router: Router, settings: ListenSettings, stop: CancellationToken) {
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
            stream = listener.next() => stream,
        };
        let Some(stream) = stream else { break };
        connections.spawn(serve_one(&builder, stream, &router, stop.clone(), place));
    }
    // Those that came before the stop: without a place there is none for them either way.
    while let Ok(place) = places.clone().try_acquire_owned() {
        let Some(stream) = listener.rest().await else { break };
        connections.spawn(serve_one(&builder, stream, &router, stop.clone(), place));
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// One connection's life. After the stop it ends with the exchange that is under way; if it had none yet, with its first.
fn serve_one<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    builder: &http1::Builder,
    stream: S,
    router: &Router,
    stop: CancellationToken,
    place: OwnedSemaphorePermit,
) -> impl Future<Output = ()> + Send + use<S> {
    let (router, asked) = (TowerToHyperService::new(router.clone()), CancellationToken::new());
    let service = {
        let asked = asked.clone();
        service_fn(move |request| {
            asked.cancel();
            router.call(request)
        })
    };
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    async move {
        let _place = place;
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            result = connection.as_mut() => return log_end(result),
            () = stop.cancelled() => {}
        }
        // hyper ends a connection on which it has read nothing, whatever is on its way.
        let (patience, fresh) = match asked.is_cancelled() {
            true => (NEXT_REQUEST_PATIENCE, false),
            false => (FIRST_REQUEST_PATIENCE, true),
        };
        tokio::select! {
            result = connection.as_mut() => return log_end(result),
            () = asked.cancelled(), if fresh => {}
            () = tokio::time::sleep(patience) => {}
        }
        connection.as_mut().graceful_shutdown();
        log_end(connection.await);
    }
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

    impl Connections for TcpListener {
        type Stream = TcpStream;

        async fn next(&mut self) -> Option<TcpStream> {
            Some(self.accept().await.unwrap().0)
        }

        async fn rest(&mut self) -> Option<TcpStream> {
            tokio::time::timeout(QUEUE_PATIENCE, self.next()).await.ok().flatten()
        }
    }

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

    #[tokio::test]
    async fn connections_that_came_before_the_stop_get_their_first_answer_and_no_second() {
        let (address, stop, served) = start(ListenSettings::default()).await;
        // One is accepted and has said nothing yet, one is in the queue of the socket: the task had no turn since.
        let mut accepted = TcpStream::connect(address).await.unwrap();
        let mut begun = TcpStream::connect(address).await.unwrap();
        begun.write_all(b"GET / HT").await.unwrap();
        tokio::task::yield_now().await;
        let mut queued = TcpStream::connect(address).await.unwrap();
        stop.cancel();
        begun.write_all(b"TP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        for client in [&mut accepted, &mut queued] {
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        }
        for client in [&mut begun, &mut accepted, &mut queued] {
            let mut answer = String::new();
            // To the end: the connection is closed although nobody asked for that.
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("hello"), "{answer}");
        }
        served.await.unwrap();
    }
}
