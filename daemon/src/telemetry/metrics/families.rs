//! Makes metric families in one registry, and remembers what they are for the reference.

use super::FamilyDescription;
use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    Opts, Registry, core::Collector, proto::MetricFamily,
};
use std::sync::Mutex;

/// The registry and what was made in it.
#[derive(Debug)]
pub(super) struct Families {
    registry: Registry,
    described: Mutex<Vec<FamilyDescription>>,
}

impl Families {
    pub(super) fn new() -> Self {
        Self { registry: Registry::new(), described: Mutex::new(Vec::new()) }
    }

    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// Every family that was made, those without a series yet included.
    pub(super) fn described(&self) -> Vec<FamilyDescription> {
        self.described.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn keep<C: Collector + Clone + 'static>(
        &self,
        kind: &'static str,
        name: &str,
        help: &str,
        labels: &[&str],
        collector: C,
    ) -> C {
        let labels = labels.iter().map(|l| (*l).to_owned()).collect();
        let description = FamilyDescription { name: name.to_owned(), kind, labels, help: help.to_owned() };
        self.described.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(description);
        self.registry.register(Box::new(collector.clone())).expect("family names are distinct constants");
        collector
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.keep("counter", name, help, &[], IntCounter::new(name, help).expect(VALID))
    }

    pub(super) fn counter_f64(&self, name: &str, help: &str) -> Counter {
        self.keep("counter", name, help, &[], Counter::new(name, help).expect(VALID))
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.keep("counter", name, help, labels, IntCounterVec::new(Opts::new(name, help), labels).expect(VALID))
    }

    pub(super) fn float_counters(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.keep("counter", name, help, labels, CounterVec::new(Opts::new(name, help), labels).expect(VALID))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.keep("gauge", name, help, &[], Gauge::new(name, help).expect(VALID))
    }

    pub(super) fn int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.keep("gauge", name, help, &[], IntGauge::new(name, help).expect(VALID))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.keep("gauge", name, help, labels, GaugeVec::new(Opts::new(name, help), labels).expect(VALID))
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.keep("histogram", name, help, &[], Histogram::with_opts(opts).expect(VALID))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.keep("histogram", name, help, labels, HistogramVec::new(opts, labels).expect(VALID))
    }
}

const VALID: &str = "names, labels and buckets are constants that the tests build";
