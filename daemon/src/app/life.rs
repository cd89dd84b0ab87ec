//! From ready to gone: signals, what systemd is told, the statistics line, the drain.

use super::listen::Front;
use crate::admin::Control;
use crate::supervisor::{DrainEnd, FleetHandle, FleetState, FleetStatus};
use crate::system::signals::{Asked, Signals};
use crate::system::{memory, notify};
use crate::telemetry::logging::Milestones;
use crate::telemetry::traces::Traces;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// vLLM's line of averages comes this often.
const STATISTICS_INTERVAL: Duration = Duration::from_secs(10);
/// Responses that are already written may take this long to reach their clients after the drain.
const LAST_BYTES_PATIENCE: Duration = Duration::from_secs(3);
/// A request on a connection that was accepted before the stop is taken within this.
const LATE_REQUESTS_PATIENCE: Duration = Duration::from_secs(2);
/// Asked of systemd with every sign of a load that moves.
const START_EXTENSION: Duration = Duration::from_secs(60);

/// Everything that runs.
pub(super) struct Daemon {
    pub(super) signals: Signals,
    pub(super) milestones: Milestones,
    pub(super) fleet: FleetHandle,
    pub(super) http: Arc<crate::http::Api>,
    pub(super) front: Front,
    /// systemd keeps the socket and hands it to our successor.
    pub(super) socket_outlives_us: bool,
    pub(super) control: Arc<Control>,
    pub(super) url: String,
    pub(super) traces: Option<Arc<Traces>>,
    /// Held to the end: nobody else may write our state.
    pub(super) _state_lock: std::fs::File,
}

/// Why the main loop ended.
enum End {
    Asked,
    /// The first model can not be loaded; the reason was logged.
    NeverServed,
}

impl Daemon {
    pub(super) async fn live(mut self) -> ExitCode {
        let end = self.serve().await;
        let code = match end {
            End::Asked => ExitCode::SUCCESS,
            End::NeverServed => ExitCode::FAILURE,
        };
        self.leave().await;
        code
    }

    async fn serve(&mut self) -> End {
        let mut watch = self.fleet.watch();
        let mut statistics = interval(STATISTICS_INTERVAL);
        statistics.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watchdog = interval(notify::watchdog_interval().unwrap_or(Duration::from_secs(3600)));
        let mut told = Told::default();
        let mut asked_to_leave = self.control.asked_to_leave();
        loop {
            tokio::select! {
                asked = self.signals.next() => match asked {
                    Asked::Stop => return End::Asked,
                    Asked::Reload => self.reload().await,
                    Asked::Reopen => {
                        self.control.log().reopen();
                    }
                },
                changed = asked_to_leave.changed() => {
                    if changed.is_ok() && *asked_to_leave.borrow() {
                        return End::Asked;
                    }
                }
                changed = watch.changed() => {
                    let status = watch.borrow_and_update().clone();
                    if changed.is_err() || (status.state == FleetState::Failed && !told.ready) {
                        let reason = status.reason.clone().unwrap_or_else(|| "the supervisor has stopped".to_owned());
                        tracing::error!("no model could be loaded: {reason}");
                        return End::NeverServed;
                    }
                    self.tell(&status, &mut told);
                }
                _ = watchdog.tick() => told.feed(&self.fleet.status(), self.control.config().workers.stall_timeout),
                _ = statistics.tick() => self.statistics(&mut told),
            }
        }
    }

    async fn reload(&self) {
        notify::reloading();
        let outcome = self.control.reload_on_signal().await;
        notify::ready(&outcome);
    }

    /// Milestones once, status text when it changes.
    fn tell(&self, status: &FleetStatus, told: &mut Told) {
        let text = summary(status);
        if !told.ready && status.is_ready() {
            told.ready = true;
            let limit = memory::limit_bytes().unwrap_or(0);
            let used: u64 =
                status.workers.iter().filter_map(|w| w.pid).filter_map(memory::process).map(|p| p.resident_bytes).sum();
            self.milestones.loaded(used, limit);
            self.milestones.listening(&self.url);
            self.milestones.engine_started();
            self.control.say_how_to_try(&self.url);
            self.milestones.serving(&self.url);
            notify::ready(&text);
        } else if text != told.text && told.at.is_none_or(|at| at.elapsed() >= Duration::from_secs(1)) {
            notify::status(&text);
            if !told.ready {
                tracing::info!("{text}");
                notify::extend_start(START_EXTENSION);
            }
            told.at = Some(Instant::now());
            told.text = text;
        }
    }

    /// vLLM's line: the same figures in the same order.
    fn statistics(&self, told: &mut Told) {
        for repeated in self.control.log().repeated() {
            tracing::warn!(target: "ernied::repeated", place = repeated.place, count = repeated.count, "warnings held back");
        }
        self.control.metrics().log_lines_dropped(self.control.log().dropped());
        let status = self.fleet.status();
        let s = &status.stats;
        let idle = s.generated_tokens == told.generated && s.running == 0 && s.waiting == 0;
        told.generated = s.generated_tokens;
        if !told.ready || idle || !self.control.config().logging.stats {
            return;
        }
        let used = s.blocks_total.saturating_sub(s.blocks_free);
        let share = |part: f64, whole: f64| if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
        tracing::info!(
            "Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, Running: {} reqs, \
             Waiting: {} reqs, GPU KV cache usage: {:.1}%, Prefix cache hit rate: {:.1}%",
            status.prompt_tokens_per_second,
            status.tokens_per_second,
            s.running,
            s.waiting,
            share(f64::from(used), f64::from(s.blocks_total)),
            share(s.prefix_hits_tokens as f64, s.prefix_queries_tokens as f64),
        );
    }

    /// Readiness first, then lame duck, then those who came before the end of it, then the deadline. A second signal ends it at once.
    async fn leave(&mut self) {
        let server = self.control.config().server.clone();
        let fleet = self.fleet.clone();
        let control = Arc::clone(&self.control);
        let http = Arc::clone(&self.http);
        notify::stopping("draining");
        let calm = async {
            http.withdraw_readiness();
            if self.socket_outlives_us {
                self.front.stop_accepting();
            }
            if !server.lame_duck.is_zero() {
                tracing::info!(seconds = server.lame_duck.as_secs_f64(), "not ready any more; still taking requests");
                tokio::time::sleep(server.lame_duck).await;
            }
            let deadline = Instant::now() + server.drain_timeout;
            if self.socket_outlives_us {
                // Nobody who comes later is ours, so whoever has come is served, and only then is the fleet told to refuse.
                self.front.ended(LATE_REQUESTS_PATIENCE.min(server.drain_timeout)).await;
            }
            // Without an heir the socket stays open meanwhile, so that newcomers, probes and scrapes get a truthful answer.
            let report = fleet.drain(deadline.saturating_duration_since(Instant::now()), DrainEnd::Leave).await;
            tracing::info!(finished = report.finished, failed = report.failed, "drained");
            self.front.stop_accepting();
            self.front.ended(LAST_BYTES_PATIENCE).await;
        };
        let signals = &mut self.signals;
        let again = async { while signals.next().await != Asked::Stop {} };
        tokio::select! {
            () = calm => {}
            () = again => tracing::warn!("asked again to stop: leaving at once"),
        }
        fleet.shutdown().await;
        super::swap::delete_files(&control.config());
        if let Some(traces) = self.traces.take() {
            // It waits for its thread and for the collector; bounded by its own patience.
            let _ = tokio::task::spawn_blocking(move || traces.close()).await;
        }
        control.close().await;
        tracing::info!("Stopped.");
    }
}

/// What was already said.
#[derive(Default)]
struct Told {
    ready: bool,
    text: String,
    at: Option<Instant>,
    generated: u64,
    sequence: u64,
}

impl Told {
    /// Feeds systemd's watchdog when the supervisor has published since the last time and no worker's step is far overdue.
    fn feed(&mut self, status: &FleetStatus, stall_timeout: Duration) {
        let overdue = status.last_step_age().is_some_and(|age| age > stall_timeout * 3);
        if status.sequence != self.sequence && !overdue {
            self.sequence = status.sequence;
            notify::watchdog();
        }
    }
}

/// One line for `systemctl status`.
fn summary(status: &FleetStatus) -> String {
    let loading = status.workers.iter().find_map(|w| w.load.as_ref());
    match status.state {
        FleetState::Serving => {
            let name = status.active_deployment().and_then(|d| d.served_names.first()).map_or("model", String::as_str);
            let s = &status.stats;
            format!(
                "serving {name}: {} running, {} waiting, {:.0} tokens/s",
                s.running, s.waiting, status.tokens_per_second
            )
        }
        FleetState::Starting => match loading {
            Some(p) if p.bytes_total > 0 => {
                let percent = p.bytes_done.min(p.bytes_total) * 100 / p.bytes_total;
                format!("loading: {percent} % ({})", crate::admin::phase_word(p.phase))
            }
            _ => "starting the worker".to_owned(),
        },
        state => status.reason.clone().map_or_else(|| state.to_string(), |reason| format!("{state}: {reason}")),
    }
}
