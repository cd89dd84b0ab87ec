//! A deployment: one model, at one revision, loaded in one or more workers.
//!
//! [`DeploymentSpec`] is the wish, [`Deployment`] the loaded thing that requests name. Both are plain data; the supervisor
//! owns what changes.

use crate::text::TextModel;
use ernie_proto::ids::DeploymentId;
use ernie_proto::worker::{Load, Loaded};
use std::path::PathBuf;
use std::sync::Arc;

/// What is to be loaded, and how.
#[derive(Debug, Clone)]
pub struct DeploymentSpec {
    /// First is the name. Never empty.
    pub served_names: Vec<String>,
    /// SHA-256 of the manifest, or a stand-in for an unsealed model.
    pub revision: String,
    pub model_dir: PathBuf,
    pub text: Arc<TextModel>,
    /// Sent to every worker; `load.model_dir` is set from `model_dir`.
    pub load: Load,
    /// Worker processes that serve it. At least 1.
    pub workers: u32,
}

/// A model that is loaded and may be asked.
#[derive(Debug)]
pub struct Deployment {
    pub id: DeploymentId,
    /// First is the name.
    pub served_names: Vec<String>,
    pub revision: String,
    pub model_dir: PathBuf,
    pub text: Arc<TextModel>,
    pub loaded: Loaded,
    /// Unix time in seconds.
    pub created: u64,
}

impl Deployment {
    /// The name answers carry.
    pub fn name(&self) -> &str {
        self.served_names.first().map_or("", String::as_str)
    }
}

/// Where new requests go at this instant.
#[derive(Debug, Clone, Default)]
pub struct Routing {
    pub active: Option<Arc<Deployment>>,
    /// A candidate that takes a share of the requests, in parts per 10 000 of all keys.
    pub canary: Option<(Arc<Deployment>, u32)>,
    /// Why there is no active deployment: requests may wait for one, or are refused.
    pub absent: Absent,
}

/// What the absence of an active deployment means.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Absent {
    /// One is coming: the first load, or a stop-first switch.
    #[default]
    Coming,
    /// None will come by itself.
    Failed(String),
    /// The daemon is going away.
    Draining,
}

impl Routing {
    /// The deployment for a request of `key` (API key or user): the same key gets the same side during a canary.
    pub fn pick(&self, key: Option<&str>) -> Option<&Arc<Deployment>> {
        match (&self.canary, key) {
            (Some((canary, share)), Some(key)) if stable_share(key) < *share => Some(canary),
            _ => self.active.as_ref(),
        }
    }
}

/// A key's place in 0..10 000, the same in every process (FNV-1a, then mixed: short keys differ in few bits).
fn stable_share(key: &str) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in key.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    ((hash >> 32) % 10_000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_place_and_keys_spread_evenly() {
        assert_eq!(stable_share("alice"), stable_share("alice"));
        let low = (0..10_000).filter(|i| stable_share(&format!("key-{i}")) < 1_000).count();
        assert!((850..1_150).contains(&low), "{low} of 10000 keys fall into a tenth");
    }
}
