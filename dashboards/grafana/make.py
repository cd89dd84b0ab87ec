#!/usr/bin/env python3
"""Makes the Grafana boards in this folder. Run it after a change here: ./make.py

A board is a list of rows, a row a list of panels (title, unit, [(expression, legend)...]). Panels are placed by this script;
every expression is also evaluated against a real Prometheus by the test suite.
"""

import json
import re
from pathlib import Path

I = 'instance=~"$instance"'
IE = 'instance=~"$instance",engine=~"$engine"'
R = "[$__rate_interval]"


def quantiles(metric, by=I):
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{by}}}{R})))", f"P{int(q * 100)}")
        for q in (0.5, 0.9, 0.95, 0.99)
    ] + [(f"sum(rate({metric}_sum{{{by}}}{R})) / sum(rate({metric}_count{{{by}}}{R}))", "mean")]


BOARDS = {
    "overview": (
        "ernied: service",
        [
            [
                ("Ready", "bool", [(f"ernied_ready{{{I}}}", "{{instance}}")]),
                ("Requests per second", "reqps", [(f"sum by (finished_reason) (rate(vllm:request_success_total{{{I}}}{R}))", "{{finished_reason}}")]),
                ("Tokens per second", "short", [
                    (f"sum(rate(vllm:generation_tokens_total{{{I}}}{R}))", "generated"),
                    (f"sum(rate(vllm:prompt_tokens_total{{{I}}}{R}))", "prompt"),
                ]),
            ],
            [
                ("Running and waiting", "short", [
                    (f"sum(vllm:num_requests_running{{{I}}})", "running"),
                    (f"sum(vllm:num_requests_waiting{{{I}}})", "waiting"),
                    (f"sum(ernied_requests_in_flight{{{I}}})", "in flight"),
                ]),
                ("Time to first token", "s", quantiles("ernied_time_to_first_token_seconds")),
                ("Time between tokens", "s", quantiles("ernied_inter_token_latency_seconds")),
            ],
            [
                ("Request duration", "s", quantiles("vllm:e2e_request_latency_seconds")),
                ("HTTP answers", "reqps", [(f"sum by (status, handler) (rate(http_requests_total{{{I}}}{R}))", "{{status}} {{handler}}")]),
                ("Refused", "reqps", [
                    (f"sum by (reason) (rate(vllm:admission_rejections_total{{{I}}}{R}))", "queue: {{reason}}"),
                    (f"sum by (reason) (rate(ernied_key_refusals_total{{{I}}}{R}))", "key: {{reason}}"),
                ]),
            ],
            [
                ("Prompt length", "short", [(f"sum by (le) (increase(vllm:request_prompt_tokens_bucket{{{I}}}{R}))", "{{le}}")]),
                ("Answer length", "short", [(f"sum by (le) (increase(vllm:request_generation_tokens_bucket{{{I}}}{R}))", "{{le}}")]),
                ("Alarms", "short", [
                    (f"increase(ernied_log_lines_dropped_total{{{I}}}[10m])", "log lines dropped"),
                    (f'increase(ernied_audit_writes_total{{{I},outcome="failed"}}[10m])', "audit failures"),
                    (f"increase(ernied_usage_rows_dropped_total{{{I}}}[10m])", "usage rows dropped"),
                ]),
            ],
        ],
    ),
    "engine": (
        "ernied: engine",
        [
            [
                ("Step duration", "s", quantiles("ernied_step_seconds", IE)),
                ("Sequences per step", "short", quantiles("ernied_batch_sequences", IE)),
                ("Tokens per step", "short", quantiles("vllm:iteration_tokens_total", IE)),
            ],
            [
                ("KV cache in use", "percentunit", [(f"vllm:kv_cache_usage_perc{{{IE}}}", "engine {{engine}}")]),
                ("KV blocks", "short", [(f"sum by (state) (ernied_kv_blocks{{{IE}}})", "{{state}}")]),
                ("Prefix cache hits", "percentunit", [(
                    f"sum(rate(vllm:prefix_cache_hits_total{{{IE}}}{R})) / clamp_min(sum(rate(vllm:prefix_cache_queries_total{{{IE}}}{R})), 1e-9)",
                    "hits",
                )]),
            ],
            [
                ("Preemptions", "short", [(f"sum by (kind) (rate(ernied_preemptions_total{{{IE}}}{R}))", "{{kind}}")]),
                ("Swapped blocks", "short", [(f"sum by (direction) (rate(ernied_swapped_blocks_total{{{IE}}}{R}))", "{{direction}}")]),
                ("Token budget in use", "percentunit", [(f"ernied_token_budget_used_ratio{{{IE}}}", "engine {{engine}}")]),
            ],
            [
                ("Queue wait", "s", quantiles("ernied_queue_wait_seconds")),
                ("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
                ("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
            ],
            [
                ("Age of the last step", "s", [(f"ernied_last_step_age_seconds{{{IE}}}", "engine {{engine}}")]),
                ("Workers lost", "short", [
                    (f"increase(ernied_worker_restarts_total{{{IE}}}[10m])", "engine {{engine}}"),
                    (f"increase(ernied_worker_stalls_total{{{I}}}[10m])", "of these stalled"),
                ]),
                ("Requests resumed", "short", [(f"increase(ernied_requests_resumed_total{{{I}}}[10m])", "resumed")]),
            ],
        ],
    ),
    "models": (
        "ernied: models and swaps",
        [
            [
                ("Revision that serves", "short", [(f"ernied_deployment_info{{{I}}}", "{{model_name}} {{revision}}")]),
                ("Rollout", "bool", [(f"ernied_rollout_state{{{I}}}", "{{state}}"), (f"increase(ernied_rollouts_total{{{I}}}[1h])", "{{outcome}} within an hour")]),
                ("Cut-over", "s", [(f"histogram_quantile(0.95, sum by (le) (increase(ernied_swap_cutover_seconds_bucket{{{I}}}[1d])))", "P95 of the day")]),
            ],
            [
                ("Load time by phase", "s", [(f"ernied_load_seconds{{{IE}}}", "{{phase}}")]),
                ("Memory by use", "bytes", [(f"sum by (part) (ernied_memory_bytes{{{IE}}})", "{{part}}"), (f"ernied_memory_limit_bytes{{{I}}}", "limit")]),
                ("Errors", "reqps", [(f'sum by (status) (rate(http_requests_total{{{I},status=~"5xx"}}{R}))', "{{status}}")]),
            ],
        ],
    ),
    "moe": (
        "ernied: mixture of experts",
        [
            [
                ("Load skew by layer", "short", [(f"ernied_moe_load_skew{{{IE}}}", "layer {{layer}}")]),
                ("Idle experts by layer", "short", [(f"ernied_moe_experts_idle{{{IE}}}", "layer {{layer}}")]),
                ("Layers without an active expert", "short", [(f"increase(ernied_moe_zero_active_experts_total{{{I}}}[10m])", "layer {{layer}}")]),
            ],
            [("Tokens per expert", "short", [(f"sum by (layer, expert) (rate(ernied_moe_tokens_total{{{IE}}}{R}))", "{{layer}}/{{expert}}")])],
        ],
    ),
    "host": (
        "ernied: host and process",
        [
            [
                ("CPU of the workers", "short", [(f"deriv(ernied_worker_cpu_seconds{{{IE}}}[1m])", "engine {{engine}}")]),
                ("CPU of the daemon", "short", [(f"rate(process_cpu_seconds_total{{{I}}}{R})", "daemon")]),
                ("Resident memory", "bytes", [
                    (f"ernied_worker_resident_bytes{{{IE}}}", "engine {{engine}}"),
                    (f"process_resident_memory_bytes{{{I}}}", "daemon"),
                ]),
            ],
            [
                ("File descriptors", "short", [(f"process_open_fds{{{I}}}", "open"), (f"process_max_fds{{{I}}}", "limit")]),
                ("Threads", "short", [(f"process_threads{{{I}}}", "daemon")]),
                ("Up since", "s", [(f"ernied_uptime_seconds{{{I}}}", "{{instance}}")]),
            ],
        ],
    ),
}


def of_model(expr):
    """Series of vLLM's names carry the model."""
    return re.sub(r"(vllm:\w+)\{", r'\1{model_name=~"$model",', expr)


def panel(number, title, unit, targets, x, y, width):
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": width, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": of_model(expr), "legendFormat": legend} for i, (expr, legend) in enumerate(targets)
        ],
    }


def variable(name, query, label):
    return {
        "name": name, "label": label, "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name}, "refresh": 2, "includeAll": True, "multi": True,
        "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }


def board(uid, title, rows):
    panels, number = [], 1
    for r, row in enumerate(rows):
        width = 24 // len(row)
        for c, (name, unit, targets) in enumerate(row):
            panels.append(panel(number, name, unit, targets, c * width, r * 8, width))
            number += 1
    return {
        "uid": f"ernied-{uid}", "title": title, "tags": ["ernied"], "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
            variable("instance", "label_values(ernied_ready, instance)", "instance"),
            variable("engine", "label_values(ernied_worker_up, engine)", "engine"),
            variable("model", "label_values(vllm:num_requests_running, model_name)", "model"),
        ]},
        "panels": panels,
    }


for uid, (title, rows) in BOARDS.items():
    path = Path(__file__).parent / f"{uid}.json"
    path.write_text(json.dumps(board(uid, title, rows), indent=2, ensure_ascii=False) + "\n")
    print(path.name)
