//! The swap space's second tier: a preallocated file of KV blocks below the copies in memory.
//!
//! Whatever is copied to memory is also written here, by a thread of its own, so that memory may forget it; a write that the
//! disk is too slow for is left out, nothing ever waits for it. Every block has a header with its content's name and a
//! checksum: a block that does not read back bit for bit is forgotten and computed again. The file outlives this process, so
//! the next worker *of the same model and form of weights* finds the prefixes again; whoever gave the path deletes it.
//!
//! Across lives a content is named by its serial, whose parent is a serial too (see `prefix_cache`): numbers are never used
//! twice in one file, so equality of a whole prefix still rests on comparing tokens, never on a hash.

use super::eviction::EvictionList;
use super::prefix_cache::{BlockKey, Entry, KeySpace, Link, MAX_BLOCK_SIZE, PrefixCache};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Blocks on their way to the disk; more are not written.
const WRITES_MAX: usize = 64;

const HEADER_BYTES: usize = 512;

/// Slots begin at multiples of this, the unit in which disks write.
const ALIGN: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"ernieKV1");

/// Where the file is and how large it may be.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    pub path: PathBuf,
    pub bytes: u64,
    /// Stands for the model and everything else that the bits of KV depend on; a file of another one is begun anew.
    pub identity: u128,
    /// What time it is, on any clock that does not go back: the engine has none of its own.
    pub now: fn() -> Duration,
}

/// What the file holds and what was moved; counters are since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub blocks_total: u32,
    pub blocks_used: u32,
    /// Found from an earlier life.
    pub blocks_restored: u32,
    /// Did not read back as written, and were computed again.
    pub blocks_corrupt: u64,
    pub reads: u64,
    pub read_time: Duration,
    pub writes: u64,
    pub write_time: Duration,
    /// Blocks that the disk was too slow for.
    pub writes_skipped: u64,
}

/// Operations and the nanoseconds they took; the writing thread counts too.
#[derive(Debug, Default)]
struct Moved {
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Moved {
    fn add(&self, took: Duration) {
        self.nanoseconds.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn get(&self) -> (u64, Duration) {
        let count = self.count.load(Ordering::Relaxed);
        (count, Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)))
    }
}

#[derive(Debug)]
pub struct DiskTier {
    file: Arc<File>,
    identity: u128,
    block_size: usize,
    stride: u64,
    index: PrefixCache,
    free: Vec<u32>,
    used: EvictionList,
    /// Blocks on their way, which are read from here.
    on_the_way: Arc<Mutex<HashMap<u32, Arc<Vec<u8>>>>>,
    writes: Option<SyncSender<Write>>,
    writer: Option<JoinHandle<()>>,
    failed: Arc<AtomicBool>,
    now: fn() -> Duration,
    read: Moved,
    written: Arc<Moved>,
    writes_skipped: u64,
    /// Memory of `load`.
    buffer: Vec<u8>,
    restored: u32,
    corrupt: u64,
    next_serial: u64,
}

enum Write {
    Block(u32, Arc<Vec<u8>>),
    /// Everything before this is to be forgotten, on the disk too.
    Clear,
}

impl DiskTier {
    /// Opens or makes the file and finds what an earlier life left in it.
    pub fn open(config: &DiskConfig, block_bytes: usize, block_size: u32) -> io::Result<Self> {
        let stride = (HEADER_BYTES + block_bytes).next_multiple_of(ALIGN) as u64;
        let slots = u32::try_from(config.bytes / stride).unwrap_or(u32::MAX);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&config.path)?;
        let len = u64::from(slots) * stride;
        if file.metadata()?.len() != len {
            file.set_len(0)?;
        }
        allocate(&file, len)?;
        let file = Arc::new(file);
        let (writes, queue) = sync_channel(WRITES_MAX);
        let on_the_way: Arc<Mutex<HashMap<u32, Arc<Vec<u8>>>>> = Arc::default();
        let failed: Arc<AtomicBool> = Arc::default();
        let written: Arc<Moved> = Arc::default();
        let writing = Writing {
            file: file.clone(),
            stride,
            len,
            on_the_way: on_the_way.clone(),
            failed: failed.clone(),
            now: config.now,
            written: written.clone(),
        };
        let writer = std::thread::Builder::new().name("kv-disk".into()).spawn(move || writing.run(&queue))?;
        let mut tier = Self {
            file,
            identity: config.identity,
            block_size: block_size as usize,
            stride,
            index: PrefixCache::new(slots, block_size),
            free: (0..slots).rev().collect(),
            used: EvictionList::new(slots),
            on_the_way,
            writes: Some(writes),
            writer: Some(writer),
            failed,
            now: config.now,
            read: Moved::default(),
            written,
            writes_skipped: 0,
            buffer: vec![0; HEADER_BYTES + block_bytes],
            restored: 0,
            corrupt: 0,
            next_serial: 1,
        };
        tier.restore(slots);
        Ok(tier)
    }

    pub fn total(&self) -> u32 {
        self.used() + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    pub fn used(&self) -> u32 {
        self.used.count()
    }

    pub fn stats(&self) -> DiskStats {
        let ((reads, read_time), (writes, write_time)) = (self.read.get(), self.written.get());
        DiskStats {
            blocks_total: self.total(),
            blocks_used: self.used(),
            blocks_restored: self.restored,
            blocks_corrupt: self.corrupt,
            reads,
            read_time,
            writes,
            write_time,
            writes_skipped: self.writes_skipped,
        }
    }

    /// The first number that no content here, or its parent, has.
    pub fn next_serial(&self) -> u64 {
        self.next_serial
    }

    pub fn find(&self, key: &BlockKey<'_>) -> Option<Entry> {
        self.index.find(key).map(|(_, entry)| entry)
    }

    /// Writes a block some time soon, unless it is here or the disk is busy.
    pub fn store(&mut self, entry: Entry, tokens: &[u32], bytes: &[u8]) {
        // A private content is of one request alone and is nothing to the next life, but may still come back in this one.
        let key = BlockKey { space: entry.space, parent: Link { serial: entry.parent }, hash: entry.hash, tokens };
        if self.failed.load(Ordering::Relaxed) || self.index.find(&key).is_some_and(|(_, e)| e.serial == entry.serial) {
            return;
        }
        let Some(writes) = &self.writes else { return };
        let Some(slot) = self.free.pop().or_else(|| {
            let oldest = self.used.oldest()?;
            self.used.remove(oldest);
            self.index.remove(oldest);
            Some(oldest)
        }) else {
            return;
        };
        let mut block = Vec::with_capacity(HEADER_BYTES + bytes.len());
        block.extend_from_slice(&Header { entry, tokens, checksum: xxh3_128(bytes) }.encode(self.identity));
        block.extend_from_slice(bytes);
        let block = Arc::new(block);
        // The writer takes a block off this map when it is on the disk, so it has to be there first.
        self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, block.clone());
        if writes.try_send(Write::Block(slot, block)).is_err() {
            self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&slot);
            self.free.push(slot);
            self.writes_skipped += 1;
            return;
        }
        if let Some(displaced) = self.index.insert(slot, Entry { preempted: false, ..entry }, tokens)
            && self.used.contains(displaced)
        {
            self.used.remove(displaced);
            self.free.push(displaced);
        }
        self.used.push_newest(slot);
    }

    /// Reads a block back. False if it is not what was written: then it is forgotten.
    pub fn load(&mut self, key: &BlockKey<'_>, out: &mut [u8]) -> bool {
        let Some((slot, entry)) = self.index.find(key) else { return false };
        let waiting = self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner).get(&slot).cloned();
        let whole = match waiting {
            Some(block) => {
                out.copy_from_slice(&block[HEADER_BYTES..]);
                true
            }
            None => self.read(slot, entry, out),
        };
        self.used.remove(slot);
        if whole {
            self.used.push_newest(slot);
        } else {
            self.corrupt += 1;
            self.index.remove(slot);
            self.free.push(slot);
        }
        whole
    }

    /// Forgets everything, on the disk too.
    pub fn clear(&mut self) {
        while let Some(slot) = self.used.oldest() {
            self.used.remove(slot);
            self.index.remove(slot);
            self.free.push(slot);
        }
        // Waits for the writes before it; an operator asked for it.
        if let Some(writes) = &self.writes {
            let _ = writes.send(Write::Clear);
        }
    }

    fn read(&mut self, slot: u32, entry: Entry, out: &mut [u8]) -> bool {
        let began = (self.now)();
        let mut buffer = std::mem::take(&mut self.buffer);
        let read = self.file.read_exact_at(&mut buffer, u64::from(slot) * self.stride);
        let (head, bytes) = buffer.split_at(HEADER_BYTES);
        let whole = read.is_ok()
            && Header::decode(head, self.identity, self.block_size)
                .is_some_and(|(found, _, checksum)| found.serial == entry.serial && checksum == xxh3_128(bytes));
        if whole {
            out.copy_from_slice(bytes);
        }
        self.buffer = buffer;
        self.read.add((self.now)().saturating_sub(began));
        whole
    }

    /// What of an earlier life can be reached again: contents whose parents are here too, up to the beginning.
    fn restore(&mut self, slots: u32) {
        let mut head = [0; HEADER_BYTES];
        let mut found: Vec<(u32, Entry, Vec<u32>)> = Vec::new();
        let mut known = HashSet::from([Link::ROOT.serial]);
        for slot in 0..slots {
            if self.file.read_exact_at(&mut head, u64::from(slot) * self.stride).is_err() {
                break;
            }
            if let Some((entry, tokens, _)) = Header::decode(&head, self.identity, self.block_size) {
                self.next_serial = self.next_serial.max(entry.serial + 1).max(entry.parent + 1);
                // Arrival numbers begin anew, so private contents would meet those of others.
                if matches!(entry.space, KeySpace::Salted(_)) {
                    found.push((slot, entry, tokens));
                }
            }
        }
        // Parents have smaller serials than their children.
        found.sort_by_key(|(_, entry, _)| entry.serial);
        for (slot, entry, tokens) in found {
            if known.contains(&entry.parent) && known.insert(entry.serial) {
                if let Some(displaced) = self.index.insert(slot, entry, &tokens) {
                    self.used.remove(displaced);
                }
                self.used.push_newest(slot);
                self.restored += 1;
            }
        }
        self.free.retain(|&slot| !self.used.contains(slot));
    }

    /// Until everything is on the disk; for tests.
    #[doc(hidden)]
    pub fn flush(&self) {
        while !self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            std::thread::yield_now();
        }
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.writes = None;
        if let Some(writer) = self.writer.take() {
            // It ends with its queue; what it had left is on the disk then.
            let _ = writer.join();
        }
    }
}

/// The writing thread's side.
struct Writing {
    file: Arc<File>,
    stride: u64,
    len: u64,
    on_the_way: Arc<Mutex<HashMap<u32, Arc<Vec<u8>>>>>,
    failed: Arc<AtomicBool>,
    now: fn() -> Duration,
    written: Arc<Moved>,
}

impl Writing {
    fn run(&self, queue: &Receiver<Write>) {
        while let Ok(write) = queue.recv() {
            let began = (self.now)();
            let done = match &write {
                Write::Block(slot, block) => self.file.write_all_at(block, u64::from(*slot) * self.stride),
                Write::Clear => self.file.set_len(0).and_then(|()| allocate(&self.file, self.len)),
            };
            if let Err(cause) = done
                && !self.failed.swap(true, Ordering::Relaxed)
            {
                eprintln!("worker: the swap file can not be written ({cause}); KV is not swapped to disk any more");
            }
            if let Write::Block(slot, block) = write {
                self.written.add((self.now)().saturating_sub(began));
                let mut on_the_way = self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner);
                if on_the_way.get(&slot).is_some_and(|newest| Arc::ptr_eq(newest, &block)) {
                    on_the_way.remove(&slot);
                }
            }
        }
    }
}

/// Takes the space on the disk now: a full disk is found at the start, not in the middle of a burst.
fn allocate(file: &File, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        // Some file systems can not; then the file grows as it is written.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(len),
        result => Ok(result?),
    }
}

/// What stands before each block.
struct Header<'t> {
    entry: Entry,
    tokens: &'t [u32],
    checksum: u128,
}

impl Header<'_> {
    fn encode(&self, identity: u128) -> [u8; HEADER_BYTES] {
        let Entry { hash, space, parent, serial, .. } = self.entry;
        let (kind, number) = match space {
            KeySpace::Salted(salt) => (0u64, salt),
            KeySpace::Private(arrival) => (1, arrival),
        };
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        for number in [MAGIC, kind, number, parent, serial, self.tokens.len() as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [identity, hash, self.checksum] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        self.tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        bytes.resize(HEADER_BYTES - 8, 0);
        let own = xxh3_64(&bytes);
        bytes.extend_from_slice(&own.to_le_bytes());
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&bytes);
        header
    }

    /// `None`: no header, one that was damaged, or of another model.
    fn decode(bytes: &[u8], identity: u128, block_size: usize) -> Option<(Entry, Vec<u32>, u128)> {
        let word = |index: usize| {
            let at = index * 8;
            Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
        };
        let long = |index: usize| {
            let at = 48 + index * 16;
            Some(u128::from_le_bytes(bytes.get(at..at + 16)?.try_into().ok()?))
        };
        let own = word(HEADER_BYTES / 8 - 1)?;
        if word(0)? != MAGIC || long(0)? != identity || xxh3_64(bytes.get(..HEADER_BYTES - 8)?) != own {
            return None;
        }
        let tokens = usize::try_from(word(5)?).ok().filter(|&n| n == block_size && n <= MAX_BLOCK_SIZE)?;
        let tokens = bytes.get(96..96 + 4 * tokens)?.chunks_exact(4);
        let tokens = tokens.map(|t| t.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))).collect();
        let space = if word(1)? == 0 { KeySpace::Salted(word(2)?) } else { KeySpace::Private(word(2)?) };
        let entry =
            Entry { hash: long(1)?, space, parent: word(3)?, serial: word(4)?, computed: true, preempted: false };
        Some((entry, tokens, long(2)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1000;

    /// A clock that moves a microsecond whenever somebody looks.
    fn now() -> Duration {
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        Duration::from_micros(LOOKS.fetch_add(1, Ordering::Relaxed))
    }

    fn open(dir: &std::path::Path, identity: u128, slots: u64) -> DiskTier {
        let config = DiskConfig { path: dir.join("kv"), bytes: slots * 4096, identity, now };
        DiskTier::open(&config, BYTES, 2).unwrap()
    }

    fn entry(serial: u64, parent: u64) -> Entry {
        let space = KeySpace::Salted(3);
        Entry { hash: u128::from(serial) * 77, space, parent, serial, computed: true, preempted: true }
    }

    fn key(entry: &Entry) -> BlockKey<'static> {
        BlockKey { space: entry.space, parent: Link { serial: entry.parent }, hash: entry.hash, tokens: &[5, 6] }
    }

    fn content(serial: u64) -> Vec<u8> {
        (0..BYTES).map(|i| (i as u64 * 31 + serial * 7) as u8).collect()
    }

    fn store(tier: &mut DiskTier, serial: u64, parent: u64) {
        tier.store(entry(serial, parent), &[5, 6], &content(serial));
        tier.flush();
    }

    fn load(tier: &mut DiskTier, serial: u64, parent: u64) -> Option<Vec<u8>> {
        let mut out = vec![0; BYTES];
        tier.load(&key(&entry(serial, parent)), &mut out).then_some(out)
    }

    #[test]
    fn the_next_life_finds_whole_chains_and_nothing_of_another_model() {
        let dir = tempfile::tempdir().unwrap();
        let mut tier = open(dir.path(), 1, 8);
        for (serial, parent) in [(1, 0), (2, 1), (9, 8)] {
            store(&mut tier, serial, parent);
        }
        drop(tier);
        let mut tier = open(dir.path(), 1, 8);
        assert_eq!((tier.stats().blocks_restored, tier.next_serial()), (2, 10), "9 has lost its parent");
        assert_eq!(load(&mut tier, 2, 1), Some(content(2)));
        assert_eq!(load(&mut tier, 9, 8), None);
        drop(tier);
        assert_eq!(open(dir.path(), 2, 8).stats().blocks_restored, 0);
    }

    #[test]
    fn what_is_moved_is_counted_and_timed() {
        let dir = tempfile::tempdir().unwrap();
        let mut tier = open(dir.path(), 1, 4);
        for serial in 1..=3 {
            store(&mut tier, serial, serial - 1);
        }
        assert!(load(&mut tier, 1, 0).is_some() && load(&mut tier, 2, 1).is_some() && load(&mut tier, 7, 1).is_none());
        let stats = tier.stats();
        assert_eq!((stats.reads, stats.writes, stats.writes_skipped), (2, 3, 0));
        assert_eq!((stats.blocks_used, stats.blocks_total), (3, 4));
        assert!(stats.read_time >= Duration::from_micros(2) && stats.write_time >= Duration::from_micros(3));
    }

    #[test]
    fn a_flipped_byte_anywhere_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        for at in [3, 30, 60, 100, 400, 505, 512, 900, 1511] {
            let mut tier = open(dir.path(), 1, 4);
            tier.clear();
            store(&mut tier, 1, 0);
            let slot = u64::from(tier.index.find(&key(&entry(1, 0))).unwrap().0);
            let mut byte = [0];
            tier.file.read_exact_at(&mut byte, slot * 4096 + at).unwrap();
            tier.file.write_all_at(&[byte[0] ^ 4], slot * 4096 + at).unwrap();
            assert_eq!(load(&mut tier, 1, 0), None, "byte {at}");
            assert_eq!((tier.stats().blocks_corrupt, tier.used()), (1, 0));
            assert!(tier.find(&key(&entry(1, 0))).is_none(), "it is forgotten");
        }
    }

    #[test]
    fn the_oldest_make_room_and_a_cleared_file_is_empty_for_the_next_life_too() {
        let dir = tempfile::tempdir().unwrap();
        let mut tier = open(dir.path(), 1, 3);
        for serial in 1..=5 {
            store(&mut tier, serial, serial - 1);
        }
        assert_eq!((tier.used(), tier.total()), (3, 3));
        assert_eq!((load(&mut tier, 1, 0), load(&mut tier, 5, 4)), (None, Some(content(5))));
        tier.clear();
        store(&mut tier, 6, 0);
        drop(tier);
        let mut tier = open(dir.path(), 1, 3);
        assert_eq!((tier.stats().blocks_restored, load(&mut tier, 6, 0)), (1, Some(content(6))));
    }
}
