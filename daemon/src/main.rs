//! The executable `ernied`: `serve` is the supervisor, `worker` the engine process that the supervisor starts.

use ernied::cli::{EXIT_CONFIG, Role, role};
use std::process::ExitCode;

fn main() -> ExitCode {
    let role = role();
    // A worker inherits the variable from a daemon that was checked; `Done` computes nothing.
    if matches!(role, Role::Serve(..) | Role::Model(_) | Role::BenchKernels(_))
        && let Err(error) = ernie_kernels::Isa::check_override()
    {
        eprintln!("ernied: {error}");
        return ExitCode::from(EXIT_CONFIG);
    }
    match role {
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
