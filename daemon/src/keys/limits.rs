//! What one key may still do: requests and tokens per minute (GCRA), requests at the same time, tokens per day.

use super::LimitRefusal;
use ernie_proto::admin::KeyLimits;
use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Counters of one key. They outlive a reload of the keys.
#[derive(Debug)]
pub(super) struct KeyState {
    limits: KeyLimits,
    requests: Option<PerMinute>,
    tokens: Option<PerMinute>,
    under_way: AtomicU32,
    /// Tokens of the UTC day; the day is behind a lock because it changes once a day.
    today: AtomicU64,
    day: Mutex<String>,
}

impl KeyState {
    pub(super) fn unlimited() -> Self {
        Self::new(KeyLimits::default(), "", 0)
    }

    pub(super) fn new(limits: KeyLimits, day: &str, used_today: u64) -> Self {
        Self {
            limits,
            requests: PerMinute::new(limits.requests_per_minute),
            tokens: PerMinute::new(limits.tokens_per_minute),
            under_way: AtomicU32::new(0),
            today: AtomicU64::new(used_today),
            day: Mutex::new(day.to_owned()),
        }
    }

    pub(super) fn limits(&self) -> &KeyLimits {
        &self.limits
    }

    /// Requests and tokens of the minute, as far as they are limited.
    pub(super) fn budgets(&self) -> [Option<Budget>; 2] {
        [&self.requests, &self.tokens].map(|limit| limit.as_ref().map(PerMinute::budget))
    }

    pub(super) fn admit(self: &Arc<Self>, now: jiff::Timestamp) -> Result<KeyPermit, LimitRefusal> {
        let daily = self.limits.tokens_per_day;
        if daily > 0 && self.used_on(&now.strftime("%Y-%m-%d").to_string()) >= daily {
            let second_of_day = u64::try_from(now.as_second().rem_euclid(86_400)).unwrap_or(0);
            let retry_after = Duration::from_secs(86_400 - second_of_day);
            return Err(LimitRefusal { what: "tokens per day", limit: daily, retry_after });
        }
        let concurrent = self.limits.concurrent_requests;
        let entered = self.under_way.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
            (concurrent == 0 || n < concurrent).then_some(n + 1)
        });
        if entered.is_err() {
            return Err(LimitRefusal {
                what: "concurrent requests",
                limit: u64::from(concurrent),
                retry_after: Duration::from_secs(1),
            });
        }
        let permit = KeyPermit { state: Arc::clone(self) };
        if let Some(requests) = &self.requests
            && let Err(retry_after) = requests.take(1)
        {
            let limit = u64::from(self.limits.requests_per_minute);
            return Err(LimitRefusal { what: "requests per minute", limit, retry_after });
        }
        Ok(permit)
    }

    pub(super) fn used(&self, day: &str, tokens: u64) {
        self.used_on(day);
        self.today.fetch_add(tokens, Ordering::AcqRel);
    }

    /// Tokens used on this day; a new day begins at 0.
    fn used_on(&self, day: &str) -> u64 {
        let mut current = self.day.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *current != day {
            day.clone_into(&mut current);
            self.today.store(0, Ordering::Release);
        }
        self.today.load(Ordering::Acquire)
    }
}

/// The right to have one request under way; given back on drop.
#[derive(Debug)]
pub struct KeyPermit {
    state: Arc<KeyState>,
}

impl KeyPermit {
    /// Takes tokens of the minute: the prompt and the most the answer may have. A request larger than the whole minute
    /// takes a full minute.
    pub fn take_tokens(&self, tokens: u64) -> Result<(), LimitRefusal> {
        let Some(limiter) = &self.state.tokens else { return Ok(()) };
        let limit = self.state.limits.tokens_per_minute;
        let wanted = u32::try_from(tokens).unwrap_or(u32::MAX).clamp(1, limit);
        limiter.take(wanted).map_err(|retry_after| LimitRefusal {
            what: "tokens per minute",
            limit: u64::from(limit),
            retry_after,
        })
    }
}

/// A budget that fills up evenly, a minute's worth at the most.
#[derive(Debug)]
struct PerMinute {
    limit: u32,
    limiter: DefaultDirectRateLimiter<StateInformationMiddleware>,
    /// As of the last time that something was taken, or refused.
    left: AtomicU32,
}

/// What of a minute's budget is left, to tell the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    pub limit: u32,
    pub left: u32,
}

impl Budget {
    /// Until all of it is there again, if nothing is taken.
    pub fn full_in(&self) -> Duration {
        Duration::from_secs(60) * (self.limit - self.left.min(self.limit)) / self.limit.max(1)
    }
}

impl PerMinute {
    /// 0: no limit.
    fn new(limit: u32) -> Option<Self> {
        let quota = Quota::per_minute(NonZeroU32::new(limit)?);
        let limiter = RateLimiter::direct(quota).with_middleware::<StateInformationMiddleware>();
        Some(Self { limit, limiter, left: AtomicU32::new(limit) })
    }

    /// Takes so much, which is not more than the limit; else says how long it takes until it is there.
    fn take(&self, wanted: u32) -> Result<(), Duration> {
        let Some(wanted) = NonZeroU32::new(wanted) else { return Ok(()) };
        match self.limiter.check_n(wanted) {
            Ok(Ok(state)) => {
                self.left.store(state.remaining_burst_capacity(), Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(wait)) => {
                if wanted.get() == 1 {
                    self.left.store(0, Ordering::Relaxed);
                }
                Err(wait.wait_time_from(DefaultClock::default().now()))
            }
            // More than a minute's worth: the callers ask for less.
            Err(_) => Ok(()),
        }
    }

    fn budget(&self) -> Budget {
        Budget { limit: self.limit, left: self.left.load(Ordering::Relaxed) }
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        self.state.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}
