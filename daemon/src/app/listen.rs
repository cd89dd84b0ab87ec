//! Accepts connections, and keeps health and metrics answering when everything else is busy.
//!
//! One thread with a runtime of its own accepts and looks at the first bytes of a connection: probes and scrapes are
//! answered right there, everything else is handed to the main runtime. So a probe never queues behind requests.

use crate::http::listen::{Connections, serve};
use crate::http::{Api, health_router, router};
use std::future::pending;
use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections on their way from one runtime to the other; each is a few bytes, and the receiver does nothing but take.
const HANDOVER_MAX: usize = 1024;
/// A connection that says nothing for this long is handed on unread; the HTTP side has its own limits.
const FIRST_BYTES_PATIENCE: Duration = Duration::from_secs(5);
/// After an accept error (out of descriptors): as axum does.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Paths that are answered by the front's own thread.
const PROBES: &[&str] = &["/health", "/metrics", "/ping", "/ready", "/livez", "/load", "/version"];

/// Who accepts what still waits in the socket's queue when this daemon stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// This daemon: the socket ends with it.
    Ours,
    /// The next daemon: systemd keeps the socket.
    Inherited,
}

/// The running listeners.
#[derive(Debug)]
pub(super) struct Front {
    stop_accepting: CancellationToken,
    served: TaskTracker,
}

impl Front {
    /// Starts accepting: probes are answered on a thread of their own, everything else on the runtime this is called in.
    pub(super) fn start(
        listener: StdListener,
        uds: Option<std::os::unix::net::UnixListener>,
        queue: Queue,
        api: &Arc<Api>,
    ) -> io::Result<Self> {
        let stop_accepting = CancellationToken::new();
        let served = TaskTracker::new();
        let (to_main, from_front) = mpsc::channel(HANDOVER_MAX);
        let (to_probes, probes) = mpsc::channel(HANDOVER_MAX);
        let main = Handed(from_front);
        let everything = router(Arc::clone(api));
        let health = health_router(Arc::clone(api));
        let settings = api.listen_settings();
        served.spawn(serve(main, everything.clone(), settings.clone(), stop_accepting.clone()));
        if let Some(uds) = uds {
            let uds = tokio::net::UnixListener::from_std(uds)?;
            served.spawn(serve(uds, everything, settings.clone(), stop_accepting.clone()));
        }
        let front = tokio::runtime::Builder::new_current_thread().enable_all().thread_name("ernied-front").build()?;
        let stop = stop_accepting.clone();
        std::thread::Builder::new().name("ernied-front".to_owned()).spawn(move || {
            front.block_on(async move {
                let probes = Handed(probes);
                // Probes are answered to the very end of the process, whoever stops accepting before.
                tokio::spawn(serve(probes, health, settings, CancellationToken::new()));
                match TcpListener::from_std(listener) {
                    Ok(listener) => accept(listener, queue, Desks { main: to_main, probes: to_probes }, stop).await,
                    Err(e) => tracing::error!("the API's listener can not be used: {e}"),
                }
                pending::<()>().await;
            });
        })?;
        served.close();
        Ok(Self { stop_accepting, served })
    }

    /// Takes no more connections than have come by now. Those end with the exchange that is under way, or with their first.
    pub(super) fn stop_accepting(&self) {
        self.stop_accepting.cancel();
    }

    /// Waits for the connections to end, up to `patience`.
    pub(super) async fn ended(&self, patience: Duration) {
        let _ = tokio::time::timeout(patience, self.served.wait()).await;
    }
}

/// Where an accepted connection goes.
#[derive(Debug, Clone)]
struct Desks {
    main: mpsc::Sender<std::net::TcpStream>,
    probes: mpsc::Sender<std::net::TcpStream>,
}

/// Accepts until the stop, and then what waits in a queue that is ours. The desks close when the last of these connections
/// has been handed over.
async fn accept(listener: TcpListener, queue: Queue, desks: Desks, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                // Tokens are small packets; waiting to fill one would hold every stream back.
                let _ = stream.set_nodelay(true);
                let (desks, stop) = (desks.clone(), stop.clone());
                tokio::spawn(async move {
                    // After the stop nobody waits for its first bytes here: the main router answers probes as well.
                    let probe = tokio::select! {
                        probe = is_probe(&stream) => probe,
                        () = stop.cancelled() => false,
                    };
                    if let Ok(stream) = stream.into_std() {
                        desks.hand(stream, probe).await;
                    }
                });
            }
            Err(e) => {
                tracing::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    if queue == Queue::Inherited {
        return;
    }
    // Without the runtime: a connection that came a moment ago may not have shown there yet.
    let Ok(listener) = listener.into_std() else { return };
    while let Ok((stream, _)) = listener.accept() {
        let _ = (stream.set_nonblocking(true), stream.set_nodelay(true));
        desks.hand(stream, false).await;
    }
}

impl Desks {
    async fn hand(&self, stream: std::net::TcpStream, probe: bool) {
        let desk = if probe { &self.probes } else { &self.main };
        // The receiver is gone only when the process is leaving.
        let _ = desk.send(stream).await;
    }
}

/// Looks at the request line without taking it.
async fn is_probe(stream: &TcpStream) -> bool {
    let mut head = [0u8; 64];
    let look = async {
        loop {
            let n = stream.peek(&mut head).await.unwrap_or(0);
            match verdict(&head[..n]) {
                Some(verdict) => return verdict,
                None if n == 0 || n == head.len() => return false,
                // More bytes of the same line: wait until the socket has changed.
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(FIRST_BYTES_PATIENCE, look).await.unwrap_or(false)
}

/// `None`: too few bytes to tell.
fn verdict(head: &[u8]) -> Option<bool> {
    let mut words = head.split(|b| *b == b' ');
    let method = words.next().unwrap_or_default();
    let target = words.next();
    let complete = words.next().is_some();
    let Some(target) = target else {
        // Not even the method is complete; only these two lead to probes.
        return (!b"GET".starts_with(method) && !b"HEAD".starts_with(method)).then_some(false);
    };
    if method != b"GET" && method != b"HEAD" {
        return Some(false);
    }
    let path = target.split(|b| *b == b'?').next().unwrap_or_default();
    let probe = PROBES.iter().any(|p| {
        path.strip_prefix(p.as_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/") || rest == b"z")
    });
    if complete || path.len() < target.len() {
        return Some(probe);
    }
    // The path may go on: it can still become a probe only if it is the beginning of one, or one already.
    let open = PROBES.iter().any(|p| p.as_bytes().starts_with(path) || path.starts_with(p.as_bytes()));
    (!open).then_some(false)
}

/// Connections handed over by the accepting thread, until there are no more.
struct Handed(mpsc::Receiver<std::net::TcpStream>);

impl Connections for Handed {
    type Stream = TcpStream;

    async fn next(&mut self) -> Option<TcpStream> {
        loop {
            match TcpStream::from_std(self.0.recv().await?) {
                Ok(stream) => return Some(stream),
                Err(e) => tracing::warn!("a connection could not be taken over: {e}"),
            }
        }
    }

    async fn rest(&mut self) -> Option<TcpStream> {
        self.next().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_told_from_requests_by_their_first_bytes() {
        for (head, expected) in [
            ("GET /health HTTP/1.1\r\n", Some(true)),
            ("GET /health?verbose HTTP/1.1", Some(true)),
            ("GET /health/ready HTTP/1.1", Some(true)),
            ("HEAD /readyz HTTP/1.1", Some(true)),
            ("GET /metrics/ HTTP/1.1", Some(true)),
            ("GET /loads HTTP/1.1", Some(false)),
            ("GET /v1/models HTTP/1.1", Some(false)),
            ("POST /v1/chat/completions HTTP/1.1", Some(false)),
            ("POST /health HTTP/1.1", Some(false)),
            ("PRI * HTTP/2.0", Some(false)),
            ("GE", None),
            ("GET /hea", None),
            ("GET /health", None),
            ("GET /v1", Some(false)),
            ("", None),
        ] {
            assert_eq!(verdict(head.as_bytes()), expected, "{head:?}");
        }
    }
}
