//! One worker process as the supervisor sees it: how it is started, what it says, how it ends.
//!
//! The only file that starts processes. [`SpawnWorker`] is the seam at which tests replace the process by a script. Each
//! worker has one task that owns process, pipe and standard error and speaks to the supervisor in [`WorkerEvent`]s; it
//! decides nothing.

use super::stderr::{self, StderrTail};
use command_fds::{CommandFdExt, FdMapping};
use ernie_proto::frame;
use ernie_proto::ids::WorkerId;
use ernie_proto::worker::{FromWorker, ToWorker};
use futures::StreamExt;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio_util::codec::{FramedRead, LengthDelimitedCodec};
use tokio_util::sync::CancellationToken;

/// The worker's end of the socket pair.
pub const WORKER_FD: i32 = 3;

/// How long a process that closed its socket may take to end by itself, so that its exit status tells the truth.
const LAST_BREATH: Duration = Duration::from_millis(250);

/// How long the rest of standard error is read after the end of the process (a child of its own may hold it open).
const STDERR_LINGER: Duration = Duration::from_millis(500);

/// Messages that go out in one write.
const WRITES_AT_ONCE: usize = 64;

/// Variables that a worker may see; everything else (keys, tokens) stays with the daemon.
const ENVIRONMENT: [&str; 6] = ["ERNIED_ISA", "ERNIED_FAULTS", "RUST_BACKTRACE", "RUST_LIB_BACKTRACE", "LANG", "TZ"];

/// Starts worker processes.
pub trait SpawnWorker: Send + Sync + 'static {
    /// Starts one; must be called inside a runtime.
    fn spawn(&self, worker: WorkerId) -> io::Result<SpawnedWorker>;
}

/// A process that has just been started, with the supervisor's end of its socket.
pub struct SpawnedWorker {
    pub pid: u32,
    pub pipe: Box<dyn WorkerPipe>,
    /// Its standard error, to be read until its end whatever it holds.
    pub stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    pub process: Box<dyn WorkerProcess>,
}

impl fmt::Debug for SpawnedWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpawnedWorker").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Both directions of the worker protocol.
pub trait WorkerPipe: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> WorkerPipe for T {}

/// Power over the process behind the pipe.
pub trait WorkerProcess: Send {
    /// SIGKILL. Does nothing when it has already ended.
    fn kill(&mut self);

    /// Completes when it has ended and is reaped; says how: `exit status 1`, `killed by signal 9 (SIGKILL)`.
    fn wait(&mut self) -> Pin<Box<dyn Future<Output = String> + Send + '_>>;
}

/// Starts this very executable in its other role.
#[derive(Debug, Default, Clone, Copy)]
pub struct ReexecWorker;

impl SpawnWorker for ReexecWorker {
    fn spawn(&self, _worker: WorkerId) -> io::Result<SpawnedWorker> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // Through /proc/self/exe, not the path: an upgrade on disk never pairs an old daemon with a new worker.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("ernied")
            .arg("worker")
            .env_clear()
            .envs(ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C on the terminal goes to the daemon, which lets its workers finish.
            .process_group(0)
            .kill_on_drop(true);
        command
            .fd_mappings(vec![FdMapping { parent_fd: theirs.into(), child_fd: WORKER_FD }])
            .map_err(io::Error::other)?;
        let mut child = command.spawn()?;
        let pid = child.id().unwrap_or_default();
        let stderr = child.stderr.take().map(|s| Box::new(s) as Box<dyn AsyncRead + Send + Unpin>);
        let pipe = Box::new(tokio::net::UnixStream::from_std(ours)?);
        Ok(SpawnedWorker { pid, pipe, stderr, process: Box::new(ChildProcess(child)) })
    }
}

struct ChildProcess(Child);

impl WorkerProcess for ChildProcess {
    fn kill(&mut self) {
        // An error means that it has ended and is reaped, which is what was wanted.
        let _ = self.0.start_kill();
    }

    fn wait(&mut self) -> Pin<Box<dyn Future<Output = String> + Send + '_>> {
        Box::pin(async {
            match self.0.wait().await {
                Ok(status) => describe(status),
                Err(error) => format!("exit status unknown: {error}"),
            }
        })
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => {
            let name = match signal {
                libc::SIGKILL => " (SIGKILL: by the supervisor, an operator or the out-of-memory killer)",
                libc::SIGSEGV => " (SIGSEGV)",
                libc::SIGABRT => " (SIGABRT)",
                libc::SIGBUS => " (SIGBUS: a mapped file was cut short, or huge pages ran out)",
                libc::SIGILL => " (SIGILL: an instruction this processor does not have)",
                libc::SIGTERM => " (SIGTERM)",
                _ => "",
            };
            let core = if status.core_dumped() { ", core dumped" } else { "" };
            format!("killed by signal {signal}{name}{core}")
        }
        (None, None) => "ended in an unknown way".to_string(),
    }
}

/// What a worker's task tells the supervisor.
#[derive(Debug)]
pub(super) enum WorkerEvent {
    Spawned {
        pid: u32,
    },
    Message(FromWorker),
    /// Nothing more will be read: end of file, a frame that does not decode, or no process at all. The process is being
    /// ended if it has not.
    Lost {
        reason: String,
    },
    /// The process is gone and reaped. Always the last event.
    Ended {
        status: String,
        stderr: Vec<String>,
    },
}

/// The supervisor's hold on a worker's task.
#[derive(Debug)]
pub(super) struct WorkerLink {
    pub(super) to: mpsc::Sender<ToWorker>,
    /// Ends the process at once (SIGKILL).
    pub(super) kill: CancellationToken,
}

/// Starts a worker and its task.
pub(super) fn start(
    spawner: Arc<dyn SpawnWorker>,
    id: WorkerId,
    outbox_max: usize,
    events: mpsc::Sender<(WorkerId, WorkerEvent)>,
) -> WorkerLink {
    let (to, outbox) = mpsc::channel(outbox_max);
    let kill = CancellationToken::new();
    let killed = kill.clone();
    tokio::spawn(async move {
        let (status, stderr) = live(&*spawner, id, outbox, &events, killed).await;
        // Fails only when the supervisor is gone.
        let _ = events.send((id, WorkerEvent::Ended { status, stderr })).await;
    });
    WorkerLink { to, kill }
}

/// A worker's whole life; returns how it ended.
async fn live(
    spawner: &dyn SpawnWorker,
    id: WorkerId,
    outbox: mpsc::Receiver<ToWorker>,
    events: &mpsc::Sender<(WorkerId, WorkerEvent)>,
    killed: CancellationToken,
) -> (String, Vec<String>) {
    let SpawnedWorker { pid, pipe, stderr, mut process } = match spawner.spawn(id) {
        Ok(spawned) => spawned,
        Err(error) => {
            let reason = format!("the worker process could not be started: {error}");
            let _ = events.send((id, WorkerEvent::Lost { reason: reason.clone() })).await;
            return (reason, Vec::new());
        }
    };
    let _ = events.send((id, WorkerEvent::Spawned { pid })).await;
    let (from, to) = tokio::io::split(pipe);
    let writer = tokio::spawn(write(outbox, to));
    let stderr = stderr.map(|stream| tokio::spawn(stderr::follow(stream, id, pid)));
    let read = tokio::select! {
        reason = read(id, from, events) => Some(reason),
        () = killed.cancelled() => None,
    };
    writer.abort();
    let mut status = None;
    if let Some(reason) = read {
        let _ = events.send((id, WorkerEvent::Lost { reason })).await;
        // A process that closed its socket is ending; let its own status be the one that is reported.
        status = tokio::select! {
            status = process.wait() => Some(status),
            () = tokio::time::sleep(LAST_BREATH) => None,
            () = killed.cancelled() => None,
        };
    }
    let status = match status {
        Some(status) => status,
        None => {
            process.kill();
            process.wait().await
        }
    };
    (status, last_words(stderr).await)
}

async fn last_words(stderr: Option<tokio::task::JoinHandle<StderrTail>>) -> Vec<String> {
    let Some(mut task) = stderr else { return Vec::new() };
    match tokio::time::timeout(STDERR_LINGER, &mut task).await {
        Ok(Ok(tail)) => tail.into_lines(),
        Ok(Err(_)) => Vec::new(),
        Err(_) => {
            task.abort();
            vec!["(standard error is still held open by another process)".to_string()]
        }
    }
}

fn framing() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .little_endian()
        .length_field_type::<u32>()
        .max_frame_length(frame::FRAME_BYTES_MAX)
        .new_codec()
}

/// Reads until the worker stops making sense; says why.
async fn read(id: WorkerId, from: impl AsyncRead + Unpin, events: &mpsc::Sender<(WorkerId, WorkerEvent)>) -> String {
    let mut frames = FramedRead::with_capacity(from, framing(), 64 << 10);
    while let Some(frame) = frames.next().await {
        let message = match frame
            .map_err(|error| error.to_string())
            .and_then(|payload| frame::decode::<FromWorker>(&payload).map_err(|error| error.to_string()))
        {
            Ok(message) => message,
            Err(error) => return format!("it broke the protocol: {error}"),
        };
        if events.send((id, WorkerEvent::Message(message))).await.is_err() {
            return "the supervisor is gone".to_string();
        }
    }
    "it closed its socket".to_string()
}

/// Writes what the supervisor queues. An error shows to the reader as end of file.
async fn write(mut outbox: mpsc::Receiver<ToWorker>, mut to: impl AsyncWrite + Unpin) {
    let mut waiting = Vec::new();
    while outbox.recv_many(&mut waiting, WRITES_AT_ONCE).await > 0 {
        let mut bytes = Vec::new();
        for message in waiting.drain(..) {
            let Ok(frame) = frame::encode(&message) else { return };
            bytes.extend_from_slice(&frame);
        }
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}
