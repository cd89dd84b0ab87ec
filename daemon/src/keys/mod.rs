//! API keys: who a bearer token belongs to, and what that one may still do.
//!
//! `authenticate` answers from memory in constant time per key; `admit` takes the per-key limits (requests and tokens per
//! minute, concurrency, tokens per day) and gives them back on drop; `record` counts usage, which the audit store's writer
//! makes durable. Where keys come from (flags, file, store) is not seen by callers.

use std::sync::Arc;
use std::time::Duration;

/// Who a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Stable id of the key, `anonymous` when no keys are configured.
    pub id: Arc<str>,
    pub name: Arc<str>,
    /// Part of every prefix-cache key of this principal's requests.
    pub cache_salt: u64,
    /// Served names this key may use. `None`: all.
    pub models: Option<Vec<String>>,
}

/// Why a key was not accepted: 401 for the first four, never saying more to the client than "invalid key".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyRefusal {
    #[error("no API key: send it as `Authorization: Bearer KEY`")]
    Missing,
    #[error("the API key is not known")]
    Unknown,
    #[error("the API key has expired")]
    Expired,
    #[error("the API key was revoked")]
    Revoked,
}

/// Which limit of a key is used up; 429 with `Retry-After`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the API key's limit of {limit} {what} is used up; try again in {} s", .retry_after.as_secs().max(1))]
pub struct LimitRefusal {
    /// `requests per minute`, `tokens per minute`, `concurrent requests`, `tokens per day`.
    pub what: &'static str,
    pub limit: u64,
    pub retry_after: Duration,
}

/// Tokens of one finished request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}
