//! `kv`: who holds the KV memory.

use super::Control;
use super::error::AdminError;
use axum::Json;
use axum::extract::State;
use ernie_proto::admin;
use ernie_proto::worker::{KvReport, KvState, SwapPolicy, SwapRestore};
use std::sync::Arc;
use std::time::Duration;

/// Workers answer between two steps; the longest step of a large model takes seconds.
const PATIENCE: Duration = Duration::from_secs(15);

pub(super) async fn show(State(control): State<Arc<Control>>) -> Result<Json<admin::KvDetails>, AdminError> {
    let reports = control.fleet.kv_report(PATIENCE).await.map_err(|e| AdminError::unavailable(e.to_string()))?;
    let reports = reports.ok_or_else(|| {
        AdminError::unavailable(format!(
            "a worker did not answer within {} s; see `ernie-ctl workers`",
            PATIENCE.as_secs()
        ))
    })?;
    let names = control.keys.names();
    let name = |owner: u64| names.get(&owner).cloned().unwrap_or_else(|| format!("#{owner:016x}"));
    let block_size = control.fleet.active().map_or(0, |active| active.loaded.block_size);
    let workers = reports.iter().map(|(id, report)| worker(id.to_string(), report, &name)).collect();
    Ok(Json(admin::KvDetails { block_size, workers }))
}

fn worker(id: String, report: &KvReport, name: &impl Fn(u64) -> String) -> admin::KvWorker {
    let sequences = report.sequences.iter().map(|s| admin::KvSequence {
        request: s.request.0,
        choice: s.choice,
        key: name(s.owner),
        state: match s.state {
            KvState::Waiting => "waiting",
            KvState::Running => "running",
            KvState::Preempted => "preempted",
        }
        .to_owned(),
        blocks: s.blocks,
        tokens: s.tokens,
    });
    let keys =
        report.owners.iter().map(|o| admin::KvKey { key: name(o.owner), sequences: o.sequences, blocks: o.blocks });
    admin::KvWorker {
        worker: id,
        blocks_total: report.blocks_total,
        blocks_free: report.blocks_empty,
        blocks_cached: report.blocks_cached,
        blocks_used: report.blocks_used,
        blocks_shared: report.blocks_shared,
        swap_blocks_total: report.swap_blocks_total,
        swap_blocks_used: report.swap_blocks_used,
        swap_blocks_preempted: report.swap_blocks_preempted,
        disk_blocks_total: report.disk.blocks_total,
        disk_blocks_used: report.disk.blocks_used,
        disk_blocks_restored: report.disk.blocks_restored,
        disk_blocks_corrupt: report.disk.blocks_corrupt,
        disk_reads: report.disk.reads,
        disk_writes: report.disk.writes,
        disk_writes_skipped: report.disk.writes_skipped,
        disk_pays: report.disk_pays,
        swap_policy: policy_word(report.swap.policy).to_owned(),
        swap_restore: restore_word(report.swap.restore, report.copies_pay),
        copy_seconds_per_block: report.copy_seconds,
        disk_seconds_per_block: report.disk_seconds,
        compute_seconds_per_block: report.compute_seconds,
        sequences: sequences.collect(),
        keys: keys.collect(),
    }
}

fn policy_word(policy: SwapPolicy) -> &'static str {
    match policy {
        SwapPolicy::Off => "off",
        SwapPolicy::OnPressure => "on-pressure",
        SwapPolicy::Always => "always",
    }
}

fn restore_word(restore: SwapRestore, copies_pay: bool) -> String {
    let now = if copies_pay { "swap" } else { "recompute" };
    match restore {
        SwapRestore::Auto => format!("auto ({now})"),
        SwapRestore::Swap | SwapRestore::Recompute => now.to_owned(),
    }
}
