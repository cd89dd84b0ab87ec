//! What an operator sees and does: status, log lines, health, config errors.

use anyhow::Result;
use ernied_tests::{TestDaemon, binary};
use serde_json::Value;
use tokio::process::Command;

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_it_all() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let (code, text, errors) = daemon.ctl(&["status"]).await?;
    assert_eq!(code, 0, "{errors}");
    for expected in ["ernie-demo", "MoE", &daemon.worker_pids()[0].to_string()] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
    let (code, json, errors) = daemon.ctl(&["status", "--json"]).await?;
    assert_eq!(code, 0, "{errors}");
    let status: Value = serde_json::from_str(&json)?;
    assert!(status["version"].is_string(), "{status}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lines_that_the_owners_documents_grep_for_come_in_order() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let log = daemon.log_text();
    let mut from = 0;
    for mark in ["Started engine with config", "HTTP server started at http://", "Engine started."] {
        let at = log[from..].find(mark).unwrap_or_else(|| panic!("no {mark:?} after byte {from} in:\n{log}"));
        from += at + mark.len();
    }
    let mut from = 0;
    for mark in ["Loading model from", "Model loaded successfully. GPU memory usage:", "Serving on http://"] {
        let at = log[from..].find(mark).unwrap_or_else(|| panic!("no {mark:?} after byte {from} in:\n{log}"));
        from += at + mark.len();
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_version_and_metrics_answer() -> Result<()> {
    let daemon = TestDaemon::demo().await?;
    let client = daemon.client();
    let health = client.get("/health").await?;
    assert_eq!((health.status, health.text().as_str()), (200, "OK"));
    assert!(client.get("/version").await?.json()?["version"].is_string());
    let models = client.get("/v1/models").await?.json()?;
    assert_eq!(models["data"][0]["id"], "ernie-demo");
    assert_eq!(client.get("/v1/models/ernie-demo").await?.status, 200);
    assert_eq!(client.get("/v1/models/other").await?.status, 404);
    let metrics = client.get("/metrics").await?.text();
    for name in ["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"] {
        assert!(metrics.contains(name), "no {name}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_error_of_a_config_is_reported_at_once() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("ernied.toml");
    std::fs::write(&path, "[server]\nport = 70000\nhots = \"x\"\n[engine]\nmax_num_seqs = 0\n")?;
    let output = Command::new(binary("ernied")?).arg("check-config").arg("--config").arg(&path).output().await?;
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    for expected in ["port", "hots", "max_num_seqs"] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
    Ok(())
}
