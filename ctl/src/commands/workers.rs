//! `workers`, `drain`, `resume`.

use super::status;
use crate::cli::WorkersAct;
use crate::client::Admin;
use crate::output::show;
use anyhow::Result;
use ernie_proto::admin::{Done, Drain, Drained, RestartWorker, Workers};

pub(super) async fn run(admin: &Admin, json: bool, act: Option<WorkersAct>) -> Result<()> {
    match act {
        None | Some(WorkersAct::List) => {
            let workers: Workers = admin.get("/v1/workers").await?;
            show(json, &workers, |w| status::workers(&w.workers))
        }
        Some(WorkersAct::Drain { worker }) => {
            let done: Done = admin.post("/v1/workers/restart", &RestartWorker { worker, graceful: true }).await?;
            show(json, &done, |d| format!("{}\n", d.message))
        }
        Some(WorkersAct::Restart { worker, graceful }) => {
            let done: Done = admin.post("/v1/workers/restart", &RestartWorker { worker, graceful }).await?;
            show(json, &done, |d| format!("{}\n", d.message))
        }
    }
}

pub(super) async fn drain(admin: &Admin, json: bool, timeout: Option<f64>, exit: bool) -> Result<()> {
    let drained: Drained = admin.post("/v1/drain", &Drain { patience_seconds: timeout, exit }).await?;
    show(json, &drained, |d| format!("{} requests ended, {} were failed at the deadline\n", d.finished, d.failed))
}

pub(super) async fn resume(admin: &Admin, json: bool) -> Result<()> {
    let done: Done = admin.post("/v1/resume", &serde_json::json!({})).await?;
    show(json, &done, |d| format!("{}\n", d.message))
}
