//! The configuration as text: with origins for people, as an example file, as a reference page.

use super::layers::Layers;
use super::resolve::show;
use super::settings::{Change, Kind, SETTINGS, Setting};
use std::fmt::Write;

/// One row of `config show`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    pub key: &'static str,
    /// Secrets as `(secret)`; nothing when not set.
    pub value: Option<String>,
    pub origin: String,
    pub change: Change,
}

/// All settings with their winners.
pub fn all(layers: &Layers) -> Vec<Shown> {
    SETTINGS.iter().map(|s| one(layers, s)).collect()
}

fn one(layers: &Layers, setting: &'static Setting) -> Shown {
    let (value, origin) = match layers.winner(setting) {
        Some((_, origin)) if setting.secret() => (Some("(secret)".to_owned()), origin.to_string()),
        Some((raw, origin)) => (Some(show(&raw)), origin.to_string()),
        None => (None, "not set".to_owned()),
    };
    Shown { key: setting.key, value, origin, change: setting.change }
}

/// An example file: every setting, commented out, with its default.
pub fn example() -> String {
    let mut out = String::from(
        "# ernied: every setting, with its default. Precedence: flags, ERNIED_* environment, this file, defaults.\n\
         # `ernied check-config --config FILE` tells everything that is wrong with a file.\n",
    );
    let mut section = "";
    for s in SETTINGS {
        let (own, name) = s.key.split_once('.').expect("keys have a section");
        if own != section {
            section = own;
            let _ = write!(out, "\n[{own}]\n");
        }
        let effect = match s.change {
            Change::Live => "applied by a reload",
            Change::Model => "rolled out by a reload",
            Change::Workers => "needs the model to load again",
            Change::Daemon => "needs a restart",
        };
        let _ = writeln!(out, "# {} ({effect}; --{}, {})", s.help, s.flag, s.env());
        let value = match s.kind {
            Kind::Switch => s.default.to_owned(),
            Kind::Value(_) if s.default.parse::<f64>().is_ok() && !s.default.starts_with("06") => s.default.to_owned(),
            Kind::Value(_) => format!("{:?}", s.default),
            Kind::List(_) | Kind::SecretList(_) if s.default.is_empty() => "[]".to_owned(),
            Kind::List(_) | Kind::SecretList(_) => format!("[{:?}]", s.default),
        };
        let _ = writeln!(out, "#{name} = {value}");
    }
    out
}

/// The table of docs/configuration.md.
pub fn reference() -> String {
    let mut out =
        String::from("| key | flag | environment | default | a change | what it is |\n|---|---|---|---|---|---|\n");
    for s in SETTINGS {
        let change = match s.change {
            Change::Live => "reload",
            Change::Model => "reload rolls it out",
            Change::Workers => "model loads again",
            Change::Daemon => "restart",
        };
        let default = if s.default.is_empty() { String::new() } else { format!("`{}`", s.default) };
        let help = s.help.replace('|', "\\|");
        let _ = writeln!(out, "| `{}` | `--{}` | `{}` | {default} | {change} | {help} |", s.key, s.flag, s.env());
    }
    out
}
