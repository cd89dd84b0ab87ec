//! What systemd is told: readiness, status text, reloads, the watchdog. Does nothing when nobody asked.

use sd_notify::NotifyState;
use std::time::Duration;

/// Ready: a model serves.
pub fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

pub fn status(text: &str) {
    tell(&[NotifyState::Status(text)]);
}

/// A reload began; [`ready`] ends it.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(e) => tracing::debug!("no monotonic clock for systemd: {e}"),
    }
}

pub fn stopping(status: &str) {
    tell(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

/// Loading takes as long as it takes: asks systemd for `more` on top of its start limit, as long as bytes move.
pub fn extend_start(more: Duration) {
    tell(&[NotifyState::ExtendTimeoutUsec(u32::try_from(more.as_micros()).unwrap_or(u32::MAX))]);
}

/// One sign of life. Sent when the engine made progress or is idle, never by a bare timer.
pub fn watchdog() {
    tell(&[NotifyState::Watchdog]);
}

/// How often [`watchdog`] has to be called; half of what systemd waits. `None`: no watchdog asked for.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|d| d / 2)
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(states) {
        tracing::debug!("systemd could not be notified: {e}");
    }
}
