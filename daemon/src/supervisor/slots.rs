//! Worker slots: one per wanted worker process, from its start over its messages to its end and its successor.
//!
//! A slot stays while its deployment does; the processes in it come and go, each with a fresh [`WorkerId`]. Part of the
//! supervisor task; decisions about time are made in `restart` and `liveness`.

use super::dispatch::Requests;
use super::fleet::REQUESTS_CEILING;
use super::liveness::{self, LivenessSettings, Signs, Verdict};
use super::restart::{self, RestartEffect, RestartEvent, RestartState};
use super::worker::{self, WorkerEvent, WorkerLink};
use super::{FleetEvent, LEAVE_PATIENCE, Supervisor, WorkerFailure, publish::add_counters, unix_now};
use ernie_proto::ids::{DeploymentId, WorkerId};
use ernie_proto::worker::{FromWorker, Hello, LoadProgress, StepReport, StepStats, ToWorker};
use tokio::time::Instant;

pub(super) type SlotKey = (DeploymentId, u32);

/// The submit and the abort of every request there may be, and room for other messages. It is never full.
const OUTBOX_MAX: usize = 2 * REQUESTS_CEILING + 64;

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) restart: RestartState,
    pub(super) live: Option<Live>,
    pub(super) restarts: u64,
    pub(super) last_failure: Option<WorkerFailure>,
    /// Counters of the processes that were here before.
    pub(super) base: StepStats,
}

/// A worker process, from its start until it is reaped.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) id: WorkerId,
    pub(super) pid: Option<u32>,
    link: WorkerLink,
    pub(super) stage: Stage,
    pub(super) started: Instant,
    pub(super) load: Option<LoadProgress>,
    load_moved: Instant,
    ping: Option<(u64, Instant)>,
    pings: u64,
    pub(super) pong: Option<Instant>,
    pub(super) step: Option<Instant>,
    /// When it was given work the last time that it had none.
    work_since: Instant,
    beat: Option<Instant>,
    step_errors: u32,
    pub(super) stats: StepStats,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    Starting,
    Loading,
    Ready,
    /// Ready, but gets no new requests; leaves when it has none.
    Draining,
    /// Is being ended. Whatever it still says is ignored.
    Ending {
        cause: Ending,
        kill_at: Option<Instant>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// It failed, for this reason.
    Lost(String),
    /// It was asked to leave, and the slot wants another.
    Replaced,
    /// It was asked to leave.
    Unwanted,
}

impl Slot {
    fn new() -> Self {
        Self { restart: RestartState::Stopped, live: None, restarts: 0, last_failure: None, base: StepStats::default() }
    }

    pub(super) fn serves(&self) -> bool {
        self.live.as_ref().is_some_and(|live| matches!(live.stage, Stage::Ready | Stage::Draining))
    }

    /// Queues a message. The outbox has room for all there can be; a worker that lets it fill is stalled, and found so.
    pub(super) fn send(&self, message: ToWorker) {
        if let Some(live) = &self.live {
            let _ = live.link.to.try_send(message);
        }
    }

    /// When this slot wants to be looked at.
    pub(super) fn due(&self, now: Instant, requests: &Requests, settings: &LivenessSettings) -> Option<Instant> {
        let Some(live) = &self.live else { return self.restart.due() };
        match &live.stage {
            Stage::Ending { kill_at, .. } => *kill_at,
            stage => {
                let check_in = match liveness::verdict(live.signs(now, requests), settings) {
                    Verdict::Alive { check_in } => check_in,
                    Verdict::Stalled(_) => return Some(now),
                };
                let ping = matches!(stage, Stage::Ready | Stage::Draining).then(|| live.next_ping(settings)).flatten();
                Some((now + check_in).min(ping.unwrap_or(now + check_in)))
            }
        }
    }
}

impl Live {
    pub(super) fn signs(&self, now: Instant, requests: &Requests) -> Signs {
        match self.stage {
            Stage::Starting => Signs::Starting { age: now - self.started },
            Stage::Loading => Signs::Loading { progress_age: now - self.load_moved },
            Stage::Ready | Stage::Draining | Stage::Ending { .. } => Signs::Serving {
                step_age: self.step_age(now, requests),
                ping_age: self.ping.map(|(_, sent)| now - sent),
                beat_age: self.beat.map(|beat| now - beat),
            },
        }
    }

    /// While it has work: since its last step, or since the work came.
    pub(super) fn step_age(&self, now: Instant, requests: &Requests) -> Option<std::time::Duration> {
        let working = requests.of_worker(self.id) > 0;
        working.then(|| now - self.step.map_or(self.work_since, |step| step.max(self.work_since)))
    }

    /// When the next ping goes out; nothing while one is unanswered.
    fn next_ping(&self, settings: &LivenessSettings) -> Option<Instant> {
        match self.ping {
            Some(_) => None,
            None => Some(self.pong.map_or(self.started, |pong| pong) + settings.ping_interval),
        }
    }
}

impl Supervisor {
    /// Wants a process in each slot of the deployment.
    pub(super) fn want_workers(&mut self, id: DeploymentId) {
        let Some(entry) = self.deployments.get(&id) else { return };
        for index in 0..entry.spec.workers.max(1) {
            let key = (id, index);
            self.slots.entry(key).or_insert_with(Slot::new);
            self.restart_slot(key, RestartEvent::Wanted);
        }
    }

    /// Wants no process for the deployment: asks those that are there to leave.
    pub(super) fn unwant_workers(&mut self, id: DeploymentId) {
        let keys: Vec<_> = self.slots.range((id, 0)..=(id, u32::MAX)).map(|(key, _)| *key).collect();
        for key in keys {
            self.restart_slot(key, RestartEvent::Unwanted);
            self.ask_to_leave(key, Ending::Unwanted);
        }
    }

    pub(super) fn ready_workers(&self, id: DeploymentId) -> impl Iterator<Item = WorkerId> + '_ {
        self.slots
            .range((id, 0)..=(id, u32::MAX))
            .filter_map(|(_, slot)| slot.live.as_ref())
            .filter(|live| live.stage == Stage::Ready)
            .map(|live| live.id)
    }

    /// Why nothing can be expected of the deployment's workers soon: all are in a crash loop and none serves.
    pub(super) fn crash_loop_reason(&self, id: DeploymentId) -> Option<String> {
        let mut slots = self.slots.range((id, 0)..=(id, u32::MAX)).map(|(_, slot)| slot).peekable();
        let last = slots.peek()?.last_failure.as_ref().map(|f| f.reason.clone()).unwrap_or_default();
        slots
            .all(|slot| slot.restart.in_crash_loop() && !slot.serves())
            .then(|| format!("its workers are in a crash loop; the last one ended because {last}"))
    }

    pub(super) fn send(&self, worker: WorkerId, message: ToWorker) {
        if let Some(slot) = self.by_worker.get(&worker).and_then(|key| self.slots.get(key)) {
            slot.send(message);
        }
    }

    /// The worker is about to be given a request.
    pub(super) fn work_comes(&mut self, worker: WorkerId) {
        let idle = self.requests.of_worker(worker) <= 1;
        let live = self.by_worker.get(&worker).and_then(|key| self.slots.get_mut(key)).and_then(|s| s.live.as_mut());
        if let (true, Some(live)) = (idle, live) {
            live.work_since = Instant::now();
        }
    }

    /// Replaces a worker: at once, or when its requests have ended.
    pub(super) fn restart_worker(&mut self, worker: WorkerId, graceful: bool) -> bool {
        let Some(key) = self.by_worker.get(&worker).copied() else { return false };
        let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { return false };
        match (&live.stage, graceful) {
            (Stage::Ending { .. }, _) => return false,
            (Stage::Ready, true) => {
                live.stage = Stage::Draining;
                self.leave_if_drained(key);
            }
            (Stage::Draining, true) => {}
            _ => self.ask_to_leave(key, Ending::Replaced),
        }
        self.publish.at_once();
        true
    }

    fn leave_if_drained(&mut self, key: SlotKey) {
        let Some(live) = self.slots.get(&key).and_then(|slot| slot.live.as_ref()) else { return };
        if live.stage == Stage::Draining && self.requests.of_worker(live.id) == 0 {
            self.ask_to_leave(key, Ending::Replaced);
        }
    }

    /// Asks a worker to leave; its requests go on elsewhere. It is killed if it takes too long.
    fn ask_to_leave(&mut self, key: SlotKey, cause: Ending) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let Some(live) = &mut slot.live else { return };
        if let Stage::Ending { cause: known, .. } = &mut live.stage {
            // A worker that was to be replaced, or was lost, is not wanted any more: its end brings no successor.
            if *known == Ending::Replaced {
                *known = cause;
            }
            return;
        }
        live.stage = Stage::Ending { cause, kill_at: Some(Instant::now() + LEAVE_PATIENCE) };
        let worker = live.id;
        slot.send(ToWorker::Shutdown);
        self.orphan(worker, None);
        self.publish.at_once();
    }

    /// The worker is not to be trusted any more: it is killed, its requests go on elsewhere.
    pub(super) fn lose(&mut self, key: SlotKey, reason: String) {
        if let Some(live) = self.slots.get(&key).and_then(|slot| slot.live.as_ref()) {
            live.link.kill.cancel();
        }
        self.lost(key, reason);
    }

    /// The worker is gone, or as good as gone: its requests go on elsewhere.
    fn lost(&mut self, key: SlotKey, reason: String) {
        let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { return };
        if matches!(live.stage, Stage::Ending { .. }) {
            return;
        }
        live.stage = Stage::Ending { cause: Ending::Lost(reason.clone()), kill_at: None };
        let worker = live.id;
        self.orphan(worker, Some(&reason));
        self.publish.at_once();
        self.candidate_lost_worker(key.0, &reason, Instant::now());
    }

    /// Takes a worker's requests from it. With a reason, its end counts against them.
    fn orphan(&mut self, worker: WorkerId, reason: Option<&str>) {
        self.kv_lost(worker);
        let orphaned = self.requests.orphan(worker, reason);
        self.counters.requests_resumed += orphaned.resumed as u64;
        self.counters.requests_poisonous += orphaned.poisonous.len() as u64;
        if orphaned.resumed > 0 {
            self.tell(FleetEvent::RequestsResumed { worker, requests: orphaned.resumed });
        }
        for (request, deaths) in orphaned.poisonous {
            self.tell(FleetEvent::RequestPoisonous { request, deaths });
        }
    }

    pub(super) fn on_worker(&mut self, worker: WorkerId, event: WorkerEvent, now: Instant) {
        let Some(key) = self.by_worker.get(&worker).copied() else { return };
        let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { return };
        match event {
            WorkerEvent::Spawned { pid } => {
                live.pid = Some(pid);
                self.counters.workers_spawned += 1;
                self.tell(FleetEvent::WorkerSpawned { worker, deployment: key.0, slot: key.1, pid });
                self.publish.at_once();
            }
            // Its task sees to the end of the process, after a moment for the process to end by itself.
            WorkerEvent::Lost { reason } => self.lost(key, reason),
            WorkerEvent::Ended { status, stderr } => self.ended(key, status, stderr),
            // A worker that is being ended moves nothing any more, whatever it still says.
            WorkerEvent::Message(_) if matches!(live.stage, Stage::Ending { .. }) => {}
            WorkerEvent::Message(message) => self.on_message(key, message, now),
        }
    }

    fn on_message(&mut self, key: SlotKey, message: FromWorker, now: Instant) {
        let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { return };
        match (message, &live.stage) {
            (FromWorker::Hello(hello), Stage::Starting) => {
                let own = Hello::own();
                if hello != own {
                    let reason = format!("it is another build: {hello:?}, this daemon is {own:?}");
                    return self.lose(key, reason);
                }
                (live.stage, live.load_moved) = (Stage::Loading, now);
                if let Some(entry) = self.deployments.get(&key.0) {
                    let mut load = entry.spec.load.clone();
                    load.model_dir.clone_from(&entry.spec.model_dir);
                    self.slots[&key].send(ToWorker::Load(Box::new(load)));
                }
                self.publish.at_once();
            }
            (FromWorker::LoadProgress(progress), Stage::Loading) => {
                if live.load.as_ref().is_none_or(|l| l.phase != progress.phase || l.bytes_done != progress.bytes_done) {
                    live.load_moved = now;
                }
                live.load = Some(progress);
                self.publish.soon();
            }
            (FromWorker::Loaded(loaded), Stage::Loading) => {
                live.stage = Stage::Ready;
                let (worker, elapsed) = (live.id, now - live.started);
                if let Some(settings) = self.swap {
                    self.send(worker, ToWorker::SetSwap(settings));
                }
                self.tell(FleetEvent::WorkerReady { worker, deployment: key.0, slot: key.1, elapsed });
                self.deployment_loaded(key.0, *loaded);
                self.publish.at_once();
            }
            (FromWorker::Step(report), Stage::Ready | Stage::Draining) => self.on_step(key, *report, now),
            (FromWorker::Pong(n), Stage::Ready | Stage::Draining) => {
                if live.ping.is_some_and(|(sent, _)| sent == n) {
                    (live.ping, live.pong) = (None, Some(now));
                }
            }
            (FromWorker::Beat(_), _) => live.beat = Some(now),
            (FromWorker::Kv(report), Stage::Ready | Stage::Draining) => {
                let worker = live.id;
                self.on_kv(worker, &report);
            }
            (FromWorker::StepFailed(message), Stage::Ready | Stage::Draining) => {
                live.step_errors += 1;
                let (worker, errors) = (live.id, live.step_errors);
                self.tell(FleetEvent::StepFailed { worker, message: message.clone() });
                if errors >= self.settings.step_errors_max {
                    self.lose(key, format!("{errors} steps in a row failed: {message}"));
                }
            }
            (FromWorker::Fatal(fatal), stage) => {
                let loading = *stage == Stage::Loading;
                self.lose(key, format!("{}: {}", fatal.phase, fatal.message));
                // What does not load does not load the next time either, unless it once did.
                let first = self.deployments.get(&key.0).is_some_and(|entry| entry.deployment.is_none());
                if loading && first && self.active == Some(key.0) {
                    self.deployment_failed(key.0, fatal.message);
                }
            }
            (message, stage) => {
                let reason = format!("it broke the protocol: {} while {stage:?}", name(&message));
                self.lose(key, reason);
            }
        }
    }

    fn on_step(&mut self, key: SlotKey, report: StepReport, now: Instant) {
        let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { return };
        for observer in &self.observers {
            observer.step(key.1, live.id, &report.stats);
        }
        let mut stats = report.stats.clone();
        if stats.expert_tokens.is_empty() {
            stats.expert_tokens = std::mem::take(&mut live.stats.expert_tokens);
        }
        live.stats = stats;
        live.step_errors = 0;
        live.step = Some(now);
        let worker = live.id;
        let applied = self.requests.apply(worker, report, now);
        self.counters.requests_aborted += applied.abandoned.len() as u64;
        for id in applied.abandoned {
            self.send(worker, ToWorker::Abort(id));
        }
        if let Some(drain) = &mut self.drain {
            drain.finished += applied.ended as u64;
        }
        self.publish.soon();
        match applied.violation {
            Some(violation) => self.lose(key, violation),
            None => self.leave_if_drained(key),
        }
    }

    /// The process is gone.
    fn ended(&mut self, key: SlotKey, status: String, stderr: Vec<String>) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let Some(live) = slot.live.take() else { return };
        self.by_worker.remove(&live.id);
        add_counters(&mut slot.base, &live.stats);
        let (worker, deployment, index) = (live.id, key.0, key.1);
        let cause = match live.stage {
            Stage::Ending { cause, .. } => cause,
            _ => Ending::Lost("it ended".to_string()),
        };
        let event = match cause {
            Ending::Lost(reason) => {
                let reason = format!("{reason} ({status})");
                let failure = WorkerFailure { reason, stderr, at: unix_now() };
                slot.last_failure = Some(failure.clone());
                slot.restarts += 1;
                self.counters.workers_lost += 1;
                self.tell(FleetEvent::WorkerLost { worker, deployment, slot: index, failure });
                RestartEvent::Died
            }
            Ending::Replaced => {
                slot.restarts += 1;
                self.tell(FleetEvent::WorkerStopped { worker, deployment, slot: index });
                RestartEvent::Replaced
            }
            Ending::Unwanted => {
                self.tell(FleetEvent::WorkerStopped { worker, deployment, slot: index });
                RestartEvent::Tick
            }
        };
        self.orphan(worker, Some(&status));
        self.restart_slot(key, event);
        self.publish.at_once();
    }

    /// Puts an event to the slot's restart state and carries out what follows.
    fn restart_slot(&mut self, key: SlotKey, event: RestartEvent) {
        let now = Instant::now();
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let state = std::mem::replace(&mut slot.restart, RestartState::Stopped);
        let (state, effects) = restart::on(state, event, now, &self.settings.restart);
        slot.restart = state;
        let (deployment, index) = key;
        if let (RestartEvent::Died, Some(due)) = (event, slot.restart.due()) {
            let wait = due.saturating_duration_since(now);
            self.tell(FleetEvent::RestartScheduled { deployment, slot: index, wait });
        }
        for effect in effects {
            match effect {
                RestartEffect::Spawn => self.spawn(key, now),
                RestartEffect::EnteredCrashLoop { deaths } => {
                    self.tell(FleetEvent::CrashLoopEntered { deployment, slot: index, deaths });
                    self.crash_looping(deployment);
                }
                RestartEffect::LeftCrashLoop => self.tell(FleetEvent::CrashLoopLeft { deployment, slot: index }),
            }
        }
    }

    /// A slot of the deployment went into a crash loop. When no other can serve, its requests are not made to wait.
    fn crash_looping(&mut self, deployment: DeploymentId) {
        let Some(reason) = self.crash_loop_reason(deployment) else { return };
        if self.deployments.get(&deployment).is_some_and(|entry| entry.deployment.is_none()) {
            self.deployment_failed(deployment, reason);
        } else {
            self.fail_held(deployment, &reason);
        }
    }

    fn spawn(&mut self, key: SlotKey, now: Instant) {
        // Wanted again while its process is on the way out: the successor starts when that is gone.
        if let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) {
            if let Stage::Ending { cause, .. } = &mut live.stage {
                *cause = Ending::Replaced;
            }
            return;
        }
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        let link = worker::start(self.spawner.clone(), id, OUTBOX_MAX, self.worker_events.clone());
        // The first words, before anything is known of the other side.
        let _ = link.to.try_send(ToWorker::Hello(Hello::own()));
        let live = Live {
            id,
            pid: None,
            link,
            stage: Stage::Starting,
            started: now,
            load: None,
            load_moved: now,
            ping: None,
            pings: 0,
            pong: None,
            step: None,
            work_since: now,
            beat: None,
            step_errors: 0,
            stats: StepStats::default(),
        };
        self.by_worker.insert(id, key);
        if let Some(slot) = self.slots.get_mut(&key) {
            slot.live = Some(live);
        }
        self.publish.at_once();
    }

    /// Looks after every slot: restarts that are due, pings, stalls, leavers that do not leave.
    pub(super) fn watch_slots(&mut self, now: Instant) {
        let keys: Vec<_> = self.slots.keys().copied().collect();
        for key in keys {
            self.restart_slot(key, RestartEvent::Tick);
            let Some(live) = self.slots.get_mut(&key).and_then(|slot| slot.live.as_mut()) else { continue };
            if let Stage::Ending { kill_at, .. } = &live.stage {
                if kill_at.is_some_and(|at| at <= now) {
                    live.link.kill.cancel();
                    live.stage = match std::mem::replace(&mut live.stage, Stage::Starting) {
                        Stage::Ending { cause, .. } => Stage::Ending { cause, kill_at: None },
                        other => other,
                    };
                }
                continue;
            }
            if let Verdict::Stalled(stall) = liveness::verdict(live.signs(now, &self.requests), &self.settings.liveness)
            {
                self.counters.workers_stalled += 1;
                let doing = match &live.load {
                    Some(load) if live.stage == Stage::Loading => {
                        format!(" (in phase {:?}, {} of {} bytes)", load.phase, load.bytes_done, load.bytes_total)
                    }
                    _ => String::new(),
                };
                self.lose(key, format!("it stalled: it {stall}{doing}"));
                continue;
            }
            let pings = matches!(live.stage, Stage::Ready | Stage::Draining);
            if pings && live.next_ping(&self.settings.liveness).is_some_and(|at| at <= now) {
                live.pings += 1;
                live.ping = Some((live.pings, now));
                let ping = ToWorker::Ping(live.pings);
                self.slots[&key].send(ping);
            }
        }
    }
}

fn name(message: &FromWorker) -> &'static str {
    match message {
        FromWorker::Hello(_) => "Hello",
        FromWorker::LoadProgress(_) => "LoadProgress",
        FromWorker::Loaded(_) => "Loaded",
        FromWorker::Step(_) => "Step",
        FromWorker::Pong(_) => "Pong",
        FromWorker::Fatal(_) => "Fatal",
        FromWorker::StepFailed(_) => "StepFailed",
        FromWorker::Beat(_) => "Beat",
        FromWorker::Kv(_) => "Kv",
    }
}
