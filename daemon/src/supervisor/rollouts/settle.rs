//! Looks, turn by turn, at what a rollout waits for, and at how its candidate does while it is observed.

use super::SOAK_INTERVAL;
use crate::supervisor::Supervisor;
use crate::supervisor::publish::add_counters;
use crate::supervisor::rollout::{Attempt, Rollout, RolloutEvent};
use crate::supervisor::soak::{self, Observed};
use ernie_proto::ids::DeploymentId;
use ernie_proto::worker::StepStats;
use tokio::time::Instant;

impl Supervisor {
    /// Everything that may have become true since the last turn: workers that left or are ready, deadlines, broken rules.
    pub(in crate::supervisor) fn settle_rollout(&mut self, now: Instant) {
        self.let_retiring_leave(now);
        let gone = |supervisor: &Self, id: DeploymentId| {
            !supervisor.slots.range((id, 0)..=(id, u32::MAX)).any(|(_, slot)| slot.live.is_some())
        };
        let ready = |supervisor: &Self, id: DeploymentId| supervisor.ready_workers(id).count();
        match self.rollouts.state.clone() {
            Rollout::Steady => return,
            Rollout::Clearing(attempt) => {
                let left = self.deployments.get(&attempt.replaces).is_none_or(|entry| entry.left);
                if left && gone(self, attempt.replaces) {
                    self.rollout_event(RolloutEvent::Gone { of: attempt.replaces }, now);
                }
            }
            Rollout::Loading(attempt) => {
                let wanted = self.deployments.get(&attempt.candidate).map_or(1, |entry| entry.spec.workers.max(1));
                if ready(self, attempt.candidate) >= wanted as usize {
                    self.rollout_event(RolloutEvent::Ready { of: attempt.candidate }, now);
                }
            }
            Rollout::Restoring { attempt, cleared: false, .. } => {
                let left = self.deployments.get(&attempt.candidate).is_none_or(|entry| entry.left);
                if left && gone(self, attempt.candidate) {
                    self.rollout_event(RolloutEvent::Gone { of: attempt.candidate }, now);
                }
            }
            Rollout::Restoring { attempt, cleared: true, .. } => {
                if ready(self, attempt.replaces) > 0 {
                    self.rollout_event(RolloutEvent::Ready { of: attempt.replaces }, now);
                }
            }
            Rollout::Soaking(attempt) => self.soak(&attempt, now),
            Rollout::Verifying(_) | Rollout::Probing(_) => {}
        }
        self.rollout_event(RolloutEvent::Tick, now);
    }

    fn soak(&mut self, attempt: &Attempt, now: Instant) {
        let Some(progress) = &mut self.rollouts.attempt else { return };
        if now < progress.soak_due {
            return;
        }
        progress.soak_due = now + SOAK_INTERVAL;
        let mut new = self.observed(attempt.candidate);
        let mut old = self.observed(attempt.replaces);
        let Some(progress) = &self.rollouts.attempt else { return };
        new.figures = new.figures.since(&progress.new_then.figures);
        new.nan_sequences -= progress.new_then.nan_sequences.min(new.nan_sequences);
        // Beside a canary the old one is measured in the same minutes, else in its life before.
        old.figures = match attempt.canary {
            Some(_) => old.figures.since(&progress.old_then),
            None => progress.old_then,
        };
        // Only answers of the candidate's own count against it.
        old.nan_sequences = 0;
        if let Some(reason) = soak::breach(&self.settings.soak, &old, &new) {
            self.rollout_event(RolloutEvent::Failed { of: attempt.candidate, reason }, now);
        }
    }

    pub(super) fn observed(&self, id: DeploymentId) -> Observed {
        let mut stats = StepStats::default();
        for (_, slot) in self.slots.range((id, 0)..=(id, u32::MAX)) {
            add_counters(&mut stats, &slot.base);
            if let Some(live) = &slot.live {
                add_counters(&mut stats, &live.stats);
            }
        }
        Observed {
            figures: self.requests.figures(id),
            nan_sequences: stats.nan_sequences,
            expert_tokens: stats.expert_tokens,
        }
    }

    /// A worker of a deployment was lost: a candidate is not given a second chance.
    pub(in crate::supervisor) fn candidate_lost_worker(&mut self, id: DeploymentId, reason: &str, now: Instant) {
        if self.rollouts.state.attempt().is_some_and(|attempt| attempt.candidate == id) {
            let reason = format!("one of its workers was lost: {reason}");
            self.rollout_event(RolloutEvent::Failed { of: id, reason }, now);
        }
    }
}
