//! Mixture-of-experts figures: tokens per expert, load skew, and the alarm for layers without an active expert.

use super::families::Families;
use prometheus::{GaugeVec, IntCounterVec};

#[derive(Debug)]
pub(super) struct Experts {
    tokens: IntCounterVec,
    skew: GaugeVec,
    idle: GaugeVec,
    zero_active: IntCounterVec,
}

impl Experts {
    pub(super) fn new(f: &Families) -> Self {
        let experts = Self {
            tokens: f.counters(
                "ernied_moe_tokens_total",
                "Tokens sent to each expert. Absent for dense models.",
                &["engine", "layer", "expert"],
            ),
            skew: f.gauges(
                "ernied_moe_load_skew",
                "Tokens of the busiest expert over the mean of its layer, since load; 1 is even.",
                &["engine", "layer"],
            ),
            idle: f.gauges(
                "ernied_moe_experts_idle",
                "Experts of a layer that got no token since load.",
                &["engine", "layer"],
            ),
            zero_active: f.counters(
                "ernied_moe_zero_active_experts_total",
                "Steps in which a token of a MoE layer had no active expert: a routing bug or a damaged router, look at the log.",
                &["layer"],
            ),
        };
        experts.zero_active.with_label_values(&["0"]);
        experts
    }

    /// Every layer's alarm from the first scrape on, so that the first rise shows as one.
    pub(super) fn layers(&self, layers: u32) {
        for layer in 0..layers {
            self.zero_active.with_label_values(&[layer.to_string().as_str()]);
        }
    }

    /// Layers whose count of steps without an active expert rose, with by how much.
    pub(super) fn zero_active(&self, now: &[u64], before: &[u64]) -> Vec<(usize, u64)> {
        let mut rose = Vec::new();
        for (layer, &count) in now.iter().enumerate() {
            let more = count.saturating_sub(before.get(layer).copied().unwrap_or(0));
            if more > 0 {
                self.zero_active.with_label_values(&[layer.to_string().as_str()]).inc_by(more);
                rose.push((layer, more));
            }
        }
        rose
    }

    pub(super) fn step(&self, engine: u32, now: &[Vec<u64>], before: &[Vec<u64>]) {
        let engine = engine.to_string();
        for (layer, tokens) in now.iter().enumerate() {
            if tokens.is_empty() {
                continue; // a dense layer of a MoE model
            }
            let name = layer.to_string();
            let old = before.get(layer).map_or(&[][..], Vec::as_slice);
            for (expert, &count) in tokens.iter().enumerate() {
                let more = count.saturating_sub(old.get(expert).copied().unwrap_or(0));
                let expert = expert.to_string();
                self.tokens.with_label_values(&[engine.as_str(), name.as_str(), expert.as_str()]).inc_by(more);
            }
            let sum: u64 = tokens.iter().sum();
            let busiest = tokens.iter().copied().max().unwrap_or(0);
            let mean = sum as f64 / tokens.len() as f64;
            let labels = [engine.as_str(), name.as_str()];
            self.skew.with_label_values(&labels).set(if sum == 0 { 1.0 } else { busiest as f64 / mean });
            let idle = tokens.iter().filter(|&&t| t == 0).count();
            self.idle.with_label_values(&labels).set(idle as f64);
        }
    }
}
