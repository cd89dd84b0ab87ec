//! `kv`: who holds the KV memory; `set KEY=VALUE`.

use crate::cli::KvAct;
use crate::client::Admin;
use crate::output::{seconds, show, table};
use anyhow::Result;
use ernie_proto::admin::{Done, KvDetails, KvWorker};

pub(super) async fn run(admin: &Admin, json: bool, act: Option<KvAct>, top: usize) -> Result<()> {
    match act {
        None => {
            let kv: KvDetails = admin.get("/v1/kv").await?;
            show(json, &kv, |kv| people(kv, top))
        }
        Some(KvAct::DropPrefixes) => drop_prefixes(admin, json).await,
    }
}

pub(super) async fn drop_prefixes(admin: &Admin, json: bool) -> Result<()> {
    let done: Done = admin.post("/v1/prefix-cache/reset", &serde_json::json!({})).await?;
    show(json, &done, |d| format!("{}\n", d.message))
}

fn people(kv: &KvDetails, top: usize) -> String {
    let mut out = String::new();
    for (i, worker) in kv.workers.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        out.push_str(&one(worker, kv.block_size, top));
    }
    if out.is_empty() {
        out.push_str("no worker serves; see `ernie-ctl workers`\n");
    }
    out
}

fn one(w: &KvWorker, block_size: u32, top: usize) -> String {
    let percent = |n: u32, of: u32| {
        if of == 0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * f64::from(n) / f64::from(of)) }
    };
    let row = |what: &str, n: u32, of: u32| {
        vec![what.to_owned(), n.to_string(), (u64::from(n) * u64::from(block_size)).to_string(), percent(n, of)]
    };
    let mut out = format!("{}\n", w.worker);
    out.push_str(&table(
        &["BLOCKS", "", "TOKENS", ""],
        [
            row("used", w.blocks_used, w.blocks_total),
            row("  of these shared", w.blocks_shared, w.blocks_total),
            row("cached prefixes", w.blocks_cached, w.blocks_total),
            row("free", w.blocks_free, w.blocks_total),
            row("total", w.blocks_total, w.blocks_total),
            row("swapped", w.swap_blocks_used, w.swap_blocks_total),
            row("  of preempted ones", w.swap_blocks_preempted, w.swap_blocks_total),
            row("swap space", w.swap_blocks_total, w.swap_blocks_total),
            row("on disk", w.disk_blocks_used, w.disk_blocks_total),
            row("  of an earlier worker", w.disk_blocks_restored, w.disk_blocks_total),
        ],
    ));
    let cost = |s: Option<f64>| s.map_or_else(|| "not measured yet".to_owned(), seconds);
    out.push_str(&format!(
        "swap policy {}, restore {}; a block: copy out and back {}, compute again {}\n",
        w.swap_policy,
        w.swap_restore,
        cost(w.copy_seconds_per_block),
        cost(w.compute_seconds_per_block)
    ));
    if w.disk_blocks_total > 0 {
        out.push_str(&format!(
            "swap file: {} blocks written, {} left out (disk busy), {} read; a block: read {}{}\n",
            w.disk_writes,
            w.disk_writes_skipped,
            w.disk_reads,
            cost(w.disk_seconds_per_block),
            if w.disk_pays { "" } else { "; slower than computing, so it is not read now" }
        ));
    }
    if w.disk_blocks_corrupt > 0 {
        out.push_str(&format!("{} blocks did not read back from disk as written\n", w.disk_blocks_corrupt));
    }
    if !w.keys.is_empty() {
        out.push('\n');
        let rows = w.keys.iter().take(top).map(|k| vec![k.key.clone(), k.sequences.to_string(), k.blocks.to_string()]);
        out.push_str(&table(&["KEY", "SEQUENCES", "BLOCKS"], rows));
    }
    if !w.sequences.is_empty() {
        out.push('\n');
        let rows = w.sequences.iter().take(top).map(|s| {
            let name = format!("{}.{}", s.request, s.choice);
            vec![name, s.key.clone(), s.state.clone(), s.tokens.to_string(), s.blocks.to_string()]
        });
        out.push_str(&table(&["SEQUENCE", "KEY", "STATE", "TOKENS", "BLOCKS"], rows));
    }
    out
}
