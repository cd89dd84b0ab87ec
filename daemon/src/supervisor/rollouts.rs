//! Carries out what `rollout` decides: verifies, loads, probes, routes, restores, and tells how it went.
//!
//! Part of the supervisor task. What takes time runs beside it and reports back with the candidate's id.

mod leave;
mod settle;

use super::dispatch::Figures;
use super::fleet::FleetHandle;
use super::probe;
use super::rollout::{
    self, Attempt, CutOver, Refused, Rollout, RolloutEffect, RolloutEvent, RolloutOutcome, RolloutRefusal,
    RolloutResult, RolloutStatus, Sides, Strategy, SwapRequest,
};
use super::soak::Observed;
use super::stored::OpenedModel;
use super::{DeploymentEntry, DeploymentRole, DeploymentSpec, FleetEvent, Supervisor, SupervisorEvent, unix_now};
use crate::model_store::{Placement, Served, Serving, Space, place};
use ernie_proto::ids::DeploymentId;
use ernie_proto::worker::Quantization;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long a deployment that takes no new requests stays for those who chose it just before.
const RETIRE_GRACE: Duration = Duration::from_secs(1);

/// The same when its memory is waited for.
const CLEAR_GRACE: Duration = Duration::from_millis(50);

/// Between two looks at a candidate that is observed.
const SOAK_INTERVAL: Duration = Duration::from_secs(1);

/// Least KV memory of a candidate, as a part of what the serving deployment has.
const KV_LEAST_PART: u64 = 8;

/// What a task that works for a rollout reports.
#[derive(Debug)]
pub(super) enum Report {
    Opened(Result<Box<OpenedModel>, String>),
    /// A line about the speed, or why not.
    Probed(Result<String, String>),
    Committed(Result<(), String>),
    /// The revision before the one that does not load after a start.
    FellBack(Result<(Box<OpenedModel>, Vec<String>), String>),
}

/// Everything about rollouts that the supervisor keeps.
pub(super) struct Rollouts {
    pub(super) state: Rollout,
    attempt: Option<Progress>,
    /// The revision that a rollback in steady state goes back to.
    pub(super) previous: Option<Served>,
    last: Option<RolloutOutcome>,
    /// Completed, but not yet on the disk for a restart to find; nobody is told before.
    uncommitted: Option<RolloutOutcome>,
    /// To be written when the commit under way has ended: commits never overtake each other.
    pub(super) next_commit: Option<(DeploymentId, Serving)>,
    pub(super) committing: bool,
}

/// What is known of the attempt under way besides its state.
struct Progress {
    request: SwapRequest,
    began: Instant,
    revision: String,
    opened: Option<Box<OpenedModel>>,
    cut_over: Option<CutOver>,
    /// Of both deployments at the cut-over: what came before does not count against the candidate.
    old_then: Figures,
    new_then: Observed,
    /// Both deployments at the cut-over.
    sides: Option<(DeploymentId, DeploymentId)>,
    soak_due: Instant,
}

impl Rollouts {
    pub(super) fn new(previous: Option<Served>) -> Self {
        Self {
            state: Rollout::Steady,
            attempt: None,
            previous,
            last: None,
            uncommitted: None,
            next_commit: None,
            committing: false,
        }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let deadline = self.state.attempt()?.deadline;
        let soak = self.attempt.as_ref().filter(|_| matches!(self.state, Rollout::Soaking(_))).map(|a| a.soak_due);
        Some(soak.map_or(deadline, |soak| soak.min(deadline)))
    }

    pub(super) fn status(&self, now: Instant) -> RolloutStatus {
        let attempt = self.state.attempt();
        RolloutStatus {
            phase: self.state.phase(),
            candidate: attempt.map(|attempt| attempt.candidate),
            replaces: attempt.map(|attempt| attempt.replaces),
            strategy: attempt.and_then(|attempt| attempt.beside).map(strategy),
            canary: attempt.and_then(|attempt| attempt.canary),
            age: self.attempt.as_ref().filter(|_| attempt.is_some()).map(|progress| now - progress.began),
            phase_left: attempt.map(|attempt| attempt.deadline.saturating_duration_since(now)),
            previous: self.previous.as_ref().map(|previous| previous.dir.clone()),
            last: self.last.clone(),
        }
    }
}

/// What `opened` is loaded with: everything but the model itself as `like` has it.
pub(super) fn spec_of(opened: &OpenedModel, like: &DeploymentSpec) -> DeploymentSpec {
    let mut spec = like.clone();
    spec.revision.clone_from(&opened.revision);
    spec.model_dir.clone_from(&opened.model_dir);
    spec.load.manifest.clone_from(&opened.manifest);
    if !spec.load.vocabulary.is_empty() {
        spec.load.vocabulary = Arc::new(opened.text.vocabulary());
    }
    spec.text = opened.text.clone();
    spec
}

fn strategy(beside: bool) -> Strategy {
    if beside { Strategy::SideBySide } else { Strategy::StopFirst }
}

impl Supervisor {
    pub(super) fn swap(&mut self, request: SwapRequest, now: Instant) -> Result<DeploymentId, RolloutRefusal> {
        if self.drain.is_some() || self.leaving.is_some() {
            return Err(RolloutRefusal::Draining);
        }
        if self.rollouts.state != Rollout::Steady {
            return Err(RolloutRefusal::Busy { phase: self.rollouts.state.phase() });
        }
        let active = self.active.and_then(|id| self.deployments.get(&id)).filter(|entry| entry.deployment.is_some());
        let (Some(replaces), Some(_)) = (self.active, active) else { return Err(RolloutRefusal::NotServing) };
        if request.canary.is_some_and(|share| share == 0 || share > 10_000) {
            return Err(RolloutRefusal::Invalid("a canary takes more than 0 % and at most 100 %".to_string()));
        }
        if request.canary.is_some() && request.observe.is_zero() {
            return Err(RolloutRefusal::Invalid("a canary needs a time of observation".to_string()));
        }
        if request.served_names.as_ref().is_some_and(Vec::is_empty) {
            return Err(RolloutRefusal::Invalid("a model needs a name".to_string()));
        }
        let candidate = DeploymentId(self.next_deployment);
        self.next_deployment += 1;
        let attempt = Attempt {
            candidate,
            replaces,
            observe: request.observe,
            canary: request.canary,
            beside: None,
            deadline: now,
        };
        self.rollouts.attempt = Some(Progress {
            revision: String::new(),
            began: now,
            opened: None,
            cut_over: None,
            old_then: Figures::default(),
            new_then: Observed::default(),
            sides: None,
            soak_due: now,
            request,
        });
        self.rollout_event(RolloutEvent::Begin(attempt), now);
        Ok(candidate)
    }

    /// Ends the rollout under way and goes back; in steady state, rolls the previous revision out.
    pub(super) fn rollback(&mut self, reason: String, now: Instant) -> Result<DeploymentId, RolloutRefusal> {
        if self.drain.is_some() || self.leaving.is_some() {
            return Err(RolloutRefusal::Draining);
        }
        match self.rollouts.state.clone() {
            Rollout::Steady => {
                let previous = self.rollouts.previous.clone().ok_or(RolloutRefusal::NothingToRollBack)?;
                let request = SwapRequest {
                    model_dir: previous.dir,
                    served_names: Some(previous.served_names),
                    strategy: Strategy::Auto,
                    observe: Duration::ZERO,
                    canary: None,
                    force_unsealed: previous.unsealed,
                    revision: Some(previous.revision),
                    configured: None,
                };
                self.swap(request, now)
            }
            Rollout::Restoring { .. } => Err(RolloutRefusal::Busy { phase: self.rollouts.state.phase() }),
            Rollout::Verifying(attempt)
            | Rollout::Clearing(attempt)
            | Rollout::Loading(attempt)
            | Rollout::Probing(attempt)
            | Rollout::Soaking(attempt) => {
                self.rollout_event(RolloutEvent::Rollback { reason }, now);
                Ok(attempt.candidate)
            }
        }
    }

    pub(super) fn on_report(&mut self, of: DeploymentId, report: Report, now: Instant) {
        match report {
            Report::Opened(Ok(opened)) => self.opened(of, opened, now),
            Report::Opened(Err(reason)) | Report::Probed(Err(reason)) => {
                self.rollout_event(RolloutEvent::Failed { of, reason }, now);
            }
            Report::Probed(Ok(line)) => {
                let phase = self.rollouts.state.phase();
                self.tell(FleetEvent::RolloutPhase { deployment: of, phase, detail: format!("passed: {line}") });
                self.rollout_event(RolloutEvent::Probed { of }, now);
            }
            Report::FellBack(result) => self.fell_back(of, result),
            Report::Committed(result) => {
                if let Some(outcome) = self.rollouts.uncommitted.take_if(|outcome| outcome.candidate == of) {
                    self.rollouts.last = Some(outcome);
                    self.publish.at_once();
                }
                self.committed(of, result);
            }
        }
    }

    /// The candidate's folder is read: finds room for it and makes its deployment.
    fn opened(&mut self, of: DeploymentId, opened: Box<OpenedModel>, now: Instant) {
        let Some(attempt) = self.rollouts.state.attempt().filter(|attempt| attempt.candidate == of).cloned() else {
            return;
        };
        if !matches!(self.rollouts.state, Rollout::Verifying(_)) {
            return;
        }
        let Some(progress) = &mut self.rollouts.attempt else { return };
        progress.revision.clone_from(&opened.revision);
        if let Some(wanted) = progress.request.revision.as_ref().filter(|wanted| **wanted != opened.revision) {
            let dir = opened.model_dir.display();
            let reason = format!("{dir} holds revision {} now, not {wanted} that served from there", opened.revision);
            return self.rollout_event(RolloutEvent::Failed { of, reason }, now);
        }
        let (asked, names) = (progress.request.strategy, progress.request.served_names.clone());
        let Some(serving) = self.deployments.get(&attempt.replaces) else { return };
        let mut spec = spec_of(&opened, &serving.spec);
        let placement = match self.placement(serving, &opened, asked) {
            Ok(placement) => placement,
            Err(reason) => return self.rollout_event(RolloutEvent::Failed { of, reason }, now),
        };
        spec.served_names = names.unwrap_or(spec.served_names);
        let workers = u64::from(spec.workers.max(1));
        let (beside, candidate) = match placement {
            Placement::SideBySide { candidate } => (true, candidate),
            Placement::StopFirst { candidate } => (false, candidate),
        };
        spec.load.memory_bytes = spec.load.memory_bytes.min(candidate / workers);
        self.deployments.insert(of, DeploymentEntry::new(spec, DeploymentRole::Candidate));
        if let Some(progress) = &mut self.rollouts.attempt {
            progress.opened = Some(opened);
        }
        self.rollout_event(RolloutEvent::Verified { of, beside }, now);
    }

    fn placement(&self, serving: &DeploymentEntry, opened: &OpenedModel, asked: Strategy) -> Result<Placement, String> {
        let beside = match asked {
            Strategy::Auto => None,
            Strategy::SideBySide => Some(true),
            Strategy::StopFirst => Some(false),
        };
        let Some(limit) = self.settings.memory_limit else {
            let candidate = u64::MAX;
            return Ok(match beside {
                Some(false) => Placement::StopFirst { candidate },
                _ => Placement::SideBySide { candidate },
            });
        };
        let workers = u64::from(serving.spec.workers.max(1));
        let loaded = serving.deployment.as_ref().map(|deployment| &deployment.loaded);
        let (weights, workspace, kv) =
            loaded.map_or((0, 0, 0), |loaded| (loaded.weights_bytes, loaded.workspace_bytes, loaded.kv_bytes));
        // A little more than the bits say: scales, embeddings and norms keep their width.
        let candidate_weights = match serving.spec.load.quantization {
            Quantization::None => opened.weights_bytes,
            Quantization::Int8 => opened.weights_bytes * 6 / 10,
            Quantization::Int4 => opened.weights_bytes * 4 / 10,
        };
        let kv_fixed = serving.spec.load.kv_cache_bytes;
        let space = Space {
            limit,
            serving: workers * (weights + workspace + kv),
            weights: workers * candidate_weights,
            workspace: workers * workspace,
            kv_least: workers * kv_fixed.unwrap_or(kv / KV_LEAST_PART),
            kv_wanted: workers * kv_fixed.unwrap_or(kv),
        };
        place(&space, beside).map_err(|no_room| no_room.to_string())
    }

    /// Puts an event to the rollout and carries out what follows.
    pub(super) fn rollout_event(&mut self, event: RolloutEvent, now: Instant) {
        let before = self.rollouts.state.phase();
        match rollout::on(&self.rollouts.state, event, now, &self.settings.rollout) {
            Ok((state, effects)) => {
                let after = state.phase();
                let candidate = state.attempt().or(self.rollouts.state.attempt()).map(|attempt| attempt.candidate);
                let beside = state.attempt().and_then(|attempt| attempt.beside);
                self.rollouts.state = state;
                if let (Some(deployment), true) = (candidate, before != after) {
                    let detail = beside.map(|beside| strategy(beside).as_str()).unwrap_or_default().to_string();
                    self.tell(FleetEvent::RolloutPhase { deployment, phase: after, detail });
                }
                for effect in effects {
                    self.carry_out(effect, now);
                }
                self.publish.at_once();
            }
            // Late, about another attempt, or of no interest in this phase.
            Err(Refused::Stale | Refused::Busy(_) | Refused::NothingToRollBack) => {}
        }
    }

    fn carry_out(&mut self, effect: RolloutEffect, now: Instant) {
        match effect {
            RolloutEffect::Verify(id) => self.verify(id),
            RolloutEffect::Hold => {
                (self.active, self.canary) = (None, None);
                self.publish_routing();
            }
            RolloutEffect::Clear(id) => self.retire(id, now + CLEAR_GRACE),
            RolloutEffect::Load(id) => {
                if let Some(entry) = self.deployments.get_mut(&id) {
                    (entry.leaves_at, entry.left, entry.failed) = (None, false, None);
                    let served = entry.deployment.is_some();
                    entry.role = if served { DeploymentRole::Standby } else { DeploymentRole::Candidate };
                }
                self.want_workers(id);
            }
            RolloutEffect::Probe(id) => self.probe(id),
            RolloutEffect::CutOver { to, from, canary } => self.cut_over(to, from, canary, now),
            RolloutEffect::Route(id) => self.route(id),
            RolloutEffect::Retire(id) => self.retire(id, now + RETIRE_GRACE),
            RolloutEffect::Discard(id) => {
                self.retire(id, now);
                let failure =
                    super::GenerationFailure { message: "the candidate was rolled back".to_string(), retryable: true };
                self.requests.fail_all(Some(id), false, &failure);
                self.unwant_workers(id);
            }
            RolloutEffect::Commit { current, previous } => {
                let configured = self.rollouts.attempt.as_mut().and_then(|progress| progress.request.configured.take());
                self.commit(current, previous, configured);
            }
            RolloutEffect::Completed(id) => self.finished(id, RolloutResult::Completed, now),
            RolloutEffect::RolledBack { of, phase, reason, restored: true } => {
                self.finished(of, RolloutResult::RolledBack { phase, reason }, now);
            }
            RolloutEffect::RolledBack { of, phase: _, reason, restored: false } => {
                self.finished(of, RolloutResult::NotRestored { reason }, now);
            }
            RolloutEffect::Role(id, role) => {
                if let Some(entry) = self.deployments.get_mut(&id) {
                    (entry.role, entry.leaves_at) = (role, None);
                }
            }
        }
    }

    fn verify(&mut self, id: DeploymentId) {
        let Some(progress) = &self.rollouts.attempt else { return };
        let request = progress.request.clone();
        self.tell(FleetEvent::RolloutBegan {
            deployment: id,
            model_dir: request.model_dir.clone(),
            strategy: request.strategy.as_str(),
        });
        let (models, reports) = (self.models.clone(), self.reports.clone());
        tokio::spawn(async move {
            let opening = move || models.open(&request.model_dir, request.force_unsealed);
            let opened = tokio::task::spawn_blocking(opening).await;
            let opened = opened.unwrap_or_else(|_| Err("reading the model panicked".to_string()));
            // Fails only when the supervisor is gone.
            let _ = reports.send((id, Report::Opened(opened.map(Box::new)))).await;
        });
    }

    fn probe(&mut self, id: DeploymentId) {
        let candidate = self.deployments.get(&id).and_then(|entry| entry.deployment.clone());
        let opened = self.rollouts.attempt.as_ref().and_then(|progress| progress.opened.as_ref());
        let (Some(candidate), Some(opened), Some(handle)) = (candidate, opened, self.own_handle()) else { return };
        let reference = self.active.and_then(|id| self.deployments.get(&id)).and_then(|entry| entry.deployment.clone());
        let plan = probe::Plan {
            candidate,
            reference,
            probes: opened.probes.clone(),
            min_tokens_per_second: opened.min_tokens_per_second,
            slowdown_max: self.settings.probe_slowdown_max,
        };
        let reports = self.reports.clone();
        tokio::spawn(async move {
            let result = probe::run(handle, plan).await;
            let _ = reports.send((id, Report::Probed(result))).await;
        });
    }

    fn own_handle(&self) -> Option<FleetHandle> {
        Some(FleetHandle {
            commands: self.own_commands.upgrade()?,
            dropped: self.own_dropped.upgrade()?,
            requests_max: self.requests_max.clone(),
            status: self.status.subscribe(),
            routing: self.routing.subscribe(),
            next_request: self.next_request.clone(),
        })
    }

    fn cut_over(&mut self, to: DeploymentId, from: DeploymentId, canary: Option<u32>, now: Instant) {
        let before = std::time::Instant::now();
        let (role_to, role_from) = match canary {
            Some(share) => {
                (self.active, self.canary) = (Some(from), Some((to, share)));
                (DeploymentRole::Canary, DeploymentRole::Active)
            }
            None => {
                (self.active, self.canary) = (Some(to), None);
                (DeploymentRole::Active, DeploymentRole::Standby)
            }
        };
        self.publish_routing();
        let pause = before.elapsed();
        for (id, role) in [(to, role_to), (from, role_from)] {
            let entry = self.deployments.get_mut(&id);
            if let Some(entry) = entry.filter(|entry| entry.role != DeploymentRole::Parked) {
                entry.role = role;
            }
        }
        let in_flight = u32::try_from(self.requests.of_deployment(from)).unwrap_or(u32::MAX);
        let (old_then, new_then) = (self.requests.figures(from), self.observed(to));
        if let Some(progress) = &mut self.rollouts.attempt {
            progress.cut_over = Some(CutOver { pause, in_flight });
            progress.sides = Some((from, to));
            (progress.old_then, progress.new_then) = (old_then, new_then);
            progress.soak_due = now + SOAK_INTERVAL;
        }
        let revision = self.deployments.get(&to).map(|entry| entry.spec.revision.clone()).unwrap_or_default();
        self.tell(FleetEvent::DeploymentActivated { deployment: to, revision, replaces: Some(from) });
    }

    fn route(&mut self, id: DeploymentId) {
        (self.active, self.canary) = (Some(id), None);
        if let Some(entry) = self.deployments.get_mut(&id) {
            (entry.role, entry.leaves_at) = (DeploymentRole::Active, None);
        }
        self.publish_routing();
    }

    fn finished(&mut self, candidate: DeploymentId, result: RolloutResult, now: Instant) {
        let Some(progress) = self.rollouts.attempt.take() else { return };
        let requests = self.sides(&progress);
        let (revision, elapsed) = (progress.revision, now - progress.began);
        match &result {
            RolloutResult::Completed => {
                self.counters.rollouts_completed += 1;
                self.tell(FleetEvent::RolloutCompleted {
                    deployment: candidate,
                    revision: revision.clone(),
                    elapsed,
                    cut_over: progress.cut_over,
                    requests,
                });
            }
            RolloutResult::RolledBack { reason, .. } | RolloutResult::NotRestored { reason } => {
                self.counters.rollouts_rolled_back += 1;
                let restored = matches!(result, RolloutResult::RolledBack { .. });
                self.tell(FleetEvent::RolledBack {
                    deployment: candidate,
                    revision: revision.clone(),
                    reason: reason.clone(),
                    restored,
                });
            }
        }
        let to_be_committed = self.links.is_some() && result == RolloutResult::Completed;
        let outcome = RolloutOutcome {
            candidate,
            model_dir: progress.request.model_dir,
            revision,
            result,
            cut_over: progress.cut_over,
            requests,
            elapsed,
            at: unix_now(),
        };
        if to_be_committed {
            self.rollouts.uncommitted = Some(outcome);
        } else {
            self.rollouts.last = Some(outcome);
        }
    }

    fn sides(&self, progress: &Progress) -> Sides {
        let Some((old, new)) = progress.sides else { return Sides::default() };
        let old = self.requests.figures(old).since(&progress.old_then);
        let new = self.requests.figures(new).since(&progress.new_then.figures);
        Sides { old: old.finished, new: new.finished, failed: old.failed + new.failed }
    }
}

impl DeploymentEntry {
    pub(super) fn new(spec: DeploymentSpec, role: DeploymentRole) -> Self {
        Self { spec, role, deployment: None, failed: None, leaves_at: None, left: false }
    }
}

impl From<(DeploymentId, Report)> for SupervisorEvent {
    fn from((of, report): (DeploymentId, Report)) -> Self {
        Self::Rollout(of, report)
    }
}
