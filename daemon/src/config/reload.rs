//! Compares two configurations: what a reload may apply, what it has to refuse.

use super::layers::{Layers, Raw};
use super::settings::{Change, SETTINGS};

/// One key that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub key: &'static str,
    pub change: Change,
    /// Secrets as `(secret)`.
    pub before: Option<String>,
    pub after: Option<String>,
}

/// All keys whose winning value differs, whatever its origin.
pub fn diff(before: &Layers, after: &Layers) -> Vec<Difference> {
    SETTINGS
        .iter()
        .filter_map(|setting| {
            let old = before.winner(setting).map(|(raw, _)| raw);
            let new = after.winner(setting).map(|(raw, _)| raw);
            let hide = |raw: &Raw| if setting.secret() { "(secret)".to_owned() } else { super::resolve::show(raw) };
            (old != new).then(|| Difference {
                key: setting.key,
                change: setting.change,
                before: old.as_ref().map(hide),
                after: new.as_ref().map(hide),
            })
        })
        .collect()
}

/// The keys that stand in the way of applying `differences` without a restart.
pub fn blockers(differences: &[Difference]) -> Vec<&Difference> {
    differences.iter().filter(|d| !matches!(d.change, Change::Live | Change::Model)).collect()
}
