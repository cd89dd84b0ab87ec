//! The worker role: the engine in a process of its own, driven over one socket.
//!
//! Plain threads, no runtime: one reads the socket ([`io`]), one runs the engine ([`serve`]). It has no flags, reads no
//! environment (but for the kernels' `ERNIED_ISA`), writes no file. When the socket ends, it ends, whatever it is doing.

pub mod folder;
mod io;
mod pace;
mod serve;
mod swap;
mod wire;

use ernie_proto::worker::{Fatal, FromWorker, Hello, ToWorker};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

/// Serves one supervisor until the socket ends.
pub fn run(socket: UnixStream) -> ExitCode {
    match converse(socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("worker: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Measures the kernels on this machine and prints what they reach of what it could give.
#[allow(clippy::print_stdout, reason = "its output is what the command is for")]
pub fn bench_kernels() -> ExitCode {
    print!("{}", ernie_kernels::bench::run(""));
    ExitCode::SUCCESS
}

fn converse(socket: UnixStream) -> Result<(), String> {
    let (inbox, outbox) = io::open(socket)?;
    outbox.send(&FromWorker::Hello(Hello::own()))?;
    let own = Hello::own();
    match inbox.next()? {
        ToWorker::Hello(hello) if hello == own => {}
        ToWorker::Hello(hello) => return Err(format!("the supervisor is another build: {hello:?}, this is {own:?}")),
        other => return Err(format!("expected Hello, got {other:?}")),
    }
    let load = match inbox.next()? {
        ToWorker::Load(load) => load,
        other => return Err(format!("expected Load, got {other:?}")),
    };
    let (engine, pace, beat) = match serve::load(*load, &outbox) {
        Ok(loaded) => loaded,
        Err(message) => {
            outbox.send(&FromWorker::Fatal(Fatal { phase: "load".to_string(), message: message.clone() }))?;
            return Err(message);
        }
    };
    io::beat(&outbox, beat);
    serve::serve(engine, pace, &inbox, &outbox)
}
