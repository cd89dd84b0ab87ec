//! What happens in the fleet, as metrics and audit rows: one event, one place.

use crate::audit::AuditHandle;
use crate::supervisor::{FleetEvent, FleetObserver};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::recorder::Recorder;
use ernie_proto::ids::WorkerId;
use ernie_proto::worker::StepStats;
use serde_json::json;
use std::sync::Arc;

pub(super) fn observers(
    metrics: &Arc<Metrics>,
    audit: &AuditHandle,
    recorder: &Arc<Recorder>,
) -> Vec<Arc<dyn FleetObserver>> {
    vec![
        Arc::new(ToMetrics(Arc::clone(metrics))),
        Arc::new(ToAudit(audit.clone())),
        Arc::new(ToRecorder(Arc::clone(recorder))),
    ]
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
            FleetEvent::DeploymentActivated { .. } => self.0.deployment_activated(),
            FleetEvent::RolloutBegan { .. } => self.0.rollout_state("verifying"),
            FleetEvent::RolloutPhase { phase, .. } => self.0.rollout_state(phase.as_str()),
            FleetEvent::RolloutCompleted { cut_over, .. } => {
                self.0.rollout_state("steady");
                self.0.rollout_ended(true);
                if let Some(cut_over) = cut_over {
                    self.0.swap_cutover(cut_over.pause);
                }
            }
            FleetEvent::RolledBack { .. } => {
                self.0.rollout_state("steady");
                self.0.rollout_ended(false);
            }
            FleetEvent::WorkerSpawned { .. }
            | FleetEvent::WorkerReady { .. }
            | FleetEvent::RestartScheduled { .. }
            | FleetEvent::CrashLoopEntered { .. }
            | FleetEvent::CrashLoopLeft { .. }
            | FleetEvent::StepFailed { .. }
            | FleetEvent::RequestPoisonous { .. }
            | FleetEvent::DeploymentRetired { .. }
            | FleetEvent::DeploymentFailed { .. }
            | FleetEvent::CommitFailed { .. }
            | FleetEvent::Draining { .. }
            | FleetEvent::Drained { .. }
            | FleetEvent::Resumed => {}
        }
    }

    fn step(&self, slot: u32, worker: WorkerId, stats: &StepStats) {
        for (layer, steps) in self.0.step(slot, worker, stats) {
            // The words are those that the owner's documents grep for.
            tracing::warn!(engine = slot, layer, steps, "Warning: MoE layer has 0 active experts");
        }
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
            FleetEvent::Resumed => self.0.event("daemon.resumed", "", json!({})),
            FleetEvent::WorkerSpawned { .. }
            | FleetEvent::WorkerReady { .. }
            | FleetEvent::WorkerStopped { .. }
            | FleetEvent::RestartScheduled { .. }
            | FleetEvent::StepFailed { .. }
            | FleetEvent::RequestsResumed { .. } => {}
        }
    }
}

struct ToRecorder(Arc<Recorder>);

impl ToRecorder {
    /// Writes down what led to a loss, off the supervisor's task.
    fn lost(&self, worker: WorkerId, reason: &str) {
        let Some(flight) = self.0.flight_of_loss(worker, reason) else { return };
        let recorder = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || match recorder.write(&flight) {
            Ok(path) => {
                let path = path.display();
                tracing::warn!(%worker, "flight written; `ernie-ctl debug explain {path}` tells its story");
            }
            Err(e) => tracing::error!(%worker, "{e}"),
        });
    }
}

impl FleetObserver for ToRecorder {
    fn on(&self, event: &FleetEvent) {
        let note = |kind, worker, text: String| self.0.event(kind, worker, text);
        match event {
            FleetEvent::WorkerSpawned { worker, deployment, slot, pid } => {
                self.0.worker_began(*worker, *pid);
                note("worker.started", Some(*worker), format!("process {pid} for slot {slot} of {deployment}"));
            }
            FleetEvent::WorkerReady { worker, elapsed, .. } => {
                note("worker.ready", Some(*worker), format!("after {:.2} s", elapsed.as_secs_f64()));
            }
            FleetEvent::WorkerLost { worker, failure, .. } => {
                self.0.worker_gone(*worker);
                note("worker.lost", Some(*worker), failure.reason.clone());
                self.lost(*worker, &failure.reason);
            }
            FleetEvent::WorkerStopped { worker, .. } => {
                self.0.worker_gone(*worker);
                note("worker.stopped", Some(*worker), "as asked".to_owned());
            }
            FleetEvent::RestartScheduled { slot, wait, .. } => {
                note("worker.restart", None, format!("slot {slot} starts again in {} ms", wait.as_millis()));
            }
            FleetEvent::CrashLoopEntered { slot, deaths, .. } => {
                note("worker.crash_loop", None, format!("slot {slot} after {deaths} deaths"));
            }
            FleetEvent::CrashLoopLeft { slot, .. } => note("worker.crash_loop_left", None, format!("slot {slot}")),
            FleetEvent::StepFailed { worker, message } => note("step.failed", Some(*worker), message.clone()),
            FleetEvent::RequestsResumed { worker, requests } => {
                note("requests.resumed", Some(*worker), format!("{requests} requests go on elsewhere"));
            }
            FleetEvent::RequestPoisonous { request, deaths } => {
                note("request.poisonous", None, format!("{request} given up after {deaths} deaths"));
            }
            FleetEvent::DeploymentActivated { deployment, revision, .. } => {
                note("deployment.activated", None, format!("{deployment}, revision {revision}"));
            }
            FleetEvent::DeploymentRetired { deployment, .. } => {
                note("deployment.retired", None, deployment.to_string())
            }
            FleetEvent::DeploymentFailed { deployment, reason } => {
                note("deployment.failed", None, format!("{deployment}: {reason}"));
            }
            FleetEvent::RolloutBegan { deployment, strategy, .. } => {
                note("rollout.began", None, format!("{deployment}, {strategy}"));
            }
            FleetEvent::RolloutPhase { deployment, phase, detail } => {
                note("rollout.phase", None, format!("{deployment} {phase}: {detail}"));
            }
            FleetEvent::RolloutCompleted { deployment, .. } => note("rollout.completed", None, deployment.to_string()),
            FleetEvent::CommitFailed { reason, .. } => note("rollout.commit_failed", None, reason.clone()),
            FleetEvent::RolledBack { reason, .. } => note("rollout.rolled_back", None, reason.clone()),
            FleetEvent::Draining { requests, .. } => note("daemon.draining", None, format!("{requests} requests run")),
            FleetEvent::Drained { finished, failed } => {
                note("daemon.drained", None, format!("{finished} finished, {failed} failed"));
            }
            FleetEvent::Resumed => note("daemon.resumed", None, String::new()),
        }
    }

    fn step(&self, slot: u32, worker: WorkerId, stats: &StepStats) {
        self.0.step(slot, worker, stats);
    }
}
