//! What the daemon says about itself: log lines, metrics, traces, and the flight recorder.

pub mod logging;
pub mod metrics;
pub mod recorder;
pub mod requests;
pub mod steps;
pub mod traces;
