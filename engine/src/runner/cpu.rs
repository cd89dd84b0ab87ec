//! The runner that computes on this machine's cores: owns weights, KV memory, workspace and thread pool.
//!
//! `load` sizes everything once; `execute` allocates nothing. Which sequences run and which blocks they own is the
//! scheduler's business: here a batch is only checked against the sizes, so that a wrong plan is an error and no crash.

use super::batch::{StepBatch, Want};
use super::options::{BLOCK_SIZE, LoadError, LoadOptions, plan_kv, weights_bytes_at_least};
use super::{ModelRunner, Row, RunnerError, RunnerLimits};
use crate::model::attention::Paged;
use crate::model::ernie::Step;
use crate::model::moe::ExpertCounts;
use crate::model::weights::{Loader, WeightsError};
use crate::model::workspace::Workspace;
use crate::model::{Checkpoint, Ernie, ModelConfig, Observer, Op, Prepared};
use ernie_kernels::sample::argmax;
use ernie_kernels::{Isa, KvCache, Pool, RopeTable, Span};
use std::ops::Range;

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    pub phase: LoadPhase,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoadPhase {
    /// Reading config and headers, checking names and shapes.
    Open,
    /// Reading, hashing and packing weights.
    Weights,
    /// Allocating KV blocks.
    Allocate,
    /// A first step, so that the first user does not pay for page faults.
    WarmUp,
}

/// What was loaded, and what it takes.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    pub config: ModelConfig,
    /// As it is in memory: `bf16`, `f32`, `int8`, `int4`.
    pub weights: &'static str,
    /// K and V: `bf16`, `f32`, `int8`.
    pub kv: &'static str,
    /// Instruction set in use.
    pub isa: &'static str,
    pub threads: usize,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
}

/// Runs an ERNIE-4.5 model on the CPU.
#[derive(Debug)]
pub struct CpuRunner {
    pool: Pool,
    model: Ernie,
    kv: KvCache,
    rope: RopeTable,
    workspace: Workspace,
    limits: RunnerLimits,
    report: LoadReport,
    experts: ExpertCounts,
    spans: Vec<Span>,
    sampled: Vec<u32>,
    wants: Vec<Want>,
    results: Results,
}

/// Where the results of the last step are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Results {
    /// In `workspace.best`, one per sample row.
    Greedy,
    /// In `workspace.logits`, for these sample rows; the others are computed when they are asked for.
    Logits(Range<usize>),
}

impl CpuRunner {
    /// Loads a model folder. `progress` is called on this thread, at the start of each phase and after each tensor.
    pub fn load(options: &LoadOptions, progress: &mut dyn FnMut(LoadProgress)) -> Result<Self, LoadError> {
        check_options(options)?;
        progress(LoadProgress { phase: LoadPhase::Open, bytes_done: 0, bytes_total: 0 });
        let (config, config_text) = ModelConfig::read(&options.model_dir)?;
        let prepared = Prepared::open(&options.model_dir).map_err(WeightsError::from)?;
        let plan = match &prepared {
            // Prepared weights have the form they have; a wish for another one is told, not overheard.
            Some(prepared) => options.agree_with(prepared.plan(), &config)?,
            None => options.weight_plan(&config)?,
        };

        let pool = Pool::new(options.threads, options.pin);
        let max_tokens = options.max_num_batched_tokens as usize;
        let logit_rows = (options.max_num_seqs as usize).min(max_tokens);
        let needed = weights_bytes_at_least(&config, &plan);
        if needed > options.memory_bytes {
            return Err(LoadError::Memory { what: "weights", needed, memory: options.memory_bytes });
        }

        let mut on_bytes = |bytes_done, bytes_total| {
            progress(LoadProgress { phase: LoadPhase::Weights, bytes_done, bytes_total });
        };
        let (dir, text, verify) = (&options.model_dir, config_text.as_bytes(), options.verify.as_ref());
        let mut loader = match prepared {
            Some(prepared) => Loader::prepared(dir, prepared, (&config, text), verify, &pool, &mut on_bytes)?,
            None => Loader::new(Checkpoint::open(dir, &config)?, text, verify, &pool, &mut on_bytes)?,
        };
        let model = Ernie::load(config.clone(), &plan, &mut loader, options.calibration.as_deref())?;
        loader.finish()?;

        let bytes_total = model.bytes() as u64;
        progress(LoadProgress { phase: LoadPhase::Allocate, bytes_done: bytes_total, bytes_total });
        let workspace = Workspace::new(&config, pool.threads(), max_tokens, logit_rows);
        let (weights_bytes, workspace_bytes) = (model.bytes() as u64, workspace.bytes() as u64);
        let kv_kind = options.kv.unwrap_or(plan.kv);
        let kv_plan = plan_kv(options, &config, kv_kind, weights_bytes, workspace_bytes)?;
        let kv =
            KvCache::new(kv_kind, config.num_layers, config.num_kv_heads, config.head_dim, kv_plan.num_blocks as usize);
        let rope = RopeTable::new(config.head_dim, config.rope_theta, kv_plan.max_model_len as usize);
        let per_block = KvCache::bytes_per_block(kv_kind, config.num_layers, config.num_kv_heads, config.head_dim);
        let report = LoadReport {
            weights: plan.name(),
            kv: kv_kind.name(),
            isa: Isa::selected().name(),
            threads: pool.threads(),
            weights_bytes,
            kv_bytes: per_block as u64 * u64::from(kv_plan.num_blocks),
            workspace_bytes,
            config,
        };
        let limits = RunnerLimits {
            vocab_size: report.config.vocab_size as u32,
            block_size: BLOCK_SIZE,
            num_blocks: kv_plan.num_blocks,
            max_num_batched_tokens: options.max_num_batched_tokens,
            max_num_seqs: options.max_num_seqs,
            max_model_len: kv_plan.max_model_len,
        };
        let mut runner = Self {
            experts: model.expert_counts(),
            pool,
            model,
            kv,
            rope,
            workspace,
            limits,
            report,
            spans: Vec::with_capacity(options.max_num_seqs as usize),
            sampled: Vec::with_capacity(max_tokens),
            wants: Vec::with_capacity(max_tokens),
            results: Results::Greedy,
        };
        progress(LoadProgress { phase: LoadPhase::WarmUp, bytes_done: bytes_total, bytes_total });
        runner.warm_up();
        Ok(runner)
    }

    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// KV memory, for copies to and from swap space between steps.
    pub fn kv_mut(&mut self) -> &mut KvCache {
        &mut self.kv
    }

    /// Forgets what steps that no request asked for were counted as.
    pub fn reset_expert_tokens(&mut self) {
        self.experts.reset();
    }

    /// A small step of each kind on blocks that nobody owns yet.
    fn warm_up(&mut self) {
        let len = self.limits.max_num_batched_tokens.min(BLOCK_SIZE).min(self.limits.max_model_len);
        let mut batch = StepBatch::default();
        for want in [Want::Greedy, Want::Logits] {
            batch.clear();
            batch.tokens.extend((0..len).map(|_| 0));
            batch.positions.extend(0..len);
            batch.slots.extend(0..len);
            batch.block_tables.push(0);
            batch.sequences.push(super::BatchSequence {
                token_start: 0,
                token_len: len,
                context_len: len,
                table_start: 0,
                table_len: 1,
            });
            batch.sample_rows.push(super::SampleRow { token: len - 1, want });
            if self.execute(&batch).is_err() {
                unreachable!("a batch of one sequence in block 0 fits every runner");
            }
        }
        self.reset_expert_tokens();
    }

    /// [`ModelRunner::execute`], watched.
    pub fn execute_observed(&mut self, batch: &StepBatch, observer: &mut impl Observer) -> Result<(), RunnerError> {
        check(batch, &self.limits)?;
        self.pool.step_begin();
        for &(from, to) in &batch.copies {
            self.kv.copy_block(from, to);
        }
        observer.after(Op::Copy);
        self.spans.clear();
        self.spans.extend(batch.sequences.iter().map(|s| Span {
            token_start: s.token_start,
            token_len: s.token_len,
            context_len: s.context_len,
            table_start: s.table_start,
            table_len: s.table_len,
        }));
        self.sampled.clear();
        self.sampled.extend(batch.sample_rows.iter().map(|r| r.token));
        self.wants.clear();
        self.wants.extend(batch.sample_rows.iter().map(|r| r.want));

        let mut step = Step {
            tokens: &batch.tokens,
            paged: Paged {
                kv: &mut self.kv,
                rope: &self.rope,
                positions: &batch.positions,
                slots: &batch.slots,
                spans: &self.spans,
                block_tables: &batch.block_tables,
            },
            sampled: &self.sampled,
            experts: &mut self.experts,
        };
        self.model.forward(&self.pool, &mut step, &mut self.workspace, observer);
        let rows = self.wants.len();
        if self.wants.iter().all(|w| *w == Want::Greedy) {
            self.results = Results::Greedy;
            if rows > 0 {
                self.model.greedy(&self.pool, 0..rows, &mut self.workspace, observer);
            }
        } else {
            self.compute_logits(0, observer);
        }
        self.pool.step_end();
        Ok(())
    }

    /// Logits of as many sample rows from `first` on as there is room for.
    fn compute_logits(&mut self, first: usize, observer: &mut impl Observer) {
        let room = self.workspace.logits.len() / self.limits.vocab_size as usize;
        let rows = first..self.wants.len().min(first + room);
        self.model.logits(&self.pool, rows.clone(), &mut self.workspace, observer);
        self.results = Results::Logits(rows);
    }
}

impl ModelRunner for CpuRunner {
    fn limits(&self) -> RunnerLimits {
        self.limits
    }

    fn execute(&mut self, batch: &StepBatch) -> Result<(), RunnerError> {
        self.execute_observed(batch, &mut ())
    }

    fn row(&mut self, i: usize) -> Row<'_> {
        assert!(i < self.wants.len(), "sample row {i} of {}", self.wants.len());
        let first = match &self.results {
            Results::Greedy => {
                let (token, logit) = self.workspace.best[i];
                return Row::Greedy { token, logit };
            }
            Results::Logits(rows) if rows.contains(&i) => rows.start,
            // More rows than there is room for (log-probabilities of a whole prompt): the next part.
            Results::Logits(_) => {
                self.compute_logits(i, &mut ());
                i
            }
        };
        let vocab = self.limits.vocab_size as usize;
        let row = &mut self.workspace.logits[(i - first) * vocab..][..vocab];
        match self.wants[i] {
            Want::Logits => Row::Logits(row),
            Want::Greedy => {
                let (token, logit) = argmax(row);
                Row::Greedy { token, logit }
            }
        }
    }

    fn parallel(&self, jobs: usize, work: &(dyn Fn(usize) + Sync)) {
        self.pool.run(jobs, &|job, _| work(job));
    }

    fn for_each_row(&mut self, rows: usize, work: &(dyn Fn(usize, Row<'_>) + Sync)) {
        let vocab = self.limits.vocab_size as usize;
        let mut first = 0;
        while first < rows {
            let part = match &self.results {
                Results::Greedy => {
                    (first..rows).for_each(|i| work(i, self.row(i)));
                    return;
                }
                Results::Logits(part) if part.contains(&first) => part.clone(),
                Results::Logits(_) => {
                    self.compute_logits(first, &mut ());
                    continue;
                }
            };
            let (logits, wants) = (&self.workspace.logits, &self.wants);
            let end = part.end.min(rows);
            self.pool.run(end - first, &|job, _| {
                let i = first + job;
                let row = &logits[(i - part.start) * vocab..][..vocab];
                match wants[i] {
                    Want::Logits => work(i, Row::Logits(row)),
                    Want::Greedy => {
                        let (token, logit) = argmax(row);
                        work(i, Row::Greedy { token, logit });
                    }
                }
            });
            first = end;
        }
    }

    fn block_bytes(&self) -> usize {
        self.kv.bytes() / self.kv.num_blocks()
    }

    fn export_block(&self, block: u32, out: &mut [u8]) {
        self.kv.export_block(block, out);
    }

    fn import_block(&mut self, block: u32, from: &[u8]) {
        self.kv.import_block(block, from);
    }

    fn expert_tokens(&self) -> &[Vec<u64>] {
        &self.experts.tokens
    }

    fn zero_active(&self) -> &[u64] {
        &self.experts.zero_active
    }
}

fn check_options(options: &LoadOptions) -> Result<(), LoadError> {
    let at_least_one = |option, value: u32| match value {
        0 => Err(LoadError::Option { option, value: "0".into(), cause: "must be at least 1", remedy: "raise it" }),
        _ => Ok(()),
    };
    at_least_one("max_num_seqs", options.max_num_seqs)?;
    at_least_one("max_num_batched_tokens", options.max_num_batched_tokens)?;
    at_least_one("max_model_len", options.max_model_len.unwrap_or(1))
}

/// Whether a batch stays inside the sizes; a batch that does not is the scheduler's fault.
fn check(batch: &StepBatch, limits: &RunnerLimits) -> Result<(), RunnerError> {
    let wrong = |what: String| Err(RunnerError(format!("step refused: {what}; this is a defect of the scheduler")));
    let tokens = batch.tokens.len();
    if tokens == 0 || tokens > limits.max_num_batched_tokens as usize {
        return wrong(format!("{tokens} tokens, at most {} are planned for", limits.max_num_batched_tokens));
    }
    if batch.positions.len() != tokens || batch.slots.len() != tokens {
        return wrong("tokens, positions and slots differ in number".to_owned());
    }
    if batch.sequences.len() > limits.max_num_seqs as usize {
        return wrong(format!("{} sequences, at most {}", batch.sequences.len(), limits.max_num_seqs));
    }
    if let Some(token) = batch.tokens.iter().find(|&&t| t >= limits.vocab_size) {
        return wrong(format!("token {token} of {}", limits.vocab_size));
    }
    let slots = u64::from(limits.num_blocks) * u64::from(limits.block_size);
    if let Some(slot) = batch.slots.iter().find(|&&s| u64::from(s) >= slots) {
        return wrong(format!("slot {slot} of {slots}"));
    }
    let blocks = batch.block_tables.iter().chain(batch.copies.iter().flat_map(|(from, to)| [from, to]));
    if let Some(block) = blocks.into_iter().find(|&&b| b >= limits.num_blocks) {
        return wrong(format!("block {block} of {}", limits.num_blocks));
    }
    let mut next = 0;
    for s in &batch.sequences {
        let table_end = s.table_start as usize + s.table_len as usize;
        let covered = u64::from(s.table_len) * u64::from(limits.block_size);
        let fits = s.token_start == next
            && s.token_len > 0
            && s.token_start as usize + s.token_len as usize <= tokens
            && (s.token_len..=limits.max_model_len).contains(&s.context_len)
            && table_end <= batch.block_tables.len()
            && covered >= u64::from(s.context_len);
        if !fits {
            return wrong(format!("{s:?} does not fit"));
        }
        let first = s.context_len - s.token_len;
        let positions = &batch.positions[next as usize..(next + s.token_len) as usize];
        if positions.iter().zip(first..).any(|(&p, expected)| p != expected) {
            return wrong(format!("positions of {s:?} are not its last ones"));
        }
        next += s.token_len;
    }
    if next as usize != tokens {
        return wrong(format!("{tokens} tokens, {next} of them in sequences"));
    }
    let rows = &batch.sample_rows;
    if rows.windows(2).any(|w| w[0].token >= w[1].token) || rows.last().is_some_and(|r| r.token as usize >= tokens) {
        return wrong("sample rows are not ascending tokens of the batch".to_owned());
    }
    Ok(())
}
