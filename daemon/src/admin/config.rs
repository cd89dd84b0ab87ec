//! `config show | diff | set`, `reload`: parse, check everything, compare, apply atomically or refuse whole.

use super::error::{AdminError, body};
use super::follow::Followed;
use super::{Caller, Control, InForce, Verb};
use crate::audit::Actor;
use crate::config::layers::{Origin, Raw};
use crate::config::reload::{Difference, blockers, diff as differences};
use crate::config::settings::{Change, Kind, by_key};
use crate::config::{self, Config, ConfigErrors, Sources};
use axum::extract::State;
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::admin;
use std::sync::Arc;

pub(super) async fn show(State(control): State<Arc<Control>>) -> Json<admin::ConfigReply> {
    let sources = Arc::clone(&control.in_force.borrow().sources);
    let settings = config::show::all(&sources.layers)
        .into_iter()
        .map(|row| admin::SettingView {
            key: row.key.to_owned(),
            value: row.value,
            origin: row.origin,
            change: change_word(row.change).to_owned(),
            help: by_key(row.key).map_or("", |s| s.help).to_owned(),
        })
        .collect();
    Json(admin::ConfigReply { settings })
}

pub(super) async fn diff(State(control): State<Arc<Control>>) -> Json<admin::Reload> {
    let now = control.in_force.borrow().clone();
    Json(match read_again(&now.sources) {
        Ok((sources, _)) => plan(&differences(&now.sources.layers, &sources.layers), false),
        Err(errors) => refused(&errors),
    })
}

pub(super) async fn reload(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<admin::Reload>, AdminError> {
    Ok(Json(control.reload(&caller).await?))
}

pub(super) async fn set(
    State(control): State<Arc<Control>>,
    Extension(caller): Extension<Caller>,
    bytes: Bytes,
) -> Result<Json<admin::Reload>, AdminError> {
    let wanted: admin::SetConfig = body(&bytes)?;
    let setting = by_key(&wanted.key).ok_or_else(|| {
        AdminError::missing(format!("there is no setting {}; `ernie-ctl config show` lists them", wanted.key))
    })?;
    if setting.change != Change::Live {
        return Err(AdminError::conflict(format!(
            "{} can not be changed while the daemon runs; it {}",
            setting.key,
            effect_word(setting.change)
        )));
    }
    let detail = serde_json::json!({ "value": if setting.secret() { None } else { wanted.value.as_deref() } });
    let act = control.act(&caller, Verb::ConfigSet, setting.key, detail).await?;
    let now = control.in_force.borrow().clone();
    let mut sources = (*now.sources).clone();
    match wanted.value {
        None => sources.layers.run_time.remove(setting.key),
        Some(value) => {
            let raw = match setting.kind {
                Kind::List(_) | Kind::SecretList(_) => {
                    Raw::List(value.split(',').map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()).collect())
                }
                Kind::Switch | Kind::Value(_) => Raw::Text(value),
            };
            sources.layers.run_time.set(setting, raw, Origin::Set);
        }
    }
    let checked = config::resolve(&sources.layers, &sources.environment, sources.config_file.clone());
    let outcome = match checked {
        Ok(config) => control.apply(sources, config).await,
        Err(errors) => Ok(refused(&errors)),
    };
    finish(act, &outcome).await;
    Ok(Json(outcome?))
}

impl Control {
    /// The same as `ernie-ctl reload`, asked for by SIGHUP; answers with a sentence for systemd.
    pub async fn reload_on_signal(self: &Arc<Self>) -> String {
        let caller = Caller { actor: Actor::Signal("SIGHUP"), role: super::Role::Admin };
        match self.reload(&caller).await {
            Ok(admin::Reload { applied: true, model: Some(model), .. }) => model,
            Ok(r) if r.applied && r.changes.is_empty() => "the configuration has not changed".to_owned(),
            Ok(r) if r.applied => format!("the new configuration is in force: {} changes", r.changes.len()),
            Ok(r) => {
                for reason in &r.refused {
                    tracing::error!("the configuration was not reloaded: {reason}");
                }
                format!("the new configuration was refused, the old one stays: {}", r.refused.join("; "))
            }
            Err(_) => "the configuration was not reloaded: the audit store does not take rows".to_owned(),
        }
    }

    /// The file, then the model that it names.
    async fn reload(self: &Arc<Self>, caller: &Caller) -> Result<admin::Reload, AdminError> {
        let mut reply = self.reload_file(caller).await?;
        if reply.applied {
            reply.model = match self.follow_model(caller).await {
                Ok(Followed::Unchanged) => None,
                Ok(Followed::Began(id)) => Some(format!(
                    "rollout of {id}, the model that the configuration names, has begun; `ernie-ctl status` follows it"
                )),
                Ok(Followed::Not(why)) => Some(format!("the model was not rolled out: {why}")),
                Err(error) => Some(format!("the model was not rolled out: {}", error.message())),
            };
        }
        Ok(reply)
    }

    pub(super) async fn reload_file(&self, caller: &Caller) -> Result<admin::Reload, AdminError> {
        let file = self.config().paths.config_file.as_ref().map_or_else(String::new, |p| p.display().to_string());
        let act = self.act(caller, Verb::Reload, &file, serde_json::json!({})).await?;
        let now = self.in_force.borrow().clone();
        let outcome = match read_again(&now.sources) {
            Ok((sources, config)) => self.apply(sources, config).await,
            Err(errors) => Ok(refused(&errors)),
        };
        finish(act, &outcome).await;
        outcome
    }

    /// All or nothing.
    async fn apply(&self, sources: Sources, config: Config) -> Result<admin::Reload, AdminError> {
        let _one = self.changing.acquire().await.map_err(|_| AdminError::unavailable("the daemon is leaving"))?;
        let now = self.in_force.borrow().clone();
        let differences = differences(&now.sources.layers, &sources.layers);
        let reply = plan(&differences, true);
        if !reply.applied {
            return Ok(reply);
        }
        // What can fail comes first.
        self.keys.reload(&config.server.api_keys).await?;
        if config.logging.level != self.log.level() {
            self.log.set_level(&config.logging.level).map_err(|e| AdminError::invalid(e.to_string()))?;
        }
        for change in &reply.changes {
            tracing::info!(key = change.key, before = change.before, after = change.after, "setting changed");
        }
        self.in_force.send_replace(InForce { config: Arc::new(config), sources: Arc::new(sources) });
        Ok(reply)
    }
}

async fn finish(act: crate::audit::Act, outcome: &Result<admin::Reload, AdminError>) {
    let result = match outcome {
        Ok(reply) if reply.applied => Ok(serde_json::json!({ "changes": reply.changes })),
        Ok(reply) => Err(reply.refused.join("; ")),
        Err(e) => Err(format!("{e:?}")),
    };
    act.finish(result).await;
}

/// Reads the file anew; flags and environment are those of the start.
fn read_again(sources: &Sources) -> Result<(Sources, Config), ConfigErrors> {
    let mut sources = sources.clone();
    if let Some(path) = &sources.config_file {
        let (layer, mut errors) = config::file::read(path);
        sources.layers.file = layer;
        if !errors.is_empty() {
            if let Err(more) = config::resolve(&sources.layers, &sources.environment, sources.config_file.clone()) {
                errors.extend(more.0);
            }
            return Err(ConfigErrors(errors));
        }
    }
    let config = config::resolve(&sources.layers, &sources.environment, sources.config_file.clone())?;
    Ok((sources, config))
}

fn plan(differences: &[Difference], applying: bool) -> admin::Reload {
    let refused: Vec<String> =
        blockers(differences).iter().map(|d| format!("{} {}", d.key, effect_word(d.change))).collect();
    let changes = differences
        .iter()
        .map(|d| admin::ConfigChange {
            key: d.key.to_owned(),
            before: d.before.clone(),
            after: d.after.clone(),
            effect: match d.change {
                Change::Live if refused.is_empty() && applying => "applied".to_owned(),
                Change::Model if refused.is_empty() && applying => "being rolled out".to_owned(),
                Change::Live => "can be applied".to_owned(),
                other => effect_word(other).to_owned(),
            },
        })
        .collect();
    admin::Reload { applied: refused.is_empty(), changes, refused, model: None }
}

fn refused(errors: &ConfigErrors) -> admin::Reload {
    let refused = errors.0.iter().map(ToString::to_string).collect();
    admin::Reload { applied: false, refused, ..admin::Reload::default() }
}

fn change_word(change: Change) -> &'static str {
    match change {
        Change::Live => "reload",
        Change::Model => "rollout",
        Change::Workers => "workers",
        Change::Daemon => "restart",
    }
}

fn effect_word(change: Change) -> &'static str {
    match change {
        Change::Live => "is applied at once",
        Change::Model => "is rolled out like a swap",
        Change::Workers => "needs the model to load again: restart the daemon",
        Change::Daemon => "needs a restart of the daemon",
    }
}
