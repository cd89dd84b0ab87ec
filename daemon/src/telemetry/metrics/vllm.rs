//! The `vllm:` families: names, labels and buckets exactly as vLLM's boards, routers and autoscalers read them.
//!
//! Never change a bucket here; finer ones are in `own`.

use super::families::Families;
use super::{CacheSettings, FinishedReason, FleetFigures, MetricsSetup, Rejection, RequestFigures};
use ernie_proto::worker::StepStats;
use prometheus::{Gauge, GaugeVec, Histogram, IntCounter, IntCounterVec};

const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const ITL: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const STEP_TOKENS: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const BASE: &[&str] = &["model_name", "engine"];

/// 1-2-5 up to and including the largest value that `max` reaches.
pub(super) fn one_two_five(max: u32) -> Vec<f64> {
    let mut buckets = Vec::new();
    let mut decade = 1u64;
    loop {
        for step in [1, 2, 5] {
            let value = decade * step;
            if value > u64::from(max.max(1)) {
                return buckets;
            }
            buckets.push(value as f64);
        }
        decade *= 10;
    }
}

/// Counters of one worker slot.
#[derive(Debug)]
struct Engine {
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    by_source_compute: IntCounter,
    by_source_cache: IntCounter,
    cached: IntCounter,
    cached_device: IntCounter,
    preemptions: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    corrupted: IntCounter,
    offload_store: IntCounter,
    offload_load: IntCounter,
    iteration_tokens: Histogram,
    running: Gauge,
    waiting: Gauge,
    waiting_capacity: Gauge,
    swapped: Gauge,
    kv_usage: Gauge,
    cpu_usage: Gauge,
    gpu_hit_rate: Gauge,
    prompt_throughput: Gauge,
    generation_throughput: Gauge,
    awake: Gauge,
}

#[derive(Debug)]
pub(super) struct Vllm {
    model_name: String,
    cache: CacheSettings,
    engines: Vec<Engine>,
    cache_config: GaugeVec,
    request_success: IntCounterVec,
    pub(super) rejections: [IntCounter; 2],
    pub(super) time_to_first_token: Histogram,
    pub(super) inter_token_latency: Histogram,
    request_time_per_output_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_generation_tokens: Histogram,
    params_max_tokens: Histogram,
    params_n: Histogram,
    prefill_computed: Histogram,
    preempted: Histogram,
    throughput: std::sync::Mutex<Vec<Throughput>>,
}

/// Ten-second means, in steps of the calls that bring them.
#[derive(Debug, Clone, Copy)]
struct Throughput {
    since: std::time::Instant,
    prompt: u64,
    generated: u64,
}

impl Vllm {
    pub(super) fn new(f: &Families, setup: &MetricsSetup) -> Self {
        let model = setup.model_name.as_str();
        let counters = EngineCounters::new(f);
        let engines = (0..setup.engines.max(1)).map(|e| counters.engine(model, &e.to_string())).collect();
        let with = |name: &str, help: &str, buckets: &[f64]| {
            f.histograms(name, help, BASE, buckets).with_label_values(&[model, "0"])
        };
        let tokens = one_two_five(setup.max_model_len);
        let request_success = f.counters(
            "vllm:request_success_total",
            "Finished requests by the way they ended. abort: the client went away; error: the engine gave up.",
            &["model_name", "engine", "finished_reason"],
        );
        for reason in FinishedReason::ALL {
            request_success.with_label_values(&[model, "0", reason.label()]);
        }
        let rejections = f.counters(
            "vllm:admission_rejections_total",
            "Requests refused with 503 because a queue bound was reached, by bound.",
            &["model_name", "reason"],
        );
        let rejections = Rejection::ALL.map(|r| rejections.with_label_values(&[model, r.label()]));
        Self {
            model_name: model.to_owned(),
            cache: setup.cache.clone(),
            engines,
            cache_config: f.gauges(
                "vllm:cache_config_info",
                "Settings of the KV cache as labels; the value is always 1.",
                &[
                    "engine",
                    "block_size",
                    "num_gpu_blocks",
                    "num_cpu_blocks",
                    "cache_dtype",
                    "enable_prefix_caching",
                    "gpu_memory_utilization",
                    "prefix_caching_hash_algo",
                    "sliding_window",
                    "swap_space",
                ],
            ),
            request_success,
            rejections,
            time_to_first_token: with(
                "vllm:time_to_first_token_seconds",
                "Arrival of a request to its first token.",
                TTFT,
            ),
            inter_token_latency: with(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of the same answer.",
                ITL,
            ),
            request_time_per_output_token: with(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, per finished request.",
                ITL,
            ),
            e2e: with("vllm:e2e_request_latency_seconds", "Arrival of a request to its end.", LATENCY),
            queue: with("vllm:request_queue_time_seconds", "Time a request waited before its first step.", LATENCY),
            inference: with("vllm:request_inference_time_seconds", "First step of a request to its end.", LATENCY),
            prefill: with("vllm:request_prefill_time_seconds", "First step of a request to its first token.", LATENCY),
            decode: with("vllm:request_decode_time_seconds", "First token of a request to its last.", LATENCY),
            prompt_tokens: with("vllm:request_prompt_tokens", "Prompt tokens per request.", &tokens),
            generation_tokens: with("vllm:request_generation_tokens", "Generated tokens per request.", &tokens),
            max_generation_tokens: with(
                "vllm:request_max_num_generation_tokens",
                "Tokens of the longest answer per request.",
                &tokens,
            ),
            params_max_tokens: with("vllm:request_params_max_tokens", "max_tokens as asked for.", &tokens),
            params_n: with("vllm:request_params_n", "Answers asked for per request (n).", CHOICES),
            prefill_computed: with(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens per request that were computed, not taken from the prefix cache.",
                &tokens,
            ),
            preempted: with(
                "vllm:request_num_preemptions",
                "Times a request had to begin again on another worker.",
                &[0.0, 1.0, 2.0, 5.0, 10.0],
            ),
            throughput: std::sync::Mutex::new(vec![
                Throughput {
                    since: std::time::Instant::now(),
                    prompt: 0,
                    generated: 0
                };
                setup.engines.max(1) as usize
            ]),
        }
    }

    pub(super) fn request_finished(&self, r: &RequestFigures) {
        self.request_success.with_label_values(&[self.model_name.as_str(), "0", r.finished.label()]).inc();
        self.e2e.observe(r.e2e.as_secs_f64());
        let observe = |h: &Histogram, d: Option<std::time::Duration>| {
            if let Some(d) = d {
                h.observe(d.as_secs_f64());
            }
        };
        observe(&self.queue, r.queue);
        observe(&self.prefill, r.prefill);
        observe(&self.decode, r.decode);
        if let Some(queue) = r.queue {
            self.inference.observe(r.e2e.saturating_sub(queue).as_secs_f64());
        }
        self.prompt_tokens.observe(f64::from(r.prompt_tokens));
        self.generation_tokens.observe(f64::from(r.generation_tokens));
        self.max_generation_tokens.observe(f64::from(r.generation_tokens_longest));
        if let Some(max) = r.max_tokens {
            self.params_max_tokens.observe(f64::from(max));
        }
        self.params_n.observe(f64::from(r.choices));
        self.prefill_computed.observe(f64::from(r.prompt_tokens.saturating_sub(r.cached_tokens)));
        self.preempted.observe(f64::from(r.resumed));
        if let Some(decode) = r.decode
            && r.generation_tokens_longest > 1
        {
            let gaps = f64::from(r.generation_tokens_longest - 1);
            self.request_time_per_output_token.observe(decode.as_secs_f64() / gaps);
        }
    }

    pub(super) fn step(&self, engine: u32, now: &StepStats, before: &StepStats) {
        let Some(e) = self.engines.get(engine as usize) else { return };
        let cached = now.prefix_hits_tokens.saturating_sub(before.prefix_hits_tokens);
        let prompt = now.prompt_tokens.saturating_sub(before.prompt_tokens);
        let generated = now.generated_tokens.saturating_sub(before.generated_tokens);
        e.prompt_tokens.inc_by(prompt);
        e.by_source_compute.inc_by(prompt.saturating_sub(cached));
        e.by_source_cache.inc_by(cached);
        e.cached.inc_by(cached);
        e.cached_device.inc_by(cached);
        e.generation_tokens.inc_by(generated);
        e.prefix_queries.inc_by(now.prefix_queries_tokens.saturating_sub(before.prefix_queries_tokens));
        e.prefix_hits.inc_by(cached);
        e.preemptions.inc_by(now.preemptions.saturating_sub(before.preemptions));
        e.corrupted.inc_by(now.nan_sequences.saturating_sub(before.nan_sequences));
        if now.tokens > 0 {
            e.iteration_tokens.observe(f64::from(now.tokens));
        }
        let mut throughput = self.throughput.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let window = &mut throughput[engine as usize];
        window.prompt += prompt;
        window.generated += generated;
        let seconds = window.since.elapsed().as_secs_f64();
        if seconds >= 10.0 {
            e.prompt_throughput.set(window.prompt as f64 / seconds);
            e.generation_throughput.set(window.generated as f64 / seconds);
            *window = Throughput { since: std::time::Instant::now(), prompt: 0, generated: 0 };
        }
    }

    /// Bytes of KV that went to or came from swap space.
    pub(super) fn swap_bytes(&self, engine: u32, stored: u64, loaded: u64) {
        if let Some(e) = self.engines.get(engine as usize) {
            e.offload_store.inc_by(stored);
            e.offload_load.inc_by(loaded);
        }
    }

    pub(super) fn fleet(&self, fleet: &FleetFigures) {
        for figures in &fleet.engines {
            let Some(e) = self.engines.get(figures.engine as usize) else { continue };
            let s = &figures.stats;
            let live = |v: u32| if figures.up { f64::from(v) } else { 0.0 };
            e.running.set(live(s.running));
            e.waiting.set(live(s.waiting));
            e.waiting_capacity.set(live(s.waiting));
            e.swapped.set(live(s.swapped));
            e.kv_usage.set(if figures.up {
                share(s.blocks_total - s.blocks_free.min(s.blocks_total), s.blocks_total)
            } else {
                0.0
            });
            e.cpu_usage.set(share(s.swap_blocks_used, s.swap_blocks_total));
            if s.prefix_queries_tokens > 0 {
                e.gpu_hit_rate.set(s.prefix_hits_tokens as f64 / s.prefix_queries_tokens as f64);
            }
            e.awake.set(if figures.up { 1.0 } else { 0.0 });
            if s.running == 0 && s.waiting == 0 {
                e.prompt_throughput.set(0.0);
                e.generation_throughput.set(0.0);
            }
        }
        self.cache_config(fleet);
    }

    /// Labels of the cache; a reset before each write leaves one series per engine, whatever was there before.
    fn cache_config(&self, fleet: &FleetFigures) {
        self.cache_config.reset();
        for (index, _) in self.engines.iter().enumerate() {
            let figures = fleet.engines.iter().find(|f| f.engine as usize == index);
            let (block_size, blocks, swap) =
                figures.map_or((16, 0, 0), |f| (f.block_size.max(1), f.num_blocks, f.stats.swap_blocks_total));
            self.cache_config
                .with_label_values(&[
                    index.to_string().as_str(),
                    block_size.to_string().as_str(),
                    blocks.to_string().as_str(),
                    swap.to_string().as_str(),
                    self.cache.cache_dtype.as_str(),
                    if self.cache.enable_prefix_caching { "True" } else { "False" },
                    self.cache.gpu_memory_utilization.as_str(),
                    "xxh3-128+compare",
                    "None",
                    self.cache.swap_space.as_str(),
                ])
                .set(1.0);
        }
    }
}

fn share(part: u32, whole: u32) -> f64 {
    if whole == 0 { 0.0 } else { f64::from(part) / f64::from(whole) }
}

/// The families behind [`Engine`], before labels.
struct EngineCounters {
    counters: Vec<(&'static str, IntCounterVec)>,
    gauges: Vec<(&'static str, GaugeVec)>,
    by_source: IntCounterVec,
    cached_by_source: IntCounterVec,
    waiting_by_reason: GaugeVec,
    sleep_state: GaugeVec,
    iteration_tokens: prometheus::HistogramVec,
}

const ENGINE_COUNTERS: &[(&str, &str)] = &[
    ("vllm:prompt_tokens_total", "Prompt tokens processed, cached ones included."),
    ("vllm:generation_tokens_total", "Tokens generated."),
    ("vllm:prompt_tokens_cached_total", "Prompt tokens taken from a cache instead of computed."),
    ("vllm:num_preemptions_total", "Sequences taken out of the batch to make room, to be resumed later."),
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    ("vllm:external_prefix_cache_queries_total", "Prompt tokens looked up in swapped-out KV."),
    ("vllm:external_prefix_cache_hits_total", "Prompt tokens found in swapped-out KV."),
    ("vllm:corrupted_requests_total", "Sequences ended because a logit was not finite."),
    ("vllm:mm_cache_queries_total", "Multimodal cache look-ups; always 0, the models are text only."),
    ("vllm:mm_cache_hits_total", "Multimodal cache hits; always 0, the models are text only."),
    ("vllm:kv_offload_store_bytes_total", "Bytes of KV copied out to swap space."),
    ("vllm:kv_offload_load_bytes_total", "Bytes of KV copied back from swap space."),
];

const ENGINE_GAUGES: &[(&str, &str)] = &[
    ("vllm:num_requests_running", "Sequences in the running batch."),
    ("vllm:num_requests_waiting", "Sequences waiting for a place in the batch."),
    ("vllm:num_requests_swapped", "Sequences whose KV is in swap space."),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1 (in spite of the name)."),
    ("vllm:cpu_cache_usage_perc", "Share of swap space in use, 0 to 1."),
    ("vllm:gpu_prefix_cache_hit_rate", "Prefix cache hits over queries since load."),
    ("vllm:cpu_prefix_cache_hit_rate", "Hits in swapped-out KV over queries since load; -1 when off."),
    ("vllm:avg_prompt_throughput_toks_per_s", "Prompt tokens per second, mean of ten seconds."),
    ("vllm:avg_generation_throughput_toks_per_s", "Generated tokens per second, mean of ten seconds."),
];

impl EngineCounters {
    fn new(f: &Families) -> Self {
        Self {
            counters: ENGINE_COUNTERS.iter().map(|&(name, help)| (name, f.counters(name, help, BASE))).collect(),
            gauges: ENGINE_GAUGES.iter().map(|&(name, help)| (name, f.gauges(name, help, BASE))).collect(),
            by_source: f.counters(
                "vllm:prompt_tokens_by_source_total",
                "Prompt tokens by where their KV came from.",
                &["model_name", "engine", "source"],
            ),
            cached_by_source: f.counters(
                "vllm:prompt_tokens_cached_by_source_total",
                "Cached prompt tokens by the tier that held them.",
                &["model_name", "engine", "source"],
            ),
            waiting_by_reason: f.gauges(
                "vllm:num_requests_waiting_by_reason",
                "Waiting sequences by reason; the sum is vllm:num_requests_waiting.",
                &["model_name", "engine", "reason"],
            ),
            sleep_state: f.gauges(
                "vllm:engine_sleep_state",
                "1 for the state the engine is in: awake, weights_offloaded or discard_all.",
                &["model_name", "engine", "sleep_state"],
            ),
            iteration_tokens: f.histograms(
                "vllm:iteration_tokens_total",
                "Tokens per engine step (a histogram, in spite of the name).",
                BASE,
                STEP_TOKENS,
            ),
        }
    }

    fn engine(&self, model: &str, engine: &str) -> Engine {
        let base = [model, engine];
        let counters: Vec<IntCounter> = self.counters.iter().map(|(_, c)| c.with_label_values(&base)).collect();
        let gauges: Vec<Gauge> = self.gauges.iter().map(|(_, g)| g.with_label_values(&base)).collect();
        let counter = |name: &str| {
            let at = self.counters.iter().position(|(n, _)| *n == name);
            counters[at.expect("names come from the table above")].clone()
        };
        let gauge = |name: &str| {
            let at = self.gauges.iter().position(|(n, _)| *n == name);
            gauges[at.expect("names come from the table above")].clone()
        };
        self.by_source.with_label_values(&[model, engine, "external_kv_transfer"]);
        for source in ["host", "p2p", "disk", "external_unspecified"] {
            self.cached_by_source.with_label_values(&[model, engine, source]);
        }
        self.waiting_by_reason.with_label_values(&[model, engine, "deferred"]);
        for state in ["weights_offloaded", "discard_all"] {
            self.sleep_state.with_label_values(&[model, engine, state]);
        }
        gauge("vllm:cpu_prefix_cache_hit_rate").set(-1.0);
        Engine {
            prompt_tokens: counter("vllm:prompt_tokens_total"),
            generation_tokens: counter("vllm:generation_tokens_total"),
            by_source_compute: self.by_source.with_label_values(&[model, engine, "local_compute"]),
            by_source_cache: self.by_source.with_label_values(&[model, engine, "local_cache_hit"]),
            cached: counter("vllm:prompt_tokens_cached_total"),
            cached_device: self.cached_by_source.with_label_values(&[model, engine, "device"]),
            preemptions: counter("vllm:num_preemptions_total"),
            prefix_queries: counter("vllm:prefix_cache_queries_total"),
            prefix_hits: counter("vllm:prefix_cache_hits_total"),
            corrupted: counter("vllm:corrupted_requests_total"),
            offload_store: counter("vllm:kv_offload_store_bytes_total"),
            offload_load: counter("vllm:kv_offload_load_bytes_total"),
            iteration_tokens: self.iteration_tokens.with_label_values(&base),
            running: gauge("vllm:num_requests_running"),
            waiting: gauge("vllm:num_requests_waiting"),
            waiting_capacity: self.waiting_by_reason.with_label_values(&[model, engine, "capacity"]),
            swapped: gauge("vllm:num_requests_swapped"),
            kv_usage: gauge("vllm:kv_cache_usage_perc"),
            cpu_usage: gauge("vllm:cpu_cache_usage_perc"),
            gpu_hit_rate: gauge("vllm:gpu_prefix_cache_hit_rate"),
            prompt_throughput: gauge("vllm:avg_prompt_throughput_toks_per_s"),
            generation_throughput: gauge("vllm:avg_generation_throughput_toks_per_s"),
            awake: self.sleep_state.with_label_values(&[model, engine, "awake"]),
        }
    }
}
