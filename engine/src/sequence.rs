//! Requests and their sequences: what the scheduler orders and the engine feeds.
//!
//! A request has one sequence per choice that is not finished. A sequence is a chain of tokens (prompt, then generated), of
//! which the first `computed` have K and V in the blocks of its table; `computed` chases the number of tokens.

use crate::kv::{BlockTable, Content, KeySpace, Tokens};
use crate::outputs::TokenLogprobs;
use crate::params::{RequestId, SamplingParams};
use crate::sampling::Sampler;
use crate::scheduler::fair::Fare;
use std::sync::Arc;

/// Who goes first: lower priority numbers, then those whose owner is due earlier, of these the shorter, then earlier arrivals,
/// then lower choices. Nobody is equal to another. Only ageing changes it, at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    pub priority: i32,
    /// See `scheduler::fair`.
    pub tag: u64,
    /// Tokens that it is expected to take.
    pub cost: u64,
    pub arrival: u64,
    pub choice: u16,
}

#[derive(Debug)]
pub struct Sequence {
    pub order: Order,
    /// Place of its request in [`Requests`].
    pub request: Key,
    pub prompt: Arc<Vec<u32>>,
    pub params: Arc<SamplingParams>,
    pub space: KeySpace,
    pub generated: Vec<u32>,
    /// Tokens from the start whose K and V are in its blocks.
    pub computed: usize,
    pub table: BlockTable,
    pub sampler: Sampler,
    pub state: State,
    pub owner: u64,
    /// Tokens computed by the engine when it began to wait.
    pub waits_since: u64,
    /// How often it made room for somebody who was due earlier.
    pub displaced: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Has not run yet.
    Waiting,
    Running,
    /// Made room for another, and waits to go on.
    Preempted,
}

impl Sequence {
    pub fn tokens(&self) -> Tokens<'_> {
        Tokens { prompt: &self.prompt, generated: &self.generated }
    }

    pub fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that are known and not computed.
    pub fn remaining(&self) -> usize {
        self.len() - self.computed
    }

    /// Its blocks, to be changed, and what they hold.
    pub fn table_and_content(&mut self) -> (&mut BlockTable, Content<'_>) {
        let tokens = Tokens { prompt: &self.prompt, generated: &self.generated };
        (&mut self.table, Content { space: self.space, tokens })
    }

    pub fn choice(&self) -> u16 {
        self.order.choice
    }
}

/// What all choices of a request have in common.
#[derive(Debug)]
pub struct Request {
    pub id: RequestId,
    /// Sequences that are not finished.
    pub sequences: Vec<Key>,
    /// Some sequence has run.
    pub started: bool,
    /// The running sequence that computes the prompt; the others wait for its blocks.
    pub prefilling: Option<Key>,
    /// What its owner was charged, and the tokens that it did use.
    pub fare: Fare,
    pub used: u64,
    /// Log-probabilities of prompt tokens, as far as known, when they were asked for; taken when complete.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
}

/// Names a place in a [`Store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(u32);

/// Things by key; places are used again.
#[derive(Debug)]
pub struct Store<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

pub type Sequences = Store<Sequence>;
pub type Requests = Store<Request>;

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Store<T> {
    pub fn insert(&mut self, value: T) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            u32::try_from(self.places.len() - 1).expect("fewer than 2^32 requests are ever held at once")
        });
        self.places[place as usize] = Some(value);
        Key(place)
    }

    pub fn remove(&mut self, key: Key) -> T {
        self.free.push(key.0);
        self.places[key.0 as usize].take().expect("a key is removed once")
    }

    pub fn get(&self, key: Key) -> Option<&T> {
        self.places[key.0 as usize].as_ref()
    }

    /// Two different values at once, the first to be changed.
    pub fn pair(&mut self, changed: Key, read: Key) -> (&mut T, &T) {
        let pair = self.places.get_disjoint_mut([changed.0 as usize, read.0 as usize]);
        match pair {
            Ok([Some(changed), Some(read)]) => (changed, read),
            _ => unreachable!("two different keys, both of values that are there"),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.places.iter().flatten()
    }
}

impl<T> std::ops::Index<Key> for Store<T> {
    type Output = T;

    fn index(&self, key: Key) -> &T {
        self.places[key.0 as usize].as_ref().expect("a key is used while its value is there")
    }
}

impl<T> std::ops::IndexMut<Key> for Store<T> {
    fn index_mut(&mut self, key: Key) -> &mut T {
        self.places[key.0 as usize].as_mut().expect("a key is used while its value is there")
    }
}
