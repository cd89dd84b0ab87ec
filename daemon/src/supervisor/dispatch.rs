//! The requests under way: what each has brought so far, who works on it, who waits for a worker.
//!
//! Owned by the supervisor task; nothing here waits or knows a process. What a request has generated is kept here, so that
//! another worker can go on from there: a worker's death costs its requests time and nothing else. Only the worker that a
//! request is assigned to can move it; whatever comes from another one (late, or dead) is ignored.

use super::fleet::{GenerationEvent, GenerationFailure, NewRequest, Submission};
use crate::telemetry::steps::{PROMPT_STEPS_MAX, Step};
use ernie_proto::ids::{DeploymentId, RequestId, WorkerId};
use ernie_proto::worker::{ChoiceSoFar, NO_TOKEN, SequenceOutput, StepReport, Submit};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;

/// A request that saw this many workers die without bringing a token in between is tried alone: the next death is its own.
const SUSPECT_STRIKES: u32 = 2;

/// How many worker deaths a request may be near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoisonSettings {
    /// In a row, without a token in between.
    pub strikes_max: u32,
    /// In all.
    pub deaths_max: u32,
}

impl Default for PoisonSettings {
    fn default() -> Self {
        Self { strikes_max: 3, deaths_max: 12 }
    }
}

/// All requests that have not ended.
#[derive(Debug)]
pub(super) struct Requests {
    all: HashMap<RequestId, Request>,
    /// Those without a worker, in the order in which they get one.
    held: BTreeSet<(DeploymentId, i32, RequestId)>,
    workers: HashMap<WorkerId, Assigned>,
    /// Suspects that are out on trial, by deployment.
    on_trial: HashMap<DeploymentId, RequestId>,
    figures: HashMap<DeploymentId, Figures>,
    poison: PoisonSettings,
}

#[derive(Debug)]
struct Request {
    deployment: DeploymentId,
    submission: Submission,
    choices: Vec<ChoiceSoFar>,
    /// Choices that the client's side ended; their worker may not know yet.
    cut: Vec<u16>,
    /// Choices that have not ended.
    open: u32,
    events: mpsc::Sender<GenerationEvent>,
    worker: Option<WorkerId>,
    started: bool,
    /// Steps told that computed its prompt.
    prompt_steps: u32,
    prompt_logprobs_given: bool,
    /// Deaths of workers that had this request; `strikes` are those since its last token.
    deaths: u32,
    strikes: u32,
    submitted: Instant,
    last_output: Option<Instant>,
}

/// What a worker has been given.
#[derive(Debug, Default)]
struct Assigned {
    requests: HashSet<RequestId>,
    /// Open choices of these.
    choices: u32,
}

/// What a deployment has done since it began; the rules of a rollout compare two of these.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) finished: u64,
    pub(super) failed: u64,
    pub(super) tokens: u64,
    pub(super) first_tokens: u64,
    pub(super) first_token_time: Duration,
    pub(super) next_tokens: u64,
    pub(super) next_token_time: Duration,
}

impl Figures {
    /// What came after `then`.
    pub(super) fn since(&self, then: &Figures) -> Figures {
        Figures {
            finished: self.finished.saturating_sub(then.finished),
            failed: self.failed.saturating_sub(then.failed),
            tokens: self.tokens.saturating_sub(then.tokens),
            first_tokens: self.first_tokens.saturating_sub(then.first_tokens),
            first_token_time: self.first_token_time.saturating_sub(then.first_token_time),
            next_tokens: self.next_tokens.saturating_sub(then.next_tokens),
            next_token_time: self.next_token_time.saturating_sub(then.next_token_time),
        }
    }
}

/// What a step report changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// Requests whose client is gone; they are forgotten here and are to be aborted there.
    pub(super) abandoned: Vec<RequestId>,
    /// Requests that ended.
    pub(super) ended: usize,
    /// The worker said something that can not be: it is not to be trusted further.
    pub(super) violation: Option<String>,
}

/// What became of the requests of a worker that died.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Orphaned {
    pub(super) resumed: usize,
    /// Given up, with the number of deaths they saw.
    pub(super) poisonous: Vec<(RequestId, u32)>,
}

impl Requests {
    pub(super) fn new(poison: PoisonSettings) -> Self {
        Self {
            all: HashMap::new(),
            held: BTreeSet::new(),
            workers: HashMap::new(),
            on_trial: HashMap::new(),
            figures: HashMap::new(),
            poison,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    pub(super) fn of_deployment(&self, deployment: DeploymentId) -> usize {
        self.all.values().filter(|r| r.deployment == deployment).count()
    }

    pub(super) fn of_worker(&self, worker: WorkerId) -> usize {
        self.workers.get(&worker).map_or(0, |w| w.requests.len())
    }

    pub(super) fn figures(&self, deployment: DeploymentId) -> Figures {
        self.figures.get(&deployment).copied().unwrap_or_default()
    }

    pub(super) fn forget_deployment(&mut self, deployment: DeploymentId) {
        self.figures.remove(&deployment);
        self.on_trial.remove(&deployment);
    }

    /// Takes a new request; it waits for a worker.
    pub(super) fn insert(&mut self, new: NewRequest, now: Instant) {
        let NewRequest { id, deployment, submission, events, reply: _ } = new;
        self.held.insert((deployment.id, submission.priority, id));
        let choices = vec![ChoiceSoFar::default(); usize::from(submission.choices)];
        let request = Request {
            deployment: deployment.id,
            open: u32::from(submission.choices),
            submission,
            choices,
            cut: Vec::new(),
            events,
            worker: None,
            started: false,
            prompt_steps: 0,
            prompt_logprobs_given: false,
            deaths: 0,
            strikes: 0,
            submitted: now,
            last_output: None,
        };
        self.all.insert(id, request);
    }

    /// Gives every held request of the deployment that may run now to the least loaded of `ready` (by slot on ties).
    pub(super) fn assign(&mut self, deployment: DeploymentId, ready: &[WorkerId]) -> Vec<(WorkerId, Submit)> {
        if ready.is_empty() {
            return Vec::new();
        }
        let mut submits = Vec::new();
        for id in self.held_range(deployment).collect::<Vec<_>>() {
            let Some(request) = self.all.get_mut(&id) else { continue };
            if request.strikes >= SUSPECT_STRIKES {
                // One suspect at a time, until it has brought a token.
                if self.on_trial.contains_key(&deployment) {
                    continue;
                }
                self.on_trial.insert(deployment, id);
            }
            let load = |worker: &WorkerId| self.workers.get(worker).map_or(0, |w| w.choices);
            let Some(worker) = ready.iter().copied().min_by_key(load) else { break };
            self.held.remove(&(deployment, request.submission.priority, id));
            request.worker = Some(worker);
            let assigned = self.workers.entry(worker).or_default();
            assigned.requests.insert(id);
            assigned.choices += request.open;
            submits.push((worker, request.submit(id)));
        }
        submits
    }

    /// Takes in what a step of `worker` brought and passes it on.
    pub(super) fn apply(&mut self, worker: WorkerId, report: StepReport, now: Instant) -> Applied {
        let mut applied = Applied::default();
        let step = Arc::new(Step::new(worker, report.step, &report.stats));
        for started in report.started {
            let request = self.assigned_to(worker, started.request);
            if let Some(request) = request.filter(|request| !request.started) {
                request.started = true;
                // A client that is gone shows at its first token or through its `Generation`.
                let _ = request.events.try_send(GenerationEvent::Started { cached_tokens: started.cached_tokens });
            }
        }
        for computed in report.prompts {
            // With its first token the step comes to it anyway.
            let brings = |output: &SequenceOutput| output.request == computed;
            if report.outputs.iter().any(brings) {
                continue;
            }
            let request = self.assigned_to(worker, computed).filter(|request| request.prompt_steps < PROMPT_STEPS_MAX);
            if let Some(request) = request {
                request.prompt_steps += 1;
                let _ = request.events.try_send(GenerationEvent::Computed(step.clone()));
            }
        }
        for given in report.prompt_logprobs {
            let request = self.assigned_to(worker, given.request);
            if let Some(request) = request.filter(|request| !request.prompt_logprobs_given) {
                request.prompt_logprobs_given = true;
                let _ = request.events.try_send(GenerationEvent::PromptLogprobs(given.tokens));
            }
        }
        for output in report.outputs {
            self.apply_output(worker, output, &step, now, &mut applied);
        }
        for (id, message) in report.failed {
            if self.assigned_to(worker, id).is_some() {
                self.fail(id, GenerationFailure { message, retryable: false });
                applied.ended += 1;
            }
        }
        applied
    }

    fn apply_output(
        &mut self,
        worker: WorkerId,
        output: SequenceOutput,
        step: &Arc<Step>,
        now: Instant,
        applied: &mut Applied,
    ) {
        let id = output.request;
        let Some(request) = self.all.get_mut(&id).filter(|r| r.worker == Some(worker)) else { return };
        if request.cut.contains(&output.choice) {
            return;
        }
        let limit = request.submission.sampling.max_tokens as usize;
        let (index, finished) = (usize::from(output.choice), output.finish.is_some());
        let impossible = match request.choices.get_mut(index) {
            None => Some("a choice that was not asked for"),
            Some(choice) if choice.finished => Some("a token after the end of its choice"),
            Some(choice) if output.token == NO_TOKEN => {
                choice.finished = finished;
                (!finished).then_some("no token and no end")
            }
            Some(choice) if choice.generated.len() >= limit => Some("more tokens than asked for"),
            Some(choice) => {
                choice.generated.push(output.token);
                choice.finished = finished;
                None
            }
        };
        if let Some(what) = impossible {
            applied.violation.get_or_insert_with(|| format!("it sent {what} (request {id}, choice {index})"));
            return;
        }
        let deployment = request.deployment;
        let figures = self.figures.entry(deployment).or_default();
        figures.tokens += u64::from(output.token != NO_TOKEN);
        match request.last_output.replace(now) {
            None => {
                figures.first_tokens += 1;
                figures.first_token_time += now - request.submitted;
            }
            Some(last) => {
                figures.next_tokens += 1;
                figures.next_token_time += now - last;
            }
        }
        if request.strikes > 0 {
            request.strikes = 0;
            if self.on_trial.get(&deployment) == Some(&id) {
                self.on_trial.remove(&deployment);
            }
        }
        if finished {
            request.open -= 1;
            if let Some(assigned) = self.workers.get_mut(&worker) {
                assigned.choices = assigned.choices.saturating_sub(1);
            }
        }
        let (over, sent) = (request.open == 0, request.events.try_send(GenerationEvent::Output(output, step.clone())));
        match sent {
            Ok(()) if over => {
                if let Some(figures) = self.figures.get_mut(&deployment) {
                    figures.finished += 1;
                }
                self.remove(id);
                applied.ended += 1;
            }
            Ok(()) => {}
            Err(TrySendError::Closed(_)) => {
                self.remove(id);
                if over {
                    applied.ended += 1;
                } else {
                    applied.abandoned.push(id);
                }
            }
            // The channel has room for all that was asked for, so this can not be; if it is, only this request suffers.
            Err(TrySendError::Full(_)) => {
                self.fail(id, GenerationFailure { message: "the answer was not read".to_string(), retryable: false });
                applied.abandoned.push(id);
            }
        }
    }

    /// One choice has said enough. The worker that has to be told, if one has it, and whether it was the last one.
    pub(super) fn end_choice(&mut self, id: RequestId, choice: u16) -> Option<(WorkerId, bool)> {
        let request = self.all.get_mut(&id)?;
        let so_far = request.choices.get_mut(usize::from(choice)).filter(|c| !c.finished)?;
        so_far.finished = true;
        request.cut.push(choice);
        request.open -= 1;
        let (worker, deployment, last) = (request.worker, request.deployment, request.open == 0);
        if let Some(assigned) = worker.and_then(|worker| self.workers.get_mut(&worker)) {
            assigned.choices = assigned.choices.saturating_sub(1);
        }
        if last {
            self.figures.entry(deployment).or_default().finished += 1;
            self.remove(id);
        }
        worker.map(|worker| (worker, last))
    }

    /// The client is gone. The worker that has to be told, if one has it.
    pub(super) fn abandon(&mut self, id: RequestId) -> Option<Abandoned> {
        let request = self.remove(id)?;
        Some(Abandoned { deployment: request.deployment, worker: request.worker })
    }

    /// Requests whose client let go of them without saying so.
    pub(super) fn deserted(&self) -> Vec<RequestId> {
        self.all.iter().filter(|(_, r)| r.events.is_closed()).map(|(id, _)| *id).collect()
    }

    /// The worker is dead, or as good as dead: its requests wait for another one. With a reason its end counts against
    /// them, and those that were near too many are given up.
    pub(super) fn orphan(&mut self, worker: WorkerId, reason: Option<&str>) -> Orphaned {
        let mut orphaned = Orphaned::default();
        let Some(assigned) = self.workers.remove(&worker) else { return orphaned };
        for id in assigned.requests {
            let Some(request) = self.all.get_mut(&id) else { continue };
            request.worker = None;
            request.deaths += u32::from(reason.is_some());
            request.strikes += u32::from(reason.is_some());
            if self.on_trial.get(&request.deployment) == Some(&id) {
                self.on_trial.remove(&request.deployment);
            }
            if request.strikes >= self.poison.strikes_max || request.deaths >= self.poison.deaths_max {
                orphaned.poisonous.push((id, request.deaths));
            } else {
                self.held.insert((request.deployment, request.submission.priority, id));
                orphaned.resumed += 1;
            }
        }
        for (id, deaths) in &orphaned.poisonous {
            self.fail(*id, GenerationFailure {
                message: format!(
                    "the request was given up: {deaths} workers ended while they worked on it, the last one because {}",
                    reason.unwrap_or("it was asked to")
                ),
                retryable: false,
            });
        }
        orphaned
    }

    /// Ends a request with a failure.
    pub(super) fn fail(&mut self, id: RequestId, failure: GenerationFailure) {
        if let Some(request) = self.remove(id) {
            self.figures.entry(request.deployment).or_default().failed += 1;
            // Fails only when nobody listens any more.
            let _ = request.events.try_send(GenerationEvent::Failed(failure));
        }
    }

    /// Ends all requests, or those of one deployment; returns them with their workers.
    pub(super) fn fail_all(
        &mut self,
        of: Option<DeploymentId>,
        held_only: bool,
        failure: &GenerationFailure,
    ) -> Vec<(RequestId, Option<WorkerId>)> {
        let chosen: Vec<_> = self
            .all
            .iter()
            .filter(|(_, r)| of.is_none_or(|d| d == r.deployment) && !(held_only && r.worker.is_some()))
            .map(|(id, r)| (*id, r.worker))
            .collect();
        for (id, _) in &chosen {
            self.fail(*id, failure.clone());
        }
        chosen
    }

    fn remove(&mut self, id: RequestId) -> Option<Request> {
        let request = self.all.remove(&id)?;
        match request.worker {
            Some(worker) => {
                if let Some(assigned) = self.workers.get_mut(&worker) {
                    assigned.requests.remove(&id);
                    assigned.choices = assigned.choices.saturating_sub(request.open);
                }
            }
            None => {
                self.held.remove(&(request.deployment, request.submission.priority, id));
            }
        }
        if self.on_trial.get(&request.deployment) == Some(&id) {
            self.on_trial.remove(&request.deployment);
        }
        Some(request)
    }

    fn assigned_to(&mut self, worker: WorkerId, id: RequestId) -> Option<&mut Request> {
        self.all.get_mut(&id).filter(|r| r.worker == Some(worker))
    }

    fn held_range(&self, deployment: DeploymentId) -> impl Iterator<Item = RequestId> + '_ {
        let (low, high) = ((deployment, i32::MIN, RequestId(0)), (deployment, i32::MAX, RequestId(u64::MAX)));
        self.held.range(low..=high).map(|(_, _, id)| *id)
    }
}

/// Where a request was when its client went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Abandoned {
    pub(super) deployment: DeploymentId,
    pub(super) worker: Option<WorkerId>,
}

impl Request {
    fn submit(&self, id: RequestId) -> Submit {
        let mut sampling = self.submission.sampling.clone();
        if self.prompt_logprobs_given {
            sampling.prompt_logprobs = None;
        }
        Submit {
            request: id,
            prompt: self.submission.prompt.clone(),
            choices: self.choices.clone(),
            sampling,
            priority: self.submission.priority,
            cache_salt: self.submission.cache_salt,
            owner: self.submission.owner,
        }
    }
}
