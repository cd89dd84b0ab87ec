//! What an operator sees and does: status, log lines, health, config errors.

use anyhow::Result;
use ernied_tests::{DaemonOptions, TestDaemon, binary};
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

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_gives_no_numbers_is_said_counted_and_may_withdraw_readiness() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = Some(ernied_tests::models::with_broken_router(folder.path(), 2)?);
    let options = DaemonOptions { model, ..DaemonOptions::default().flags(&["--unready-on-zero-experts"]) };
    let mut daemon = TestDaemon::start(options).await?;
    let series = "ernied_moe_zero_active_experts_total{layer=\"2\"}";
    let metrics = daemon.client().get("/metrics").await?.text();
    assert!(metrics.contains(&format!("{series} 0.0")), "the series is there before anything happened");
    assert_eq!(daemon.client().get("/health").await?.status, 200);
    let body = serde_json::json!({"prompt": "hello", "max_tokens": 4});
    let answer = daemon.client().post("/v1/completions", &body).await?;
    assert!(answer.status >= 500 || answer.json()?["choices"][0]["finish_reason"] == "error", "{}", answer.text());
    daemon.wait_for_line("MoE layer has 0 active experts").await?;
    let metrics = daemon.client().get("/metrics").await?.text();
    let line = metrics.lines().find(|l| l.starts_with(series)).unwrap_or_default();
    assert!(!line.ends_with(" 0.0") && line.starts_with(series), "{line:?}");
    let health = daemon.client().get("/health").await?;
    assert_eq!(health.status, 503);
    assert!(health.text().contains("active expert"), "{}", health.text());
    Ok(())
}

#[tokio::test]
async fn a_level_that_can_not_be_used_is_refused_at_the_start() -> Result<()> {
    for (level, cause) in [("sse9", "names no instruction-set level"), ("neon", "does not offer")] {
        if cfg!(target_arch = "aarch64") && level == "neon" {
            continue;
        }
        let mut serve = Command::new(binary("ernied")?);
        let output = serve.args(["serve", "--demo", "--port", "0"]).env("ERNIED_ISA", level).output().await?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(&format!("ERNIED_ISA={level}")) && said.contains(cause) && said.contains("scalar"),
            "{said}"
        );
    }
    Ok(())
}
