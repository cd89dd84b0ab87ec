//! Four shapes of a line: `text` and `json` for us, `vllm` and `bracket` for the greps of existing documents.

use crate::config::LogFormat;
use jiff::ZonedDateTime;
use std::fmt;
use tracing::{Event, Level, Subscriber};
use tracing_appender::non_blocking::NonBlocking;
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// A layer that writes to `out`.
pub(super) fn layer<S>(format: LogFormat, out: NonBlocking) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(out).with_ansi(false);
    match format {
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
        LogFormat::Text => layer.event_format(Line::Text).boxed(),
        LogFormat::Vllm => layer.event_format(Line::Vllm).boxed(),
        LogFormat::Bracket => layer.event_format(Line::Bracket).boxed(),
    }
}

/// Line formats for people.
#[derive(Debug, Clone, Copy)]
enum Line {
    /// `2026-01-26T14:22:32.123+08:00  INFO ernied::app: text field=value`
    Text,
    /// `INFO 01-26 14:22:32 [app.rs:145] text field=value`
    Vllm,
    /// `[2024-06-15 14:22:07] INFO text field=value`
    Bracket,
}

fn level(level: Level) -> &'static str {
    // vLLM and the documents say WARNING where we say WARN.
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARNING",
        Level::INFO => "INFO",
        Level::DEBUG => "DEBUG",
        Level::TRACE => "TRACE",
    }
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut w: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let now = ZonedDateTime::now();
        let meta = event.metadata();
        match self {
            Line::Text => {
                write!(w, "{} {:>5} ", now.strftime("%Y-%m-%dT%H:%M:%S%.3f%:z"), meta.level())?;
                for span in ctx.event_scope().into_iter().flat_map(|s| s.from_root()) {
                    write!(w, "{}: ", span.name())?;
                }
                write!(w, "{}: ", meta.target())?;
            }
            Line::Vllm => {
                let file = meta.file().and_then(|f| f.rsplit('/').next()).unwrap_or("-");
                let time = now.strftime("%m-%d %H:%M:%S");
                write!(w, "{} {time} [{file}:{}] ", level(*meta.level()), meta.line().unwrap_or(0))?;
            }
            Line::Bracket => write!(w, "[{}] {} ", now.strftime("%Y-%m-%d %H:%M:%S"), level(*meta.level()))?,
        }
        ctx.format_fields(w.by_ref(), event)?;
        writeln!(w)
    }
}
