//! The model that the configuration names: rolled out when the configuration names another one, or when another revision
//! lies in its folder. A reload asks for it; with `rollout.watch` so does a change on disk (`watcher`).

use super::error::AdminError;
use super::models::refusal;
use super::{Caller, Control, Verb};
use crate::config::{Config, ModelSource};
use crate::model_store::{Configured, revision_on_disk};
use crate::supervisor::{FleetStatus, RolloutResult, Strategy, SwapRequest};
use ernie_proto::ids::DeploymentId;
use std::sync::Arc;

/// What a look at the configured model led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Followed {
    /// It serves, or something was swapped in its place since.
    Unchanged,
    /// Its rollout has begun.
    Began(DeploymentId),
    /// It can not be rolled out: a sentence.
    Not(String),
}

impl Control {
    /// What the configuration names, as it lies on the disk now; reads the manifest.
    pub(super) async fn configured_now(&self, config: &Config) -> Result<Configured, AdminError> {
        let base = self.configured.borrow().clone();
        let (source, served_names) = (config.model.source.clone(), config.model.served_names.clone());
        let look = move || {
            let dir = match source {
                ModelSource::Dir(dir) => dir.canonicalize().unwrap_or(dir),
                // Unpacked at the start; it never changes while we live.
                ModelSource::Demo => base.dir,
            };
            Configured { revision: revision_on_disk(&dir), dir, served_names }
        };
        tokio::task::spawn_blocking(look).await.map_err(|_| AdminError::unavailable("looking at the model panicked"))
    }

    /// Whether this is another model than the one that the configuration named when it last had its way.
    pub(super) fn is_news(&self, now: &Configured) -> bool {
        let base = self.configured.borrow();
        (&now.dir, &now.revision) != (&base.dir, &base.revision)
    }

    /// Rolls the configured model out if it is another one now.
    pub(super) async fn follow_model(self: &Arc<Self>, caller: &Caller) -> Result<Followed, AdminError> {
        let now = self.configured_now(&self.config()).await?;
        if !self.is_news(&now) {
            return Ok(Followed::Unchanged);
        }
        let dir = now.dir.display().to_string();
        match &now.revision {
            None => {
                return Ok(Followed::Not(format!(
                    "{dir} is no model folder that can be read; complete it and seal it"
                )));
            }
            Some(revision) if revision.starts_with("unsealed-") => {
                let what =
                    format!("{dir} is not sealed; `ernie-ctl model seal {dir}` when it is complete, then reload");
                return Ok(Followed::Not(what));
            }
            Some(_) => {}
        }
        let detail = serde_json::json!({ "model_dir": now.dir, "revision": now.revision, "why": "configuration" });
        let act = self.act(caller, Verb::Swap, &dir, detail).await?;
        let request = SwapRequest {
            model_dir: now.dir.clone(),
            served_names: Some(now.served_names.clone()),
            strategy: Strategy::Auto,
            observe: self.config().rollout.observe,
            canary: None,
            force_unsealed: false,
            revision: now.revision.clone(),
            configured: Some(now.clone()),
        };
        let begun = self.fleet.swap(request).await;
        let outcome = begun.as_ref().map(|id| serde_json::json!({ "deployment": id.to_string() }));
        act.finish(outcome.map_err(ToString::to_string)).await;
        let id = begun.map_err(refusal)?;
        let control = Arc::clone(self);
        tokio::spawn(async move {
            if control.completes(id).await {
                control.configured.send_replace(now);
            }
        });
        Ok(Followed::Began(id))
    }

    /// Waits for the end of a rollout; whether its model serves now.
    pub(super) async fn completes(&self, id: DeploymentId) -> bool {
        let mut watch = self.fleet.watch();
        // A later one that has ended tells as much: rollouts come one after the other.
        let over = |status: &Arc<FleetStatus>| status.rollout.last.as_ref().is_some_and(|last| last.candidate >= id);
        match watch.wait_for(over).await {
            Ok(status) => {
                let last = status.rollout.last.as_ref().filter(|last| last.candidate == id);
                last.is_some_and(|last| last.result == RolloutResult::Completed)
            }
            Err(_) => false,
        }
    }
}
