//! A worker that answers with the tokens a test wrote down: the other end of the fleet's pipe, in this process.

use crate::supervisor::scripted::ScriptedProcess;
use crate::supervisor::{SpawnWorker, SpawnedWorker};
use ernie_proto::frame;
use ernie_proto::ids::{RequestId, WorkerId};
use ernie_proto::worker::{
    FinishReason, FromWorker, Hello, Load, Loaded, PromptLogprobs, SequenceOutput, Started, StepReport, StepStats,
    Submit, ToWorker, TokenLogprobs,
};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What one request brings: per choice its tokens and how it ends after the last one.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) choices: Vec<(Vec<u32>, FinishReason)>,
    /// No token comes before this is notified.
    pub(super) hold: Option<Arc<Notify>>,
    /// The engine refuses.
    pub(super) refusal: Option<String>,
    /// Never ends by itself: the last token is repeated.
    pub(super) endless: bool,
}

impl Answer {
    pub(super) fn of(tokens: Vec<u32>, finish: FinishReason) -> Self {
        Self { choices: vec![(tokens, finish)], hold: None, refusal: None, endless: false }
    }
}

type Script = dyn Fn(&Submit) -> Answer + Send + Sync;

/// Spawns such workers; what they were asked is kept.
#[derive(Clone)]
pub(super) struct AnsweringWorkers {
    script: Arc<Script>,
    vocab_size: u32,
    max_model_len: u32,
    submits: Arc<Mutex<Vec<Submit>>>,
    aborts: Arc<Mutex<Vec<RequestId>>>,
    ended_choices: Arc<Mutex<Vec<(RequestId, u16)>>>,
    pub(super) aborted: Arc<Notify>,
    /// Loads only when this is cancelled.
    pub(super) loads: CancellationToken,
}

impl AnsweringWorkers {
    pub(super) fn new(
        vocab_size: u32,
        max_model_len: u32,
        script: impl Fn(&Submit) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let loads = CancellationToken::new();
        loads.cancel();
        Self {
            script: Arc::new(script),
            vocab_size,
            max_model_len,
            submits: Arc::default(),
            aborts: Arc::default(),
            ended_choices: Arc::default(),
            aborted: Arc::default(),
            loads,
        }
    }

    pub(super) fn submits(&self) -> Vec<Submit> {
        self.submits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps nothing of what was asked so far.
    pub(super) fn forget(&self) {
        self.submits.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.aborts.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(super) fn aborts(&self) -> Vec<RequestId> {
        self.aborts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn ended_choices(&self) -> Vec<(RequestId, u16)> {
        self.ended_choices.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn loaded(&self, _: &Load) -> Loaded {
        Loaded {
            architecture: "Scripted".into(),
            moe: false,
            layers: 1,
            experts: 0,
            experts_per_token: 0,
            parameters: 1,
            parameters_active: 1,
            vocab_size: self.vocab_size,
            max_model_len: self.max_model_len,
            weights: "none".into(),
            kv: "none".into(),
            isa: "none".into(),
            threads: 1,
            block_size: 16,
            num_blocks: 100,
            weights_bytes: 0,
            kv_bytes: 0,
            workspace_bytes: 0,
            load_seconds: Vec::new(),
        }
    }

    async fn live(self, pipe: DuplexStream) {
        let (mut from, to) = tokio::io::split(pipe);
        let to = Arc::new(tokio::sync::Mutex::new(to));
        let send = |message: FromWorker| {
            let to = to.clone();
            async move {
                let frame = frame::encode(&message).expect("a message encodes");
                let _ = to.lock().await.write_all(&frame).await;
            }
        };
        send(FromWorker::Hello(Hello::own())).await;
        let mut length = [0; 4];
        while from.read_exact(&mut length).await.is_ok() {
            let mut payload = vec![0; u32::from_le_bytes(length) as usize];
            if from.read_exact(&mut payload).await.is_err() {
                return;
            }
            match frame::decode(&payload).expect("the supervisor speaks the protocol") {
                ToWorker::Load(load) => {
                    self.loads.cancelled().await;
                    send(FromWorker::Loaded(Box::new(self.loaded(&load)))).await;
                }
                ToWorker::Ping(n) => send(FromWorker::Pong(n)).await,
                ToWorker::Shutdown => return,
                ToWorker::Abort(id) => {
                    self.aborts.lock().unwrap_or_else(PoisonError::into_inner).push(id);
                    self.aborted.notify_one();
                }
                ToWorker::Submit(submit) => {
                    let answer = (self.script)(&submit);
                    self.submits.lock().unwrap_or_else(PoisonError::into_inner).push((*submit).clone());
                    let to = to.clone();
                    let aborts = self.aborts.clone();
                    tokio::spawn(async move {
                        for report in reports(&submit, &answer) {
                            if let (Some(hold), false) = (&answer.hold, report.outputs.is_empty()) {
                                hold.notified().await;
                            }
                            let frame = frame::encode(&FromWorker::Step(Box::new(report))).expect("a report encodes");
                            if to.lock().await.write_all(&frame).await.is_err() {
                                return;
                            }
                            tokio::task::yield_now().await;
                            if aborts.lock().unwrap_or_else(PoisonError::into_inner).contains(&submit.request) {
                                return;
                            }
                        }
                    });
                }
                ToWorker::EndChoice(id, choice) => {
                    self.ended_choices.lock().unwrap_or_else(PoisonError::into_inner).push((id, choice));
                    self.aborted.notify_one();
                }
                ToWorker::AskKv | ToWorker::SetSwap(_) | ToWorker::Hello(_) | ToWorker::ResetPrefixCache => {}
            }
        }
    }
}

/// The steps of one request, one token per choice and step.
fn reports<'a>(submit: &'a Submit, answer: &'a Answer) -> impl Iterator<Item = StepReport> + Send + 'a {
    let mut first = StepReport { step: 1, stats: StepStats::default(), ..StepReport::default() };
    if let Some(refusal) = &answer.refusal {
        first.failed.push((submit.request, refusal.clone()));
    } else {
        first.started.push(Started { request: submit.request, cached_tokens: 2 });
        if let Some(k) = submit.sampling.prompt_logprobs {
            let tokens = submit.prompt.iter().enumerate().map(|(i, &t)| (i > 0).then(|| logprobs(t, k))).collect();
            first.prompt_logprobs.push(PromptLogprobs { request: submit.request, tokens });
        }
    }
    let steps = match (&answer.refusal, answer.endless) {
        (Some(_), _) => 0,
        (None, true) => 100_000,
        (None, false) => answer.choices.iter().map(|(t, _)| t.len()).max().unwrap_or(0),
    };
    let later = (0..steps).map(move |step| {
        let mut report = StepReport { step: step as u64 + 2, ..StepReport::default() };
        for (index, (tokens, finish)) in answer.choices.iter().enumerate().take(submit.choices.len()) {
            let last = step + 1 == tokens.len() && !answer.endless;
            let at_limit = step + 1 == submit.sampling.max_tokens as usize;
            let Some(&token) = tokens.get(if answer.endless { step.min(tokens.len() - 1) } else { step }) else {
                continue;
            };
            if step >= submit.sampling.max_tokens as usize {
                continue;
            }
            let finish = match (last, at_limit) {
                (true, false) => Some(*finish),
                (true, true) if *finish != FinishReason::Eos => Some(*finish),
                (true, true) => Some(FinishReason::Eos),
                (false, true) => Some(FinishReason::Length),
                (false, false) => None,
            };
            report.outputs.push(SequenceOutput {
                request: submit.request,
                choice: index as u16,
                token,
                logprobs: submit.sampling.logprobs.map(|k| logprobs(token, k)),
                finish,
            });
        }
        report
    });
    std::iter::once(first).chain(later)
}

fn logprobs(token: u32, k: u32) -> TokenLogprobs {
    TokenLogprobs { logprob: -1.5, rank: 1, top: (0..k).map(|i| (token + i, -1.5 - i as f32)).collect() }
}

impl SpawnWorker for AnsweringWorkers {
    fn spawn(&self, _: WorkerId) -> io::Result<SpawnedWorker> {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (killed, gone) = (CancellationToken::new(), CancellationToken::new());
        let (life, kill, end) = (self.clone(), killed.clone(), gone.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = life.live(theirs) => {}
                () = kill.cancelled() => {}
            }
            end.cancel();
        });
        let process = Box::new(ScriptedProcess { killed, gone });
        Ok(SpawnedWorker { pid: 1, pipe: Box::new(ours), stderr: None, process })
    }
}
