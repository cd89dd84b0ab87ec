//! What the daemon says about itself: log lines and metrics.

pub mod logging;
pub mod metrics;
