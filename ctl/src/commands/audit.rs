//! `audit list | show | verify | export`.

use crate::cli::AuditAct;
use crate::client::Admin;
use crate::output::{bad, good, print, show, table};
use anyhow::{Result, bail};
use ernie_proto::admin::{AuditRow, AuditRows, AuditVerdict};
use std::process::ExitCode;

/// Rows fetched at once by `export`.
const PAGE: u32 = 1000;

pub(super) async fn run(admin: &Admin, json: bool, act: AuditAct) -> Result<ExitCode> {
    match act {
        AuditAct::List { act, limit } => {
            let act = act.map(|a| format!("&act={}", word(&a))).unwrap_or_default();
            let rows: AuditRows = admin.get(&format!("/v1/audit?limit={limit}{act}")).await?;
            show(json, &rows, |r| list(&r.rows))?;
        }
        AuditAct::Show { seq } => {
            let rows: AuditRows = admin.get(&format!("/v1/audit?seq={seq}")).await?;
            print(&(serde_json::to_string_pretty(&rows.rows)? + "\n"))?;
        }
        AuditAct::Verify => {
            let verdict: AuditVerdict = admin.get("/v1/audit/verify").await?;
            show(json, &verdict, people)?;
            if !verdict.intact {
                return Ok(ExitCode::FAILURE);
            }
        }
        AuditAct::Export => {
            let mut after = 0;
            loop {
                let rows: AuditRows = admin.get(&format!("/v1/audit?after={after}&limit={PAGE}&order=oldest")).await?;
                let Some(last) = rows.rows.last() else { break };
                if last.seq <= after {
                    bail!("the daemon repeats row {after}");
                }
                after = last.seq;
                for row in &rows.rows {
                    print(&(serde_json::to_string(row)? + "\n"))?;
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn word(act: &str) -> String {
    act.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')).collect()
}

pub(super) fn list(rows: &[AuditRow]) -> String {
    let cells = rows.iter().map(|r| {
        let end = match (&r.outcome, r.kind.as_str()) {
            (Some(outcome), _) => {
                let ms = r.duration_ms.map(|ms| format!(" in {ms} ms")).unwrap_or_default();
                format!("{outcome}{ms} (row {})", r.intent.unwrap_or(0))
            }
            (None, kind) => kind.to_owned(),
        };
        let detail = match &r.detail {
            serde_json::Value::Object(o) if o.is_empty() => String::new(),
            detail => detail.to_string(),
        };
        vec![r.seq.to_string(), r.at.clone(), r.actor.clone(), r.act.clone(), r.subject.clone(), end, detail]
    });
    table(&["ROW", "TIME", "WHO", "ACT", "ON", "", "DETAIL"], cells)
}

fn people(v: &AuditVerdict) -> String {
    let range = match (v.first, v.last) {
        (Some(first), Some(last)) => format!("{} rows, {first} to {last}", v.rows),
        _ => "no rows".to_owned(),
    };
    let mut out = match (&v.broken_at, &v.reason) {
        (Some(seq), Some(reason)) => format!("{}: {range}; row {seq}: {reason}\n", bad("broken")),
        _ => format!("{}: {range}\n", good("intact")),
    };
    if !v.unfinished.is_empty() {
        out.push_str(&format!("acts without a recorded end: {:?} (a crash, or still under way)\n", v.unfinished));
    }
    out
}
