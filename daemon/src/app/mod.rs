//! Builds everything, knows everyone, contains no logic.
//!
//! `listen` accepts connections, `life` waits for signals and for the fleet and walks the daemon to its end, `observe`
//! turns what happens in the fleet into metrics and audit rows, `first` finds the model to start with, `demo` unpacks the one
//! that is part of the executable.

mod demo;
mod first;
mod life;
mod listen;
mod observe;
mod swap;

use crate::cli::{EXIT_ADDRESS, EXIT_CONFIG, complain};
use crate::config::{Config, ModelSource, Sources};
use crate::model_store::{Manifest, VerifyError};
use crate::supervisor::{
    self, DeploymentSpec, LivenessSettings, PoisonSettings, ReexecWorker, RestartSettings, RolloutTimeouts, SoakRules,
    StoredModels, SupervisorSettings,
};
use crate::system::{memory, notify, sockets};
use crate::telemetry::logging::{Logging, Milestones};
use crate::telemetry::metrics::{CacheSettings, Metrics, MetricsSetup};
use crate::telemetry::recorder::Recorder;
use crate::telemetry::requests::Observers;
use crate::telemetry::traces::{Traces, TracesError};
use ernie_proto::worker::Load;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Threads of the main runtime: HTTP, supervision, control. Compute has its own, in the workers.
const RUNTIME_THREADS_MAX: usize = 4;
/// Requests that a rollout makes itself, beside those of clients.
const SMOKE_PROMPTS_MAX: usize = 16;
/// Text work that may run at the same time (tokenizing, templates).
const BLOCKING_THREADS_MAX: usize = 16;

/// Runs the daemon to its end.
pub fn main(config: Config, sources: Sources) -> ExitCode {
    // Before anything else opens a descriptor: they begin at 3.
    let inherited = match sockets::inherited() {
        Ok(inherited) => inherited,
        Err(e) => {
            complain(&format!("ernied: systemd's sockets can not be used: {e}"));
            return ExitCode::from(EXIT_ADDRESS);
        }
    };
    let logging = match Logging::start(&config.logging) {
        Ok(logging) => logging,
        Err(e) => {
            complain(&format!("ernied: {e}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, RUNTIME_THREADS_MAX);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("ernied")
        .enable_all()
        .build();
    let code = match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(run(config, sources, inherited, &logging));
            // What still blocks (a tokenizer at work) must not hold up the end.
            runtime.shutdown_background();
            code
        }
        Err(e) => {
            tracing::error!("the runtime can not be started: {e}");
            ExitCode::FAILURE
        }
    };
    drop(logging);
    code
}

async fn run(config: Config, sources: Sources, inherited: sockets::Inherited, logging: &Logging) -> ExitCode {
    match start(config, sources, inherited, logging).await {
        Ok(daemon) => daemon.live().await,
        Err(e) => {
            tracing::error!("{e}");
            notify::stopping(&e.to_string());
            match e {
                StartError::Bind(_) => ExitCode::from(EXIT_ADDRESS),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Why the daemon did not start.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Bind(#[from] sockets::BindError),
    #[error("state directory {path}: {source}; make it writable for this user, or give another with --state-dir DIR")]
    StateDir { path: PathBuf, source: std::io::Error },
    #[error("another ernied uses state directory {path}; give this one its own with --state-dir DIR")]
    StateDirTaken { path: PathBuf },
    #[error(transparent)]
    Demo(#[from] demo::UnpackError),
    #[error("the text side of {dir} can not be loaded: {source}")]
    Text { dir: PathBuf, source: crate::text::TextError },
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error(transparent)]
    Traces(#[from] TracesError),
    #[error(transparent)]
    Audit(#[from] crate::audit::StoreError),
}

async fn start(
    config: Config,
    sources: Sources,
    inherited: sockets::Inherited,
    logging: &Logging,
) -> Result<life::Daemon, StartError> {
    let started = Instant::now();
    let milestones = Milestones::new(config.logging.format);
    milestones.starting();
    for notice in sources.layers.notices() {
        tracing::warn!("{notice}");
    }
    // Signals from here on are ours, so that an early SIGTERM ends a long load in good order.
    let signals = crate::system::signals::Signals::new()
        .map_err(|source| StartError::System { what: "signals can not be received", source })?;
    // Addresses first: a port that is taken shows at once, not after a long load.
    let socket_outlives_us = inherited.http.is_some();
    let api = match inherited.http {
        Some(listener) => listener,
        None => sockets::tcp(config.server.host, config.server.port)?,
    };
    let address =
        api.local_addr().map_err(|source| StartError::System { what: "the listener has no address", source })?;
    let uds = config.server.uds.as_deref().map(|path| sockets::unix(path, 0o666)).transpose()?;
    let state_lock = state_dir(&config.paths.state_dir)?;
    let admin_socket = match inherited.admin {
        Some(listener) => listener,
        None => sockets::unix(&config.admin.socket, config.admin.mode)?,
    };

    let model_dir = match &config.model.source {
        ModelSource::Dir(dir) => dir.clone(),
        ModelSource::Demo => demo::unpack(&config.paths.state_dir)?,
    };
    swap::delete_files(&config);
    let model_dir = model_dir.canonicalize().unwrap_or(model_dir);
    let first = first_model(&config, &model_dir).await?;
    let serves = first.verified.dir().to_owned();
    milestones.loading(&serves.display().to_string());
    for (dir, reason) in &first.passed_over {
        tracing::error!(dir = %dir.display(), reason, "the model that served last can not be served any more");
    }
    if serves != model_dir {
        tracing::warn!(
            configured = %model_dir.display(), serves = %serves.display(),
            "serving the model that was swapped in; to make it permanent, name it in model.path"
        );
    }
    let spec = deployment(&config, &first);
    milestones.engine_config(
        &serves.display().to_string(),
        &first.text_dir.display().to_string(),
        dtype_word(config.model.dtype),
    );

    let metrics = Arc::new(Metrics::new(metrics_setup(&config, &serves)));
    let audit = crate::audit::start(&config.paths.state_dir, &config.audit, Arc::clone(&metrics)).await?;
    let keys = crate::keys::KeyStore::start(&config.server.api_keys, &audit).await?;
    let recorder = Arc::new(Recorder::new(&config.paths.state_dir, config.metrics.flight_window));
    let traces = traces(&config)?;
    let watching = Observers { recorder: Some(Arc::clone(&recorder)), traces: traces.clone() };
    let observers = observe::observers(&metrics, &audit, &recorder);
    for (dir, reason) in &first.passed_over {
        audit.event("model.passed_over", &dir.display().to_string(), serde_json::json!({ "reason": reason }));
    }
    let source = supervisor::ModelSource {
        models: Arc::new(StoredModels),
        links: Some((first.links, first.configured.clone())),
        previous: first.previous,
    };
    let fleet = supervisor::start_with(supervisor_settings(&config), Arc::new(ReexecWorker), observers, spec, source);

    let kept = audit.clone();
    let http = crate::http::build(&config, &fleet, &metrics, &watching, &keys);
    let queue = if socket_outlives_us { listen::Queue::Inherited } else { listen::Queue::Ours };
    let front = listen::Front::start(api, uds, queue, &http)
        .map_err(|source| StartError::System { what: "the API can not be served", source })?;
    let control = crate::admin::Control::new(crate::admin::Parts {
        config,
        sources,
        fleet: fleet.clone(),
        metrics,
        recorder,
        audit,
        keys,
        log: logging.control().clone(),
        listening: vec![url(address)],
        started,
        configured: first.configured,
    });
    control.follow({
        let http = Arc::clone(&http);
        move |config| {
            http.apply(config);
            kept.keep(&config.audit);
        }
    });
    control.follow({
        let fleet = fleet.clone();
        move |config| {
            let (fleet, settings) = (fleet.clone(), supervisor_settings(config));
            tokio::spawn(async move { fleet.configure(settings).await });
        }
    });
    swap::follow(&control, &fleet);
    tokio::spawn(crate::http::responses::background::resume(Arc::clone(&http)));
    tokio::spawn(crate::http::batches::run(Arc::clone(&http)));
    crate::admin::watch_disk(&control);
    crate::admin::serve(admin_socket, &control)
        .map_err(|source| StartError::System { what: "the admin socket can not be served", source })?;
    Ok(life::Daemon {
        signals,
        milestones,
        fleet,
        http,
        front,
        socket_outlives_us,
        control,
        url: url(address),
        traces,
        _state_lock: state_lock,
    })
}

/// Reads the model to start with. Its folder is compared with its manifest, but for the weights: those are hashed while they
/// are loaded. A folder without a manifest is served; a swap to one has to say so.
async fn first_model(config: &Config, model_dir: &Path) -> Result<first::First, StartError> {
    let (config, model_dir) = (config.clone(), model_dir.to_owned());
    let lost = |e| StartError::System { what: "the model could not be read", source: std::io::Error::other(e) };
    tokio::task::spawn_blocking(move || first::choose(&config, &model_dir)).await.map_err(lost)?
}

/// The exporter of spans, if an endpoint is given.
fn traces(config: &Config) -> Result<Option<Arc<Traces>>, TracesError> {
    let Some(endpoint) = &config.traces.endpoint else { return Ok(None) };
    let (ratio, steps) = (f64::from(config.traces.sample_ratio), config.traces.steps);
    Ok(Some(Arc::new(Traces::start(endpoint, ratio, steps)?)))
}

/// Makes the folder and locks it; the lock lives as long as the file that is returned.
fn state_dir(path: &Path) -> Result<std::fs::File, StartError> {
    let fail = |source| StartError::StateDir { path: path.to_owned(), source };
    std::fs::create_dir_all(path).map_err(fail)?;
    let lock =
        std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock")).map_err(fail)?;
    match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::StateDirTaken { path: path.to_owned() }),
        Err(e) => Err(fail(e.into())),
    }
}

fn deployment(config: &Config, first: &first::First) -> DeploymentSpec {
    let (verified, text) = (&first.verified, &first.text);
    let load = Load {
        model_dir: verified.dir().to_owned(),
        dtype: config.model.dtype,
        quantization: config.model.quantization,
        kv_dtype: config.engine.kv_dtype,
        max_model_len: config.model.max_model_len,
        max_num_seqs: config.engine.max_num_seqs,
        max_num_batched_tokens: config.engine.max_num_batched_tokens,
        kv_cache_bytes: config.engine.kv_cache_bytes,
        memory_bytes: memory_bytes(config),
        max_prefill_chunk: config.engine.max_prefill_chunk,
        swap: swap::now(&config.swap, false),
        swap_disk: swap::disk(config),
        fair_share: config.engine.fair_share,
        aging_tokens: config.engine.aging_tokens,
        manifest: verified.manifest().map(Manifest::to_wire).unwrap_or_default(),
        enable_prefix_caching: config.engine.enable_prefix_caching,
        threads: config.engine.threads,
        pin_threads: config.engine.pin_threads,
        seed: config.engine.seed,
        swap_space_bytes: config.engine.swap_space_bytes,
        vocabulary: Arc::new(text.vocabulary()),
    };
    DeploymentSpec {
        served_names: first.served_names.clone(),
        revision: verified.revision().to_owned(),
        model_dir: verified.dir().to_owned(),
        text: Arc::clone(text),
        load,
        workers: config.workers.count,
    }
}

/// What the daemon takes for itself under load, and a worker beside weights, workspace and KV: stacks, vocabulary, buffers.
const DAEMON_BYTES: u64 = 64 << 20;
const WORKER_BYTES: u64 = 32 << 20;

/// What one worker may use for weights, workspace and KV: the configured share of the limit, split evenly. Where the rest is
/// too little for everything else, in a small cgroup, that comes first.
fn memory_bytes(config: &Config) -> u64 {
    let workers = u64::from(config.workers.count.max(1));
    worker_share(memory::limit_bytes().unwrap_or(0), config.engine.memory_fraction, workers)
}

fn worker_share(limit: u64, fraction: f32, workers: u64) -> u64 {
    let share = (limit as f64 * f64::from(fraction)) as u64;
    share.min(limit.saturating_sub(DAEMON_BYTES + workers * WORKER_BYTES)) / workers
}

fn supervisor_settings(config: &Config) -> SupervisorSettings {
    let (w, r) = (&config.workers, &config.rollout);
    let under_way = config.limits.max_queued_requests as usize + (config.engine.max_num_seqs * w.count) as usize;
    SupervisorSettings {
        // Admission bounds what clients have under way; a candidate's smoke prompts must find room beside them.
        requests_max: under_way + SMOKE_PROMPTS_MAX,
        liveness: LivenessSettings {
            ping_interval: w.ping_interval,
            load_timeout: w.load_timeout,
            stall_timeout: w.stall_timeout,
            ..LivenessSettings::default()
        },
        restart: RestartSettings {
            backoff: w.restart_backoff,
            backoff_max: w.restart_backoff_max,
            crash_loop_deaths: w.crash_loop_deaths,
            window: w.crash_loop_window,
        },
        poison: PoisonSettings::default(),
        rollout: RolloutTimeouts {
            verify: r.verify_timeout,
            clear: r.clear_timeout,
            load: r.load_timeout,
            probe: r.probe_timeout,
            restore: r.restore_timeout,
        },
        soak: SoakRules {
            error_rate_more: r.rules.error_rate_more,
            first_token_times: r.rules.first_token_times,
            next_token_times: r.rules.next_token_times,
            idle_experts_more: r.rules.idle_experts_more,
            requests_min: u64::from(r.rules.requests_min),
        },
        probe_slowdown_max: r.rules.probe_slowdown_max,
        memory_limit: memory::limit_bytes().map(|_| memory_bytes(config) * u64::from(w.count.max(1))),
        ..SupervisorSettings::default()
    }
}

fn metrics_setup(config: &Config, model_dir: &Path) -> MetricsSetup {
    // The token buckets need the longest sequence before anything is loaded; the checkpoint's own limit is one key of its
    // config. A folder that has none is refused by the worker with a better sentence.
    let checkpoint = std::fs::read(model_dir.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok())
        .and_then(|c| c["max_position_embeddings"].as_u64())
        .and_then(|n| u32::try_from(n).ok());
    MetricsSetup {
        model_name: config.model.served_names[0].clone(),
        engines: config.workers.count,
        max_model_len: config.model.max_model_len.or(checkpoint).unwrap_or(131_072),
        max_num_batched_tokens: config.engine.max_num_batched_tokens,
        cache: CacheSettings {
            enable_prefix_caching: config.engine.enable_prefix_caching,
            gpu_memory_utilization: config.engine.memory_fraction.to_string(),
            cache_dtype: kv_dtype_word(config.engine.kv_dtype).to_owned(),
            swap_space: (config.engine.swap_space_bytes as f64 / f64::from(1 << 30)).to_string(),
        },
        legacy_names: config.metrics.legacy_names,
    }
}

fn dtype_word(dtype: ernie_proto::worker::Dtype) -> &'static str {
    match dtype {
        ernie_proto::worker::Dtype::Auto => "auto",
        ernie_proto::worker::Dtype::Bfloat16 => "bfloat16",
        ernie_proto::worker::Dtype::Float32 => "float32",
    }
}

fn kv_dtype_word(dtype: ernie_proto::worker::KvDtype) -> &'static str {
    match dtype {
        ernie_proto::worker::KvDtype::Auto => "auto",
        ernie_proto::worker::KvDtype::Bfloat16 => "bfloat16",
        ernie_proto::worker::KvDtype::Int8 => "int8",
    }
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

#[cfg(test)]
mod tests {
    use super::worker_share;

    #[test]
    fn in_a_small_cgroup_the_daemon_comes_before_kv() {
        assert_eq!(worker_share(10 << 30, 0.5, 2), (10 << 30) / 4);
        assert_eq!(worker_share(256 << 20, 0.9, 1), (256 - 64 - 32) << 20);
        assert_eq!(worker_share(256 << 20, 0.9, 2), (256 - 64 - 2 * 32) << 19);
        assert_eq!(worker_share(64 << 20, 0.9, 1), 0, "then the load is refused with figures");
    }
}
