//! The `ernied_` families: what vLLM's names can not say.

use super::families::Families;
use super::{FleetFigures, MetricsSetup, RequestFigures};
use ernie_proto::worker::{DiskStats, LoadPhase, StepStats};
use prometheus::{CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec};

/// Fine enough for a 0.3B model on a quick device: 0.5 ms and up.
const FINE: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
];
const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
const CUTOVER: &[f64] = &[0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0];

/// Words of `ernied_key_refusals_total{reason}`; anything else is `other`.
const KEY_REFUSALS: &[&str] = &["missing", "unknown", "expired", "revoked", "limit", "model", "other"];
/// Words of `ernied_rollout_state{state}`.
const ROLLOUT_STATES: &[&str] = &["steady", "verifying", "clearing", "loading", "probing", "soaking", "restoring"];
const LOAD_PHASES: [(LoadPhase, &str); 4] = [
    (LoadPhase::Open, "open"),
    (LoadPhase::Weights, "weights"),
    (LoadPhase::Allocate, "allocate"),
    (LoadPhase::WarmUp, "warm_up"),
];

#[derive(Debug)]
pub(super) struct Own {
    pub(super) time_to_first_token: Histogram,
    pub(super) inter_token_latency: Histogram,
    queue_wait: Histogram,
    step: HistogramVec,
    batch: HistogramVec,
    budget_used: GaugeVec,
    kv_blocks: GaugeVec,
    swap_blocks: GaugeVec,
    swapped: IntCounterVec,
    swap_file_bytes: GaugeVec,
    swap_file_blocks: IntCounterVec,
    swap_file_seconds: CounterVec,
    swap_file_errors: IntCounterVec,
    preemptions: IntCounterVec,
    memory: GaugeVec,
    memory_limit: Gauge,
    load: GaugeVec,
    build: GaugeVec,
    deployment: GaugeVec,
    revision_requests: GaugeVec,
    canary_share: Gauge,
    ready: Gauge,
    draining: Gauge,
    uptime: Gauge,
    in_flight: Gauge,
    worker_up: GaugeVec,
    worker_restarts: IntCounterVec,
    worker_resident: GaugeVec,
    worker_cpu: GaugeVec,
    last_step_age: GaugeVec,
    pub(super) requests_resumed: IntCounter,
    pub(super) audit_writes: [IntCounter; 2],
    pub(super) usage_dropped: IntCounter,
    pub(super) log_dropped: IntCounter,
    key_refusals: IntCounterVec,
    rollout: GaugeVec,
    pub(super) rollouts: [IntCounter; 2],
    worker_stalls: IntCounter,
    pub(super) swap_cutover: Histogram,
    engines: u32,
}

impl Own {
    pub(super) fn new(f: &Families, setup: &MetricsSetup) -> Self {
        let audit = f.counters(
            "ernied_audit_writes_total",
            "Rows written to the audit store, by outcome. Any error means that administration is refused until it is mended.",
            &["outcome"],
        );
        let rollouts =
            f.counters("ernied_rollouts_total", "Model swaps that came to their end, by outcome.", &["outcome"]);
        let own = Self {
            time_to_first_token: f.histogram(
                "ernied_time_to_first_token_seconds",
                "Arrival of a request to its first token, in fine buckets.",
                FINE,
            ),
            inter_token_latency: f.histogram(
                "ernied_inter_token_latency_seconds",
                "Time between two tokens of an answer, in fine buckets.",
                FINE,
            ),
            queue_wait: f.histogram(
                "ernied_queue_wait_seconds",
                "Time between a request's arrival and its first step, in fine buckets.",
                FINE,
            ),
            step: f.histograms("ernied_step_seconds", "Duration of one engine step.", &["engine"], FINE),
            batch: f.histograms("ernied_batch_sequences", "Sequences in a step.", &["engine"], BATCH),
            budget_used: f.gauges(
                "ernied_token_budget_used_ratio",
                "Tokens of the last step over the most a step may hold (max_num_batched_tokens).",
                &["engine"],
            ),
            kv_blocks: f.gauges(
                "ernied_kv_blocks",
                "KV blocks by state. cached: free, but still holding a prefix that may be hit.",
                &["engine", "state"],
            ),
            swap_blocks: f.gauges("ernied_swap_blocks", "Blocks of swap space by state.", &["engine", "state"]),
            swapped: f.counters(
                "ernied_swapped_blocks_total",
                "KV blocks moved between memory and swap space.",
                &["engine", "direction"],
            ),
            swap_file_bytes: f.gauges(
                "ernied_swap_file_bytes",
                "Bytes of the swap file by state.",
                &["engine", "state"],
            ),
            swap_file_blocks: f.counters(
                "ernied_swap_file_blocks_total",
                "KV blocks read from and written to the swap file. skipped: not written, the disk was too slow.",
                &["engine", "operation"],
            ),
            swap_file_seconds: f.float_counters(
                "ernied_swap_file_seconds_total",
                "Seconds that reads and writes of the swap file took.",
                &["engine", "operation"],
            ),
            swap_file_errors: f.counters(
                "ernied_swap_file_checksum_errors_total",
                "Blocks of the swap file that did not read back as written, and were computed again.",
                &["engine"],
            ),
            preemptions: f.counters(
                "ernied_preemptions_total",
                "Sequences taken out of the batch, by what happens to their KV.",
                &["engine", "kind"],
            ),
            memory: f.gauges(
                "ernied_memory_bytes",
                "Memory of a worker by use. other: resident memory that is none of the named parts.",
                &["engine", "part"],
            ),
            memory_limit: f.gauge(
                "ernied_memory_limit_bytes",
                "Memory this daemon and its workers may use: the cgroup's limit, or the machine's memory.",
            ),
            load: f.gauges("ernied_load_seconds", "Seconds the last load took, by phase.", &["engine", "phase"]),
            build: f.gauges(
                "ernied_build_info",
                "Version and instruction set as labels; always 1.",
                &["version", "isa"],
            ),
            deployment: f.gauges(
                "ernied_deployment_info",
                "Revision that serves, as a label; always 1.",
                &["model_name", "revision"],
            ),
            revision_requests: f.gauges(
                "ernied_revision_requests",
                "Requests of each loaded model since it was loaded, by what became of them. Goes away with the model.",
                &["revision", "role", "state"],
            ),
            canary_share: f.gauge(
                "ernied_canary_share",
                "Share of the keys that go to a model under observation; 0 without a canary.",
            ),
            ready: f.gauge("ernied_ready", "1 while a deployment serves and makes progress."),
            draining: f.gauge("ernied_draining", "1 while the daemon takes no new work and finishes what it has."),
            uptime: f.gauge("ernied_uptime_seconds", "Seconds since the daemon started."),
            in_flight: f.gauge("ernied_requests_in_flight", "Requests taken on and not yet ended."),
            worker_up: f.gauges("ernied_worker_up", "1 while the worker in this slot serves.", &["engine"]),
            worker_restarts: f.counters(
                "ernied_worker_restarts_total",
                "Times the worker in this slot died or stalled and was started again.",
                &["engine"],
            ),
            worker_resident: f.gauges("ernied_worker_resident_bytes", "Resident memory of the worker.", &["engine"]),
            worker_cpu: f.gauges(
                "ernied_worker_cpu_seconds",
                "User and system time of the worker process that runs now (falls when it is replaced).",
                &["engine"],
            ),
            last_step_age: f.gauges(
                "ernied_last_step_age_seconds",
                "Seconds since the worker last showed progress.",
                &["engine"],
            ),
            requests_resumed: f.counter(
                "ernied_requests_resumed_total",
                "Requests that went on at another worker after theirs died, without a lost token.",
            ),
            audit_writes: ["ok", "failed"].map(|outcome| audit.with_label_values(&[outcome])),
            usage_dropped: f
                .counter("ernied_usage_rows_dropped_total", "Usage figures that could not be stored; serving went on."),
            log_dropped: f.counter(
                "ernied_log_lines_dropped_total",
                "Log lines lost because the disk was full or the queue to the log writer was.",
            ),
            key_refusals: f.counters(
                "ernied_key_refusals_total",
                "Requests refused at the API key, by reason.",
                &["reason"],
            ),
            rollouts: ["completed", "rolled_back"].map(|outcome| rollouts.with_label_values(&[outcome])),
            worker_stalls: f.counter(
                "ernied_worker_stalls_total",
                "Workers replaced because they had work and made no progress for workers.stall_timeout.",
            ),
            rollout: f.gauges("ernied_rollout_state", "1 for the state the model swap is in.", &["state"]),
            swap_cutover: f.histogram(
                "ernied_swap_cutover_seconds",
                "How long new requests waited while a swap moved traffic.",
                CUTOVER,
            ),
            engines: setup.engines.max(1),
        };
        own.zero();
        own
    }

    /// Every series from the first scrape on.
    fn zero(&self) {
        for engine in 0..self.engines {
            let engine = engine.to_string();
            let engine = engine.as_str();
            self.step.with_label_values(&[engine]);
            self.batch.with_label_values(&[engine]);
            for gauge in
                [&self.budget_used, &self.worker_up, &self.worker_resident, &self.worker_cpu, &self.last_step_age]
            {
                gauge.with_label_values(&[engine]);
            }
            for state in ["free", "used", "cached"] {
                self.kv_blocks.with_label_values(&[engine, state]);
            }
            for state in ["free", "used"] {
                self.swap_blocks.with_label_values(&[engine, state]);
            }
            for direction in ["in", "out"] {
                self.swapped.with_label_values(&[engine, direction]);
            }
            for state in ["free", "used"] {
                self.swap_file_bytes.with_label_values(&[engine, state]);
            }
            for operation in ["read", "write", "skipped"] {
                self.swap_file_blocks.with_label_values(&[engine, operation]);
            }
            for operation in ["read", "write"] {
                self.swap_file_seconds.with_label_values(&[engine, operation]);
            }
            self.swap_file_errors.with_label_values(&[engine]);
            for kind in ["recompute", "swap"] {
                self.preemptions.with_label_values(&[engine, kind]);
            }
            for part in ["weights", "kv", "workspace", "other"] {
                self.memory.with_label_values(&[engine, part]);
            }
            for (_, phase) in LOAD_PHASES {
                self.load.with_label_values(&[engine, phase]);
            }
            self.worker_restarts.with_label_values(&[engine]);
        }
        for reason in KEY_REFUSALS {
            self.key_refusals.with_label_values(&[reason]);
        }
        self.rollout_state("steady");
    }

    pub(super) fn request_finished(&self, r: &RequestFigures) {
        if let Some(queue) = r.queue {
            self.queue_wait.observe(queue.as_secs_f64());
        }
    }

    pub(super) fn key_refused(&self, reason: &str) {
        let reason = if KEY_REFUSALS.contains(&reason) { reason } else { "other" };
        self.key_refusals.with_label_values(&[reason]).inc();
    }

    pub(super) fn rollout_state(&self, state: &str) {
        for known in ROLLOUT_STATES {
            self.rollout.with_label_values(&[known]).set(if *known == state { 1.0 } else { 0.0 });
        }
    }

    pub(super) fn worker_restarted(&self, engine: u32) {
        self.worker_restarts.with_label_values(&[engine.min(self.engines - 1).to_string().as_str()]).inc();
    }

    pub(super) fn step(&self, engine: u32, now: &StepStats, before: &StepStats, budget: u32) {
        if engine >= self.engines {
            return;
        }
        let engine = engine.to_string();
        let engine = engine.as_str();
        if now.tokens > 0 {
            self.step.with_label_values(&[engine]).observe(now.step_seconds);
            self.batch.with_label_values(&[engine]).observe(f64::from(now.sequences));
        }
        if budget > 0 {
            self.budget_used.with_label_values(&[engine]).set(f64::from(now.tokens) / f64::from(budget));
        }
        let out = now.swapped_out_blocks.saturating_sub(before.swapped_out_blocks);
        self.swapped.with_label_values(&[engine, "out"]).inc_by(out);
        let back = now.swapped_in_blocks.saturating_sub(before.swapped_in_blocks);
        self.swapped.with_label_values(&[engine, "in"]).inc_by(back);
        self.swap_file(engine, &now.disk, &before.disk);
        let preempted = now.preemptions.saturating_sub(before.preemptions);
        let kind = if out > 0 { "swap" } else { "recompute" };
        self.preemptions.with_label_values(&[engine, kind]).inc_by(preempted);
    }

    fn swap_file(&self, engine: &str, now: &DiskStats, before: &DiskStats) {
        let blocks = |operation: &str, now: u64, before: u64| {
            self.swap_file_blocks.with_label_values(&[engine, operation]).inc_by(now.saturating_sub(before));
        };
        blocks("read", now.reads, before.reads);
        blocks("write", now.writes, before.writes);
        blocks("skipped", now.writes_skipped, before.writes_skipped);
        let seconds = |operation: &str, now: f64, before: f64| {
            self.swap_file_seconds.with_label_values(&[engine, operation]).inc_by((now - before).max(0.0));
        };
        seconds("read", now.read_seconds, before.read_seconds);
        seconds("write", now.write_seconds, before.write_seconds);
        let errors = now.blocks_corrupt.saturating_sub(before.blocks_corrupt);
        self.swap_file_errors.with_label_values(&[engine]).inc_by(errors);
    }

    pub(super) fn fleet(&self, fleet: &FleetFigures) {
        self.ready.set(f64::from(u8::from(fleet.ready)));
        self.draining.set(f64::from(u8::from(fleet.draining)));
        self.uptime.set(fleet.uptime_seconds);
        self.in_flight.set(fleet.requests_in_flight as f64);
        self.worker_stalls.inc_by(fleet.workers_stalled.saturating_sub(self.worker_stalls.get()));
        self.memory_limit.set(crate::system::memory::limit_bytes().unwrap_or(0) as f64);
        self.build.reset();
        self.build.with_label_values(&[env!("CARGO_PKG_VERSION"), fleet.isa.as_str()]).set(1.0);
        self.deployment.reset();
        self.deployment.with_label_values(&[fleet.model_name.as_str(), fleet.revision.as_str()]).set(1.0);
        self.canary_share.set(fleet.canary_share);
        self.revision_requests.reset();
        for d in &fleet.deployments {
            for (state, requests) in [("in_flight", d.in_flight), ("finished", d.finished), ("failed", d.failed)] {
                let labels = [d.revision.as_str(), d.role, state];
                self.revision_requests.with_label_values(&labels).set(requests as f64);
            }
        }
        for e in &fleet.engines {
            if e.engine >= self.engines {
                continue;
            }
            let label = e.engine.to_string();
            let label = label.as_str();
            self.worker_up.with_label_values(&[label]).set(f64::from(u8::from(e.up)));
            self.last_step_age.with_label_values(&[label]).set(e.last_step_age_seconds);
            let used = e.stats.blocks_total.saturating_sub(e.stats.blocks_free);
            for (state, blocks) in [
                ("free", e.stats.blocks_free.saturating_sub(e.stats.blocks_cached)),
                ("used", used),
                ("cached", e.stats.blocks_cached),
            ] {
                self.kv_blocks.with_label_values(&[label, state]).set(f64::from(blocks));
            }
            let swap_free = e.stats.swap_blocks_total.saturating_sub(e.stats.swap_blocks_used);
            self.swap_blocks.with_label_values(&[label, "used"]).set(f64::from(e.stats.swap_blocks_used));
            self.swap_blocks.with_label_values(&[label, "free"]).set(f64::from(swap_free));
            let block = e.kv_bytes.checked_div(u64::from(e.num_blocks)).unwrap_or(0);
            let file_free = e.stats.disk.blocks_total.saturating_sub(e.stats.disk.blocks_used);
            for (state, blocks) in [("used", e.stats.disk.blocks_used), ("free", file_free)] {
                self.swap_file_bytes.with_label_values(&[label, state]).set((u64::from(blocks) * block) as f64);
            }
            for (phase, name) in LOAD_PHASES {
                let seconds = e.load_seconds.iter().find(|(p, _)| *p == phase).map_or(0.0, |(_, s)| *s);
                self.load.with_label_values(&[label, name]).set(seconds);
            }
            let process = e.pid.and_then(crate::system::memory::process);
            let resident = process.map_or(0, |p| p.resident_bytes);
            self.worker_resident.with_label_values(&[label]).set(resident as f64);
            self.worker_cpu.with_label_values(&[label]).set(process.map_or(0.0, |p| p.cpu_seconds));
            let named = e.weights_bytes + e.kv_bytes + e.workspace_bytes;
            for (part, bytes) in [
                ("weights", e.weights_bytes),
                ("kv", e.kv_bytes),
                ("workspace", e.workspace_bytes),
                ("other", resident.saturating_sub(named)),
            ] {
                self.memory.with_label_values(&[label, part]).set(bytes as f64);
            }
        }
    }
}
