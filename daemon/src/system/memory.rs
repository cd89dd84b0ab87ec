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

/// Memory that can be had without swapping, as the kernel estimates it.
pub fn available_bytes() -> Option<u64> {
    procfs::Meminfo::current().ok().and_then(|m| m.mem_available)
}

/// The smallest `memory.max` from this process's cgroup up to the root.
fn cgroup_limit(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|l| l.strip_prefix("0::"))?;
    let mut smallest = None;
    let mut dir = root.join(own.trim_start_matches('/'));
    loop {
        let limit = std::fs::read_to_string(dir.join("memory.max")).ok().and_then(|t| t.trim().parse::<u64>().ok());
        smallest = match (smallest, limit) {
            (Some(a), Some(b)) => Some(std::cmp::min::<u64>(a, b)),
            (a, b) => a.or(b),
        };
        if dir == root || !dir.pop() {
            return smallest;
        }
    }
}

#[cfg(test)]
mod tests {
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
