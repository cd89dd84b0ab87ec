//! What a restart of the daemon finds: the record of what serves, written when a rollout completes, and the way on when the
//! revision that it names does not load any more.
//!
//! Part of the supervisor task; writing and reading run beside it and report back. Commits never overtake each other.

use super::rollouts::{Report, spec_of};
use super::stored::OpenedModel;
use super::{DeploymentRole, FleetEvent, Supervisor};
use crate::model_store::{Configured, Served, Serving};
use ernie_proto::ids::DeploymentId;
use tokio::time::Instant;

impl Supervisor {
    /// `id` replaced `replaced`; `now_configured` is what the configuration names, if this came from there.
    pub(super) fn commit(&mut self, id: DeploymentId, replaced: DeploymentId, now_configured: Option<Configured>) {
        let served = |id: DeploymentId| {
            self.deployments.get(&id).map(|entry| Served {
                dir: entry.spec.model_dir.clone(),
                revision: entry.spec.revision.clone(),
                served_names: entry.spec.served_names.clone(),
                unsealed: entry.spec.load.manifest.is_empty(),
            })
        };
        let (Some(current), previous) = (served(id), served(replaced)) else { return };
        self.rollouts.previous.clone_from(&previous);
        let Some((_, configured)) = &mut self.links else { return };
        if let Some(now_configured) = now_configured {
            *configured = now_configured;
        }
        let serving = Serving { current, previous, configured: configured.clone() };
        self.rollouts.next_commit = Some((id, serving));
        self.commit_next();
    }

    fn commit_next(&mut self) {
        if self.rollouts.committing {
            return;
        }
        let (Some((links, _)), Some((id, serving))) = (&self.links, self.rollouts.next_commit.take()) else { return };
        self.rollouts.committing = true;
        let (links, reports) = (links.clone(), self.reports.clone());
        tokio::spawn(async move {
            let committed = tokio::task::spawn_blocking(move || links.commit(&serving)).await;
            let committed = match committed {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(_) => Err("writing the record panicked".to_string()),
            };
            let _ = reports.send((id, Report::Committed(committed))).await;
        });
    }

    pub(super) fn committed(&mut self, of: DeploymentId, result: Result<(), String>) {
        if let Err(reason) = result {
            self.tell(FleetEvent::CommitFailed { deployment: of, reason });
        }
        self.rollouts.committing = false;
        self.commit_next();
    }

    /// After a start, the revision that served last does not load: tries the one before it. False: there is none to try.
    pub(super) fn fall_back(&mut self, failed: DeploymentId) -> bool {
        let never_served = self.deployments.values().all(|entry| entry.deployment.is_none());
        if !never_served || self.active != Some(failed) {
            return false;
        }
        let Some(previous) = self.rollouts.previous.take() else { return false };
        let (models, reports) = (self.models.clone(), self.reports.clone());
        tokio::spawn(async move {
            let opened = tokio::task::spawn_blocking(move || {
                let opened = models.open(&previous.dir, previous.unsealed)?;
                let (now, then) = (&opened.revision, &previous.revision);
                let is_it = now == then;
                is_it.then_some(()).ok_or_else(|| format!("it holds revision {now} now, not {then} that served"))?;
                Ok((Box::new(opened), previous.served_names))
            });
            let opened = opened.await.unwrap_or_else(|_| Err("reading the model panicked".to_string()));
            // Fails only when the supervisor is gone.
            let _ = reports.send((failed, Report::FellBack(opened))).await;
        });
        true
    }

    pub(super) fn fell_back(&mut self, failed: DeploymentId, result: Result<(Box<OpenedModel>, Vec<String>), String>) {
        let Some(entry) = self.deployments.get(&failed).filter(|_| self.leaving.is_none()) else { return };
        let (opened, served_names) = match result {
            Ok(opened) => opened,
            Err(reason) => return self.deployment_failed(failed, format!("nor does the one before it: {reason}")),
        };
        let mut spec = spec_of(&opened, &entry.spec);
        spec.served_names = served_names;
        let id = self.add_deployment(spec, DeploymentRole::Active);
        self.active = Some(id);
        self.retire(failed, Instant::now());
        self.want_workers(id);
        self.publish_routing();
        self.publish.at_once();
    }
}
