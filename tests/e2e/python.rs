//! Clients that people use, unchanged, against the real binary: OpenAI's and Anthropic's, LangChain, LiteLLM; and
//! schemathesis, which makes requests from our own OpenAPI document. Each in a virtual environment of pinned packages.

use anyhow::{Context, Result, bail};
use ernied_tests::{DaemonOptions, TestDaemon};
use std::path::{Path, PathBuf};
use tokio::process::Command;
use tokio::sync::Mutex;

/// One environment is made at a time; tests of one process share it.
static MAKING: Mutex<()> = Mutex::const_new(());

/// An environment with the pins of a file in `tests/python`. It lives in the target folder and is made once; a change of the
/// pins makes a new one. `None`, with the reason printed: Python or its package index can not be reached from here.
async fn environment(pins: &str) -> Result<Option<PathBuf>> {
    let _one = MAKING.lock().await;
    let file = folder().join(pins);
    let wanted = std::fs::read_to_string(&file)?;
    let binaries = ernied_tests::binary("ernied")?;
    let venv = binaries.parent().context("target folder")?.join(format!("python-{}", pins.trim_end_matches(".txt")));
    let stamp = venv.join("pins.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
        return Ok(Some(venv));
    }
    let mut make = Command::new("python3");
    make.args(["-m", "venv", "--clear"]).arg(&venv);
    let mut install = Command::new(venv.join("bin/pip"));
    install.args(["install", "-q", "--disable-pip-version-check", "--timeout", "30", "-r"]).arg(&file);
    for mut command in [make, install] {
        if let Err(error) = run(&mut command).await {
            println!("SKIPPED: no environment for {pins}: {error:#}");
            return Ok(None);
        }
    }
    std::fs::write(&stamp, wanted)?;
    Ok(Some(venv))
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

/// Runs to the end; what it printed when it fails.
async fn run(command: &mut Command) -> Result<String> {
    let output = command.output().await.with_context(|| format!("{:?}", command.as_std().get_program()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{:?} ended with {}:\n{text}", command.as_std(), output.status);
    }
    Ok(text)
}

/// Runs scripts of `tests/python`, one after the other, against one daemon with the demo model.
async fn scripts(pins: &str, scripts: &[&str]) -> Result<()> {
    let Some(venv) = environment(pins).await? else { return Ok(()) };
    let daemon = TestDaemon::demo().await?;
    for script in scripts {
        let python = venv.join("bin/python");
        let ran = run(Command::new(python).arg(folder().join(script)).arg(daemon.url())).await;
        ran.with_context(|| format!("daemon log:\n{}", daemon.log_text()))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_client_chats_streams_calls_tools_parses_stores_and_batches() -> Result<()> {
    scripts("requirements.txt", &["openai_client.py", "openai_more.py"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_anthropic_client_sends_messages() -> Result<()> {
    scripts("requirements.txt", &["anthropic_client.py"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn langchain_and_litellm_work_by_changing_the_base_url() -> Result<()> {
    scripts("requirements-frameworks.txt", &["frameworks.py"]).await
}

/// `ERNIED_TEST_EXAMPLES` raises the number of requests per operation.
#[tokio::test(flavor = "multi_thread")]
async fn schemathesis_finds_no_5xx_and_no_breach_of_our_document() -> Result<()> {
    let Some(venv) = environment("requirements.txt").await? else { return Ok(()) };
    // Few tokens per answer: the requests are what is tested here.
    let daemon = TestDaemon::start(DaemonOptions::default().flags(&["--max-model-len", "256"])).await?;
    let workers = daemon.worker_pids();
    let examples = std::env::var("ERNIED_TEST_EXAMPLES").unwrap_or_else(|_| "8".to_owned());
    // Not that everything the document does not allow is refused: bodies are read as leniently as pydantic reads them.
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                  response_schema_conformance,missing_required_header,unsupported_method,allow_header_conformance";
    let mut schemathesis = Command::new(venv.join("bin/st"));
    schemathesis
        .current_dir(daemon.state.path())
        .args(["--no-color", "run", &format!("{}/openapi.json", daemon.url()), "--seed", "1", "--workers", "1"])
        .args(["--phases", "examples,coverage,fuzzing", "--max-examples", &examples, "--request-timeout", "60"])
        .args(["--suppress-health-check", "all", "--generation-database", "none", "--checks", checks]);
    run(&mut schemathesis).await.with_context(|| format!("daemon log:\n{}", daemon.log_text()))?;
    assert_eq!(daemon.worker_pids(), workers, "no worker was restarted");
    Ok(())
}
