//! One step: plan, move blocks, compute, sample, and tell what came of it.

use super::{Engine, EngineError};
use crate::outputs::{FinishReason, NO_TOKEN, PromptLogprobs, SequenceOutput, Started, StepOutputs, TokenLogprobs};
use crate::runner::{ModelRunner, Row, Want};
use crate::sampling::{self, Chosen, NoChoice, Scratch, stop};
use crate::scheduler::plan::{RowUse, build_batch};
use crate::sequence::{Key, Sequences, State};
use std::sync::{Mutex, PoisonError};

/// What sampling one row leaves behind, and the memory it used.
#[derive(Debug, Default)]
pub(super) struct RowSlot {
    scratch: Scratch,
    /// Of the sequence and its forks.
    chosen: Vec<Result<Chosen, NoChoice>>,
    prompt: Option<Result<TokenLogprobs, NoChoice>>,
}

impl<R: ModelRunner> Engine<R> {
    /// Plans one step, computes it, samples, and puts what it brought into `out` (emptied first). A step without sequences had
    /// nothing that could run.
    pub fn step(&mut self, out: &mut StepOutputs) -> Result<(), EngineError> {
        out.clear();
        self.counters.steps += 1;
        out.step = self.counters.steps;
        self.scheduler.plan_step(self.budget, &mut self.sequences, &mut self.requests, &mut self.kv);
        self.move_blocks();
        let block_size = self.limits.block_size as usize;
        let plan = self.scheduler.plan();
        build_batch(plan, &self.sequences, &self.requests, block_size, &mut self.batch, &mut self.uses);
        if self.batch.sequences.is_empty() {
            return Ok(());
        }
        self.find_forks();
        if let Err(cause) = self.runner.execute(&self.batch) {
            self.give_up_step();
            return Err(EngineError::Runner { step: self.counters.steps, cause });
        }
        self.report_started(out);
        self.advance(out);
        self.sample();
        self.collect(out);
        if !self.has_work() {
            // Nobody knows when the next step comes: what ended sequences leave to be copied is copied now.
            self.move_blocks();
        }
        Ok(())
    }

    /// Copies what leaves the KV pool to the swap space, and what comes back.
    fn move_blocks(&mut self) {
        let (moves, swap) = self.kv.moves();
        for &(block, slot) in &moves.out {
            self.runner.export_block(block, swap.slot_mut(slot));
        }
        for &(slot, block) in &moves.back {
            self.runner.import_block(block, swap.slot(slot));
        }
        self.kv.moved();
    }

    /// Choices that have not run yet start from the row where a sequence of their request ends its prompt, as far as there
    /// are seats; the others find its blocks later.
    fn find_forks(&mut self) {
        self.forks.clear();
        let mut seats = self.budget.sequences - self.scheduler.running().len();
        for row in &mut self.uses {
            let RowUse::Sample { sequence, forks, count } = row else {
                continue;
            };
            let leader = &self.sequences[*sequence];
            if !leader.generated.is_empty() {
                continue;
            }
            *forks = self.forks.len();
            let request = &self.requests[leader.request];
            let fresh = request.sequences.iter().copied().filter(|&key| {
                let sequence = &self.sequences[key];
                sequence.state != State::Running && sequence.generated.is_empty()
            });
            self.forks.extend(fresh.take(seats));
            *count = self.forks.len() - *forks;
            seats -= *count;
        }
    }

    /// The runner failed: nothing that the planned blocks hold can be relied on.
    fn give_up_step(&mut self) {
        for &(sequence, _) in self.scheduler.started() {
            self.requests[self.sequences[sequence].request].started = false;
        }
        self.scheduler.preempt_all(&mut self.sequences, &mut self.requests, &mut self.kv);
    }

    fn report_started(&mut self, out: &mut StepOutputs) {
        for &(key, cached) in self.scheduler.started() {
            let sequence = &self.sequences[key];
            let (prompt, cached) = (sequence.prompt.len(), cached.min(sequence.prompt.len()));
            self.counters.prompt_tokens += prompt as u64;
            self.requests[sequence.request].used += (prompt - cached) as u64;
            if self.config.enable_prefix_caching {
                self.counters.prefix_queries_tokens += prompt as u64;
                self.counters.prefix_hits_tokens += cached as u64;
            }
            let cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
            out.started.push(Started { request: self.requests[sequence.request].id, cached_tokens });
        }
    }

    /// What was planned is computed.
    fn advance(&mut self, out: &mut StepOutputs) {
        for planned in &self.scheduler.plan().entries {
            let sequence = &mut self.sequences[planned.sequence];
            let (from, to) = (sequence.computed, sequence.computed + planned.tokens);
            let decode = planned.tokens == 1 && !sequence.generated.is_empty();
            let (table, content) = sequence.table_and_content();
            self.kv.computed(table, content, from, to);
            sequence.computed = to;
            if to >= sequence.prompt.len() {
                let prefilling = &mut self.requests[sequence.request].prefilling;
                *prefilling = prefilling.filter(|&key| key != planned.sequence);
            }
            let tokens = u32::try_from(planned.tokens).unwrap_or(u32::MAX);
            out.tokens += tokens;
            out.prefill_tokens += if decode { 0 } else { tokens };
            if !decode {
                out.prompts.push(self.requests[sequence.request].id);
            }
            out.sequences += 1;
        }
    }

    /// Reads every row; the costly ones side by side.
    fn sample(&mut self) {
        let rows = self.uses.len();
        while self.slots.len() < rows {
            self.slots.push(Mutex::default());
        }
        let (uses, forks, sequences, slots) = (&self.uses, &self.forks, &self.sequences, &self.slots);
        let requests = &self.requests;
        let work = |index: usize, row: Row<'_>| {
            let mut slot = slots[index].lock().unwrap_or_else(PoisonError::into_inner);
            slot.chosen.clear();
            match uses[index] {
                RowUse::Sample { sequence, forks: first, count } => {
                    slot.choose(sequence, &row, sequences);
                    for &fork in &forks[first..first + count] {
                        slot.choose(fork, &row, sequences);
                    }
                }
                RowUse::PromptLogprobs { sequence, position } => {
                    debug_assert!(requests[sequences[sequence].request].prompt_logprobs.is_some());
                    slot.read_prompt(sequence, position, &row, sequences);
                }
            }
        };
        if self.batch.sample_rows.iter().all(|row| row.want == Want::Greedy) {
            (0..rows).for_each(|index| work(index, self.runner.row(index)));
        } else {
            self.runner.for_each_row(rows, &work);
        }
    }

    fn collect(&mut self, out: &mut StepOutputs) {
        for index in 0..self.uses.len() {
            match self.uses[index] {
                RowUse::PromptLogprobs { sequence, position } => self.collect_prompt(index, sequence, position, out),
                RowUse::Sample { sequence, forks, count } => {
                    // The sequence may be gone: a row of its prompt was not finite.
                    if self.sequences.get(sequence).is_some() {
                        self.report_prompt(sequence, out);
                        for fork in forks..forks + count {
                            self.fork(self.forks[fork], sequence);
                        }
                        self.collect_choice(index, 0, sequence, out);
                        for nth in 0..count {
                            self.collect_choice(index, nth + 1, self.forks[forks + nth], out);
                        }
                    }
                }
            }
        }
    }

    fn collect_prompt(&mut self, row: usize, key: Key, position: usize, out: &mut StepOutputs) {
        let Some(sequence) = self.sequences.get(key) else {
            return;
        };
        let request = sequence.request;
        let slot = self.slots[row].get_mut().unwrap_or_else(PoisonError::into_inner);
        match (slot.prompt.take(), &mut self.requests[request].prompt_logprobs) {
            (Some(Ok(logprobs)), Some(known)) => known.push(Some(logprobs)),
            (Some(Err(_)), _) => {
                self.counters.nan_sequences += 1;
                let reason = format!("a logit at position {position} of the prompt is not a finite number");
                out.failed.push((self.requests[request].id, reason));
                self.remove_request(request);
            }
            (None, _) | (_, None) => unreachable!("the row was read, and is only planned while its request wants it"),
        }
    }

    /// The prompt is computed: what was asked about it is complete.
    fn report_prompt(&mut self, key: Key, out: &mut StepOutputs) {
        let request = &mut self.requests[self.sequences[key].request];
        if let Some(tokens) = request.prompt_logprobs.take() {
            debug_assert_eq!(tokens.len(), self.sequences[key].prompt.len());
            out.prompt_logprobs.push(PromptLogprobs { request: request.id, tokens });
        }
    }

    fn fork(&mut self, fork: Key, leader: Key) {
        let (sequence, leader) = self.sequences.pair(fork, leader);
        self.kv.fork(&leader.table, &mut sequence.table);
        sequence.computed = leader.computed;
        sequence.state = State::Running;
        self.scheduler.run_fork(fork, &self.sequences);
    }

    fn collect_choice(&mut self, row: usize, nth: usize, key: Key, out: &mut StepOutputs) {
        let slot = self.slots[row].get_mut().unwrap_or_else(PoisonError::into_inner);
        let chosen = std::mem::replace(&mut slot.chosen[nth], Err(NoChoice::DeadEnd));
        let sequence = &mut self.sequences[key];
        let (token, logprobs, finish) = match chosen {
            Ok(Chosen { token, logprobs }) => {
                sequence.generated.push(token);
                sequence.sampler.push(token);
                self.counters.generated_tokens += 1;
                self.requests[sequence.request].used += 1;
                let room = self.max_len as usize - sequence.len();
                let constrained = sequence.sampler.constrained();
                (token, logprobs, stop::finish(&sequence.params, &sequence.generated, room, constrained))
            }
            Err(cause) => {
                self.counters.nan_sequences += u64::from(cause == NoChoice::NotFinite);
                (NO_TOKEN, None, Some(FinishReason::Error))
            }
        };
        let (request, choice) = (self.requests[sequence.request].id, sequence.choice());
        out.outputs.push(SequenceOutput { request, choice, token, logprobs, finish });
        if finish.is_some() {
            self.remove_sequence(key);
        }
    }
}

impl RowSlot {
    fn choose(&mut self, key: Key, row: &Row<'_>, sequences: &Sequences) {
        let sequence = &sequences[key];
        let position = sequence.len();
        let chosen = sequence.sampler.choose(&sequence.params, &sequence.generated, position, row, &mut self.scratch);
        self.chosen.push(chosen);
    }

    fn read_prompt(&mut self, key: Key, position: usize, row: &Row<'_>, sequences: &Sequences) {
        let sequence = &sequences[key];
        let top = sequence.params.prompt_logprobs.unwrap_or(0) as usize;
        let known = match row {
            Row::Logits(row) => sampling::logprobs(row, sequence.prompt[position + 1], top),
            Row::Greedy { .. } => None,
        };
        self.prompt = Some(known.ok_or(NoChoice::NotFinite));
    }
}
