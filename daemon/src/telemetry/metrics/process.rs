//! `process_*` as every Prometheus client prints it, for the daemon process itself.

use super::families::Families;
use crate::system::memory;
use prometheus::{Counter, Gauge, IntGauge};

#[derive(Debug)]
pub(super) struct Process {
    cpu: Counter,
    resident: IntGauge,
    virtual_memory: IntGauge,
    open_fds: IntGauge,
    max_fds: IntGauge,
    start_time: Gauge,
    threads: IntGauge,
}

impl Process {
    pub(super) fn new(f: &Families) -> Self {
        Self {
            cpu: f
                .counter_f64("process_cpu_seconds_total", "User and system time of the daemon, workers not included."),
            resident: f.int_gauge("process_resident_memory_bytes", "Resident memory of the daemon."),
            virtual_memory: f.int_gauge("process_virtual_memory_bytes", "Virtual memory of the daemon."),
            open_fds: f.int_gauge("process_open_fds", "Open file descriptors of the daemon."),
            max_fds: f.int_gauge("process_max_fds", "Most file descriptors the daemon may open."),
            start_time: f.gauge("process_start_time_seconds", "Start of the daemon in seconds since 1970."),
            threads: f.int_gauge("process_threads", "Threads of the daemon."),
        }
    }

    pub(super) fn refresh(&self) {
        let Some(me) = memory::process(std::process::id()) else { return };
        self.cpu.inc_by((me.cpu_seconds - self.cpu.get()).max(0.0));
        self.resident.set(i64::try_from(me.resident_bytes).unwrap_or(i64::MAX));
        self.virtual_memory.set(i64::try_from(me.virtual_bytes).unwrap_or(i64::MAX));
        self.threads.set(me.threads);
        if let Some(started) = me.started_unix {
            self.start_time.set(started);
        }
        let (open, max) = memory::descriptors();
        self.open_fds.set(open);
        self.max_fds.set(max);
    }
}
