//! A queue in the order of priority, arrival and choice.

use crate::sequence::{Key, Order};

/// Sequences in order; small enough (bounded by what admission lets in) that a sorted vector is the fastest.
#[derive(Debug, Default)]
pub struct Queue {
    entries: Vec<(Order, Key)>,
}

impl Queue {
    pub fn with_capacity(capacity: usize) -> Self {
        Self { entries: Vec::with_capacity(capacity) }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn insert(&mut self, order: Order, key: Key) {
        let at = self.entries.partition_point(|&(other, _)| other < order);
        self.entries.insert(at, (order, key));
    }

    /// True if it was in.
    pub fn remove(&mut self, order: Order) -> bool {
        let at = self.entries.binary_search_by_key(&order, |&(order, _)| order);
        if let Ok(at) = at {
            self.entries.remove(at);
        }
        at.is_ok()
    }

    pub fn get(&self, index: usize) -> Option<Key> {
        self.entries.get(index).map(|&(_, key)| key)
    }

    pub fn entry(&self, index: usize) -> Option<(Order, Key)> {
        self.entries.get(index).copied()
    }

    /// Takes the last in order.
    pub fn pop_last(&mut self) -> Option<Key> {
        self.entries.pop().map(|(_, key)| key)
    }

    pub fn iter(&self) -> impl Iterator<Item = Key> {
        self.entries.iter().map(|&(_, key)| key)
    }
}
