//! The HTTP layer's families, named as vLLM's front end (prometheus-fastapi-instrumentator) names them.

use super::families::Families;
use prometheus::{Histogram, HistogramVec, IntCounterVec};
use std::time::Duration;

const COARSE: &[f64] = &[0.1, 0.5, 1.0];
const FINE: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
];
/// Probes and scrapes would drown the rest.
const EXCLUDED: &[&str] =
    &["/metrics", "/health", "/load", "/ping", "/version", "/server_info", "/ready", "/readyz", "/livez"];
/// Label values come from requests: anything else is `other`.
const METHODS: &[&str] = &["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"];

#[derive(Debug)]
pub(super) struct Http {
    requests: IntCounterVec,
    duration: HistogramVec,
    duration_highr: Histogram,
}

impl Http {
    pub(super) fn new(f: &Families) -> Self {
        let http = Self {
            requests: f.counters(
                "http_requests_total",
                "HTTP exchanges by method, status class and route.",
                &["method", "status", "handler"],
            ),
            duration: f.histograms(
                "http_request_duration_seconds",
                "Duration of HTTP exchanges by route, in few buckets.",
                &["method", "handler"],
                COARSE,
            ),
            duration_highr: f.histogram(
                "http_request_duration_highr_seconds",
                "Duration of HTTP exchanges, in many buckets.",
                FINE,
            ),
        };
        for handler in ["/v1/chat/completions", "/v1/completions"] {
            for status in ["2xx", "4xx", "5xx"] {
                http.requests.with_label_values(&["POST", status, handler]);
            }
            http.duration.with_label_values(&["POST", handler]);
        }
        http
    }

    pub(super) fn request(&self, method: &str, handler: &str, status: u16, elapsed: Duration) {
        if EXCLUDED.iter().any(|e| handler == *e || handler.strip_prefix(e).is_some_and(|rest| rest.starts_with('/'))) {
            return;
        }
        let method = if METHODS.contains(&method) { method } else { "other" };
        let class = match status {
            100..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        self.requests.with_label_values(&[method, class, handler]).inc();
        self.duration.with_label_values(&[method, handler]).observe(elapsed.as_secs_f64());
        self.duration_highr.observe(elapsed.as_secs_f64());
    }
}
