//! What the rest of the daemon may see of the fleet: plain values, published by the supervisor through a watch channel.
//!
//! Ages are as of publication; while there is work the supervisor publishes at least every 200 ms, else once a second.
//! Nothing here acts.

use super::rollout::RolloutStatus;
use crate::telemetry::metrics::RevisionFigures;
use ernie_proto::ids::{DeploymentId, WorkerId};
use ernie_proto::worker::{LoadProgress, Loaded, StepStats};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Everything about the fleet at one instant.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetStatus {
    pub state: FleetState,
    /// Why the state is not `Serving`, or what to know about it: a sentence.
    pub reason: Option<String>,
    /// The deployment that new requests go to.
    pub active: Option<DeploymentId>,
    pub deployments: Vec<DeploymentStatus>,
    /// One entry per worker slot, all deployments, in order of deployment and slot.
    pub workers: Vec<WorkerStatus>,
    /// Requests with a worker.
    pub requests_dispatched: u32,
    /// Requests that wait for a worker (none is ready, or they are tried one by one after worker deaths).
    pub requests_held: u32,
    /// Of all workers that ever were: gauges are sums over living workers, counters never fall.
    pub stats: StepStats,
    /// Generated tokens per second over the last ten seconds.
    pub tokens_per_second: f64,
    /// Computed prompt tokens per second over the last ten seconds.
    pub prompt_tokens_per_second: f64,
    pub counters: FleetCounters,
    pub rollout: RolloutStatus,
    /// Rises with every publication.
    pub sequence: u64,
}

impl FleetStatus {
    pub(super) fn starting() -> Self {
        Self {
            state: FleetState::Starting,
            reason: Some("the first model is being loaded".to_string()),
            active: None,
            deployments: Vec::new(),
            workers: Vec::new(),
            requests_dispatched: 0,
            requests_held: 0,
            stats: StepStats::default(),
            tokens_per_second: 0.0,
            prompt_tokens_per_second: 0.0,
            counters: FleetCounters::default(),
            rollout: RolloutStatus::default(),
            sequence: 0,
        }
    }

    /// Whether a request that comes now will be worked on: the deployment is active and one of its workers lives.
    pub fn is_ready(&self) -> bool {
        self.state == FleetState::Serving
            && self.workers.iter().any(|w| Some(w.deployment) == self.active && w.state.serves())
    }

    pub fn deployment(&self, id: DeploymentId) -> Option<&DeploymentStatus> {
        self.deployments.iter().find(|d| d.id == id)
    }

    pub fn active_deployment(&self) -> Option<&DeploymentStatus> {
        self.active.and_then(|id| self.deployment(id))
    }

    /// Every loaded model's requests, for metrics.
    pub fn revisions(&self) -> Vec<RevisionFigures> {
        let of = |d: &DeploymentStatus| RevisionFigures {
            revision: d.revision.clone(),
            role: d.role.as_str(),
            in_flight: u64::from(d.requests),
            finished: d.requests_finished,
            failed: d.requests_failed,
        };
        self.deployments.iter().map(of).collect()
    }

    /// Share of the keys that go to a candidate, 0 to 1.
    pub fn canary_share(&self) -> f64 {
        self.rollout.canary.map_or(0.0, |share| f64::from(share) / 10_000.0)
    }

    /// The longest time any serving worker has had work without finishing a step.
    pub fn last_step_age(&self) -> Option<Duration> {
        self.workers.iter().filter(|w| w.state.serves()).filter_map(|w| w.last_step_age).max()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FleetState {
    /// No model has been loaded yet.
    Starting,
    Serving,
    /// A deployment is active, but none of its workers lives at the moment; requests are held.
    Recovering,
    /// Between two models with room for one: requests are held.
    Switching,
    /// No new requests; the running ones may end.
    Draining,
    /// Everything has ended.
    Stopped,
    /// No model could be loaded, or its workers die again and again; requests are refused.
    Failed,
}

impl FleetState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Recovering => "recovering",
            Self::Switching => "switching",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for FleetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct DeploymentStatus {
    pub id: DeploymentId,
    pub role: DeploymentRole,
    /// First is the name.
    pub served_names: Vec<String>,
    pub revision: String,
    pub model_dir: PathBuf,
    /// Present once a worker has loaded it.
    pub loaded: Option<Loaded>,
    pub workers_wanted: u32,
    pub workers_ready: u32,
    /// Requests that belong to it and have not ended.
    pub requests: u32,
    pub requests_finished: u64,
    pub requests_failed: u64,
}

/// What a deployment is for at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeploymentRole {
    /// Being loaded or probed; no request goes there.
    Candidate,
    /// Takes a share of the new requests.
    Canary,
    /// Takes the new requests.
    Active,
    /// Stays warm for a rollback.
    Standby,
    /// Ends what it began, then goes.
    Retiring,
    /// Its workers have been stopped to make room; it is loaded again on a rollback.
    Parked,
}

impl DeploymentRole {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::Canary => "canary",
            Self::Active => "active",
            Self::Standby => "standby",
            Self::Retiring => "retiring",
            Self::Parked => "parked",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct WorkerStatus {
    pub deployment: DeploymentId,
    /// Position among the deployment's workers; stays the same over restarts.
    pub slot: u32,
    /// Of the living process; fresh per spawn.
    pub id: Option<WorkerId>,
    pub pid: Option<u32>,
    pub state: WorkerState,
    /// Processes that had to be replaced so far.
    pub restarts: u64,
    /// Why the last process ended, with its last lines on standard error.
    pub last_failure: Option<WorkerFailure>,
    /// Since the process was started.
    pub uptime: Option<Duration>,
    /// While work is queued: since the last finished step, or since the work came if that was later.
    pub last_step_age: Option<Duration>,
    /// Since the last answer to a ping.
    pub last_pong_age: Option<Duration>,
    pub load: Option<LoadProgress>,
    /// Requests given to this worker that have not ended.
    pub requests: u32,
    /// As the living process last reported.
    pub stats: StepStats,
}

/// Why a worker process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerFailure {
    /// One sentence.
    pub reason: String,
    /// The last lines it wrote to standard error.
    pub stderr: Vec<String>,
    /// Unix time in seconds.
    pub at: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum WorkerState {
    /// The process is started and has not said hello.
    Starting,
    Loading,
    Ready,
    /// Takes no new requests; will be replaced when the running ones have ended.
    Draining,
    /// Being ended.
    Stopping,
    /// Waits before the next start.
    Backoff {
        wait: Duration,
    },
    /// Died too often; tries again after a long wait.
    CrashLoop {
        wait: Duration,
    },
    /// Will not be started again by itself.
    Failed,
    /// Not wanted at the moment.
    Stopped,
}

impl WorkerState {
    /// Whether requests are sent there or may still be running there.
    pub fn serves(&self) -> bool {
        matches!(self, Self::Ready | Self::Draining)
    }

    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
            Self::Backoff { .. } => "backoff",
            Self::CrashLoop { .. } => "crash_loop",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }
}

/// Events counted since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FleetCounters {
    pub workers_spawned: u64,
    /// Worker processes that ended without being asked to.
    pub workers_lost: u64,
    /// Of these, those that were ended because they made no progress.
    pub workers_stalled: u64,
    /// Requests that went on with another worker.
    pub requests_resumed: u64,
    /// Requests given up because workers died on them again and again.
    pub requests_poisonous: u64,
    /// Requests whose client went away.
    pub requests_aborted: u64,
    pub rollouts_completed: u64,
    pub rollouts_rolled_back: u64,
}
