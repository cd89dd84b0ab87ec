//! `swap`, `rollback`: the rollout's verbs. `model list | add | remove`: folders by name.

use super::error::{AdminError, body};
use super::{Caller, Control, Verb};
use crate::model_store::{self, RegistryError};
use crate::supervisor::{FleetStatus, RolloutRefusal, Strategy, SwapRequest};
use axum::extract::{Path as UrlPath, State};
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(super) async fn swap(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Begun>, AdminError> {
    let mut wanted: admin::Swap = body(&bytes)?;
    if wanted.model_dir.is_relative() {
        // What a daemon calls "here" is not what its operator does: a name, or nothing.
        let name = wanted.model_dir.to_string_lossy().into_owned();
        wanted.model_dir = control.registry.get(&name).map_err(registry)?;
    }
    let problems = crate::config::preflight::model(&wanted.model_dir, true);
    if !problems.is_empty() {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        return Err(AdminError::invalid(all.join("; ")));
    }
    let strategy = match wanted.strategy.as_deref() {
        None | Some("auto") => Strategy::Auto,
        Some("side-by-side") => Strategy::SideBySide,
        Some("stop-first") => Strategy::StopFirst,
        Some(other) => {
            let message = format!("there is no strategy {other:?}; use auto, side-by-side or stop-first");
            return Err(AdminError::invalid(message));
        }
    };
    let observe = match wanted.observe_seconds {
        None => control.config().rollout.observe,
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| AdminError::invalid("observe_seconds must be a number of seconds, 0 or more"))?,
    };
    let detail = serde_json::to_value(&wanted).unwrap_or_default();
    let act = control.act(&caller, Verb::Swap, &wanted.model_dir.display().to_string(), detail).await?;
    let seq = act.seq();
    let request = SwapRequest {
        model_dir: wanted.model_dir,
        served_names: wanted.served_names,
        strategy,
        observe,
        canary: wanted.canary_percent.map(|p| (p.clamp(0.0, 100.0) * 100.0) as u32),
        force_unsealed: wanted.force_unsealed,
        revision: None,
        configured: None,
    };
    let begun = control.fleet.swap(request).await;
    act.finish(
        begun.as_ref().map(|id| serde_json::json!({ "deployment": id.to_string() })).map_err(ToString::to_string),
    )
    .await;
    let id = begun.map_err(refusal)?;
    Ok(Json(admin::Begun {
        message: format!("rollout of {id} has begun; `ernie-ctl status` follows it"),
        audit: Some(seq),
        deployment: Some(id.to_string()),
    }))
}

pub(super) async fn rollback(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Begun>, AdminError> {
    let wanted: admin::Rollback = body(&bytes)?;
    let reason = wanted.reason.unwrap_or_else(|| "asked for by an operator".to_owned());
    let act = control.act(&caller, Verb::Rollback, "", serde_json::json!({ "reason": reason })).await?;
    let seq = act.seq();
    let begun = control.fleet.rollback(reason).await;
    act.finish(
        begun.as_ref().map(|id| serde_json::json!({ "deployment": id.to_string() })).map_err(ToString::to_string),
    )
    .await;
    let id = begun.map_err(refusal)?;
    Ok(Json(admin::Begun {
        message: "going back to the previous revision".to_owned(),
        audit: Some(seq),
        deployment: Some(id.to_string()),
    }))
}

pub(super) fn refusal(refusal: RolloutRefusal) -> AdminError {
    match refusal {
        RolloutRefusal::Invalid(message) => AdminError::invalid(message),
        RolloutRefusal::Draining => AdminError::unavailable(refusal.to_string()),
        RolloutRefusal::Busy { .. } | RolloutRefusal::NothingToRollBack | RolloutRefusal::NotServing => {
            AdminError::conflict(refusal.to_string())
        }
    }
}

pub(super) async fn list(State(control): State<Arc<Control>>) -> Result<Json<admin::Models>, AdminError> {
    let known = control.registry.list().into_iter();
    let mut models: Vec<_> = known
        .map(|known| admin::KnownModel { name: Some(known.name), dir: known.dir, ..admin::KnownModel::default() })
        .collect();
    for (role, dir) in roles(&control, &control.fleet.status()) {
        if !models.iter().any(|model| model.dir == dir) {
            models.push(admin::KnownModel { dir: dir.clone(), ..admin::KnownModel::default() });
        }
        models.iter_mut().filter(|model| model.dir == dir).for_each(|model| model.roles.push(role.clone()));
    }
    let look = move || {
        for model in &mut models {
            model.revision = model_store::revision_on_disk(&model.dir);
            model.sealed = model.revision.as_ref().is_some_and(|revision| !revision.starts_with("unsealed-"));
            model.bytes = bytes_in(&model.dir);
        }
        admin::Models { models }
    };
    let models = tokio::task::spawn_blocking(look).await;
    models.map(Json).map_err(|_| AdminError::unavailable("looking at the folders panicked"))
}

/// What folders are for at the moment.
fn roles(control: &Control, status: &FleetStatus) -> Vec<(String, PathBuf)> {
    let mut roles = Vec::new();
    for deployment in &status.deployments {
        let serves = Some(deployment.id) == status.active;
        let role = if serves { "serving".to_owned() } else { deployment.role.as_str().to_owned() };
        roles.push((role, deployment.model_dir.clone()));
    }
    roles.extend(status.rollout.previous.clone().map(|dir| ("previous".to_owned(), dir)));
    roles.push(("configured".to_owned(), control.configured.borrow().dir.clone()));
    roles
}

fn bytes_in(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).map(|entries| entries.flatten().collect()).unwrap_or_else(|_| Vec::new());
    entries.iter().filter_map(|entry| entry.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

pub(super) async fn add(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Done>, AdminError> {
    let wanted: admin::AddModel = body(&bytes)?;
    if wanted.dir.is_relative() {
        return Err(AdminError::invalid("dir has to be an absolute path"));
    }
    let name = match wanted.name {
        Some(name) => name,
        None => wanted.dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
    };
    let dir = wanted.dir;
    let detail = serde_json::json!({ "name": name, "dir": dir });
    let act = control.act(&caller, Verb::ModelAdd, &name, detail).await?;
    let seq = act.seq();
    let (registry_now, new_name) = (control.registry.clone(), name.clone());
    let work = move || {
        // Manifest and small files; the weights are hashed when they are loaded.
        let verified = model_store::verify_for_load(&dir, false).map_err(|e| AdminError::invalid(e.to_string()))?;
        registry_now.add(&new_name, verified.dir()).map_err(registry)?;
        Ok::<_, AdminError>(verified.revision().to_owned())
    };
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.unwrap_or_else(|_| Err(AdminError::unavailable("reading the model panicked")));
    let outcome = done.as_ref().map(|revision| serde_json::json!({ "revision": revision }));
    act.finish(outcome.map_err(|e| e.message().to_owned())).await;
    let revision = done?;
    let message = format!("{name} is revision {revision}; `ernie-ctl swap {name}` rolls it out");
    Ok(Json(admin::Done { message, audit: Some(seq) }))
}

pub(super) async fn remove(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<admin::Done>, AdminError> {
    let dir = control.registry.get(&name).map_err(registry)?;
    let used = roles(&control, &control.fleet.status());
    if let Some((role, _)) = used.iter().find(|(role, used)| *used == dir && role != "configured") {
        let message = format!("{name} is the {role} model; swap to another one first");
        return Err(AdminError::conflict(message));
    }
    let act = control.act(&caller, Verb::ModelRemove, &name, serde_json::json!({ "dir": dir })).await?;
    let seq = act.seq();
    let removed = control.registry.remove(&name).map_err(registry);
    let outcome = removed.as_ref().map(|dir| serde_json::json!({ "dir": dir }));
    act.finish(outcome.map_err(|e| e.message().to_owned())).await;
    let dir = removed?;
    let message = format!("{name} is forgotten; its files stay in {}", dir.display());
    Ok(Json(admin::Done { message, audit: Some(seq) }))
}

fn registry(error: RegistryError) -> AdminError {
    match error {
        RegistryError::Name { .. } => AdminError::invalid(error.to_string()),
        RegistryError::Taken { .. } => AdminError::conflict(error.to_string()),
        RegistryError::Unknown { .. } => AdminError::missing(error.to_string()),
        RegistryError::Disk { .. } => AdminError::unavailable(error.to_string()),
    }
}
