//! What happens in the fleet, as metrics and audit rows: one event, one place.

use crate::audit::AuditHandle;
use crate::supervisor::{FleetEvent, FleetObserver};
use crate::telemetry::metrics::Metrics;
use ernie_proto::ids::WorkerId;
use ernie_proto::worker::StepStats;
use serde_json::json;
use std::sync::Arc;

pub(super) fn observers(metrics: &Arc<Metrics>, audit: &AuditHandle) -> Vec<Arc<dyn FleetObserver>> {
    vec![Arc::new(ToMetrics(Arc::clone(metrics))), Arc::new(ToAudit(audit.clone()))]
}

struct ToMetrics(Arc<Metrics>);

impl FleetObserver for ToMetrics {
    fn on(&self, event: &FleetEvent) {
        match event {
            FleetEvent::WorkerLost { worker, slot, .. } => {
                self.0.worker_gone(*worker);
                self.0.worker_restarted(*slot);
            }
            FleetEvent::WorkerStopped { worker, .. } => self.0.worker_gone(*worker),
            FleetEvent::RequestsResumed { requests, .. } => self.0.requests_resumed(*requests as u64),
            FleetEvent::RolloutBegan { .. } => self.0.rollout_state("verifying"),
            FleetEvent::RolloutPhase { phase, .. } => self.0.rollout_state(phase.as_str()),
            FleetEvent::RolloutCompleted { .. } | FleetEvent::RolledBack { .. } => self.0.rollout_state("steady"),
            FleetEvent::WorkerSpawned { .. }
            | FleetEvent::WorkerReady { .. }
            | FleetEvent::RestartScheduled { .. }
            | FleetEvent::CrashLoopEntered { .. }
            | FleetEvent::CrashLoopLeft { .. }
            | FleetEvent::StepFailed { .. }
            | FleetEvent::RequestPoisonous { .. }
            | FleetEvent::DeploymentActivated { .. }
            | FleetEvent::DeploymentRetired { .. }
            | FleetEvent::DeploymentFailed { .. }
            | FleetEvent::CommitFailed { .. }
            | FleetEvent::Draining { .. }
            | FleetEvent::Drained { .. } => {}
        }
    }

    fn step(&self, slot: u32, worker: WorkerId, stats: &StepStats) {
        self.0.step(slot, worker, stats);
    }
}

struct ToAudit(AuditHandle);

impl FleetObserver for ToAudit {
    fn on(&self, event: &FleetEvent) {
        match event {
            FleetEvent::WorkerLost { worker, slot, failure, .. } => self.0.event(
                "worker.lost",
                &worker.to_string(),
                json!({ "slot": slot, "reason": failure.reason, "stderr": failure.stderr }),
            ),
            FleetEvent::CrashLoopEntered { deployment, slot, deaths } => {
                self.0.event("worker.crash_loop", &deployment.to_string(), json!({ "slot": slot, "deaths": deaths }));
            }
            FleetEvent::CrashLoopLeft { deployment, slot } => {
                self.0.event("worker.crash_loop_left", &deployment.to_string(), json!({ "slot": slot }));
            }
            FleetEvent::RequestPoisonous { request, deaths } => {
                self.0.event("request.poisonous", &request.to_string(), json!({ "deaths": deaths }));
            }
            FleetEvent::DeploymentActivated { deployment, revision, replaces } => self.0.event(
                "deployment.activated",
                &deployment.to_string(),
                json!({ "revision": revision, "replaces": replaces.map(|r| r.to_string()) }),
            ),
            FleetEvent::DeploymentRetired { deployment, revision } => {
                self.0.event("deployment.retired", &deployment.to_string(), json!({ "revision": revision }));
            }
            FleetEvent::DeploymentFailed { deployment, reason } => {
                self.0.event("deployment.failed", &deployment.to_string(), json!({ "reason": reason }));
            }
            FleetEvent::RolloutBegan { deployment, model_dir, strategy } => self.0.event(
                "rollout.began",
                &deployment.to_string(),
                json!({ "model_dir": model_dir, "strategy": strategy }),
            ),
            FleetEvent::RolloutPhase { deployment, phase, detail } => self.0.event(
                "rollout.phase",
                &deployment.to_string(),
                json!({ "phase": phase.as_str(), "detail": detail }),
            ),
            FleetEvent::RolloutCompleted { deployment, revision, elapsed, cut_over, requests } => self.0.event(
                "rollout.completed",
                &deployment.to_string(),
                json!({
                    "revision": revision,
                    "seconds": elapsed.as_secs_f64(),
                    "cut_over_seconds": cut_over.map(|c| c.pause.as_secs_f64()),
                    "requests_old": requests.old,
                    "requests_new": requests.new,
                    "requests_failed": requests.failed,
                }),
            ),
            FleetEvent::CommitFailed { deployment, reason } => {
                self.0.event("rollout.commit_failed", &deployment.to_string(), json!({ "reason": reason }));
            }
            FleetEvent::RolledBack { deployment, revision, reason, restored } => self.0.event(
                "rollout.rolled_back",
                &deployment.to_string(),
                json!({ "revision": revision, "reason": reason, "restored": restored }),
            ),
            FleetEvent::Draining { requests, .. } => {
                self.0.event("daemon.draining", "", json!({ "requests": requests }))
            }
            FleetEvent::Drained { finished, failed } => {
                self.0.event("daemon.drained", "", json!({ "finished": finished, "failed": failed }));
            }
            FleetEvent::WorkerSpawned { .. }
            | FleetEvent::WorkerReady { .. }
            | FleetEvent::WorkerStopped { .. }
            | FleetEvent::RestartScheduled { .. }
            | FleetEvent::StepFailed { .. }
            | FleetEvent::RequestsResumed { .. } => {}
        }
    }
}
