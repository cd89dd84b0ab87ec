//! Every setting, once: its key in the file, its flag, its environment variable, its default, what a change needs.
//!
//! The command line, the file reader, `check-config`, `config show --origin`, the example file and the reference in docs/
//! are all made from this table. What a value means is `resolve`'s business.

/// What a changed value needs to take effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Applied by a reload, at once.
    Live,
    /// A reload rolls the model out.
    Model,
    /// The workers have to load the model again.
    Workers,
    /// Only a restart of the daemon.
    Daemon,
}

/// How a flag is written and how its help reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `--flag`, `--no-flag`, `--flag=true`.
    Switch,
    /// One value; the word names it in the help.
    Value(&'static str),
    /// Several values; repeated flags, commas in the environment, an array in the file.
    List(&'static str),
    /// As `List`, never shown.
    SecretList(&'static str),
}

/// One row.
#[derive(Debug)]
pub struct Setting {
    /// `section.name` in the file.
    pub key: &'static str,
    /// Long flag without dashes; the environment variable is `ERNIED_` and the flag in capitals.
    pub flag: &'static str,
    pub kind: Kind,
    /// As it would be written; empty: not set.
    pub default: &'static str,
    pub change: Change,
    pub help: &'static str,
}

impl Setting {
    pub fn env(&self) -> String {
        format!("ERNIED_{}", self.flag.replace('-', "_").to_uppercase())
    }

    pub fn secret(&self) -> bool {
        matches!(self.kind, Kind::SecretList(_))
    }
}

/// The row of a key.
pub fn by_key(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|s| s.key == key)
}

macro_rules! settings {
    ($($key:literal $flag:literal $kind:expr, $default:literal, $change:ident, $help:literal;)*) => {
        &[$(Setting { key: $key, flag: $flag, kind: $kind, default: $default, change: Change::$change, help: $help }),*]
    };
}

use Kind::{List, SecretList, Switch, Value};

/// In the order of the example file.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = settings! {
    "server.host" "host" Value("ADDRESS"), "127.0.0.1", Daemon, "address to listen on; 0.0.0.0 or :: for every interface";
    "server.port" "port" Value("PORT"), "8000", Daemon, "TCP port of the API; 0 lets the system choose";
    "server.uds" "uds" Value("PATH"), "", Daemon, "serve the API on this Unix socket as well";
    "server.api_keys" "api-key" SecretList("KEY"), "", Live, "accept this key; may be repeated (named keys with limits: ernie-ctl key create)";
    "server.api_key_file" "api-key-file" Value("PATH"), "", Live, "read keys from this file, one a line (systemd: LoadCredential)";
    "server.error_style" "error-style" Value("vllm|openai"), "vllm", Live, "error.code as the HTTP status (vllm) or as a word (openai)";
    "server.allowed_origins" "allowed-origins" List("ORIGIN"), "", Daemon, "origins that browsers may call from";
    "server.max_body" "max-body" Value("SIZE"), "32MiB", Daemon, "largest request body";
    "server.drain_timeout" "drain-timeout" Value("DURATION"), "30s", Live, "how long SIGTERM lets running requests go on";
    "server.lame_duck" "lame-duck" Value("DURATION"), "0s", Live, "how long new requests are still taken after readiness was withdrawn";
    "server.request_timeout" "request-timeout" Value("DURATION"), "", Live, "end a request that takes longer";
    "server.keep_alive" "keep-alive" Value("DURATION"), "10s", Live, "pause after which a silent stream gets a comment, so that nobody gives it up";
    "server.header_timeout" "header-timeout" Value("DURATION"), "30s", Daemon, "how long a client may take for the headers of a request, and how long an idle connection is kept";
    "server.body_timeout" "body-timeout" Value("DURATION"), "30s", Live, "how long a client may take for a body";
    "server.strict_requests" "strict-requests" Switch, "false", Live, "refuse request fields that nobody knows instead of ignoring them";
    "server.unready_on_zero_experts" "unready-on-zero-experts" Switch, "false", Live, "withdraw readiness when a MoE layer had a token without an active expert, until another model serves";
    "server.reasoning_content" "reasoning-content" Switch, "true", Live, "give thinking under its older name reasoning_content as well";

    "model.path" "model" Value("DIR"), "", Model, "folder of the model: config.json, *.safetensors, tokenizer.json";
    "model.demo" "demo" Switch, "false", Daemon, "serve the small demo model that is part of this executable";
    "model.served_names" "served-model-name" List("NAME"), "", Daemon, "names under which the model is served; the first is the one shown";
    "model.tokenizer" "tokenizer" Value("DIR"), "", Daemon, "take tokenizer and chat template from this folder instead of the model's";
    "model.dtype" "dtype" Value("auto|bfloat16|float32"), "auto", Workers, "number type of weights in memory; auto follows the checkpoint";
    "model.quantization" "quantization" Value("none|int8|int4"), "none", Workers, "weight form in memory";
    "model.max_model_len" "max-model-len" Value("TOKENS"), "", Workers, "longest sequence, prompt and answer together; default: the checkpoint's limit";

    "engine.max_num_seqs" "max-num-seqs" Value("N"), "256", Workers, "most sequences in one step";
    "engine.max_num_batched_tokens" "max-num-batched-tokens" Value("N"), "2048", Workers, "most tokens in one step";
    "engine.max_prefill_chunk" "max-prefill-chunk" Value("N"), "", Workers, "most prompt tokens in a step that also carries answers; default: as many as make a step of 80 ms, or of three times a step without prompt";
    "engine.memory_utilization" "gpu-memory-utilization" Value("FRACTION"), "0.9", Workers, "share of the memory limit that weights, workspace and KV may take together";
    "engine.kv_cache" "kv-cache-bytes" Value("SIZE"), "", Workers, "memory for KV blocks; default: chosen from free memory";
    "engine.kv_cache_dtype" "kv-cache-dtype" Value("auto|bfloat16|int8"), "auto", Workers, "number type of K and V; auto: as the weights compute; int8: half the memory of bfloat16";
    "engine.swap_space" "swap-space" Value("GIB"), "0", Workers, "host memory for KV of preempted sequences; a bare number is GiB, as in vLLM";
    "engine.prefix_caching" "enable-prefix-caching" Switch, "true", Workers, "share KV of equal prompt beginnings";
    "engine.threads" "threads" Value("N"), "0", Workers, "compute threads per worker; 0: one per core";
    "engine.pin_threads" "pin-threads" Switch, "false", Workers, "pin compute threads to cores";
    "engine.seed" "seed" Value("N"), "0", Workers, "seed of requests that bring none";

    "engine.fair_share" "fair-share" Switch, "true", Workers, "give API keys equal shares of the tokens while they compete, instead of first come, first served";
    "engine.priority_aging" "priority-aging" Value("TOKENS"), "262144", Workers, "a request of low priority that has waited while so many tokens were computed goes first; 0: never";

    "swap.policy" "swap-policy" Value("off|on-pressure|always|window"), "on-pressure", Live, "what is copied to the swap space: nothing, KV of preempted sequences, evicted prefixes too, or both within swap.window only";
    "swap.window" "swap-window" Value("HH:MM-HH:MM"), "", Live, "time of day (UTC) in which policy window is always; outside it is off";
    "swap.restore" "swap-restore" Value("auto|swap|recompute"), "auto", Live, "how a preempted sequence comes back: the cheaper way as measured, always copies, never copies";
    "swap.sequence_share" "swap-sequence-share" Value("FRACTION"), "1", Live, "share of the swap space that one preempted sequence may take";
    "swap.high_watermark" "swap-high-watermark" Value("FRACTION"), "0.95", Live, "evicted prefixes are taken up to this share of the swap space";
    "swap.low_watermark" "swap-low-watermark" Value("FRACTION"), "0.85", Live, "and make room down to this one when it is reached";
    "swap.disk_space" "swap-disk-space" Value("GIB"), "0", Workers, "file below the swap space in memory, per worker; a bare number is GiB";
    "swap.disk_dir" "swap-disk-dir" Value("DIR"), "", Workers, "folder of that file, on a fast disk; default: swap/ in the state directory";
    "swap.memory_floor" "swap-memory-floor" Value("SIZE"), "256MiB", Live, "with less host memory available than this, swapping is off until there is twice as much";

    "workers.count" "workers" Value("N"), "1", Daemon, "worker processes, each with its own copy of the model";
    "workers.stall_timeout" "stall-timeout" Value("DURATION"), "10s", Live, "a worker with work and without progress for this long is replaced";
    "workers.load_timeout" "load-timeout" Value("DURATION"), "90s", Live, "loading without a byte of progress for this long is a failure";
    "workers.ping_interval" "ping-interval" Value("DURATION"), "500ms", Live, "how often a worker has to show that its loop turns";
    "workers.restart_backoff" "restart-backoff" Value("DURATION"), "200ms", Live, "pause before the first restart; doubles with every death";
    "workers.restart_backoff_max" "restart-backoff-max" Value("DURATION"), "30s", Live, "longest pause before a restart";
    "workers.crash_loop_deaths" "crash-loop-deaths" Value("N"), "5", Live, "that many deaths within the window make a crash loop";
    "workers.crash_loop_window" "crash-loop-window" Value("DURATION"), "60s", Live, "window of the crash-loop count";

    "rollout.observe" "rollout-observe" Value("DURATION"), "10m", Live, "how long a new model serves while the old one stays warm, unless the swap says otherwise";
    "rollout.watch" "watch-model" Switch, "false", Daemon, "watch model folder and configuration file: a complete and sealed new revision is rolled out by itself, a changed file reloaded";
    "rollout.hold" "rollout-hold" Value("DURATION"), "60s", Live, "how long a request waits for a model that is being loaded (first load, stop-first) before it is refused with 503";
    "rollout.error_rate_more" "rollout-error-rate-more" Value("FRACTION"), "0.05", Live, "roll back when the new model's share of failed requests is above the old one's by more than this";
    "rollout.first_token_times" "rollout-first-token-times" Value("TIMES"), "5", Live, "roll back when first tokens take more than this many times as long as before";
    "rollout.next_token_times" "rollout-next-token-times" Value("TIMES"), "3", Live, "roll back when tokens are more than this many times as far apart as before";
    "rollout.idle_experts_more" "rollout-idle-experts-more" Value("FRACTION"), "0.25", Live, "roll back when the share of experts without a token is above the old model's by more than this";
    "rollout.requests_min" "rollout-requests-min" Value("N"), "20", Live, "requests that must have ended before rates and times are judged";
    "rollout.probe_slowdown_max" "rollout-probe-slowdown-max" Value("TIMES"), "3", Live, "a new model that takes this many times as long per token as the serving one does not pass its probes";
    "rollout.verify_timeout" "rollout-verify-timeout" Value("DURATION"), "10m", Live, "longest verification of a new model's files";
    "rollout.clear_timeout" "rollout-clear-timeout" Value("DURATION"), "5m", Live, "stop-first: how long the old model's running requests may take";
    "rollout.load_timeout" "rollout-load-timeout" Value("DURATION"), "1h", Live, "longest load of a new model; one without progress ends after workers.load_timeout";
    "rollout.probe_timeout" "rollout-probe-timeout" Value("DURATION"), "2m", Live, "longest time for a new model's smoke prompts";
    "rollout.restore_timeout" "rollout-restore-timeout" Value("DURATION"), "1h", Live, "stop-first: longest time for loading the old model again";

    "limits.max_queued_requests" "max-num-queued-reqs" Value("N"), "1024", Live, "requests that may wait; more are refused with 503";
    "limits.max_queued_tokens" "max-num-queued-tokens" Value("N"), "4194304", Live, "prompt tokens that may wait; more are refused with 503";
    "limits.max_choices" "max-choices" Value("N"), "16", Live, "largest n of a request";
    "limits.max_logprobs" "max-logprobs" Value("N"), "20", Live, "most alternatives per token";
    "limits.stored_responses" "stored-responses" Value("N"), "10000", Live, "responses of /v1/responses that are kept for later; the oldest go first";
    "limits.truncate_history" "truncate-history" Value("TOKENS"), "", Live, "leave out the oldest turns of longer chats; requests may ask for their own bound";

    "logging.format" "log-format" Value("text|json|vllm|bracket"), "text", Daemon, "shape of log lines";
    "logging.level" "log-level" Value("LEVEL"), "info", Live, "error, warn, info, debug, trace, or directives such as info,ernied::supervisor=debug";
    "logging.file" "log-file" Value("PATH"), "", Daemon, "write the log to this file as well";
    "logging.rotate_size" "log-rotate-size" Value("SIZE"), "64MiB", Daemon, "begin a new log file at this size";
    "logging.rotate_every" "log-rotate-every" Value("DURATION"), "", Daemon, "begin a new log file when this much time has passed, counted from midnight: 1h, 24h";
    "logging.rotate_keep" "log-rotate-keep" Value("N"), "8", Daemon, "old log files kept";
    "logging.total_size" "log-total-size" Value("SIZE"), "1GiB", Daemon, "all log files together; the oldest go first";
    "logging.compress" "log-compress" Switch, "true", Daemon, "gzip old log files";
    "logging.requests" "log-requests" Switch, "true", Live, "one line per finished request (never its text)";
    "logging.slow_request" "log-slow-request" Value("DURATION"), "", Live, "a warning for each request that takes longer";
    "logging.stats" "log-stats" Switch, "true", Live, "a line of averages every ten seconds while not idle";

    "metrics.legacy_names" "legacy-metric-names" Switch, "false", Daemon, "also export vllm:request_success_count";
    "metrics.flight_window" "flight-window" Value("DURATION"), "15m", Daemon, "how far the flight recorder reaches back (ernie-ctl debug dump; written by itself when a worker is lost)";

    "traces.endpoint" "otlp-traces-endpoint" Value("URL"), "", Daemon, "send spans of requests to this OTLP/HTTP collector, http://127.0.0.1:4318";
    "traces.sample_ratio" "otlp-traces-sample-ratio" Value("FRACTION"), "1", Daemon, "share of the requests that is traced; callers that send traceparent decide themselves";
    "traces.steps" "otlp-traces-steps" Switch, "true", Daemon, "a span for each engine step that computed a traced request, linked from the request's prefill and decode";

    "admin.socket" "admin-socket" Value("PATH"), "", Daemon, "control socket of ernie-ctl; default: admin.sock in the runtime directory";
    "admin.socket_mode" "admin-socket-mode" Value("0600|0660"), "0600", Daemon, "permissions of the control socket";
    "admin.admin_uids" "admin-uids" List("UID"), "", Live, "users that may change things, besides root and the daemon's own";
    "admin.operator_gids" "operator-gids" List("GID"), "", Live, "groups that may drain, reload and swap";
    "admin.viewer_gids" "viewer-gids" List("GID"), "", Live, "groups that may look";

    "audit.retention" "audit-retention" Value("DURATION"), "", Live, "drop audit rows older than this, leaving a signed-off checkpoint";
    "audit.max_size" "audit-max-size" Value("SIZE"), "", Live, "drop the oldest audit rows above this size";

    "paths.state_dir" "state-dir" Value("DIR"), "", Daemon, "holds everything the daemon writes; default: systemd's, else XDG's";
    "paths.runtime_dir" "runtime-dir" Value("DIR"), "", Daemon, "sockets; default: systemd's, else XDG's, else run/ in the state directory";
};

/// Flags of vLLM that are taken so that existing command lines start, and what they do here.
#[derive(Debug)]
pub struct Compat {
    pub flag: &'static str,
    pub kind: Kind,
    pub effect: Effect,
    pub help: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The same as a setting with this value.
    Sets(&'static str, &'static str),
    /// The same as a setting, with the value given.
    Renamed(&'static str),
    /// Accepted with this notice at start.
    Nothing(&'static str),
    /// Only this value is possible; the notice says what to use instead.
    Only(&'static str, &'static str),
}

#[rustfmt::skip]
pub const COMPAT: &[Compat] = &[
    Compat { flag: "disable-log-stats", kind: Switch, effect: Effect::Sets("logging.stats", "false"), help: "no line of averages" },
    Compat { flag: "disable-log-requests", kind: Switch, effect: Effect::Sets("logging.requests", "false"), help: "no line per request" },
    Compat { flag: "awq-ckpt-path", kind: Value("DIR"), effect: Effect::Renamed("model.path"), help: "another word for --model" },
    Compat { flag: "enforce-eager", kind: Switch, effect: Effect::Nothing("there is no graph capture here; every step is eager already"), help: "accepted: every step is eager" },
    Compat { flag: "trust-remote-code", kind: Switch, effect: Effect::Nothing("no code from a model folder is ever run"), help: "accepted: code in a model folder is never run" },
    Compat { flag: "block-size", kind: Value("N"), effect: Effect::Only("16", "KV blocks have 16 tokens"), help: "only 16" },
    Compat { flag: "tensor-parallel-size", kind: Value("N"), effect: Effect::Only("1", "a model is not split over processes here; use --workers N for N copies behind one port"), help: "only 1; see --workers" },
    Compat { flag: "pipeline-parallel-size", kind: Value("N"), effect: Effect::Only("1", "a model is not split over processes here; use --workers N for N copies behind one port"), help: "only 1; see --workers" },
];
