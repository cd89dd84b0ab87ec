//! The handle through which the rest of the daemon uses the fleet: submit a request, watch, drain, swap.
//!
//! A handle owns nothing but channels to the supervisor task. What it hands out cleans up after itself: dropping a
//! [`Generation`] aborts its request.

use super::deployment::{Absent, Deployment, Routing};
use super::rollout::{RolloutRefusal, RolloutStatus, SwapRequest};
use super::status::FleetStatus;
use crate::telemetry::steps::{PROMPT_STEPS_MAX, Step};
use ernie_proto::ids::{RequestId, WorkerId};
use ernie_proto::worker::{KvReport, SamplingParams, SequenceOutput, SwapSettings, TokenLogprobs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

/// Commands waiting for the supervisor task. It takes microseconds for each; a caller waits when this is full.
pub(super) const COMMANDS_MAX: usize = 256;

/// No configuration allows more requests at the same time. Channels that have room for each are made for so many, since they
/// can not grow later and only what is in them takes memory.
pub(super) const REQUESTS_CEILING: usize = 1 << 21;

/// Use of the fleet. Cheap to clone.
#[derive(Debug, Clone)]
pub struct FleetHandle {
    pub(super) commands: mpsc::Sender<Command>,
    /// Every living [`Generation`] holds a permit here, so that its drop can always be told.
    pub(super) dropped: mpsc::Sender<RequestId>,
    /// Permits given out at the same time; may change at any moment.
    pub(super) requests_max: Arc<AtomicUsize>,
    pub(super) status: watch::Receiver<Arc<FleetStatus>>,
    pub(super) routing: watch::Receiver<Arc<Routing>>,
    pub(super) next_request: Arc<AtomicU64>,
}

/// One request for the engine.
#[derive(Debug, Clone)]
pub struct Submission {
    /// Never empty.
    pub prompt: Arc<Vec<u32>>,
    /// Answers wanted, at least 1.
    pub choices: u16,
    pub sampling: SamplingParams,
    /// Lower is earlier.
    pub priority: i32,
    /// Requests with different salts never share cached prefixes.
    pub cache_salt: u64,
    /// Whose it is; owners get equal shares while they compete.
    pub owner: u64,
}

/// What a request brings, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationEvent {
    /// It left the waiting queue for the first time.
    Started {
        cached_tokens: u32,
    },
    /// A step computed a part of its prompt and brought no token of it.
    Computed(Arc<Step>),
    /// A token, and the step that brought it.
    Output(SequenceOutput, Arc<Step>),
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// It ends here, unfinished.
    Failed(GenerationFailure),
}

/// Why a request ended unfinished.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct GenerationFailure {
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitRefusal {
    #[error("{limit} requests are in flight, which is the limit")]
    TooManyRequests { limit: usize },
    #[error("the server is shutting down")]
    Draining,
    #[error("no worker can take the request: {reason}")]
    Unavailable { reason: String },
    /// The deployment was replaced between choosing and submitting: choose again.
    #[error("the deployment has been replaced")]
    Retired,
    #[error("{0}")]
    Invalid(String),
}

impl SubmitRefusal {
    /// Whether the client may try again, and after how long.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { .. } => Some(Duration::from_secs(1)),
            Self::Draining | Self::Unavailable { .. } => Some(Duration::from_secs(5)),
            Self::Retired => Some(Duration::ZERO),
            Self::Invalid(_) => None,
        }
    }
}

/// What became of the running requests when the fleet was drained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that were running and came to their end.
    pub finished: u64,
    /// Requests that were failed at the deadline.
    pub failed: u64,
}

/// What comes after a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainEnd {
    /// Whatever an operator decides; [`FleetHandle::resume`] takes it back.
    Open,
    /// The end of the daemon.
    Leave,
}

/// The supervisor task no longer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the supervisor has stopped")]
pub struct SupervisorGone;

#[derive(Debug)]
pub(super) enum Command {
    Submit(Box<NewRequest>),
    /// Take no new requests; answer when the running ones have ended or the deadline is over.
    Drain {
        deadline: Instant,
        end: DrainEnd,
        reply: oneshot::Sender<DrainReport>,
    },
    /// Take new requests again. False: there is no way back, or nothing to take back.
    Resume {
        reply: oneshot::Sender<bool>,
    },
    /// End all workers now; answer when no process is left.
    Shutdown {
        reply: oneshot::Sender<()>,
    },
    Swap {
        request: Box<SwapRequest>,
        reply: oneshot::Sender<Result<ernie_proto::ids::DeploymentId, RolloutRefusal>>,
    },
    Rollback {
        reason: String,
        reply: oneshot::Sender<Result<ernie_proto::ids::DeploymentId, RolloutRefusal>>,
    },
    RestartWorker {
        worker: WorkerId,
        graceful: bool,
        reply: oneshot::Sender<bool>,
    },
    ResetPrefixCache,
    Configure(Box<super::SupervisorSettings>),
    /// One choice has said enough; the others go on.
    EndChoice {
        request: RequestId,
        choice: u16,
    },
    AskKv {
        reply: oneshot::Sender<Vec<(WorkerId, KvReport)>>,
    },
    SetSwap(SwapSettings),
}

#[derive(Debug)]
pub(super) struct NewRequest {
    pub(super) id: RequestId,
    pub(super) deployment: Arc<Deployment>,
    pub(super) submission: Submission,
    pub(super) events: mpsc::Sender<GenerationEvent>,
    pub(super) reply: oneshot::Sender<Result<(), SubmitRefusal>>,
}

impl FleetHandle {
    /// The status, now and whenever it changes.
    pub fn watch(&self) -> watch::Receiver<Arc<FleetStatus>> {
        self.status.clone()
    }

    pub fn status(&self) -> Arc<FleetStatus> {
        self.status.borrow().clone()
    }

    /// The deployment that new requests go to, if there is one.
    pub fn active(&self) -> Option<Arc<Deployment>> {
        self.routing.borrow().active.clone()
    }

    /// The deployment for a request of `key` (API key or user): the same key gets the same side during a canary.
    pub fn pick(&self, key: Option<&str>) -> Option<Arc<Deployment>> {
        self.routing.borrow().pick(key).cloned()
    }

    /// Like [`FleetHandle::pick`], but waits for a deployment that is coming (a first load, a stop-first switch).
    pub async fn pick_or_wait(&self, key: Option<&str>, patience: Duration) -> Result<Arc<Deployment>, SubmitRefusal> {
        let mut routing = self.routing.clone();
        let decided = async {
            loop {
                {
                    let now = routing.borrow_and_update();
                    if let Some(deployment) = now.pick(key) {
                        return Ok(deployment.clone());
                    }
                    match &now.absent {
                        Absent::Coming => {}
                        Absent::Failed(reason) => return Err(SubmitRefusal::Unavailable { reason: reason.clone() }),
                        Absent::Draining => return Err(SubmitRefusal::Draining),
                    }
                }
                if routing.changed().await.is_err() {
                    return Err(SubmitRefusal::Draining);
                }
            }
        };
        match tokio::time::timeout(patience, decided).await {
            Ok(result) => result,
            Err(_) => Err(SubmitRefusal::Unavailable { reason: "the model is still being loaded".to_string() }),
        }
    }

    /// Hands a request to the fleet. It survives the death of workers; it ends when all its choices have ended, when it
    /// fails, or when the returned [`Generation`] is dropped.
    pub async fn submit(
        &self,
        deployment: &Arc<Deployment>,
        submission: Submission,
    ) -> Result<Generation, SubmitRefusal> {
        if submission.prompt.is_empty() || submission.choices == 0 {
            return Err(SubmitRefusal::Invalid("a request needs at least one prompt token and one choice".to_string()));
        }
        let limit = self.requests_max.load(Ordering::Relaxed);
        let permit = self.dropped.clone().try_reserve_owned().map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => SubmitRefusal::TooManyRequests { limit },
            mpsc::error::TrySendError::Closed(_) => SubmitRefusal::Draining,
        })?;
        // Counted after the permit was taken: of those who come together some may be refused too many, never too few.
        if self.under_way() > limit {
            return Err(SubmitRefusal::TooManyRequests { limit });
        }
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        // Room for everything this request can ever bring: a slow client keeps its own answer in memory and blocks nobody.
        let tokens = submission.sampling.max_tokens as usize * usize::from(submission.choices);
        let (events, receiver) = mpsc::channel(tokens + EVENTS_BESIDES_TOKENS);
        let commands = self.commands.clone();
        let generation = Generation { id, events: receiver, commands, permit: Some(permit) };
        // Declared after `generation`: when this future is dropped the reply closes first, and a command still under way is
        // then ignored.
        let (reply, answer) = oneshot::channel();
        let new = NewRequest { id, deployment: deployment.clone(), submission, events, reply };
        self.commands.send(Command::Submit(Box::new(new))).await.map_err(|_| SubmitRefusal::Draining)?;
        answer.await.unwrap_or(Err(SubmitRefusal::Draining))?;
        Ok(generation)
    }

    /// Permits given out.
    pub(super) fn under_way(&self) -> usize {
        self.dropped.max_capacity() - self.dropped.capacity()
    }

    /// Takes no new requests from now on, lets the running ones end until `patience` is over, then fails the rest. The
    /// workers stay until [`FleetHandle::shutdown`].
    pub async fn drain(&self, patience: Duration, end: DrainEnd) -> DrainReport {
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + patience;
        if self.commands.send(Command::Drain { deadline, end, reply }).await.is_err() {
            return DrainReport::default();
        }
        answer.await.unwrap_or_default()
    }

    /// Takes a drain back. False: the fleet does not drain, or it leaves.
    pub async fn resume(&self) -> Result<bool, SupervisorGone> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Resume { reply }).await.map_err(|_| SupervisorGone)?;
        answer.await.map_err(|_| SupervisorGone)
    }

    /// Ends every worker and the supervisor; returns when no worker process is left. Running requests fail.
    pub async fn shutdown(&self) {
        let (reply, answer) = oneshot::channel();
        if self.commands.send(Command::Shutdown { reply }).await.is_ok() {
            // The supervisor drops the reply when it has ended; both ways nothing is left.
            let _ = answer.await;
        }
    }

    /// Begins a rollout; returns its deployment as soon as it has begun. Progress shows in [`FleetHandle::rollout_status`].
    pub async fn swap(&self, request: SwapRequest) -> Result<ernie_proto::ids::DeploymentId, RolloutRefusal> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Swap { request: Box::new(request), reply })
            .await
            .map_err(|_| RolloutRefusal::Draining)?;
        answer.await.unwrap_or(Err(RolloutRefusal::Draining))
    }

    /// Ends the rollout under way and goes back, or, in steady state, goes back to the previous revision. Returns the
    /// deployment whose rollout ends or begins with it.
    pub async fn rollback(&self, reason: impl Into<String>) -> Result<ernie_proto::ids::DeploymentId, RolloutRefusal> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Rollback { reason: reason.into(), reply })
            .await
            .map_err(|_| RolloutRefusal::Draining)?;
        answer.await.unwrap_or(Err(RolloutRefusal::Draining))
    }

    pub fn rollout_status(&self) -> RolloutStatus {
        self.status.borrow().rollout.clone()
    }

    /// Replaces a worker process: at once (its requests go on elsewhere), or after its running requests have ended. False
    /// if no living worker has this id.
    pub async fn restart_worker(&self, worker: WorkerId, graceful: bool) -> Result<bool, SupervisorGone> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::RestartWorker { worker, graceful, reply }).await.map_err(|_| SupervisorGone)?;
        answer.await.map_err(|_| SupervisorGone)
    }

    /// Other rules from now on.
    pub async fn configure(&self, settings: super::SupervisorSettings) {
        self.requests_max.store(settings.requests_max, Ordering::Relaxed);
        // Fails only when the supervisor is gone, and then nothing is left to be ruled.
        let _ = self.commands.send(Command::Configure(Box::new(settings))).await;
    }

    /// Who holds the KV blocks of the serving workers. `None`: no answer within `patience`, as workers answer between steps.
    pub async fn kv_report(&self, patience: Duration) -> Result<Option<Vec<(WorkerId, KvReport)>>, SupervisorGone> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::AskKv { reply }).await.map_err(|_| SupervisorGone)?;
        Ok(tokio::time::timeout(patience, answer).await.ok().and_then(Result::ok))
    }

    /// Changes what goes to the swap space, in all workers and those that come.
    pub async fn set_swap(&self, settings: SwapSettings) -> Result<(), SupervisorGone> {
        self.commands.send(Command::SetSwap(settings)).await.map_err(|_| SupervisorGone)
    }

    /// Drops every cached prefix of all workers.
    pub async fn reset_prefix_cache(&self) -> Result<(), SupervisorGone> {
        self.commands.send(Command::ResetPrefixCache).await.map_err(|_| SupervisorGone)
    }
}

/// `Started`, `PromptLogprobs`, `Failed`, one to spare, and the steps that computed the prompt.
const EVENTS_BESIDES_TOKENS: usize = 4 + PROMPT_STEPS_MAX as usize;

/// A request under way. Dropping it before its end aborts it: its blocks are free before the worker's next step.
#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    events: mpsc::Receiver<GenerationEvent>,
    commands: mpsc::Sender<Command>,
    /// Taken when the request has ended by itself.
    permit: Option<mpsc::OwnedPermit<RequestId>>,
}

impl Generation {
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends one choice while others go on: what it brings from now on is dropped. Only saves work, so it never waits: a
    /// supervisor with a full queue is not told.
    pub fn end_choice(&self, choice: u16) {
        let _ = self.commands.try_send(Command::EndChoice { request: self.id, choice });
    }

    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        let event = self.events.recv().await;
        if event.is_none() {
            // The supervisor has let go of the request: nothing to abort, and room for another one.
            self.permit = None;
        }
        event
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.events.close();
        if let Some(permit) = self.permit.take() {
            permit.send(self.id);
        }
    }
}
