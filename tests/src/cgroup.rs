//! A cgroup with a memory limit of its own, where the system lets this user make one.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Files of one version of cgroups.
#[derive(Debug, Clone, Copy)]
struct Version {
    limit: &'static str,
    peak: &'static str,
    /// Holds a line `oom_kill N`.
    events: &'static str,
}

const V1: Version =
    Version { limit: "memory.limit_in_bytes", peak: "memory.max_usage_in_bytes", events: "memory.oom_control" };
const V2: Version = Version { limit: "memory.max", peak: "memory.peak", events: "memory.events" };

/// Removed when dropped; whoever runs in it has to be gone by then.
#[derive(Debug)]
pub struct MemoryCgroup {
    dir: PathBuf,
    version: Version,
}

impl MemoryCgroup {
    /// `None`, with the reason, where none can be had: it needs root, and a hierarchy with the memory controller.
    pub fn with_limit(bytes: u64) -> std::result::Result<MemoryCgroup, String> {
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|e| format!("/proc/self/cgroup: {e}"))?;
        let mut reasons = Vec::new();
        for line in own.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            let (root, version) = match controllers {
                "" => ("/sys/fs/cgroup", V2),
                _ if controllers.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", V1),
                _ => continue,
            };
            let above = Path::new(root).join(path.trim_start_matches('/'));
            match Self::below(&above, version, bytes) {
                Ok(cgroup) => return Ok(cgroup),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(if reasons.is_empty() { "there is no memory controller".to_owned() } else { reasons.join("; ") })
    }

    fn below(above: &Path, version: Version, bytes: u64) -> std::result::Result<MemoryCgroup, String> {
        let dir = above.join(format!("ernied-test-{}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let cgroup = MemoryCgroup { dir, version };
        let limit = cgroup.dir.join(version.limit);
        // The controller may be missing in this part of the hierarchy; then the file is too.
        match limit.exists() {
            true => std::fs::write(&limit, bytes.to_string()).map_err(|e| format!("{}: {e}", limit.display()))?,
            false => return Err(format!("{}: no memory controller here", cgroup.dir.display())),
        }
        Ok(cgroup)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The most that was in use at once.
    pub fn peak_bytes(&self) -> Result<u64> {
        Ok(self.read(self.version.peak)?.trim().parse()?)
    }

    /// Processes that the kernel killed for memory.
    pub fn oom_kills(&self) -> Result<u64> {
        let events = self.read(self.version.events)?;
        let line = events.lines().find_map(|l| l.strip_prefix("oom_kill ")).context("no count of kills")?;
        Ok(line.trim().parse()?)
    }

    fn read(&self, file: &str) -> Result<String> {
        std::fs::read_to_string(self.dir.join(file)).with_context(|| format!("{}/{file}", self.dir.display()))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}
