//! How a deployment leaves: no new requests, the end of those it has, its workers, and then it is forgotten.

use crate::supervisor::publish::add_counters;
use crate::supervisor::{DeploymentRole, FleetEvent, Supervisor};
use ernie_proto::ids::DeploymentId;
use tokio::time::Instant;

impl Supervisor {
    /// Takes no new requests from `at` on; leaves when it has none.
    pub(in crate::supervisor) fn retire(&mut self, id: DeploymentId, at: Instant) {
        if let Some(entry) = self.deployments.get_mut(&id) {
            (entry.role, entry.leaves_at) = (DeploymentRole::Retiring, Some(at));
        }
    }

    /// Deployments that have ended what they began let their workers go, and are forgotten when these are gone.
    pub(super) fn let_retiring_leave(&mut self, now: Instant) {
        let leaving: Vec<_> = self
            .deployments
            .iter()
            .filter(|(_, entry)| entry.leaves_at.is_some_and(|at| at <= now))
            .map(|(id, entry)| (*id, entry.left))
            .collect();
        for (id, left) in leaving {
            if !left && self.requests.of_deployment(id) == 0 {
                if let Some(entry) = self.deployments.get_mut(&id) {
                    entry.left = true;
                }
                self.unwant_workers(id);
                self.publish.at_once();
            }
            let left = self.deployments.get(&id).is_some_and(|entry| entry.left);
            let gone = !self.slots.range((id, 0)..=(id, u32::MAX)).any(|(_, slot)| slot.live.is_some());
            let needed = self.rollouts.state.attempt().is_some_and(|a| a.candidate == id || a.replaces == id);
            if left && gone && !needed {
                self.forget(id);
            }
        }
    }

    fn forget(&mut self, id: DeploymentId) {
        let keys: Vec<_> = self.slots.range((id, 0)..=(id, u32::MAX)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(slot) = self.slots.remove(&key) {
                add_counters(&mut self.base, &slot.base);
            }
        }
        self.requests.forget_deployment(id);
        if let Some(entry) = self.deployments.remove(&id) {
            self.tell(FleetEvent::DeploymentRetired { deployment: id, revision: entry.spec.revision });
        }
        self.publish.at_once();
    }
}
