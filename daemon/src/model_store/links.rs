//! Which revision serves, which served before: links in the state directory that a restart follows.
//!
//! ```text
//! models/serving -> .serving-7        moved by one rename
//! models/.serving-7/current -> /srv/models/ernie-r2
//! models/.serving-7/previous -> /srv/models/ernie-r1
//! models/.serving-7/configured -> /srv/models/ernie-r1    what the configuration named when this was written
//! ```
//!
//! All links change together or not at all, also when the machine loses power in between. An operator who names another
//! model in the configuration afterwards gets that one: the links count only for the configuration they were made under.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The folder that holds the links.
#[derive(Debug, Clone)]
pub struct Links {
    dir: PathBuf,
}

/// What the links say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Serving {
    /// The last revision that completed its rollout.
    pub current: PathBuf,
    pub previous: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[error("{} can not be changed: {source}", path.display())]
pub struct LinksError {
    path: PathBuf,
    source: io::Error,
}

impl Links {
    /// `dir` is created when it is first written to.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// What to serve after a start with this model in the configuration: the last good revision of it, if there is one.
    pub fn resume(&self, configured: &Path) -> Option<Serving> {
        let serving = self.dir.join("serving");
        let of = fs::read_link(serving.join("configured")).ok()?;
        if of != absolute(configured) {
            return None;
        }
        let current = fs::read_link(serving.join("current")).ok()?;
        Some(Serving { current, previous: fs::read_link(serving.join("previous")).ok() })
    }

    /// Says what serves from now on. Returns when it is on the disk.
    pub fn commit(&self, configured: &Path, serving: &Serving) -> Result<(), LinksError> {
        self.write(configured, serving).map_err(|source| LinksError { path: self.dir.clone(), source })
    }

    fn write(&self, configured: &Path, serving: &Serving) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let old = fs::read_link(self.dir.join("serving")).ok();
        let number = old.as_ref().and_then(|old| number_of(old)).unwrap_or(0) + 1;
        let name = format!(".serving-{number}");
        let fresh = self.dir.join(&name);
        // Left over from a commit that did not come to its end.
        remove_links(&fresh)?;
        fs::create_dir(&fresh)?;
        symlink(absolute(&serving.current), fresh.join("current"))?;
        if let Some(previous) = &serving.previous {
            symlink(absolute(previous), fresh.join("previous"))?;
        }
        symlink(absolute(configured), fresh.join("configured"))?;
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
            Some(old) if old.as_os_str() != name.as_str() => remove_links(&self.dir.join(old)),
            _ => Ok(()),
        }
    }
}

fn number_of(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix(".serving-")?.parse().ok()
}

/// A path that means the same from everywhere; the links in it stay.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Removes a folder of ours with its links and nothing else.
fn remove_links(dir: &Path) -> io::Result<()> {
    let gone = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    for link in ["current", "previous", "configured"] {
        gone(fs::remove_file(dir.join(link)))?;
    }
    gone(fs::remove_dir(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serving(current: &str, previous: Option<&str>) -> Serving {
        Serving { current: current.into(), previous: previous.map(PathBuf::from) }
    }

    #[test]
    fn what_was_committed_is_resumed_and_nothing_is_left_over() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path().join("models"));
        let configured = Path::new("/srv/ernie");
        assert_eq!(links.resume(configured), None);
        for n in 1..5 {
            let now = serving(&format!("/srv/r{n}"), (n > 1).then_some("/srv/r0"));
            links.commit(configured, &now).expect("writable");
            assert_eq!(links.resume(configured), Some(now));
        }
        assert_eq!(fs::read_dir(dir.path().join("models")).expect("there").count(), 2, "the link and its folder");
    }

    #[test]
    fn another_model_in_the_configuration_wins_over_the_links() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path());
        links.commit(Path::new("/srv/ernie"), &serving("/srv/r2", None)).expect("writable");
        assert_eq!(links.resume(Path::new("/srv/other")), None);
        assert!(links.resume(Path::new("/srv/ernie")).is_some());
    }

    #[test]
    fn a_commit_that_was_cut_off_anywhere_leaves_the_old_state_and_can_be_repeated() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let links = Links::new(dir.path());
        let configured = Path::new("/srv/ernie");
        let old = serving("/srv/r1", None);
        links.commit(configured, &old).expect("writable");
        // The next folder is half written, the moving link is there.
        fs::create_dir(dir.path().join(".serving-2")).expect("writable");
        symlink("/srv/r2", dir.path().join(".serving-2/current")).expect("writable");
        symlink(".serving-2", dir.path().join(".serving-moving")).expect("writable");
        assert_eq!(links.resume(configured), Some(old));
        let new = serving("/srv/r2", Some("/srv/r1"));
        links.commit(configured, &new).expect("writable");
        assert_eq!(links.resume(configured), Some(new));
    }
}
