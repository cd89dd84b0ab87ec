//! `ernied model`: work on model folders that needs no daemon. `ernie-ctl model` runs it.
//!
//! Nothing here listens, serves or changes a running daemon; a folder is read, and written to only by `seal` and `prepare`.
//! Exit statuses: 0 done, 1 the model has problems or could not be worked on.

mod inspect;
mod prepare;
mod report;
mod seal;

pub use crate::worker::folder::{PrepareForm, Sample};

use std::path::PathBuf;
use std::process::ExitCode;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTask {
    pub verb: ModelVerb,
    pub dir: PathBuf,
    /// Print JSON.
    pub json: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelVerb {
    /// KV blocks whose memory is asked for; 0: one sequence of full length.
    Inspect {
        blocks: u64,
    },
    Seal,
    Verify,
    Prepare {
        out: PathBuf,
        form: PrepareForm,
    },
}

/// Does it.
pub fn run(task: &ModelTask) -> ExitCode {
    match &task.verb {
        ModelVerb::Inspect { blocks } => inspect::run(&task.dir, *blocks, task.json),
        ModelVerb::Seal => seal::seal(&task.dir, task.json),
        ModelVerb::Prepare { out, form } => prepare::run(&task.dir, out, form, task.json),
        ModelVerb::Verify => seal::verify(&task.dir, task.json),
    }
}
