//! Taking seats and blocks back from owners who have more than their share, for the first in line.
//!
//! Only somebody behind it in order gives way, so two can never displace each other in turns; only a worse priority or an
//! owner with more running sequences does; and each sequence does so a bounded number of times. What it had computed stays
//! in the prefix cache as long as nobody needs the blocks, so giving way often costs next to nothing.

use super::{Budget, Scheduler, growth, most_cached, preempt};
use crate::kv::KvBlocks;
use crate::sequence::{Key, Requests, Sequence, Sequences};

/// Most sequences that give way in one step.
const AT_ONCE: usize = 4;

/// How often one sequence gives way in its life.
const DISPLACED_MAX: u8 = 2;

impl Scheduler {
    /// Makes room for the first in line, if it has to wait for somebody who should wait for it, and if that helps.
    pub(super) fn displace(
        &mut self,
        budget: Budget,
        sequences: &mut Sequences,
        requests: &mut Requests,
        kv: &mut KvBlocks,
    ) {
        let last = self.running.len().checked_sub(1).and_then(|last| self.running.entry(last));
        let (Some((last, _)), Some((first, key))) = (last, self.waiting.entry(0)) else { return };
        if first > last {
            return;
        }
        let sequence = &mut sequences[key];
        let request = &requests[sequence.request];
        if request.prefilling.is_some() {
            return;
        }
        let (most_cached, growth) = (most_cached(sequence, request), growth(self.running.len(), request));
        let (table, content) = sequence.table_and_content();
        let Some(lacking) = kv.lacking(table, content, most_cached, growth) else { return };
        let seats = usize::from(self.running.len() >= budget.sequences);
        if seats == 0 && lacking == 0 {
            return;
        }
        let victims = self.victims(key, seats, lacking as usize, sequences);
        for victim in victims.into_iter().flatten() {
            self.running.remove(sequences[victim].order);
            sequences[victim].displaced += 1;
            preempt::preempt(victim, &mut self.waiting, self.clock, sequences, requests, kv);
            self.preemptions += 1;
        }
    }

    /// Who gives way; nobody if all that may would not be enough.
    fn victims(&self, first: Key, seats: usize, blocks: usize, sequences: &Sequences) -> [Option<Key>; AT_ONCE] {
        let first = &sequences[first];
        let mut victims = [None; AT_ONCE];
        let (mut count, mut freed) = (0, 0);
        for index in (0..self.running.len()).rev() {
            let Some((order, key)) = self.running.entry(index) else { break };
            if order < first.order || count == AT_ONCE {
                break;
            }
            let victim = &sequences[key];
            if victim.displaced >= DISPLACED_MAX || !self.owes(victim, first, sequences) {
                continue;
            }
            victims[count] = Some(key);
            count += 1;
            freed += victim.table.blocks().len();
            if count >= seats && freed >= blocks {
                return victims;
            }
        }
        [None; AT_ONCE]
    }

    fn owes(&self, victim: &Sequence, first: &Sequence, sequences: &Sequences) -> bool {
        if victim.order.priority > first.order.priority {
            return true;
        }
        let of = |owner: u64| self.running.iter().filter(|&key| sequences[key].owner == owner).count();
        victim.owner != first.owner && of(victim.owner) > of(first.owner) + 1
    }
}
