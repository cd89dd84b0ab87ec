//! Debian's Prometheus: found or fetched, started on a free port, asked over its API.
//!
//! The package is unpacked into the target folder, not installed: a test must not leave a service on the machine.

use crate::client::Client;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

/// Prometheus starts within a second; a busy two-core machine may need many.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// Only one test at a time fetches.
static FETCHING: Mutex<()> = Mutex::const_new(());

/// Where the programs are.
#[derive(Debug, Clone)]
pub struct Tools {
    pub prometheus: PathBuf,
    pub promtool: PathBuf,
}

impl Tools {
    /// Those on the path, else Debian's package. The error is the reason to skip a test by name.
    pub async fn find() -> Result<Self> {
        if let (Some(prometheus), Some(promtool)) = (on_path("prometheus"), on_path("promtool")) {
            return Ok(Self { prometheus, promtool });
        }
        let _one = FETCHING.lock().await;
        let folder = crate::binary("ernied")?.parent().context("target folder")?.join("prometheus");
        let tools = Self { prometheus: folder.join("usr/bin/prometheus"), promtool: folder.join("usr/bin/promtool") };
        if !(tools.prometheus.exists() && tools.promtool.exists()) {
            std::fs::create_dir_all(&folder)?;
            if fetch(&folder).await.is_err() {
                // A fresh machine has no lists yet; this takes root.
                run(Command::new("apt-get").args(["update", "-q"])).await?;
                fetch(&folder).await?;
            }
        }
        Ok(tools)
    }
}

async fn fetch(folder: &Path) -> Result<()> {
    run(Command::new("apt-get").args(["download", "-q", "prometheus"]).current_dir(folder)).await?;
    let deb = std::fs::read_dir(folder)?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no package")?;
    run(Command::new("dpkg-deb").arg("-x").arg(deb).arg(folder)).await
}

async fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().await.with_context(|| format!("{:?}", command.as_std()))?;
    ensure!(output.status.success(), "{:?}: {}", command.as_std(), String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.exists())
}

/// Says on the terminal, past the test's captured output, that a test did not run.
pub fn skipped(test: &str, reason: &anyhow::Error) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason:#}");
}

/// A running Prometheus; killed when dropped.
#[derive(Debug)]
pub struct Prometheus {
    _child: Child,
    client: Client,
    _folder: TempDir,
}

/// One sample of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub labels: String,
    pub value: f64,
}

impl Prometheus {
    /// Scrapes `targets` twice a second as job `ernied`; `rules` are the texts of rule files, `key` an API key.
    pub async fn start(tools: &Tools, targets: &[String], rules: &[String], key: Option<&str>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ernied-prometheus").tempdir()?;
        let mut files = Vec::new();
        for (n, text) in rules.iter().enumerate() {
            let path = folder.path().join(format!("rules-{n}.yml"));
            std::fs::write(&path, text)?;
            files.push(path.display().to_string());
        }
        let key = key.map_or_else(String::new, |key| format!("    authorization: {{ credentials: {key} }}\n"));
        let config = format!(
            "global: {{ scrape_interval: 500ms, evaluation_interval: 500ms }}\n\
             rule_files: {files:?}\n\
             scrape_configs:\n  - job_name: ernied\n{key}    static_configs:\n      - targets: {targets:?}\n"
        );
        let path = folder.path().join("prometheus.yml");
        std::fs::write(&path, config)?;
        // Chosen by the system and free again; nobody else asks for ports in this range in between.
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = format!("127.0.0.1:{port}");
        let child = Command::new(&tools.prometheus)
            .arg(format!("--config.file={}", path.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .args(["--log.level=warn", "--storage.tsdb.retention.time=1h"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .context("prometheus does not start")?;
        let prometheus = Self { _child: child, client: Client::new(address), _folder: folder };
        let deadline = tokio::time::Instant::now() + START_PATIENCE;
        while !prometheus.client.get("/-/ready").await.is_ok_and(|r| r.status == 200) {
            ensure!(tokio::time::Instant::now() < deadline, "prometheus is not ready after {START_PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The first scrape comes some five seconds after the start. What rises before it is no rise to Prometheus.
        while prometheus.query("up").await?.len() < targets.len() {
            ensure!(tokio::time::Instant::now() < deadline, "prometheus scrapes nothing after {START_PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(prometheus)
    }

    /// An instant query.
    pub async fn query(&self, expression: &str) -> Result<Vec<Sample>> {
        let answer = self.client.get(&format!("/api/v1/query?query={}", encode(expression))).await?;
        let json = answer.json()?;
        if json["status"] != "success" {
            bail!("{expression}: {}", json["error"]);
        }
        let result = &json["data"]["result"];
        let samples = match json["data"]["resultType"].as_str() {
            Some("scalar") => vec![Sample { labels: String::new(), value: number(&result[1]) }],
            _ => (result.as_array().into_iter().flatten())
                .map(|one| Sample { labels: labels(&one["metric"]), value: number(&one["value"][1]) })
                .collect(),
        };
        Ok(samples)
    }

    /// Names of the alerts that fire.
    pub async fn firing(&self) -> Result<Vec<String>> {
        let json = self.client.get("/api/v1/alerts").await?.json()?;
        let alerts = json["data"]["alerts"].as_array().context("no alerts in the answer")?;
        let firing = alerts.iter().filter(|a| a["state"] == "firing");
        Ok(firing.filter_map(|a| a["labels"]["alertname"].as_str().map(str::to_owned)).collect())
    }
}

fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some("+Inf") => f64::INFINITY,
        Some("-Inf") => f64::NEG_INFINITY,
        Some(text) => text.parse().unwrap_or(f64::NAN),
        None => f64::NAN,
    }
}

fn labels(metric: &Value) -> String {
    let pairs = metric.as_object().into_iter().flatten().filter(|(k, _)| !matches!(k.as_str(), "job" | "instance"));
    pairs.map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or_default())).collect::<Vec<_>>().join(",")
}

fn encode(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
