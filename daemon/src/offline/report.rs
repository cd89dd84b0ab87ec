//! Output of the model verbs: people's text or JSON on standard output, progress and complaints on standard error.

use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Prints `value` as JSON, or what `people` makes of it.
pub(super) fn show<T: Serialize>(json: bool, value: &T, people: impl FnOnce(&T) -> String) {
    let text = if json { serde_json::to_string_pretty(value).unwrap_or_default() + "\n" } else { people(value) };
    // A closed pipe (`| head`) ends silently.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Says why it did not work.
pub(super) fn complain(error: &dyn std::fmt::Display) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "ernied model: {error}");
    ExitCode::FAILURE
}

/// A line on the terminal that shows how far something is; silent elsewhere.
pub(super) struct Progress {
    what: &'static str,
    unit: fn(u64) -> String,
    told: Mutex<Option<Instant>>,
}

impl Progress {
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, unit: bytes, told: Mutex::new(None) }
    }

    pub(super) fn tokens(what: &'static str) -> Self {
        Self { unit: |n| format!("{n} tokens"), ..Self::new(what) }
    }

    pub(super) fn at(&self, done: u64, total: u64) {
        if total == 0 || !std::io::stderr().is_terminal() {
            return;
        }
        let mut told = self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if done < total && told.is_some_and(|at| at.elapsed() < PROGRESS_INTERVAL) {
            return;
        }
        *told = Some(Instant::now());
        let end = if done >= total { "\n" } else { "" };
        let _ = write!(std::io::stderr(), "\r{} {} of {}{end}", self.what, (self.unit)(done), (self.unit)(total));
    }
}

pub(super) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Parameters as people say them: 0.36 B, 21.8 B, 13 M.
pub(super) fn parameters(n: u64) -> String {
    match n {
        n if n >= 100_000_000 => format!("{:.2} B", n as f64 / 1e9),
        n if n >= 1_000_000 => format!("{:.1} M", n as f64 / 1e6),
        n => n.to_string(),
    }
}
