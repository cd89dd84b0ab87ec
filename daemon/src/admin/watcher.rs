//! `rollout.watch`: looks at the model folder and the configuration file when something there changes.
//!
//! What the system tells is only a reason to look; what is found decides. A model is rolled out when its folder is sealed,
//! holds another revision than the one that serves, and every file is what its manifest says: a copy under way never is.
//! A revision that failed is not tried again until it changes or an operator reloads.

use super::follow::Followed;
use super::peer::Role;
use super::{Caller, Control};
use crate::audit::Actor;
use crate::config::ModelSource;
use crate::model_store::{self, Configured};
use notify::{RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Copies come in many writes; a look waits until they pause for this long.
const QUIET: Duration = Duration::from_millis(500);

/// A look without a reason: network file systems tell nothing.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// Starts the task when the configuration asks for it; must be called inside a runtime.
pub fn watch(control: &Arc<Control>) {
    if control.config().rollout.watch {
        tokio::spawn(run(Arc::clone(control)));
    }
}

async fn run(control: Arc<Control>) {
    // One sign that something happened is enough, however many events there are.
    let (sign, mut signs) = mpsc::channel(1);
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.is_ok_and(|event| !event.kind.is_access()) {
            let _ = sign.try_send(());
        }
    });
    let mut watcher = match watcher {
        Ok(watcher) => watcher,
        Err(error) => {
            tracing::warn!(%error, "changes on disk are looked for every {} s only", LOOK_INTERVAL.as_secs());
            // Never signs: `recv` would end at once if the sender were gone.
            return poll_only(control).await;
        }
    };
    let mut watched = BTreeSet::new();
    let mut seen = Seen::default();
    loop {
        rewatch(&mut watcher, &mut watched, places(&control));
        look(&control, &mut seen).await;
        tokio::select! {
            _ = signs.recv() => {}
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
        while tokio::time::timeout(QUIET, signs.recv()).await.is_ok_and(|sign| sign.is_some()) {}
    }
}

async fn poll_only(control: Arc<Control>) {
    let mut seen = Seen::default();
    loop {
        look(&control, &mut seen).await;
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// What was looked at and needs no second look.
#[derive(Default)]
struct Seen {
    model: Option<Configured>,
    file: Option<Vec<u8>>,
}

/// Folders whose changes matter: those of the model, of every link on the way to it, and of the configuration file.
fn places(control: &Control) -> BTreeSet<PathBuf> {
    let config = control.config();
    let mut places = BTreeSet::new();
    if let ModelSource::Dir(dir) = &config.model.source {
        let mut at = std::path::absolute(dir).unwrap_or_else(|_| dir.clone());
        // A chain of links is followed as far as the kernel would.
        for _ in 0..40 {
            places.extend(at.parent().map(Path::to_owned));
            match std::fs::read_link(&at) {
                Ok(target) => at = at.parent().map_or(target.clone(), |parent| parent.join(&target)),
                Err(_) => break,
            }
        }
        places.insert(at);
    }
    places.extend(
        config
            .paths
            .config_file
            .as_ref()
            .and_then(|file| file.parent())
            .map(|parent| if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() }),
    );
    places
}

fn rewatch(watcher: &mut impl Watcher, watched: &mut BTreeSet<PathBuf>, wanted: BTreeSet<PathBuf>) {
    for gone in watched.difference(&wanted) {
        // It may have been removed from the disk, too.
        let _ = watcher.unwatch(gone);
    }
    // A folder that was replaced under the same name is another one: watched anew each time.
    let there = |place: &PathBuf| {
        let _ = watcher.unwatch(place);
        watcher.watch(place, RecursiveMode::NonRecursive).is_ok()
    };
    *watched = wanted.into_iter().filter(there).collect();
}

async fn look(control: &Arc<Control>, seen: &mut Seen) {
    let caller = Caller { actor: Actor::Daemon, role: Role::Admin };
    let file = control.config().paths.config_file.as_ref().and_then(|path| std::fs::read(path).ok());
    let changed = seen.file.is_some() && file.is_some() && seen.file != file;
    if file.is_some() {
        seen.file = file;
    }
    if changed {
        // The model comes below, when it is complete.
        match control.reload_file(&caller).await {
            Ok(reply) if reply.applied => tracing::info!("the changed configuration file is in force"),
            Ok(reply) => tracing::error!("the changed configuration file was refused: {}", reply.refused.join("; ")),
            Err(_) => tracing::error!("the changed configuration file was not read: the audit store takes no rows"),
        }
    }
    let Ok(now) = control.configured_now(&control.config()).await else { return };
    let sealed = now.revision.as_ref().is_some_and(|revision| !revision.starts_with("unsealed-"));
    if !sealed || !control.is_news(&now) || seen.model.as_ref() == Some(&now) {
        return;
    }
    let dir = now.dir.clone();
    let verified = tokio::task::spawn_blocking(move || model_store::verify_all(&dir, &|_, _| {})).await;
    match verified {
        Ok(Ok(model)) if Some(model.revision()) == now.revision.as_deref() => {}
        Ok(Ok(_)) => return,
        Ok(Err(error)) => {
            tracing::debug!(%error, "not complete yet");
            return;
        }
        Err(_) => return,
    }
    match control.follow_model(&caller).await {
        Ok(Followed::Began(id)) => {
            tracing::info!(deployment = %id, dir = %now.dir.display(), "a new revision is complete: rolling it out");
            seen.model = Some(now);
        }
        Ok(Followed::Unchanged) => {}
        Ok(Followed::Not(why)) => tracing::debug!(why, "not rolled out"),
        // Another rollout is under way: the next look tries again.
        Err(error) => tracing::debug!(?error, "not rolled out yet"),
    }
}
