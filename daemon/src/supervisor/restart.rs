//! When a worker that died is started again: a pure function over (state, event, now).
//!
//! The deaths of the last `window` decide everything: after the first the next start is at once, then the wait doubles up
//! to `backoff_max`; with `crash_loop_deaths` of them the slot is in a crash loop and waits `backoff_max` each time. Deaths
//! leave the window by growing old, so a worker that has run well for a while begins afresh. No jitter: the slots of one
//! host have nobody to collide with.

use std::time::Duration;
use tokio::time::Instant;

/// How restarts are spaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartSettings {
    /// Wait after the second death; doubles with each further one.
    pub backoff: Duration,
    pub backoff_max: Duration,
    /// That many deaths within `window` make a crash loop.
    pub crash_loop_deaths: u32,
    pub window: Duration,
}

impl Default for RestartSettings {
    fn default() -> Self {
        Self {
            backoff: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            crash_loop_deaths: 6,
            window: Duration::from_secs(300),
        }
    }
}

/// One worker slot as far as restarts are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RestartState {
    /// No process is wanted.
    Stopped,
    /// A process exists.
    Running { deaths: Deaths, crash_loop: bool },
    /// A process is wanted and will be started at `until`.
    Waiting { deaths: Deaths, until: Instant, crash_loop: bool },
}

/// When the processes of a slot died, oldest first, no older than the window, no more than a crash loop takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Deaths(Vec<Instant>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RestartEvent {
    /// The slot is to have a process from now on. Forgets the past when it comes from an operator.
    Wanted,
    /// The slot is to have no process.
    Unwanted,
    /// The process ended without being asked to.
    Died,
    /// The process ended because it was asked to and is to be replaced: not a death.
    Replaced,
    /// Time has passed.
    Tick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RestartEffect {
    Spawn,
    EnteredCrashLoop { deaths: u32 },
    LeftCrashLoop,
}

impl RestartState {
    /// When [`RestartEvent::Tick`] will bring something.
    pub(super) fn due(&self) -> Option<Instant> {
        match self {
            Self::Waiting { until, .. } => Some(*until),
            Self::Stopped | Self::Running { .. } => None,
        }
    }

    pub(super) fn in_crash_loop(&self) -> bool {
        matches!(self, Self::Running { crash_loop: true, .. } | Self::Waiting { crash_loop: true, .. })
    }
}

/// The one decision.
pub(super) fn on(
    state: RestartState,
    event: RestartEvent,
    now: Instant,
    settings: &RestartSettings,
) -> (RestartState, Vec<RestartEffect>) {
    use RestartEffect as Effect;
    use RestartState as State;
    match (state, event) {
        (_, RestartEvent::Unwanted) => (State::Stopped, vec![]),

        (State::Stopped, RestartEvent::Wanted) => {
            (State::Running { deaths: Deaths::default(), crash_loop: false }, vec![Effect::Spawn])
        }
        (State::Waiting { crash_loop, .. }, RestartEvent::Wanted) => {
            let mut effects = vec![Effect::Spawn];
            if crash_loop {
                effects.push(Effect::LeftCrashLoop);
            }
            (State::Running { deaths: Deaths::default(), crash_loop: false }, effects)
        }
        (running @ State::Running { .. }, RestartEvent::Wanted) => (running, vec![]),

        (State::Running { deaths, crash_loop }, RestartEvent::Died) => {
            let deaths = deaths.and(now, settings);
            let looping = deaths.count() >= settings.crash_loop_deaths;
            let mut effects = match (crash_loop, looping) {
                (false, true) => vec![Effect::EnteredCrashLoop { deaths: deaths.count() }],
                (true, false) => vec![Effect::LeftCrashLoop],
                (true, true) | (false, false) => vec![],
            };
            let wait = wait_after(deaths.count(), settings);
            if wait.is_zero() {
                effects.push(Effect::Spawn);
                return (State::Running { deaths, crash_loop: looping }, effects);
            }
            (State::Waiting { deaths, until: now + wait, crash_loop: looping }, effects)
        }
        (State::Running { deaths, crash_loop }, RestartEvent::Replaced) => {
            (State::Running { deaths, crash_loop }, vec![Effect::Spawn])
        }

        (State::Waiting { deaths, until, crash_loop }, RestartEvent::Tick) if now >= until => {
            (State::Running { deaths, crash_loop }, vec![Effect::Spawn])
        }
        (State::Running { deaths, crash_loop: true }, RestartEvent::Tick) => {
            let deaths = deaths.recent(now, settings);
            let looping = deaths.count() >= settings.crash_loop_deaths;
            let effects = if looping { vec![] } else { vec![Effect::LeftCrashLoop] };
            (State::Running { deaths, crash_loop: looping }, effects)
        }

        // Nothing is due; or a process ended that nobody wants any more.
        (state @ (State::Stopped | State::Waiting { .. } | State::Running { .. }), RestartEvent::Tick) => {
            (state, vec![])
        }
        (state @ (State::Stopped | State::Waiting { .. }), RestartEvent::Died | RestartEvent::Replaced) => {
            (state, vec![])
        }
    }
}

fn wait_after(deaths: u32, settings: &RestartSettings) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        n if n >= settings.crash_loop_deaths => settings.backoff_max,
        n => settings.backoff.saturating_mul(1 << (n - 2).min(16)).min(settings.backoff_max),
    }
}

impl Deaths {
    fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    fn recent(mut self, now: Instant, settings: &RestartSettings) -> Self {
        self.0.retain(|death| now.saturating_duration_since(*death) < settings.window);
        self
    }

    fn and(self, now: Instant, settings: &RestartSettings) -> Self {
        let mut deaths = self.recent(now, settings);
        deaths.0.push(now);
        let excess = deaths.0.len().saturating_sub(settings.crash_loop_deaths.max(1) as usize);
        deaths.0.drain(..excess);
        deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashSet, VecDeque};

    fn settings() -> RestartSettings {
        RestartSettings {
            backoff: Duration::from_secs(1),
            backoff_max: Duration::from_secs(4),
            crash_loop_deaths: 5,
            window: Duration::from_secs(60),
        }
    }

    /// Every death on its first chance, from a fresh start: (wait, entered crash loop) per death.
    fn waits(deaths: usize) -> Vec<(u64, bool)> {
        let settings = settings();
        let mut now = Instant::now();
        let (mut state, _) = on(RestartState::Stopped, RestartEvent::Wanted, now, &settings);
        (0..deaths)
            .map(|_| {
                let (next, effects) = on(state.clone(), RestartEvent::Died, now, &settings);
                let wait = next.due().map_or(0, |until| (until - now).as_secs());
                state = next;
                if let Some(until) = state.due() {
                    now = until;
                    let (next, effects) = on(state.clone(), RestartEvent::Tick, now, &settings);
                    assert_eq!(effects, vec![RestartEffect::Spawn]);
                    state = next;
                }
                (wait, effects.iter().any(|e| matches!(e, RestartEffect::EnteredCrashLoop { .. })))
            })
            .collect()
    }

    #[test]
    fn the_first_restart_is_at_once_then_waits_double_up_to_the_crash_loop() {
        assert_eq!(waits(7), [(0, false), (1, false), (2, false), (4, false), (4, true), (4, false), (4, false)]);
    }

    #[test]
    fn a_worker_that_ran_well_for_a_window_begins_afresh() {
        let settings = settings();
        let start = Instant::now();
        let (mut state, _) = on(RestartState::Stopped, RestartEvent::Wanted, start, &settings);
        for i in 0..4 {
            (state, _) = on(state, RestartEvent::Died, start + Duration::from_secs(i * 10), &settings);
            if let Some(due) = state.due() {
                (state, _) = on(state, RestartEvent::Tick, due, &settings);
            }
        }
        let (_, effects) = on(state, RestartEvent::Died, start + Duration::from_secs(300), &settings);
        assert_eq!(effects, vec![RestartEffect::Spawn]);
    }

    #[test]
    fn a_crash_loop_is_left_when_its_deaths_grow_old_or_an_operator_says_so() {
        let settings = settings();
        let now = Instant::now();
        let deaths = Deaths(vec![now; 5]);
        let looping = RestartState::Running { deaths: deaths.clone(), crash_loop: true };
        let (state, effects) = on(looping.clone(), RestartEvent::Tick, now + Duration::from_secs(59), &settings);
        assert_eq!((state.in_crash_loop(), effects), (true, vec![]));
        let (state, effects) = on(looping, RestartEvent::Tick, now + Duration::from_secs(60), &settings);
        assert_eq!((state.in_crash_loop(), effects), (false, vec![RestartEffect::LeftCrashLoop]));

        let waiting = RestartState::Waiting { deaths, until: now + Duration::from_secs(4), crash_loop: true };
        let (state, effects) = on(waiting, RestartEvent::Wanted, now, &settings);
        assert!(!state.in_crash_loop());
        assert_eq!(effects, vec![RestartEffect::Spawn, RestartEffect::LeftCrashLoop]);
    }

    /// Walks every state reachable within eight events at a coarse clock and checks what must hold in all of them.
    #[test]
    fn in_every_reachable_state_there_is_one_process_or_one_due_time_or_none_wanted() {
        let settings = settings();
        let start = Instant::now();
        let mut seen = HashSet::new();
        let mut queue = VecDeque::from([(RestartState::Stopped, 0u64, 0u32, false)]);
        while let Some((state, clock, depth, process)) = queue.pop_front() {
            if depth == 8 || !seen.insert(format!("{state:?} {clock} {process}")) {
                continue;
            }
            for event in [
                RestartEvent::Wanted,
                RestartEvent::Unwanted,
                RestartEvent::Died,
                RestartEvent::Replaced,
                RestartEvent::Tick,
            ] {
                // Only a process that exists can end.
                if matches!(event, RestartEvent::Died | RestartEvent::Replaced) && !process {
                    continue;
                }
                for passed in [0, 1, 4, 61] {
                    let now = start + Duration::from_secs(clock + passed);
                    let (next, effects) = on(state.clone(), event, now, &settings);
                    let ended = matches!(event, RestartEvent::Died | RestartEvent::Replaced);
                    let spawns = effects.iter().filter(|e| **e == RestartEffect::Spawn).count();
                    let survives = process && !ended;
                    assert!(spawns <= 1, "{state:?} {event:?}: {effects:?}");
                    match &next {
                        RestartState::Stopped => assert_eq!(spawns, 0),
                        // A slot that was stopped and is wanted again before its process ended is the supervisor's to
                        // order: it sends `Wanted` only without a process.
                        RestartState::Running { deaths, .. } => {
                            assert!(survives || spawns == 1, "{state:?} {event:?} runs nothing");
                            assert!(deaths.count() <= settings.crash_loop_deaths);
                        }
                        RestartState::Waiting { until, deaths, crash_loop } => {
                            assert!(!survives && spawns == 0, "{state:?} {event:?} waits beside a process");
                            assert!(*until <= now + settings.backoff_max);
                            assert_eq!(*crash_loop, deaths.count() >= settings.crash_loop_deaths);
                        }
                    }
                    let process = survives || spawns == 1;
                    if process && next == RestartState::Stopped {
                        // The supervisor ends it; it is gone before `Wanted` can come.
                        queue.push_back((next, clock + passed, depth + 1, false));
                    } else {
                        queue.push_back((next, clock + passed, depth + 1, process));
                    }
                }
            }
        }
        assert!(seen.len() > 200, "{} states walked", seen.len());
    }
}
