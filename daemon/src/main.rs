//! The executable `ernied`: `serve` is the supervisor, `worker` the engine process that the supervisor starts.

use ernied::cli::{Role, role};
use std::process::ExitCode;

fn main() -> ExitCode {
    match role() {
        Role::Serve(config, sources) => ernied::app::main(*config, *sources),
        Role::Worker => match ernied::system::sockets::worker_socket() {
            Ok(socket) => ernied::worker::run(socket),
            Err(e) => {
                eprintln!("ernied worker: {e}; this role is started by `ernied serve`, never by hand");
                ExitCode::FAILURE
            }
        },
        Role::Model(task) => ernied::offline::run(&task),
        Role::BenchKernels(filter) => {
            println!("{}", ernie_kernels::bench::run(&filter));
            ExitCode::SUCCESS
        }
        Role::Done(code) => code,
    }
}
