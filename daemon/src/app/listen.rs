//! Accepts connections, and keeps health and metrics answering when everything else is busy.
//!
//! One thread with a runtime of its own accepts and looks at the first bytes of a connection: probes and scrapes are
//! answered right there, everything else is handed to the main runtime. So a probe never queues behind requests.

use crate::http::listen::serve;
use crate::http::{Api, health_router, router};
use axum::serve::Listener;
use std::future::pending;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
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
        api: &Arc<Api>,
    ) -> io::Result<Self> {
        let stop_accepting = CancellationToken::new();
        let served = TaskTracker::new();
        let (to_main, from_front) = mpsc::channel(HANDOVER_MAX);
        let (to_probes, probes) = mpsc::channel(HANDOVER_MAX);
        let address = listener.local_addr()?;
        let main = Handed { connections: from_front, address };
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
                let probes = Handed { connections: probes, address };
                // Probes are answered to the very end of the process, whoever stops accepting before.
                tokio::spawn(serve(probes, health, settings, CancellationToken::new()));
                match TcpListener::from_std(listener) {
                    Ok(listener) => accept(listener, &to_main, &to_probes, stop).await,
                    Err(e) => tracing::error!("the API's listener can not be used: {e}"),
                }
                pending::<()>().await;
            });
        })?;
        served.close();
        Ok(Self { stop_accepting, served })
    }

    /// Takes no more connections: they wait in the queue of the socket, for whoever inherits it next. Those under way end
    /// their exchange.
    pub(super) fn stop_accepting(&self) {
        self.stop_accepting.cancel();
    }

    /// Takes no more connections and waits for those under way, up to `patience`.
    pub(super) async fn stop(&self, patience: Duration) {
        self.stop_accepting.cancel();
        let _ = tokio::time::timeout(patience, self.served.wait()).await;
    }
}

async fn accept(
    listener: TcpListener,
    to_main: &mpsc::Sender<std::net::TcpStream>,
    to_probes: &mpsc::Sender<std::net::TcpStream>,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                // Tokens are small packets; waiting to fill one would hold every stream back.
                let _ = stream.set_nodelay(true);
                let (to_main, to_probes) = (to_main.clone(), to_probes.clone());
                tokio::spawn(async move {
                    let to = if is_probe(&stream).await { to_probes } else { to_main };
                    if let Ok(stream) = stream.into_std() {
                        // The receiver is gone only when the process is leaving.
                        let _ = to.send(stream).await;
                    }
                });
            }
            Err(e) => {
                tracing::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
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

/// Connections handed over by the accepting thread, as axum wants to see a listener.
struct Handed {
    connections: mpsc::Receiver<std::net::TcpStream>,
    address: SocketAddr,
}

impl Listener for Handed {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            let Some(stream) = self.connections.recv().await else {
                // The accepting thread is gone; axum's graceful shutdown ends this wait.
                return pending().await;
            };
            let peer = stream.peer_addr().unwrap_or(self.address);
            match TcpStream::from_std(stream) {
                Ok(stream) => return (stream, peer),
                Err(e) => tracing::warn!("a connection could not be taken over: {e}"),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
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
