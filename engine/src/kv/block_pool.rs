//! Which KV blocks are free, and which of them to hand out next.
//!
//! A block is *used* (referred to), *cached* (free, but holds a prefix that may be hit; kept in eviction order), *clean*
//! (free and empty) or *reserved* (clean, and kept for the sequence that owns the block before it). Attention is fastest on
//! consecutive blocks, so clean blocks are handed out in runs, best fit, and a sequence that grows gets the rest of its run
//! reserved. A reservation is a preference, never a claim: reserved blocks count as free and are taken back under pressure.
//! What a block holds is the business of `prefix_cache`.

use super::bitmap::Bitmap;
use super::eviction::EvictionList;

#[derive(Debug)]
pub struct BlockPool {
    refs: Vec<u32>,
    clean: Bitmap,
    reserved: Bitmap,
    evict: EvictionList,
    /// Blocks to reserve at a time.
    run: u32,
}

impl BlockPool {
    pub fn new(num_blocks: u32, run: u32) -> Self {
        Self {
            refs: vec![0; num_blocks as usize],
            clean: Bitmap::full(num_blocks),
            reserved: Bitmap::empty(num_blocks),
            evict: EvictionList::new(num_blocks),
            run: run.max(1),
        }
    }

    pub fn total(&self) -> u32 {
        self.clean.len()
    }

    /// Blocks that nothing refers to.
    pub fn free(&self) -> u32 {
        self.clean.count() + self.reserved.count() + self.evict.count()
    }

    /// Free blocks that hold a prefix.
    pub fn cached(&self) -> u32 {
        self.evict.count()
    }

    pub fn clean(&self) -> u32 {
        self.clean.count()
    }

    pub fn refs(&self, block: u32) -> u32 {
        self.refs[block as usize]
    }

    pub fn is_cached(&self, block: u32) -> bool {
        self.evict.contains(block)
    }

    /// One more reference to a block that is used or cached.
    pub fn share(&mut self, block: u32) {
        if self.refs[block as usize] == 0 {
            debug_assert!(self.evict.contains(block), "block {block} is neither used nor cached");
            self.evict.remove(block);
        }
        self.refs[block as usize] += 1;
    }

    /// One reference less; true when it was the last. The block is then clean, unless `keep` holds it as cached.
    pub fn release(&mut self, block: u32, keep: bool) -> bool {
        let refs = &mut self.refs[block as usize];
        debug_assert!(*refs > 0, "block {block} was released more often than it was taken");
        *refs -= 1;
        if *refs > 0 {
            return false;
        }
        if keep {
            self.evict.push_newest(block);
        } else {
            self.clean.set(block);
        }
        self.give_up_reservation(block + 1);
        true
    }

    /// The cached block that was used longest ago.
    pub fn oldest_cached(&self) -> Option<u32> {
        self.evict.oldest()
    }

    /// A cached block becomes clean.
    pub fn forget(&mut self, block: u32) {
        self.evict.remove(block);
        self.clean.set(block);
    }

    /// How many of the oldest cached blocks lie side by side (a sequence's end is released before its beginning, so its
    /// blocks come in falling order), at most a run.
    pub fn oldest_cached_run(&self) -> u32 {
        let (mut at, mut len) = (self.evict.oldest(), 0);
        while let Some(block) = at.filter(|_| len < self.run) {
            len += 1;
            at = self.evict.newer(block).filter(|&newer| newer + 1 == block);
        }
        len
    }

    /// Takes the block right behind `block`, if it is free to take.
    pub fn take_after(&mut self, block: u32) -> Option<u32> {
        let next = block + 1;
        if next >= self.total() || !(self.reserved.clear(next) || self.clean.clear(next)) {
            return None;
        }
        self.refs[next as usize] = 1;
        Some(next)
    }

    /// Takes up to `wanted` clean blocks that lie side by side: from the shortest run that holds them all and room to
    /// grow, else from the longest. Reserves what follows, up to a full run. Answers first block and count.
    pub fn take_run(&mut self, wanted: u32) -> Option<(u32, u32)> {
        let goal = (wanted + self.run / 2).next_multiple_of(self.run);
        let (start, len) = self.clean.best_fit(goal)?;
        let taken = wanted.min(len);
        for block in start..start + taken {
            self.clean.clear(block);
            self.refs[block as usize] = 1;
        }
        for block in start + taken..start + len.min(goal) {
            self.clean.clear(block);
            self.reserved.set(block);
        }
        Some((start, taken))
    }

    /// Takes a block that was reserved for a sequence's growth: the end of the longest reservation.
    pub fn take_reserved(&mut self) -> Option<u32> {
        let (start, len) = self.reserved.best_fit(u32::MAX)?;
        let block = start + len - 1;
        self.reserved.clear(block);
        self.refs[block as usize] = 1;
        Some(block)
    }

    /// Blocks from `first` on that are reserved become clean: who they were kept for is gone.
    fn give_up_reservation(&mut self, first: u32) {
        for block in first..self.total() {
            if !self.reserved.clear(block) {
                return;
            }
            self.clean.set(block);
        }
    }

    /// Every block is in exactly one state. For tests.
    pub fn check(&self) -> Result<(), String> {
        for block in 0..self.total() {
            let states = u32::from(self.refs[block as usize] > 0)
                + u32::from(self.clean.get(block))
                + u32::from(self.reserved.get(block))
                + u32::from(self.evict.contains(block));
            if states != 1 {
                return Err(format!("block {block} is in {states} states"));
            }
        }
        let used = self.refs.iter().filter(|&&refs| refs > 0).count();
        match used + self.free() as usize == self.refs.len() {
            true => Ok(()),
            false => Err(format!("{used} used and {} free blocks of {}", self.free(), self.refs.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_sequence_gets_consecutive_blocks_though_another_grows_beside_it() {
        let mut pool = BlockPool::new(64, 8);
        let (a, _) = pool.take_run(1).unwrap();
        let (b, _) = pool.take_run(1).unwrap();
        let (mut last_a, mut last_b) = (a, b);
        for _ in 0..7 {
            last_a = pool.take_after(last_a).unwrap();
            last_b = pool.take_after(last_b).unwrap();
        }
        assert_eq!((last_a, last_b), (a + 7, b + 7));
        pool.check().unwrap();
    }

    #[test]
    fn the_shortest_run_that_fits_is_taken() {
        let mut pool = BlockPool::new(64, 4);
        let (first, taken) = pool.take_run(64).unwrap();
        assert_eq!((first, taken), (0, 64));
        for block in (4..20).chain(30..38) {
            pool.release(block, false);
        }
        assert_eq!(pool.take_run(6).unwrap(), (30, 6));
        pool.check().unwrap();
    }

    #[test]
    fn reserved_blocks_are_free_and_are_taken_back_under_pressure() {
        let mut pool = BlockPool::new(8, 8);
        let (first, _) = pool.take_run(1).unwrap();
        assert_eq!((pool.free(), pool.clean()), (7, 0));
        assert_eq!(pool.take_reserved(), Some(7));
        assert_eq!(pool.take_after(first), Some(1));
        pool.check().unwrap();
    }

    #[test]
    fn a_reservation_ends_with_its_sequence() {
        let mut pool = BlockPool::new(16, 8);
        let (first, _) = pool.take_run(2).unwrap();
        pool.release(first + 1, false);
        pool.release(first, false);
        assert_eq!(pool.clean(), 16);
    }

    #[test]
    fn the_longest_unused_block_is_evicted_first_and_its_neighbours_with_it() {
        let mut pool = BlockPool::new(8, 4);
        assert_eq!(pool.take_run(8).unwrap(), (0, 8));
        for block in (0..4).rev().chain([7, 5]) {
            pool.release(block, true);
        }
        assert_eq!((pool.oldest_cached(), pool.oldest_cached_run()), (Some(3), 4));
        pool.share(3);
        assert_eq!((pool.oldest_cached(), pool.oldest_cached_run()), (Some(2), 3));
        pool.check().unwrap();
    }
}
