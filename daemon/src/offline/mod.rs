//! `ernied model`: work on model folders that needs no daemon. `ernie-ctl model` runs it.
//!
//! Nothing here listens, serves or changes a running daemon; a folder is read, and written to only by `seal` and `prepare`.
//! Exit statuses: 0 done, 1 the model has problems or could not be worked on.

mod inspect;
mod prepare;
mod report;
mod seal;

use crate::worker::folder::OWN_TOKENS;
use ernie_proto::worker::{Dtype, Quantization};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

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
        form: Wish,
    },
}

/// What `prepare` is to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    pub dtype: Dtype,
    pub quantization: Quantization,
    pub calibrate: Option<Calibrate>,
}

/// What text quantised weights are rounded for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Calibrate {
    /// So many tokens that the model writes by itself.
    Own { tokens: usize },
    /// A file of plain text.
    Text(PathBuf),
}

impl FromStr for Calibrate {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let Some(tokens) = word.strip_prefix("self:") else { return Ok(Self::Text(word.into())) };
        match tokens.parse() {
            Ok(tokens) if OWN_TOKENS.contains(&tokens) => Ok(Self::Own { tokens }),
            _ => Err(format!("self: takes between {} and {} tokens", OWN_TOKENS.start(), OWN_TOKENS.end())),
        }
    }
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
