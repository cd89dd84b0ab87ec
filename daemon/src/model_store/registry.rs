//! Model folders by name: links in the state directory, so that an operator says `swap r2` and not a path.
//!
//! ```text
//! models/known/ernie-r2 -> /srv/models/ERNIE-4.5-0.3B-PT-r2
//! ```
//!
//! The folders are the operator's: a name is added and removed here, files never are.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Longest name; also what a file name may have.
const NAME_BYTES_MAX: usize = 100;

/// The folder of links.
#[derive(Debug, Clone)]
pub struct Registry {
    dir: PathBuf,
}

/// A folder with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    pub name: String,
    pub dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error(
        "{name:?} can not be a model's name; use letters, digits, dots, dashes and underscores, at most {NAME_BYTES_MAX}"
    )]
    Name { name: String },
    #[error("{name} is {} already; remove that name first, or choose another with --name", dir.display())]
    Taken { name: String, dir: PathBuf },
    #[error("no model is called {name}; `ernie-ctl model list` shows them")]
    Unknown { name: String },
    #[error("{}: {source}; check space and permissions of the state directory", path.display())]
    Disk { path: PathBuf, source: io::Error },
}

impl Registry {
    /// `state_dir` is the daemon's; the links' folder is created when the first is added.
    pub fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("models/known") }
    }

    /// All names, sorted.
    pub fn list(&self) -> Vec<Known> {
        let entries = fs::read_dir(&self.dir).map(|entries| entries.flatten().collect()).unwrap_or_else(|_| Vec::new());
        let mut known: Vec<_> = entries
            .into_iter()
            .filter_map(|entry| {
                let name = entry.file_name().to_str().filter(|name| is_name(name))?.to_owned();
                Some(Known { name, dir: fs::read_link(entry.path()).ok()? })
            })
            .collect();
        known.sort_by(|a, b| a.name.cmp(&b.name));
        known
    }

    /// The folder of a name.
    pub fn get(&self, name: &str) -> Result<PathBuf, RegistryError> {
        let unknown = || RegistryError::Unknown { name: name.to_owned() };
        if !is_name(name) {
            return Err(unknown());
        }
        fs::read_link(self.dir.join(name)).map_err(|_| unknown())
    }

    /// Gives a folder a name. The same name for the same folder again is no error.
    pub fn add(&self, name: &str, dir: &Path) -> Result<(), RegistryError> {
        if !is_name(name) {
            return Err(RegistryError::Name { name: name.to_owned() });
        }
        let disk = |source| RegistryError::Disk { path: self.dir.join(name), source };
        fs::create_dir_all(&self.dir).map_err(disk)?;
        match symlink(dir, self.dir.join(name)) {
            Ok(()) => self.settle().map_err(disk),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match self.get(name)? {
                same if same == dir => Ok(()),
                other => Err(RegistryError::Taken { name: name.to_owned(), dir: other }),
            },
            Err(error) => Err(disk(error)),
        }
    }

    /// Forgets a name; the folder stays as it is.
    pub fn remove(&self, name: &str) -> Result<PathBuf, RegistryError> {
        let dir = self.get(name)?;
        let disk = |source| RegistryError::Disk { path: self.dir.join(name), source };
        fs::remove_file(self.dir.join(name)).and_then(|()| self.settle()).map_err(disk)?;
        Ok(dir)
    }

    fn settle(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }
}

/// A plain file name: nothing that could lead elsewhere or hide.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with(['.', '-']) && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_kept_and_lead_nowhere_else() {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let registry = Registry::new(dir.path());
        assert_eq!(registry.list(), []);
        registry.add("r2", Path::new("/srv/r2")).expect("free");
        registry.add("r2", Path::new("/srv/r2")).expect("the same again");
        registry.add("r1", Path::new("/srv/r1")).expect("free");
        assert!(matches!(registry.add("r2", Path::new("/srv/r3")), Err(RegistryError::Taken { .. })));
        let names: Vec<_> = registry.list().into_iter().map(|known| known.name).collect();
        assert_eq!(names, ["r1", "r2"]);
        assert_eq!(registry.get("r2").expect("known"), Path::new("/srv/r2"));
        assert_eq!(registry.remove("r2").expect("known"), Path::new("/srv/r2"));
        assert!(matches!(registry.get("r2"), Err(RegistryError::Unknown { .. })));
        for name in ["", ".", "..", "a/b", "../x", ".hidden", "-f", "with space", "名"] {
            assert!(matches!(registry.add(name, Path::new("/x")), Err(RegistryError::Name { .. })), "{name:?}");
            assert!(registry.get(name).is_err() && registry.remove(name).is_err(), "{name:?}");
        }
    }
}
