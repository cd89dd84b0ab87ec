//! Starts the real `ernied` on a free port with its own state, and takes it down again.

use crate::client::Client;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;

/// A start of the demo model takes about a second; a busy two-core machine may need many.
const START_PATIENCE: Duration = Duration::from_secs(120);

/// Lines of the daemon's log that a failing test may print.
const LOG_LINES_MAX: usize = 100_000;

/// How to start the daemon; the default is `serve --demo`.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// Flags after `serve`; `--demo` when none names a model.
    pub flags: Vec<String>,
    pub model: Option<PathBuf>,
    pub environment: Vec<(String, String)>,
    /// Folder of a cgroup to start in.
    pub cgroup: Option<PathBuf>,
}

impl DaemonOptions {
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|f| (*f).to_owned()));
        self
    }
}

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct TestDaemon {
    child: Child,
    pub address: String,
    pub state: TempDir,
    pub socket: PathBuf,
    options: DaemonOptions,
    log: watch::Receiver<Vec<String>>,
}

impl TestDaemon {
    pub async fn demo() -> Result<Self> {
        Self::start(DaemonOptions::default()).await
    }

    /// Starts and waits for the line that says it serves.
    pub async fn start(options: DaemonOptions) -> Result<Self> {
        let mut daemon = Self::spawn(options).await?;
        daemon.wait_until_serving().await?;
        Ok(daemon)
    }

    /// Starts and does not wait.
    pub async fn spawn(options: DaemonOptions) -> Result<Self> {
        let state = tempfile::Builder::new().prefix("ernied-test").tempdir()?;
        let socket = state.path().join("admin.sock");
        let (child, log) = launch(&options, state.path(), &socket)?;
        Ok(Self { child, address: String::new(), state, socket, options, log })
    }

    /// Kills the daemon (SIGKILL) if it still runs, and starts the next one on the same state.
    pub async fn restart(&mut self) -> Result<()> {
        self.respawn().await?;
        self.wait_until_serving().await
    }

    /// As [`TestDaemon::restart`], without waiting.
    pub async fn respawn(&mut self) -> Result<()> {
        // An error means that it has ended already.
        let _ = self.child.start_kill();
        self.child.wait().await?;
        (self.child, self.log) = launch(&self.options, self.state.path(), &self.socket)?;
        Ok(())
    }

    /// Flags and model of the next start.
    pub fn options_mut(&mut self) -> &mut DaemonOptions {
        &mut self.options
    }

    pub async fn wait_until_serving(&mut self) -> Result<()> {
        let line = self.wait_for_line("Serving on http://").await?;
        let rest = line.split("Serving on http://").nth(1).unwrap_or_default();
        self.address = rest.trim_end_matches('/').split_whitespace().next().unwrap_or_default().to_owned();
        Ok(())
    }

    /// Waits for a log line that holds `needle`.
    pub async fn wait_for_line(&mut self, needle: &str) -> Result<String> {
        let mut log = self.log.clone();
        let seen = tokio::select! {
            found = log.wait_for(|lines| lines.iter().any(|l| l.contains(needle))) => match found {
                Ok(lines) => lines.iter().find(|l| l.contains(needle)).cloned(),
                Err(_) => None,
            },
            status = self.child.wait() => bail!("ernied ended with {:?} before {needle:?}:\n{}", status?, self.log_text()),
            () = tokio::time::sleep(START_PATIENCE) => bail!("no {needle:?} within {START_PATIENCE:?}:\n{}", self.log_text()),
        };
        seen.with_context(|| format!("the log closed before {needle:?}:\n{}", self.log_text()))
    }

    pub fn client(&self) -> Client {
        Client::new(self.address.clone())
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn pid(&self) -> i32 {
        self.child.id().map_or(0, |id| id as i32)
    }

    pub fn log_lines(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    pub fn log_text(&self) -> String {
        self.log.borrow().join("\n")
    }

    /// Pids of this daemon's engine workers, by its children in `/proc`.
    pub fn worker_pids(&self) -> Vec<i32> {
        children(self.pid())
    }

    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        send_signal(self.pid(), signal)
    }

    pub async fn wait(&mut self) -> Result<ExitStatus> {
        Ok(tokio::time::timeout(START_PATIENCE, self.child.wait()).await.context("ernied does not end")??)
    }

    /// Runs `ernie-ctl` against this daemon; returns (exit code, stdout, stderr).
    pub async fn ctl(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        ctl(&self.socket, arguments).await
    }

    /// One value of a metric without looking at its labels: the sum over all its series.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        let text = self.client().get("/metrics").await?.text();
        let values = text
            .lines()
            .filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' ')));
        Ok(values.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }
}

fn launch(options: &DaemonOptions, state: &Path, socket: &Path) -> Result<(Child, watch::Receiver<Vec<String>>)> {
    let mut command = match &options.cgroup {
        // The shell moves itself and becomes the daemon: nothing of it runs outside.
        Some(cgroup) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(cgroup).arg(binary("ernied")?);
            shell
        }
        None => Command::new(binary("ernied")?),
    };
    command.arg("serve");
    match &options.model {
        Some(model) => command.arg(model),
        None if options.flags.iter().any(|flag| flag == "--config") => &mut command,
        None => command.arg("--demo"),
    };
    command.args(["--host", "127.0.0.1", "--port", "0"]);
    command.arg("--state-dir").arg(state).arg("--admin-socket").arg(socket);
    command.args(&options.flags).envs(options.environment.iter().map(|(k, v)| (k, v)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().context("ernied does not start")?;
    let (sender, log) = watch::channel(Vec::new());
    let stdout = child.stdout.take().context("stdout")?;
    let stderr = child.stderr.take().context("stderr")?;
    let also = sender.clone();
    tokio::spawn(async move { pump(stdout, sender).await });
    tokio::spawn(async move { pump(stderr, also).await });
    Ok((child, log))
}

async fn pump(from: impl tokio::io::AsyncRead + Unpin, to: watch::Sender<Vec<String>>) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        to.send_modify(|log| {
            if log.len() < LOG_LINES_MAX {
                log.push(line);
            }
        });
    }
}

/// `ernie-ctl --socket SOCKET ARGUMENTS…`.
pub async fn ctl(socket: &Path, arguments: &[&str]) -> Result<(i32, String, String)> {
    let output = Command::new(binary("ernie-ctl")?).arg("--socket").arg(socket).args(arguments).output().await?;
    Ok((
        output.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

/// A binary of this workspace, beside the running test (`target/<profile>/NAME`).
pub fn binary(name: &str) -> Result<PathBuf> {
    let mut folder = std::env::current_exe()?;
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    let path = folder.join(name);
    if !path.exists() {
        bail!("{} is not built: run `cargo build --workspace --bins` first (`cargo xtask test` does)", path.display());
    }
    Ok(path)
}

/// Direct children of a process.
pub fn children(pid: i32) -> Vec<i32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|child| {
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{child}/stat")) else { return false };
            // "pid (name) state ppid …": the name may hold blanks and brackets.
            let rest = stat.rsplit(") ").next().unwrap_or_default();
            let mut fields = rest.split(' ');
            fields.next() != Some("Z") && fields.next().and_then(|p| p.parse::<i32>().ok()) == Some(pid)
        })
        .collect()
}

/// Sends a signal to a process by number.
pub fn send_signal(pid: i32, signal: rustix::process::Signal) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid).context("no such process")?;
    Ok(rustix::process::kill_process(pid, signal)?)
}
