//! The worker's side of the socket: a thread that reads, and an outbox that any thread may write to.

use ernie_proto::frame::{self, FrameError};
use ernie_proto::worker::{FromWorker, ToWorker};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Messages that wait for the engine. It takes all of them before each step; so many do not arrive during one step that
/// still makes sense.
const INBOX_MAX: usize = 1 << 16;

/// How often a long step shows that it moves.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);

/// Exit status of a worker whose supervisor went away; nobody is left to read it.
const EXIT_ALONE: i32 = 0;

/// Exit status of a worker that can not keep up with its supervisor.
const EXIT_OVERRUN: i32 = 70;

/// What the supervisor said and the engine has not taken yet.
#[derive(Debug)]
pub(super) struct Inbox(Receiver<ToWorker>);

impl Inbox {
    /// Waits for the next message.
    pub(super) fn next(&self) -> Result<ToWorker, String> {
        self.0.recv().map_err(|_| "the supervisor closed the socket".to_string())
    }

    /// The next message if there is one.
    pub(super) fn take(&self) -> Result<Option<ToWorker>, String> {
        match self.0.try_recv() {
            Ok(message) => Ok(Some(message)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err("the supervisor closed the socket".to_string()),
        }
    }
}

/// Writes whole frames; the engine and the beat share it.
#[derive(Debug, Clone)]
pub(super) struct Outbox(Arc<Mutex<UnixStream>>);

impl Outbox {
    pub(super) fn send(&self, message: &FromWorker) -> Result<(), String> {
        let frame = frame::encode(message).map_err(|error| error.to_string())?;
        // A thread that panicked while writing left half a frame; the supervisor will see it. Nothing to repair here.
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        socket.write_all(&frame).map_err(|error| format!("the supervisor can not be reached: {error}"))
    }
}

/// Starts the reading thread.
pub(super) fn open(socket: UnixStream) -> Result<(Inbox, Outbox), String> {
    let reading = socket.try_clone().map_err(|error| format!("the socket can not be used: {error}"))?;
    let (sender, receiver) = sync_channel(INBOX_MAX);
    thread::Builder::new()
        .name("worker-inbox".to_string())
        .spawn(move || read(reading, &sender))
        .map_err(|error| format!("no thread for the socket: {error}"))?;
    Ok((Inbox(receiver), Outbox(Arc::new(Mutex::new(socket)))))
}

/// Reads until the socket ends, and then ends the process: a worker without a supervisor must not live, even if its engine
/// hangs in a step or a load.
#[allow(clippy::exit, reason = "the engine thread may hang; nothing else would end the process")]
fn read(socket: UnixStream, inbox: &SyncSender<ToWorker>) {
    let mut socket = std::io::BufReader::with_capacity(64 << 10, socket);
    let mut buffer = Vec::new();
    loop {
        match frame::read::<ToWorker>(&mut socket, &mut buffer) {
            Ok(ToWorker::Shutdown) | Err(FrameError::Closed) => process::exit(EXIT_ALONE),
            Ok(message) => match inbox.try_send(message) {
                Ok(()) => {}
                Err(TrySendError::Disconnected(_)) => return,
                Err(TrySendError::Full(_)) => {
                    eprintln!("worker: {INBOX_MAX} messages wait for the engine; giving up");
                    process::exit(EXIT_OVERRUN);
                }
            },
            Err(error) => {
                eprintln!("worker: {error}");
                process::exit(EXIT_OVERRUN);
            }
        }
    }
}

/// Starts the thread that tells the supervisor while `progress` rises: a step that takes long shows that it moves, and one
/// that hangs does not.
pub(super) fn beat(outbox: &Outbox, progress: Arc<AtomicU64>) {
    let outbox = outbox.clone();
    let beating = move || {
        let mut last = 0;
        loop {
            thread::sleep(BEAT_INTERVAL);
            let now = progress.load(Ordering::Relaxed);
            if now != last {
                last = now;
                if outbox.send(&FromWorker::Beat(now)).is_err() {
                    return;
                }
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("worker-beat".to_string()).spawn(beating) {
        eprintln!("worker: no thread for the beat: {error}; long steps may be taken for a stall");
    }
}
