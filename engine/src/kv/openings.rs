//! Finds a block that begins as a sequence goes on, where none is equal as a whole: the computed part of it can be copied.
//!
//! One block is known per place in a chain, the one computed last: of many continuations it is the likeliest to be meant
//! again. What is kept here is only a hint. Whoever uses it compares owner, predecessor and tokens of the registered block,
//! so stale hints need no removal: a block has one hint at most, and a new one replaces it.

use super::prefix_cache::HashIsKey;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

#[derive(Debug)]
pub(super) struct Openings {
    /// Block by the chained hash of everything before it.
    blocks: HashMap<u128, u32, BuildHasherDefault<HashIsKey>>,
    /// The key of each block.
    keys: Vec<Option<u128>>,
}

impl Openings {
    pub(super) fn new(blocks: u32) -> Self {
        let count = blocks as usize;
        Self {
            // Twice the blocks, so that removals do not make the table grow later.
            blocks: HashMap::with_capacity_and_hasher(2 * count, BuildHasherDefault::default()),
            keys: vec![None; count],
        }
    }

    /// `block` is computed and comes after what hashes to `before`.
    pub(super) fn note(&mut self, before: u128, block: u32) {
        if let Some(old) = self.keys[block as usize].replace(before)
            && old != before
            && self.blocks.get(&old) == Some(&block)
        {
            self.blocks.remove(&old);
        }
        if let Some(other) = self.blocks.insert(before, block)
            && other != block
        {
            self.keys[other as usize] = None;
        }
    }

    /// The block that was noted last behind `before`.
    pub(super) fn after(&self, before: u128) -> Option<u32> {
        self.blocks.get(&before).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_found_behind_its_last_predecessor_only() {
        let mut openings = Openings::new(4);
        openings.note(7, 0);
        openings.note(7, 1);
        assert_eq!(openings.after(7), Some(1), "the newest");
        openings.note(8, 1);
        assert_eq!((openings.after(7), openings.after(8)), (None, Some(1)));
        openings.note(8, 0);
        assert_eq!(openings.after(8), Some(0));
        assert!(openings.blocks.len() <= 4, "at most one hint per block");
    }
}
