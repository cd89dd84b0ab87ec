//! Replacing one model by another as one transaction.
//!
//! The types that others see; the decisions are one pure function over them.

use ernie_proto::ids::DeploymentId;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// What an operator asks for with `ernie-ctl swap`.
#[derive(Debug, Clone, PartialEq)]
pub struct SwapRequest {
    pub model_dir: PathBuf,
    /// `None`: the names of the active deployment.
    pub served_names: Option<Vec<String>>,
    pub strategy: Strategy,
    /// How long the candidate serves while the old one stays warm. Zero: no observation.
    pub observe: Duration,
    /// Share of the keys that go to the candidate while it is observed, in parts per 10 000. `None`: all.
    pub canary: Option<u32>,
    /// Take a model without a manifest.
    pub force_unsealed: bool,
}

/// How two models share the memory during a rollout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Side by side when both fit, else stop-first.
    #[default]
    Auto,
    /// Load the candidate beside the active one.
    SideBySide,
    /// Stop the active one first; requests are held meanwhile.
    StopFirst,
}

/// Why a rollout verb was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RolloutRefusal {
    #[error("a rollout is under way ({phase}); wait for it or roll it back first")]
    Busy { phase: RolloutPhase },
    #[error("there is no previous revision to go back to")]
    NothingToRollBack,
    #[error("no model is being served yet")]
    NotServing,
    #[error("the server is shutting down")]
    Draining,
    #[error("{0}")]
    Invalid(String),
}

/// The phases of a rollout, as shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum RolloutPhase {
    #[default]
    Steady,
    /// Hashing the files against the manifest, reading tokenizer and template.
    Verifying,
    /// Stop-first only: the old deployment ends what it began.
    Clearing,
    Loading,
    Probing,
    /// The candidate serves, the old one stays warm.
    Soaking,
    /// Going back to the old one.
    Restoring,
}

impl RolloutPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Verifying => "verifying",
            Self::Clearing => "clearing",
            Self::Loading => "loading",
            Self::Probing => "probing",
            Self::Soaking => "soaking",
            Self::Restoring => "restoring",
        }
    }
}

impl fmt::Display for RolloutPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The rollout as it stands, and how the last one ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutStatus {
    pub phase: RolloutPhase,
    /// The deployment being rolled out.
    pub candidate: Option<DeploymentId>,
    /// The deployment it replaces.
    pub replaces: Option<DeploymentId>,
    /// Since this phase began.
    pub phase_age: Option<Duration>,
    /// Until this phase is given up, or, while soaking, completed.
    pub phase_left: Option<Duration>,
    /// The deployment a rollback in steady state would go back to.
    pub previous_revision: Option<String>,
    pub last: Option<RolloutOutcome>,
}

/// How a rollout ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolloutOutcome {
    pub candidate: DeploymentId,
    pub revision: String,
    /// `None`: the candidate is the active deployment now. Else why it is not.
    pub failure: Option<String>,
    /// Unix time in seconds.
    pub at: u64,
}
