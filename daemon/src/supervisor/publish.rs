//! Publication of the fleet's status: when, and what it is made of.
//!
//! Changes of state are published at once, figures at most every [`GAP`] while they change and once per [`IDLE_GAP`]
//! otherwise.

use super::restart::RestartState;
use super::slots::{Slot, SlotKey, Stage};
use super::{DeploymentStatus, FleetState, FleetStatus, Supervisor, WorkerState, WorkerStatus};
use ernie_proto::ids::DeploymentId;
use ernie_proto::worker::StepStats;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Between two publications of figures that change all the time.
const GAP: Duration = Duration::from_millis(200);

/// Between two publications when nothing happens: ages grow.
const IDLE_GAP: Duration = Duration::from_secs(1);

/// Over which tokens per second are averaged.
const RATE_WINDOW: Duration = Duration::from_secs(10);

/// When the next publication is due.
#[derive(Debug)]
pub(super) struct Schedule {
    last: Instant,
    due: Instant,
}

impl Schedule {
    pub(super) fn new(now: Instant) -> Self {
        Self { last: now, due: now }
    }

    /// A state changed.
    pub(super) fn at_once(&mut self) {
        self.due = self.last;
    }

    /// Figures changed.
    pub(super) fn soon(&mut self) {
        self.due = self.due.min(self.last + GAP);
    }

    pub(super) fn due(&self) -> Instant {
        self.due
    }

    fn done(&mut self, now: Instant) {
        (self.last, self.due) = (now, now + IDLE_GAP);
    }
}

/// Counters of the last ten seconds.
#[derive(Debug, Default)]
pub(super) struct Rates(VecDeque<(Instant, u64, u64)>);

impl Rates {
    /// Notes the counters; gives generated and prompt tokens per second.
    fn note(&mut self, now: Instant, generated: u64, prompt: u64) -> (f64, f64) {
        let recent = self.0.back().is_some_and(|(last, ..)| now - *last < GAP / 2);
        if !recent {
            self.0.push_back((now, generated, prompt));
        }
        // The first sample stays until the second is old enough to stand for the window's beginning.
        while self.0.get(1).is_some_and(|(at, ..)| now - *at >= RATE_WINDOW) {
            self.0.pop_front();
        }
        let Some((since, generated_then, prompt_then)) = self.0.front() else { return (0.0, 0.0) };
        let seconds = (now - *since).as_secs_f64();
        if seconds < 0.1 {
            return (0.0, 0.0);
        }
        let rate = |after: u64, before: u64| after.saturating_sub(before) as f64 / seconds;
        (rate(generated, *generated_then), rate(prompt, *prompt_then))
    }
}

impl Supervisor {
    pub(super) fn publish_if_due(&mut self, now: Instant) {
        if self.publish.due() <= now {
            self.publish_now(now);
        }
    }

    pub(super) fn publish_now(&mut self, now: Instant) {
        self.publish.done(now);
        let mut stats = self.base.clone();
        for slot in self.slots.values() {
            add_counters(&mut stats, &slot.base);
            if let Some(live) = &slot.live {
                add_counters(&mut stats, &live.stats);
                if slot.serves() {
                    add_gauges(&mut stats, &live.stats);
                }
            }
        }
        let (tokens_per_second, prompt_tokens_per_second) =
            self.rates.note(now, stats.generated_tokens, stats.prompt_tokens);
        let (state, reason) = self.state();
        let held = self.requests.held();
        let status = FleetStatus {
            state,
            reason,
            active: self.active,
            deployments: self.deployments.keys().filter_map(|id| self.deployment_status(*id)).collect(),
            workers: self.slots.iter().map(|(key, slot)| self.worker_status(*key, slot, now)).collect(),
            requests_dispatched: count(self.requests.len() - held),
            requests_held: count(held),
            stats,
            tokens_per_second,
            prompt_tokens_per_second,
            counters: self.counters,
            rollout: self.rollouts.status(now),
            sequence: self.status.borrow().sequence + 1,
        };
        self.status.send_replace(Arc::new(status));
    }

    fn state(&self) -> (FleetState, Option<String>) {
        if self.leaving.is_some() {
            let alive = self.slots.values().any(|slot| slot.live.is_some());
            return (if alive { FleetState::Draining } else { FleetState::Stopped }, None);
        }
        if self.drain.is_some() {
            return (FleetState::Draining, Some(format!("{} requests are still running", self.requests.len())));
        }
        let Some(id) = self.active else {
            return (FleetState::Switching, Some("the model is being replaced".to_string()));
        };
        let Some(entry) = self.deployments.get(&id) else { return (FleetState::Failed, None) };
        if let Some(reason) = &entry.failed {
            return (FleetState::Failed, Some(reason.clone()));
        }
        let loaded = entry.deployment.is_some();
        if loaded && self.slots.range((id, 0)..=(id, u32::MAX)).any(|(_, slot)| slot.serves()) {
            return (FleetState::Serving, None);
        }
        if let Some(reason) = self.crash_loop_reason(id) {
            return (FleetState::Failed, Some(reason));
        }
        if loaded {
            return (FleetState::Recovering, Some("the workers are being restarted".to_string()));
        }
        (FleetState::Starting, Some("the model is being loaded".to_string()))
    }

    fn deployment_status(&self, id: DeploymentId) -> Option<DeploymentStatus> {
        let entry = self.deployments.get(&id)?;
        let figures = self.requests.figures(id);
        Some(DeploymentStatus {
            id,
            role: entry.role,
            served_names: entry.spec.served_names.clone(),
            revision: entry.spec.revision.clone(),
            model_dir: entry.spec.model_dir.clone(),
            loaded: entry.deployment.as_ref().map(|deployment| deployment.loaded.clone()),
            workers_wanted: entry.spec.workers.max(1),
            workers_ready: count(self.ready_workers(id).count()),
            requests: count(self.requests.of_deployment(id)),
            requests_finished: figures.finished,
            requests_failed: figures.failed,
        })
    }

    fn worker_status(&self, key: SlotKey, slot: &Slot, now: Instant) -> WorkerStatus {
        let live = slot.live.as_ref();
        let state = match (live.map(|live| &live.stage), &slot.restart) {
            (Some(Stage::Starting), _) => WorkerState::Starting,
            (Some(Stage::Loading), _) => WorkerState::Loading,
            (Some(Stage::Ready), _) => WorkerState::Ready,
            (Some(Stage::Draining), _) => WorkerState::Draining,
            (Some(Stage::Ending { .. }), _) => WorkerState::Stopping,
            (None, RestartState::Waiting { until, crash_loop, .. }) => {
                let wait = until.saturating_duration_since(now);
                if *crash_loop { WorkerState::CrashLoop { wait } } else { WorkerState::Backoff { wait } }
            }
            (None, _) if self.deployments.get(&key.0).is_some_and(|entry| entry.failed.is_some()) => {
                WorkerState::Failed
            }
            (None, _) => WorkerState::Stopped,
        };
        WorkerStatus {
            deployment: key.0,
            slot: key.1,
            id: live.map(|live| live.id),
            pid: live.and_then(|live| live.pid),
            state,
            restarts: slot.restarts,
            last_failure: slot.last_failure.clone(),
            uptime: live.map(|live| now - live.started),
            last_step_age: live.and_then(|live| live.step_age(now, &self.requests)),
            last_pong_age: live.and_then(|live| live.pong).map(|pong| now - pong),
            load: live.and_then(|live| live.load.clone()),
            requests: count(live.map_or(0, |live| self.requests.of_worker(live.id))),
            stats: live.map(|live| live.stats.clone()).unwrap_or_default(),
        }
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Adds what only ever rises.
pub(super) fn add_counters(to: &mut StepStats, of: &StepStats) {
    to.preemptions += of.preemptions;
    to.prefix_queries_tokens += of.prefix_queries_tokens;
    to.prefix_hits_tokens += of.prefix_hits_tokens;
    to.prompt_tokens += of.prompt_tokens;
    to.generated_tokens += of.generated_tokens;
    to.swapped_out_blocks += of.swapped_out_blocks;
    to.swapped_in_blocks += of.swapped_in_blocks;
    to.nan_sequences += of.nan_sequences;
    to.disk.blocks_corrupt += of.disk.blocks_corrupt;
    to.disk.reads += of.disk.reads;
    to.disk.read_seconds += of.disk.read_seconds;
    to.disk.writes += of.disk.writes;
    to.disk.write_seconds += of.disk.write_seconds;
    to.disk.writes_skipped += of.disk.writes_skipped;
    for (layer, tokens) in of.expert_tokens.iter().enumerate() {
        if to.expert_tokens.len() <= layer {
            to.expert_tokens.push(vec![0; tokens.len()]);
        }
        let sums = &mut to.expert_tokens[layer];
        sums.resize(sums.len().max(tokens.len()), 0);
        for (sum, n) in sums.iter_mut().zip(tokens) {
            *sum += n;
        }
    }
}

/// Adds what a living worker has at the moment.
fn add_gauges(to: &mut StepStats, of: &StepStats) {
    to.running += of.running;
    to.waiting += of.waiting;
    to.swapped += of.swapped;
    to.tokens += of.tokens;
    to.prefill_tokens += of.prefill_tokens;
    to.sequences += of.sequences;
    to.step_seconds = to.step_seconds.max(of.step_seconds);
    to.blocks_total += of.blocks_total;
    to.blocks_free += of.blocks_free;
    to.blocks_cached += of.blocks_cached;
    to.swap_blocks_total += of.swap_blocks_total;
    to.swap_blocks_used += of.swap_blocks_used;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_ten_seconds() {
        let start = Instant::now();
        let mut rates = Rates::default();
        let mut last = (0.0, 0.0);
        for second in 0..30u64 {
            // 100 tokens a second for twenty seconds, then nothing.
            last = rates.note(start + Duration::from_secs(second), 100 * second.min(20), 0);
            if second == 15 {
                assert_eq!(last.0, 100.0);
            }
        }
        assert!(last.0 < 20.0, "{} tokens/s after nine idle seconds", last.0);
        assert_eq!(rates.note(start + Duration::from_secs(31), 2000, 0).0, 0.0);
        assert!(rates.0.len() <= 12);
    }

    #[test]
    fn expert_counts_of_workers_add_up() {
        let mut sum = StepStats::default();
        for _ in 0..2 {
            let of =
                StepStats { generated_tokens: 5, expert_tokens: vec![vec![1, 2], vec![3, 4]], ..Default::default() };
            add_counters(&mut sum, &of);
        }
        assert_eq!(sum.generated_tokens, 10);
        assert_eq!(sum.expert_tokens, vec![vec![2, 4], vec![6, 8]]);
    }
}
