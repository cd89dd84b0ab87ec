//! Reads a TOML file into raw values with their positions. Knows which keys exist, not what they mean.
//!
//! Goes on after an error, so that one run tells everything that is wrong with a file.

use super::ConfigError;
use super::layers::{Layer, Origin, Raw};
use super::settings::{SETTINGS, by_key};
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Largest configuration file; a larger one is not a configuration.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads and checks keys: what was understood, and everything that was not.
pub fn read(path: &Path) -> (Layer, Vec<ConfigError>) {
    let fail = |message: String, remedy: &str| (Layer::default(), vec![ConfigError::file(path, None, message, remedy)]);
    match std::fs::metadata(path) {
        Err(e) => {
            return fail(format!("can not be read: {e}"), "check the path given with --config and its permissions");
        }
        Ok(meta) if meta.len() > FILE_BYTES_MAX => {
            let message = format!("has {} bytes, more than a configuration can have", meta.len());
            return fail(message, "is it the right file?");
        }
        Ok(_) => {}
    }
    match std::fs::read_to_string(path) {
        Err(e) => fail(format!("can not be read: {e}"), "it must be a readable UTF-8 text file"),
        Ok(text) => parse(path, &text),
    }
}

/// The same from text; `path` is for messages.
pub fn parse(path: &Path, text: &str) -> (Layer, Vec<ConfigError>) {
    let (table, syntax) = DeTable::parse_recoverable(text);
    let mut errors: Vec<ConfigError> = syntax
        .into_iter()
        .map(|e| {
            let line = e.span().map(|s| line_of(text, s.start));
            ConfigError::file(
                path,
                line,
                e.message().to_owned(),
                "mend the TOML; strings need quotes, tables [brackets]",
            )
        })
        .collect();
    let mut layer = Layer::default();
    for (section, value) in table.get_ref() {
        let name = section.get_ref().as_ref();
        let line = line_of(text, section.span().start);
        match value.get_ref() {
            DeValue::Table(inner) => {
                for (key, value) in inner {
                    let full = format!("{name}.{}", key.get_ref());
                    let line = line_of(text, key.span().start);
                    take(path, line, &full, value, &mut layer, &mut errors);
                }
            }
            _ => errors.push(unknown(path, line, name)),
        }
    }
    (layer, errors)
}

fn take(
    path: &Path,
    line: usize,
    key: &str,
    value: &Spanned<DeValue<'_>>,
    layer: &mut Layer,
    errors: &mut Vec<ConfigError>,
) {
    let Some(setting) = by_key(key) else {
        errors.push(unknown(path, line, key));
        return;
    };
    match raw(value.get_ref()) {
        Some(raw) => layer.set(setting, raw, Origin::File { path: path.to_owned(), line }),
        None => errors.push(ConfigError::file(
            path,
            Some(line),
            format!("{key} is a table or a date"),
            "write a string, a number, true/false, or an array of strings",
        )),
    }
}

fn raw(value: &DeValue<'_>) -> Option<Raw> {
    let one = |v: &DeValue<'_>| match v {
        DeValue::String(s) => Some(s.to_string()),
        DeValue::Integer(i) => i128::from_str_radix(i.as_str(), i.radix()).ok().map(|n| n.to_string()),
        DeValue::Float(f) => Some(f.as_str().to_owned()),
        DeValue::Boolean(b) => Some(b.to_string()),
        _ => None,
    };
    match value {
        DeValue::Array(items) => items.iter().map(|i| one(i.get_ref())).collect::<Option<_>>().map(Raw::List),
        other => one(other).map(Raw::Text),
    }
}

fn unknown(path: &Path, line: usize, key: &str) -> ConfigError {
    let remedy = match nearest(key) {
        Some(near) => format!("did you mean {near}?"),
        None => "`ernied check-config --example` prints every key".to_owned(),
    };
    ConfigError::file(path, Some(line), format!("there is no setting {key}"), &remedy)
}

/// The key that differs least, if it is near enough to be a slip.
pub(super) fn nearest(key: &str) -> Option<&'static str> {
    let bare = |k: &str| k.rsplit('.').next().unwrap_or(k).replace('-', "_");
    let asked = bare(key);
    SETTINGS
        .iter()
        .map(|s| (distance(&asked, &bare(s.key)).min(distance(&asked, &s.flag.replace('-', "_"))), s.key))
        .min()
        .filter(|(d, _)| *d <= asked.len() / 3)
        .map(|(_, key)| key)
}

/// Edits between two words, an exchange of neighbours counting as one (restricted Damerau-Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut d = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            if i == 0 || j == 0 {
                d[i][j] = i + j;
                continue;
            }
            let substituted = d[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            d[i][j] = substituted.min(d[i - 1][j] + 1).min(d[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                d[i][j] = d[i][j].min(d[i - 2][j - 2] + 1);
            }
        }
    }
    d[a.len()][b.len()]
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count()
}
