//! Log lines: format, destination, level at run time.
//!
//! Standard output (systemd's journal) and, when asked for, a file that rotates by size. Both are written by their own
//! thread behind a bounded queue: a full disk or a stuck pipe costs lines, which are counted, never a request.

mod fold;
mod format;
mod sink;

use crate::config::{LogFormat, LoggingConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

pub use fold::Repeated;
pub use sink::Rotation;

/// Lines that may wait for a slow disk or pipe. About 10 MB at 80 bytes a line.
const QUEUED_LINES_MAX: usize = 128_000;

/// What keeps logging going and steers it. Dropping it flushes and ends it.
pub struct Logging {
    control: LogControl,
    _guards: Vec<tracing_appender::non_blocking::WorkerGuard>,
}

impl std::fmt::Debug for Logging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Logging").finish_non_exhaustive()
    }
}

/// Steers logging from the admin socket.
#[derive(Clone)]
pub struct LogControl {
    filter: reload::Handle<EnvFilter, Registry>,
    rotation: Option<Rotation>,
    dropped: Arc<dyn Fn() -> u64 + Send + Sync>,
    fold: fold::Fold,
}

impl std::fmt::Debug for LogControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogControl").finish_non_exhaustive()
    }
}

/// Why a level was not changed.
#[derive(Debug, thiserror::Error)]
pub enum LevelError {
    #[error("{0:?}: {1}")]
    Refused(String, String),
    #[error("the log subscriber is gone")]
    Gone,
}

impl LogControl {
    /// Changes the level at once.
    pub fn set_level(&self, level: &str) -> Result<(), LevelError> {
        crate::config::parse::level(level).map_err(|expected| LevelError::Refused(level.to_owned(), expected))?;
        let filter = EnvFilter::builder().parse_lossy(level);
        self.filter.reload(filter).map_err(|_| LevelError::Gone)
    }

    /// The level as directives.
    pub fn level(&self) -> String {
        self.filter.with_current(ToString::to_string).unwrap_or_default()
    }

    /// Begins a new log file. `false`: there is no log file.
    pub fn rotate(&self) -> bool {
        self.rotation.as_ref().map(Rotation::request).is_some()
    }

    /// Opens the file of the same name again (for an outside logrotate). `false`: there is no log file.
    pub fn reopen(&self) -> bool {
        self.rotation.as_ref().map(Rotation::request_reopen).is_some()
    }

    /// The log file. `None`: standard output only.
    pub fn file(&self) -> Option<std::path::PathBuf> {
        self.rotation.as_ref().map(|r| r.path().to_owned())
    }

    /// Warnings that were held back because they repeated, since the last call.
    pub fn repeated(&self) -> Vec<Repeated> {
        self.fold.drain()
    }

    /// Lines lost so far.
    pub fn dropped(&self) -> u64 {
        (self.dropped)()
    }
}

/// A log file that can not be opened.
#[derive(Debug, thiserror::Error)]
#[error("log file {path}: {source}; create its folder, or give another one with --log-file")]
pub struct LogFileError {
    path: std::path::PathBuf,
    source: std::io::Error,
}

impl Logging {
    /// Installs the subscriber for the whole process.
    pub fn start(config: &LoggingConfig) -> Result<Self, LogFileError> {
        let (subscriber, logging) = Self::build(config)?;
        subscriber.init();
        Ok(logging)
    }

    /// The subscriber, not yet installed anywhere.
    pub(crate) fn build(
        config: &LoggingConfig,
    ) -> Result<(impl tracing::Subscriber + Send + Sync + 'static, Self), LogFileError> {
        let mut guards = Vec::new();
        let (filter, handle) = reload::Layer::new(EnvFilter::builder().parse_lossy(&config.level));
        let (stdout, guard) = tracing_appender::non_blocking::NonBlockingBuilder::default()
            .buffered_lines_limit(QUEUED_LINES_MAX)
            .lossy(true)
            .thread_name("log-stdout")
            .finish(std::io::stdout());
        guards.push(guard);
        let mut counters = vec![stdout.error_counter()];
        let mut layers: Vec<Box<dyn Layer<_> + Send + Sync>> = vec![format::layer(config.format, stdout)];
        let mut rotation = None;
        let failed = Arc::new(AtomicU64::new(0));
        if let Some(path) = &config.file {
            let (file, control) = sink::RotatingFile::open(path, config, Arc::clone(&failed))
                .map_err(|source| LogFileError { path: path.clone(), source })?;
            rotation = Some(control);
            let (file, guard) = tracing_appender::non_blocking::NonBlockingBuilder::default()
                .buffered_lines_limit(QUEUED_LINES_MAX)
                .lossy(true)
                .thread_name("log-file")
                .finish(file);
            guards.push(guard);
            counters.push(file.error_counter());
            layers.push(format::layer(config.format, file));
        }
        let dropped = move || {
            let queued: usize = counters.iter().map(tracing_appender::non_blocking::ErrorCounter::dropped_lines).sum();
            queued as u64 + failed.load(Ordering::Relaxed)
        };
        let fold = fold::Fold::default();
        let subscriber = tracing_subscriber::registry().with(filter).with(layers.with_filter(fold.clone()));
        let control = LogControl { filter: handle, rotation, dropped: Arc::new(dropped), fold };
        Ok((subscriber, Self { control, _guards: guards }))
    }

    pub fn control(&self) -> &LogControl {
        &self.control
    }
}

/// The words that the owner's documents grep for, as the format chosen prints them (requirements L2, L5).
#[derive(Debug, Clone, Copy)]
pub struct Milestones {
    format: LogFormat,
}

impl Milestones {
    pub fn new(format: LogFormat) -> Self {
        Self { format }
    }

    pub fn format(self) -> LogFormat {
        self.format
    }

    pub fn starting(self) {
        tracing::info!("Starting ernied {}...", env!("CARGO_PKG_VERSION"));
    }

    pub fn loading(self, model: &str) {
        tracing::info!("Loading model from {model}...");
    }

    pub fn engine_config(self, model: &str, tokenizer: &str, dtype: &str) {
        tracing::info!(
            "Started engine with config: model='{model}', tokenizer='{tokenizer}', tensor_parallel_size=1, dtype={dtype}"
        );
    }

    pub fn loaded(self, used_bytes: u64, limit_bytes: u64) {
        // The words are the owner's; on a machine without a GPU it is the memory of the worker.
        let gb = |bytes: u64| bytes as f64 / 1e9;
        tracing::info!("Model loaded successfully. GPU memory usage: {:.1}/{:.1} GB", gb(used_bytes), gb(limit_bytes));
    }

    pub fn listening(self, url: &str) {
        tracing::info!("HTTP server started at {url}");
    }

    pub fn engine_started(self) {
        tracing::info!("Engine started.");
    }

    /// The last line: ready.
    pub fn serving(self, url: &str) {
        tracing::info!("Serving on {url}");
    }
}

#[cfg(test)]
mod tests;
