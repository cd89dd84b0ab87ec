//! A fleet of scripted workers, its requests and what they have to bring: what the tests of this room share.

use super::scripted::{Fault, Script, ScriptedWorkers, salt_of, token_at};
use super::*;
use crate::text::TextModel;
use ernie_proto::worker::{Load, SamplingParams};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

pub(super) fn text() -> Arc<TextModel> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny-dense");
    Arc::new(TextModel::load(&dir).expect("the test model has a tokenizer"))
}

pub(super) fn spec(workers: u32) -> DeploymentSpec {
    DeploymentSpec {
        served_names: vec!["ernie".to_string()],
        revision: "r1".to_string(),
        model_dir: "model".into(),
        text: text(),
        load: Load::new("model"),
        workers,
    }
}

/// Remembers every event.
#[derive(Default)]
pub(super) struct Recorder(Mutex<Vec<FleetEvent>>);

impl Recorder {
    pub(super) fn events(&self) -> Vec<FleetEvent> {
        self.0.lock().expect("no test panics while it holds this").clone()
    }

    pub(super) fn failures(&self) -> Vec<String> {
        self.events()
            .into_iter()
            .filter_map(|event| match event {
                FleetEvent::WorkerLost { failure, .. } => Some(failure.reason),
                _ => None,
            })
            .collect()
    }
}

impl FleetObserver for Recorder {
    fn on(&self, event: &FleetEvent) {
        self.0.lock().expect("no test panics while it holds this").push(event.clone());
    }
}

pub(super) struct Fleet {
    pub(super) handle: FleetHandle,
    pub(super) workers: ScriptedWorkers,
    pub(super) recorder: Arc<Recorder>,
}

impl Fleet {
    pub(super) fn start(workers: ScriptedWorkers, spec: DeploymentSpec) -> Self {
        Self::with(SupervisorSettings::default(), workers, spec)
    }

    pub(super) fn with(settings: SupervisorSettings, workers: ScriptedWorkers, spec: DeploymentSpec) -> Self {
        Self::with_models(settings, workers, spec, ModelSource::default())
    }

    pub(super) fn with_models(
        settings: SupervisorSettings,
        workers: ScriptedWorkers,
        spec: DeploymentSpec,
        source: ModelSource,
    ) -> Self {
        let recorder = Arc::new(Recorder::default());
        let handle = start_with(settings, Arc::new(workers.clone()), vec![recorder.clone()], spec, source);
        Self { handle, workers, recorder }
    }

    /// One worker whose n-th spawn behaves as the n-th fault says, later ones well.
    pub(super) fn of(faults: Vec<Fault>) -> Self {
        Self::start(faulty(faults), spec(1))
    }

    pub(super) async fn active(&self) -> Arc<Deployment> {
        self.handle.pick_or_wait(None, Duration::from_secs(60)).await.expect("the model loads")
    }

    pub(super) async fn submit(&self, request: &Ask) -> Result<Generation, SubmitRefusal> {
        let deployment = self.active().await;
        self.handle.submit(&deployment, request.submission()).await
    }

    pub(super) async fn status_where(&self, is: impl Fn(&FleetStatus) -> bool) -> Arc<FleetStatus> {
        let mut watch = self.handle.watch();
        let found = tokio::time::timeout(Duration::from_secs(3600), watch.wait_for(|status| is(status))).await;
        found.unwrap_or_else(|_| panic!("not within an hour: {:?}", self.handle.status())).expect("it runs").clone()
    }
}

pub(super) fn faulty(faults: Vec<Fault>) -> ScriptedWorkers {
    ScriptedWorkers::new(move |n| {
        let fault = usize::try_from(n).ok().and_then(|n| faults.get(n)).cloned();
        Script::with(fault.unwrap_or(Fault::None))
    })
}

/// A request and what it has to bring.
#[derive(Clone)]
pub(super) struct Ask {
    pub(super) prompt: Vec<u32>,
    pub(super) choices: u16,
    pub(super) max_tokens: u32,
}

impl Ask {
    pub(super) fn new(n: u32, max_tokens: u32) -> Self {
        Self { prompt: vec![n, n + 1, n * 7], choices: 1, max_tokens }
    }

    pub(super) fn choices(self, choices: u16) -> Self {
        Self { choices, ..self }
    }

    pub(super) fn submission(&self) -> Submission {
        Submission {
            prompt: Arc::new(self.prompt.clone()),
            choices: self.choices,
            sampling: SamplingParams { max_tokens: self.max_tokens, seed: 3, ..SamplingParams::default() },
            priority: 0,
            cache_salt: 0,
            owner: 0,
        }
    }

    pub(super) fn expected(&self) -> Vec<Vec<u32>> {
        self.expected_of("model")
    }

    /// From this model.
    pub(super) fn expected_of(&self, model: &str) -> Vec<Vec<u32>> {
        let seed = 3 ^ salt_of(Path::new(model));
        let choice = |c| (0..self.max_tokens as usize).map(|p| token_at(&self.prompt, seed, c, p)).collect();
        (0..usize::from(self.choices)).map(choice).collect()
    }
}

/// Reads a request to its end: the tokens of each choice, or why it failed.
pub(super) async fn read(mut generation: Generation, choices: u16) -> Result<Vec<Vec<u32>>, GenerationFailure> {
    let mut tokens = vec![Vec::new(); usize::from(choices)];
    let (mut started, mut ended) = (0, 0);
    while let Some(event) = generation.next().await {
        match event {
            GenerationEvent::Started { .. } => started += 1,
            GenerationEvent::Output(output, _) => {
                tokens[usize::from(output.choice)].push(output.token);
                ended += usize::from(output.finish.is_some());
            }
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Computed(_) => {}
            GenerationEvent::Failed(failure) => return Err(failure),
        }
    }
    assert_eq!((started, ended), (1, usize::from(choices)), "one start, one end per choice");
    Ok(tokens)
}
