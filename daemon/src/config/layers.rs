//! Which origin wins: flags over environment over file over defaults.

use super::settings::{COMPAT, Effect, Kind, SETTINGS, Setting};
use super::{ConfigError, Environment};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A value before it means anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Raw {
    Text(String),
    List(Vec<String>),
}

/// Where a value was said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Default,
    File {
        path: PathBuf,
        line: usize,
    },
    Env(String),
    Flag(String),
    /// Changed at run time by `ernie-ctl set`.
    Set,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::Flag(flag) => write!(f, "--{flag}"),
            Self::Set => f.write_str("ernie-ctl set"),
        }
    }
}

/// What one source said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    values: BTreeMap<&'static str, (Raw, Origin)>,
    /// Flags that are taken without effect, said once at start.
    pub notices: Vec<String>,
}

impl Layer {
    pub fn set(&mut self, setting: &'static Setting, raw: Raw, origin: Origin) {
        self.values.insert(setting.key, (raw, origin));
    }

    pub fn get(&self, key: &str) -> Option<&(Raw, Origin)> {
        self.values.get(key)
    }

    pub fn remove(&mut self, key: &str) {
        self.values.remove(key);
    }

    pub fn keys(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.values.keys().copied()
    }
}

/// The environment: `ERNIED_*`. `VLLM_API_KEY` is taken as a key too, as vLLM does. A name of that form that is no setting
/// is an error: it is a typing mistake that would otherwise stay silent.
pub fn from_env(vars: impl IntoIterator<Item = (String, String)>) -> (Layer, Vec<ConfigError>) {
    /// Read elsewhere: ernie-ctl's own, the kernels' override, the test suite's.
    const ELSEWHERE: &[&str] = &["ERNIED_CONFIG", "ERNIED_ADMIN_SOCKET", "ERNIED_ISA", "ERNIED_URL"];
    let mut layer = Layer::default();
    let mut errors = Vec::new();
    for (name, value) in vars {
        let is_vllm_key = name == "VLLM_API_KEY";
        let setting = if is_vllm_key {
            SETTINGS.iter().find(|s| s.flag == "api-key")
        } else {
            SETTINGS.iter().find(|s| s.env() == name)
        };
        match setting {
            Some(_) if is_vllm_key && layer.get("server.api_keys").is_some() => {}
            Some(s) => layer.set(s, raw_of(s, value), Origin::Env(name)),
            None if !name.starts_with("ERNIED_") || ELSEWHERE.contains(&name.as_str()) => {}
            None if name.starts_with("ERNIED_TEST_") => {}
            None => {
                let flag = name.trim_start_matches("ERNIED_").to_lowercase();
                let remedy = match super::file::nearest(&flag) {
                    Some(key) => {
                        let near = super::settings::by_key(key).map(Setting::env).unwrap_or_default();
                        format!("did you mean {near}? Else unset it")
                    }
                    None => "unset it; `ernied check-config --example` prints every setting".to_owned(),
                };
                errors.push(ConfigError {
                    key: name.clone(),
                    origin: "environment".to_owned(),
                    value: None,
                    message: format!("no setting has the environment variable {name}"),
                    remedy,
                });
            }
        }
    }
    (layer, errors)
}

fn raw_of(setting: &Setting, text: String) -> Raw {
    match setting.kind {
        Kind::List(_) | Kind::SecretList(_) => {
            Raw::List(text.split(',').map(|p| p.trim().to_owned()).filter(|p| !p.is_empty()).collect())
        }
        Kind::Switch | Kind::Value(_) => Raw::Text(text),
    }
}

/// Applies a flag of [`COMPAT`]; `values` are as given.
pub fn apply_compat(layer: &mut Layer, flag: &str, values: &[String]) -> Result<(), ConfigError> {
    let Some(compat) = COMPAT.iter().find(|c| c.flag == flag) else { return Ok(()) };
    let value = values.last().cloned().unwrap_or_default();
    let on = !(compat.kind == Kind::Switch && value == "false");
    let by_key = |key: &str| super::settings::by_key(key).expect("compat rows name existing keys");
    match compat.effect {
        Effect::Sets(key, v) if on => {
            if layer.get(key).is_none() {
                layer.set(by_key(key), Raw::Text(v.to_owned()), Origin::Flag(flag.to_owned()));
            }
        }
        Effect::Renamed(key) => {
            let target = by_key(key);
            match layer.get(key) {
                Some((Raw::Text(other), origin)) if *other != value => {
                    return Err(ConfigError {
                        key: target.key.to_owned(),
                        origin: format!("--{flag}"),
                        value: Some(value),
                        message: format!("is the same setting as --{}, which says {other} ({origin})", target.flag),
                        remedy: format!("give one of them; --{flag} is only another word for --{}", target.flag),
                    });
                }
                Some(_) => {}
                None => layer.set(target, Raw::Text(value), Origin::Flag(flag.to_owned())),
            }
            layer.notices.push(format!("--{flag} is another word for --{}; it selects nothing else", target.flag));
        }
        Effect::Nothing(why) if on => layer.notices.push(format!("--{flag} has no effect: {why}")),
        Effect::Only(only, why) if value != only => {
            return Err(ConfigError {
                key: flag.to_owned(),
                origin: format!("--{flag}"),
                value: Some(value),
                message: format!("only {only} is possible: {why}"),
                remedy: format!("leave --{flag} out"),
            });
        }
        Effect::Sets(..) | Effect::Nothing(_) | Effect::Only(..) => {}
    }
    Ok(())
}

/// The layers in their order; the first that has a key wins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layers {
    /// `ernie-ctl set`.
    pub run_time: Layer,
    pub flags: Layer,
    pub env: Layer,
    pub file: Layer,
}

impl Layers {
    /// The winner. `None`: not set anywhere and no default.
    pub fn winner(&self, setting: &'static Setting) -> Option<(Raw, Origin)> {
        [&self.run_time, &self.flags, &self.env, &self.file]
            .iter()
            .find_map(|layer| layer.get(setting.key).cloned())
            .or_else(|| {
                (!setting.default.is_empty()).then(|| (raw_of(setting, setting.default.to_owned()), Origin::Default))
            })
    }

    pub fn notices(&self) -> impl Iterator<Item = &String> {
        self.flags.notices.iter()
    }
}

/// Everything a configuration comes from, kept for reloads.
#[derive(Debug, Clone)]
pub struct Sources {
    pub layers: Layers,
    pub config_file: Option<PathBuf>,
    pub environment: Environment,
}
