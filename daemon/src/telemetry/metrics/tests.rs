//! What boards, routers and alerts rely on.

use super::*;
use ernie_proto::worker::DiskStats;
use std::path::Path;

fn metrics() -> Metrics {
    Metrics::new(MetricsSetup {
        model_name: "ernie-demo".to_owned(),
        engines: 1,
        max_model_len: 4096,
        max_num_batched_tokens: 2048,
        cache: CacheSettings {
            enable_prefix_caching: true,
            gpu_memory_utilization: "0.9".to_owned(),
            cache_dtype: "auto".to_owned(),
            swap_space: "0".to_owned(),
        },
        legacy_names: false,
    })
}

fn scrape(m: &Metrics) -> String {
    m.render(&FleetFigures::default(), None).1
}

fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find(|l| l.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("{series} is not there"));
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

/// Removing or renaming a series breaks somebody's board: this list is changed only knowingly.
#[test]
fn the_golden_list_of_families_stands() {
    let described: String =
        metrics().describe().iter().map(|f| format!("{} {} {}\n", f.name, f.kind, f.labels.join(","))).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/telemetry/metrics/golden_families.txt");
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        std::fs::write(&path, &described).expect("written");
    }
    let golden = &std::fs::read_to_string(&path).expect("the golden list");
    let only_in = |a: &str, b: &str| -> Vec<String> {
        a.lines().filter(|l| !b.lines().any(|other| other == *l)).map(str::to_owned).collect()
    };
    let (gone, new) = (only_in(golden, &described), only_in(&described, golden));
    assert!(gone.is_empty(), "families that are missing or changed: {gone:#?}");
    assert!(new.is_empty(), "new families, add them to golden_families.txt and docs/metrics.md:\n{}", new.join("\n"));
}

/// `ERNIED_TEST_BLESS=1 cargo test -p ernied reference_is_current` writes the pages anew.
#[test]
fn the_metrics_reference_is_current() {
    let mut page = String::from(
        "# Metrics\n\nEvery family that `GET /metrics` offers, made from the code. Names of vLLM keep vLLM's meaning, labels \
         and buckets; `ernied_*` are ours. `vllm:request_success_count` only with `metrics.legacy_names`.\n\n\
         | name | type | labels | what it is |\n|---|---|---|---|\n",
    );
    for f in metrics().describe() {
        page.push_str(&format!("| `{}` | {} | {} | {} |\n", f.name, f.kind, f.labels.join(", "), f.help));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        std::fs::write(&path, &page).expect("written");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("docs/metrics.md"), page);
}

#[test]
fn all_series_of_vllm_are_there_at_zero_from_the_first_scrape() {
    let text = scrape(&metrics());
    let base = r#"engine="0",model_name="ernie-demo""#;
    for reason in ["stop", "length", "abort", "error", "repetition"] {
        let series =
            format!(r#"vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="ernie-demo"}}"#);
        assert_eq!(value(&text, &series), 0.0);
    }
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_swapped",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:cpu_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:corrupted_requests_total",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:time_to_first_token_seconds_sum",
        "vllm:time_per_output_token_seconds_count",
        "vllm:iteration_tokens_total_count",
    ] {
        assert_eq!(value(&text, &format!("{name}{{{base}}}")), 0.0, "{name}");
    }
    assert!(text.contains(r#"vllm:cache_config_info{block_size="16","#), "the router parses block_size as an integer");
    assert!(!text.contains("_created"), "nobody should rely on those");
    assert!(!text.contains("request_success_count"), "only with legacy names");
}

#[test]
fn bucket_bounds_are_printed_as_python_prints_them() {
    let text = scrape(&metrics());
    for le in ["0.001", "1.0", "2.5", "10.0", "2560.0", "+Inf"] {
        let series =
            format!(r#"vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="ernie-demo",le="{le}"}}"#);
        assert_eq!(value(&text, &series), 0.0);
    }
    assert!(!text.contains(r#"le="1""#));
}

#[test]
fn token_buckets_end_at_the_longest_sequence() {
    assert_eq!(vllm::one_two_five(4096), [1., 2., 5., 10., 20., 50., 100., 200., 500., 1000., 2000.]);
    assert_eq!(vllm::one_two_five(5000).last(), Some(&5000.0));
    assert_eq!(vllm::one_two_five(1), [1.0]);
}

#[test]
fn a_restarted_worker_never_makes_a_counter_fall() {
    let m = metrics();
    let stats = |prompt, generated| StepStats {
        prompt_tokens: prompt,
        generated_tokens: generated,
        prefix_queries_tokens: prompt,
        tokens: 5,
        sequences: 1,
        step_seconds: 0.004,
        ..StepStats::default()
    };
    let series = r#"vllm:generation_tokens_total{engine="0",model_name="ernie-demo"}"#;
    m.step(0, WorkerId(1), &stats(100, 10));
    m.step(0, WorkerId(1), &stats(100, 30));
    assert_eq!(value(&scrape(&m), series), 30.0);
    m.worker_gone(WorkerId(1));
    m.step(0, WorkerId(2), &stats(8, 3));
    assert_eq!(value(&scrape(&m), series), 33.0);
    assert_eq!(value(&scrape(&m), r#"vllm:iteration_tokens_total_count{engine="0",model_name="ernie-demo"}"#), 3.0);
    m.step(7, WorkerId(3), &stats(1, 1)); // a slot that does not exist is ignored, not a panic
}

#[test]
fn the_swap_file_is_counted_over_the_lives_of_workers() {
    let m = metrics();
    let disk = |reads, corrupt| DiskStats {
        blocks_total: 10,
        blocks_used: 4,
        blocks_corrupt: corrupt,
        reads,
        read_seconds: reads as f64 / 4.0,
        writes: 2 * reads,
        write_seconds: reads as f64,
        writes_skipped: 1,
        ..DiskStats::default()
    };
    let stats = |reads, corrupt| StepStats { disk: disk(reads, corrupt), ..StepStats::default() };
    m.step(0, WorkerId(1), &stats(3, 0));
    m.step(0, WorkerId(1), &stats(5, 1));
    m.worker_gone(WorkerId(1));
    m.step(0, WorkerId(2), &stats(1, 0));
    let mut fleet = FleetFigures::default();
    let engine = EngineFigures { up: true, stats: stats(1, 0), kv_bytes: 800, num_blocks: 8, ..Default::default() };
    fleet.engines.push(engine);
    let text = m.render(&fleet, None).1;
    let of = |family: &str, label: &str, word: &str| {
        value(&text, &format!(r#"ernied_swap_file_{family}{{engine="0",{label}="{word}"}}"#))
    };
    assert_eq!((of("bytes", "state", "used"), of("bytes", "state", "free")), (400.0, 600.0));
    assert_eq!((of("blocks_total", "operation", "read"), of("blocks_total", "operation", "write")), (6.0, 12.0));
    assert_eq!(of("blocks_total", "operation", "skipped"), 2.0);
    assert_eq!((of("seconds_total", "operation", "read"), of("seconds_total", "operation", "write")), (1.5, 6.0));
    assert_eq!(value(&text, r#"ernied_swap_file_checksum_errors_total{engine="0"}"#), 1.0);
}

#[test]
fn two_names_of_one_value_never_differ() {
    let m = metrics();
    m.next_token(Duration::from_millis(20));
    let mut fleet = FleetFigures::default();
    fleet.engines.push(EngineFigures {
        up: true,
        stats: StepStats { blocks_total: 100, blocks_free: 75, ..StepStats::default() },
        block_size: 16,
        num_blocks: 100,
        ..EngineFigures::default()
    });
    let text = m.render(&fleet, None).1;
    let base = r#"{engine="0",model_name="ernie-demo"}"#;
    for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
        assert_eq!(value(&text, &format!("{name}{base}")), 0.25);
    }
    for name in ["vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"] {
        assert_eq!(value(&text, &format!("{name}{base}")), 1.0);
    }
    assert!(text.contains(r#"num_gpu_blocks="100""#));
}

#[test]
fn a_worker_that_is_gone_leaves_no_gauge_open() {
    let m = metrics();
    let mut fleet = FleetFigures::default();
    let stats = StepStats { running: 5, waiting: 2, blocks_total: 10, ..StepStats::default() };
    fleet.engines.push(EngineFigures { up: true, stats, ..EngineFigures::default() });
    m.render(&fleet, None);
    fleet.engines[0].up = false;
    let text = m.render(&fleet, None).1;
    for name in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
        assert_eq!(value(&text, &format!(r#"{name}{{engine="0",model_name="ernie-demo"}}"#)), 0.0);
    }
}

#[test]
fn a_finished_request_is_seen_by_every_family_that_counts_it() {
    let m = metrics();
    m.first_token(Duration::from_millis(30));
    m.request_finished(&RequestFigures {
        finished: FinishedReason::Length,
        prompt_tokens: 100,
        cached_tokens: 60,
        generation_tokens: 11,
        generation_tokens_longest: 11,
        choices: 1,
        max_tokens: Some(11),
        e2e: Duration::from_secs(2),
        queue: Some(Duration::from_millis(500)),
        prefill: Some(Duration::from_millis(500)),
        decode: Some(Duration::from_secs(1)),
        resumed: 1,
    });
    let text = scrape(&m);
    let sum = |name: &str| value(&text, &format!(r#"{name}_sum{{engine="0",model_name="ernie-demo"}}"#));
    assert_eq!(sum("vllm:request_inference_time_seconds"), 1.5);
    assert_eq!(sum("vllm:request_prefill_kv_computed_tokens"), 40.0);
    assert_eq!(sum("vllm:request_time_per_output_token_seconds"), 0.1);
    assert_eq!(sum("vllm:request_params_n"), 1.0);
    assert_eq!(value(&text, "ernied_queue_wait_seconds_count"), 1.0);
}

#[test]
fn openmetrics_is_spoken_when_asked_for() {
    let m = metrics();
    for (accept, open) in [
        (None, false),
        (Some("*/*"), false),
        (Some("text/plain;version=0.0.4;q=0.5"), false),
        (Some("application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"), true),
        (Some("application/openmetrics-text;q=0"), false),
    ] {
        let (content_type, text) = m.render(&FleetFigures::default(), accept);
        assert_eq!(content_type.starts_with("application/openmetrics-text"), open, "{accept:?}");
        assert_eq!(text.ends_with("# EOF\n"), open);
        // A counter's family has no _total in OpenMetrics; its sample has. A histogram keeps its name.
        assert_eq!(text.contains("# TYPE vllm:prompt_tokens counter"), open);
        assert_eq!(text.contains("# TYPE vllm:prompt_tokens_total counter"), !open);
        assert!(text.contains("# TYPE vllm:iteration_tokens_total histogram"));
    }
}

#[test]
fn label_values_are_bounded() {
    let m = metrics();
    m.http_request("BREW", "none", 418, Duration::ZERO);
    m.http_request("GET", "/health/ready", 200, Duration::ZERO);
    m.key_refused("teapot");
    let text = scrape(&m);
    assert_eq!(value(&text, r#"http_requests_total{handler="none",method="other",status="4xx"}"#), 1.0);
    assert!(!text.contains("/health"), "probes would drown the rest");
    assert_eq!(value(&text, r#"ernied_key_refusals_total{reason="other"}"#), 1.0);
}

#[test]
fn a_scrape_takes_less_than_five_milliseconds() {
    let m = metrics();
    let layers: Vec<Vec<u64>> = (0..28).map(|l| (0..64).map(|e| l * e).collect()).collect();
    m.step(0, WorkerId(1), &StepStats { expert_tokens: layers, ..StepStats::default() });
    let best = (0..5)
        .map(|_| {
            let began = std::time::Instant::now();
            scrape(&m);
            began.elapsed()
        })
        .min()
        .expect("five");
    // Debug builds are several times slower; the promise is for the real thing.
    let limit = if cfg!(debug_assertions) { 100 } else { 5 };
    assert!(best < Duration::from_millis(limit), "{best:?}");
}

#[test]
fn a_layer_without_an_active_expert_rises_once_per_step_and_never_falls_with_the_worker() {
    let m = metrics();
    let stats = |zero: &[u64]| StepStats {
        expert_tokens: vec![vec![], vec![1, 0]],
        zero_active: zero.to_vec(),
        ..StepStats::default()
    };
    let fleet = FleetFigures { moe_layers: 2, ..FleetFigures::default() };
    assert!(m.render(&fleet, None).1.contains(r#"ernied_moe_zero_active_experts_total{layer="1"} 0.0"#));
    assert_eq!(m.step(0, WorkerId(1), &stats(&[0, 3])), [(1, 3)]);
    assert!(m.step(0, WorkerId(1), &StepStats::default()).is_empty(), "reports without experts say nothing");
    assert!(m.step(0, WorkerId(1), &stats(&[0, 3])).is_empty());
    m.worker_gone(WorkerId(1));
    assert_eq!(m.step(0, WorkerId(2), &stats(&[0, 1])), [(1, 1)]);
    assert_eq!(value(&scrape(&m), r#"ernied_moe_zero_active_experts_total{layer="1"}"#), 4.0);
}

#[test]
fn experts_show_tokens_skew_and_idleness() {
    let m = metrics();
    let stats = |tokens: Vec<Vec<u64>>| StepStats { expert_tokens: tokens, ..StepStats::default() };
    m.step(0, WorkerId(1), &stats(vec![vec![], vec![30, 10, 0, 0]]));
    m.step(0, WorkerId(1), &stats(vec![]));
    m.step(0, WorkerId(1), &stats(vec![vec![], vec![60, 20, 0, 0]]));
    let text = scrape(&m);
    assert_eq!(value(&text, r#"ernied_moe_tokens_total{engine="0",expert="0",layer="1"}"#), 60.0);
    assert_eq!(value(&text, r#"ernied_moe_load_skew{engine="0",layer="1"}"#), 3.0);
    assert_eq!(value(&text, r#"ernied_moe_experts_idle{engine="0",layer="1"}"#), 2.0);
    assert_eq!(value(&text, r#"ernied_moe_zero_active_experts_total{layer="0"}"#), 0.0);
}
