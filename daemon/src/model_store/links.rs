//! Which revision serves, which served before: a record in the state directory that a restart follows.
//!
//! ```text
//! models/serving -> .serving-7        moved by one rename
//! models/.serving-7/record.json       what the daemon reads: folders, revisions, names
//! models/.serving-7/current -> /srv/models/ernie-r2       the same folders for people and scripts
//! models/.serving-7/previous -> /srv/models/ernie-r1
//! models/.serving-7/configured -> /srv/models/ernie-r1    what the configuration named when this was written
//! ```
//!
//! All of it changes together or not at all, also when the machine loses power in between. An operator who afterwards
//! names another model in the configuration, or puts another revision into the folder that it names, gets that one: the
//! record counts only for the configuration it was made under.

use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The file that the daemon reads.
const RECORD: &str = "record.json";
/// No record is longer; nothing longer is read.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// The folder that holds the record.
#[derive(Debug, Clone)]
pub struct Links {
    dir: PathBuf,
}

/// A revision that served, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub dir: PathBuf,
    pub revision: String,
    pub served_names: Vec<String>,
    /// Taken without a manifest.
    #[serde(default)]
    pub unsealed: bool,
}

/// What the configuration names, and what lies there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configured {
    /// Without links on the way: a link that is moved to another folder names another model.
    pub dir: PathBuf,
    /// `None`: the folder can not be read.
    pub revision: Option<String>,
    pub served_names: Vec<String>,
}

/// What the record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// The last revision that completed its rollout.
    pub current: Served,
    pub previous: Option<Served>,
    pub configured: Configured,
}

#[derive(Debug, thiserror::Error)]
#[error("{} can not be changed: {source}", path.display())]
pub struct LinksError {
    path: PathBuf,
    source: io::Error,
}

impl Configured {
    /// Whether this is still what `then` was. A folder that is gone since was not replaced by another model.
    fn is_still(&self, then: &Configured) -> bool {
        self.dir == then.dir && (self.revision.is_none() || self.revision == then.revision)
    }
}

impl Links {
    /// `dir` is created when it is first written to.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// What to serve after a start with this model in the configuration: the last good revision, if something was swapped in
    /// since the configuration named this model.
    pub fn resume(&self, configured: &Configured) -> Option<Serving> {
        let path = self.dir.join("serving").join(RECORD);
        if fs::metadata(&path).ok()?.len() > RECORD_BYTES_MAX {
            return None;
        }
        let mut serving: Serving = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        if !configured.is_still(&serving.configured) {
            return None;
        }
        if configured.served_names != serving.configured.served_names {
            // Other names in the configuration are a wish, too.
            serving.current.served_names.clone_from(&configured.served_names);
        }
        Some(serving)
    }

    /// Says what serves from now on. Returns when it is on the disk.
    pub fn commit(&self, serving: &Serving) -> Result<(), LinksError> {
        self.write(serving).map_err(|source| LinksError { path: self.dir.clone(), source })
    }

    fn write(&self, serving: &Serving) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let old = fs::read_link(self.dir.join("serving")).ok();
        let number = old.as_ref().and_then(|old| number_of(old)).unwrap_or(0) + 1;
        let name = format!(".serving-{number}");
        let fresh = self.dir.join(&name);
        // Left over from a commit that did not come to its end.
        remove_record(&fresh)?;
        fs::create_dir(&fresh)?;
        let mut record = File::create(fresh.join(RECORD))?;
        record.write_all(&serde_json::to_vec_pretty(serving)?)?;
        record.sync_all()?;
        symlink(&serving.current.dir, fresh.join("current"))?;
        if let Some(previous) = &serving.previous {
            symlink(&previous.dir, fresh.join("previous"))?;
        }
        symlink(&serving.configured.dir, fresh.join("configured"))?;
        File::open(&fresh)?.sync_all()?;

        let moving = self.dir.join(".serving-moving");
        match fs::remove_file(&moving) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(&name, &moving)?;
        fs::rename(&moving, self.dir.join("serving"))?;
        File::open(&self.dir)?.sync_all()?;
        match old {
            Some(old) if old.as_os_str() != name.as_str() => remove_record(&self.dir.join(old)),
            _ => Ok(()),
        }
    }
}

fn number_of(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix(".serving-")?.parse().ok()
}

/// Removes a folder of ours with what we put there and nothing else.
fn remove_record(dir: &Path) -> io::Result<()> {
    let gone = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    for file in ["current", "previous", "configured", RECORD] {
        gone(fs::remove_file(dir.join(file)))?;
    }
    gone(fs::remove_dir(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(dir: &str) -> Served {
        let revision = format!("revision of {dir}");
        Served { dir: dir.into(), revision, served_names: vec!["ernie".to_owned()], unsealed: false }
    }

    fn configured(dir: &str) -> Configured {
        let Served { dir, revision, served_names, .. } = served(dir);
        Configured { dir, revision: Some(revision), served_names }
    }

    fn serving(current: &str, previous: Option<&str>) -> Serving {
        Serving { current: served(current), previous: previous.map(served), configured: configured("/srv/ernie") }
    }

    #[test]
    fn what_was_committed_is_resumed_and_nothing_is_left_over() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path().join("models"));
        assert_eq!(links.resume(&configured("/srv/ernie")), None);
        for n in 1..5 {
            let now = serving(&format!("/srv/r{n}"), (n > 1).then_some("/srv/r0"));
            links.commit(&now).expect("writable");
            assert_eq!(links.resume(&configured("/srv/ernie")), Some(now));
            let current = fs::read_link(dir.path().join("models/serving/current")).expect("a link for people");
            assert_eq!(current, Path::new(&format!("/srv/r{n}")));
        }
        assert_eq!(fs::read_dir(dir.path().join("models")).expect("there").count(), 2, "the link and its folder");
    }

    #[test]
    fn another_model_or_revision_in_the_configuration_wins_over_the_record() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path());
        links.commit(&serving("/srv/r2", None)).expect("writable");
        assert_eq!(links.resume(&configured("/srv/other")), None);
        let overwritten = Configured { revision: Some("another".to_owned()), ..configured("/srv/ernie") };
        assert_eq!(links.resume(&overwritten), None, "somebody put a new revision there");
        let gone = Configured { revision: None, ..configured("/srv/ernie") };
        assert!(links.resume(&gone).is_some(), "the old folder was cleared away after the swap");
        let renamed = Configured { served_names: vec!["other name".to_owned()], ..configured("/srv/ernie") };
        let resumed = links.resume(&renamed).expect("the same model");
        assert_eq!(resumed.current.served_names, ["other name"]);
    }

    #[test]
    fn a_commit_that_was_cut_off_anywhere_leaves_the_old_state_and_can_be_repeated() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path());
        let old = serving("/srv/r1", None);
        links.commit(&old).expect("writable");
        // The next folder is half written, the moving link is there.
        fs::create_dir(dir.path().join(".serving-2")).expect("writable");
        symlink("/srv/r2", dir.path().join(".serving-2/current")).expect("writable");
        fs::write(dir.path().join(".serving-2").join(RECORD), "{\"curr").expect("writable");
        symlink(".serving-2", dir.path().join(".serving-moving")).expect("writable");
        assert_eq!(links.resume(&configured("/srv/ernie")), Some(old));
        let new = serving("/srv/r2", Some("/srv/r1"));
        links.commit(&new).expect("writable");
        assert_eq!(links.resume(&configured("/srv/ernie")), Some(new));
    }
}
