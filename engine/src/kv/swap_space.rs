//! Host copies of KV blocks that had to leave the pool: a second level below the prefix cache.
//!
//! A block is known here by its content, like in the pool; so a preempted sequence needs no swap state of its own: when its
//! turn comes it looks for its prefix, finds in the pool what was not needed meanwhile, finds here what was, and computes
//! the rest again. That can not deadlock: nothing ever waits for space here, a full space forgets its oldest copies.
//! Copies of preempted sequences outlive copies of evicted prefixes.

use super::eviction::EvictionList;
use super::prefix_cache::{BlockKey, Entry, PrefixCache};
use crate::config::SwapPolicy;

#[derive(Debug)]
pub struct SwapSpace {
    policy: SwapPolicy,
    cache: PrefixCache,
    free: Vec<u32>,
    /// Slots in use from the oldest on, apart for evicted prefixes and for preempted sequences.
    prefixes: EvictionList,
    preempted: EvictionList,
    /// Slots that this step copies back; they stay until the step is over.
    pinned: Vec<u32>,
    memory: Vec<u8>,
    block_bytes: usize,
}

impl SwapSpace {
    pub fn new(policy: SwapPolicy, space_bytes: u64, block_bytes: usize, block_size: u32) -> Self {
        let slots = match policy {
            SwapPolicy::Off => 0,
            _ if block_bytes == 0 => 0,
            _ => u32::try_from(space_bytes / block_bytes as u64).unwrap_or(u32::MAX),
        };
        Self {
            policy,
            cache: PrefixCache::new(slots, block_size),
            free: (0..slots).rev().collect(),
            prefixes: EvictionList::new(slots),
            preempted: EvictionList::new(slots),
            pinned: Vec::with_capacity(slots as usize),
            memory: vec![0; slots as usize * block_bytes],
            block_bytes,
        }
    }

    pub fn total(&self) -> u32 {
        self.used() + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    pub fn used(&self) -> u32 {
        self.prefixes.count() + self.preempted.count() + u32::try_from(self.pinned.len()).unwrap_or(u32::MAX)
    }

    /// A registered block leaves the pool. Answers the slot to copy it to; `None` if it is not wanted here or here already.
    pub fn offer(&mut self, entry: Entry, tokens: &[u32]) -> Option<u32> {
        let wanted = match self.policy {
            SwapPolicy::Off => false,
            SwapPolicy::OnPressure => entry.preempted,
            SwapPolicy::Always => true,
        };
        if !wanted || !entry.computed {
            return None;
        }
        let key = BlockKey {
            space: entry.space,
            parent: super::prefix_cache::Link { serial: entry.parent },
            hash: entry.hash,
            tokens,
        };
        if let Some((slot, known)) = self.cache.find(&key)
            && known.serial == entry.serial
        {
            self.refresh(slot, entry.preempted);
            return None;
        }
        let slot = self.free.pop().or_else(|| self.drop_oldest())?;
        if let Some(displaced) = self.cache.insert(slot, entry, tokens)
            && self.unlist(displaced)
        {
            self.free.push(displaced);
        }
        self.list(entry.preempted).push_newest(slot);
        Some(slot)
    }

    pub fn find(&self, key: &BlockKey<'_>) -> Option<(u32, Entry)> {
        self.cache.find(key)
    }

    /// Keeps a slot until the step is over: it is about to be copied back.
    pub fn pin(&mut self, slot: u32) {
        if self.unlist(slot) {
            self.pinned.push(slot);
        }
    }

    /// The step is over: what it copied back are old acquaintances like the others, and the newest.
    pub fn unpin(&mut self) {
        while let Some(slot) = self.pinned.pop() {
            match self.cache.entry_mut(slot) {
                Some(entry) => {
                    entry.preempted = false;
                    self.prefixes.push_newest(slot);
                }
                None => self.free.push(slot),
            }
        }
    }

    pub fn clear(&mut self) {
        while let Some(slot) = self.drop_oldest() {
            self.free.push(slot);
        }
        for &slot in &self.pinned {
            self.cache.remove(slot);
        }
    }

    pub fn slot(&self, slot: u32) -> &[u8] {
        let start = slot as usize * self.block_bytes;
        &self.memory[start..start + self.block_bytes]
    }

    pub fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        let start = slot as usize * self.block_bytes;
        &mut self.memory[start..start + self.block_bytes]
    }

    fn drop_oldest(&mut self) -> Option<u32> {
        let slot = match self.prefixes.oldest() {
            Some(slot) => {
                self.prefixes.remove(slot);
                slot
            }
            None => {
                let slot = self.preempted.oldest()?;
                self.preempted.remove(slot);
                slot
            }
        };
        self.cache.remove(slot);
        Some(slot)
    }

    fn refresh(&mut self, slot: u32, preempted: bool) {
        if self.unlist(slot) {
            self.list(preempted).push_newest(slot);
        }
    }

    /// Takes a slot off its list; false if this step still reads it.
    fn unlist(&mut self, slot: u32) -> bool {
        let list = match self.prefixes.contains(slot) {
            true => &mut self.prefixes,
            false => &mut self.preempted,
        };
        let listed = list.contains(slot);
        if listed {
            list.remove(slot);
        }
        listed
    }

    fn list(&mut self, preempted: bool) -> &mut EvictionList {
        if preempted { &mut self.preempted } else { &mut self.prefixes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::prefix_cache::{KeySpace, Link};
    use super::*;

    fn entry(hash: u128, preempted: bool) -> Entry {
        #[expect(clippy::cast_possible_truncation, reason = "small test numbers")]
        let serial = hash as u64;
        Entry { hash, space: KeySpace::Salted(0), parent: 0, serial, computed: true, preempted }
    }

    fn holds(space: &SwapSpace, hash: u128) -> bool {
        space.find(&BlockKey { space: KeySpace::Salted(0), parent: Link::ROOT, hash, tokens: &[1, 1] }).is_some()
    }

    #[test]
    fn a_full_space_forgets_prefixes_before_preempted_blocks() {
        let mut space = SwapSpace::new(SwapPolicy::Always, 8, 4, 2);
        assert_eq!(space.offer(entry(1, true), &[1, 1]), Some(0));
        assert_eq!(space.offer(entry(2, false), &[1, 1]), Some(1));
        assert_eq!(space.offer(entry(3, false), &[1, 1]), Some(1));
        assert_eq!((holds(&space, 1), holds(&space, 2), holds(&space, 3)), (true, false, true));
        assert_eq!(space.offer(entry(3, false), &[1, 1]), None, "it is here already");
    }

    #[test]
    fn a_slot_that_is_read_in_this_step_is_not_given_away() {
        let mut space = SwapSpace::new(SwapPolicy::OnPressure, 4, 4, 2);
        assert_eq!(space.offer(entry(2, false), &[1, 1]), None, "no pressure");
        assert_eq!(space.offer(entry(1, true), &[1, 1]), Some(0));
        space.pin(0);
        assert_eq!(space.offer(entry(3, true), &[1, 1]), None);
        space.unpin();
        assert_eq!(space.offer(entry(3, true), &[1, 1]), Some(0));
        assert_eq!((space.used(), space.total()), (1, 1));
        space.clear();
        assert_eq!((space.used(), space.total()), (0, 1));
    }
}
