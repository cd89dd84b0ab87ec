//! Repeated warnings become a few lines and a count: a fault that repeats a thousand times a second must not bury the line
//! that explains it.
//!
//! Warnings and errors from the same place in the code pass [`BURST`] times per [`WINDOW`]; what is held back is counted,
//! and [`Fold::drain`] tells the counts (the daemon logs them every ten seconds).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter};

/// Lines of one place that pass in a window.
const BURST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Per place in the code: when its window began, how many passed, how many were held back. Bounded by the number of places.
#[derive(Debug, Default, Clone)]
pub(super) struct Fold {
    // Taken for a look-up by the thread that logs a warning; never across anything that waits.
    places: Arc<Mutex<HashMap<Identifier, Place>>>,
}

/// Lines of one place that were held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repeated {
    /// `file:line` of the place.
    pub place: String,
    pub count: u64,
}

#[derive(Debug, Clone)]
struct Place {
    name: String,
    since: Instant,
    passed: u32,
    held: u64,
}

impl Place {
    fn new(name: String, now: Instant) -> Self {
        Self { name, since: now, passed: 0, held: 0 }
    }

    /// Whether one more line may pass.
    fn one_more(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= WINDOW {
            self.since = now;
            self.passed = 0;
        }
        if self.passed < BURST {
            self.passed += 1;
            return true;
        }
        self.held += 1;
        false
    }
}

impl Fold {
    /// What was held back since the last call.
    pub(super) fn drain(&self) -> Vec<Repeated> {
        let mut places = self.places.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        places
            .values_mut()
            .filter(|p| p.held > 0)
            .map(|p| Repeated { place: p.name.clone(), count: std::mem::take(&mut p.held) })
            .collect()
    }
}

impl<S: Subscriber> Filter<S> for Fold {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &tracing::Event<'_>, _: &Context<'_, S>) -> bool {
        let meta = event.metadata();
        if *meta.level() > Level::WARN {
            return true;
        }
        let now = Instant::now();
        let mut places = self.places.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let name = || format!("{}:{}", meta.file().unwrap_or(meta.target()), meta.line().unwrap_or(0));
        places.entry(meta.callsite()).or_insert_with(|| Place::new(name(), now)).one_more(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_from_one_place_becomes_a_burst_and_a_count() {
        let start = Instant::now();
        let mut place = Place::new("here:1".to_owned(), start);
        assert_eq!((0..1000).filter(|_| place.one_more(start)).count(), BURST as usize);
        assert_eq!(place.held, 990);
        assert!(place.one_more(start + WINDOW), "a new window has room again");
    }
}
