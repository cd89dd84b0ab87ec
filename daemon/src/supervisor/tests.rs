//! The supervisor against scripted workers, under paused time: nothing here waits for a clock.

use super::harness::{Ask, Fleet, faulty, read, spec, text};
use super::scripted::{Act, Fault, Script, ScriptedWorkers};
use super::*;
use ernie_proto::worker::{FinishReason, Hello, StepReport};
use std::time::Duration;

/// Runs fifty requests with one to three choices to their end and checks every token.
async fn fifty_requests_bring_every_token(fleet: &Fleet) {
    let asks: Vec<_> = (0..50).map(|n| Ask::new(n, 20 + n % 30).choices(1 + (n % 3) as u16)).collect();
    let mut reads = Vec::new();
    for ask in &asks {
        let generation = fleet.submit(ask).await.expect("the fleet takes it");
        reads.push(tokio::spawn(read(generation, ask.choices)));
    }
    for (ask, read) in asks.iter().zip(reads) {
        assert_eq!(read.await.expect("no panic").expect("no failure"), ask.expected());
    }
}

#[tokio::test(start_paused = true)]
async fn requests_bring_their_tokens_and_end() {
    let fleet = Fleet::of(vec![]);
    fifty_requests_bring_every_token(&fleet).await;
    let status = fleet.status_where(|s| s.deployments[0].requests_finished == 50).await;
    assert_eq!((status.requests_dispatched, status.requests_held), (0, 0));
    assert!(status.is_ready());
    assert_eq!(fleet.workers.spawned(), 1);
}

#[tokio::test(start_paused = true)]
async fn requests_go_on_where_dead_workers_left_them() {
    let fleet = Fleet::of(vec![Fault::CrashAfterSteps(7, "boom\n"), Fault::CrashAfterSteps(11, "")]);
    fifty_requests_bring_every_token(&fleet).await;
    let status = fleet.status_where(|s| s.workers[0].restarts == 2).await;
    assert!(status.counters.requests_resumed > 50, "{}", status.counters.requests_resumed);
    let FleetEvent::WorkerLost { failure, .. } = &fleet
        .recorder
        .events()
        .into_iter()
        .find(|event| matches!(event, FleetEvent::WorkerLost { .. }))
        .expect("a worker was lost")
    else {
        unreachable!("found by its kind")
    };
    assert_eq!(failure.stderr, vec!["boom"]);
    assert_eq!(failure.reason, "it closed its socket (exit status 1)");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_hangs_is_replaced_and_its_requests_go_on() {
    let fleet = Fleet::of(vec![Fault::HangAfterSteps(5)]);
    let begin = Instant::now();
    fifty_requests_bring_every_token(&fleet).await;
    assert!(fleet.recorder.failures()[0].contains("finished no step for"), "{:?}", fleet.recorder.failures());
    assert!(begin.elapsed() < Duration::from_secs(15), "took {:?}", begin.elapsed());
    assert_eq!(fleet.handle.status().counters.workers_stalled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_thaws_after_it_was_given_up_moves_nothing() {
    let fleet = Fleet::of(vec![Fault::FreezeAfterSteps(5, Duration::from_secs(9))]);
    fifty_requests_bring_every_token(&fleet).await;
    assert_eq!(fleet.workers.spawned(), 1, "nine seconds are not a stall");
    let fleet = Fleet::of(vec![Fault::FreezeAfterSteps(5, Duration::from_secs(12))]);
    fifty_requests_bring_every_token(&fleet).await;
    assert_eq!(fleet.workers.spawned(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_changed_stall_timeout_counts_for_the_worker_that_runs() {
    let fleet = Fleet::of(vec![Fault::HangAfterSteps(5)]);
    fleet.active().await;
    let liveness = LivenessSettings { stall_timeout: Duration::from_secs(2), ..LivenessSettings::default() };
    fleet.handle.configure(SupervisorSettings { liveness, ..SupervisorSettings::default() }).await;
    let begin = Instant::now();
    fifty_requests_bring_every_token(&fleet).await;
    assert_eq!(fleet.handle.status().counters.workers_stalled, 1);
    assert!(begin.elapsed() < Duration::from_secs(6), "took {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_that_hangs_is_found_by_its_missing_pong() {
    let workers = ScriptedWorkers::new(|_| Script::default());
    let fleet = Fleet::start(workers, spec(1));
    fleet.active().await;
    fleet.status_where(|s| s.workers[0].last_pong_age.is_some()).await;
    let begin = Instant::now();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let status = fleet.status_where(|_| true).await;
    assert!(status.workers[0].last_pong_age.expect("answered") < Duration::from_secs(3));
    assert_eq!((fleet.workers.spawned(), status.counters.workers_lost), (1, 0));
    assert!(begin.elapsed() >= Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn a_long_step_that_beats_is_no_stall() {
    let fleet = Fleet::of(vec![Fault::LongSteps(Duration::from_secs(25))]);
    let ask = Ask::new(1, 3);
    let generation = fleet.submit(&ask).await.expect("taken");
    assert_eq!(read(generation, 1).await.expect("no failure"), ask.expected());
    assert_eq!(fleet.workers.spawned(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_writes_garbage_or_nonsense_is_replaced() {
    for (fault, what) in [
        (Fault::GarbageAfterSteps(3), "does not decode"),
        (Fault::NonsenseAfterSteps(3), "a choice that was not asked for"),
        (Fault::StepErrorsAfter(3), "3 steps in a row failed: a kernel did not like it"),
    ] {
        let fleet = Fleet::of(vec![fault]);
        fifty_requests_bring_every_token(&fleet).await;
        let failures = fleet.recorder.failures();
        assert!(failures[0].contains(what), "{failures:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_kills_workers_is_given_up_and_the_others_go_on() {
    let workers = ScriptedWorkers::new(|_| Script::with(Fault::CrashOnToken(666)));
    let fleet = Fleet::start(workers, spec(1));
    let good: Vec<_> = (0..20).map(|n| Ask::new(n, 20)).collect();
    let mut reads = Vec::new();
    for ask in &good {
        reads.push(tokio::spawn(read(fleet.submit(ask).await.expect("taken"), 1)));
    }
    let poison = Ask { prompt: vec![1, 666], choices: 1, max_tokens: 5 };
    let failure = read(fleet.submit(&poison).await.expect("taken"), 1).await.expect_err("it can not be computed");
    assert!(failure.message.contains("given up"), "{failure}");
    assert!(!failure.retryable);
    for (ask, read) in good.iter().zip(reads) {
        assert_eq!(read.await.expect("no panic").expect("innocent"), ask.expected());
    }
    assert_eq!(fleet.workers.spawned(), 4, "three deaths, then the next one lives");
    assert_eq!(fleet.handle.status().counters.requests_poisonous, 1);
}

#[tokio::test(start_paused = true)]
async fn a_crash_loop_refuses_requests_and_is_left_when_a_worker_lives() {
    // Loads once, then dies at each step for a while.
    let workers = ScriptedWorkers::new(|n| match n {
        0..8 => Script::with(Fault::CrashAfterSteps(1, "out of luck\n")),
        _ => Script::default(),
    });
    let poison = PoisonSettings { strikes_max: 100, deaths_max: 100 };
    let settings = SupervisorSettings { poison, ..SupervisorSettings::default() };
    let fleet = Fleet::with(settings, workers, spec(1));
    let generation = fleet.submit(&Ask::new(1, 500)).await.expect("taken");
    let failure = read(generation, 1).await.expect_err("nobody can go on");
    assert!(failure.retryable && failure.message.contains("crash loop"), "{failure}");
    let status = fleet.status_where(|s| s.state == FleetState::Failed).await;
    assert!(matches!(status.workers[0].state, WorkerState::CrashLoop { .. }));
    assert_eq!(status.workers[0].last_failure.as_ref().expect("it failed").stderr, vec!["out of luck"]);
    assert!(!status.is_ready());
    let refused = fleet.submit(&Ask::new(2, 5)).await.expect_err("it would wait long");
    assert!(matches!(&refused, SubmitRefusal::Unavailable { reason } if reason.contains("crash loop")), "{refused}");

    // It tries again by itself; an idle worker lives, and with time the loop is over.
    let status = fleet.status_where(|s| s.state == FleetState::Serving).await;
    assert!(status.is_ready());
    tokio::time::sleep(Duration::from_secs(400)).await;
    let ask = Ask::new(3, 5);
    loop {
        if let Ok(generation) = fleet.submit(&ask).await
            && let Ok(tokens) = read(generation, 1).await
        {
            assert_eq!(tokens, ask.expected());
            break;
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_a_generation_aborts_it_before_the_next_step() {
    let fleet = Fleet::of(vec![]);
    let mut generation = fleet.submit(&Ask::new(1, 4000)).await.expect("taken");
    let id = generation.id();
    for _ in 0..4 {
        generation.next().await.expect("it runs");
    }
    drop(generation);
    fleet.status_where(|s| s.counters.requests_aborted == 1 && s.requests_dispatched == 0).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let acts = fleet.workers.acts();
    let aborted = acts.iter().position(|act| matches!(act, Act::Aborted(_, of) if *of == id)).expect("it was told");
    assert!(acts[aborted..].iter().filter(|act| matches!(act, Act::Stepped(..))).count() <= 1, "{acts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_gives_up_while_submitting_leaves_nothing_behind() {
    let fleet = Fleet::of(vec![]);
    let deployment = fleet.active().await;
    for n in 0..100 {
        // Polled once, so that the command is on its way, then dropped.
        let submission = Ask::new(n, 4000).submission();
        let mut submit = Box::pin(fleet.handle.submit(&deployment, submission));
        assert!(futures::poll!(&mut submit).is_pending());
        drop(submit);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let status = fleet.handle.status();
    assert_eq!((status.requests_dispatched, status.requests_held), (0, 0));
    assert_eq!(fleet.handle.under_way(), 0);
}

#[tokio::test(start_paused = true)]
async fn more_requests_than_the_limit_are_refused() {
    let settings = SupervisorSettings { requests_max: 2, ..SupervisorSettings::default() };
    let fleet = Fleet::with(settings, ScriptedWorkers::new(|_| Script::default()), spec(1));
    let first = fleet.submit(&Ask::new(1, 10)).await.expect("taken");
    let _second = fleet.submit(&Ask::new(2, 10)).await.expect("taken");
    let refused = fleet.submit(&Ask::new(3, 10)).await.expect_err("full");
    assert_eq!(refused, SubmitRefusal::TooManyRequests { limit: 2 });
    assert!(refused.retry_after().is_some());
    read(first, 1).await.expect("no failure");
    fleet.submit(&Ask::new(3, 10)).await.expect("there is room again");
}

#[tokio::test(start_paused = true)]
async fn a_raised_limit_takes_more_requests_at_once_and_a_lowered_one_lets_those_under_way_end() {
    let bound = |requests_max| SupervisorSettings { requests_max, ..SupervisorSettings::default() };
    let fleet = Fleet::with(bound(1), ScriptedWorkers::new(|_| Script::default()), spec(1));
    let first = fleet.submit(&Ask::new(1, 10)).await.expect("taken");
    assert!(fleet.submit(&Ask::new(2, 10)).await.is_err());
    fleet.handle.configure(bound(3)).await;
    let mut taken = vec![first];
    for n in 2..4 {
        taken.push(fleet.submit(&Ask::new(n, 10)).await.expect("the limit is three now"));
    }
    let refused = fleet.submit(&Ask::new(4, 10)).await.expect_err("full");
    assert_eq!(refused, SubmitRefusal::TooManyRequests { limit: 3 });
    fleet.handle.configure(bound(1)).await;
    for generation in taken {
        read(generation, 1).await.expect("it comes to its end");
    }
    fleet.submit(&Ask::new(5, 10)).await.expect("there is room again");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_blocks_nobody() {
    let fleet = Fleet::of(vec![]);
    let lazy_ask = Ask::new(1, 3000);
    let lazy = fleet.submit(&lazy_ask).await.expect("taken");
    let ask = Ask::new(2, 3000);
    assert_eq!(read(fleet.submit(&ask).await.expect("taken"), 1).await.expect("no failure"), ask.expected());
    assert_eq!(read(lazy, 1).await.expect("nothing was lost"), lazy_ask.expected());
}

#[tokio::test(start_paused = true)]
async fn two_workers_share_the_work_and_one_takes_over_for_the_other() {
    // The first of the two dies after some steps, and so does its successor.
    let workers = ScriptedWorkers::new(|n| match n {
        0 | 2 => Script::with(Fault::CrashAfterSteps(6, "")),
        _ => Script::default(),
    });
    let fleet = Fleet::start(workers, spec(2));
    fleet.status_where(|s| s.deployments[0].workers_ready == 2).await;
    fifty_requests_bring_every_token(&fleet).await;
    let acts = fleet.workers.acts();
    let first_fifty = acts.iter().filter_map(|act| match act {
        Act::Submitted(worker, request) => Some((*worker, 1 + (request.0 - 1) % 3)),
        _ => None,
    });
    let mut choices = std::collections::BTreeMap::new();
    for (worker, wanted) in first_fifty.take(50) {
        *choices.entry(worker).or_insert(0) += wanted;
    }
    let choices: Vec<u64> = choices.into_values().collect();
    assert!(choices.len() == 2 && choices[0].abs_diff(choices[1]) <= 3, "{choices:?} of 99 choices");
    fleet.status_where(|s| s.workers.iter().map(|w| w.restarts).sum::<u64>() >= 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_model_that_does_not_load_is_reported_and_not_tried_again() {
    let fleet = Fleet::of(vec![Fault::FatalWhileLoading("model.safetensors is cut short: copy it again")]);
    let status = fleet.status_where(|s| s.state == FleetState::Failed).await;
    assert_eq!(status.reason.as_deref(), Some("model.safetensors is cut short: copy it again"));
    let refused = fleet.handle.pick_or_wait(None, Duration::from_secs(60)).await.expect_err("there is none");
    assert!(matches!(refused, SubmitRefusal::Unavailable { .. }));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(fleet.workers.spawned(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_load_without_progress_is_ended_and_the_phase_is_named() {
    let fleet = Fleet::of(vec![Fault::StallWhileLoading, Fault::CrashWhileLoading]);
    let begin = Instant::now();
    fleet.status_where(|s| s.state == FleetState::Serving).await;
    assert!((90..95).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    let failures = fleet.recorder.failures();
    assert!(failures[0].contains("loaded no byte for 90s (in phase Weights"), "{failures:?}");
}

#[tokio::test(start_paused = true)]
async fn workers_of_another_build_or_without_a_word_or_without_a_process_are_refused() {
    let other = Hello { version: 99, build: "other".to_string() };
    let fleet =
        Fleet::start(ScriptedWorkers::new(move |_| Script { hello: other.clone(), ..Script::default() }), spec(1));
    let status = fleet.status_where(|s| s.state == FleetState::Failed).await;
    assert!(status.reason.as_ref().expect("a reason").contains("another build"), "{status:?}");

    let fleet = Fleet::start(ScriptedWorkers::new(|_| Script::with(Fault::Mute)), spec(1));
    let status = fleet.status_where(|s| s.state == FleetState::Failed).await;
    assert!(status.reason.as_ref().expect("a reason").contains("said nothing within 20s"), "{status:?}");

    let fleet = Fleet::start(ScriptedWorkers::none(), spec(1));
    let status = fleet.status_where(|s| s.state == FleetState::Failed).await;
    assert!(status.reason.as_ref().expect("a reason").contains("no more processes"), "{status:?}");
}

#[tokio::test(start_paused = true)]
async fn a_drain_lets_requests_end_and_takes_no_new_ones() {
    let fleet = Fleet::of(vec![Fault::CrashAfterSteps(20, "")]);
    let ask = Ask::new(1, 100);
    let running = tokio::spawn(read(fleet.submit(&ask).await.expect("taken"), 1));
    let deployment = fleet.active().await;
    let drained = tokio::spawn({
        let handle = fleet.handle.clone();
        async move { handle.drain(Duration::from_secs(30), DrainEnd::Open).await }
    });
    fleet.status_where(|s| s.state == FleetState::Draining).await;
    let refused = fleet.handle.submit(&deployment, Ask::new(2, 5).submission()).await.expect_err("it drains");
    assert_eq!(refused, SubmitRefusal::Draining);
    assert_eq!(running.await.expect("no panic").expect("it ends, even over a crash"), ask.expected());
    assert_eq!(drained.await.expect("no panic"), DrainReport { finished: 1, failed: 0 });
}

#[tokio::test(start_paused = true)]
async fn a_drain_fails_what_is_left_at_its_deadline() {
    let fleet = Fleet::of(vec![]);
    let running = tokio::spawn(read(fleet.submit(&Ask::new(1, 4000)).await.expect("taken"), 1));
    let begin = Instant::now();
    assert_eq!(
        fleet.handle.drain(Duration::from_secs(1), DrainEnd::Leave).await,
        DrainReport { finished: 0, failed: 1 }
    );
    assert_eq!(begin.elapsed().as_secs(), 1);
    let failure = running.await.expect("no panic").expect_err("it was cut off");
    assert!(failure.retryable);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_leaves_no_worker_behind() {
    // One is ready, one hangs, one has not said hello.
    for faults in [vec![], vec![Fault::HangAfterSteps(1)], vec![Fault::StallWhileLoading]] {
        let stalls = faults == vec![Fault::StallWhileLoading];
        let fleet = Fleet::of(faults);
        let mut running = None;
        if !stalls {
            running = Some(tokio::spawn(read(fleet.submit(&Ask::new(1, 4000)).await.expect("taken"), 1)));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        fleet.handle.shutdown().await;
        assert_eq!(fleet.workers.alive(), 0);
        assert_eq!(fleet.handle.status().state, FleetState::Stopped);
        if let Some(running) = running {
            running.await.expect("no panic").expect_err("it was cut off");
        }
        fleet.handle.shutdown().await;
        assert!(fleet.handle.restart_worker(WorkerId(1), true).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn the_supervisor_ends_when_nobody_holds_a_handle() {
    let fleet = Fleet::of(vec![]);
    fleet.active().await;
    let workers = fleet.workers.clone();
    let mut watch = fleet.handle.watch();
    drop(fleet);
    watch.wait_for(|status| status.state == FleetState::Stopped).await.expect("it says so");
    assert_eq!(workers.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_operator_replaces_a_worker_at_once_or_after_its_requests() {
    for graceful in [true, false] {
        let fleet = Fleet::of(vec![]);
        let ask = Ask::new(1, 100);
        let running = tokio::spawn(read(fleet.submit(&ask).await.expect("taken"), 1));
        let status = fleet.status_where(|s| s.requests_dispatched == 1).await;
        let worker = status.workers[0].id.expect("it lives");
        assert!(fleet.handle.restart_worker(worker, graceful).await.expect("it runs"));
        let after = tokio::spawn(read(fleet.submit(&Ask::new(2, 5)).await.expect("held"), 1));
        assert_eq!(running.await.expect("no panic").expect("no failure"), ask.expected());
        assert_eq!(after.await.expect("no panic").expect("no failure"), Ask::new(2, 5).expected());
        let status = fleet.status_where(|s| s.workers[0].restarts == 1).await;
        assert_eq!(status.counters.workers_lost, 0);
        let resumed = if graceful { 0 } else { 1 };
        assert_eq!(status.counters.requests_resumed, resumed);
        assert!(!fleet.handle.restart_worker(worker, graceful).await.expect("it runs"), "that one is gone");
    }
}

#[tokio::test(start_paused = true)]
async fn counters_never_fall_when_workers_come_and_go() {
    let workers = ScriptedWorkers::new(|_| Script::with(Fault::CrashAfterSteps(40, "")));
    let fleet = Fleet::start(workers, spec(2));
    let mut watch = fleet.handle.watch();
    let watcher = tokio::spawn(async move {
        let (mut last, mut seen) = (0, 0);
        while watch.changed().await.is_ok() {
            let generated = watch.borrow_and_update().stats.generated_tokens;
            assert!(generated >= last, "{last} tokens, then {generated}");
            (last, seen) = (generated, seen + 1);
        }
        (last, seen)
    });
    fifty_requests_bring_every_token(&fleet).await;
    fleet.handle.shutdown().await;
    drop(fleet);
    let (generated, seen) = watcher.await.expect("counters rise");
    let wanted: u64 = (0..50u64).map(|n| (20 + n % 30) * (1 + n % 3)).sum();
    assert!(generated >= wanted, "{generated} of {wanted}");
    assert!(seen > 5);
}

#[tokio::test(start_paused = true)]
async fn a_busy_fleet_publishes_five_times_a_second_and_an_idle_one_once() {
    let fleet = Fleet::of(vec![]);
    fleet.active().await;
    let generation = fleet.submit(&Ask::new(1, 4000)).await.expect("taken");
    let reading = tokio::spawn(read(generation, 1));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = fleet.handle.status().sequence;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let busy = fleet.handle.status();
    assert!((48..=52).contains(&(busy.sequence - before)), "{} in 10 s", busy.sequence - before);
    assert!((90.0..110.0).contains(&busy.tokens_per_second), "{}", busy.tokens_per_second);
    reading.abort();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let before = fleet.handle.status().sequence;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let idle = fleet.handle.status();
    assert!((9..=11).contains(&(idle.sequence - before)), "{} in 10 s", idle.sequence - before);
    assert_eq!(idle.tokens_per_second, 0.0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_ends_without_a_token_is_no_violation() {
    let fleet = Fleet::of(vec![Fault::NotFinite]);
    let mut generation = fleet.submit(&Ask::new(1, 10)).await.expect("taken");
    let mut finish = None;
    while let Some(event) = generation.next().await {
        if let GenerationEvent::Output(output, _) = event {
            finish = output.finish;
        }
    }
    assert_eq!(finish, Some(FinishReason::Error));
    assert_eq!(fleet.handle.status().counters.workers_lost, 0);
}

#[test]
fn what_another_worker_says_about_a_request_is_ignored() {
    let mut requests = dispatch::Requests::new(PoisonSettings::default());
    let (events, mut received) = mpsc::channel(100);
    let (reply, _) = oneshot::channel();
    let deployment = DeploymentId(1);
    let ask = Ask::new(1, 10);
    let new = NewRequest {
        id: RequestId(1),
        deployment: Arc::new(Deployment {
            id: deployment,
            served_names: vec![],
            revision: String::new(),
            model_dir: "model".into(),
            text: text(),
            loaded: loaded(),
            created: 0,
        }),
        submission: ask.submission(),
        events,
        reply,
    };
    let now = Instant::now();
    requests.insert(new, now);
    let (dead, next) = (WorkerId(1), WorkerId(2));
    assert_eq!(requests.assign(deployment, &[dead]).len(), 1);
    let report = |token, choice| StepReport {
        outputs: vec![ernie_proto::worker::SequenceOutput {
            request: RequestId(1),
            choice,
            token,
            logprobs: None,
            finish: None,
        }],
        ..StepReport::default()
    };
    requests.apply(dead, report(11, 0), now);
    requests.orphan(dead, Some("it died"));
    // Late, from the dead one: before the request is with the next worker, and after.
    assert_eq!(requests.apply(dead, report(12, 0), now), dispatch::Applied::default());
    let (_, submit) = requests.assign(deployment, &[next]).pop().expect("it goes on");
    assert_eq!(submit.choices[0].generated, vec![11]);
    assert_eq!(requests.apply(dead, report(13, 5), now), dispatch::Applied::default());
    requests.apply(next, report(12, 0), now);
    let mut tokens = Vec::new();
    while let Ok(GenerationEvent::Output(output, _)) = received.try_recv() {
        tokens.push(output.token);
    }
    assert_eq!(tokens, vec![11, 12]);
}

fn loaded() -> Loaded {
    Loaded {
        architecture: String::new(),
        moe: false,
        layers: 0,
        experts: 0,
        experts_per_token: 0,
        parameters: 0,
        parameters_active: 0,
        vocab_size: 0,
        max_model_len: 0,
        weights: String::new(),
        kv: String::new(),
        isa: String::new(),
        threads: 0,
        block_size: 0,
        num_blocks: 0,
        weights_bytes: 0,
        kv_bytes: 0,
        workspace_bytes: 0,
        load_seconds: vec![],
    }
}

#[tokio::test(start_paused = true)]
async fn every_serving_worker_tells_who_holds_its_kv_blocks() {
    let fleet = Fleet::start(faulty(Vec::new()), spec(2));
    fleet.active().await;
    fleet.status_where(|status| status.workers.iter().filter(|w| w.state == WorkerState::Ready).count() == 2).await;
    let reports = fleet.handle.kv_report(Duration::from_secs(60)).await.expect("it runs").expect("both answer");
    assert_eq!(reports.len(), 2);
    assert!(reports[0].0 < reports[1].0);
}

#[tokio::test(start_paused = true)]
async fn a_choice_that_has_said_enough_is_not_run_again_by_the_next_worker() {
    let fleet = Fleet::start(faulty(Vec::new()), spec(1));
    let mut generation = fleet.submit(&Ask::new(5, 400).choices(2)).await.expect("taken");
    let mut ended = false;
    let mut tokens = [0, 0];
    while let Some(event) = generation.next().await {
        let GenerationEvent::Output(output, _) = event else { continue };
        assert!(!(ended && output.choice == 0 && tokens[0] > 300), "what comes after the end is dropped");
        tokens[usize::from(output.choice)] += 1;
        if tokens[0] == 3 && !ended {
            generation.end_choice(0);
            ended = true;
        }
    }
    assert_eq!(tokens[1], 400, "the other choice comes to its end");
    assert!(tokens[0] < 400, "{tokens:?}");
}
