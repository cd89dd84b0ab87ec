//! Walks every state that the rollout can reach, with a small world that carries its effects out, and checks in each of
//! them what must never be otherwise.

use super::*;
use std::collections::{BTreeMap, HashSet, VecDeque};

const OLD: DeploymentId = DeploymentId(1);
const NEW: DeploymentId = DeploymentId(2);
const STRANGER: DeploymentId = DeploymentId(99);

fn timeouts() -> RolloutTimeouts {
    RolloutTimeouts {
        verify: Duration::from_secs(10),
        clear: Duration::from_secs(10),
        load: Duration::from_secs(10),
        probe: Duration::from_secs(10),
        restore: Duration::from_secs(10),
    }
}

fn attempt(now: Instant, observe: u64, canary: Option<u32>) -> Attempt {
    Attempt {
        candidate: NEW,
        replaces: OLD,
        observe: Duration::from_secs(observe),
        canary,
        beside: None,
        deadline: now,
    }
}

/// Where new requests go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Routed {
    Held,
    To(DeploymentId),
    Split,
}

/// Whether a deployment's workers exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Workers {
    None,
    /// Started and not ready.
    Starting,
    Ready,
    /// Told to leave when their requests have ended.
    Leaving,
}

/// As much of the supervisor as the rollout can see.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    routed: Routed,
    workers: BTreeMap<DeploymentId, Workers>,
    committed: DeploymentId,
    outcome: Option<(bool, bool)>,
    beside: Option<bool>,
}

impl World {
    fn new() -> Self {
        Self {
            routed: Routed::To(OLD),
            workers: BTreeMap::from([(OLD, Workers::Ready), (NEW, Workers::None)]),
            committed: OLD,
            outcome: None,
            beside: None,
        }
    }

    fn carry_out(&mut self, effects: &[RolloutEffect]) {
        for effect in effects {
            match effect {
                RolloutEffect::Verify(_) | RolloutEffect::Probe(_) | RolloutEffect::Role(..) => {}
                RolloutEffect::Hold => self.routed = Routed::Held,
                RolloutEffect::Clear(id) => {
                    self.workers.insert(*id, Workers::Leaving);
                }
                RolloutEffect::Load(id) => {
                    let now = self.workers[id];
                    // Workers that have not left yet stay.
                    let then = if now == Workers::Leaving { Workers::Ready } else { Workers::Starting };
                    self.workers.insert(*id, then);
                }
                RolloutEffect::CutOver { to, from, canary } => {
                    assert_eq!(self.workers[to], Workers::Ready, "cut over to a candidate without workers");
                    if canary.is_some() {
                        assert_eq!(self.workers[from], Workers::Ready, "a canary beside nothing");
                    }
                    self.routed = if canary.is_some() { Routed::Split } else { Routed::To(*to) };
                }
                RolloutEffect::Route(id) => self.routed = Routed::To(*id),
                RolloutEffect::Retire(id) => {
                    if self.workers[id] != Workers::None {
                        self.workers.insert(*id, Workers::Leaving);
                    }
                }
                RolloutEffect::Discard(id) => {
                    assert!(*id == NEW, "the old deployment is never discarded");
                    if self.workers[id] != Workers::None {
                        self.workers.insert(*id, Workers::Leaving);
                    }
                }
                RolloutEffect::Commit { current, .. } => self.committed = *current,
                RolloutEffect::Completed(_) => self.outcome = Some((true, true)),
                RolloutEffect::RolledBack { restored, .. } => self.outcome = Some((false, *restored)),
            }
        }
    }

    fn check(&self, state: &Rollout, begun: bool, effects: &[RolloutEffect]) {
        let phase = state.phase();
        let (old, new) = (self.workers[&OLD], self.workers[&NEW]);
        let exists = |workers: Workers| workers != Workers::None;
        match self.routed {
            Routed::To(OLD) => assert!(
                matches!(old, Workers::Ready) || self.outcome == Some((false, false)),
                "{phase}: requests go to the old one, which is {old:?}"
            ),
            Routed::To(NEW) => {
                assert_eq!(new, Workers::Ready, "{phase}: requests go to a candidate that is not there");
                assert!(matches!(phase, RolloutPhase::Soaking | RolloutPhase::Steady));
            }
            Routed::Split => {
                assert_eq!((phase, old, new), (RolloutPhase::Soaking, Workers::Ready, Workers::Ready));
            }
            Routed::Held => {
                assert_eq!(self.beside, Some(false), "{phase}: nothing is held side by side");
                assert!(phase != RolloutPhase::Steady && phase != RolloutPhase::Soaking, "{phase}: held for ever");
            }
            Routed::To(other) => panic!("requests go to {other}"),
        }
        if self.beside == Some(false) && self.outcome.is_none() {
            assert!(
                !(exists(old) && exists(new)) || phase == RolloutPhase::Restoring,
                "{phase}: stop-first has both in memory: {old:?} {new:?}"
            );
        }
        if self.beside == Some(true) && self.outcome != Some((true, true)) {
            assert_eq!(old, Workers::Ready, "{phase}: the old one is not warm");
        }
        if begun && phase == RolloutPhase::Steady {
            let (completed, restored) = self.outcome.expect("a rollout that ended says how");
            assert_eq!(self.committed, if completed { NEW } else { OLD });
            let serves = if completed { Routed::To(NEW) } else { Routed::To(OLD) };
            assert_eq!(self.routed, serves, "restored: {restored}");
        } else {
            assert_eq!(self.committed, OLD, "{phase}: committed before the end");
        }
        let ends = effects
            .iter()
            .filter(|e| matches!(e, RolloutEffect::Completed(_) | RolloutEffect::RolledBack { .. }))
            .count();
        assert_eq!(ends > 0, begun && phase == RolloutPhase::Steady && !effects.is_empty(), "{phase}: {effects:?}");
        assert!(ends <= 1);
    }

    /// What may happen next in the world outside of the rollout.
    fn happenings(&self) -> Vec<(RolloutEvent, World)> {
        let mut happen = Vec::new();
        for (id, workers) in &self.workers {
            let with = |to| {
                let mut world = self.clone();
                world.workers.insert(*id, to);
                world
            };
            match workers {
                Workers::Leaving => happen.push((RolloutEvent::Gone { of: *id }, with(Workers::None))),
                Workers::Starting => happen.push((RolloutEvent::Ready { of: *id }, with(Workers::Ready))),
                // A late report about workers that were ready all along.
                Workers::Ready => happen.push((RolloutEvent::Ready { of: *id }, self.clone())),
                Workers::None => {}
            }
        }
        for beside in [true, false] {
            happen.push((RolloutEvent::Verified { of: NEW, beside }, self.clone()));
        }
        for of in [NEW, STRANGER] {
            happen.push((RolloutEvent::Probed { of }, self.clone()));
            happen.push((RolloutEvent::Failed { of, reason: "it broke".to_string() }, self.clone()));
        }
        happen.push((RolloutEvent::Verified { of: STRANGER, beside: true }, self.clone()));
        happen.push((RolloutEvent::Gone { of: STRANGER }, self.clone()));
        happen.push((RolloutEvent::Ready { of: STRANGER }, self.clone()));
        happen.push((RolloutEvent::Rollback { reason: "an operator".to_string() }, self.clone()));
        happen.push((RolloutEvent::Tick, self.clone()));
        happen
    }
}

/// All reachable states, each with its world, from one attempt.
fn walk(observe: u64, canary: Option<u32>) -> usize {
    let start = Instant::now();
    let timeouts = timeouts();
    let begin = RolloutEvent::Begin(attempt(start, observe, canary));
    let (first, effects) = on(&Rollout::Steady, begin, start, &timeouts).expect("steady takes a rollout");
    let mut world = World::new();
    world.carry_out(&effects);
    let mut seen = HashSet::new();
    let mut queue = VecDeque::from([(first, world, 0u64)]);
    while let Some((state, world, clock)) = queue.pop_front() {
        if !seen.insert((state.clone(), world.clone())) {
            continue;
        }
        for (event, mut world) in world.happenings() {
            for passed in [0, 5, 11, 60] {
                let now = start + Duration::from_secs(clock + passed);
                if let RolloutEvent::Verified { of: NEW, beside } = event {
                    world.beside = world.beside.or((state.phase() == RolloutPhase::Verifying).then_some(beside));
                }
                let stale = |of: DeploymentId| of == STRANGER;
                match on(&state, event.clone(), now, &timeouts) {
                    Ok((next, effects)) => {
                        match &event {
                            RolloutEvent::Verified { of, .. }
                            | RolloutEvent::Gone { of }
                            | RolloutEvent::Ready { of }
                            | RolloutEvent::Probed { of }
                            | RolloutEvent::Failed { of, .. } => {
                                assert!(!stale(*of), "a result of another attempt moved {}", state.phase());
                            }
                            RolloutEvent::Tick | RolloutEvent::Rollback { .. } | RolloutEvent::Begin(_) => {}
                        }
                        let mut world = world.clone();
                        world.carry_out(&effects);
                        world.check(&next, true, &effects);
                        if next != Rollout::Steady {
                            queue.push_back((next, world, clock + passed));
                        }
                    }
                    Err(Refused::Stale) => {
                        // The world moved on without the rollout: still worth looking at from there.
                        if passed == 0 && !stale_event(&event) {
                            queue.push_back((state.clone(), world.clone(), clock));
                        }
                    }
                    Err(Refused::Busy(phase)) => assert_eq!(phase, RolloutPhase::Restoring),
                    Err(Refused::NothingToRollBack) => panic!("there is something under way"),
                }
            }
        }
    }
    seen.len()
}

fn stale_event(event: &RolloutEvent) -> bool {
    matches!(event, RolloutEvent::Tick | RolloutEvent::Rollback { .. })
}

#[test]
fn in_every_reachable_state_requests_have_somewhere_to_go_and_the_old_revision_is_safe() {
    let states: usize = [(0, None), (20, None), (20, Some(1000)), (0, Some(1000))]
        .into_iter()
        .map(|(observe, canary)| walk(observe, canary))
        .sum();
    assert!(states > 50, "{states} states walked");
}

#[test]
fn every_waiting_state_ends_by_its_deadline_alone() {
    let timeouts = timeouts();
    for beside in [true, false] {
        for steps in 0..6 {
            let start = Instant::now();
            let mut now = start;
            let begin = RolloutEvent::Begin(attempt(start, 20, None));
            let (mut state, _) = on(&Rollout::Steady, begin, now, &timeouts).expect("steady takes a rollout");
            let way = [
                RolloutEvent::Verified { of: NEW, beside },
                RolloutEvent::Gone { of: OLD },
                RolloutEvent::Ready { of: NEW },
                RolloutEvent::Probed { of: NEW },
                RolloutEvent::Failed { of: NEW, reason: "it broke".to_string() },
            ];
            for event in way.into_iter().take(steps) {
                if let Ok((next, _)) = on(&state, event, now, &timeouts) {
                    state = next;
                }
            }
            let mut ticks = 0;
            while state != Rollout::Steady {
                now += Duration::from_secs(21);
                if let Ok((next, _)) = on(&state, RolloutEvent::Tick, now, &timeouts) {
                    state = next;
                }
                ticks += 1;
                assert!(ticks < 5, "{} never ends", state.phase());
            }
        }
    }
}

#[test]
fn a_second_rollout_is_refused_in_every_phase_but_steady() {
    let timeouts = timeouts();
    let now = Instant::now();
    let one = || attempt(now, 20, None);
    for state in [
        Rollout::Verifying(one()),
        Rollout::Clearing(one()),
        Rollout::Loading(one()),
        Rollout::Probing(one()),
        Rollout::Soaking(one()),
        Rollout::Restoring { attempt: one(), cleared: false, from: RolloutPhase::Loading, reason: String::new() },
    ] {
        let refused = on(&state, RolloutEvent::Begin(attempt(now, 0, None)), now, &timeouts);
        assert_eq!(refused, Err(Refused::Busy(state.phase())));
    }
    let nothing = on(&Rollout::Steady, RolloutEvent::Rollback { reason: String::new() }, now, &timeouts);
    assert_eq!(nothing, Err(Refused::NothingToRollBack));
}

#[test]
fn a_rollout_without_observation_completes_at_the_cut_over() {
    let timeouts = timeouts();
    let now = Instant::now();
    let state = Rollout::Probing(Attempt { beside: Some(true), ..attempt(now, 0, Some(500)) });
    let (next, effects) = on(&state, RolloutEvent::Probed { of: NEW }, now, &timeouts).expect("probed");
    assert_eq!(next, Rollout::Steady);
    assert_eq!(effects[0], RolloutEffect::CutOver { to: NEW, from: OLD, canary: None });
    assert!(
        effects.contains(&RolloutEffect::Commit { current: NEW, previous: OLD })
            && effects.contains(&RolloutEffect::Retire(OLD))
    );
}
