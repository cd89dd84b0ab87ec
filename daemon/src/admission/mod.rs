//! Who is let in: a bound on what is under way, checked before any costly work.
//!
//! A [`Permit`] stands for some choices (and later their prompt tokens) and gives them back when it is dropped, whatever the
//! reason. What is over the bound is refused at once with a time to come back: a long queue is a time-out for everybody.
//!
//! Limits per API key are not here (`keys`); the engine's own queue is inside the bound.

pub mod limits;

pub use limits::AdmissionLimits;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Why a request was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the server is at its limit of {running} running and {queued} queued requests; try again later")]
    QueueFull { running: usize, queued: usize },
    #[error("{waiting} prompt tokens are waiting, the limit is {limit}; try again later")]
    TokensFull { waiting: u64, limit: u64 },
}

impl Refusal {
    /// When it is worth trying again. A guess: long enough that refused clients do not become the load.
    pub fn retry_after(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// Counts what is under way.
#[derive(Debug)]
pub struct Admission {
    limits: watch::Sender<AdmissionLimits>,
    choices: AtomicUsize,
    requests: AtomicUsize,
    /// Prompt tokens of requests that have not begun.
    waiting_tokens: AtomicU64,
}

impl Admission {
    pub fn new(limits: AdmissionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits: watch::Sender::new(limits),
            choices: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            waiting_tokens: AtomicU64::new(0),
        })
    }

    pub fn limits(&self) -> AdmissionLimits {
        self.limits.borrow().clone()
    }

    /// New bounds count for the next request; nobody who is in has to leave.
    pub fn set_limits(&self, limits: AdmissionLimits) {
        self.limits.send_replace(limits);
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Lets a request for `choices` answers in. An empty house takes any request, however large.
    pub fn admit(self: &Arc<Self>, choices: usize) -> Result<Permit, Refusal> {
        let limits = self.limits();
        let bound = limits.choices_max();
        let admitted = self.choices.fetch_update(Ordering::AcqRel, Ordering::Acquire, |under_way| {
            (under_way == 0 || under_way + choices <= bound).then_some(under_way + choices)
        });
        if admitted.is_err() {
            return Err(Refusal::QueueFull { running: limits.running_max, queued: limits.queued_max });
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(Permit { admission: self.clone(), choices, waiting_tokens: AtomicU64::new(0) })
    }
}

/// The right to be under way.
#[derive(Debug)]
pub struct Permit {
    admission: Arc<Admission>,
    choices: usize,
    waiting_tokens: AtomicU64,
}

impl Permit {
    /// Counts the prompt, once its length is known. An empty queue takes any prompt.
    pub fn wait_with(&self, tokens: u64) -> Result<(), Refusal> {
        let Some(limit) = self.admission.limits().queued_tokens_max else { return Ok(()) };
        let waiting = &self.admission.waiting_tokens;
        let counted = waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            (waiting == 0 || waiting + tokens <= limit).then_some(waiting + tokens)
        });
        match counted {
            Ok(_) => {
                self.waiting_tokens.fetch_add(tokens, Ordering::Relaxed);
                Ok(())
            }
            Err(waiting) => Err(Refusal::TokensFull { waiting, limit }),
        }
    }

    /// The request has begun: its prompt no longer waits.
    pub fn begun(&self) {
        let tokens = self.waiting_tokens.swap(0, Ordering::AcqRel);
        self.admission.waiting_tokens.fetch_sub(tokens, Ordering::AcqRel);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.begun();
        self.admission.choices.fetch_sub(self.choices, Ordering::AcqRel);
        self.admission.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(running: usize, queued: usize, tokens: Option<u64>) -> Arc<Admission> {
        Admission::new(AdmissionLimits { running_max: running, queued_max: queued, queued_tokens_max: tokens })
    }

    #[test]
    fn exactly_running_and_queued_are_let_in_and_a_drop_makes_room() {
        let a = admission(2, 8, None);
        let permits: Vec<_> = (0..100).filter_map(|_| a.admit(1).ok()).collect();
        assert_eq!(permits.len(), 10);
        assert_eq!(a.in_flight(), 10);
        assert_eq!(a.admit(1).unwrap_err(), Refusal::QueueFull { running: 2, queued: 8 });
        drop(permits);
        assert_eq!(a.in_flight(), 0);
        assert!(a.admit(1).is_ok());
    }

    #[test]
    fn choices_count_and_a_large_request_gets_in_alone() {
        let a = admission(2, 2, None);
        let large = a.admit(16).unwrap();
        assert!(a.admit(1).is_err());
        drop(large);
        let _three = a.admit(3).unwrap();
        assert!(a.admit(2).is_err());
        assert!(a.admit(1).is_ok());
    }

    #[test]
    fn waiting_tokens_are_bounded_until_the_request_begins() {
        let a = admission(9, 9, Some(100));
        let first = a.admit(1).unwrap();
        first.wait_with(500).unwrap();
        let second = a.admit(1).unwrap();
        assert_eq!(second.wait_with(1).unwrap_err(), Refusal::TokensFull { waiting: 500, limit: 100 });
        first.begun();
        second.wait_with(60).unwrap();
        let third = a.admit(1).unwrap();
        assert!(third.wait_with(60).is_err());
        drop(second);
        third.wait_with(60).unwrap();
        drop((first, third));
        assert_eq!(a.waiting_tokens.load(Ordering::Relaxed), 0);
        assert_eq!(a.choices.load(Ordering::Relaxed), 0);
    }
}
