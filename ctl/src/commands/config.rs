//! `config show | diff | set`, `reload`.

use crate::cli::ConfigAct;
use crate::client::Admin;
use crate::output::{bad, good, show, table};
use anyhow::{Context, Result};
use ernie_proto::admin::{ConfigReply, Reload, SetConfig};
use std::process::ExitCode;

pub(super) async fn run(admin: &Admin, json: bool, act: ConfigAct) -> Result<ExitCode> {
    match act {
        ConfigAct::Show { origin, changed } => {
            let mut reply: ConfigReply = admin.get("/v1/config").await?;
            reply.settings.retain(|s| !changed || (s.origin != "default" && s.value.is_some()));
            show(json, &reply, |r| {
                let value = |v: &Option<String>| v.clone().unwrap_or_default();
                if origin {
                    let rows = r
                        .settings
                        .iter()
                        .map(|s| vec![s.key.clone(), value(&s.value), s.origin.clone(), s.change.clone()]);
                    table(&["KEY", "VALUE", "ORIGIN", "A CHANGE NEEDS"], rows)
                } else {
                    table(&["KEY", "VALUE"], r.settings.iter().map(|s| vec![s.key.clone(), value(&s.value)]))
                }
            })?;
            Ok(ExitCode::SUCCESS)
        }
        ConfigAct::Diff => {
            let reply: Reload = admin.get("/v1/config/diff").await?;
            print(json, &reply, "can be applied")
        }
        ConfigAct::Set { key, value, unset: _ } => {
            let reply: Reload = admin.post("/v1/config/set", &SetConfig { key, value }).await?;
            print(json, &reply, "in force")
        }
    }
}

/// `set KEY=VALUE`.
pub(super) async fn set(admin: &Admin, json: bool, assignment: &str) -> Result<ExitCode> {
    let (key, value) = assignment
        .split_once('=')
        .with_context(|| format!("{assignment:?} is no KEY=VALUE; try `ernie-ctl set swap.policy=always`"))?;
    let (key, value) = (key.trim().to_owned(), Some(value.trim().to_owned()));
    let reply: Reload = admin.post("/v1/config/set", &SetConfig { key, value }).await?;
    print(json, &reply, "in force")
}

pub(super) async fn reload(admin: &Admin, json: bool) -> Result<ExitCode> {
    let reply: Reload = admin.post("/v1/reload", &serde_json::json!({})).await?;
    print(json, &reply, "in force")
}

fn print(json: bool, reply: &Reload, done: &str) -> Result<ExitCode> {
    show(json, reply, |r| {
        let mut out = String::new();
        let shown = |v: &Option<String>| v.clone().unwrap_or_else(|| "(not set)".to_owned());
        for c in &r.changes {
            out.push_str(&format!("{}: {} -> {}  ({})\n", c.key, shown(&c.before), shown(&c.after), c.effect));
        }
        for reason in &r.refused {
            out.push_str(&format!("{} {reason}\n", bad("refused:")));
        }
        if let Some(model) = &r.model {
            out.push_str(&format!("{model}\n"));
        }
        out.push_str(&match (r.applied, r.changes.len()) {
            (true, 0) if r.model.is_some() => String::new(),
            (true, 0) => "nothing has changed\n".to_owned(),
            (true, _) => format!("{}\n", good(done)),
            (false, _) => "nothing was changed\n".to_owned(),
        });
        out
    })?;
    let not_followed = reply.model.as_ref().is_some_and(|model| model.contains("was not rolled out"));
    Ok(if reply.applied && !not_followed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
