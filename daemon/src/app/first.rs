//! Which model a start serves: the one that the configuration names, or what was swapped in since it named it.
//!
//! The record in the state directory (`model_store::Links`) says what the last completed rollout put in its place. A folder
//! that can not be served any more is passed over with a warning: the one that served before it, then the configured one.

use super::StartError;
use crate::config::Config;
use crate::model_store::{self, Configured, Links, Served, VerifiedModel};
use crate::text::TextModel;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model that can be loaded, and what a rollback would go back to.
#[derive(Debug)]
pub(super) struct First {
    pub(super) verified: VerifiedModel,
    pub(super) text: Arc<TextModel>,
    pub(super) text_dir: PathBuf,
    pub(super) served_names: Vec<String>,
    pub(super) previous: Option<Served>,
    pub(super) links: Links,
    pub(super) configured: Configured,
    /// Folders that should have been served and can not be.
    pub(super) passed_over: Vec<(PathBuf, String)>,
}

/// The record's folder in the state directory.
pub(super) fn links(state_dir: &Path) -> Links {
    Links::new(state_dir.join("models"))
}

/// What the configuration names, as it is on disk now.
pub(super) fn configured(config: &Config, model_dir: &Path) -> Configured {
    Configured {
        dir: model_dir.to_owned(),
        revision: model_store::revision_on_disk(model_dir),
        served_names: config.model.served_names.clone(),
    }
}

/// Chooses and reads it; blocks.
pub(super) fn choose(config: &Config, model_dir: &Path) -> Result<First, StartError> {
    let links = links(&config.paths.state_dir);
    let configured = configured(config, model_dir);
    let mut passed_over = Vec::new();
    if let Some(serving) = links.resume(&configured) {
        let current = serving.current.clone();
        let ways = std::iter::once((current, serving.previous.clone())).chain(serving.previous.map(|p| (p, None)));
        for (served, previous) in ways {
            match open(&served) {
                Ok((verified, text)) => {
                    return Ok(First {
                        text_dir: verified.dir().to_owned(),
                        verified,
                        text,
                        served_names: served.served_names,
                        previous,
                        links,
                        configured,
                        passed_over,
                    });
                }
                Err(reason) => passed_over.push((served.dir, reason)),
            }
        }
    }
    let verified = model_store::verify_for_load(model_dir, true)?;
    let text_dir = config.model.tokenizer.clone().unwrap_or_else(|| model_dir.to_owned());
    let text = TextModel::load(&text_dir).map_err(|source| StartError::Text { dir: text_dir.clone(), source })?;
    let served_names = config.model.served_names.clone();
    Ok(First { verified, text: Arc::new(text), text_dir, served_names, previous: None, links, configured, passed_over })
}

/// Reads a folder that served before; it has to hold what it held then.
fn open(served: &Served) -> Result<(VerifiedModel, Arc<TextModel>), String> {
    let verified = model_store::verify_for_load(&served.dir, served.unsealed).map_err(|e| e.to_string())?;
    if verified.revision() != served.revision {
        return Err(format!("it holds revision {} now, not {} that served", verified.revision(), served.revision));
    }
    let text = TextModel::load(verified.dir()).map_err(|e| e.to_string())?;
    Ok((verified, Arc::new(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::layers::{Layer, Layers, Origin, Raw};
    use crate::config::settings::by_key;
    use crate::config::{Environment, resolve};
    use crate::model_store::Serving;

    fn model(at: &Path, note: &str) -> Served {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny-dense");
        std::fs::create_dir_all(at).expect("a folder");
        for entry in std::fs::read_dir(from).expect("a model").flatten() {
            std::fs::copy(entry.path(), at.join(entry.file_name())).expect("copied");
        }
        // Weights are looked at by the worker only.
        std::fs::write(at.join("model.safetensors"), "weights").expect("written");
        std::fs::write(at.join("README.md"), note).expect("written");
        let manifest = model_store::seal(at, &|_, _| {}).expect("sealed");
        let dir = at.canonicalize().expect("there");
        Served { dir, revision: manifest.revision(), served_names: vec!["ernie".to_owned()], unsealed: false }
    }

    fn config(state: &Path, model: &Path) -> Config {
        let mut flags = Layer::default();
        for (key, value) in
            [("paths.state_dir", state.display().to_string()), ("model.path", model.display().to_string())]
        {
            flags.set(by_key(key).expect("a key"), Raw::Text(value), Origin::Flag(key.to_owned()));
        }
        let names = Raw::List(vec!["ernie".to_owned()]);
        flags.set(by_key("model.served_names").expect("a key"), names, Origin::Flag("served-model-name".to_owned()));
        resolve(&Layers { flags, ..Layers::default() }, &Environment::default(), None).expect("good")
    }

    #[test]
    fn what_was_swapped_in_is_served_until_the_configuration_names_another_model() {
        let dir = tempfile::tempdir().expect("temp");
        let [one, two, three] = ["r1", "r2", "r3"].map(|name| model(&dir.path().join(name), name));
        let config_of = |served: &Served| config(dir.path(), &served.dir);
        let first = choose(&config_of(&one), &one.dir).expect("readable");
        assert_eq!((first.verified.revision(), first.previous), (one.revision.as_str(), None));
        let serving =
            Serving { current: two.clone(), previous: Some(one.clone()), configured: first.configured.clone() };
        first.links.commit(&serving).expect("writable");

        let first = choose(&config_of(&one), &one.dir).expect("readable");
        assert_eq!((first.verified.revision(), first.previous), (two.revision.as_str(), Some(one.clone())));
        let first = choose(&config_of(&three), &three.dir).expect("readable");
        assert_eq!(first.verified.revision(), three.revision, "the configuration names another model");

        // The swapped one is damaged while the daemon is down.
        std::fs::write(two.dir.join("tokenizer.json"), "{}").expect("written");
        let first = choose(&config_of(&one), &one.dir).expect("readable");
        assert_eq!((first.verified.revision(), first.passed_over.len()), (one.revision.as_str(), 1));
        assert!(first.passed_over[0].1.contains("tokenizer.json"), "{:?}", first.passed_over);
    }
}
