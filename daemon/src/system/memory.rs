//! Memory and processes as the kernel accounts them: `/proc` and the cgroup.

use procfs::process::Process;
use procfs::{Current, CurrentSI, WithCurrentSystemInfo};
use std::path::Path;

/// Figures of one process at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessFigures {
    pub resident_bytes: u64,
    pub virtual_bytes: u64,
    pub cpu_seconds: f64,
    pub threads: i64,
    /// Seconds since 1970. `None`: the boot time can not be read.
    pub started_unix: Option<f64>,
}

/// `None` when the process is gone.
pub fn process(pid: u32) -> Option<ProcessFigures> {
    let stat = Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()?;
    let ticks = procfs::ticks_per_second() as f64;
    let booted = procfs::KernelStats::current().ok().map(|k| k.btime as f64);
    Some(ProcessFigures {
        resident_bytes: stat.rss_bytes().get(),
        virtual_bytes: stat.vsize,
        cpu_seconds: (stat.utime + stat.stime) as f64 / ticks,
        threads: stat.num_threads,
        started_unix: booted.map(|b| b + stat.starttime as f64 / ticks),
    })
}

/// Open descriptors of this process, and the most it may have.
pub fn descriptors() -> (i64, i64) {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.count().saturating_sub(1));
    let max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    (i64::try_from(open).unwrap_or(0), i64::try_from(max).unwrap_or(i64::MAX))
}

/// Memory this process and its children may use: the smallest limit of its cgroups, or the machine's memory.
pub fn limit_bytes() -> Option<u64> {
    let machine = procfs::Meminfo::current().ok().map(|m| m.mem_total);
    match (cgroup_limit(Path::new("/sys/fs/cgroup")), machine) {
        (Some(cgroup), Some(machine)) => Some(cgroup.min(machine)),
        (cgroup, machine) => cgroup.or(machine),
    }
}

/// Memory that can be had without swapping: as the kernel estimates it for the machine, or what the cgroups leave, if that is
/// less.
pub fn available_bytes() -> Option<u64> {
    let machine = procfs::Meminfo::current().ok().and_then(|m| m.mem_available);
    let cgroup = std::fs::read_to_string("/proc/self/cgroup").ok();
    let cgroup = cgroup.and_then(|own| smallest(Path::new("/sys/fs/cgroup"), &own, Version::left));
    machine.into_iter().chain(cgroup).min()
}

/// The smallest limit of this process's cgroups, those above included.
fn cgroup_limit(mount: &Path) -> Option<u64> {
    smallest(mount, &std::fs::read_to_string("/proc/self/cgroup").ok()?, Version::limit)
}

/// How a version of cgroups names its files.
struct Version {
    limit: &'static str,
    used: &'static str,
    /// In `memory.stat`: file pages that the kernel takes back first.
    inactive_file: &'static str,
}

const V1: Version =
    Version { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", inactive_file: "total_inactive_file " };
const V2: Version = Version { limit: "memory.max", used: "memory.current", inactive_file: "inactive_file " };

impl Version {
    fn limit(&self, dir: &Path) -> Option<u64> {
        std::fs::read_to_string(dir.join(self.limit)).ok()?.trim().parse().ok()
    }

    /// What is left below the limit.
    fn left(&self, dir: &Path) -> Option<u64> {
        let used: u64 = std::fs::read_to_string(dir.join(self.used)).ok()?.trim().parse().ok()?;
        let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let inactive = stat.lines().find_map(|l| l.strip_prefix(self.inactive_file)?.trim().parse::<u64>().ok());
        Some(self.limit(dir)?.saturating_sub(used.saturating_sub(inactive.unwrap_or(0))))
    }
}

/// The smallest of what `read` finds from this process's cgroups up to the root. `own`: `/proc/self/cgroup`. Version 2 has one
/// hierarchy, version 1 one of its own for memory; a machine may have both.
fn smallest(mount: &Path, own: &str, read: fn(&Version, &Path) -> Option<u64>) -> Option<u64> {
    let found = own.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, version) = match controllers {
            "" => (mount.to_owned(), V2),
            _ if controllers.split(',').any(|c| c == "memory") => (mount.join("memory"), V1),
            _ => return None,
        };
        // In a container the path may be one of the host: what is not there is passed by.
        let dir = root.join(path.trim_start_matches('/'));
        dir.ancestors().take_while(|dir| dir.starts_with(&root)).filter_map(|dir| read(&version, dir)).min()
    });
    found.min()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_smallest_limit_on_the_way_up_counts_in_both_versions() {
        let mount = tempfile::tempdir().expect("a folder");
        let limit = |path: &str, value: &str| {
            let file = mount.path().join(path);
            std::fs::create_dir_all(file.parent().expect("in the mount")).expect("made");
            std::fs::write(file, format!("{value}\n")).expect("written");
        };
        let smallest = |own: &str| super::smallest(mount.path(), own, super::Version::limit);
        assert_eq!(smallest("0::/a/b\n"), None);
        limit("a/memory.max", "500");
        limit("a/b/memory.max", "max");
        assert_eq!(smallest("0::/a/b\n"), Some(500));
        assert_eq!(smallest("0::/else\n"), None);
        limit("memory/memory.limit_in_bytes", "9223372036854771712");
        limit("memory/c/memory.limit_in_bytes", "400");
        limit("memory/c/d/memory.limit_in_bytes", "450");
        let both = "9:name=systemd:/\n5:cpu,cpuacct:/c\n4:memory:/c/d\n0::/a/b\n";
        assert_eq!(smallest(both), Some(400));
        assert_eq!(smallest("4:memory:/on/the/host\n"), Some(9_223_372_036_854_771_712), "the container's own root");
        limit("memory/c/d/memory.usage_in_bytes", "300");
        limit("memory/c/d/memory.stat", "inactive_file 1\ntotal_inactive_file 120");
        assert_eq!(super::smallest(mount.path(), both, super::Version::left), Some(450 - 300 + 120));
    }

    #[test]
    fn this_process_has_memory_and_threads() {
        let me = super::process(std::process::id()).expect("alive");
        assert!(me.resident_bytes > 0 && me.threads > 0 && me.started_unix.expect("btime") > 1.0e9, "{me:?}");
        assert!(super::limit_bytes().expect("limit") > 1 << 20);
    }

    #[test]
    fn a_process_that_is_not_there_has_no_figures() {
        assert_eq!(super::process(u32::MAX / 2 - 7), None);
    }
}
