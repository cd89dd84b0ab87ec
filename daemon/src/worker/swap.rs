//! Whether swap copies pay, by what this worker measures: the engine knows no clock, so it is told.
//!
//! A block that goes out and comes back is copied twice; one that comes back from the swap file is read and copied once; a block
//! that is computed again takes its tokens' share of a prompt step. All are means over the latest ones, and the answer changes
//! only when it is clear. It never changes a token.

use super::serve::Beating;
use super::wire;
use ernie_engine::kv::disk_tier::{DiskConfig, DiskTier};
use ernie_engine::runner::ModelRunner;
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::{Engine, SwapControl, SwapPolicy as EnginePolicy};
use ernie_proto::worker::{Hello, KvReport, Load, SwapDisk, SwapPolicy, SwapRestore, SwapSettings};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::fs::{File, TryLockError};
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

/// Share of a new measurement in the mean.
const NEWEST: f64 = 0.05;

/// Steps with fewer tokens per sequence say little about prompts.
const PROMPT_TOKENS_MIN: usize = 16;

/// A change of mind needs a difference of this factor.
const CLEAR: f64 = 1.25;

/// Reads of the swap file before they are judged: the first ones may find a cold disk.
const READS_MIN: u64 = 8;

/// Prompt steps after which a file that was too slow is tried again.
const PROMPTS_UNTIL_RETRY: u32 = 256;

/// What copies and prompts cost here.
#[derive(Debug)]
pub(super) struct Costs {
    settings: SwapSettings,
    /// Seconds per copy of one block. Copies are made behind `&self`.
    copy: Cell<Option<f64>>,
    /// Seconds per prompt token.
    token: Option<f64>,
    disk: Reads,
}

/// What reading a block from the swap file costs.
#[derive(Debug, Default)]
struct Reads {
    /// Figures of the file when it was last looked at.
    seen: (u64, Duration),
    /// Seconds per block, over how many.
    mean: Option<f64>,
    judged: u64,
    /// Prompt steps since reading was found too slow.
    prompts_without: u32,
}

impl Costs {
    pub(super) fn new(settings: SwapSettings) -> Self {
        Self { settings, copy: Cell::new(None), token: None, disk: Reads::default() }
    }

    pub(super) fn copied(&self, took: Duration) {
        self.copy.set(Some(mean(self.copy.get(), took.as_secs_f64())));
    }

    pub(super) fn computed(&mut self, tokens: usize, sequences: usize, took: Duration) {
        if tokens >= PROMPT_TOKENS_MIN * sequences.max(1) {
            self.token = Some(mean(self.token, took.as_secs_f64() / tokens as f64));
            self.disk.prompts_without += 1;
        }
    }

    /// The swap file's counters, now.
    fn read(&mut self, reads: u64, time: Duration) {
        let (more, took) = (reads.saturating_sub(self.disk.seen.0), time.saturating_sub(self.disk.seen.1));
        if more > 0 {
            self.disk.seen = (reads, time);
            self.disk.mean = Some(mean(self.disk.mean, took.as_secs_f64() / more as f64));
            self.disk.judged += more;
        }
    }

    /// Whether a block in the swap file comes back sooner than it is computed.
    fn disk_pays(&mut self, block_size: u32, now: bool) -> bool {
        if !now && self.disk.prompts_without >= PROMPTS_UNTIL_RETRY {
            (self.disk.mean, self.disk.judged) = (None, 0);
        }
        let (copy, compute) = self.per_block(block_size);
        let pays = match (self.settings.restore, self.disk.mean, compute) {
            (SwapRestore::Swap, ..) => true,
            (SwapRestore::Recompute, ..) => false,
            (SwapRestore::Auto, Some(read), Some(compute)) if self.disk.judged >= READS_MIN => {
                let back = read + copy.unwrap_or(0.0) / 2.0;
                if now { back < compute * CLEAR } else { back * CLEAR < compute }
            }
            (SwapRestore::Auto, ..) => true,
        };
        if pays {
            self.disk.prompts_without = 0;
        }
        pays
    }

    /// Out and back, and computed again, per block.
    fn per_block(&self, block_size: u32) -> (Option<f64>, Option<f64>) {
        (self.copy.get().map(|copy| 2.0 * copy), self.token.map(|token| token * f64::from(block_size)))
    }

    fn pays(&self, block_size: u32, now: bool) -> bool {
        match (self.settings.restore, self.per_block(block_size)) {
            (SwapRestore::Swap, _) => true,
            (SwapRestore::Recompute, _) => false,
            // Nothing measured: a copy of memory is nearly always cheaper than a model.
            (SwapRestore::Auto, (Some(copy), Some(compute))) if now => copy < compute * CLEAR,
            (SwapRestore::Auto, (Some(copy), Some(compute))) => copy * CLEAR < compute,
            (SwapRestore::Auto, _) => now,
        }
    }
}

fn mean(before: Option<f64>, new: f64) -> f64 {
    before.map_or(new, |before| before + NEWEST * (new - before))
}

/// The engine's form of the settings.
pub(super) fn control(settings: &SwapSettings, copies_pay: bool) -> SwapControl {
    SwapControl {
        policy: match settings.policy {
            SwapPolicy::Off => EnginePolicy::Off,
            SwapPolicy::OnPressure => EnginePolicy::OnPressure,
            SwapPolicy::Always => EnginePolicy::Always,
        },
        copies_pay,
        disk_pays: true,
        sequence_share: settings.sequence_share,
        high_watermark: settings.high_watermark,
        low_watermark: settings.low_watermark,
    }
}

/// Blocks of host memory at least, where there is a file below it.
pub(super) const SLOTS_FOR_DISK: u64 = 64;

/// Workers of one daemon, each with a file of its own.
const FILES_MAX: u32 = 64;

/// What the bits of KV depend on besides the runner.
pub(super) fn identity(load: &Load) -> Vec<u8> {
    let mut text =
        format!("{:?} {:?} {} {:?} {}", load.dtype, load.quantization, load.seed, Hello::own(), executable(EXECUTABLE));
    if load.manifest.is_empty() {
        // Without digests the files' sizes and times have to do.
        text.push_str(&load.model_dir.display().to_string());
        for entry in std::fs::read_dir(&load.model_dir).into_iter().flatten().flatten() {
            if let Ok(meta) = entry.metadata() {
                text.push_str(&format!(" {:?} {} {:?}", entry.file_name(), meta.len(), meta.modified().ok()));
            }
        }
    }
    let digests = load.manifest.iter().flat_map(|file| file.sha256);
    text.into_bytes().into_iter().chain(digests).collect()
}

/// The running executable, also when its file was replaced meanwhile.
const EXECUTABLE: &str = "/proc/self/exe";

/// Another build may turn or round weights otherwise: nothing that one wrote is for another, though both have one version.
fn executable(path: &str) -> String {
    let told = std::fs::metadata(path).and_then(|meta| Ok((meta.len(), meta.modified()?)));
    // What can not be told is nobody else's.
    told.map_or_else(|_| format!("{:?}", SystemTime::now()), |(length, modified)| format!("{length} {modified:?}"))
}

/// Opens a file that no other worker has.
pub(super) fn open_disk(wanted: &SwapDisk, identity: &[u8], runner: &CpuRunner) -> Result<DiskTier, String> {
    let fail = |cause: &dyn std::fmt::Display| {
        format!(
            "the swap file in {} can not be used: {cause}; free {} bytes there, or change swap.disk_dir or swap.disk_space",
            wanted.dir.display(),
            wanted.bytes
        )
    };
    std::fs::create_dir_all(&wanted.dir).map_err(|e| fail(&e))?;
    let report = runner.report();
    let mut bytes = identity.to_vec();
    bytes.extend_from_slice(
        format!("{} {} {} {}", report.weights, report.kv, report.isa, runner.block_bytes()).as_bytes(),
    );
    let digest = Sha256::digest(&bytes);
    let identity = digest.iter().take(16).fold(0, |number: u128, byte| number << 8 | u128::from(*byte));
    for number in 0..FILES_MAX {
        let path = wanted.dir.join(format!("worker-{number}.kv"));
        let lock =
            File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(|e| fail(&e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(e)) => return Err(fail(&e)),
        }
        // Held until this process ends, whatever becomes of the engine.
        std::mem::forget(lock);
        let config = DiskConfig { path, bytes: wanted.bytes, identity, now };
        return DiskTier::open(&config, runner.block_bytes(), runner.limits().block_size).map_err(|e| fail(&e));
    }
    Err(fail(&format!("{FILES_MAX} workers have one already")))
}

/// Time since this process first asked.
fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// After a step: tells the engine when the answer has changed.
pub(super) fn decide(engine: &mut Engine<Beating<CpuRunner>>) {
    let now = engine.swap_control();
    let (disk, block_size) = (engine.disk_stats(), engine.runner().limits().block_size);
    let costs = &mut engine.runner_mut().costs;
    costs.read(disk.reads, disk.read_time);
    let copies_pay = costs.pays(block_size, now.copies_pay);
    let disk_pays = costs.disk_pays(block_size, now.disk_pays);
    if (copies_pay, disk_pays) != (now.copies_pay, now.disk_pays) {
        engine.set_swap(SwapControl { copies_pay, disk_pays, ..now });
    }
}

/// New settings from the supervisor.
pub(super) fn set(engine: &mut Engine<Beating<CpuRunner>>, settings: SwapSettings) {
    engine.runner_mut().costs.settings = settings;
    let SwapControl { copies_pay, disk_pays, .. } = engine.swap_control();
    engine.set_swap(SwapControl { disk_pays, ..control(&settings, copies_pay) });
    decide(engine);
}

pub(super) fn kv_report(engine: &Engine<Beating<CpuRunner>>) -> KvReport {
    let costs = &engine.runner().costs;
    let (copy_seconds, compute_seconds) = costs.per_block(engine.runner().limits().block_size);
    KvReport {
        swap: costs.settings,
        copy_seconds,
        disk_seconds: costs.disk.mean,
        compute_seconds,
        copies_pay: engine.swap_control().copies_pay,
        disk_pays: engine.swap_control().disk_pays,
        ..wire::kv(engine.kv_report())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_is_taken_and_kept_until_the_other_is_clearly_cheaper() {
        let mut costs = Costs::new(SwapSettings::default());
        assert!(costs.pays(16, true) && !costs.pays(16, false), "nothing is known: as it is");
        costs.copied(Duration::from_micros(900));
        costs.computed(160, 1, Duration::from_millis(16));
        assert!(costs.pays(16, true) && !costs.pays(16, false), "1.8 ms against 1.6 ms is not clear");
        costs.computed(20, 20, Duration::from_secs(9));
        assert!(costs.pays(16, true), "decodes are no prompts");
        let mut slow = Costs::new(SwapSettings::default());
        slow.copied(Duration::from_millis(4));
        slow.computed(160, 1, Duration::from_millis(16));
        assert!(!slow.pays(16, true));
        slow.settings.restore = SwapRestore::Swap;
        assert!(slow.pays(16, false));
        slow.settings.restore = SwapRestore::Recompute;
        assert!(!slow.pays(16, true));
    }

    #[test]
    fn builds_of_one_version_are_told_apart() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name).display().to_string());
        std::fs::write(&one, "a build").expect("written");
        std::fs::write(&other, "another build").expect("written");
        assert_eq!(executable(&one), executable(&one));
        assert_ne!(executable(&one), executable(&other));
        assert_eq!(executable(EXECUTABLE), executable(EXECUTABLE));
    }

    #[test]
    fn a_disk_that_is_slower_than_computing_is_left_alone_for_a_while() {
        let mut costs = Costs::new(SwapSettings::default());
        let computed = |costs: &mut Costs| costs.computed(160, 1, Duration::from_millis(16));
        costs.copied(Duration::from_micros(100));
        computed(&mut costs);
        assert!(costs.disk_pays(16, true) && costs.disk_pays(16, false), "nothing was read yet");
        costs.read(7, Duration::from_millis(7 * 30));
        assert!(costs.disk_pays(16, true), "the first reads may find a cold disk");
        costs.read(8, Duration::from_millis(8 * 30));
        assert!(!costs.disk_pays(16, true), "30 ms a block against 1.6");
        assert!(costs.pays(16, true), "copies in memory pay all the same");
        (1..PROMPTS_UNTIL_RETRY).for_each(|_| computed(&mut costs));
        assert!(!costs.disk_pays(16, false));
        computed(&mut costs);
        assert!(costs.disk_pays(16, false), "it is tried again");
        costs.read(16, Duration::from_millis(8 * 30 + 8));
        assert!(costs.disk_pays(16, false) && costs.disk_pays(16, true), "1 ms a block now");
        costs.settings.restore = SwapRestore::Recompute;
        assert!(!costs.disk_pays(16, true));
    }
}
