//! How things look: tables for people, JSON for programs, colours on a terminal only.

use anyhow::Result;
use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Prints JSON when asked, else calls `people`.
pub(crate) fn show<T: Serialize>(json: bool, value: &T, people: impl FnOnce(&T) -> String) -> Result<()> {
    let text = if json { serde_json::to_string_pretty(value)? + "\n" } else { people(value) };
    print(&text)
}

/// To standard output; a closed pipe ends the program silently.
#[expect(clippy::exit, reason = "the reader of the pipe left: nothing more can be said")]
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    let text: String = table.to_string().lines().map(|l| format!("{}\n", l.trim_end())).collect();
    text
}

pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

pub(crate) fn seconds(s: f64) -> String {
    if s < 0.001 {
        return format!("{:.0} µs", s * 1e6);
    }
    if s < 1.0 {
        return format!("{:.0} ms", s * 1e3);
    }
    let whole = Duration::from_secs_f64(s).as_secs();
    match whole {
        0..=59 => format!("{s:.1} s"),
        60..=3599 => format!("{} min {} s", whole / 60, whole % 60),
        3600..=86_399 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// 300 M, 21.8 B.
pub(crate) fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// Bold, on a terminal.
pub(crate) fn bold(text: &str) -> String {
    paint(text, "1")
}

pub(crate) fn good(text: &str) -> String {
    paint(text, "32")
}

pub(crate) fn bad(text: &str) -> String {
    paint(text, "31")
}

pub(crate) fn warn(text: &str) -> String {
    paint(text, "33")
}

fn paint(text: &str, code: &str) -> String {
    let plain = !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some();
    if plain { text.to_owned() } else { format!("\x1b[{code}m{text}\x1b[0m") }
}

/// Seconds since 1970 as local time.
pub(crate) fn moment(unix: i64) -> String {
    jiff::Timestamp::from_second(unix)
        .map(|t| t.to_zoned_datetime(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string())
        .unwrap_or_else(|_| unix.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_as_people_write_them() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(seconds(0.0123), "12 ms");
        assert_eq!(seconds(75.0), "1 min 15 s");
        assert_eq!(seconds(90_000.0), "1 d 1 h");
        assert_eq!(count(361_000_000), "361.0 M");
    }
}
