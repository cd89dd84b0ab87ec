//! `swap`, `rollback`.

use crate::cli::SwapArgs;
use crate::client::Admin;
use crate::output::{print, show};
use anyhow::{Context, Result};
use ernie_proto::admin::{Done, Rollback, Status, Swap};
use std::process::ExitCode;
use std::time::Duration;

const FOLLOW_INTERVAL: Duration = Duration::from_millis(300);

pub(super) async fn swap(admin: &Admin, json: bool, args: SwapArgs) -> Result<ExitCode> {
    let dir = args.model.canonicalize().with_context(|| format!("model folder {}", args.model.display()))?;
    let wanted = Swap {
        model_dir: dir,
        served_names: (!args.served_model_name.is_empty()).then_some(args.served_model_name),
        strategy: Some(args.strategy),
        observe_seconds: Some(args.observe),
        canary_percent: args.canary,
        force_unsealed: args.force_unsealed,
    };
    let before: Status = admin.get("/v1/status").await?;
    let done: Done = admin.post("/v1/swap", &wanted).await?;
    show(json, &done, |d| format!("{}\n", d.message))?;
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let mut phase = String::new();
    loop {
        let now: Status = admin.get("/v1/status").await?;
        if now.rollout.phase != phase {
            phase.clone_from(&now.rollout.phase);
            print(&format!("{phase}\n"))?;
        }
        if phase == "steady" && now.rollout.last != before.rollout.last {
            let last = now.rollout.last.unwrap_or_default();
            print(&format!("{last}\n"))?;
            return Ok(if last.contains(" did not: ") { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}

pub(super) async fn rollback(admin: &Admin, json: bool, reason: Option<String>) -> Result<()> {
    let done: Done = admin.post("/v1/rollback", &Rollback { reason }).await?;
    show(json, &done, |d| format!("{}\n", d.message))
}
