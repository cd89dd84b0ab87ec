//! The engine: `add`, `abort`, `step`. Owns the scheduler, the KV blocks' book-keeping, the samplers and the runner.
//!
//! What requests look like is checked in `validate`, how a step goes is in `step`.

mod step;
mod validate;

use crate::config::{EngineConfig, SwapControl};
use crate::kv::disk_tier::{DiskStats, DiskTier};
use crate::kv::prefix_cache::ChainHash;
use crate::kv::{BlockTable, KeySpace, KvBlocks};
use crate::outputs::{EngineStats, KvReport, KvSequence, KvState};
use crate::params::{EngineRequest, RequestId};
use crate::runner::{ModelRunner, RunnerError, RunnerLimits, StepBatch};
use crate::sampling::grammar::{CompiledGrammar, GrammarCompiler, GrammarError};
use crate::sampling::penalties::Seen;
use crate::sampling::{RESERVE, Sampler};
use crate::scheduler::fair::Fare;
use crate::scheduler::plan::RowUse;
use crate::scheduler::{Budget, Scheduler};
use crate::sequence::{Key, Order, Request, Requests, Sequence, Sequences, State};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use step::RowSlot;
use validate::RequestBounds;

/// What an answer is thought to take when its owner's turn is worked out: what clients allow says little.
const ANSWER_ESTIMATE: u32 = 128;

/// Why a request is not taken. All are the caller's to mend; none may be retried as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    #[error("request {0:?} is already in the engine: every request needs an id of its own")]
    Duplicate(RequestId),
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    #[error("{what} token {index} is {token}, but the model's vocabulary ends at {vocab_size}")]
    UnknownToken { what: &'static str, index: usize, token: u32, vocab_size: u32 },
    #[error("{tokens} tokens of prompt and answer leave no room for another: a sequence holds at most {limit}")]
    TooLong { tokens: usize, limit: u32 },
    #[error("{choices} choices: a request has between 1 and {limit}")]
    Choices { choices: usize, limit: u32 },
    #[error("every choice is finished: there is nothing left to run")]
    NothingToDo,
    #[error("{field} is {value}: {expected}")]
    Parameter { field: &'static str, value: String, expected: &'static str },
    #[error("choice {choice} already has {generated} of {max_tokens} tokens: mark it finished instead")]
    AlreadyEnded { choice: usize, generated: usize, max_tokens: u32 },
    #[error("the grammar can not be used: {0}")]
    Grammar(String),
}

/// Why a step could not be made. No request is lost: what was running is computed again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("step {step} could not be computed: {cause}")]
    Runner { step: u64, cause: RunnerError },
}

/// Sequences of many requests, computed together step by step.
#[derive(Debug)]
pub struct Engine<R> {
    config: EngineConfig,
    limits: RunnerLimits,
    runner: R,
    budget: Budget,
    /// Most tokens of a sequence, prompt and answer together.
    max_len: u32,
    scheduler: Scheduler,
    kv: KvBlocks,
    sequences: Sequences,
    requests: Requests,
    by_id: HashMap<RequestId, Key>,
    arrivals: u64,
    /// Or why there can be no grammars.
    grammars: Result<GrammarCompiler, GrammarError>,
    counters: Counters,
    // Memory of a step, kept from step to step.
    batch: StepBatch,
    uses: Vec<RowUse>,
    forks: Vec<Key>,
    slots: Vec<Mutex<RowSlot>>,
}

#[derive(Debug, Default)]
struct Counters {
    steps: u64,
    prefix_queries_tokens: u64,
    prefix_hits_tokens: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    nan_sequences: u64,
}

impl<R: ModelRunner> Engine<R> {
    /// An engine without requests. Bounds in `config` beyond the runner's limits are lowered to these.
    pub fn new(config: EngineConfig, runner: R) -> Self {
        let chain = ChainHash::new(config.seed);
        Self::with_chain(config, runner, chain)
    }

    /// An engine whose prefix hashes collide as the test wants.
    #[doc(hidden)]
    pub fn with_chain(config: EngineConfig, runner: R, chain: ChainHash) -> Self {
        let limits = runner.limits();
        let tokens = config.max_num_batched_tokens.min(limits.max_num_batched_tokens).max(1);
        let sequences = config.max_num_seqs.min(limits.max_num_seqs).min(tokens).max(1);
        let budget = Budget {
            sequences: sequences as usize,
            tokens: tokens as usize,
            prefill_chunk: config.max_prefill_chunk.max(1) as usize,
            rows: limits.max_num_seqs.max(sequences) as usize,
        };
        let block_bytes = runner.block_bytes();
        let grammars = match config.vocabulary.is_empty() {
            true => Err(GrammarError("the engine was given no vocabulary".into())),
            false => GrammarCompiler::new(&config.vocabulary),
        };
        Self {
            limits,
            budget,
            max_len: limits.max_model_len.min(limits.num_blocks.saturating_mul(limits.block_size)),
            scheduler: Scheduler::new(budget.sequences, config.aging_tokens),
            kv: KvBlocks::new(limits.num_blocks, limits.block_size, config.block_run, chain, config.swap, block_bytes),
            sequences: Sequences::default(),
            requests: Requests::default(),
            by_id: HashMap::new(),
            arrivals: 0,
            grammars,
            counters: Counters::default(),
            batch: StepBatch::with_capacity(&limits),
            uses: Vec::with_capacity(budget.rows),
            forks: Vec::with_capacity(budget.sequences),
            slots: Vec::new(),
            config,
            runner,
        }
    }

    /// Takes a request; its first step comes with one of the next calls of [`Engine::step`]. A grammar is compiled here, which
    /// may take a while: see [`Engine::add_compiled`].
    pub fn add(&mut self, request: EngineRequest) -> Result<(), AddError> {
        self.validate(&request)?;
        let refused = |cause: GrammarError| AddError::Grammar(cause.0);
        let grammar = match &request.sampling.grammar {
            None => None,
            Some(grammar) => {
                let compiler = self.grammars.as_ref().map_err(|cause| refused(cause.clone()))?;
                Some(compiler.compile(grammar).map_err(refused)?)
            }
        };
        self.insert(request, grammar.as_ref());
        Ok(())
    }

    /// Takes a request whose grammar was compiled elsewhere, by a [`GrammarCompiler`] of this engine.
    pub fn add_compiled(&mut self, request: EngineRequest, grammar: &CompiledGrammar) -> Result<(), AddError> {
        self.validate(&request)?;
        self.insert(request, Some(grammar));
        Ok(())
    }

    /// Compiles grammars for [`Engine::add_compiled`], on whatever thread. `None`: the engine was given no usable vocabulary.
    pub fn grammar_compiler(&self) -> Option<GrammarCompiler> {
        self.grammars.as_ref().ok().cloned()
    }

    /// Forgets a request and frees its blocks before the next step. False if it is not (or no longer) here.
    pub fn abort(&mut self, request: RequestId) -> bool {
        match self.by_id.get(&request) {
            None => false,
            Some(&key) => {
                self.remove_request(key);
                true
            }
        }
    }

    /// Ends one choice of a request and frees its blocks before the next step; the others go on. False if it is not (or no
    /// longer) here.
    pub fn end_choice(&mut self, request: RequestId, choice: u16) -> bool {
        let Some(&key) = self.by_id.get(&request) else { return false };
        let of_choice = |&sequence: &Key| self.sequences[sequence].choice() == choice;
        let Some(sequence) = self.requests[key].sequences.iter().copied().find(of_choice) else { return false };
        self.remove_sequence(sequence);
        true
    }

    /// Whether any request is unfinished.
    pub fn has_work(&self) -> bool {
        !self.scheduler.is_idle()
    }

    pub fn stats(&self) -> EngineStats {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let waiting =
            self.scheduler.waiting().iter().filter(|&key| self.sequences[key].state == State::Waiting).count();
        let (pool, swap, moved) = (self.kv.pool(), self.kv.swap(), self.kv.counters());
        EngineStats {
            steps: self.counters.steps,
            running: count(self.scheduler.running().len()),
            waiting: count(waiting),
            preempted: count(self.scheduler.waiting().len() - waiting),
            blocks_total: pool.total(),
            blocks_free: pool.free(),
            blocks_cached: pool.cached(),
            preemptions: self.scheduler.preemptions(),
            prefix_queries_tokens: self.counters.prefix_queries_tokens,
            prefix_hits_tokens: self.counters.prefix_hits_tokens,
            prompt_tokens: self.counters.prompt_tokens,
            generated_tokens: self.counters.generated_tokens,
            swap_blocks_total: swap.total(),
            swap_blocks_used: swap.used(),
            swapped_out_blocks: moved.swapped_out,
            swapped_in_blocks: moved.swapped_in,
            disk: self.disk_stats(),
            nan_sequences: self.counters.nan_sequences,
        }
    }

    /// The file below the swap space.
    pub fn disk_stats(&self) -> DiskStats {
        self.kv.swap().disk().map(DiskTier::stats).unwrap_or_default()
    }

    /// Who holds the KV blocks now.
    pub fn kv_report(&self) -> KvReport {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (pool, swap) = (self.kv.pool(), self.kv.swap());
        KvReport {
            blocks_total: pool.total(),
            blocks_empty: pool.free() - pool.cached(),
            blocks_cached: pool.cached(),
            blocks_used: pool.total() - pool.free(),
            blocks_shared: count((0..pool.total()).filter(|&block| pool.refs(block) > 1).count()),
            swap_blocks_total: swap.total(),
            swap_blocks_used: swap.used(),
            swap_blocks_preempted: swap.preempted(),
            disk: self.disk_stats(),
            sequences: (self.sequences.iter())
                .map(|sequence| KvSequence {
                    request: self.requests[sequence.request].id,
                    choice: sequence.choice(),
                    owner: sequence.owner,
                    state: match sequence.state {
                        State::Waiting => KvState::Waiting,
                        State::Running => KvState::Running,
                        State::Preempted => KvState::Preempted,
                    },
                    blocks: count(sequence.table.blocks().len()),
                    tokens: count(sequence.len()),
                })
                .collect(),
        }
    }

    /// Forgets every cached prefix; running sequences keep what they have.
    pub fn reset_prefix_cache(&mut self) {
        self.kv.forget_prefixes();
    }

    /// Puts a file below the swap space. What it holds from an earlier life is found again.
    pub fn attach_disk(&mut self, disk: DiskTier) {
        self.kv.attach(disk);
    }

    /// Changes [`EngineConfig::max_prefill_chunk`] from the next step on. No token depends on it.
    pub fn set_max_prefill_chunk(&mut self, tokens: u32) {
        self.budget.prefill_chunk = tokens.max(1) as usize;
    }

    /// Changes what goes to the swap space from now on. No token depends on it.
    pub fn set_swap(&mut self, control: SwapControl) {
        self.config.swap.control = control;
        self.kv.set_swap(control);
    }

    pub fn swap_control(&self) -> SwapControl {
        self.config.swap.control
    }

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Longest sequence, prompt and answer together: the model's limit, or what the KV blocks hold.
    pub fn max_len(&self) -> u32 {
        self.max_len
    }

    pub fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// Per running sequence, in how many runs of neighbouring blocks it lies; for tests and benchmarks.
    #[doc(hidden)]
    pub fn block_runs(&self) -> impl Iterator<Item = usize> {
        self.scheduler.running().iter().map(|key| self.sequences[key].table.runs())
    }

    /// Holds the book-keeping against itself; for tests.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        if self.scheduler.running().len() > self.budget.sequences {
            return Err(format!("{} sequences run", self.scheduler.running().len()));
        }
        for key in self.scheduler.waiting().iter() {
            if !self.sequences[key].table.blocks().is_empty() {
                return Err(format!("{:?} waits and holds blocks", self.sequences[key].order));
            }
        }
        self.kv.check(self.sequences.iter().map(|sequence| &sequence.table))
    }

    fn validate(&self, request: &EngineRequest) -> Result<(), AddError> {
        if self.by_id.contains_key(&request.id) {
            return Err(AddError::Duplicate(request.id));
        }
        validate::validate(request, RequestBounds { vocab_size: self.limits.vocab_size, max_len: self.max_len })
    }

    fn insert(&mut self, request: EngineRequest, grammar: Option<&CompiledGrammar>) {
        let EngineRequest { id, prompt, choices, sampling, priority, cache_salt, owner } = request;
        let arrival = self.arrivals;
        self.arrivals += 1;
        let space = match self.config.enable_prefix_caching {
            true => KeySpace::Salted(cache_salt),
            false => KeySpace::Private(arrival),
        };
        // Of a request that another worker began, the log-probabilities of the prompt were given there.
        let begun = choices.iter().any(|choice| choice.finished || !choice.generated.is_empty());
        let prompt_logprobs = sampling.prompt_logprobs.filter(|_| !begun).map(|_| {
            let mut known = Vec::with_capacity(prompt.len());
            known.push(None);
            known
        });
        let params = Arc::new(sampling);
        let distinct = Seen::distinct(&params, &prompt);
        let running = choices.iter().filter(|choice| !choice.finished).count();
        let cost = prompt.len() as u64 + running as u64 * u64::from(params.max_tokens.min(ANSWER_ESTIMATE));
        let fare = Fare { class: priority, owner, charged: cost };
        let tag = if self.config.fair_share { self.scheduler.arrive(fare) } else { 0 };
        let cost = if self.config.fair_share { cost } else { 0 };
        let key = self.requests.insert(Request {
            id,
            fare,
            used: 0,
            sequences: Vec::with_capacity(choices.len()),
            started: false,
            prefilling: None,
            prompt_logprobs,
        });
        self.by_id.insert(id, key);
        for (choice, so_far) in (0u16..).zip(choices).filter(|(_, so_far)| !so_far.finished) {
            let room = self.max_len as usize - prompt.len();
            let reserve = room.min(params.max_tokens.min(RESERVE) as usize);
            let mut generated = Vec::with_capacity(reserve.max(so_far.generated.len()));
            generated.extend_from_slice(&so_far.generated);
            let state = grammar.map(|grammar| grammar.after(&generated));
            let blocks = (prompt.len() + reserve).div_ceil(self.limits.block_size as usize) + 1;
            let sequence = self.sequences.insert(Sequence {
                order: Order { priority, tag, cost, arrival, choice },
                request: key,
                prompt: prompt.clone(),
                params: params.clone(),
                space,
                sampler: Sampler::new(&params, &distinct, choice, &generated, state),
                generated,
                computed: 0,
                table: BlockTable::with_capacity(blocks),
                state: State::Waiting,
                owner,
                waits_since: self.scheduler.clock(),
                displaced: 0,
            });
            self.requests[key].sequences.push(sequence);
            self.scheduler.wait(sequence, &self.sequences);
        }
    }

    fn remove_request(&mut self, key: Key) {
        while let Some(sequence) = self.requests[key].sequences.pop() {
            self.drop_sequence(sequence);
        }
        let request = self.requests.remove(key);
        self.by_id.remove(&request.id);
        if self.config.fair_share {
            self.scheduler.leave(request.fare, request.used);
        }
    }

    /// A choice is over; the request too when it was the last.
    fn remove_sequence(&mut self, key: Key) {
        let request_key = self.sequences[key].request;
        let request = &mut self.requests[request_key];
        request.sequences.retain(|&sequence| sequence != key);
        request.prefilling = request.prefilling.filter(|&sequence| sequence != key);
        self.drop_sequence(key);
        if self.requests[request_key].sequences.is_empty() {
            self.remove_request(request_key);
        }
    }

    fn drop_sequence(&mut self, key: Key) {
        self.scheduler.remove(key, &self.sequences);
        let mut sequence = self.sequences.remove(key);
        self.kv.release(&mut sequence.table);
    }
}
