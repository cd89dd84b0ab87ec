//! Making room: who has to give its blocks up when a sequence before it needs one.
//!
//! The victim is always the last in order, so the first always makes progress, and what is given up is the least. The last
//! itself is never preempted for its own sake: it keeps what it has and skips the step; whoever needs its blocks takes them.

use super::queues::Queue;
use crate::kv::KvBlocks;
use crate::sequence::{Key, Requests, Sequences, State};

pub(super) struct Queues<'q> {
    pub(super) running: &'q mut Queue,
    pub(super) waiting: &'q mut Queue,
}

/// Sends the last running sequence back to wait. `None` if only `needy` is left, which must skip the step.
pub(super) fn preempt_last(
    queues: Queues<'_>,
    needy: Key,
    clock: u64,
    sequences: &mut Sequences,
    requests: &mut Requests,
    kv: &mut KvBlocks,
) -> Option<Key> {
    let Queues { running, waiting } = queues;
    if running.get(running.len().checked_sub(1)?) == Some(needy) {
        return None;
    }
    let victim = running.pop_last()?;
    preempt(victim, waiting, clock, sequences, requests, kv);
    Some(victim)
}

/// Takes a sequence's blocks and lets it wait; it is not in the running queue any more.
pub(super) fn preempt(
    victim: Key,
    waiting: &mut Queue,
    clock: u64,
    sequences: &mut Sequences,
    requests: &mut Requests,
    kv: &mut KvBlocks,
) {
    let sequence = &mut sequences[victim];
    kv.release_preempted(&mut sequence.table);
    sequence.computed = 0;
    sequence.waits_since = clock;
    sequence.state = State::Preempted;
    waiting.insert(sequence.order, victim);
    let prefilling = &mut requests[sequence.request].prefilling;
    *prefilling = prefilling.filter(|&key| key != victim);
}
