//! Who computes how many tokens in the next step.
//!
//! There is no prefill phase and no decode phase: every sequence has tokens that are known and tokens that are computed, and
//! a step hands out a budget. Running sequences with one token to go come first and are always in; then prompts, with at most
//! `max_prefill_chunk` tokens while others are being answered; then waiting sequences, in order, as far as seats and blocks
//! go. A sequence is admitted with blocks for everything it has to compute, so only growing answers ever lack a block;
//! `preempt` says who makes room then. In that step nobody new is admitted.
//!
//! The order is priority first, then the turn of the owner (`fair`). A waiting sequence goes before a running prompt that is
//! behind it, and where seats or blocks are taken by others who had more than their share, `displace` takes some back.

mod displace;
pub mod fair;
pub mod plan;
mod preempt;
pub mod queues;

use crate::kv::{Admission, KvBlocks};
use crate::sequence::{Key, Order, Request, Requests, Sequence, Sequences, State};
use fair::{FairShare, Fare};
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
    fair: FairShare,
    aging_tokens: u64,
    /// Tokens planned since the start: what time is here.
    clock: u64,
    next_aging: u64,
    /// Memory of a step, kept from step to step.
    keys: Vec<Key>,
}

impl Scheduler {
    pub fn new(max_sequences: usize, aging_tokens: u64) -> Self {
        Self {
            running: Queue::with_capacity(max_sequences),
            waiting: Queue::default(),
            plan: StepPlan::default(),
            started: Vec::new(),
            preemptions: 0,
            fair: FairShare::default(),
            aging_tokens,
            clock: 0,
            next_aging: 0,
            keys: Vec::with_capacity(max_sequences),
        }
    }

    /// A request comes; the tag of its turn.
    pub fn arrive(&mut self, fare: Fare) -> u64 {
        self.fair.arrive(fare)
    }

    /// A request leaves.
    pub fn leave(&mut self, fare: Fare, used: u64) {
        self.fair.leave(fare, used);
    }

    /// Tokens planned so far.
    pub fn clock(&self) -> u64 {
        self.clock
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
        self.age(sequences);
        self.displace(budget, sequences, requests, kv);
        let preemptions = self.preemptions;
        self.plan_decodes(budget, sequences, requests, kv);
        let prefill = match self.plan.entries.is_empty() {
            true => budget.tokens,
            false => budget.tokens.min(self.plan.tokens + budget.prefill_chunk),
        };
        let budget = Budget { tokens: prefill, ..budget };
        let may_admit = self.preemptions == preemptions;
        self.plan_prefills(budget, may_admit, sequences, requests, kv);
        if may_admit {
            self.admit(budget, None, sequences, requests, kv);
        }
        self.clock += self.plan.tokens as u64;
        self.note_turn(sequences);
    }

    /// Whose turn it is: the first that waits or computes its prompt, of the best class that does; else who was admitted last.
    fn note_turn(&mut self, sequences: &Sequences) {
        let prefilling = self.running.iter().find(|&key| {
            let remaining = sequences[key].remaining();
            remaining > 1 && remaining > self.planned_of(key)
        });
        let waiting = self.waiting.entry(0).map(|(order, _)| order);
        let first = prefilling.map(|key| sequences[key].order).into_iter().chain(waiting).min();
        let admitted = || self.started.iter().map(|&(key, _)| sequences[key].order).max();
        if let Some(order) = first.or_else(admitted) {
            self.fair.reached(order.priority, order.tag);
        }
    }

    fn planned_of(&self, key: Key) -> usize {
        // Prompts are few and planned last.
        self.plan.entries.iter().rev().find(|planned| planned.sequence == key).map_or(0, |planned| planned.tokens)
    }

    /// Who has waited long enough goes first of all.
    fn age(&mut self, sequences: &mut Sequences) {
        if self.aging_tokens == 0 || self.clock < self.next_aging {
            return;
        }
        self.next_aging = self.clock + self.aging_tokens / 16 + 1;
        let firsts = [self.running.entry(0), self.waiting.entry(0)];
        let Some(best) = firsts.into_iter().flatten().map(|(order, _)| order.priority).min() else { return };
        self.keys.clear();
        self.keys.extend(self.waiting.iter().filter(|&key| {
            let sequence = &sequences[key];
            sequence.order.priority > best && self.clock - sequence.waits_since >= self.aging_tokens
        }));
        let tag = self.fair.now(best);
        for &key in &self.keys {
            let order = &mut sequences[key].order;
            self.waiting.remove(*order);
            (order.priority, order.tag) = (best, tag);
            self.waiting.insert(*order, key);
        }
    }

    /// Everything that runs gives up its blocks: what they hold can not be relied on.
    pub fn preempt_all(&mut self, sequences: &mut Sequences, requests: &mut Requests, kv: &mut KvBlocks) {
        while let Some(victim) = self.running.pop_last() {
            preempt::preempt(victim, &mut self.waiting, self.clock, sequences, requests, kv);
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
                    let queues = preempt::Queues { running: &mut self.running, waiting: &mut self.waiting };
                    match preempt::preempt_last(queues, key, self.clock, sequences, requests, kv) {
                        Some(_) => self.preemptions += 1,
                        None => index += 1,
                    }
                }
            }
        }
    }

    fn plan_prefills(
        &mut self,
        budget: Budget,
        may_admit: bool,
        sequences: &mut Sequences,
        requests: &mut Requests,
        kv: &mut KvBlocks,
    ) {
        let mut prompts = std::mem::take(&mut self.keys);
        prompts.clear();
        prompts.extend(self.running.iter().filter(|&key| sequences[key].remaining() > 1));
        for &key in &prompts {
            if may_admit {
                self.admit(budget, Some(sequences[key].order), sequences, requests, kv);
            }
            self.plan_chunk(key, None, budget, sequences, requests);
        }
        self.keys = prompts;
    }

    /// Gives a sequence as much of the budget as it can use. `copy` comes before its first token.
    fn plan_chunk(
        &mut self,
        key: Key,
        copy: Option<(u32, u32)>,
        budget: Budget,
        sequences: &Sequences,
        requests: &Requests,
    ) {
        let sequence = &sequences[key];
        let mut tokens = sequence.remaining().min(budget.tokens - self.plan.tokens);
        let mut prompt_rows = 0;
        if let Some(known) = &requests[sequence.request].prompt_logprobs {
            // From the first unknown one on each token takes a row. One per running sequence is spoken for.
            let taken = self.rows_taken();
            let before = (known.len() - 1).saturating_sub(sequence.computed);
            tokens = tokens.min(before + 1 + budget.rows.saturating_sub(taken));
            prompt_rows = tokens.saturating_sub(before + 1);
        }
        // Whoever was just admitted computes something: `admit` looks for room first.
        debug_assert!(tokens > 0 || copy.is_none(), "a copy that is not made leaves a hole");
        if tokens > 0 {
            self.plan.push(Planned { sequence: key, tokens, copy, prompt_rows });
        }
    }

    /// Logit rows that are planned, and one for each running sequence that is not.
    fn rows_taken(&self) -> usize {
        self.plan.rows + self.running.len() - self.plan.entries.len()
    }

    /// Lets waiting sequences in, in order; `before`: only those that come before it.
    fn admit(
        &mut self,
        budget: Budget,
        before: Option<Order>,
        sequences: &mut Sequences,
        requests: &mut Requests,
        kv: &mut KvBlocks,
    ) {
        let mut index = 0;
        while self.running.len() < budget.sequences
            && self.plan.tokens < budget.tokens
            && self.rows_taken() < budget.rows
            && let Some((order, key)) = self.waiting.entry(index)
            && before.is_none_or(|before| order < before)
        {
            let sequence = &mut sequences[key];
            let request = &mut requests[sequence.request];
            if request.prefilling.is_some() {
                index += 1;
                continue;
            }
            let most_cached = most_cached(sequence, request);
            let growth = growth(self.running.len(), request);
            let (table, content) = sequence.table_and_content();
            match kv.admit(table, content, most_cached, growth) {
                Admission::PrefixPending => index += 1,
                Admission::NoRoom => break,
                Admission::Admitted { cached_tokens, copy } => {
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
                    self.plan_chunk(key, copy, budget, sequences, requests);
                }
            }
        }
    }
}

/// Tokens of a sequence that it need not compute itself: its last one, and those whose log-probabilities are asked for, give
/// something that is not in the cache.
fn most_cached(sequence: &Sequence, request: &Request) -> usize {
    match &request.prompt_logprobs {
        Some(known) => known.len() - 1,
        None => sequence.len() - 1,
    }
}

/// What the running ones are about to need, so that nobody is admitted only to be preempted at once, and a copy of the last
/// block for each choice that will fork. Nobody runs: everything is there to be used.
fn growth(running: usize, request: &Request) -> u32 {
    let blocks = if running == 0 { 0 } else { running + request.sequences.len() - 1 };
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
