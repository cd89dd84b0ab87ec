//! What happens in the fleet, as events that log, metrics and audit hang on.
//!
//! The supervisor tells each event once, in order, from its own task; an observer must not block.

use super::rollout::{CutOver, RolloutPhase, Sides};
use super::status::WorkerFailure;
use ernie_proto::ids::{DeploymentId, RequestId, WorkerId};
use ernie_proto::worker::StepStats;
use std::path::PathBuf;
use std::time::Duration;
use tracing::{error, info, warn};

/// Is told everything. Must not block: the supervisor waits for it.
pub trait FleetObserver: Send + Sync + 'static {
    fn on(&self, event: &FleetEvent);

    /// A worker reported a step. Comes often: hundreds of times a second.
    fn step(&self, slot: u32, worker: WorkerId, stats: &StepStats) {
        let _ = (slot, worker, stats);
    }
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum FleetEvent {
    WorkerSpawned {
        worker: WorkerId,
        deployment: DeploymentId,
        slot: u32,
        pid: u32,
    },
    WorkerReady {
        worker: WorkerId,
        deployment: DeploymentId,
        slot: u32,
        elapsed: Duration,
    },
    /// A worker ended without being asked to, or was ended for cause.
    WorkerLost {
        worker: WorkerId,
        deployment: DeploymentId,
        slot: u32,
        failure: WorkerFailure,
    },
    /// A worker ended because it was asked to.
    WorkerStopped {
        worker: WorkerId,
        deployment: DeploymentId,
        slot: u32,
    },
    RestartScheduled {
        deployment: DeploymentId,
        slot: u32,
        wait: Duration,
    },
    CrashLoopEntered {
        deployment: DeploymentId,
        slot: u32,
        deaths: u32,
    },
    CrashLoopLeft {
        deployment: DeploymentId,
        slot: u32,
    },
    StepFailed {
        worker: WorkerId,
        message: String,
    },
    RequestsResumed {
        worker: WorkerId,
        requests: usize,
    },
    RequestPoisonous {
        request: RequestId,
        deaths: u32,
    },
    DeploymentActivated {
        deployment: DeploymentId,
        revision: String,
        replaces: Option<DeploymentId>,
    },
    DeploymentRetired {
        deployment: DeploymentId,
        revision: String,
    },
    DeploymentFailed {
        deployment: DeploymentId,
        reason: String,
    },
    RolloutBegan {
        deployment: DeploymentId,
        model_dir: PathBuf,
        strategy: &'static str,
    },
    RolloutPhase {
        deployment: DeploymentId,
        phase: RolloutPhase,
        detail: String,
    },
    /// The candidate is the active deployment, and was observed as long as was asked.
    RolloutCompleted {
        deployment: DeploymentId,
        revision: String,
        elapsed: Duration,
        cut_over: Option<CutOver>,
        requests: Sides,
    },
    /// The links that a restart follows could not be written.
    CommitFailed {
        deployment: DeploymentId,
        reason: String,
    },
    RolledBack {
        deployment: DeploymentId,
        revision: String,
        reason: String,
        restored: bool,
    },
    Draining {
        requests: usize,
        patience: Duration,
    },
    Drained {
        finished: u64,
        failed: u64,
    },
    /// A drain was taken back: new requests are taken again.
    Resumed,
}

/// The log line of an event.
pub(super) fn log(event: &FleetEvent) {
    match event {
        FleetEvent::WorkerSpawned { worker, deployment, slot, pid } => {
            info!(%worker, %deployment, slot, pid, "worker started");
        }
        FleetEvent::WorkerReady { worker, deployment, slot, elapsed } => {
            info!(%worker, %deployment, slot, elapsed_ms = millis(*elapsed), "worker ready");
        }
        FleetEvent::WorkerLost { worker, deployment, slot, failure } => {
            let stderr = failure.stderr.join(" | ");
            warn!(%worker, %deployment, slot, reason = failure.reason, stderr, "worker lost");
        }
        FleetEvent::WorkerStopped { worker, deployment, slot } => {
            info!(%worker, %deployment, slot, "worker stopped");
        }
        FleetEvent::RestartScheduled { deployment, slot, wait } => {
            info!(%deployment, slot, wait_ms = millis(*wait), "worker restart scheduled");
        }
        FleetEvent::CrashLoopEntered { deployment, slot, deaths } => {
            error!(%deployment, slot, deaths, "worker is in a crash loop");
        }
        FleetEvent::CrashLoopLeft { deployment, slot } => info!(%deployment, slot, "worker left its crash loop"),
        FleetEvent::StepFailed { worker, message } => warn!(%worker, message, "step failed"),
        FleetEvent::RequestsResumed { worker, requests } => info!(%worker, requests, "requests resumed"),
        FleetEvent::RequestPoisonous { request, deaths } => {
            error!(%request, deaths, "request given up: workers died on it again and again");
        }
        FleetEvent::DeploymentActivated { deployment, revision, replaces } => {
            let replaces = replaces.map(|id| id.to_string());
            info!(%deployment, revision, replaces, "deployment active");
        }
        FleetEvent::DeploymentRetired { deployment, revision } => info!(%deployment, revision, "deployment retired"),
        FleetEvent::DeploymentFailed { deployment, reason } => error!(%deployment, reason, "deployment failed"),
        FleetEvent::RolloutBegan { deployment, model_dir, strategy } => {
            info!(%deployment, model_dir = %model_dir.display(), strategy, "rollout began");
        }
        FleetEvent::RolloutPhase { deployment, phase, detail } => info!(%deployment, %phase, detail, "rollout"),
        FleetEvent::RolloutCompleted { deployment, revision, elapsed, cut_over, requests } => {
            let pause_us = cut_over.map(|cut_over| u64::try_from(cut_over.pause.as_micros()).unwrap_or(u64::MAX));
            let Sides { old, new, failed } = requests;
            info!(%deployment, revision, elapsed_ms = millis(*elapsed), pause_us, old, new, failed, "rollout completed");
        }
        FleetEvent::CommitFailed { deployment, reason } => {
            error!(%deployment, reason, "a restart of the daemon would not come back with this revision");
        }
        FleetEvent::RolledBack { deployment, revision, reason, restored } => {
            error!(%deployment, revision, reason, restored, "rollout rolled back");
        }
        FleetEvent::Draining { requests, patience } => {
            info!(requests, patience_ms = millis(*patience), "draining");
        }
        FleetEvent::Drained { finished, failed } => info!(finished, failed, "drained"),
        FleetEvent::Resumed => info!("taking requests again"),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
