//! The command line: which role this process plays.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(
    name = "ernied",
    version,
    about = "Serves ERNIE-4.5 models: OpenAI-compatible API, supervised workers, control plane"
)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Serve a model.
    Serve,
    /// The engine process; started by `serve`, never by hand.
    #[command(hide = true)]
    Worker,
    /// Read the configuration, report every error, print what would be used.
    CheckConfig,
    /// Measure the kernels on this machine.
    BenchKernels,
}

/// Dispatches on the first word.
pub fn main() -> ExitCode {
    match Cli::parse().role {
        Role::Serve => ExitCode::FAILURE,
        Role::Worker => ExitCode::FAILURE,
        Role::CheckConfig => ExitCode::FAILURE,
        Role::BenchKernels => ExitCode::FAILURE,
    }
}
