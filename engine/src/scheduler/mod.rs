//! Who computes how many tokens in the next step.
//!
//! There is no prefill phase and no decode phase: every sequence has tokens that are known and tokens that are computed, and
//! a step hands out a budget. Running sequences with one token to go come first and are always in; then prompts, with at most
//! `max_prefill_chunk` tokens while others are being answered; then waiting sequences, in order, as far as seats and blocks
//! go. A sequence is admitted with blocks for everything it has to compute, so only growing answers ever lack a block;
//! `preempt` says who makes room then. In that step nobody new is admitted.

pub mod plan;
mod preempt;
pub mod queues;

use crate::kv::{Admission, KvBlocks};
use crate::sequence::{Key, Requests, Sequences, State};
use plan::{Planned, StepPlan};
use queues::Queue;

/// Bounds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    pub sequences: usize,
    pub tokens: usize,
    /// Prompt tokens in a step that also carries decodes.
    pub prefill_chunk: usize,
    /// Logit rows.
    pub rows: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    running: Queue,
    waiting: Queue,
    plan: StepPlan,
    /// Sequences admitted for the first time of their request in this step, with their cached tokens.
    started: Vec<(Key, usize)>,
    preemptions: u64,
}

impl Scheduler {
    pub fn new(max_sequences: usize) -> Self {
        Self {
            running: Queue::with_capacity(max_sequences),
            waiting: Queue::default(),
            plan: StepPlan::default(),
            started: Vec::new(),
            preemptions: 0,
        }
    }

    pub fn running(&self) -> &Queue {
        &self.running
    }

    pub fn waiting(&self) -> &Queue {
        &self.waiting
    }

    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    pub fn started(&self) -> &[(Key, usize)] {
        &self.started
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub fn wait(&mut self, key: Key, sequences: &Sequences) {
        self.waiting.insert(sequences[key].order, key);
    }

    /// A fork takes a seat beside the sequence it comes from.
    pub fn run_fork(&mut self, key: Key, sequences: &Sequences) {
        let order = sequences[key].order;
        self.waiting.remove(order);
        self.running.insert(order, key);
    }

    /// The sequence is over.
    pub fn remove(&mut self, key: Key, sequences: &Sequences) {
        let order = sequences[key].order;
        if !self.running.remove(order) {
            self.waiting.remove(order);
        }
    }

    /// Plans the next step.
    pub fn plan_step(&mut self, budget: Budget, sequences: &mut Sequences, requests: &mut Requests, kv: &mut KvBlocks) {
        self.plan.clear();
        self.started.clear();
        let preemptions = self.preemptions;
        self.plan_decodes(budget, sequences, requests, kv);
        let prefill = match self.plan.entries.is_empty() {
            true => budget.tokens,
            false => budget.tokens.min(self.plan.tokens + budget.prefill_chunk),
        };
        let budget = Budget { tokens: prefill, ..budget };
        self.plan_prefills(budget, sequences, requests);
        if self.preemptions == preemptions {
            self.admit(budget, sequences, requests, kv);
        }
    }

    /// Everything that runs gives up its blocks: what they hold can not be relied on.
    pub fn preempt_all(&mut self, sequences: &mut Sequences, requests: &mut Requests, kv: &mut KvBlocks) {
        while let Some(victim) = self.running.pop_last() {
            preempt::preempt(victim, &mut self.waiting, sequences, requests, kv);
            self.preemptions += 1;
        }
    }

    fn plan_decodes(&mut self, budget: Budget, sequences: &mut Sequences, requests: &mut Requests, kv: &mut KvBlocks) {
        let mut index = 0;
        while let Some(key) = self.running.get(index) {
            let sequence = &mut sequences[key];
            if sequence.remaining() > 1 || self.plan.tokens == budget.tokens {
                index += 1;
                continue;
            }
            match kv.make_room(&mut sequence.table, sequence.computed) {
                Ok(copy) => {
                    self.plan.push(Planned { sequence: key, tokens: 1, copy, prompt_rows: 0 });
                    index += 1;
                }
                Err(_) => {
                    let (running, waiting) = (&mut self.running, &mut self.waiting);
                    match preempt::preempt_last(running, waiting, key, sequences, requests, kv) {
                        Some(_) => self.preemptions += 1,
                        None => index += 1,
                    }
                }
            }
        }
    }

    fn plan_prefills(&mut self, budget: Budget, sequences: &Sequences, requests: &Requests) {
        for index in 0..self.running.len() {
            if let Some(key) = self.running.get(index)
                && sequences[key].remaining() > 1
            {
                self.plan_chunk(key, budget, sequences, requests);
            }
        }
    }

    /// Gives a sequence as much of the budget as it can use.
    fn plan_chunk(&mut self, key: Key, budget: Budget, sequences: &Sequences, requests: &Requests) {
        let sequence = &sequences[key];
        let mut tokens = sequence.remaining().min(budget.tokens - self.plan.tokens);
        let mut prompt_rows = 0;
        if let Some(known) = &requests[sequence.request].prompt_logprobs {
            // From the first unknown one on each token takes a row. One per running sequence is spoken for.
            let taken = self.plan.rows + self.running.len() - self.plan.entries.len();
            let before = (known.len() - 1).saturating_sub(sequence.computed);
            tokens = tokens.min(before + 1 + budget.rows.saturating_sub(taken));
            prompt_rows = tokens.saturating_sub(before + 1);
        }
        if tokens > 0 {
            self.plan.push(Planned { sequence: key, tokens, copy: None, prompt_rows });
        }
    }

    fn admit(&mut self, budget: Budget, sequences: &mut Sequences, requests: &mut Requests, kv: &mut KvBlocks) {
        let mut index = 0;
        while self.running.len() < budget.sequences
            && self.plan.tokens < budget.tokens
            && self.plan.rows < budget.rows
            && let Some(key) = self.waiting.get(index)
        {
            let sequence = &mut sequences[key];
            let request = &mut requests[sequence.request];
            if request.prefilling.is_some() {
                index += 1;
                continue;
            }
            let most_cached = match &request.prompt_logprobs {
                Some(known) => known.len() - 1,
                None => sequence.len() - 1,
            };
            // What the running ones are about to need, so that nobody is admitted only to be preempted at once, and a copy of
            // the last block for each choice that will fork. Nobody runs: everything is there to be used.
            let growth = match self.running.len() {
                0 => 0,
                running => running + request.sequences.len() - 1,
            };
            let (table, content) = sequence.table_and_content();
            match kv.admit(table, content, most_cached, u32::try_from(growth).unwrap_or(u32::MAX)) {
                Admission::PrefixPending => index += 1,
                Admission::NoRoom => break,
                Admission::Admitted { cached_tokens } => {
                    sequence.computed = cached_tokens;
                    sequence.state = State::Running;
                    if cached_tokens < sequence.prompt.len() {
                        request.prefilling = Some(key);
                    }
                    if !request.started {
                        request.started = true;
                        self.started.push((key, cached_tokens));
                    }
                    let order = sequence.order;
                    self.waiting.remove(order);
                    self.running.insert(order, key);
                    self.plan_chunk(key, budget, sequences, requests);
                }
            }
        }
    }
}
