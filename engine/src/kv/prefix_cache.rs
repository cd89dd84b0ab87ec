//! Finds blocks by what they hold: the tokens of the block and of everything before it, and whose they are.
//!
//! Keys are xxh3-128 hashes chained from block to block, seeded per engine. A hash only finds a candidate: the block's own
//! tokens, its owner and its predecessor's *serial* (a number given once to each registered content) are compared before it
//! counts as a hit, so by induction the whole prefix is equal and no collision can show one user another's text.
//! Blocks are registered before they are computed, so that a request can see that another is just computing its prefix.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Most tokens in a block.
pub const MAX_BLOCK_SIZE: usize = 64;

/// Whose prefixes may meet: parts of a key that no token can imitate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySpace {
    /// All requests with this salt.
    Salted(u64),
    /// One request alone (its arrival number): prefix caching is off, but its own preempted blocks may still be found.
    Private(u64),
}

/// A place in a chain of blocks: everything up to here has been found or registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Serial of the block before; 0 at the beginning of a sequence.
    pub serial: u64,
}

impl Link {
    pub const ROOT: Self = Self { serial: 0 };
}

/// What identifies the content of one block.
#[derive(Debug, Clone, Copy)]
pub struct BlockKey<'a> {
    pub space: KeySpace,
    pub parent: Link,
    pub hash: u128,
    pub tokens: &'a [u32],
}

/// What is known of a registered block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub hash: u128,
    pub space: KeySpace,
    pub parent: u64,
    pub serial: u64,
    /// Its K and V are there; else a running sequence is about to compute them.
    pub computed: bool,
    /// It was left by a preempted sequence, which will want it back.
    pub preempted: bool,
}

/// Chained hash of block contents.
#[derive(Debug, Clone, Copy)]
pub struct ChainHash {
    seed: u64,
    /// All ones, except in tests that force collisions.
    mask: u128,
}

impl ChainHash {
    pub fn new(seed: u64) -> Self {
        Self { seed, mask: u128::MAX }
    }

    /// Keeps only the bits of `mask`: makes collisions, to show that they do no harm.
    #[doc(hidden)]
    pub fn masked(seed: u64, mask: u128) -> Self {
        Self { seed, mask }
    }

    /// Where every chain of `space` begins.
    pub fn root(&self, space: KeySpace) -> u128 {
        let (domain, number) = match space {
            KeySpace::Salted(salt) => (*b"salted prefix...", salt),
            KeySpace::Private(arrival) => (*b"private prefix..", arrival),
        };
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(&domain);
        bytes[16..].copy_from_slice(&number.to_le_bytes());
        xxhash_rust::xxh3::xxh3_128_with_seed(&bytes, self.seed) & self.mask
    }

    /// The next hash of a chain. At most [`MAX_BLOCK_SIZE`] tokens.
    pub fn next(&self, parent: u128, tokens: &[u32]) -> u128 {
        let mut bytes = [0; 16 + 4 * MAX_BLOCK_SIZE];
        let (head, tail) = bytes.split_at_mut(16);
        head.copy_from_slice(&parent.to_le_bytes());
        for (to, token) in tail.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        xxhash_rust::xxh3::xxh3_128_with_seed(&bytes[..16 + 4 * tokens.len()], self.seed) & self.mask
    }
}

/// Registered contents by place (a block of the pool, or a slot of the swap space).
#[derive(Debug)]
pub struct PrefixCache {
    places: HashMap<u128, u32, BuildHasherDefault<HashIsKey>>,
    entries: Vec<Option<Entry>>,
    /// Tokens of each place, one block after the other.
    tokens: Vec<u32>,
    block_size: usize,
}

impl PrefixCache {
    pub fn new(places: u32, block_size: u32) -> Self {
        let (count, block_size) = (places as usize, block_size as usize);
        Self {
            // Twice the places, so that removals do not make the table grow later.
            places: HashMap::with_capacity_and_hasher(2 * count, BuildHasherDefault::default()),
            entries: vec![None; count],
            tokens: vec![0; count * block_size],
            block_size,
        }
    }

    /// The place that holds exactly this content.
    pub fn find(&self, key: &BlockKey<'_>) -> Option<(u32, Entry)> {
        let place = *self.places.get(&key.hash)?;
        let entry = self.entries[place as usize]?;
        let equal = entry.space == key.space && entry.parent == key.parent.serial && self.tokens(place) == key.tokens;
        equal.then_some((place, entry))
    }

    /// Registers what `place` holds. Answers a place that lost its registration for it: one with the same hash that can not
    /// be found any more (a collision, or a successor of something evicted).
    pub fn insert(&mut self, place: u32, entry: Entry, tokens: &[u32]) -> Option<u32> {
        debug_assert!(self.entries[place as usize].is_none(), "place {place} is already registered");
        let displaced = self.places.insert(entry.hash, place);
        if let Some(displaced) = displaced {
            self.entries[displaced as usize] = None;
        }
        self.entries[place as usize] = Some(entry);
        let start = place as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        displaced
    }

    pub fn remove(&mut self, place: u32) -> Option<Entry> {
        let entry = self.entries[place as usize].take()?;
        self.places.remove(&entry.hash);
        Some(entry)
    }

    pub fn entry(&self, place: u32) -> Option<&Entry> {
        self.entries[place as usize].as_ref()
    }

    pub fn entry_mut(&mut self, place: u32) -> Option<&mut Entry> {
        self.entries[place as usize].as_mut()
    }

    pub fn tokens(&self, place: u32) -> &[u32] {
        let start = place as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

/// The keys are hashes already, and seeded: their low half will do.
#[derive(Debug, Default)]
pub(super) struct HashIsKey(u64);

impl Hasher for HashIsKey {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 ^= u64::from_ne_bytes(word);
        }
    }

    fn write_u128(&mut self, key: u128) {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
        let low = key as u64;
        self.0 = low;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: KeySpace = KeySpace::Salted(7);

    fn entry(hash: u128, parent: u64, serial: u64) -> Entry {
        Entry { hash, space: SPACE, parent, serial, computed: true, preempted: false }
    }

    #[test]
    fn equal_salts_and_private_numbers_never_share_a_root() {
        let chain = ChainHash::new(1);
        assert_ne!(chain.root(KeySpace::Salted(5)), chain.root(KeySpace::Private(5)));
        assert_ne!(chain.root(KeySpace::Salted(5)), chain.root(KeySpace::Salted(6)));
        assert_ne!(chain.root(KeySpace::Salted(5)), ChainHash::new(2).root(KeySpace::Salted(5)));
    }

    #[test]
    fn a_hash_collision_is_not_a_hit() {
        let mut cache = PrefixCache::new(4, 2);
        assert_eq!(cache.insert(0, entry(9, 0, 1), &[1, 2]), None);
        let key = |space, serial, tokens| BlockKey { space, parent: Link { serial }, hash: 9, tokens };
        assert!(cache.find(&key(SPACE, 0, &[1, 2])).is_some());
        assert!(cache.find(&key(SPACE, 0, &[1, 3])).is_none(), "other tokens");
        assert!(cache.find(&key(SPACE, 8, &[1, 2])).is_none(), "another predecessor");
        assert!(cache.find(&key(KeySpace::Salted(8), 0, &[1, 2])).is_none(), "another salt");
        assert!(cache.find(&key(KeySpace::Private(7), 0, &[1, 2])).is_none(), "another key space");
        assert_eq!(cache.insert(1, entry(9, 0, 2), &[1, 3]), Some(0), "the newer content takes the hash over");
        assert!(cache.entry(0).is_none());
        assert_eq!(cache.len(), 1);
    }
}
