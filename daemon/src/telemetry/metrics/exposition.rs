//! Prometheus text and OpenMetrics from metric families.
//!
//! The crate's own encoder prints `le="1"`; Python clients, and so the matchers of existing boards, have `le="1.0"`.
//! Hence this one, which also writes OpenMetrics (counter families without `_total`, `# EOF`).

use super::FamilyDescription;
use super::families::Families;
use prometheus::proto::{LabelPair, MetricFamily, MetricType};
use std::fmt::Write;

/// What a scraper asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Prometheus,
    OpenMetrics,
}

impl Format {
    /// OpenMetrics only when it is named; browsers and curl get the old text.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let asked = |accept: &str| {
            accept.split(',').any(|part| {
                let mut words = part.split(';').map(str::trim);
                let media = words.next().unwrap_or("");
                let refused = words.any(|w| matches!(w, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"));
                media.eq_ignore_ascii_case("application/openmetrics-text") && !refused
            })
        };
        if accept.is_some_and(asked) { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Adds the copies under older names, in the order of names.
pub(super) fn with_aliases(
    mut families: Vec<MetricFamily>,
    aliases: &[(&str, &str, bool)],
    legacy: bool,
) -> Vec<MetricFamily> {
    for &(copy, original, only_legacy) in aliases {
        if only_legacy && !legacy {
            continue;
        }
        if let Some(family) = families.iter().find(|f| f.name() == original) {
            let mut family = family.clone();
            family.set_name(copy.to_owned());
            family.set_help(format!("Older name of {original}."));
            families.push(family);
        }
    }
    families.sort_by(|a, b| a.name().cmp(b.name()));
    families
}

pub(super) fn encode(families: &[MetricFamily], format: Format) -> String {
    // About 100 bytes a line; a wrong guess only costs a copy.
    let mut out = String::with_capacity(64 * 1024);
    for family in families {
        encode_family(&mut out, family, format);
    }
    if format == Format::OpenMetrics {
        out.push_str("# EOF\n");
    }
    out
}

fn encode_family(out: &mut String, family: &MetricFamily, format: Format) {
    let kind = family.get_field_type();
    let (header, sample, word) = names(family.name(), kind, format);
    let _ = write!(out, "# HELP {header} ");
    escape(out, family.help(), format == Format::OpenMetrics);
    let _ = writeln!(out, "\n# TYPE {header} {word}");
    for metric in family.get_metric() {
        let labels = metric.get_label();
        match kind {
            MetricType::COUNTER => line(out, sample, "", labels, None, metric.get_counter().get_value()),
            MetricType::GAUGE => line(out, sample, "", labels, None, metric.get_gauge().get_value()),
            MetricType::HISTOGRAM => {
                let h = metric.get_histogram();
                for bucket in h.get_bucket() {
                    if bucket.upper_bound().is_finite() {
                        let le = number(bucket.upper_bound());
                        line(out, sample, "_bucket", labels, Some(&le), bucket.cumulative_count() as f64);
                    }
                }
                line(out, sample, "_bucket", labels, Some("+Inf"), h.get_sample_count() as f64);
                line(out, sample, "_sum", labels, None, h.get_sample_sum());
                line(out, sample, "_count", labels, None, h.get_sample_count() as f64);
            }
            MetricType::SUMMARY | MetricType::UNTYPED => {} // we make none
        }
    }
}

/// Header name, sample name, type word.
fn names(name: &str, kind: MetricType, format: Format) -> (&str, &str, &'static str) {
    match (kind, format) {
        (MetricType::COUNTER, Format::OpenMetrics) => match name.strip_suffix("_total") {
            Some(bare) => (bare, name, "counter"),
            None => (name, name, "unknown"), // an OpenMetrics counter must end in _total
        },
        (MetricType::COUNTER, Format::Prometheus) => (name, name, "counter"),
        (MetricType::HISTOGRAM, _) => (name, name, "histogram"),
        _ => (name, name, "gauge"),
    }
}

fn line(out: &mut String, name: &str, suffix: &str, labels: &[LabelPair], le: Option<&str>, value: f64) {
    out.push_str(name);
    out.push_str(suffix);
    let mut open = '{';
    for pair in labels {
        out.push(open);
        open = ',';
        out.push_str(pair.name());
        out.push_str("=\"");
        escape(out, pair.value(), true);
        out.push('"');
    }
    if let Some(le) = le {
        out.push(open);
        open = ',';
        let _ = write!(out, "le=\"{le}\"");
    }
    if open == ',' {
        out.push('}');
    }
    out.push(' ');
    out.push_str(&number(value));
    out.push('\n');
}

/// As Python prints a float: `1.0`, `0.001`, `1e+16`, `+Inf`.
fn number(value: f64) -> String {
    if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else if value.is_nan() {
        "NaN".to_owned()
    } else {
        // Debug keeps `.0` and the shortest digits that read back as the same number.
        format!("{value:?}")
    }
}

fn escape(out: &mut String, text: &str, quotes: bool) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes => out.push_str("\\\""),
            c => out.push(c),
        }
    }
}

pub(super) fn describe(families: &Families, aliases: &[(&str, &str, bool)]) -> Vec<FamilyDescription> {
    let mut all = families.described();
    for &(copy, original, _) in aliases {
        if let Some(family) = all.iter().find(|f| f.name == original) {
            let help = format!("Older name of {original}.");
            all.push(FamilyDescription { name: copy.to_owned(), help, ..family.clone() });
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}
