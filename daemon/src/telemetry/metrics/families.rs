//! Makes metric families in one registry, and remembers their labels for the reference.

use prometheus::{
    Counter, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, core::Collector, proto::MetricFamily,
};
use std::sync::Mutex;

/// The registry and what was made in it.
#[derive(Debug)]
pub(super) struct Families {
    registry: Registry,
    labels: Mutex<Vec<(String, Vec<String>)>>,
}

impl Families {
    pub(super) fn new() -> Self {
        Self { registry: Registry::new(), labels: Mutex::new(Vec::new()) }
    }

    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// Labels of a family by name.
    pub(super) fn labels(&self, name: &str) -> Vec<String> {
        let all = self.labels.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        all.iter().find(|(n, _)| n == name).map(|(_, labels)| labels.clone()).unwrap_or_default()
    }

    fn keep<C: Collector + Clone + 'static>(&self, name: &str, labels: &[&str], collector: C) -> C {
        let kept: Vec<String> = labels.iter().map(|l| (*l).to_owned()).collect();
        self.labels.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((name.to_owned(), kept));
        self.registry.register(Box::new(collector.clone())).expect("family names are distinct constants");
        collector
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.keep(name, &[], IntCounter::new(name, help).expect(VALID))
    }

    pub(super) fn counter_f64(&self, name: &str, help: &str) -> Counter {
        self.keep(name, &[], Counter::new(name, help).expect(VALID))
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.keep(name, labels, IntCounterVec::new(Opts::new(name, help), labels).expect(VALID))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.keep(name, &[], Gauge::new(name, help).expect(VALID))
    }

    pub(super) fn int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.keep(name, &[], IntGauge::new(name, help).expect(VALID))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.keep(name, labels, GaugeVec::new(Opts::new(name, help), labels).expect(VALID))
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.keep(name, &[], Histogram::with_opts(opts).expect(VALID))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.keep(name, labels, HistogramVec::new(opts, labels).expect(VALID))
    }
}

const VALID: &str = "names, labels and buckets are constants that the tests build";
