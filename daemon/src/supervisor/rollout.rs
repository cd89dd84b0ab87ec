//! Replacing one model by another as one transaction: the states, and the one function that moves between them.
//!
//! [`on`] takes a state and an event and gives the next state and what is to be done; it knows no clock but `now` and does
//! nothing. Results carry the deployment that they are about, so that late ones are refused and move nothing; every waiting
//! state has a deadline. The supervisor carries the effects out (`rollouts`).
//!
//! Side by side: `Steady → Verifying → Loading → Probing → Soaking → Steady`. Stop-first puts `Clearing` (the old deployment
//! ends what it began and leaves) before `Loading`, and needs `Restoring` on the way back. Whatever fails leads back to the
//! old deployment, which is not touched before the candidate has passed its probes (side by side) or has been verified
//! (stop-first).

use super::status::DeploymentRole;
use crate::model_store::Configured;
use ernie_proto::ids::DeploymentId;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

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
    /// The folder has to hold this revision (a way back must lead to what served, not to what lies there now).
    pub revision: Option<String>,
    /// The configuration names this model now: what a restart compares with when this rollout has completed.
    pub configured: Option<Configured>,
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

impl Strategy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::SideBySide => "side-by-side",
            Self::StopFirst => "stop-first",
        }
    }
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
    /// Comparing the files with the manifest, reading tokenizer and template, finding room.
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
    /// Known once it is verified: `side-by-side` or `stop-first`.
    pub strategy: Option<Strategy>,
    /// Share of the keys that go to the candidate, in parts per 10 000.
    pub canary: Option<u32>,
    /// Since the rollout began.
    pub age: Option<Duration>,
    /// Until this phase is given up, or, while soaking, completed.
    pub phase_left: Option<Duration>,
    /// Folder of the revision that a rollback in steady state would go back to.
    pub previous: Option<PathBuf>,
    pub last: Option<RolloutOutcome>,
}

/// How a rollout ended.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutOutcome {
    pub candidate: DeploymentId,
    pub model_dir: PathBuf,
    /// Empty when it was not verified.
    pub revision: String,
    pub result: RolloutResult,
    pub cut_over: Option<CutOver>,
    /// Since the cut-over.
    pub requests: Sides,
    pub elapsed: Duration,
    /// Unix time in seconds.
    pub at: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutResult {
    /// The candidate is the active deployment now.
    Completed,
    /// The old deployment is the active one again, or stayed it.
    RolledBack { phase: RolloutPhase, reason: String },
    /// The candidate failed, and the old one could not be loaded again in time; it is still being tried.
    NotRestored { reason: String },
}

/// What the moment was like at which new requests began to go to the candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutOver {
    /// From the last request that could go to the old deployment to the first that could go to the new one.
    pub pause: Duration,
    /// Requests under way on the old deployment at that moment.
    pub in_flight: u32,
}

/// Requests that ended while both deployments were there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sides {
    pub old: u64,
    pub new: u64,
    /// On either side.
    pub failed: u64,
}

/// How long each phase may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolloutTimeouts {
    pub verify: Duration,
    /// For the old deployment to end what it began (stop-first).
    pub clear: Duration,
    /// In all; a load without progress ends earlier.
    pub load: Duration,
    pub probe: Duration,
    pub restore: Duration,
}

impl Default for RolloutTimeouts {
    fn default() -> Self {
        Self {
            verify: Duration::from_secs(600),
            clear: Duration::from_secs(300),
            load: Duration::from_secs(3600),
            probe: Duration::from_secs(120),
            restore: Duration::from_secs(3600),
        }
    }
}

/// One attempt to replace `replaces` by `candidate`. Both ids are never used again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) candidate: DeploymentId,
    pub(super) replaces: DeploymentId,
    pub(super) observe: Duration,
    pub(super) canary: Option<u32>,
    /// Known once it is verified.
    pub(super) beside: Option<bool>,
    /// Of the phase.
    pub(super) deadline: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Rollout {
    Steady,
    Verifying(Attempt),
    Clearing(Attempt),
    Loading(Attempt),
    Probing(Attempt),
    Soaking(Attempt),
    /// Stop-first on its way back: first the candidate's workers leave, then the old deployment's are started.
    Restoring {
        attempt: Attempt,
        cleared: bool,
        from: RolloutPhase,
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RolloutEvent {
    /// Somebody wants a rollout.
    Begin(Attempt),
    /// The candidate's files are right and there is room for it.
    Verified {
        of: DeploymentId,
        beside: bool,
    },
    /// All workers of the deployment have left.
    Gone {
        of: DeploymentId,
    },
    /// All workers of the deployment are ready.
    Ready {
        of: DeploymentId,
    },
    Probed {
        of: DeploymentId,
    },
    /// Verification, load or probe failed, a worker was lost, a rule was broken.
    Failed {
        of: DeploymentId,
        reason: String,
    },
    Rollback {
        reason: String,
    },
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RolloutEffect {
    Verify(DeploymentId),
    /// New requests wait; nothing is routed.
    Hold,
    /// Ends what it began, then its workers leave; reports `Gone`.
    Clear(DeploymentId),
    /// Starts the workers of a deployment; reports `Ready`.
    Load(DeploymentId),
    Probe(DeploymentId),
    /// From now on new requests go to it (or its share of them does).
    CutOver {
        to: DeploymentId,
        from: DeploymentId,
        canary: Option<u32>,
    },
    /// New requests go to it, all of them.
    Route(DeploymentId),
    /// Takes no new requests, ends what it began, then is forgotten.
    Retire(DeploymentId),
    /// Its workers leave at once; it is forgotten. It never served.
    Discard(DeploymentId),
    /// Write down that `current` is the revision to come back with, and `previous` the one before.
    Commit {
        current: DeploymentId,
        previous: DeploymentId,
    },
    Completed(DeploymentId),
    RolledBack {
        of: DeploymentId,
        phase: RolloutPhase,
        reason: String,
        restored: bool,
    },
    Role(DeploymentId, DeploymentRole),
}

/// The event does not concern this state: nothing changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refused {
    /// About another attempt, or of no interest in this phase.
    Stale,
    Busy(RolloutPhase),
    NothingToRollBack,
}

impl Rollout {
    pub(super) fn phase(&self) -> RolloutPhase {
        match self {
            Self::Steady => RolloutPhase::Steady,
            Self::Verifying(_) => RolloutPhase::Verifying,
            Self::Clearing(_) => RolloutPhase::Clearing,
            Self::Loading(_) => RolloutPhase::Loading,
            Self::Probing(_) => RolloutPhase::Probing,
            Self::Soaking(_) => RolloutPhase::Soaking,
            Self::Restoring { .. } => RolloutPhase::Restoring,
        }
    }

    pub(super) fn attempt(&self) -> Option<&Attempt> {
        match self {
            Self::Steady => None,
            Self::Verifying(attempt)
            | Self::Clearing(attempt)
            | Self::Loading(attempt)
            | Self::Probing(attempt)
            | Self::Soaking(attempt)
            | Self::Restoring { attempt, .. } => Some(attempt),
        }
    }
}

type Step = Result<(Rollout, Vec<RolloutEffect>), Refused>;

/// The one decision.
pub(super) fn on(state: &Rollout, event: RolloutEvent, now: Instant, timeouts: &RolloutTimeouts) -> Step {
    use RolloutEffect as Effect;
    use RolloutEvent as Event;
    let until = |wait: Duration| now + wait;
    match (state, event) {
        (Rollout::Steady, Event::Begin(attempt)) => {
            let effects = vec![Effect::Verify(attempt.candidate)];
            Ok((Rollout::Verifying(Attempt { deadline: until(timeouts.verify), beside: None, ..attempt }), effects))
        }
        (_, Event::Begin(_)) => Err(Refused::Busy(state.phase())),
        (Rollout::Steady, Event::Rollback { .. }) => Err(Refused::NothingToRollBack),

        (Rollout::Verifying(attempt), Event::Verified { of, beside: true }) if of == attempt.candidate => {
            let attempt = Attempt { beside: Some(true), deadline: until(timeouts.load), ..attempt.clone() };
            let effects = vec![Effect::Load(attempt.candidate)];
            Ok((Rollout::Loading(attempt), effects))
        }
        (Rollout::Verifying(attempt), Event::Verified { of, beside: false }) if of == attempt.candidate => {
            let attempt = Attempt { beside: Some(false), deadline: until(timeouts.clear), ..attempt.clone() };
            let effects = vec![Effect::Hold, Effect::Clear(attempt.replaces)];
            Ok((Rollout::Clearing(attempt), effects))
        }

        (Rollout::Clearing(attempt), Event::Gone { of }) if of == attempt.replaces => {
            let attempt = Attempt { deadline: until(timeouts.load), ..attempt.clone() };
            let effects = vec![Effect::Role(attempt.replaces, DeploymentRole::Parked), Effect::Load(attempt.candidate)];
            Ok((Rollout::Loading(attempt), effects))
        }

        (Rollout::Loading(attempt), Event::Ready { of }) if of == attempt.candidate => {
            let attempt = Attempt { deadline: until(timeouts.probe), ..attempt.clone() };
            let effects = vec![Effect::Probe(attempt.candidate)];
            Ok((Rollout::Probing(attempt), effects))
        }

        (Rollout::Probing(attempt), Event::Probed { of }) if of == attempt.candidate => {
            // Nothing can be shared with a deployment that is not there.
            let canary = attempt.canary.filter(|_| attempt.beside == Some(true) && !attempt.observe.is_zero());
            let attempt = Attempt { canary, deadline: until(attempt.observe), ..attempt.clone() };
            let mut effects =
                vec![Effect::CutOver { to: attempt.candidate, from: attempt.replaces, canary: attempt.canary }];
            if attempt.observe.is_zero() {
                effects.extend(completion(&attempt));
                return Ok((Rollout::Steady, effects));
            }
            Ok((Rollout::Soaking(attempt), effects))
        }

        (Rollout::Soaking(attempt), Event::Tick) if now >= attempt.deadline => {
            Ok((Rollout::Steady, completion(attempt)))
        }
        (Rollout::Soaking(attempt), Event::Failed { of, reason }) if of == attempt.candidate => {
            Ok(back(state, attempt, reason, now, timeouts))
        }
        (Rollout::Soaking(attempt), Event::Rollback { reason }) => Ok(back(state, attempt, reason, now, timeouts)),

        (
            Rollout::Verifying(attempt)
            | Rollout::Clearing(attempt)
            | Rollout::Loading(attempt)
            | Rollout::Probing(attempt),
            Event::Tick,
        ) if now >= attempt.deadline => {
            let reason = format!("{} took too long", state.phase());
            Ok(back(state, attempt, reason, now, timeouts))
        }
        (
            Rollout::Verifying(attempt)
            | Rollout::Clearing(attempt)
            | Rollout::Loading(attempt)
            | Rollout::Probing(attempt),
            Event::Failed { of, reason },
        ) if of == attempt.candidate => Ok(back(state, attempt, reason, now, timeouts)),
        (
            Rollout::Verifying(attempt)
            | Rollout::Clearing(attempt)
            | Rollout::Loading(attempt)
            | Rollout::Probing(attempt),
            Event::Rollback { reason },
        ) => Ok(back(state, attempt, reason, now, timeouts)),

        (Rollout::Restoring { attempt, cleared: false, from, reason }, Event::Gone { of })
            if of == attempt.candidate =>
        {
            let effects = vec![Effect::Load(attempt.replaces)];
            let (attempt, from, reason) = (attempt.clone(), *from, reason.clone());
            Ok((Rollout::Restoring { attempt, cleared: true, from, reason }, effects))
        }
        (Rollout::Restoring { attempt, cleared: true, from, reason }, Event::Ready { of })
            if of == attempt.replaces =>
        {
            let effects = vec![
                Effect::Route(attempt.replaces),
                Effect::RolledBack { of: attempt.candidate, phase: *from, reason: reason.clone(), restored: true },
            ];
            Ok((Rollout::Steady, effects))
        }
        (Rollout::Restoring { attempt, cleared, from, reason }, Event::Tick) if now >= attempt.deadline => {
            // The old one stays wanted: the supervisor goes on trying, and requests are told.
            let mut effects = Vec::new();
            if !cleared {
                effects.push(Effect::Discard(attempt.candidate));
                effects.push(Effect::Load(attempt.replaces));
            }
            effects.push(Effect::Route(attempt.replaces));
            effects.push(Effect::RolledBack {
                of: attempt.candidate,
                phase: *from,
                reason: reason.clone(),
                restored: false,
            });
            Ok((Rollout::Steady, effects))
        }
        (Rollout::Restoring { .. }, Event::Rollback { .. }) => Err(Refused::Busy(RolloutPhase::Restoring)),

        // What is left came late, is about another attempt, or says nothing new in this phase.
        (
            Rollout::Steady
            | Rollout::Verifying(_)
            | Rollout::Clearing(_)
            | Rollout::Loading(_)
            | Rollout::Probing(_)
            | Rollout::Soaking(_)
            | Rollout::Restoring { .. },
            Event::Verified { .. }
            | Event::Gone { .. }
            | Event::Ready { .. }
            | Event::Probed { .. }
            | Event::Failed { .. }
            | Event::Tick,
        ) => Err(Refused::Stale),
    }
}

/// The candidate has proven itself.
fn completion(attempt: &Attempt) -> Vec<RolloutEffect> {
    vec![
        RolloutEffect::Route(attempt.candidate),
        RolloutEffect::Commit { current: attempt.candidate, previous: attempt.replaces },
        RolloutEffect::Retire(attempt.replaces),
        RolloutEffect::Completed(attempt.candidate),
    ]
}

/// The way back from wherever it is.
fn back(
    state: &Rollout,
    attempt: &Attempt,
    reason: String,
    now: Instant,
    timeouts: &RolloutTimeouts,
) -> (Rollout, Vec<RolloutEffect>) {
    use RolloutEffect as Effect;
    let phase = state.phase();
    let (candidate, replaces) = (attempt.candidate, attempt.replaces);
    let rolled_back = |reason| Effect::RolledBack { of: candidate, phase, reason, restored: true };
    let restoring = |cleared| Rollout::Restoring {
        attempt: Attempt { deadline: now + timeouts.restore, ..attempt.clone() },
        cleared,
        from: phase,
        reason: reason.clone(),
    };
    match (state, attempt.beside) {
        // The old one has been serving all the time.
        (Rollout::Verifying(_), _) | (Rollout::Loading(_) | Rollout::Probing(_), Some(true)) => {
            (Rollout::Steady, vec![Effect::Discard(candidate), rolled_back(reason)])
        }
        // The old one is warm.
        (_, Some(true)) => {
            (Rollout::Steady, vec![Effect::Route(replaces), Effect::Retire(candidate), rolled_back(reason)])
        }
        // The candidate has not been started; the old one's workers may still be there.
        (Rollout::Clearing(_), _) => (restoring(true), vec![Effect::Discard(candidate), Effect::Load(replaces)]),
        (Rollout::Soaking(_), _) => (restoring(false), vec![Effect::Hold, Effect::Retire(candidate)]),
        (_, _) => (restoring(false), vec![Effect::Discard(candidate)]),
    }
}

#[cfg(test)]
#[path = "rollout_walk.rs"]
mod walk;
