//! `key`, `usage`.

use crate::cli::KeyAct;
use crate::client::Admin;
use crate::output::{bold, count, moment, show, table};
use anyhow::{Context, Result};
use ernie_proto::admin::{CreatedKey, Done, KeyLimits, Keys, NewKey, UsageReply};
use std::collections::BTreeMap;

pub(super) async fn run(admin: &Admin, json: bool, act: KeyAct) -> Result<()> {
    match act {
        KeyAct::Create(args) => {
            let new = NewKey {
                name: args.name.or(args.name_flag).context("a key needs a name")?,
                scope: Some(args.scope),
                limits: KeyLimits {
                    requests_per_minute: args.rpm,
                    tokens_per_minute: args.tpm,
                    tokens_per_day: args.daily_tokens,
                    concurrent_requests: args.max_concurrency,
                },
                models: args.models,
                expires_in_seconds: args.expires.map(|days| (days.max(0.0) * 86_400.0) as u64),
            };
            let created: CreatedKey = admin.post("/v1/keys/create", &new).await?;
            show(json, &created, shown_once)
        }
        KeyAct::List => {
            let keys: Keys = admin.get("/v1/keys").await?;
            show(json, &keys, |k| {
                let limit = |n: u64| if n == 0 { "-".to_owned() } else { count(n) };
                let rows = k.keys.iter().map(|k| {
                    vec![
                        k.id.clone(),
                        k.name.clone(),
                        k.state.clone(),
                        k.scope.clone(),
                        limit(u64::from(k.limits.requests_per_minute)),
                        limit(u64::from(k.limits.tokens_per_minute)),
                        limit(k.limits.tokens_per_day),
                        limit(u64::from(k.limits.concurrent_requests)),
                        if k.models.is_empty() { "all".to_owned() } else { k.models.join(",") },
                        moment(k.created_at),
                        k.expires_at.map_or_else(|| "never".to_owned(), moment),
                    ]
                });
                table(
                    &[
                        "ID",
                        "NAME",
                        "STATE",
                        "SCOPE",
                        "RPM",
                        "TPM",
                        "TOKENS/DAY",
                        "AT ONCE",
                        "MODELS",
                        "CREATED",
                        "EXPIRES",
                    ],
                    rows,
                )
            })
        }
        KeyAct::Revoke { key } => {
            let done: Done = admin.delete(&format!("/v1/keys/{}", segment(&key))).await?;
            show(json, &done, |d| format!("{}\n", d.message))
        }
        KeyAct::Rotate { key } => {
            let created: CreatedKey =
                admin.post(&format!("/v1/keys/{}/rotate", segment(&key)), &serde_json::json!({})).await?;
            show(json, &created, shown_once)
        }
    }
}

fn shown_once(c: &CreatedKey) -> String {
    format!(
        "key {} ({})\n\n  {}\n\nIt is shown this once; only its SHA-256 is kept. Clients send it as `Authorization: Bearer KEY`.\n",
        c.key.name,
        c.key.id,
        bold(&c.secret)
    )
}

/// A name in a path; names have no other characters (the daemon checks), `@` is legal there.
fn segment(key: &str) -> String {
    key.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@')).collect()
}

pub(super) async fn usage(admin: &Admin, json: bool, days: u32) -> Result<()> {
    let reply: UsageReply = admin.get(&format!("/v1/usage?days={days}")).await?;
    show(json, &reply, |r| {
        if r.rows.is_empty() {
            return format!("no requests in the last {days} days\n");
        }
        let header = ["DAY", "KEY", "REQUESTS", "PROMPT TOKENS", "OF THESE CACHED", "COMPLETION TOKENS"];
        let mut sums: BTreeMap<&str, [i64; 4]> = BTreeMap::new();
        let mut rows = Vec::new();
        for row in &r.rows {
            let figures = [row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens];
            let sum = sums.entry(&row.name).or_default();
            for (s, f) in sum.iter_mut().zip(figures) {
                *s += f;
            }
            let mut cells = vec![row.day.clone(), row.name.clone()];
            cells.extend(figures.iter().map(ToString::to_string));
            rows.push(cells);
        }
        for (name, sum) in sums {
            let mut cells = vec![format!("{days} days"), name.to_owned()];
            cells.extend(sum.iter().map(ToString::to_string));
            rows.push(cells);
        }
        table(&header, rows)
    })
}
