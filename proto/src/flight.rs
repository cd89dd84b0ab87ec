//! A flight: the last minutes of the daemon as ids and figures, written when a worker is lost or an operator asks.
//!
//! Never a prompt, an answer or a secret: a flight may be attached to a report. Files only grow: a field is added with a
//! default, never renamed, so that a newer ernie-ctl explains an older flight.

use serde::{Deserialize, Serialize};

/// Raised when an older reader would misunderstand a newer file.
pub const FLIGHT_FORMAT: u32 = 1;

/// One file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Flight {
    pub format: u32,
    /// Of the daemon.
    pub version: String,
    pub pid: u32,
    /// Milliseconds since 1970, as all times here.
    pub at_ms: u64,
    /// Why it was written, a sentence.
    pub reason: String,
    /// The worker whose loss it is about.
    pub worker: Option<u64>,
    /// What the recorder reaches back.
    pub window_seconds: u64,
    pub events: Vec<FlightEvent>,
    /// Second by second, for the whole window.
    pub seconds: Vec<FlightSecond>,
    /// The last steps, one by one.
    pub steps: Vec<FlightStep>,
    /// Requests that ended within the window, and those under way (without an end).
    pub requests: Vec<FlightRequest>,
}

/// Something that happened in the fleet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightEvent {
    pub at_ms: u64,
    /// `worker.lost`, `rollout.phase`, ...
    pub kind: String,
    pub worker: Option<u64>,
    pub text: String,
}

/// One worker's second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightSecond {
    /// Seconds since 1970.
    pub at: u64,
    pub slot: u32,
    pub worker: u64,
    pub steps: u32,
    pub tokens: u64,
    pub prefill_tokens: u64,
    pub step_us_sum: u64,
    pub step_us_max: u64,
    /// At its last step, as the rest.
    pub running: u32,
    pub waiting: u32,
    pub swapped: u32,
    pub blocks_total: u32,
    pub blocks_free: u32,
    /// Since the worker loaded.
    pub preemptions: u64,
    pub swapped_out_blocks: u64,
    pub swapped_in_blocks: u64,
    pub resident_bytes: u64,
}

/// One engine step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightStep {
    /// When its report arrived.
    pub at_ms: u64,
    pub slot: u32,
    pub worker: u64,
    pub step_us: u64,
    pub tokens: u32,
    pub prefill_tokens: u32,
    pub sequences: u32,
    pub running: u32,
    pub waiting: u32,
    pub blocks_free: u32,
}

/// A request's life.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightRequest {
    /// `X-Request-Id`.
    pub id: String,
    /// In the fleet; 0: it was never submitted.
    pub number: u64,
    /// Name of the API key.
    pub key: String,
    pub arrived_ms: u64,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub max_tokens: u32,
    pub choices: u32,
    pub generated: u32,
    pub started_ms: Option<u64>,
    pub first_token_ms: Option<u64>,
    pub last_token_ms: Option<u64>,
    /// `None`: under way when the flight was written.
    pub ended_ms: Option<u64>,
    pub finished: Option<String>,
}
