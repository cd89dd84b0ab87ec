//! `events`: follows the audit store.

use super::audit;
use crate::client::Admin;
use crate::output::print;
use anyhow::Result;
use ernie_proto::admin::AuditRows;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn run(admin: &Admin, json: bool, lines: u32) -> Result<()> {
    let mut rows: AuditRows = admin.get(&format!("/v1/audit?limit={}", lines.max(1))).await?;
    let mut last = 0;
    loop {
        for row in &rows.rows {
            last = last.max(row.seq);
            if json {
                print(&(serde_json::to_string(row)? + "\n"))?;
            } else {
                // The table's header once is enough.
                print(audit::list(std::slice::from_ref(row)).split_once('\n').map_or("", |(_, line)| line))?;
            }
        }
        tokio::time::sleep(INTERVAL).await;
        rows = admin.get(&format!("/v1/audit?after={last}&limit=1000&order=oldest")).await?;
    }
}
