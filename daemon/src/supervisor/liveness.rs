//! Whether a worker still makes progress: a pure function of how old the signs of it are.
//!
//! A process that exists proves nothing. What counts: the answer to a ping (given by the engine loop itself), the last
//! finished step while work is queued, a beat from inside a long step, bytes while loading.

use std::time::Duration;

/// How long each sign may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LivenessSettings {
    pub ping_interval: Duration,
    /// From the start of the process to its hello.
    pub hello_timeout: Duration,
    /// Loading without a byte of progress or a new phase.
    pub load_timeout: Duration,
    /// Work or a ping without a step, an answer or a beat.
    pub stall_timeout: Duration,
    /// One step may take this long even while beats come.
    pub step_timeout: Duration,
}

impl Default for LivenessSettings {
    fn default() -> Self {
        Self {
            ping_interval: Duration::from_secs(1),
            hello_timeout: Duration::from_secs(20),
            load_timeout: Duration::from_secs(90),
            stall_timeout: Duration::from_secs(10),
            step_timeout: Duration::from_secs(300),
        }
    }
}

/// What is known of a worker at one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signs {
    /// Started; said nothing yet.
    Starting {
        age: Duration,
    },
    Loading {
        progress_age: Duration,
    },
    Serving {
        /// While work is queued there: since the last step, or since the work came.
        step_age: Option<Duration>,
        /// While a ping is unanswered: since it was sent.
        ping_age: Option<Duration>,
        /// Since the last sign from inside a step.
        beat_age: Option<Duration>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Look again after this long, if nothing happens before.
    Alive {
        check_in: Duration,
    },
    Stalled(Stall),
}

/// Why a worker counts as stalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Stall {
    #[error("said nothing within {0:?} of its start")]
    Hello(Duration),
    #[error("loaded no byte for {0:?}")]
    Load(Duration),
    #[error("finished no step for {0:?} with work queued")]
    Step(Duration),
    #[error("did not answer a ping for {0:?}")]
    Ping(Duration),
}

pub(super) fn verdict(signs: Signs, settings: &LivenessSettings) -> Verdict {
    let (age, limit, stall): (_, _, fn(Duration) -> Stall) = match signs {
        Signs::Starting { age } => (age, settings.hello_timeout, Stall::Hello),
        Signs::Loading { progress_age } => (progress_age, settings.load_timeout, Stall::Load),
        Signs::Serving { step_age: None, ping_age: None, .. } => {
            return Verdict::Alive { check_in: settings.ping_interval };
        }
        Signs::Serving { step_age, ping_age, beat_age } => {
            let (silence, stall): (_, fn(Duration) -> Stall) = match (step_age, ping_age) {
                (Some(step), Some(ping)) if ping > step => (ping, Stall::Ping),
                (Some(step), _) => (step, Stall::Step),
                (None, ping) => (ping.unwrap_or_default(), Stall::Ping),
            };
            if silence >= settings.step_timeout {
                return Verdict::Stalled(stall(silence));
            }
            // A beat is as good as a step, up to the longest step there may be.
            (beat_age.map_or(silence, |beat| beat.min(silence)), settings.stall_timeout, stall)
        }
    };
    if age >= limit { Verdict::Stalled(stall(age)) } else { Verdict::Alive { check_in: limit - age } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn serving(step: Option<u64>, ping: Option<u64>, beat: Option<u64>) -> Verdict {
        let signs = Signs::Serving { step_age: step.map(at), ping_age: ping.map(at), beat_age: beat.map(at) };
        verdict(signs, &LivenessSettings::default())
    }

    #[test]
    fn an_idle_worker_is_never_stalled() {
        assert_eq!(serving(None, None, None), Verdict::Alive { check_in: at(1) });
        assert_eq!(serving(None, None, Some(9_999)), Verdict::Alive { check_in: at(1) });
    }

    #[test]
    fn queued_work_without_a_step_is_a_stall_after_the_timeout() {
        assert_eq!(serving(Some(9), None, None), Verdict::Alive { check_in: at(1) });
        assert_eq!(serving(Some(10), None, None), Verdict::Stalled(Stall::Step(at(10))));
    }

    #[test]
    fn an_unanswered_ping_is_a_stall_even_without_work() {
        assert_eq!(serving(None, Some(10), None), Verdict::Stalled(Stall::Ping(at(10))));
        assert_eq!(serving(Some(3), Some(11), None), Verdict::Stalled(Stall::Ping(at(11))));
    }

    #[test]
    fn a_long_step_that_beats_is_alive_until_no_step_may_be_that_long() {
        assert_eq!(serving(Some(20), Some(19), Some(1)), Verdict::Alive { check_in: at(9) });
        assert_eq!(serving(Some(20), Some(19), Some(10)), Verdict::Stalled(Stall::Step(at(10))));
        assert_eq!(serving(Some(300), Some(299), Some(0)), Verdict::Stalled(Stall::Step(at(300))));
    }

    #[test]
    fn an_old_beat_does_not_hurt_a_worker_that_just_stepped() {
        assert_eq!(serving(Some(1), None, Some(500)), Verdict::Alive { check_in: at(9) });
    }

    #[test]
    fn a_start_and_a_load_have_their_own_patience() {
        let settings = LivenessSettings::default();
        assert_eq!(verdict(Signs::Starting { age: at(19) }, &settings), Verdict::Alive { check_in: at(1) });
        assert_eq!(verdict(Signs::Starting { age: at(20) }, &settings), Verdict::Stalled(Stall::Hello(at(20))));
        assert_eq!(verdict(Signs::Loading { progress_age: at(89) }, &settings), Verdict::Alive { check_in: at(1) });
        assert_eq!(verdict(Signs::Loading { progress_age: at(90) }, &settings), Verdict::Stalled(Stall::Load(at(90))));
    }
}
