//! Raw values to [`Config`]: every value is checked, every error reported.

use super::layers::{Layers, Origin, Raw};
use super::settings::by_key;
use super::{
    AdminConfig, AuditConfig, Config, ConfigError, ConfigErrors, EngineConfig, ErrorStyle, LimitsConfig, LogFormat,
    LoggingConfig, MetricsConfig, ModelConfig, ModelSource, PathsConfig, RolloutConfig, RolloutRules, Secret,
    ServerConfig, SwapChoice, SwapConfig, TracesConfig, WorkersConfig, parse,
};
use ernie_proto::worker::{Dtype, KvDtype, Quantization, SwapPolicy, SwapRestore};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What the resolver may know of the surroundings, as values: systemd's and XDG's folders.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    pub state_directory: Option<PathBuf>,
    pub runtime_directory: Option<PathBuf>,
    pub xdg_state_home: Option<PathBuf>,
    pub xdg_runtime_dir: Option<PathBuf>,
    pub home: Option<PathBuf>,
}

impl Environment {
    /// From the process's environment.
    pub fn of_process() -> Self {
        let dir = |name: &str| {
            let value = std::env::var(name).ok().filter(|v| !v.is_empty())?;
            // systemd separates several folders by colons; the first is ours.
            value.split(':').next().map(PathBuf::from)
        };
        Self {
            state_directory: dir("STATE_DIRECTORY"),
            runtime_directory: dir("RUNTIME_DIRECTORY"),
            xdg_state_home: dir("XDG_STATE_HOME"),
            xdg_runtime_dir: dir("XDG_RUNTIME_DIR"),
            home: dir("HOME"),
        }
    }

    fn state_dir(&self) -> Option<PathBuf> {
        self.state_directory
            .clone()
            .or_else(|| self.xdg_state_home.as_ref().map(|d| d.join("ernied")))
            .or_else(|| self.home.as_ref().map(|d| d.join(".local/state/ernied")))
    }

    fn runtime_dir(&self) -> Option<PathBuf> {
        self.runtime_directory.clone().or_else(|| self.xdg_runtime_dir.as_ref().map(|d| d.join("ernied")))
    }
}

/// Checks all values; the configuration, or everything that is wrong with it.
pub fn resolve(
    layers: &Layers,
    environment: &Environment,
    config_file: Option<PathBuf>,
) -> Result<Config, ConfigErrors> {
    let mut r = Resolver { layers, errors: Vec::new() };
    let paths = r.paths(environment, config_file);
    let config = Config {
        server: r.server(),
        model: r.model(),
        engine: r.engine(),
        swap: r.swap(),
        workers: r.workers(),
        rollout: r.rollout(),
        limits: LimitsConfig {
            max_queued_requests: r.u32("limits.max_queued_requests", 1, 1_000_000),
            max_queued_tokens: r.integer("limits.max_queued_tokens", 1, u64::MAX),
            max_choices: r.u32("limits.max_choices", 1, 1024),
            max_logprobs: r.u32("limits.max_logprobs", 0, 1000),
            stored_responses: r.u32("limits.stored_responses", 1, 1_000_000),
            truncate_history: r
                .optional("limits.truncate_history", |t| parse::integer(t, 1, 1 << 30).map(|n| n as u32)),
        },
        logging: r.logging(),
        metrics: MetricsConfig {
            legacy_names: r.bool("metrics.legacy_names"),
            flight_window: r.duration("metrics.flight_window"),
        },
        traces: TracesConfig {
            endpoint: r.optional("traces.endpoint", |t| {
                let host = t.strip_prefix("http://").unwrap_or_default();
                if host.is_empty() {
                    Err("expected an http:// URL (put TLS in a collector beside us)".to_owned())
                } else {
                    Ok(t.to_owned())
                }
            }),
            sample_ratio: r.value("traces.sample_ratio", 1.0, parse::fraction),
            steps: r.bool("traces.steps"),
        },
        admin: r.admin(&paths),
        audit: AuditConfig {
            retention: r.optional("audit.retention", parse::duration),
            max_bytes: r.optional("audit.max_size", |t| parse::size(t, 1)),
        },
        paths,
    };
    r.across(&config);
    if r.errors.is_empty() { Ok(config) } else { Err(ConfigErrors(r.errors)) }
}

struct Resolver<'a> {
    layers: &'a Layers,
    errors: Vec<ConfigError>,
}

impl Resolver<'_> {
    fn server(&mut self) -> ServerConfig {
        let mut api_keys: Vec<Secret> = self.list("server.api_keys").into_iter().map(Secret::new).collect();
        if let Some(path) = self.path("server.api_key_file") {
            match std::fs::read_to_string(&path) {
                Ok(text) => {
                    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
                    api_keys.extend(lines.map(|l| Secret::new(l.to_owned())));
                }
                Err(e) => {
                    self.refuse("server.api_key_file", format!("can not be read: {e}"), "check path and permissions")
                }
            }
        }
        if let Some(short) = api_keys.iter().find(|k| k.expose().len() < 8) {
            let message = format!("one of the keys has only {} characters", short.expose().len());
            self.refuse("server.api_keys", message, "use at least 8, better `openssl rand -hex 32`");
        }
        ServerConfig {
            host: self.value("server.host", IpAddr::from([127, 0, 0, 1]), |t| match t {
                "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
                "*" => Ok(IpAddr::from([0, 0, 0, 0])),
                t => t
                    .trim_matches(['[', ']'])
                    .parse()
                    .map_err(|_| "expected an IP address such as 127.0.0.1, 0.0.0.0 or ::1, or localhost".to_owned()),
            }),
            port: self.value("server.port", 0, |t| parse::integer(t, 0, 65_535).map(|n| n as u16)),
            uds: self.path("server.uds"),
            api_keys,
            error_style: self
                .choice("server.error_style", &[("vllm", ErrorStyle::Vllm), ("openai", ErrorStyle::Openai)]),
            allowed_origins: self.list("server.allowed_origins"),
            max_body_bytes: self.value("server.max_body", 0, |t| parse::size(t, 1)),
            drain_timeout: self.duration("server.drain_timeout"),
            lame_duck: self.duration("server.lame_duck"),
            request_timeout: self.optional("server.request_timeout", parse::duration),
            keep_alive: self.duration("server.keep_alive"),
            header_timeout: self.duration("server.header_timeout"),
            body_timeout: self.duration("server.body_timeout"),
            strict_requests: self.bool("server.strict_requests"),
            unready_on_zero_experts: self.bool("server.unready_on_zero_experts"),
            reasoning_content: self.bool("server.reasoning_content"),
        }
    }

    fn model(&mut self) -> ModelConfig {
        let dir = self.path("model.path");
        let demo = self.bool("model.demo");
        let source = match (dir, demo) {
            (Some(dir), false) => ModelSource::Dir(dir),
            (None, true) => ModelSource::Demo,
            (Some(dir), true) => {
                let message = format!("a model is given as well ({})", dir.display());
                self.refuse("model.demo", message, "give either a model folder or --demo");
                ModelSource::Demo
            }
            (None, false) => {
                self.refuse(
                    "model.path",
                    "no model is given".to_owned(),
                    "`ernied serve DIR` serves the model in that folder, `ernied serve --demo` the built-in demo model",
                );
                ModelSource::Demo
            }
        };
        let mut served_names = self.list("model.served_names");
        if let Some(bad) = served_names.iter().find(|n| n.is_empty() || n.chars().any(char::is_control)) {
            let message = format!("{bad:?} can not be a name");
            self.refuse("model.served_names", message, "names are printable and not empty");
        }
        if served_names.is_empty() {
            served_names = default_names(&source);
        }
        ModelConfig {
            source,
            served_names,
            tokenizer: self.path("model.tokenizer"),
            dtype: self.value("model.dtype", Dtype::Auto, |t| match t {
                "auto" => Ok(Dtype::Auto),
                "bfloat16" | "bf16" => Ok(Dtype::Bfloat16),
                "float32" | "float" | "fp32" => Ok(Dtype::Float32),
                "float16" | "half" => Err("float16 is not computed with here; auto keeps what the checkpoint has, \
                                           bfloat16 takes the same memory"
                    .to_owned()),
                _ => Err("expected auto, bfloat16 or float32".to_owned()),
            }),
            quantization: self.value("model.quantization", Quantization::None, |t| match t {
                "none" => Ok(Quantization::None),
                "int8" => Ok(Quantization::Int8),
                "int4" => Ok(Quantization::Int4),
                "awq" | "gptq" | "fp8" => Err(format!(
                    "{t} checkpoints can not be loaded yet; int8 or int4 quantises an \
                                                       unquantised checkpoint while it loads"
                )),
                _ => Err("expected none, int8 or int4".to_owned()),
            }),
            max_model_len: self.optional("model.max_model_len", |t| {
                // vLLM takes 4k and 4K as well.
                let text = t.strip_suffix(['k', 'K']).map(|n| format!("{n}000")).unwrap_or_else(|| t.to_owned());
                parse::integer(&text, 16, 10_000_000).map(|n| n as u32)
            }),
        }
    }

    fn engine(&mut self) -> EngineConfig {
        EngineConfig {
            max_num_seqs: self.u32("engine.max_num_seqs", 1, 4096),
            max_num_batched_tokens: self.u32("engine.max_num_batched_tokens", 16, 1 << 20),
            max_prefill_chunk: self
                .optional("engine.max_prefill_chunk", |t| parse::integer(t, 1, 1 << 20).map(|n| n as u32)),
            memory_fraction: self.value("engine.memory_utilization", 0.9, parse::fraction),
            kv_cache_bytes: self.optional("engine.kv_cache", |t| parse::size(t, 1)),
            kv_dtype: self.value("engine.kv_cache_dtype", KvDtype::Auto, |t| match t {
                "auto" => Ok(KvDtype::Auto),
                "bfloat16" | "bf16" => Ok(KvDtype::Bfloat16),
                "int8" => Ok(KvDtype::Int8),
                _ if t.starts_with("fp8") => Err(format!("{t} is not computed with here; int8 takes the same memory")),
                _ => Err("expected auto, bfloat16 or int8".to_owned()),
            }),
            swap_space_bytes: self.value("engine.swap_space", 0, |t| parse::size(t, 1 << 30)),
            enable_prefix_caching: self.bool("engine.prefix_caching"),
            threads: self.u32("engine.threads", 0, 1024),
            pin_threads: self.bool("engine.pin_threads"),
            seed: self.integer("engine.seed", 0, u64::MAX),
            fair_share: self.bool("engine.fair_share"),
            aging_tokens: self.integer("engine.priority_aging", 0, u64::MAX),
        }
    }

    fn swap(&mut self) -> SwapConfig {
        let window = self.optional("swap.window", parse::window);
        let policy = self.choice(
            "swap.policy",
            &[
                ("on-pressure", SwapChoice::Fixed(SwapPolicy::OnPressure)),
                ("off", SwapChoice::Fixed(SwapPolicy::Off)),
                ("always", SwapChoice::Fixed(SwapPolicy::Always)),
                ("window", SwapChoice::Window),
            ],
        );
        if policy == SwapChoice::Window && window.is_none() {
            let message = "is window, but there is no window".to_owned();
            self.refuse("swap.policy", message, "set swap.window to a time of day such as 09:00-12:30");
        }
        let swap = SwapConfig {
            policy,
            window,
            restore: self.choice(
                "swap.restore",
                &[("auto", SwapRestore::Auto), ("swap", SwapRestore::Swap), ("recompute", SwapRestore::Recompute)],
            ),
            sequence_share: self.value("swap.sequence_share", 1.0, parse::fraction),
            high_watermark: self.value("swap.high_watermark", 0.95, parse::fraction),
            low_watermark: self.value("swap.low_watermark", 0.85, parse::fraction),
            memory_floor_bytes: self.value("swap.memory_floor", 0, |t| parse::size(t, 1)),
            disk_bytes: self.value("swap.disk_space", 0, |t| parse::size(t, 1 << 30)),
            disk_dir: self.path("swap.disk_dir"),
        };
        if swap.low_watermark > swap.high_watermark {
            let message = format!("{} is above swap.high_watermark {}", swap.low_watermark, swap.high_watermark);
            self.refuse("swap.low_watermark", message, "the low mark is below the high one");
        }
        swap
    }

    fn workers(&mut self) -> WorkersConfig {
        WorkersConfig {
            count: self.u32("workers.count", 1, 64),
            stall_timeout: self.duration("workers.stall_timeout"),
            load_timeout: self.duration("workers.load_timeout"),
            ping_interval: self.duration("workers.ping_interval"),
            restart_backoff: self.duration("workers.restart_backoff"),
            restart_backoff_max: self.duration("workers.restart_backoff_max"),
            crash_loop_deaths: self.u32("workers.crash_loop_deaths", 1, 1000),
            crash_loop_window: self.duration("workers.crash_loop_window"),
        }
    }

    fn rollout(&mut self) -> RolloutConfig {
        RolloutConfig {
            observe: self.duration("rollout.observe"),
            watch: self.bool("rollout.watch"),
            hold: self.duration("rollout.hold"),
            rules: RolloutRules {
                error_rate_more: self.value("rollout.error_rate_more", 1.0, parse::share),
                first_token_times: self.value("rollout.first_token_times", 1.0, parse::times),
                next_token_times: self.value("rollout.next_token_times", 1.0, parse::times),
                idle_experts_more: self.value("rollout.idle_experts_more", 1.0, parse::share),
                requests_min: self.u32("rollout.requests_min", 1, 1_000_000),
                probe_slowdown_max: self.value("rollout.probe_slowdown_max", 1.0, parse::times),
            },
            verify_timeout: self.duration("rollout.verify_timeout"),
            clear_timeout: self.duration("rollout.clear_timeout"),
            load_timeout: self.duration("rollout.load_timeout"),
            probe_timeout: self.duration("rollout.probe_timeout"),
            restore_timeout: self.duration("rollout.restore_timeout"),
        }
    }

    fn logging(&mut self) -> LoggingConfig {
        LoggingConfig {
            format: self.choice(
                "logging.format",
                &[
                    ("text", LogFormat::Text),
                    ("json", LogFormat::Json),
                    ("vllm", LogFormat::Vllm),
                    ("bracket", LogFormat::Bracket),
                ],
            ),
            level: self.value("logging.level", "info".to_owned(), |t| parse::level(t).map(|()| t.to_owned())),
            file: self.path("logging.file"),
            rotate_bytes: self.value("logging.rotate_size", 0, |t| {
                parse::size(t, 1)
                    .and_then(|n| if n >= 4096 { Ok(n) } else { Err("expected at least 4096 bytes".to_owned()) })
            }),
            rotate_every: self.optional("logging.rotate_every", |t| {
                let every = parse::duration(t)?;
                if every >= Duration::from_secs(60) { Ok(every) } else { Err("expected at least a minute".to_owned()) }
            }),
            rotate_keep: self.u32("logging.rotate_keep", 0, 10_000),
            total_bytes: self.optional("logging.total_size", |t| parse::size(t, 1)),
            compress: self.bool("logging.compress"),
            requests: self.bool("logging.requests"),
            slow_request: self.optional("logging.slow_request", parse::duration),
            stats: self.bool("logging.stats"),
        }
    }

    fn admin(&mut self, paths: &PathsConfig) -> AdminConfig {
        AdminConfig {
            socket: self.path("admin.socket").unwrap_or_else(|| paths.runtime_dir.join("admin.sock")),
            mode: self.value("admin.socket_mode", 0o600, parse::mode),
            admin_uids: self.ids("admin.admin_uids"),
            operator_gids: self.ids("admin.operator_gids"),
            viewer_gids: self.ids("admin.viewer_gids"),
        }
    }

    fn paths(&mut self, environment: &Environment, config_file: Option<PathBuf>) -> PathsConfig {
        let state_dir = self.path("paths.state_dir").or_else(|| environment.state_dir()).unwrap_or_else(|| {
            self.refuse(
                "paths.state_dir",
                "neither STATE_DIRECTORY nor XDG_STATE_HOME nor HOME is set".to_owned(),
                "give a folder with --state-dir DIR",
            );
            PathBuf::from("/nonexistent")
        });
        let runtime_dir = self
            .path("paths.runtime_dir")
            .or_else(|| environment.runtime_dir())
            .unwrap_or_else(|| state_dir.join("run"));
        PathsConfig { state_dir, runtime_dir, config_file }
    }

    /// What no single value can show.
    fn across(&mut self, c: &Config) {
        if c.engine.max_num_batched_tokens < c.engine.max_num_seqs {
            let message =
                format!("is below engine.max_num_seqs ({}): a step must hold a token of each", c.engine.max_num_seqs);
            self.refuse("engine.max_num_batched_tokens", message, "raise it, or lower engine.max_num_seqs");
        }
        if c.workers.restart_backoff > c.workers.restart_backoff_max {
            let message = "is above workers.restart_backoff_max".to_owned();
            self.refuse("workers.restart_backoff", message, "lower it, or raise workers.restart_backoff_max");
        }
        if c.workers.stall_timeout < c.workers.ping_interval * 2 {
            let message = "is below twice workers.ping_interval: one late answer would be a stall".to_owned();
            self.refuse("workers.stall_timeout", message, "raise it, or lower workers.ping_interval");
        }
        if c.logging.total_bytes.is_some_and(|total| total < c.logging.rotate_bytes.saturating_mul(2)) {
            let message = "is below twice logging.rotate_size: there would be no old file".to_owned();
            self.refuse("logging.total_size", message, "raise it, or lower logging.rotate_size");
        }
        // A Unix socket's path has 108 bytes in the kernel's structure, one of them the final zero.
        for (key, path) in [("admin.socket", Some(&c.admin.socket)), ("server.uds", c.server.uds.as_ref())] {
            if path.is_some_and(|p| p.as_os_str().len() > 107) {
                let message = "is longer than the 107 bytes that a Unix socket's path may have".to_owned();
                self.refuse(key, message, "choose a shorter path");
            }
        }
    }

    fn winner(&self, key: &str) -> Option<(Raw, Origin)> {
        self.layers.winner(by_key(key).expect("keys are rows of the table"))
    }

    fn refuse(&mut self, key: &str, message: String, remedy: &str) {
        let setting = by_key(key).expect("keys are rows of the table");
        let (value, origin) = match self.winner(key) {
            Some((raw, origin)) => (Some(show(&raw)), origin.to_string()),
            None => (None, "not set".to_owned()),
        };
        let value = if setting.secret() { None } else { value };
        self.errors.push(ConfigError { key: key.to_owned(), origin, value, message, remedy: remedy.to_owned() });
    }

    /// Text of a scalar. An empty text counts as not set.
    fn text(&mut self, key: &str) -> Option<String> {
        match self.winner(key)? {
            (Raw::Text(text), _) => Some(text).filter(|t| !t.is_empty()),
            (Raw::List(items), _) if items.len() == 1 => items.into_iter().next(),
            (Raw::List(_), _) => {
                self.refuse(key, "expected one value, not a list".to_owned(), "write a single value");
                None
            }
        }
    }

    fn optional<T>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        let text = self.text(key)?;
        match parse(text.trim()) {
            Ok(value) => Some(value),
            Err(expected) => {
                let setting = by_key(key).expect("keys are rows of the table");
                let remedy = match setting.default {
                    "" => "leave it out for the default".to_owned(),
                    default => format!("the default is {default}"),
                };
                self.refuse(key, expected, &remedy);
                None
            }
        }
    }

    /// `stand_in` is used only when the value is refused, so that checking goes on.
    fn value<T>(&mut self, key: &str, stand_in: T, parse: impl Fn(&str) -> Result<T, String>) -> T {
        let before = self.errors.len();
        match self.optional(key, parse) {
            Some(value) => value,
            None => {
                if self.errors.len() == before {
                    self.refuse(key, "must not be empty".to_owned(), "leave the setting out for the default");
                }
                stand_in
            }
        }
    }

    fn choice<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> T {
        let expected = || {
            let all: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
            format!("expected one of {}", all.join(", "))
        };
        self.value(key, words[0].1, |t| words.iter().find(|(w, _)| *w == t).map(|(_, v)| *v).ok_or_else(expected))
    }

    fn bool(&mut self, key: &str) -> bool {
        self.value(key, false, parse::boolean)
    }

    fn u32(&mut self, key: &str, low: u32, high: u32) -> u32 {
        // The range makes the conversion exact.
        self.value(key, low, |t| parse::integer(t, u64::from(low), u64::from(high)).map(|n| n as u32))
    }

    fn integer(&mut self, key: &str, low: u64, high: u64) -> u64 {
        self.value(key, low, |t| parse::integer(t, low, high))
    }

    fn duration(&mut self, key: &str) -> Duration {
        self.value(key, Duration::from_secs(1), parse::duration)
    }

    fn path(&mut self, key: &str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    fn list(&mut self, key: &str) -> Vec<String> {
        match self.winner(key) {
            Some((Raw::List(items), _)) => items,
            Some((Raw::Text(text), _)) if !text.is_empty() => vec![text],
            _ => Vec::new(),
        }
    }

    fn ids(&mut self, key: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for item in self.list(key) {
            match item.parse() {
                Ok(id) => ids.push(id),
                Err(_) => {
                    let message = format!("{item:?} is not a number");
                    self.refuse(key, message, "write numeric ids; `id -u NAME`, `getent group NAME` show them");
                }
            }
        }
        ids
    }
}

/// The folder's name, its lower-case form and the path as given, so that clients written for vLLM find the model.
fn default_names(source: &ModelSource) -> Vec<String> {
    match source {
        ModelSource::Demo => vec!["ernie-demo".to_owned()],
        ModelSource::Dir(dir) => {
            let given = dir.display().to_string();
            let canonical = dir.canonicalize().unwrap_or_else(|_| dir.clone());
            let base = canonical.file_name().map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned());
            let mut names = vec![base.clone()];
            for name in [base.to_lowercase(), given] {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            names
        }
    }
}

pub(super) fn show(raw: &Raw) -> String {
    match raw {
        Raw::Text(text) => text.clone(),
        Raw::List(items) => items.join(","),
    }
}
