//! A real Prometheus against a real daemon: every expression of our boards and of vLLM's gives finite figures.

use crate::load::Load;
use anyhow::{Context, Result, bail, ensure};
use ernied_tests::prometheus::{Prometheus, Tools, skipped};
use ernied_tests::{DaemonOptions, TestDaemon, models};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

/// A scrape, a rule or a window later it is there; a busy two-core machine may need many.
const PATIENCE: Duration = Duration::from_secs(90);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn dashboards() -> PathBuf {
    repository().join("dashboards")
}

/// One expression of one panel.
struct Expression {
    board: String,
    panel: String,
    text: String,
}

/// What Grafana would put in for its variables.
fn filled(text: &str) -> String {
    [
        ("$__rate_interval", "15s"),
        ("$__interval", "15s"),
        ("$__range", "1m"),
        ("$instance", ".*"),
        ("$engine", ".*"),
        ("$model_name", "ernie-demo"),
        ("$model", ".*"),
        ("$Deployment_id", "ernie-demo"),
    ]
    .iter()
    .fold(text.to_owned(), |text, (variable, value)| text.replace(variable, value))
}

fn ours() -> Result<Vec<Expression>> {
    let mut all = Vec::new();
    for name in ["overview", "engine", "models", "moe", "host"] {
        let path = dashboards().join("grafana").join(format!("{name}.json"));
        let board: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        for panel in board["panels"].as_array().context("panels")? {
            for target in panel["targets"].as_array().context("targets")? {
                all.push(Expression {
                    board: board["title"].as_str().context("title")?.to_owned(),
                    panel: panel["title"].as_str().context("title")?.to_owned(),
                    text: target["expr"].as_str().context("expr")?.to_owned(),
                });
            }
        }
    }
    Ok(all)
}

fn vllms() -> Result<Vec<Expression>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/dashboards/vllm-panels.json");
    let panels: Vec<Value> = serde_json::from_slice(&std::fs::read(path)?)?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let of = |panel: &Value| {
        let expressions = panel["expressions"].as_array().cloned().unwrap_or_default();
        let (board, name) = (text(&panel["board"]), text(&panel["panel"]));
        expressions
            .into_iter()
            .map(move |e| Expression { board: board.clone(), panel: name.clone(), text: text(&e) })
            .collect::<Vec<_>>()
    };
    Ok(panels.iter().flat_map(of).collect())
}

fn rules(name: &str) -> Result<String> {
    Ok(std::fs::read_to_string(dashboards().join("prometheus").join(name))?)
}

/// Every rule that records something, by its name.
fn recorded() -> Result<Vec<Expression>> {
    let text = rules("ernied-recording.yml")?;
    let names = text.lines().filter_map(|l| l.trim().strip_prefix("- record: "));
    Ok(names
        .map(|name| Expression { board: "recording rules".to_owned(), panel: name.to_owned(), text: name.to_owned() })
        .collect())
}

/// First sample and how many there are, or why the expression gives nothing that can be drawn.
async fn evaluate(prometheus: &Prometheus, expression: &Expression) -> Result<(String, usize), String> {
    let samples = prometheus.query(&filled(&expression.text)).await.map_err(|e| format!("{e:#}"))?;
    let Some(first) = samples.first() else { return Err("no sample".to_owned()) };
    match samples.iter().find(|s| !s.value.is_finite()) {
        Some(bad) => Err(format!("{} is {}", bad.labels, bad.value)),
        None => Ok((format!("{:.6}", first.value), samples.len())),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_of_our_boards_and_of_vllms_shows_finite_figures() -> Result<()> {
    let tools = match Tools::find().await {
        Ok(tools) => tools,
        Err(reason) => {
            skipped("every_panel_of_our_boards_and_of_vllms_shows_finite_figures", &reason);
            return Ok(());
        }
    };
    // So little KV that long answers are preempted and swapped out, so short a queue that some are refused.
    let options = DaemonOptions::default().flags(&[
        "--max-num-seqs",
        "16",
        "--kv-cache-bytes",
        "3MiB",
        "--max-model-len",
        "1024",
        "--swap-space",
        "0.05",
        "--max-num-queued-reqs",
        "24",
    ]);
    let daemon = TestDaemon::start(options).await?;
    let rules: Vec<String> = vec![rules("ernied-recording.yml")?.replace("interval: 15s", "interval: 1s")];
    let prometheus = Prometheus::start(&tools, std::slice::from_ref(&daemon.address), &rules, None).await?;
    let _load = Load::start(&daemon.client(), 48);
    for counter in ["vllm:num_preemptions_total", "ernied_swapped_blocks_total", "vllm:admission_rejections_total"] {
        wait_for_counter(&daemon, counter).await?;
    }
    let next = models::revision(daemon.state.path(), "next").await?;
    swapped(&daemon, &next).await?;

    let all: Vec<Expression> = [ours()?, vllms()?, recorded()?].into_iter().flatten().collect();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut table = String::from("| board | panel | expression | value | series |\n|---|---|---|---:|---:|\n");
    let mut bad = Vec::new();
    for expression in &all {
        let mut result = evaluate(&prometheus, expression).await;
        while result.is_err() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(500)).await;
            result = evaluate(&prometheus, expression).await;
        }
        let (value, series) = match result {
            Ok(shown) => shown,
            Err(why) => {
                bad.push(format!("{} / {}: {}: {why}", expression.board, expression.panel, expression.text));
                continue;
            }
        };
        let text = expression.text.replace('|', "\\|");
        let _ = writeln!(table, "| {} | {} | `{text}` | {value} | {series} |", expression.board, expression.panel);
    }
    println!("{table}");
    ensure!(bad.is_empty(), "{} of {} expressions can not be drawn:\n{}", bad.len(), all.len(), bad.join("\n"));
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        let head = include_str!("boards_head.md");
        std::fs::write(repository().join("docs/boards.md"), format!("{head}\n{table}"))?;
    }
    Ok(())
}

/// Swaps the model. On a busy machine a candidate may look too slow in its probes; it is tried again then.
async fn swapped(daemon: &TestDaemon, next: &Path) -> Result<()> {
    let mut said = String::new();
    for _ in 0..5 {
        let next = next.display().to_string();
        let (code, out, errors) = daemon.ctl(&["swap", &next, "--observe", "1", "--strategy", "side-by-side"]).await?;
        if code == 0 && out.contains("serves revision") {
            return Ok(());
        }
        said = format!("{out}{errors}");
    }
    bail!("the swap failed five times: {said}")
}

async fn wait_for_counter(daemon: &TestDaemon, name: &str) -> Result<()> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while daemon.metric(name).await? == 0.0 {
        ensure!(tokio::time::Instant::now() < deadline, "{name} stays at 0 under this load");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn promtool_accepts_our_files_and_each_alert_by_its_own_windows() -> Result<()> {
    let tools = match Tools::find().await {
        Ok(tools) => tools,
        Err(reason) => {
            skipped("promtool_accepts_our_files_and_each_alert_by_its_own_windows", &reason);
            return Ok(());
        }
    };
    let folder = dashboards().join("prometheus");
    for arguments in [
        ["check", "rules", "ernied-alerts.yml"],
        ["check", "rules", "ernied-recording.yml"],
        ["check", "config", "scrape.yml"],
        ["test", "rules", "ernied-alerts.test.yml"],
    ] {
        let output = Command::new(&tools.promtool).args(arguments).current_dir(&folder).output().await?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "promtool {arguments:?}:\n{text}");
    }
    // Each alert has its test there, and its entry in the runbook.
    let (alerts, tests) = (rules("ernied-alerts.yml")?, rules("ernied-alerts.test.yml")?);
    let runbook = std::fs::read_to_string(repository().join("docs/runbook.md"))?.to_lowercase();
    for alert in alert_names(&alerts) {
        ensure!(tests.contains(&format!("alertname: {alert}")), "{alert} has no test in ernied-alerts.test.yml");
    }
    for anchor in alerts.lines().filter_map(|l| l.split("docs/runbook.md#").nth(1)) {
        ensure!(runbook.contains(&format!("### {anchor}")), "the runbook has no entry {anchor}");
    }
    Ok(())
}

pub(crate) fn alert_names(text: &str) -> Vec<&str> {
    text.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect()
}

/// Our rules with windows of seconds instead of minutes; thresholds stay.
pub(crate) fn shortened() -> Result<Vec<String>> {
    let short = |name: &str| -> Result<String> {
        let mut out = String::new();
        for line in rules(name)?.lines() {
            let indent = &line[..line.len() - line.trim_start().len()];
            match line.trim() {
                t if t.starts_with("for: ") => {
                    let _ = writeln!(out, "{indent}for: 0s");
                }
                t if t.starts_with("interval: ") => {
                    let _ = writeln!(out, "{indent}interval: 1s");
                }
                _ => {
                    let _ = writeln!(out, "{}", windows_of_seconds(line));
                }
            }
        }
        Ok(out)
    };
    Ok(vec![short("ernied-recording.yml")?, short("ernied-alerts.yml")?])
}

/// `[5m]` becomes `[15s]`.
fn windows_of_seconds(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(open) = rest.find('[') {
        out.push_str(&rest[..=open]);
        rest = &rest[open + 1..];
        if let Some(close) = rest.find("m]")
            && rest[..close].bytes().all(|b| b.is_ascii_digit())
        {
            out.push_str("15s");
            rest = &rest[close + 1..];
        }
    }
    out + rest
}

#[test]
fn windows_are_shortened_and_nothing_else() {
    assert_eq!(windows_of_seconds("expr: rate(x{a=\"[5\"}[5m]) > 0.5"), "expr: rate(x{a=\"[5\"}[15s]) > 0.5");
    assert_eq!(windows_of_seconds("sum(rate(a[1m])) / sum(rate(b[10m]))"), "sum(rate(a[15s])) / sum(rate(b[15s]))");
}
