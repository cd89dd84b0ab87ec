//! What the server's own metrics say while a load runs: peaks of gauges, growth of counters. Needs `/metrics`; a server
//! without it, or without ernied's names, is measured all the same.

use super::stream::Target;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

const EVERY: Duration = Duration::from_millis(250);

/// Gauges of which the highest sum over all their series is kept, and counters of which the growth is.
const PEAKS: [&str; 4] = [
    "ernied_worker_resident_bytes",
    "vllm:kv_cache_usage_perc",
    "vllm:cpu_cache_usage_perc",
    "vllm:num_requests_waiting",
];
const GROWTH: [&str; 4] = [
    "vllm:num_preemptions_total",
    "ernied_swapped_blocks_total{direction=\"out\"",
    "ernied_swapped_blocks_total{direction=\"in\"",
    "vllm:prompt_tokens_cached_total",
];

/// What was seen on the server's side.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Seen {
    pub(crate) resident_bytes_peak: Option<f64>,
    pub(crate) kv_usage_peak: Option<f64>,
    pub(crate) swap_usage_peak: Option<f64>,
    pub(crate) waiting_peak: Option<f64>,
    pub(crate) preemptions: Option<f64>,
    pub(crate) swapped_out_blocks: Option<f64>,
    pub(crate) swapped_in_blocks: Option<f64>,
    pub(crate) cached_prompt_tokens: Option<f64>,
}

/// Looks until it is told to end.
pub(super) struct Watch {
    end: oneshot::Sender<()>,
    looking: tokio::task::JoinHandle<Seen>,
}

impl Watch {
    pub(super) fn start(target: Arc<Target>) -> Self {
        let (end, mut ended) = oneshot::channel();
        let looking = tokio::spawn(async move {
            let (mut first, mut last, mut peaks) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
            let mut over = false;
            loop {
                if let Some(text) = target.metrics().await {
                    for name in PEAKS {
                        if let Some(now) = sum(&text, name) {
                            peaks.entry(name).and_modify(|peak: &mut f64| *peak = peak.max(now)).or_insert(now);
                        }
                    }
                    for name in GROWTH {
                        if let Some(now) = sum(&text, name) {
                            first.entry(name).or_insert(now);
                            last.insert(name, now);
                        }
                    }
                }
                if over {
                    break;
                }
                tokio::select! {
                    _ = &mut ended => over = true,
                    () = tokio::time::sleep(EVERY) => {}
                }
            }
            let peak = |name: &str| peaks.get(name).copied();
            let grown = |name: &str| Some(last.get(name)? - first.get(name)?);
            Seen {
                resident_bytes_peak: peak(PEAKS[0]),
                kv_usage_peak: peak(PEAKS[1]),
                swap_usage_peak: peak(PEAKS[2]),
                waiting_peak: peak(PEAKS[3]),
                preemptions: grown(GROWTH[0]),
                swapped_out_blocks: grown(GROWTH[1]),
                swapped_in_blocks: grown(GROWTH[2]),
                cached_prompt_tokens: grown(GROWTH[3]),
            }
        });
        Self { end, looking }
    }

    pub(super) async fn end(self) -> Seen {
        // It has ended by itself only if it panicked.
        let _ = self.end.send(());
        self.looking.await.unwrap_or_default()
    }
}

/// Sum over all series of a name; after `{` all parts given must be among the labels.
fn sum(text: &str, name: &str) -> Option<f64> {
    let (family, label) = name.split_once('{').unwrap_or((name, ""));
    let series = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(family)?;
        let labels = rest.strip_prefix('{').map_or("", |r| r.split('}').next().unwrap_or_default());
        let named = rest.starts_with('{') || rest.starts_with(' ');
        (named && labels.contains(label)).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok()).flatten()
    });
    series.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_name_and_label() {
        let text = "# TYPE a gauge\na{engine=\"0\"} 2\na{engine=\"1\"} 3\nab{} 9\n\
                    s_total{engine=\"0\",direction=\"out\"} 5\ns_total{engine=\"0\",direction=\"in\"} 7\nb 1.5\n";
        assert_eq!(sum(text, "a"), Some(5.0));
        assert_eq!(sum(text, "s_total{direction=\"in\""), Some(7.0));
        assert_eq!((sum(text, "b"), sum(text, "c")), (Some(1.5), None));
    }
}
