//! Swapping models with scripted workers, under paused time.

use super::harness::{Ask, Fleet, read, spec, text};
use super::scripted::{Fault, Script, ScriptedWorkers};
use super::*;
use crate::model_store::{Configured, Links};
use std::path::Path;
use std::time::Duration;

/// Models by name: what their workers do, and what is wrong with their files.
struct Models {
    probes: Vec<Probe>,
    weights_bytes: u64,
}

impl Default for Models {
    fn default() -> Self {
        let probe = Probe { prompt: Arc::new(vec![1, 2, 3]), expect_any: Vec::new(), max_tokens: 32 };
        Self { probes: vec![probe], weights_bytes: 1000 }
    }
}

impl OpenModel for Models {
    fn open(&self, dir: &Path, unsealed: bool) -> Result<OpenedModel, String> {
        match dir.to_str() {
            Some("broken") => Err("model.safetensors: it has sha256 1, expected 2".to_string()),
            Some("unsealed") if !unsealed => Err("unsealed has no SHA256SUMS".to_string()),
            _ => Ok(OpenedModel {
                model_dir: dir.to_path_buf(),
                revision: format!("revision of {}", dir.display()),
                text: text(),
                manifest: Vec::new(),
                weights_bytes: self.weights_bytes,
                probes: self.probes.clone(),
                min_tokens_per_second: None,
            }),
        }
    }
}

fn fleet(candidate: Fault) -> Fleet {
    fleet_with(SupervisorSettings::default(), candidate, Models::default())
}

/// The first model is well, `r2` and `r3` are well too, `sick` behaves as said.
fn fleet_with(settings: SupervisorSettings, sick: Fault, models: Models) -> Fleet {
    let workers = ScriptedWorkers::by_load(move |_, load| match load.model_dir.to_str() {
        Some("sick") => Script::with(sick.clone()),
        Some("slow") => Script { step: Duration::from_millis(50), ..Script::default() },
        _ => Script::default(),
    });
    let source = ModelSource { models: Arc::new(models), ..ModelSource::default() };
    Fleet::with_models(settings, workers, spec(1), source)
}

fn swap_to(model: &str) -> SwapRequest {
    SwapRequest {
        model_dir: model.into(),
        served_names: None,
        strategy: Strategy::Auto,
        observe: Duration::ZERO,
        canary: None,
        force_unsealed: false,
        revision: None,
        configured: None,
    }
}

fn configured(dir: &str) -> Configured {
    Configured { dir: dir.into(), revision: Some("r1".to_string()), served_names: vec!["ernie".to_string()] }
}

fn observed(model: &str, seconds: u64) -> SwapRequest {
    SwapRequest { observe: Duration::from_secs(seconds), ..swap_to(model) }
}

impl Fleet {
    /// Begins a swap and waits for its end.
    async fn swapped(&self, request: SwapRequest) -> RolloutOutcome {
        self.active().await;
        let candidate = self.handle.swap(request).await.expect("the swap begins");
        self.ended(candidate).await
    }

    async fn ended(&self, candidate: DeploymentId) -> RolloutOutcome {
        let over = |s: &FleetStatus| s.rollout.last.as_ref().is_some_and(|last| last.candidate == candidate);
        self.status_where(over).await.rollout.last.clone().expect("it is there")
    }

    /// One request from its choice of a deployment to its last token; also says which model it was given to.
    async fn served(&self, ask: &Ask) -> (String, Vec<Vec<u32>>) {
        loop {
            let deployment = self.active().await;
            match self.handle.submit(&deployment, ask.submission()).await {
                Ok(generation) => {
                    let tokens = read(generation, 1).await.expect("no request fails");
                    return (deployment.model_dir.display().to_string(), tokens);
                }
                Err(SubmitRefusal::Retired) => {}
                Err(refusal) => panic!("refused: {refusal}"),
            }
        }
    }
}

fn reason(outcome: &RolloutOutcome) -> &str {
    match &outcome.result {
        RolloutResult::RolledBack { reason, .. } | RolloutResult::NotRestored { reason } => reason,
        RolloutResult::Completed => panic!("it completed"),
    }
}

/// Requests at a steady pace until told to stop; checks that each answer is wholly of the model it was given to.
async fn steady_load(
    fleet: Arc<Fleet>,
    stop: tokio_util::sync::CancellationToken,
) -> std::collections::BTreeMap<String, u32> {
    let mut running = tokio::task::JoinSet::new();
    let mut n = 0;
    while !stop.is_cancelled() {
        let (fleet, ask) = (fleet.clone(), Ask::new(n % 1000, 10 + n % 40));
        running.spawn(async move {
            let (model, tokens) = fleet.served(&ask).await;
            assert_eq!(tokens, ask.expected_of(&model), "an answer of {model}");
            model
        });
        n += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut by_model = std::collections::BTreeMap::new();
    while let Some(model) = running.join_next().await {
        *by_model.entry(model.expect("no request fails or mixes models")).or_insert(0) += 1;
    }
    by_model
}

#[tokio::test(start_paused = true)]
async fn ten_swaps_under_load_lose_no_request_and_mix_no_answer() {
    let fleet = Arc::new(fleet(Fault::None));
    fleet.active().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let load = tokio::spawn(steady_load(fleet.clone(), stop.clone()));
    for round in 0..10 {
        let outcome = fleet.swapped(observed(if round % 2 == 0 { "r2" } else { "r3" }, 5)).await;
        assert_eq!(outcome.result, RolloutResult::Completed);
        let cut_over = outcome.cut_over.expect("it was cut over");
        assert!(cut_over.in_flight > 0, "there was load");
        assert!(cut_over.pause < Duration::from_millis(10));
    }
    stop.cancel();
    let by_model = load.await.expect("no request fails");
    assert_eq!(by_model.keys().map(String::as_str).collect::<Vec<_>>(), ["model", "r2", "r3"]);
    // Retired deployments leave nothing behind.
    let status = fleet.status_where(|s| s.deployments.len() == 1).await;
    assert_eq!((status.counters.rollouts_completed, status.workers.len()), (10, 1));
    assert_eq!(fleet.workers.alive(), 1);
    assert_eq!(status.counters.workers_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn a_candidate_that_fails_anywhere_leaves_the_old_revision_as_it_is() {
    let mut expecting = Models::default();
    expecting.probes[0].expect_any = vec!["no scripted worker says this".to_string()];
    for (model, fault, models, phase, what) in [
        ("broken", Fault::None, Models::default(), RolloutPhase::Verifying, "expected 2"),
        ("unsealed", Fault::None, Models::default(), RolloutPhase::Verifying, "no SHA256SUMS"),
        ("sick", Fault::FatalWhileLoading("tensor x is missing"), Models::default(), RolloutPhase::Loading, "tensor x"),
        ("sick", Fault::CrashWhileLoading, Models::default(), RolloutPhase::Loading, "closed its socket"),
        ("sick", Fault::StallWhileLoading, Models::default(), RolloutPhase::Loading, "loaded no byte for 90s"),
        (
            "sick",
            Fault::CrashAfterSteps(3, ""),
            Models::default(),
            RolloutPhase::Probing,
            "one of its workers was lost",
        ),
        ("sick", Fault::HangAfterSteps(3), Models::default(), RolloutPhase::Probing, "one of its workers was lost"),
        ("sick", Fault::StepErrorsAfter(3), Models::default(), RolloutPhase::Probing, "one of its workers was lost"),
        ("sick", Fault::NotFinite, Models::default(), RolloutPhase::Probing, "not finite"),
        ("slow", Fault::None, Models::default(), RolloutPhase::Probing, "times as long per token"),
        ("r2", Fault::None, expecting, RolloutPhase::Probing, "no scripted worker says this"),
    ] {
        let fleet = fleet_with(SupervisorSettings::default(), fault.clone(), models);
        let before = fleet.active().await;
        let outcome = fleet.swapped(observed(model, 5)).await;
        let RolloutResult::RolledBack { phase: in_phase, reason } = &outcome.result else {
            panic!("{model} {fault:?}: {outcome:?}")
        };
        assert_eq!(*in_phase, phase, "{model} {fault:?}: {reason}");
        assert!(reason.contains(what), "{model} {fault:?}: {reason}");
        assert_eq!(outcome.cut_over, None);
        let status = fleet.status_where(|s| s.deployments.len() == 1).await;
        assert_eq!((status.active, status.state), (Some(before.id), FleetState::Serving));
        assert_eq!(status.workers[0].restarts, 0, "the old one's worker is untouched");
        assert_eq!(fleet.served(&Ask::new(1, 5)).await.0, "model");
        assert_eq!(fleet.workers.alive(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_candidate_that_loses_a_worker_while_observed_is_rolled_back_without_a_failed_request() {
    // The probes take 4 * 32 steps; it dies some time after them.
    let fleet = Arc::new(fleet(Fault::CrashAfterSteps(400, "")));
    fleet.active().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let load = tokio::spawn(steady_load(fleet.clone(), stop.clone()));
    let outcome = fleet.swapped(observed("sick", 600)).await;
    assert!(reason(&outcome).contains("one of its workers was lost"), "{outcome:?}");
    assert!(matches!(outcome.result, RolloutResult::RolledBack { phase: RolloutPhase::Soaking, .. }));
    tokio::time::sleep(Duration::from_secs(5)).await;
    stop.cancel();
    let by_model = load.await.expect("no request fails");
    assert!(by_model["sick"] > 0 && by_model["model"] > 0, "{by_model:?}");
    let status = fleet.status_where(|s| s.deployments.len() == 1).await;
    assert_eq!((status.deployments[0].model_dir.as_path(), fleet.workers.alive()), (Path::new("model"), 1));
}

#[tokio::test(start_paused = true)]
async fn an_operator_rolls_back_in_every_phase() {
    for (phase, model, strategy) in [
        (RolloutPhase::Loading, "sick", Strategy::SideBySide),
        (RolloutPhase::Loading, "sick", Strategy::StopFirst),
        (RolloutPhase::Probing, "r2", Strategy::SideBySide),
        (RolloutPhase::Soaking, "r2", Strategy::SideBySide),
        (RolloutPhase::Soaking, "r2", Strategy::StopFirst),
    ] {
        let fleet = fleet(Fault::StallWhileLoading);
        fleet.active().await;
        let request = SwapRequest { strategy, ..observed(model, 600) };
        let candidate = fleet.handle.swap(request).await.expect("it begins");
        let refused = fleet.handle.swap(swap_to("r3")).await.expect_err("one at a time");
        assert!(matches!(refused, RolloutRefusal::Busy { .. }));
        fleet.status_where(|s| s.rollout.phase == phase).await;
        fleet.handle.rollback("it looks odd").await.expect("taken");
        let outcome = fleet.ended(candidate).await;
        assert_eq!(outcome.result, RolloutResult::RolledBack { phase, reason: "it looks odd".to_string() });
        assert_eq!(fleet.served(&Ask::new(1, 5)).await.0, "model", "{phase} {strategy:?}");
        fleet.status_where(|s| s.deployments.len() == 1).await;
        assert_eq!(fleet.workers.alive(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn stop_first_holds_requests_and_never_has_both_models_in_memory() {
    for (model, serves) in [("r2", "r2"), ("sick", "model")] {
        let settings = SupervisorSettings { memory_limit: Some(4000), ..SupervisorSettings::default() };
        let fleet = Arc::new(fleet_with(settings, Fault::CrashWhileLoading, Models::default()));
        fleet.active().await;
        let (both, watching) = (tokio_util::sync::CancellationToken::new(), fleet.workers.clone());
        let watcher = tokio::spawn({
            let both = both.clone();
            async move {
                loop {
                    if watching.alive() > 1 {
                        both.cancel();
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
        let stop = tokio_util::sync::CancellationToken::new();
        let load = tokio::spawn(steady_load(fleet.clone(), stop.clone()));
        let outcome = fleet.swapped(observed(model, 5)).await;
        assert_eq!(outcome.result == RolloutResult::Completed, model == serves, "{outcome:?}");
        assert!(!both.is_cancelled(), "two workers lived at the same time");
        watcher.abort();
        tokio::time::sleep(Duration::from_secs(1)).await;
        stop.cancel();
        let by_model = load.await.expect("no request fails");
        assert!(by_model[serves] > 0, "{by_model:?}");
        fleet.status_where(|s| s.deployments.len() == 1 && s.state == FleetState::Serving).await;
        assert_eq!(fleet.workers.alive(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_refused_before_anything_is_touched() {
    let settings = SupervisorSettings { memory_limit: Some(4000), ..SupervisorSettings::default() };
    let fleet = fleet_with(settings.clone(), Fault::None, Models::default());
    let beside = SwapRequest { strategy: Strategy::SideBySide, ..swap_to("r2") };
    let outcome = fleet.swapped(beside).await;
    assert!(reason(&outcome).contains("beside the serving model"), "{outcome:?}");
    let models = Models { weights_bytes: 9000, ..Models::default() };
    let fleet = fleet_with(settings, Fault::None, models);
    let outcome = fleet.swapped(swap_to("r2")).await;
    assert!(reason(&outcome).contains("more memory"), "{outcome:?}");
    assert_eq!(fleet.workers.spawned(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_canary_takes_its_share_of_the_keys_and_is_promoted() {
    let fleet = fleet(Fault::None);
    fleet.active().await;
    let candidate =
        fleet.handle.swap(SwapRequest { canary: Some(2_000), ..observed("r2", 60) }).await.expect("it begins");
    let status = fleet.status_where(|s| s.rollout.phase == RolloutPhase::Soaking).await;
    assert_eq!(status.rollout.canary, Some(2_000));
    assert_eq!(status.deployment(candidate).expect("it serves").role, DeploymentRole::Canary);
    let side = |key: &str| fleet.handle.pick(Some(key)).expect("both serve").model_dir.display().to_string();
    let keys: Vec<_> = (0..1000).map(|n| format!("key {n}")).collect();
    let on_canary = keys.iter().filter(|key| side(key) == "r2").count();
    assert!((150..250).contains(&on_canary), "{on_canary} of 1000 keys");
    assert!(keys.iter().all(|key| side(key) == side(key)), "a key stays where it is");
    assert_eq!(fleet.active().await.model_dir, Path::new("model"), "requests without a key stay with the old one");
    let outcome = fleet.ended(candidate).await;
    assert_eq!(outcome.result, RolloutResult::Completed);
    assert!(keys.iter().all(|key| side(key) == "r2"));
    for (canary, observe) in [(Some(0), 60), (Some(10_001), 60), (Some(1_000), 0)] {
        let refused = fleet.handle.swap(SwapRequest { canary, ..observed("r3", observe) }).await;
        assert!(matches!(refused, Err(RolloutRefusal::Invalid(_))), "{canary:?} for {observe} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_rollback_in_steady_state_goes_to_the_previous_revision_and_links_follow() {
    let dir = tempfile::tempdir().expect("a folder for the test");
    let links = Links::new(dir.path());
    let configured = configured("model");
    let source = ModelSource {
        models: Arc::new(Models::default()),
        links: Some((links.clone(), configured.clone())),
        previous: None,
    };
    let first = DeploymentSpec { revision: "revision of model".to_string(), ..spec(1) };
    let workers = ScriptedWorkers::new(|_| Script::default());
    let fleet = Fleet::with_models(SupervisorSettings::default(), workers, first, source);
    fleet.active().await;
    assert_eq!(fleet.handle.rollback("why not").await, Err(RolloutRefusal::NothingToRollBack));

    assert_eq!(fleet.swapped(swap_to("r2")).await.result, RolloutResult::Completed);
    assert_eq!(fleet.handle.rollout_status().previous.as_deref(), Some(Path::new("model")));
    fleet.handle.rollback("it is worse").await.expect("there is one");
    let status = fleet.status_where(|s| s.counters.rollouts_completed == 2 && s.deployments.len() == 1).await;
    assert_eq!(status.active_deployment().expect("it serves").model_dir, Path::new("model"));
    assert_eq!(status.rollout.previous.as_deref(), Some(Path::new("r2")));
    // Whoever is told that it completed finds it on the disk.
    fleet.status_where(|s| s.rollout.last.as_ref().is_some_and(|last| last.model_dir == Path::new("model"))).await;
    let resumed = || links.resume(&configured).map(|serving| serving.current.dir);
    assert_eq!(resumed().as_deref(), Some(Path::new("model")));
}

#[tokio::test(start_paused = true)]
async fn a_candidate_without_links_to_commit_is_not_what_a_restart_finds() {
    let dir = tempfile::tempdir().expect("a folder for the test");
    let links = Links::new(dir.path());
    let source = ModelSource {
        models: Arc::new(Models::default()),
        links: Some((links.clone(), configured("model"))),
        previous: None,
    };
    let fleet =
        Fleet::with_models(SupervisorSettings::default(), ScriptedWorkers::new(|_| Script::default()), spec(1), source);
    fleet.active().await;
    fleet.handle.swap(observed("r2", 600)).await.expect("it begins");
    fleet.status_where(|s| s.rollout.phase == RolloutPhase::Soaking).await;
    // The daemon dies here: the candidate has not proven itself.
    assert_eq!(links.resume(&configured("model")), None);
}

#[tokio::test(start_paused = true)]
async fn swaps_are_refused_before_the_first_model_and_while_draining() {
    let fleet = fleet(Fault::None);
    assert_eq!(fleet.handle.swap(swap_to("r2")).await, Err(RolloutRefusal::NotServing));
    fleet.active().await;
    fleet.handle.drain(Duration::from_secs(1), DrainEnd::Open).await;
    assert_eq!(fleet.handle.swap(swap_to("r2")).await, Err(RolloutRefusal::Draining));
    assert_eq!(fleet.handle.rollback("no").await, Err(RolloutRefusal::Draining));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_in_the_middle_of_a_rollout_leaves_no_worker() {
    for phase in [RolloutPhase::Loading, RolloutPhase::Probing, RolloutPhase::Soaking] {
        let fleet = fleet(Fault::None);
        fleet.active().await;
        fleet.handle.swap(observed("r2", 600)).await.expect("it begins");
        fleet.status_where(|s| s.rollout.phase == phase).await;
        fleet.handle.shutdown().await;
        assert_eq!(fleet.workers.alive(), 0, "{phase}");
    }
}
