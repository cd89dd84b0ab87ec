//! The supervisor: one task that owns workers, deployments, requests under way and the rollout.
//!
//! Everything that can happen is one [`SupervisorEvent`]; the task takes them one by one and never waits for anything else:
//! what takes time (processes, hashing) lives in tasks of its own that report back. What decides is pure and lives beside
//! (`restart`, `liveness`, `rollout`); this file and its two helpers (`slots`, `publish`) carry the decisions out.

mod deployment;
mod dispatch;
mod fleet;
#[cfg(test)]
mod harness;
mod kv;
mod liveness;
mod observe;
mod probe;
mod publish;
mod record;
mod restart;
mod rollout;
mod rollouts;
#[cfg(test)]
pub(crate) mod scripted;
mod slots;
mod soak;
mod status;
mod stderr;
mod stored;
#[cfg(test)]
mod swap_tests;
#[cfg(test)]
mod tests;
mod worker;

pub use deployment::{Absent, Deployment, DeploymentSpec, Routing};
pub use dispatch::PoisonSettings;
pub use fleet::{
    DrainEnd, DrainReport, FleetHandle, Generation, GenerationEvent, GenerationFailure, Submission, SubmitRefusal,
    SupervisorGone,
};
pub use liveness::LivenessSettings;
pub use observe::{FleetEvent, FleetObserver};
pub use probe::Probe;
pub use restart::RestartSettings;
pub use rollout::{
    CutOver, RolloutOutcome, RolloutPhase, RolloutRefusal, RolloutResult, RolloutStatus, RolloutTimeouts, Sides,
    Strategy, SwapRequest,
};
pub use soak::SoakRules;
pub use status::{
    DeploymentRole, DeploymentStatus, FleetCounters, FleetState, FleetStatus, WorkerFailure, WorkerState, WorkerStatus,
};
pub use stored::{OpenModel, OpenedModel, StoredModels};
pub use worker::{ReexecWorker, SpawnWorker, SpawnedWorker, WORKER_FD, WorkerPipe, WorkerProcess};

use crate::model_store::{Configured, Links, Served};
use dispatch::Requests;
use ernie_proto::ids::{DeploymentId, RequestId, WorkerId};
use ernie_proto::worker::{Loaded, StepStats, SwapSettings, ToWorker};
use fleet::{COMMANDS_MAX, Command, NewRequest, REQUESTS_CEILING};
use publish::Rates;
use rollouts::{Report, Rollouts};
use slots::{Slot, SlotKey, Stage};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use worker::WorkerEvent;

/// Worker messages that wait for the supervisor; a reader waits when this is full, and its worker after it.
const WORKER_EVENTS_MAX: usize = 1024;

/// Worker messages taken in one turn before anything else is looked at.
const WORKER_EVENTS_PER_TURN: usize = 64;

/// How long a worker may take to leave when it is asked to.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);

/// Reports of tasks that work for a rollout; there are a few per rollout.
const REPORTS_MAX: usize = 16;

/// How the fleet is run.
#[derive(Debug, Clone, PartialEq)]
pub struct SupervisorSettings {
    /// Requests under way at the same time, queued ones included; more are refused.
    pub requests_max: usize,
    pub liveness: LivenessSettings,
    pub restart: RestartSettings,
    pub poison: PoisonSettings,
    /// Steps in a row that may fail before the worker is replaced.
    pub step_errors_max: u32,
    pub rollout: RolloutTimeouts,
    pub soak: SoakRules,
    /// A candidate that takes this many times as long per token as the serving deployment does not pass its probes.
    pub probe_slowdown_max: f64,
    /// What all workers may take together, for the decision whether two models fit. `None`: they are taken to fit.
    pub memory_limit: Option<u64>,
}

impl Default for SupervisorSettings {
    fn default() -> Self {
        Self {
            requests_max: 4096,
            liveness: LivenessSettings::default(),
            restart: RestartSettings::default(),
            poison: PoisonSettings::default(),
            step_errors_max: 3,
            rollout: RolloutTimeouts::default(),
            soak: SoakRules::default(),
            probe_slowdown_max: 3.0,
            memory_limit: None,
        }
    }
}

/// Where models come from, and where it is written down which one serves.
#[derive(Clone)]
pub struct ModelSource {
    pub models: Arc<dyn OpenModel>,
    /// The record that a restart follows, and the model that the configuration names. `None`: nothing is written down.
    pub links: Option<(Links, Configured)>,
    /// What a rollback in steady state goes back to, from an earlier life of the daemon.
    pub previous: Option<Served>,
}

impl Default for ModelSource {
    fn default() -> Self {
        Self { models: Arc::new(StoredModels), links: None, previous: None }
    }
}

impl std::fmt::Debug for ModelSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelSource")
            .field("links", &self.links)
            .field("previous", &self.previous)
            .finish_non_exhaustive()
    }
}

/// [`start_with`] with models from disk and no links.
pub fn start(
    settings: SupervisorSettings,
    spawner: Arc<dyn SpawnWorker>,
    observers: Vec<Arc<dyn FleetObserver>>,
    first: DeploymentSpec,
) -> FleetHandle {
    start_with(settings, spawner, observers, first, ModelSource::default())
}

/// Starts the supervisor and the first deployment's workers; must be called inside a runtime. It ends after
/// [`FleetHandle::shutdown`], or when every handle is dropped.
pub fn start_with(
    settings: SupervisorSettings,
    spawner: Arc<dyn SpawnWorker>,
    observers: Vec<Arc<dyn FleetObserver>>,
    first: DeploymentSpec,
    source: ModelSource,
) -> FleetHandle {
    let (commands, commands_in) = mpsc::channel(COMMANDS_MAX);
    let (dropped, dropped_in) = mpsc::channel(REQUESTS_CEILING);
    let requests_max = Arc::new(AtomicUsize::new(settings.requests_max));
    let (worker_events, worker_events_in) = mpsc::channel(WORKER_EVENTS_MAX);
    let (status_out, status) = watch::channel(Arc::new(FleetStatus::starting()));
    let (routing_out, routing) = watch::channel(Arc::new(Routing::default()));
    let (reports, reports_in) = mpsc::channel(REPORTS_MAX);
    let next_request = Arc::new(AtomicU64::new(1));
    let now = Instant::now();
    let mut supervisor = Supervisor {
        models: source.models,
        links: source.links,
        rollouts: Rollouts::new(source.previous),
        canary: None,
        reports,
        reports_in,
        own_commands: commands.downgrade(),
        own_dropped: dropped.downgrade(),
        requests_max: requests_max.clone(),
        next_request: next_request.clone(),
        requests: Requests::new(settings.poison.clone()),
        settings,
        spawner,
        observers,
        commands: commands_in,
        dropped: dropped_in,
        worker_events,
        worker_events_in,
        status: status_out,
        routing: routing_out,
        deployments: BTreeMap::new(),
        slots: BTreeMap::new(),
        by_worker: HashMap::new(),
        active: None,
        next_deployment: 1,
        next_worker: 1,
        counters: FleetCounters::default(),
        kv_asks: Vec::new(),
        swap: None,
        base: StepStats::default(),
        rates: Rates::default(),
        drain: None,
        leaving: None,
        publish: publish::Schedule::new(now),
    };
    let id = supervisor.add_deployment(first, DeploymentRole::Active);
    supervisor.active = Some(id);
    supervisor.want_workers(id);
    supervisor.publish_routing();
    supervisor.publish_now(now);
    tokio::spawn(supervisor.run());
    FleetHandle { commands, dropped, requests_max, status, routing, next_request }
}

/// Everything the supervisor can learn.
#[derive(Debug)]
enum SupervisorEvent {
    Command(Command),
    /// A client let go of its request.
    Dropped(RequestId),
    Worker(WorkerId, WorkerEvent),
    /// A task that works for a rollout has come to an end.
    Rollout(DeploymentId, Report),
    /// A deadline has come, or it is time to publish.
    Tick,
    /// Nobody can command any more.
    HandlesGone,
}

struct Supervisor {
    models: Arc<dyn OpenModel>,
    links: Option<(Links, Configured)>,
    rollouts: Rollouts,
    /// A candidate that takes a share of the requests, in parts per 10 000.
    canary: Option<(DeploymentId, u32)>,
    reports: mpsc::Sender<(DeploymentId, Report)>,
    reports_in: mpsc::Receiver<(DeploymentId, Report)>,
    /// For probes, which ask as clients do. Weak: the supervisor does not keep itself alive.
    own_commands: mpsc::WeakSender<Command>,
    own_dropped: mpsc::WeakSender<RequestId>,
    requests_max: Arc<AtomicUsize>,
    next_request: Arc<AtomicU64>,
    settings: SupervisorSettings,
    spawner: Arc<dyn SpawnWorker>,
    observers: Vec<Arc<dyn FleetObserver>>,
    commands: mpsc::Receiver<Command>,
    dropped: mpsc::Receiver<RequestId>,
    worker_events: mpsc::Sender<(WorkerId, WorkerEvent)>,
    worker_events_in: mpsc::Receiver<(WorkerId, WorkerEvent)>,
    status: watch::Sender<Arc<FleetStatus>>,
    routing: watch::Sender<Arc<Routing>>,
    deployments: BTreeMap<DeploymentId, DeploymentEntry>,
    slots: BTreeMap<SlotKey, Slot>,
    by_worker: HashMap<WorkerId, SlotKey>,
    requests: Requests,
    active: Option<DeploymentId>,
    next_deployment: u64,
    next_worker: u64,
    counters: FleetCounters,
    kv_asks: Vec<kv::KvAsk>,
    /// What an operator has set since the start.
    swap: Option<SwapSettings>,
    /// Counters of slots that are no more.
    base: StepStats,
    rates: Rates,
    drain: Option<Drain>,
    /// Set by a shutdown: who waits for the end, and when patience with the workers ends.
    leaving: Option<Leaving>,
    publish: publish::Schedule,
}

struct DeploymentEntry {
    spec: DeploymentSpec,
    role: DeploymentRole,
    /// Present once a worker has loaded it.
    deployment: Option<Arc<Deployment>>,
    /// It will not be tried again.
    failed: Option<String>,
    /// Set when it takes no new requests: from then on it leaves as soon as it has none.
    leaves_at: Option<Instant>,
    /// Its workers have been asked to leave.
    left: bool,
}

struct Drain {
    deadline: Instant,
    end: DrainEnd,
    replies: Vec<oneshot::Sender<DrainReport>>,
    finished: u64,
}

#[derive(Default)]
struct Leaving {
    replies: Vec<oneshot::Sender<()>>,
}

impl Supervisor {
    async fn run(mut self) {
        loop {
            self.publish_if_due(Instant::now());
            let wake = self.next_wake(Instant::now());
            let event = tokio::select! {
                command = self.commands.recv(), if self.leaving.is_none() || !self.commands.is_closed() => {
                    command.map_or(SupervisorEvent::HandlesGone, SupervisorEvent::Command)
                }
                Some(id) = self.dropped.recv() => SupervisorEvent::Dropped(id),
                Some((worker, event)) = self.worker_events_in.recv() => SupervisorEvent::Worker(worker, event),
                Some(report) = self.reports_in.recv() => report.into(),
                () = tokio::time::sleep_until(wake) => SupervisorEvent::Tick,
            };
            self.on(event);
            for _ in 0..WORKER_EVENTS_PER_TURN {
                let Ok((worker, event)) = self.worker_events_in.try_recv() else { break };
                self.on(SupervisorEvent::Worker(worker, event));
            }
            self.settle_rollout(Instant::now());
            self.give_work();
            self.end_drain_if_over(Instant::now());
            if self.leaving.is_some() && self.slots.values().all(|slot| slot.live.is_none()) {
                break;
            }
        }
        self.publish_now(Instant::now());
        for reply in self.leaving.take().unwrap_or_default().replies {
            // The asker may have given up waiting.
            let _ = reply.send(());
        }
    }

    fn on(&mut self, event: SupervisorEvent) {
        let now = Instant::now();
        match event {
            SupervisorEvent::Command(command) => self.on_command(command, now),
            SupervisorEvent::Dropped(id) => self.abandon(id),
            SupervisorEvent::Worker(worker, event) => self.on_worker(worker, event, now),
            SupervisorEvent::Rollout(of, report) => self.on_report(of, report, now),
            SupervisorEvent::Tick => self.on_tick(now),
            SupervisorEvent::HandlesGone => self.leave(None),
        }
    }

    fn on_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Submit(new) => self.submit(*new, now),
            Command::Drain { deadline, end, reply } => self.begin_drain(deadline, end, reply, now),
            Command::Resume { reply } => {
                // The asker may have gone; what it asked for is done.
                let _ = reply.send(self.resume());
            }
            Command::Shutdown { reply } => self.leave(Some(reply)),
            Command::Swap { request, reply } => {
                // The asker may have gone; the rollout goes on, and shows in the status.
                let _ = reply.send(self.swap(*request, now));
            }
            Command::Rollback { reason, reply } => {
                let _ = reply.send(self.rollback(reason, now));
            }
            Command::RestartWorker { worker, graceful, reply } => {
                // The asker may have gone; the worker is restarted all the same.
                let _ = reply.send(self.restart_worker(worker, graceful));
            }
            Command::Configure(settings) => {
                self.settings = *settings;
                self.publish.at_once();
            }
            Command::ResetPrefixCache => {
                for slot in self.slots.values().filter(|slot| slot.serves()) {
                    slot.send(ToWorker::ResetPrefixCache);
                }
            }
            Command::AskKv { reply } => self.ask_kv(reply),
            Command::SetSwap(settings) => self.set_swap(settings),
            Command::EndChoice { request, choice } => {
                if let Some((worker, last)) = self.requests.end_choice(request, choice) {
                    let message = if last { ToWorker::Abort(request) } else { ToWorker::EndChoice(request, choice) };
                    self.send(worker, message);
                }
            }
        }
    }

    fn submit(&mut self, mut new: NewRequest, now: Instant) {
        let (reply, _) = oneshot::channel();
        let reply = std::mem::replace(&mut new.reply, reply);
        if reply.is_closed() {
            return;
        }
        if let Err(refusal) = self.admits(new.deployment.id) {
            let _ = reply.send(Err(refusal));
            return;
        }
        let id = new.id;
        self.requests.insert(new, now);
        if reply.send(Ok(())).is_err() {
            self.abandon(id);
        }
    }

    fn admits(&self, deployment: DeploymentId) -> Result<(), SubmitRefusal> {
        if self.drain.is_some() || self.leaving.is_some() {
            return Err(SubmitRefusal::Draining);
        }
        let entry = self.deployments.get(&deployment).ok_or(SubmitRefusal::Retired)?;
        if entry.left || entry.role == DeploymentRole::Parked {
            return Err(SubmitRefusal::Retired);
        }
        if let Some(reason) = &entry.failed {
            return Err(SubmitRefusal::Unavailable { reason: reason.clone() });
        }
        match self.crash_loop_reason(deployment) {
            Some(reason) => Err(SubmitRefusal::Unavailable { reason }),
            None => Ok(()),
        }
    }

    /// The client of a request is gone.
    fn abandon(&mut self, id: RequestId) {
        let Some(gone) = self.requests.abandon(id) else { return };
        self.counters.requests_aborted += 1;
        if let Some(worker) = gone.worker {
            self.send(worker, ToWorker::Abort(id));
        }
        self.publish.soon();
    }

    /// Hands held requests to workers that can take them.
    fn give_work(&mut self) {
        if self.requests.held() == 0 {
            return;
        }
        let deployments: Vec<_> = self.deployments.keys().copied().collect();
        for deployment in deployments {
            let ready: Vec<_> = self.ready_workers(deployment).collect();
            for (worker, submit) in self.requests.assign(deployment, &ready) {
                self.work_comes(worker);
                self.send(worker, ToWorker::Submit(Box::new(submit)));
            }
        }
    }

    fn add_deployment(&mut self, spec: DeploymentSpec, role: DeploymentRole) -> DeploymentId {
        let id = DeploymentId(self.next_deployment);
        self.next_deployment += 1;
        self.deployments.insert(id, DeploymentEntry::new(spec, role));
        id
    }

    /// A worker of the deployment has loaded its model.
    fn deployment_loaded(&mut self, id: DeploymentId, loaded: Loaded) {
        let Some(entry) = self.deployments.get_mut(&id) else { return };
        if entry.deployment.is_some() {
            return;
        }
        entry.deployment = Some(Arc::new(Deployment {
            id,
            served_names: entry.spec.served_names.clone(),
            revision: entry.spec.revision.clone(),
            model_dir: entry.spec.model_dir.clone(),
            text: entry.spec.text.clone(),
            loaded,
            created: unix_now(),
        }));
        let revision = entry.spec.revision.clone();
        if self.active == Some(id) {
            self.tell(FleetEvent::DeploymentActivated { deployment: id, revision, replaces: None });
            self.publish_routing();
        }
    }

    /// The deployment can not be loaded, and trying again would not help.
    fn deployment_failed(&mut self, id: DeploymentId, reason: String) {
        if !self.deployments.contains_key(&id) {
            return;
        }
        self.unwant_workers(id);
        if self.fall_back(id) {
            self.tell(FleetEvent::DeploymentFailed { deployment: id, reason });
            return;
        }
        if let Some(entry) = self.deployments.get_mut(&id) {
            entry.failed = Some(reason.clone());
        }
        self.fail_held(id, &reason);
        self.tell(FleetEvent::DeploymentFailed { deployment: id, reason });
        self.publish_routing();
        self.publish.at_once();
    }

    /// Fails the deployment's requests that have no worker.
    fn fail_held(&mut self, id: DeploymentId, reason: &str) {
        let failure = GenerationFailure { message: format!("no worker can go on with it: {reason}"), retryable: true };
        self.requests.fail_all(Some(id), true, &failure);
    }

    fn publish_routing(&self) {
        let entry = self.active.and_then(|id| self.deployments.get(&id));
        let closing = self.drain.is_some() || self.leaving.is_some();
        let routing = match entry {
            _ if closing => Routing { absent: Absent::Draining, ..Routing::default() },
            Some(DeploymentEntry { failed: Some(reason), .. }) => {
                Routing { absent: Absent::Failed(reason.clone()), ..Routing::default() }
            }
            Some(entry) => {
                let canary =
                    self.canary.and_then(|(id, share)| Some((self.deployments.get(&id)?.deployment.clone()?, share)));
                Routing { active: entry.deployment.clone(), canary, absent: Absent::Coming }
            }
            None => Routing::default(),
        };
        self.routing.send_replace(Arc::new(routing));
    }

    fn begin_drain(&mut self, deadline: Instant, end: DrainEnd, reply: oneshot::Sender<DrainReport>, now: Instant) {
        match &mut self.drain {
            Some(drain) => {
                drain.deadline = drain.deadline.min(deadline);
                if end == DrainEnd::Leave {
                    drain.end = end;
                }
                drain.replies.push(reply);
            }
            None => {
                self.drain = Some(Drain { deadline, end, replies: vec![reply], finished: 0 });
                let patience = deadline.saturating_duration_since(now);
                self.tell(FleetEvent::Draining { requests: self.requests.len(), patience });
            }
        }
        self.publish_routing();
        self.publish.at_once();
    }

    fn resume(&mut self) -> bool {
        let open = self.leaving.is_none() && self.drain.as_ref().is_some_and(|drain| drain.end == DrainEnd::Open);
        let Some(drain) = self.drain.take_if(|_| open) else { return false };
        for reply in drain.replies {
            let _ = reply.send(DrainReport { finished: drain.finished, failed: 0 });
        }
        self.tell(FleetEvent::Resumed);
        self.publish_routing();
        self.publish.at_once();
        true
    }

    fn end_drain_if_over(&mut self, now: Instant) {
        let Some(drain) = &mut self.drain else { return };
        if drain.replies.is_empty() || (self.requests.len() > 0 && now < drain.deadline) {
            return;
        }
        let (replies, finished) = (std::mem::take(&mut drain.replies), drain.finished);
        let failed = self.fail_everything("the server is shutting down");
        let report = DrainReport { finished, failed };
        self.tell(FleetEvent::Drained { finished, failed });
        for reply in replies {
            let _ = reply.send(report);
        }
        self.publish.at_once();
    }

    fn fail_everything(&mut self, message: &str) -> u64 {
        let failure = GenerationFailure { message: message.to_string(), retryable: true };
        let failed = self.requests.fail_all(None, false, &failure);
        for (id, worker) in &failed {
            if let Some(worker) = worker {
                self.send(*worker, ToWorker::Abort(*id));
            }
        }
        failed.len() as u64
    }

    /// Ends everything. The loop ends when the last process is gone.
    fn leave(&mut self, reply: Option<oneshot::Sender<()>>) {
        self.leaving.get_or_insert_default().replies.extend(reply);
        self.fail_everything("the server is shutting down");
        let deployments: Vec<_> = self.deployments.keys().copied().collect();
        for id in deployments {
            self.unwant_workers(id);
        }
        self.publish_routing();
        self.publish.at_once();
    }

    fn on_tick(&mut self, now: Instant) {
        for id in self.requests.deserted() {
            self.abandon(id);
        }
        self.watch_slots(now);
    }

    /// When something is due, if nothing happens before.
    fn next_wake(&self, now: Instant) -> Instant {
        let drain = self.drain.as_ref().filter(|drain| !drain.replies.is_empty()).map(|drain| drain.deadline);
        let slots = self.slots.values().filter_map(|slot| slot.due(now, &self.requests, &self.settings.liveness));
        let rollout = self.rollouts.due();
        let leaving = self.deployments.values().filter(|entry| !entry.left).filter_map(|entry| entry.leaves_at);
        let leaving = leaving.filter(|at| *at > now);
        slots.chain(drain).chain(rollout).chain(leaving).chain([self.publish.due()]).min().unwrap_or(now)
    }

    fn tell(&self, event: FleetEvent) {
        observe::log(&event);
        for observer in &self.observers {
            observer.on(&event);
        }
    }
}

/// Unix time in seconds, for people; nothing is decided by it.
fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
