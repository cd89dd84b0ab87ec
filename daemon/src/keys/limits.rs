//! What one key may still do: requests and tokens per minute (GCRA), requests at the same time, tokens per day.

use super::LimitRefusal;
use ernie_proto::admin::KeyLimits;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Counters of one key. They outlive a reload of the keys.
#[derive(Debug)]
pub(super) struct KeyState {
    limits: KeyLimits,
    requests: Option<DefaultDirectRateLimiter>,
    tokens: Option<DefaultDirectRateLimiter>,
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
        let per_minute = |n: u32| NonZeroU32::new(n).map(|n| RateLimiter::direct(Quota::per_minute(n)));
        Self {
            limits,
            requests: per_minute(limits.requests_per_minute),
            tokens: per_minute(limits.tokens_per_minute),
            under_way: AtomicU32::new(0),
            today: AtomicU64::new(used_today),
            day: Mutex::new(day.to_owned()),
        }
    }

    pub(super) fn limits(&self) -> &KeyLimits {
        &self.limits
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
            && let Err(wait) = requests.check()
        {
            return Err(LimitRefusal {
                what: "requests per minute",
                limit: u64::from(self.limits.requests_per_minute),
                retry_after: wait.wait_time_from(DefaultClock::default().now()),
            });
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
        let Some(wanted) = NonZeroU32::new(wanted) else { return Ok(()) };
        // `wanted` never exceeds the burst, so the outer error can not be.
        match limiter.check_n(wanted) {
            Ok(Err(wait)) => Err(LimitRefusal {
                what: "tokens per minute",
                limit: u64::from(limit),
                retry_after: wait.wait_time_from(DefaultClock::default().now()),
            }),
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }

    /// Limit and remaining requests at the same time, for `x-ratelimit-*`. `None`: unlimited.
    pub fn limits(&self) -> &KeyLimits {
        &self.state.limits
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        self.state.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}
