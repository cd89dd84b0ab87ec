//! The flight recorder: the last minutes of steps, requests and events in bounded rings, to be written down when a worker
//! is lost or an operator asks.
//!
//! The last steps are kept one by one, the whole window second by second, so that the size does not follow the rate. The
//! supervisor's task and the requests note things; each takes the lock for a push. What is written is in
//! `ernie_proto::flight`; `ernie-ctl debug explain` reads it.

use super::requests::Card;
use crate::system::memory;
use ernie_proto::flight::{FLIGHT_FORMAT, Flight, FlightEvent, FlightRequest, FlightSecond, FlightStep};
use ernie_proto::ids::WorkerId;
use ernie_proto::worker::StepStats;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The last steps of all workers; at five milliseconds a step, twenty seconds.
const STEPS_MAX: usize = 4096;
/// Seconds of all workers: an hour of one, a quarter of four.
const SECONDS_MAX: usize = 3600;
const EVENTS_MAX: usize = 1024;
/// Requests that have ended.
const REQUESTS_MAX: usize = 4096;
/// Flights kept in the state directory.
const FILES_MAX: usize = 16;
/// A crash loop tells its story once in this while: one flight holds every death before it.
const DUMP_GAP: Duration = Duration::from_secs(10);

/// Notes what happens.
#[derive(Debug)]
pub struct Recorder {
    dir: PathBuf,
    window: Duration,
    rings: Mutex<Rings>,
}

#[derive(Debug, Default)]
struct Rings {
    steps: VecDeque<FlightStep>,
    seconds: VecDeque<FlightSecond>,
    events: VecDeque<FlightEvent>,
    ended: VecDeque<FlightRequest>,
    under_way: HashMap<usize, Arc<Card>>,
    pids: HashMap<u64, u32>,
    dumped: Option<SystemTime>,
}

/// A flight could not be written.
#[derive(Debug, thiserror::Error)]
#[error("the flight can not be written to {path}: {source}; check space and permissions of the state directory")]
pub struct DumpError {
    path: PathBuf,
    source: io::Error,
}

impl Recorder {
    /// Flights go to `state_dir/flight`.
    pub fn new(state_dir: &Path, window: Duration) -> Self {
        Self { dir: state_dir.join("flight"), window, rings: Mutex::default() }
    }

    /// A worker reported a step.
    pub fn step(&self, slot: u32, worker: WorkerId, stats: &StepStats) {
        let step_us = (stats.step_seconds * 1e6) as u64;
        let now = SystemTime::now();
        let mut rings = self.lock();
        push(
            &mut rings.steps,
            STEPS_MAX,
            FlightStep {
                at_ms: millis(now),
                slot,
                worker: worker.0,
                step_us,
                tokens: stats.tokens,
                prefill_tokens: stats.prefill_tokens,
                sequences: stats.sequences,
                running: stats.running,
                waiting: stats.waiting,
                blocks_free: stats.blocks_free,
            },
        );
        let at = millis(now) / 1000;
        let same = |s: &FlightSecond| s.at == at && s.worker == worker.0;
        // Workers take turns within a second: theirs are among the last few.
        if !rings.seconds.iter().rev().take_while(|s| s.at == at).any(same) {
            // Once a second: what the process holds is read from /proc.
            let resident = rings.pids.get(&worker.0).copied().and_then(memory::process).map_or(0, |p| p.resident_bytes);
            let second =
                FlightSecond { at, slot, worker: worker.0, resident_bytes: resident, ..FlightSecond::default() };
            push(&mut rings.seconds, SECONDS_MAX, second);
        }
        if let Some(second) = rings.seconds.iter_mut().rev().find(|s| same(s)) {
            second.steps += 1;
            second.tokens += u64::from(stats.tokens);
            second.prefill_tokens += u64::from(stats.prefill_tokens);
            second.step_us_sum += step_us;
            second.step_us_max = second.step_us_max.max(step_us);
            (second.running, second.waiting, second.swapped) = (stats.running, stats.waiting, stats.swapped);
            (second.blocks_total, second.blocks_free) = (stats.blocks_total, stats.blocks_free);
            second.preemptions = stats.preemptions;
            (second.swapped_out_blocks, second.swapped_in_blocks) = (stats.swapped_out_blocks, stats.swapped_in_blocks);
        }
    }

    /// Something happened; `text` is a sentence without anything of a request but its id.
    pub fn event(&self, kind: &str, worker: Option<WorkerId>, text: String) {
        let event =
            FlightEvent { at_ms: millis(SystemTime::now()), kind: kind.to_owned(), worker: worker.map(|w| w.0), text };
        push(&mut self.lock().events, EVENTS_MAX, event);
    }

    /// A worker process lives from now on.
    pub fn worker_began(&self, worker: WorkerId, pid: u32) {
        self.lock().pids.insert(worker.0, pid);
    }

    pub fn worker_gone(&self, worker: WorkerId) {
        self.lock().pids.remove(&worker.0);
    }

    pub(super) fn request_began(&self, card: &Arc<Card>) {
        // By address: a card lives as long as it is in the table, so no two have the same.
        self.lock().under_way.insert(Arc::as_ptr(card).addr(), Arc::clone(card));
    }

    pub(super) fn request_ended(&self, card: &Arc<Card>, finished: &str) {
        let ended = FlightRequest {
            ended_ms: Some(millis(SystemTime::now())),
            finished: Some(finished.to_owned()),
            ..request(card)
        };
        let mut rings = self.lock();
        rings.under_way.remove(&Arc::as_ptr(card).addr());
        push(&mut rings.ended, REQUESTS_MAX, ended);
    }

    /// Everything within the window.
    pub fn flight(&self, reason: &str, worker: Option<WorkerId>) -> Flight {
        let now = millis(SystemTime::now());
        let since = now.saturating_sub(u64::try_from(self.window.as_millis()).unwrap_or(u64::MAX));
        let rings = self.lock();
        let ended = rings.ended.iter().filter(|r| r.ended_ms >= Some(since)).cloned();
        let mut requests: Vec<_> = ended.chain(rings.under_way.values().map(|card| request(card))).collect();
        requests.sort_by_key(|r| r.arrived_ms);
        Flight {
            format: FLIGHT_FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            at_ms: now,
            reason: reason.to_owned(),
            worker: worker.map(|w| w.0),
            window_seconds: self.window.as_secs(),
            events: rings.events.iter().filter(|e| e.at_ms >= since).cloned().collect(),
            seconds: rings.seconds.iter().filter(|s| s.at >= since / 1000).cloned().collect(),
            steps: rings.steps.iter().filter(|s| s.at_ms >= since).copied().collect(),
            requests,
        }
    }

    /// Takes a flight of a worker's loss, to be written by [`Recorder::write`]. `None`: one was taken moments ago.
    pub fn flight_of_loss(&self, worker: WorkerId, reason: &str) -> Option<Flight> {
        let now = SystemTime::now();
        let mut rings = self.lock();
        if rings.dumped.is_some_and(|at| now.duration_since(at).is_ok_and(|gone| gone < DUMP_GAP)) {
            return None;
        }
        rings.dumped = Some(now);
        drop(rings);
        Some(self.flight(&format!("worker {worker} was lost: {reason}"), Some(worker)))
    }

    /// Writes a flight and removes the oldest ones above the number kept. Blocks on the disk.
    pub fn write(&self, flight: &Flight) -> Result<PathBuf, DumpError> {
        let at = jiff::Timestamp::from_millisecond(i64::try_from(flight.at_ms).unwrap_or(i64::MAX)).unwrap_or_default();
        let what = flight.worker.map_or_else(|| "asked".to_owned(), |w| WorkerId(w).to_string());
        // Names sort by time.
        let name = format!("flight-{}-{what}.json", at.strftime("%Y%m%dT%H%M%S.%3fZ"));
        let path = self.dir.join(name);
        let fail = |source| DumpError { path: path.clone(), source };
        std::fs::create_dir_all(&self.dir).map_err(fail)?;
        let part = path.with_extension("part");
        let text = serde_json::to_vec(flight).map_err(|e| fail(e.into()))?;
        std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path)).map_err(fail)?;
        self.prune();
        Ok(path)
    }

    fn prune(&self) {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return };
        let mut flights: Vec<_> =
            entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
        flights.sort();
        for old in flights.iter().rev().skip(FILES_MAX) {
            // It may be gone already; if it can not be removed, the next flight tries again.
            let _ = std::fs::remove_file(old);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn push<T>(ring: &mut VecDeque<T>, max: usize, item: T) {
    if ring.len() == max {
        ring.pop_front();
    }
    ring.push_back(item);
}

fn request(card: &Card) -> FlightRequest {
    let arrived_ms = millis(card.arrival);
    let at = |since: Option<Duration>| since.map(|s| arrived_ms + u64::try_from(s.as_millis()).unwrap_or(0));
    let [started, first, last] = card.notes.times();
    FlightRequest {
        id: card.request_id.to_string(),
        number: card.notes.number.load(Ordering::Relaxed),
        key: card.key.to_string(),
        arrived_ms,
        prompt_tokens: card.prompt_tokens,
        cached_tokens: card.notes.cached_tokens.load(Ordering::Relaxed),
        max_tokens: card.max_tokens,
        choices: card.choices,
        generated: card.notes.generated.load(Ordering::Relaxed),
        started_ms: at(started),
        first_token_ms: at(first),
        last_token_ms: at(last),
        ended_ms: None,
        finished: None,
    }
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::requests::Notes;

    fn card(id: &str) -> Arc<Card> {
        Arc::new(Card {
            request_id: id.into(),
            key: "app".into(),
            operation: "chat",
            model: "m".to_owned(),
            revision: "r".to_owned(),
            parent: None,
            arrival: SystemTime::now(),
            prompt_tokens: 7,
            choices: 1,
            max_tokens: 100,
            temperature: 0.0,
            top_p: 1.0,
            notes: Notes::default(),
        })
    }

    #[test]
    fn a_flight_has_the_last_steps_the_seconds_and_who_was_under_way() {
        let dir = tempfile::tempdir().expect("temp");
        let recorder = Recorder::new(dir.path(), Duration::from_secs(600));
        let (over, running) = (card("over"), card("running"));
        recorder.request_began(&over);
        recorder.request_began(&running);
        running.notes.started(Duration::from_millis(3), 5);
        running.notes.token(Duration::from_millis(10));
        running.notes.token(Duration::from_millis(12));
        recorder.request_ended(&over, "stop");
        let stats = StepStats { tokens: 3, step_seconds: 0.002, blocks_free: 9, ..StepStats::default() };
        for _ in 0..STEPS_MAX + 10 {
            recorder.step(0, WorkerId(4), &stats);
        }
        recorder.event("worker.lost", Some(WorkerId(4)), "it ended".to_owned());
        let flight = recorder.flight("asked for", None);
        assert_eq!(flight.steps.len(), STEPS_MAX, "the ring is bounded");
        assert_eq!(flight.seconds.iter().map(|s| s.steps as usize).sum::<usize>(), STEPS_MAX + 10);
        assert_eq!(flight.seconds[0].step_us_max, 2000);
        let of = |id: &str| flight.requests.iter().find(|r| r.id == id).expect("there").clone();
        assert_eq!(of("over").finished.as_deref(), Some("stop"));
        let running = of("running");
        assert_eq!((running.ended_ms, running.generated, running.cached_tokens), (None, 2, 5));
        assert_eq!(running.last_token_ms, Some(running.arrived_ms + 12));
        let path = recorder.write(&flight).expect("written");
        let read: Flight = serde_json::from_slice(&std::fs::read(path).expect("read")).expect("JSON");
        assert_eq!(read, flight);
    }

    #[test]
    fn a_crash_loop_writes_one_flight_and_old_ones_go() {
        let dir = tempfile::tempdir().expect("temp");
        let recorder = Recorder::new(dir.path(), Duration::from_secs(600));
        let flight = recorder.flight_of_loss(WorkerId(1), "it ended").expect("the first");
        assert!(recorder.flight_of_loss(WorkerId(2), "it ended").is_none(), "moments later");
        for n in 0..FILES_MAX as u64 + 5 {
            recorder.write(&Flight { at_ms: flight.at_ms + n, ..flight.clone() }).expect("written");
        }
        assert_eq!(std::fs::read_dir(dir.path().join("flight")).expect("listed").count(), FILES_MAX);
    }
}
