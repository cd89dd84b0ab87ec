//! A worker that is a script: the other end of the socket for tests, in this process, under paused time.
//!
//! It answers every request with tokens that depend only on prompt, seed, choice and position, as the real engine does, so
//! that a test can say what a request has to bring whatever happens on the way. Spawns are numbered from 0; a test says
//! how each behaves.

use super::worker::{SpawnWorker, SpawnedWorker, WorkerProcess};
use ernie_proto::frame;
use ernie_proto::ids::{RequestId, WorkerId};
use ernie_proto::worker::{
    Fatal, FinishReason, FromWorker, Hello, Load, LoadPhase, LoadProgress, Loaded, SequenceOutput, Started, StepReport,
    StepStats, Submit, ToWorker,
};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// How one scripted worker behaves.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    /// How long a step takes.
    pub(crate) step: Duration,
    /// How long loading takes, in four messages.
    pub(crate) load: Duration,
    pub(crate) hello: Hello,
    pub(crate) fault: Fault,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    None,
    /// Its process ends, with this on standard error.
    CrashAfterSteps(u64, &'static str),
    /// Says nothing more, not even to a ping, but lives.
    HangAfterSteps(u64),
    /// Like `HangAfterSteps`, but comes back after this long and goes on as if nothing had been.
    FreezeAfterSteps(u64, Duration),
    /// Ends when it computes a prompt with this token.
    CrashOnToken(u32),
    /// Writes something that is no frame.
    GarbageAfterSteps(u64),
    /// Sends a token for a choice that nobody asked for.
    NonsenseAfterSteps(u64),
    StepErrorsAfter(u64),
    /// Steps take this long, beats come meanwhile.
    LongSteps(Duration),
    CrashWhileLoading,
    StallWhileLoading,
    FatalWhileLoading(&'static str),
    /// Never says hello.
    Mute,
    /// Logits are not finite: every answer ends at once with an error.
    NotFinite,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            step: Duration::from_millis(10),
            load: Duration::from_millis(100),
            hello: Hello::own(),
            fault: Fault::None,
        }
    }
}

impl Script {
    pub(crate) fn with(fault: Fault) -> Self {
        Self { fault, ..Self::default() }
    }
}

/// What scripted workers did, for tests to look at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Act {
    Spawned(WorkerId),
    Submitted(WorkerId, RequestId),
    Stepped(WorkerId, u64),
    Aborted(WorkerId, RequestId),
    Ended(WorkerId),
}

type Play = dyn Fn(u64, &Load) -> Script + Send + Sync;

/// Spawns scripted workers.
#[derive(Clone)]
pub(crate) struct ScriptedWorkers {
    play: Arc<Play>,
    /// Said before the load is known.
    hello: Hello,
    mute: bool,
    spawned: Arc<AtomicU64>,
    alive: Arc<AtomicU64>,
    acts: Arc<Mutex<Vec<Act>>>,
    refuse: bool,
}

impl ScriptedWorkers {
    /// `script` says how the n-th spawn behaves.
    pub(crate) fn new(script: impl Fn(u64) -> Script + Send + Sync + 'static) -> Self {
        Self::by_load(move |n, _| script(n))
    }

    /// `script` says how a spawn behaves by its number and what it was told to load.
    pub(crate) fn by_load(script: impl Fn(u64, &Load) -> Script + Send + Sync + 'static) -> Self {
        let first = script(0, &Load::new("model"));
        Self {
            hello: first.hello,
            mute: first.fault == Fault::Mute,
            play: Arc::new(script),
            spawned: Arc::default(),
            alive: Arc::default(),
            acts: Arc::default(),
            refuse: false,
        }
    }

    /// The operating system starts no process.
    pub(crate) fn none() -> Self {
        Self { refuse: true, ..Self::new(|_| Script::default()) }
    }

    pub(crate) fn spawned(&self) -> u64 {
        self.spawned.load(Ordering::SeqCst)
    }

    /// Workers whose process lives.
    pub(crate) fn alive(&self) -> u64 {
        self.alive.load(Ordering::SeqCst)
    }

    pub(crate) fn acts(&self) -> Vec<Act> {
        self.acts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, act: Act) {
        self.acts.lock().unwrap_or_else(PoisonError::into_inner).push(act);
    }
}

impl SpawnWorker for ScriptedWorkers {
    fn spawn(&self, worker: WorkerId) -> io::Result<SpawnedWorker> {
        if self.refuse {
            return Err(io::Error::other("no more processes"));
        }
        let number = self.spawned.fetch_add(1, Ordering::SeqCst);
        self.alive.fetch_add(1, Ordering::SeqCst);
        self.note(Act::Spawned(worker));
        let (pipe, theirs) = tokio::io::duplex(1 << 16);
        let (stderr, their_stderr) = tokio::io::duplex(1 << 12);
        let killed = CancellationToken::new();
        let gone = CancellationToken::new();
        let (all, kill, end) = (self.clone(), killed.clone(), gone.clone());
        tokio::spawn(async move {
            let life = Life::new(all.clone(), worker, number, theirs, their_stderr);
            tokio::select! {
                () = life.live() => {}
                () = kill.cancelled() => {}
            }
            all.alive.fetch_sub(1, Ordering::SeqCst);
            all.note(Act::Ended(worker));
            end.cancel();
        });
        Ok(SpawnedWorker {
            pid: 1000 + u32::try_from(number).expect("a test spawns few workers"),
            pipe: Box::new(pipe),
            stderr: Some(Box::new(stderr)),
            process: Box::new(ScriptedProcess { killed, gone }),
        })
    }
}

/// A process that is a task: killed by one token, and over when the task cancels the other.
pub(crate) struct ScriptedProcess {
    pub(crate) killed: CancellationToken,
    pub(crate) gone: CancellationToken,
}

impl WorkerProcess for ScriptedProcess {
    fn kill(&mut self) {
        self.killed.cancel();
    }

    fn wait(&mut self) -> Pin<Box<dyn Future<Output = String> + Send + '_>> {
        Box::pin(async {
            self.gone.cancelled().await;
            if self.killed.is_cancelled() { "killed by signal 9".to_string() } else { "exit status 1".to_string() }
        })
    }
}

/// The tokens that a choice has to bring; the last one is `max_tokens`'.
pub(crate) fn token_at(prompt: &[u32], seed: u64, choice: usize, position: usize) -> u32 {
    let mut hash = seed ^ 0x9e37_79b9_7f4a_7c15;
    for part in prompt.iter().copied().chain([u32::try_from(choice).unwrap(), u32::try_from(position).unwrap()]) {
        hash = (hash ^ u64::from(part)).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }
    (hash % 50_000) as u32
}

/// Mixed into the seed of every request, so that two models give different answers. The tests' first model has none.
pub(crate) fn salt_of(model_dir: &std::path::Path) -> u64 {
    let name = model_dir.to_string_lossy();
    if name == "model" { 0 } else { name.bytes().fold(7, |salt, byte| salt * 31 + u64::from(byte)) }
}

struct Life {
    salt: u64,
    _reading: AbortOnDropHandle<()>,
    all: ScriptedWorkers,
    id: WorkerId,
    script: Script,
    inbox: mpsc::Receiver<ToWorker>,
    to: WriteHalf<DuplexStream>,
    stderr: DuplexStream,
    number: u64,
    steps: u64,
    running: BTreeMap<RequestId, (Submit, bool)>,
    stats: StepStats,
}

impl Life {
    fn new(all: ScriptedWorkers, id: WorkerId, number: u64, pipe: DuplexStream, stderr: DuplexStream) -> Self {
        let (from, to) = tokio::io::split(pipe);
        let (sender, inbox) = mpsc::channel(4096);
        // Ends with this life: a process that is gone holds no end of its socket.
        let _reading = AbortOnDropHandle::new(tokio::spawn(read(from, sender)));
        Self {
            salt: 0,
            _reading,
            all,
            id,
            script: Script::default(),
            inbox,
            to,
            stderr,
            number,
            steps: 0,
            running: BTreeMap::new(),
            stats: StepStats { blocks_total: 100, blocks_free: 100, ..StepStats::default() },
        }
    }

    async fn send(&mut self, message: FromWorker) {
        let frame = frame::encode(&message).expect("a message encodes");
        // An error: the supervisor is gone; the next read says so.
        let _ = self.to.write_all(&frame).await;
    }

    async fn live(mut self) {
        if self.all.mute {
            return std::future::pending().await;
        }
        let hello = self.all.hello.clone();
        self.send(FromWorker::Hello(hello)).await;
        while let Some(message) = self.inbox.recv().await {
            match message {
                ToWorker::Hello(_) => {}
                ToWorker::Load(load) => {
                    self.script = (self.all.play)(self.number, &load);
                    self.salt = salt_of(&load.model_dir);
                    if !self.load(&load).await {
                        return;
                    }
                    break;
                }
                _ => return,
            }
        }
        self.serve().await;
    }

    async fn load(&mut self, load: &Load) -> bool {
        for (done, phase) in
            [LoadPhase::Open, LoadPhase::Weights, LoadPhase::Weights, LoadPhase::WarmUp].into_iter().enumerate()
        {
            match self.script.fault {
                Fault::CrashWhileLoading if done == 2 => return false,
                Fault::StallWhileLoading if done == 2 => return std::future::pending().await,
                Fault::FatalWhileLoading(message) if done == 1 => {
                    let fatal = Fatal { phase: "load".to_string(), message: message.to_string() };
                    self.send(FromWorker::Fatal(fatal)).await;
                    return false;
                }
                _ => {}
            }
            self.send(FromWorker::LoadProgress(LoadProgress { phase, bytes_done: done as u64, bytes_total: 4 })).await;
            tokio::time::sleep(self.script.load / 4).await;
        }
        self.send(FromWorker::Loaded(Box::new(loaded(load)))).await;
        true
    }

    /// The engine loop: inbox, step, report.
    async fn serve(mut self) {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                if !self.take(message).await {
                    return;
                }
            }
            if self.running.is_empty() {
                match self.inbox.recv().await {
                    Some(message) if self.take(message.clone()).await => continue,
                    _ => return,
                }
            }
            match self.script.fault.clone() {
                Fault::CrashAfterSteps(n, words) if self.steps >= n => {
                    let _ = self.stderr.write_all(words.as_bytes()).await;
                    return;
                }
                Fault::HangAfterSteps(n) if self.steps >= n => return std::future::pending().await,
                Fault::FreezeAfterSteps(n, how_long) if self.steps == n => tokio::time::sleep(how_long).await,
                Fault::CrashOnToken(token) if self.running.values().any(|(s, _)| s.prompt.contains(&token)) => return,
                Fault::GarbageAfterSteps(n) if self.steps >= n => {
                    let _ = self.to.write_all(&[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).await;
                    return std::future::pending().await;
                }
                Fault::StepErrorsAfter(n) if self.steps >= n => {
                    tokio::time::sleep(self.script.step).await;
                    self.send(FromWorker::StepFailed("a kernel did not like it".to_string())).await;
                    continue;
                }
                Fault::LongSteps(how_long) => {
                    for beat in 0..how_long.as_secs() {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        self.send(FromWorker::Beat(beat)).await;
                    }
                }
                _ => {}
            }
            tokio::time::sleep(self.script.step).await;
            let report = self.step();
            self.send(FromWorker::Step(Box::new(report))).await;
        }
    }

    async fn take(&mut self, message: ToWorker) -> bool {
        match message {
            ToWorker::Submit(submit) => {
                self.all.note(Act::Submitted(self.id, submit.request));
                self.stats.prompt_tokens += submit.prompt.len() as u64;
                self.running.insert(submit.request, (*submit, false));
            }
            ToWorker::Abort(id) => {
                self.all.note(Act::Aborted(self.id, id));
                self.running.remove(&id);
            }
            ToWorker::Ping(n) => self.send(FromWorker::Pong(n)).await,
            ToWorker::AskKv => self.send(FromWorker::Kv(Box::default())).await,
            ToWorker::EndChoice(..)
            | ToWorker::SetSwap(_)
            | ToWorker::ResetPrefixCache
            | ToWorker::Hello(_)
            | ToWorker::Load(_) => {}
            ToWorker::Shutdown => return false,
        }
        true
    }

    fn step(&mut self) -> StepReport {
        self.steps += 1;
        self.all.note(Act::Stepped(self.id, self.steps));
        let mut report = StepReport { step: self.steps, ..StepReport::default() };
        let not_finite = self.script.fault == Fault::NotFinite;
        for (id, (submit, started)) in &mut self.running {
            if !std::mem::replace(started, true) {
                report.started.push(Started { request: *id, cached_tokens: 0 });
            }
            for (index, choice) in submit.choices.iter_mut().enumerate().filter(|(_, choice)| !choice.finished) {
                let position = choice.generated.len();
                let token = token_at(&submit.prompt, submit.sampling.seed ^ self.salt, index, position);
                choice.generated.push(token);
                choice.finished = not_finite || choice.generated.len() == submit.sampling.max_tokens as usize;
                self.stats.generated_tokens += 1;
                report.outputs.push(SequenceOutput {
                    request: *id,
                    choice: u16::try_from(index).expect("few choices"),
                    token: if not_finite { ernie_proto::worker::NO_TOKEN } else { token },
                    logprobs: None,
                    finish: choice.finished.then_some(if not_finite {
                        FinishReason::Error
                    } else {
                        FinishReason::Length
                    }),
                });
            }
        }
        match (&self.script.fault, report.outputs.first_mut()) {
            (Fault::NonsenseAfterSteps(n), Some(output)) if self.steps > *n => output.choice = 999,
            _ => {}
        }
        self.running.retain(|_, (submit, _)| submit.choices.iter().any(|choice| !choice.finished));
        self.stats.running = u32::try_from(self.running.len()).expect("few requests");
        report.stats = self.stats.clone();
        report
    }
}

async fn read(mut from: ReadHalf<DuplexStream>, to: mpsc::Sender<ToWorker>) {
    let mut length = [0; 4];
    while from.read_exact(&mut length).await.is_ok() {
        let mut payload = vec![0; u32::from_le_bytes(length) as usize];
        if from.read_exact(&mut payload).await.is_err() {
            return;
        }
        let message = frame::decode(&payload).expect("the supervisor speaks the protocol");
        if to.send(message).await.is_err() {
            return;
        }
    }
}

fn loaded(load: &Load) -> Loaded {
    Loaded {
        architecture: "Scripted".to_string(),
        moe: false,
        layers: 1,
        experts: 0,
        experts_per_token: 0,
        parameters: 1,
        parameters_active: 1,
        vocab_size: 50_000,
        max_model_len: load.max_model_len.unwrap_or(4096),
        weights: "none".to_string(),
        kv: "none".to_string(),
        isa: "none".to_string(),
        threads: 1,
        block_size: 16,
        num_blocks: 100,
        weights_bytes: 1000,
        kv_bytes: 1000,
        workspace_bytes: 1000,
        load_seconds: Vec::new(),
    }
}
