//! Book-keeping of KV memory: which block holds what for whom. The memory itself is the runner's.
//!
//! [`KvBlocks`] joins the pool of free blocks, the prefix cache and the swap space, and is the only one that changes a
//! sequence's [`BlockTable`]. What has to be moved before a step's computation is collected in [`Moves`].

mod bitmap;
pub mod block_pool;
pub mod block_table;
pub mod budget;
pub mod disk_tier;
mod eviction;
mod openings;
pub mod prefix_cache;
pub mod swap_space;

pub use block_table::{BlockTable, Tokens};
pub use prefix_cache::{ChainHash, KeySpace};

use crate::config::{SwapConfig, SwapControl};
use block_pool::BlockPool;
use disk_tier::DiskTier;
use openings::Openings;
use prefix_cache::{BlockKey, Entry, Link, MAX_BLOCK_SIZE, PrefixCache};
use swap_space::SwapSpace;

/// Copies between KV blocks and host memory, to be done before a step's batch: first `out`, then `back`.
#[derive(Debug, Default)]
pub struct Moves {
    /// `(block, slot)`.
    pub out: Vec<(u32, u32)>,
    /// `(slot, block)`.
    pub back: Vec<(u32, u32)>,
}

/// What a sequence that wants to run finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It has all its blocks; this many tokens are computed already, once `copy` (from, to) is made.
    Admitted { cached_tokens: usize, copy: Option<(u32, u32)> },
    /// Another sequence is just computing its prefix: worth waiting for.
    PrefixPending,
    /// Not enough free blocks now.
    NoRoom,
}

/// There is no free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

/// A sequence as the prefix cache sees it.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    pub space: KeySpace,
    pub tokens: Tokens<'a>,
}

#[derive(Debug)]
pub struct KvBlocks {
    block_size: usize,
    pool: BlockPool,
    cache: PrefixCache,
    openings: Openings,
    /// Blocks that are copied from in the step that is being planned: they stay what they are until all moves are done.
    sources: Vec<u32>,
    swap: SwapSpace,
    chain: ChainHash,
    moves: Moves,
    next_serial: u64,
    counters: KvCounters,
    /// Memory of `take_found`, kept from call to call.
    fetches: Vec<Fetch>,
}

/// A block of a table that comes back from the swap space.
#[derive(Debug)]
struct Fetch {
    index: usize,
    slot: u32,
    entry: Entry,
}

/// Stands in a table for a block that is fetched a moment later.
const TO_FETCH: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, Default)]
pub struct KvCounters {
    pub swapped_out: u64,
    pub swapped_in: u64,
}

impl KvBlocks {
    pub fn new(
        num_blocks: u32,
        block_size: u32,
        run: u32,
        chain: ChainHash,
        swap: SwapConfig,
        block_bytes: usize,
    ) -> Self {
        assert!(
            (1..=MAX_BLOCK_SIZE as u32).contains(&block_size),
            "a KV block has between 1 and {MAX_BLOCK_SIZE} tokens, not {block_size}"
        );
        let swap = SwapSpace::new(swap, block_bytes, block_size);
        let moves =
            Moves { out: Vec::with_capacity(swap.total() as usize), back: Vec::with_capacity(swap.total() as usize) };
        Self {
            block_size: block_size as usize,
            pool: BlockPool::new(num_blocks, run),
            cache: PrefixCache::new(num_blocks, block_size),
            openings: Openings::new(num_blocks),
            sources: Vec::with_capacity(64),
            swap,
            chain,
            moves,
            next_serial: 1,
            counters: KvCounters::default(),
            fetches: Vec::new(),
        }
    }

    /// Puts a file below the swap space. What it holds from an earlier life keeps its numbers.
    pub fn attach(&mut self, disk: DiskTier) {
        self.next_serial = self.next_serial.max(disk.next_serial());
        self.swap.attach(disk);
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn swap(&self) -> &SwapSpace {
        &self.swap
    }

    pub fn counters(&self) -> KvCounters {
        self.counters
    }

    /// What to move before the batch is computed.
    pub fn moves(&mut self) -> (&Moves, &mut SwapSpace) {
        (&self.moves, &mut self.swap)
    }

    /// The moves are done.
    pub fn moved(&mut self) {
        self.counters.swapped_out += self.moves.out.len() as u64;
        self.counters.swapped_in += self.moves.back.len() as u64;
        for &(_, slot) in &self.moves.out {
            self.swap.write_through(slot);
        }
        self.moves.out.clear();
        self.moves.back.clear();
        self.swap.unpin();
        while let Some(block) = self.sources.pop() {
            self.let_go(block);
        }
    }

    /// Gives a sequence blocks for all its tokens, shared ones for as much of its prefix as is computed already (at most
    /// `most_cached` tokens). `keep_free` blocks are left for the growth of others.
    pub fn admit(
        &mut self,
        table: &mut BlockTable,
        content: Content<'_>,
        most_cached: usize,
        keep_free: u32,
    ) -> Admission {
        debug_assert!(table.blocks.is_empty());
        self.hash_full_blocks(table, content);
        let total = content.tokens.len().div_ceil(self.block_size);
        let mut most = most_cached / self.block_size;
        let found = loop {
            let Some(found) = self.look_up(table, content, most) else {
                return Admission::PrefixPending;
            };
            let fresh = count(total - found.shared);
            if self.pool.free() - found.shared_cached < fresh + keep_free {
                return Admission::NoRoom;
            }
            if !found.on_disk {
                break found;
            }
            // What does not come back whole ends the prefix there.
            most = most.min(self.bring_from_disk(table, content, found.blocks));
        };
        self.take_found(table, content, found.blocks);
        let opening = self.take_opening(table, content, most_cached, count(total - found.blocks) + keep_free);
        self.take_fresh(table, total);
        self.register_rest(table, content);
        let cached_tokens = found.blocks * self.block_size;
        match opening {
            None => Admission::Admitted { cached_tokens, copy: None },
            Some((source, tokens)) => Admission::Admitted {
                cached_tokens: cached_tokens + tokens,
                copy: Some((source, table.blocks[found.blocks])),
            },
        }
    }

    /// Blocks that must become free before [`KvBlocks::admit`] finds room. `None`: it has to wait for its prefix anyway.
    pub fn lacking(
        &mut self,
        table: &mut BlockTable,
        content: Content<'_>,
        most_cached: usize,
        keep_free: u32,
    ) -> Option<u32> {
        self.hash_full_blocks(table, content);
        let total = content.tokens.len().div_ceil(self.block_size);
        let found = self.look_up(table, content, most_cached / self.block_size)?;
        let needed = count(total - found.shared) + keep_free + found.shared_cached;
        Some(needed.saturating_sub(self.pool.free()))
    }

    /// Makes the block of `position` (at most one past the last) the table's own to write. Answers a copy that must be made
    /// first, if it was shared.
    pub fn make_room(&mut self, table: &mut BlockTable, position: usize) -> Result<Option<(u32, u32)>, NoRoom> {
        let index = position / self.block_size;
        let last = table.blocks.last().copied();
        match table.blocks.get(index) {
            None => {
                debug_assert_eq!(index, table.blocks.len());
                let block = self.grow(last).ok_or(NoRoom)?;
                table.blocks.push(block);
                Ok(None)
            }
            Some(&shared) if self.pool.refs(shared) > 1 => {
                let own = self.grow(None).ok_or(NoRoom)?;
                self.pool.release(shared, true);
                table.blocks[index] = own;
                Ok(Some((shared, own)))
            }
            Some(_) => Ok(None),
        }
    }

    /// Tokens `from..to` are computed: blocks that became full may be shared from now on.
    pub fn computed(&mut self, table: &mut BlockTable, content: Content<'_>, from: usize, to: usize) {
        for index in from / self.block_size..to / self.block_size {
            if index >= table.linked {
                self.hash_full_blocks(table, content);
                self.link(table, content, index);
            }
            let block = table.blocks[index];
            if let Some(entry) = self.cache.entry_mut(block)
                && entry.hash == table.hashes[index]
            {
                entry.computed = true;
                self.openings.note(self.chain_before(table, content, index), block);
            }
        }
    }

    /// Another sequence with the same blocks: whoever writes to a shared one first gets a copy.
    pub fn fork(&mut self, table: &BlockTable, fork: &mut BlockTable) {
        fork.blocks.clear();
        fork.blocks.extend_from_slice(&table.blocks);
        fork.hashes.clear();
        fork.hashes.extend_from_slice(&table.hashes[..table.linked]);
        (fork.linked, fork.link) = (table.linked, table.link);
        for &block in &fork.blocks {
            self.pool.share(block);
        }
    }

    /// The sequence is over.
    pub fn release(&mut self, table: &mut BlockTable) {
        if self.swap.outlives_us() {
            self.keep_for_next_life(table);
        }
        self.leave(table, 0);
    }

    /// Copies a computed prefix out from its beginning, so that a worker that takes over finds it.
    fn keep_for_next_life(&mut self, table: &BlockTable) {
        for &block in &table.blocks[..table.linked.min(table.blocks.len())] {
            let Some(entry) = self.cache.entry(block).copied().filter(|entry| entry.computed) else { break };
            let tokens = self.cache.tokens(block);
            let key = BlockKey { space: entry.space, parent: Link { serial: entry.parent }, hash: entry.hash, tokens };
            if self.swap.known(&key).is_none()
                && let Some(slot) = self.swap.offer(Entry { preempted: false, ..entry }, tokens)
            {
                self.moves.out.push((block, slot));
            }
        }
    }

    /// Reads the blocks of a prefix that are on the disk into memory. How many from the start are at hand now.
    fn bring_from_disk(&mut self, table: &BlockTable, content: Content<'_>, blocks: usize) -> usize {
        let mut parent = Link::ROOT;
        let mut tokens = [0; MAX_BLOCK_SIZE];
        let tokens = &mut tokens[..self.block_size];
        for (index, &hash) in table.hashes.iter().take(blocks).enumerate() {
            content.tokens.copy(index * self.block_size, tokens);
            let key = BlockKey { space: content.space, parent, hash, tokens };
            let serial = if let Some((_, entry)) = self.cache.find(&key) {
                entry.serial
            } else if let Some((slot, entry)) = self.swap.find_to_fetch(&key) {
                // Bringing others must not push it out again.
                self.swap.pin(slot);
                entry.serial
            } else if let Some((entry, slot)) = self.swap.find_on_disk(&key).zip(self.swap.promote(&key)) {
                // The slot is filled now, not with the step: what was to be copied there before has lost its place.
                self.moves.out.retain(|&(_, to)| to != slot);
                entry.serial
            } else {
                return index;
            };
            parent = Link { serial };
        }
        blocks
    }

    /// The sequence has to make room and will come back.
    pub fn release_preempted(&mut self, table: &mut BlockTable) {
        self.leave(table, self.swap.sequence_blocks_max());
    }

    pub fn set_swap(&mut self, control: SwapControl) {
        self.swap.set_control(control);
    }

    /// Forgets all prefixes; sequences keep their blocks.
    pub fn forget_prefixes(&mut self) {
        for block in 0..self.pool.total() {
            self.cache.remove(block);
            if self.pool.is_cached(block) {
                self.pool.forget(block);
            }
        }
        self.swap.clear();
    }

    /// Holds the book-keeping against all tables there are; for tests.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        self.pool.check()?;
        let mut refs = vec![0; self.pool.total() as usize];
        tables.flat_map(BlockTable::blocks).for_each(|&block| refs[block as usize] += 1);
        for (block, refs) in (0..).zip(refs) {
            let entry = self.cache.entry(block);
            if self.pool.refs(block) != refs {
                return Err(format!("block {block} has {} references, but is in {refs} tables", self.pool.refs(block)));
            }
            if self.pool.is_cached(block) && !entry.is_some_and(|entry| entry.computed) {
                return Err(format!("block {block} is kept for {entry:?}"));
            }
            if refs == 0 && entry.is_some() && !self.pool.is_cached(block) {
                return Err(format!("block {block} is empty, but registered for {entry:?}"));
            }
        }
        Ok(())
    }

    /// `wanted_back`: so many blocks from the start are marked as a preempted sequence's.
    fn leave(&mut self, table: &mut BlockTable, wanted_back: usize) {
        // The end first, so that of a cached prefix the end is evicted first.
        while let Some(block) = table.blocks.pop() {
            if let Some(entry) = self.cache.entry_mut(block) {
                entry.preempted |= table.blocks.len() < wanted_back;
            }
            self.let_go(block);
        }
        (table.linked, table.link) = (0, Link::ROOT);
    }

    /// One reference less; what was computed stays findable.
    fn let_go(&mut self, block: u32) {
        let computed = self.cache.entry(block).is_some_and(|entry| entry.computed);
        if self.pool.refs(block) == 1 && !computed {
            self.cache.remove(block);
        }
        self.pool.release(block, computed);
    }

    fn hash_full_blocks(&self, table: &mut BlockTable, content: Content<'_>) {
        let mut tokens = [0; MAX_BLOCK_SIZE];
        let tokens = &mut tokens[..self.block_size];
        for index in table.hashes.len()..content.tokens.len() / self.block_size {
            content.tokens.copy(index * self.block_size, tokens);
            let parent = self.chain_before(table, content, index);
            table.hashes.push(self.chain.next(parent, tokens));
        }
    }

    /// How many blocks from the start are here. `None`: the next one is being computed.
    fn look_up(&self, table: &BlockTable, content: Content<'_>, most: usize) -> Option<Found> {
        let mut found = Found::default();
        let mut parent = Link::ROOT;
        let mut tokens = [0; MAX_BLOCK_SIZE];
        let tokens = &mut tokens[..self.block_size];
        for (index, &hash) in table.hashes.iter().take(most).enumerate() {
            content.tokens.copy(index * self.block_size, tokens);
            let key = BlockKey { space: content.space, parent, hash, tokens };
            parent = if let Some((block, entry)) = self.cache.find(&key) {
                if !entry.computed {
                    return None;
                }
                found.shared += 1;
                found.shared_cached += u32::from(self.pool.is_cached(block));
                Link { serial: entry.serial }
            } else if let Some((_, entry)) = self.swap.find_to_fetch(&key) {
                Link { serial: entry.serial }
            } else if let Some(entry) = self.swap.find_on_disk(&key) {
                found.on_disk = true;
                Link { serial: entry.serial }
            } else {
                break;
            };
            found.blocks += 1;
        }
        Some(found)
    }

    /// Takes what `look_up` found: shares what is in the pool, first, so that it stays there; then fetches from the swap
    /// space what is there.
    fn take_found(&mut self, table: &mut BlockTable, content: Content<'_>, blocks: usize) {
        let mut fetches = std::mem::take(&mut self.fetches);
        let mut tokens = [0; MAX_BLOCK_SIZE];
        let tokens = &mut tokens[..self.block_size];
        for index in 0..blocks {
            content.tokens.copy(index * self.block_size, tokens);
            let key = BlockKey { space: content.space, parent: table.link, hash: table.hashes[index], tokens };
            let (block, serial) = if let Some((block, entry)) = self.cache.find(&key) {
                self.pool.share(block);
                (block, entry.serial)
            } else if let Some((slot, entry)) = self.swap.find_to_fetch(&key) {
                self.swap.pin(slot);
                fetches.push(Fetch { index, slot, entry });
                (TO_FETCH, entry.serial)
            } else {
                break;
            };
            table.blocks.push(block);
            (table.linked, table.link) = (index + 1, Link { serial });
        }
        for Fetch { index, slot, entry } in fetches.drain(..) {
            let after = index.checked_sub(1).map(|before| table.blocks[before]);
            let block = self.grow(after).expect("admit counted the free blocks");
            table.blocks[index] = block;
            self.moves.back.push((slot, block));
            content.tokens.copy(index * self.block_size, tokens);
            self.insert(block, Entry { computed: true, preempted: false, ..entry }, tokens);
            self.openings.note(self.chain_before(table, content, index), block);
        }
        for &block in &table.blocks {
            if let Some(entry) = self.cache.entry_mut(block) {
                entry.preempted = false;
            }
        }
        self.fetches = fetches;
    }

    /// A computed block that begins as the content goes on behind the table's blocks, and how many of its tokens are worth a
    /// copy. It is held until the moves of this step are done. `needed`: free blocks that must be left.
    fn take_opening(
        &mut self,
        table: &BlockTable,
        content: Content<'_>,
        most_cached: usize,
        needed: u32,
    ) -> Option<(u32, usize)> {
        let start = table.blocks.len() * self.block_size;
        let most = most_cached.saturating_sub(start).min(self.block_size);
        // Fewer tokens are computed sooner than a block is copied.
        let least = self.block_size.div_ceil(4);
        if most < least {
            return None;
        }
        let block = self.openings.after(self.chain_before(table, content, table.blocks.len()))?;
        let entry = self.cache.entry(block)?;
        if !entry.computed || entry.space != content.space || entry.parent != table.link.serial {
            return None;
        }
        let held = self.cache.tokens(block).iter().zip(start..start + most);
        let equal = held.take_while(|&(&token, position)| content.tokens.get(position) == token).count();
        if equal < least || self.pool.free() < needed + u32::from(self.pool.is_cached(block)) {
            return None;
        }
        self.pool.share(block);
        self.sources.push(block);
        Some((block, equal))
    }

    /// Hash of everything before block `index`.
    fn chain_before(&self, table: &BlockTable, content: Content<'_>, index: usize) -> u128 {
        match index {
            0 => self.chain.root(content.space),
            _ => table.hashes[index - 1],
        }
    }

    fn take_fresh(&mut self, table: &mut BlockTable, total: usize) {
        while self.pool.clean() < count(total - table.blocks.len()) && self.evict_oldest() {}
        while table.blocks.len() < total {
            if let Some(next) = table.blocks.last().and_then(|&last| self.pool.take_after(last)) {
                table.blocks.push(next);
            } else if let Some((start, taken)) = self.pool.take_run(count(total - table.blocks.len())) {
                table.blocks.extend(start..start + taken);
            } else {
                table.blocks.push(self.pool.take_reserved().expect("admit counted the free blocks"));
            }
        }
    }

    /// Registers the full blocks that this sequence is about to compute.
    fn register_rest(&mut self, table: &mut BlockTable, content: Content<'_>) {
        for index in table.linked..table.hashes.len() {
            self.link(table, content, index);
        }
    }

    /// Registers block `index` of a table, not computed yet, unless an equal one is registered.
    fn link(&mut self, table: &mut BlockTable, content: Content<'_>, index: usize) {
        debug_assert_eq!(index, table.linked);
        let mut tokens = [0; MAX_BLOCK_SIZE];
        let tokens = &mut tokens[..self.block_size];
        content.tokens.copy(index * self.block_size, tokens);
        let (block, hash) = (table.blocks[index], table.hashes[index]);
        let key = BlockKey { space: content.space, parent: table.link, hash, tokens };
        let serial = match self.cache.find(&key) {
            Some((_, equal)) => equal.serial,
            None => {
                // A copy in the swap space is of the same content: it keeps its number, so that its successors stay findable.
                let serial = self.swap.known(&key).map_or(self.next_serial, |entry| entry.serial);
                self.next_serial += u64::from(serial == self.next_serial);
                let (space, parent) = (content.space, table.link.serial);
                self.insert(block, Entry { hash, space, parent, serial, computed: false, preempted: false }, tokens);
                serial
            }
        };
        (table.linked, table.link) = (index + 1, Link { serial });
    }

    fn insert(&mut self, block: u32, entry: Entry, tokens: &[u32]) {
        if let Some(displaced) = self.cache.insert(block, entry, tokens)
            && self.pool.is_cached(displaced)
        {
            self.pool.forget(displaced);
        }
    }

    /// One more block for a sequence whose last block is `after`.
    fn grow(&mut self, after: Option<u32>) -> Option<u32> {
        if let Some(next) = after.and_then(|after| self.pool.take_after(after)) {
            return Some(next);
        }
        if self.pool.clean() == 0 {
            for _ in 0..self.pool.oldest_cached_run() {
                self.evict_oldest();
            }
        }
        match self.pool.take_run(1) {
            Some((block, _)) => Some(block),
            None => self.pool.take_reserved(),
        }
    }

    /// Empties the block that was unused longest. False if no free block holds anything.
    fn evict_oldest(&mut self) -> bool {
        let Some(block) = self.pool.oldest_cached() else {
            return false;
        };
        if let Some(entry) = self.cache.remove(block)
            && let Some(slot) = self.swap.offer(entry, self.cache.tokens(block))
        {
            self.moves.out.push((block, slot));
        }
        self.pool.forget(block);
        true
    }
}

#[derive(Debug, Default)]
struct Found {
    /// Blocks found, in the pool or in the swap space.
    blocks: usize,
    /// Of these, in the pool.
    shared: usize,
    /// Of these, free until now.
    shared_cached: u32,
    /// Some have to be read first.
    on_disk: bool,
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
