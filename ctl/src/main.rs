//! `ernie-ctl`: the operator's command line. It speaks HTTP and JSON to the daemon's admin socket; `commands/*` carry the
//! names of the daemon's `admin/*`.
//!
//! Exit codes: 0 done; 1 refused or failed, the reason is on standard error; 2 the command line is wrong; 3 no daemon
//! answers; 4 `status --check`: the daemon is not ready.

mod cli;
mod client;
mod commands;
mod load;
mod output;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("ernie-ctl: the runtime can not be started: {e}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(commands::run(cli)) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("ernie-ctl: {e:#}");
            ExitCode::from(if e.is::<client::Unreachable>() { 3 } else { 1 })
        }
    }
}
