//! The executable `ernied`: `serve` is the supervisor, `worker` the engine process that the supervisor starts.

use std::process::ExitCode;

fn main() -> ExitCode {
    ernied::cli::main()
}
