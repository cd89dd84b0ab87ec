//! The engine loop: take what came in, make a step, report.
//!
//! Pings are answered here and nowhere else, so that an answer means that the loop turns. With nothing to do the loop
//! sleeps on its inbox.

use super::io::{Inbox, Outbox};
use super::pace::Pace;
use super::swap::{self, Costs};
use super::wire;
use ernie_engine::model::{Manifest, Observer, Op};
use ernie_engine::params::RequestId as EngineRequestId;
use ernie_engine::runner::cpu::{CpuRunner, LoadPhase as EnginePhase, LoadProgress as EngineProgress};
use ernie_engine::runner::options::{Dtype as EngineDtype, LoadOptions, Quantization as EngineQuantization};
use ernie_engine::runner::{ModelRunner, Row, RunnerError, RunnerLimits, StepBatch};
use ernie_engine::{Engine, EngineConfig, StepOutputs, SwapConfig};
use ernie_kernels::KvKind;
use ernie_proto::worker::{
    Dtype, FromWorker, KvDtype, Load, LoadPhase, LoadProgress, Loaded, Quantization, StepReport, Submit, ToWorker,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Between two messages about a load that moves.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Between two reports of the experts' counts, which are large.
const EXPERTS_INTERVAL: Duration = Duration::from_secs(1);

/// Before a step that failed is tried again; grows with each failure in a row.
const STEP_RETRY_WAIT: Duration = Duration::from_millis(20);

/// An engine with its model, the pace that was measured, and the counter that its steps move.
pub(super) type Loading = (Engine<Beating<CpuRunner>>, Pace, Arc<AtomicU64>);

/// Loads the model, telling how far it is, then tells what was loaded.
pub(super) fn load(load: Load, outbox: &Outbox) -> Result<Loading, String> {
    let mut phases = Phases::default();
    let mut told = Instant::now();
    let mut last = None;
    let mut progress = |progress: EngineProgress| {
        let phase = phase(progress.phase);
        let changed = phases.now(phase);
        if changed || told.elapsed() >= PROGRESS_INTERVAL {
            told = Instant::now();
            let EngineProgress { bytes_done, bytes_total, .. } = progress;
            last = Some(outbox.send(&FromWorker::LoadProgress(LoadProgress { phase, bytes_done, bytes_total })));
        }
    };
    let mut runner = CpuRunner::load(&options(&load), &mut progress).map_err(|error| with_causes(&error))?;
    last.unwrap_or(Ok(()))?;
    let pace = match load.max_prefill_chunk {
        Some(chunk) => Pace::fixed(chunk),
        None => Pace::measure(&mut runner).map_err(|error| with_causes(&error))?,
    };
    runner.reset_expert_tokens();
    outbox.send(&FromWorker::Loaded(Box::new(loaded(&runner, phases.end()))))?;
    let progress = Arc::new(AtomicU64::new(0));
    let identity = swap::identity(&load);
    // The second tier is read through slots of the first.
    let space_bytes = match load.swap_disk {
        Some(_) => load.swap_space_bytes.max(swap::SLOTS_FOR_DISK * runner.block_bytes() as u64),
        None => load.swap_space_bytes,
    };
    let config = EngineConfig {
        max_num_seqs: load.max_num_seqs,
        max_num_batched_tokens: load.max_num_batched_tokens,
        max_prefill_chunk: pace.chunk(),
        enable_prefix_caching: load.enable_prefix_caching,
        seed: load.seed,
        fair_share: load.fair_share,
        aging_tokens: load.aging_tokens,
        swap: SwapConfig { control: swap::control(&load.swap, true), space_bytes },
        vocabulary: load.vocabulary,
        ..EngineConfig::default()
    };
    let disk = load.swap_disk.as_ref().map(|wanted| swap::open_disk(wanted, &identity, &runner)).transpose()?;
    let costs = Costs::new(load.swap);
    let mut engine = Engine::new(config, Beating { runner, progress: progress.clone(), costs });
    if let Some(disk) = disk {
        engine.attach_disk(disk);
    }
    Ok((engine, pace, progress))
}

/// Runs until the supervisor goes away.
pub(super) fn serve(
    mut engine: Engine<Beating<CpuRunner>>,
    mut pace: Pace,
    inbox: &Inbox,
    outbox: &Outbox,
) -> Result<(), String> {
    let mut outputs = StepOutputs::default();
    let mut experts_told = Instant::now();
    let mut failures = 0u32;
    loop {
        // With nothing to compute, the figures that the last messages changed are worth a report of their own.
        let mut idle_report = false;
        while let Some(message) = inbox.take()? {
            idle_report |= take(message, &mut engine, outbox, &mut outputs)?;
        }
        if !engine.has_work() {
            if idle_report {
                report(&engine, &mut outputs, Duration::ZERO, false, outbox)?;
            }
            let message = inbox.next()?;
            if take(message, &mut engine, outbox, &mut outputs)? && !engine.has_work() {
                report(&engine, &mut outputs, Duration::ZERO, false, outbox)?;
            }
            continue;
        }
        let began = Instant::now();
        if let Err(error) = engine.step(&mut outputs) {
            failures += 1;
            outbox.send(&FromWorker::StepFailed(with_causes(&error)))?;
            thread::sleep(STEP_RETRY_WAIT * failures.min(50));
            continue;
        }
        failures = 0;
        swap::decide(&mut engine);
        let experts = experts_told.elapsed() >= EXPERTS_INTERVAL;
        if experts {
            experts_told = Instant::now();
        }
        let took = began.elapsed();
        if let Some(chunk) = pace.observe(outputs.tokens, outputs.prefill_tokens, took) {
            engine.set_max_prefill_chunk(chunk);
        }
        report(&engine, &mut outputs, took, experts, outbox)?;
    }
}

/// Does what a message asks. True if figures changed without a step.
fn take(
    message: ToWorker,
    engine: &mut Engine<Beating<CpuRunner>>,
    outbox: &Outbox,
    outputs: &mut StepOutputs,
) -> Result<bool, String> {
    match message {
        ToWorker::Submit(submit) => {
            if let Some(refused) = submit_to(engine, *submit) {
                outbox.send(&FromWorker::Step(Box::new(StepReport {
                    step: outputs.step,
                    failed: vec![refused],
                    stats: wire::stats(&engine.stats()),
                    ..StepReport::default()
                })))?;
            }
            Ok(false)
        }
        ToWorker::Abort(request) => Ok(engine.abort(EngineRequestId(request.0))),
        ToWorker::EndChoice(request, choice) => Ok(engine.end_choice(EngineRequestId(request.0), choice)),
        ToWorker::Ping(n) => outbox.send(&FromWorker::Pong(n)).map(|()| false),
        ToWorker::AskKv => outbox.send(&FromWorker::Kv(Box::new(swap::kv_report(engine)))).map(|()| false),
        ToWorker::SetSwap(settings) => {
            swap::set(engine, settings);
            Ok(true)
        }
        ToWorker::ResetPrefixCache => {
            engine.reset_prefix_cache();
            Ok(true)
        }
        ToWorker::Hello(_) | ToWorker::Load(_) => Err(format!("{message:?} came twice")),
        // The reading thread acts on it.
        ToWorker::Shutdown => Ok(false),
    }
}

/// Gives a request to the engine; the reason if it does not take it.
fn submit_to<R: ModelRunner>(engine: &mut Engine<R>, submit: Submit) -> Option<(ernie_proto::ids::RequestId, String)> {
    let request = submit.request;
    engine.add(wire::request(submit)).err().map(|error| (request, error.to_string()))
}

fn report<R: ModelRunner>(
    engine: &Engine<R>,
    outputs: &mut StepOutputs,
    took: Duration,
    experts: bool,
    outbox: &Outbox,
) -> Result<(), String> {
    let mut stats = wire::stats(&engine.stats());
    stats.tokens = outputs.tokens;
    stats.prefill_tokens = outputs.prefill_tokens;
    stats.sequences = outputs.sequences;
    stats.step_seconds = took.as_secs_f64();
    // An idle engine tells all it knows: nobody knows when the next report comes.
    if experts || !engine.has_work() {
        stats.expert_tokens = engine.runner().expert_tokens().to_vec();
        stats.zero_active = engine.runner().zero_active().to_vec();
    }
    outbox.send(&FromWorker::Step(Box::new(wire::report(outputs, stats))))
}

/// A runner whose progress within a step can be watched from another thread.
#[derive(Debug)]
pub(super) struct Beating<R> {
    runner: R,
    progress: Arc<AtomicU64>,
    pub(super) costs: Costs,
}

struct Beat<'a>(&'a AtomicU64);

impl Observer for Beat<'_> {
    fn after(&mut self, _op: Op) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl ModelRunner for Beating<CpuRunner> {
    fn limits(&self) -> RunnerLimits {
        self.runner.limits()
    }

    fn execute(&mut self, batch: &StepBatch) -> Result<(), RunnerError> {
        let began = Instant::now();
        let executed = self.runner.execute_observed(batch, &mut Beat(&self.progress));
        self.costs.computed(batch.tokens.len(), batch.sequences.len(), began.elapsed());
        executed
    }

    fn row(&mut self, i: usize) -> Row<'_> {
        self.runner.row(i)
    }

    fn parallel(&self, jobs: usize, work: &(dyn Fn(usize) + Sync)) {
        self.runner.parallel(jobs, work);
    }

    fn for_each_row(&mut self, rows: usize, work: &(dyn Fn(usize, Row<'_>) + Sync)) {
        self.runner.for_each_row(rows, work);
    }

    fn block_bytes(&self) -> usize {
        self.runner.block_bytes()
    }

    fn export_block(&self, block: u32, out: &mut [u8]) {
        let began = Instant::now();
        self.runner.export_block(block, out);
        self.costs.copied(began.elapsed());
    }

    fn import_block(&mut self, block: u32, from: &[u8]) {
        let began = Instant::now();
        self.runner.import_block(block, from);
        self.costs.copied(began.elapsed());
    }

    fn expert_tokens(&self) -> &[Vec<u64>] {
        self.runner.expert_tokens()
    }

    fn zero_active(&self) -> &[u64] {
        self.runner.zero_active()
    }
}

/// Seconds per phase of a load.
#[derive(Default)]
struct Phases {
    ended: Vec<(LoadPhase, f64)>,
    current: Option<(LoadPhase, Instant)>,
}

impl Phases {
    /// True if it is a new one.
    fn now(&mut self, phase: LoadPhase) -> bool {
        if self.current.as_ref().is_some_and(|(current, _)| *current == phase) {
            return false;
        }
        self.close();
        self.current = Some((phase, Instant::now()));
        true
    }

    fn close(&mut self) {
        if let Some((phase, since)) = self.current.take() {
            self.ended.push((phase, since.elapsed().as_secs_f64()));
        }
    }

    fn end(mut self) -> Vec<(LoadPhase, f64)> {
        self.close();
        self.ended
    }
}

fn phase(phase: EnginePhase) -> LoadPhase {
    match phase {
        EnginePhase::Open => LoadPhase::Open,
        EnginePhase::Weights => LoadPhase::Weights,
        EnginePhase::Allocate => LoadPhase::Allocate,
        EnginePhase::WarmUp => LoadPhase::WarmUp,
    }
}

fn options(load: &Load) -> LoadOptions {
    let manifest = (!load.manifest.is_empty())
        .then(|| Manifest { digests: load.manifest.iter().map(|file| (file.path.clone(), file.sha256)).collect() });
    LoadOptions {
        dtype: match load.dtype {
            Dtype::Auto => EngineDtype::Auto,
            Dtype::Bfloat16 => EngineDtype::Bfloat16,
            Dtype::Float32 => EngineDtype::Float32,
        },
        quantization: match load.quantization {
            Quantization::None => EngineQuantization::None,
            Quantization::Int8 => EngineQuantization::Int8,
            Quantization::Int4 => EngineQuantization::Int4,
        },
        kv: match load.kv_dtype {
            KvDtype::Auto => None,
            KvDtype::Bfloat16 => Some(KvKind::Bf16),
            KvDtype::Int8 => Some(KvKind::Int8),
        },
        max_model_len: load.max_model_len,
        max_num_seqs: load.max_num_seqs,
        max_num_batched_tokens: load.max_num_batched_tokens,
        kv_cache_bytes: load.kv_cache_bytes,
        memory_bytes: load.memory_bytes,
        threads: load.threads as usize,
        pin: load.pin_threads,
        verify: manifest,
        ..LoadOptions::new(&load.model_dir)
    }
}

fn loaded(runner: &CpuRunner, load_seconds: Vec<(LoadPhase, f64)>) -> Loaded {
    let (report, limits) = (runner.report(), runner.limits());
    let config = &report.config;
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Loaded {
        architecture: config.architecture.clone(),
        moe: config.moe.is_some(),
        layers: narrow(config.num_layers),
        experts: config.moe.as_ref().map_or(0, |moe| narrow(moe.num_experts)),
        experts_per_token: config.moe.as_ref().map_or(0, |moe| narrow(moe.top_k)),
        parameters: config.parameters(),
        parameters_active: config.parameters_active(),
        vocab_size: limits.vocab_size,
        max_model_len: limits.max_model_len,
        weights: report.weights.to_string(),
        kv: report.kv.to_string(),
        isa: report.isa.to_string(),
        threads: narrow(report.threads),
        block_size: limits.block_size,
        num_blocks: limits.num_blocks,
        weights_bytes: report.weights_bytes,
        kv_bytes: report.kv_bytes,
        workspace_bytes: report.workspace_bytes,
        load_seconds,
    }
}

/// An error and what is behind it, in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}
