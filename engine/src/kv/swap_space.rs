//! Host copies of KV blocks that had to leave the pool: a second level below the prefix cache.
//!
//! A block is known here by its content, like in the pool; so a preempted sequence needs no swap state of its own: when its
//! turn comes it looks for its prefix, finds in the pool what was not needed meanwhile, finds here what was, and computes
//! the rest again. That can not deadlock: nothing ever waits for space here, a full space forgets its oldest copies.
//! Copies of preempted sequences outlive copies of evicted prefixes, and prefixes leave them some room ([`SwapControl`]).

use super::disk_tier::DiskTier;
use super::eviction::EvictionList;
use super::prefix_cache::{BlockKey, Entry, PrefixCache};
use crate::config::{SwapConfig, SwapControl, SwapPolicy};

#[derive(Debug)]
pub struct SwapSpace {
    control: SwapControl,
    cache: PrefixCache,
    free: Vec<u32>,
    /// Slots in use from the oldest on, apart for evicted prefixes and for preempted sequences.
    prefixes: EvictionList,
    preempted: EvictionList,
    /// Slots that this step copies back; they stay until the step is over.
    pinned: Vec<u32>,
    memory: Vec<u8>,
    block_bytes: usize,
    /// Below the copies in memory, where there is one.
    disk: Option<DiskTier>,
}

impl SwapSpace {
    pub fn new(config: SwapConfig, block_bytes: usize, block_size: u32) -> Self {
        let slots = match block_bytes {
            0 => 0,
            _ => u32::try_from(config.space_bytes / block_bytes as u64).unwrap_or(u32::MAX),
        };
        Self {
            control: config.control,
            cache: PrefixCache::new(slots, block_size),
            free: (0..slots).rev().collect(),
            prefixes: EvictionList::new(slots),
            preempted: EvictionList::new(slots),
            pinned: Vec::with_capacity(slots as usize),
            // Zeroed pages are not there before they are written to: a space that is off costs nothing.
            memory: vec![0; slots as usize * block_bytes],
            block_bytes,
            disk: None,
        }
    }

    /// Puts a file below the copies in memory.
    pub fn attach(&mut self, disk: DiskTier) {
        self.disk = Some(disk);
    }

    pub fn disk(&self) -> Option<&DiskTier> {
        self.disk.as_ref()
    }

    pub fn total(&self) -> u32 {
        self.used() + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    pub fn used(&self) -> u32 {
        self.prefixes.count() + self.preempted.count() + u32::try_from(self.pinned.len()).unwrap_or(u32::MAX)
    }

    /// Copies that preempted sequences will want back.
    pub fn preempted(&self) -> u32 {
        self.preempted.count()
    }

    /// A registered block leaves the pool. Answers the slot to copy it to; `None` if it is not wanted here or here already.
    pub fn offer(&mut self, entry: Entry, tokens: &[u32]) -> Option<u32> {
        let wanted = match self.control.policy {
            _ if !self.control.copies_pay => false,
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
        if !entry.preempted && !self.has_room_for_prefixes() {
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

    /// A copy that is worth bringing back.
    pub fn find_to_fetch(&self, key: &BlockKey<'_>) -> Option<(u32, Entry)> {
        if self.control.copies_pay { self.find(key) } else { None }
    }

    /// A content that is on the disk and worth bringing back.
    pub fn find_on_disk(&self, key: &BlockKey<'_>) -> Option<Entry> {
        self.disk.as_ref().filter(|_| self.control.copies_pay && self.control.disk_pays)?.find(key)
    }

    /// Anywhere here, worth it or not: contents keep their number.
    pub fn known(&self, key: &BlockKey<'_>) -> Option<Entry> {
        self.find(key).map(|(_, entry)| entry).or_else(|| self.disk.as_ref()?.find(key))
    }

    /// Reads a content from the disk into a slot in memory, which stays until the step is over. Answers the slot: no copy into
    /// it that was planned before may be made any more. `None`: it could not be read, or there is no slot; then it is computed.
    pub fn promote(&mut self, key: &BlockKey<'_>) -> Option<u32> {
        let entry = self.find_on_disk(key)?;
        let slot = self.free.pop().or_else(|| self.drop_oldest())?;
        let start = slot as usize * self.block_bytes;
        let memory = &mut self.memory[start..start + self.block_bytes];
        if !self.disk.as_mut().is_some_and(|disk| disk.load(key, memory)) {
            self.free.push(slot);
            return None;
        }
        if let Some(displaced) = self.cache.insert(slot, Entry { preempted: false, ..entry }, key.tokens)
            && self.unlist(displaced)
        {
            self.free.push(displaced);
        }
        self.pinned.push(slot);
        Some(slot)
    }

    /// A slot has been filled: what memory may forget later is on the disk then.
    pub fn write_through(&mut self, slot: u32) {
        let start = slot as usize * self.block_bytes;
        if let (Some(disk), Some(entry)) = (&mut self.disk, self.cache.entry(slot)) {
            disk.store(*entry, self.cache.tokens(slot), &self.memory[start..start + self.block_bytes]);
        }
    }

    /// Whether prefixes are kept for the next life too.
    pub fn outlives_us(&self) -> bool {
        self.disk.is_some() && self.control.policy == SwapPolicy::Always && self.control.copies_pay
    }

    pub fn control(&self) -> SwapControl {
        self.control
    }

    /// Changes what is kept here from now on; off forgets all.
    pub fn set_control(&mut self, control: SwapControl) {
        self.control = control;
        if control.policy == SwapPolicy::Off {
            self.clear();
        }
    }

    /// Blocks that one preempted sequence may leave here.
    pub fn sequence_blocks_max(&self) -> usize {
        self.share(self.control.sequence_share) as usize
    }

    fn share(&self, share: f32) -> u32 {
        // Shares are within 0 and 1, and so is the result within the space.
        (f64::from(self.total()) * f64::from(share)).ceil() as u32
    }

    /// Prefixes that are in the way make room, many at once, so that not each new one has to.
    fn has_room_for_prefixes(&mut self) -> bool {
        let high = self.share(self.control.high_watermark);
        if self.used() < high {
            return true;
        }
        let low = self.share(self.control.low_watermark).min(high.saturating_sub(1));
        while self.used() > low
            && let Some(slot) = self.prefixes.oldest()
        {
            self.prefixes.remove(slot);
            self.cache.remove(slot);
            self.free.push(slot);
        }
        self.used() < high
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
        if let Some(disk) = &mut self.disk {
            disk.clear();
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

    fn space(control: SwapControl, space_bytes: u64) -> SwapSpace {
        SwapSpace::new(SwapConfig { space_bytes, control }, 4, 2)
    }

    #[test]
    fn prefixes_leave_room_for_a_burst_of_preemptions() {
        let control = SwapControl { high_watermark: 0.75, low_watermark: 0.5, ..SwapControl::of(SwapPolicy::Always) };
        let mut space = space(control, 32);
        for hash in 0..6 {
            assert!(space.offer(entry(hash, false), &[1, 1]).is_some());
        }
        assert!(space.offer(entry(6, false), &[1, 1]).is_some());
        assert_eq!(space.used(), 5, "down to the low mark, and one more");
        for hash in 7..10 {
            assert!(space.offer(entry(hash, true), &[1, 1]).is_some());
        }
        assert!(space.offer(entry(10, false), &[1, 1]).is_some());
        assert!((7..10).all(|hash| holds(&space, hash)), "preempted ones stay");
    }

    #[test]
    fn what_does_not_pay_is_neither_taken_nor_given() {
        let mut space = space(SwapControl::of(SwapPolicy::Always), 8);
        space.offer(entry(1, true), &[1, 1]);
        space.set_control(SwapControl { copies_pay: false, ..space.control() });
        assert_eq!(space.offer(entry(2, true), &[1, 1]), None);
        let key = BlockKey { space: KeySpace::Salted(0), parent: Link::ROOT, hash: 1, tokens: &[1, 1] };
        assert!(space.find_to_fetch(&key).is_none() && space.find(&key).is_some());
        space.set_control(SwapControl::of(SwapPolicy::Off));
        assert_eq!(space.used(), 0);
    }

    fn holds(space: &SwapSpace, hash: u128) -> bool {
        space.find(&BlockKey { space: KeySpace::Salted(0), parent: Link::ROOT, hash, tokens: &[1, 1] }).is_some()
    }

    #[test]
    fn a_full_space_forgets_prefixes_before_preempted_blocks() {
        let mut space = space(SwapControl { high_watermark: 1.5, ..SwapControl::of(SwapPolicy::Always) }, 8);
        assert_eq!(space.offer(entry(1, true), &[1, 1]), Some(0));
        assert_eq!(space.offer(entry(2, false), &[1, 1]), Some(1));
        assert_eq!(space.offer(entry(3, false), &[1, 1]), Some(1));
        assert_eq!((holds(&space, 1), holds(&space, 2), holds(&space, 3)), (true, false, true));
        assert_eq!(space.offer(entry(3, false), &[1, 1]), None, "it is here already");
    }

    #[test]
    fn a_slot_that_is_read_in_this_step_is_not_given_away() {
        let mut space = space(SwapControl::of(SwapPolicy::OnPressure), 4);
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
