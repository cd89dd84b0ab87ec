//! Swapping models on the real binary: restarts in between, and candidates with every kind of fault, made from outside.

use anyhow::{Context, Result, ensure};
use ernied_tests::daemon::send_signal;
use ernied_tests::models::{copy, poke, revision, seal, tensor, text};
use ernied_tests::{DaemonOptions, TestDaemon};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

async fn status(daemon: &TestDaemon) -> Result<Value> {
    let (code, out, errors) = daemon.ctl(&["status", "--json"]).await?;
    ensure!(code == 0, "{errors}");
    Ok(serde_json::from_str(&out)?)
}

async fn served(daemon: &TestDaemon) -> Result<String> {
    Ok(status(daemon).await?["model"]["dir"].as_str().unwrap_or_default().to_owned())
}

/// Waits until the status is as wanted.
async fn status_where(daemon: &TestDaemon, is: impl Fn(&Value) -> bool) -> Result<Value> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let now = status(daemon).await?;
        if is(&now) {
            return Ok(now);
        }
        ensure!(tokio::time::Instant::now() < deadline, "it does not come: {now:#}\n{}", daemon.log_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn fingerprint(daemon: &TestDaemon) -> Result<String> {
    let body = json!({"prompt": "User: Hello\nAssistant: ", "max_tokens": 8});
    let answer = daemon.client().post("/v1/completions", &body).await?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(answer.json()?["system_fingerprint"].as_str().context("a fingerprint")?.to_owned())
}

async fn swap(daemon: &TestDaemon, dir: &Path, more: &[&str]) -> Result<(i32, String)> {
    let dir = text(dir);
    let (code, out, errors) = daemon.ctl(&[&["swap", &dir], more].concat()).await?;
    Ok((code, out + &errors))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_comes_back_with_what_was_swapped_in_and_can_still_go_back() -> Result<()> {
    let models = tempfile::tempdir()?;
    let (one, two) = (revision(models.path(), "r1").await?, revision(models.path(), "r2").await?);
    let options = DaemonOptions { model: Some(one.clone()), ..DaemonOptions::default() };
    let mut daemon = TestDaemon::start(options.flags(&["--served-model-name", "ernie"])).await?;
    let first = fingerprint(&daemon).await?;

    let (code, out) = swap(&daemon, &two, &["--observe", "0"]).await?;
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("cut-over took") && out.contains("0 were lost"), "{out}");
    let second = fingerprint(&daemon).await?;
    assert_ne!(first, second);
    daemon.restart().await?;
    assert_eq!((served(&daemon).await?, fingerprint(&daemon).await?), (text(&two), second.clone()));
    let (_, people, _) = daemon.ctl(&["status"]).await?;
    assert!(people.contains(&format!("the configuration names {}", one.display())), "{people}");

    // Killed while the next one is observed: it has not proven itself.
    let (code, _, errors) = daemon.ctl(&["swap", &text(&one), "--observe", "10m", "--no-wait"]).await?;
    assert_eq!(code, 0, "{errors}");
    status_where(&daemon, |s| s["rollout"]["phase"] == "soaking").await?;
    daemon.restart().await?;
    assert_eq!(served(&daemon).await?, text(&two));

    let (code, out, errors) = daemon.ctl(&["rollback"]).await?;
    assert_eq!(code, 0, "{out}{errors}");
    assert_eq!((served(&daemon).await?, fingerprint(&daemon).await?), (text(&one), first));
    daemon.restart().await?;
    assert_eq!(served(&daemon).await?, text(&one));

    // The revision that served last is damaged while nobody looks: the one before it serves.
    daemon.ctl(&["rollback"]).await?;
    assert_eq!(served(&daemon).await?, text(&two));
    poke(&two.join("model.safetensors"), |bytes| bytes[5_000_000] ^= 1)?;
    daemon.restart().await?;
    assert_eq!(served(&daemon).await?, text(&one));
    assert!(daemon.log_text().contains("sha256"), "{}", daemon.log_text());

    // The configuration names another model: it wins.
    let three = revision(models.path(), "r3").await?;
    daemon.options_mut().model = Some(three.clone());
    daemon.restart().await?;
    assert_eq!(served(&daemon).await?, text(&three));
    Ok(())
}

/// Prompts that keep a candidate in its probes long enough to be struck there.
fn many_questions(dir: &Path) -> Result<()> {
    let prompts: Vec<_> =
        (0..40).map(|i| json!({"prompt": format!("User: question {i}\nAssistant: "), "max_tokens": 256})).collect();
    Ok(fs::write(dir.join("smoke.json"), json!({ "prompts": prompts }).to_string())?)
}

/// Pid of the candidate's worker once it is ready; it is being probed then.
async fn candidate_pid(daemon: &TestDaemon) -> Result<i32> {
    let of = |s: &Value| {
        let candidate = s["rollout"]["candidate"].as_str()?.to_owned();
        let worker = s["workers"].as_array()?.iter().find(|w| w["deployment"] == *candidate)?;
        (worker["state"] == "ready").then(|| worker["pid"].as_i64()).flatten()
    };
    let status = status_where(daemon, |s| of(s).is_some()).await?;
    i32::try_from(of(&status).context("a pid")?).context("a pid")
}

/// What has to be true after a rollout that failed.
async fn refused(daemon: &TestDaemon, before: &str, code: i32, out: &str, phase: &str, reason: &str) -> Result<()> {
    assert_eq!(code, 1, "{out}");
    assert!(out.contains(&format!("({phase})")) && out.contains(reason), "{phase}, {reason:?} not in:\n{out}");
    assert!(out.contains("serves on") && out.contains("to do: "), "{out}");
    let now = status_where(daemon, |s| s["deployments"].as_array().is_some_and(|d| d.len() == 1)).await?;
    assert_eq!((&now["ready"], &now["rollout"]["phase"]), (&json!(true), &json!("steady")));
    assert!(now["rollout"]["outcome"]["reason"].as_str().is_some_and(|r| r.contains(reason)), "{now:#}");
    assert_eq!(fingerprint(daemon).await?, before);
    let (_, rows, _) = daemon.ctl(&["audit", "list", "--act", "rollout", "--json"]).await?;
    let rows: Value = serde_json::from_str(&rows)?;
    let rows = rows["rows"].as_array().context("rows")?;
    let told = rows.iter().any(|row| {
        row["act"] == "rollout.rolled_back" && row["detail"]["reason"].as_str().is_some_and(|r| r.contains(reason))
    });
    assert!(told, "no audit row says {reason:?}: {rows:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_model_is_refused_and_the_old_one_serves_on() -> Result<()> {
    let models = tempfile::tempdir()?;
    let daemon = TestDaemon::demo().await?;
    let before = fingerprint(&daemon).await?;
    let worker = daemon.worker_pids();

    let flipped = revision(models.path(), "flipped").await?;
    poke(&flipped.join("model.safetensors"), |bytes| bytes[4_000_000] ^= 1)?;
    let (code, out) = swap(&daemon, &flipped, &[]).await?;
    refused(&daemon, &before, code, &out, "loading", "sha256").await?;

    let cut = revision(models.path(), "cut").await?;
    poke(&cut.join("model.safetensors"), |bytes| bytes.truncate(bytes.len() - 1000))?;
    let (code, out) = swap(&daemon, &cut, &[]).await?;
    refused(&daemon, &before, code, &out, "loading", "cut off").await?;

    let exchanged = revision(models.path(), "exchanged-tokenizer").await?;
    poke(&exchanged.join("tokenizer.json"), |bytes| bytes.push(b'\n'))?;
    let (code, out) = swap(&daemon, &exchanged, &[]).await?;
    refused(&daemon, &before, code, &out, "verifying", "tokenizer.json: it has sha256").await?;

    // Sealed, but another model's: a token that the weights have no row for.
    let other = copy(models.path(), "other-tokenizer")?;
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(other.join("tokenizer.json"))?)?;
    let added = json!({"id": 100_000, "content": "<odd>", "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true});
    tokenizer["added_tokens"].as_array_mut().context("added tokens")?.push(added);
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().context("a vocabulary")?;
    vocabulary.insert("<odd>".to_owned(), json!(100_000));
    fs::write(other.join("tokenizer.json"), tokenizer.to_string())?;
    seal(&other).await?;
    let (code, out) = swap(&daemon, &other, &[]).await?;
    refused(&daemon, &before, code, &out, "verifying", "seems to be another model's").await?;

    let unlisted = revision(models.path(), "unlisted").await?;
    let sums = fs::read_to_string(unlisted.join("SHA256SUMS"))?;
    let kept: String = sums.lines().filter(|l| !l.ends_with("tokenizer.json")).map(|l| format!("{l}\n")).collect();
    fs::write(unlisted.join("SHA256SUMS"), kept)?;
    let (code, out) = swap(&daemon, &unlisted, &[]).await?;
    refused(&daemon, &before, code, &out, "verifying", "does not list it").await?;

    let unsealed = copy(models.path(), "unsealed")?;
    let (code, out) = swap(&daemon, &unsealed, &[]).await?;
    refused(&daemon, &before, code, &out, "verifying", "has no SHA256SUMS").await?;
    assert!(out.contains("ernie-ctl model seal"), "{out}");

    let nan = copy(models.path(), "nan")?;
    let norm = tensor(&nan, "model.norm.weight")?;
    poke(&nan.join("model.safetensors"), |bytes| {
        bytes[norm].chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&0x7fc0u16.to_le_bytes()));
    })?;
    seal(&nan).await?;
    let (code, out) = swap(&daemon, &nan, &[]).await?;
    refused(&daemon, &before, code, &out, "probing", "not finite").await?;

    assert_eq!(daemon.worker_pids(), worker, "the old one's worker was touched");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_crashes_or_crawls_is_rolled_back() -> Result<()> {
    let models = tempfile::tempdir()?;
    let daemon = TestDaemon::demo().await?;
    let before = fingerprint(&daemon).await?;
    let busy = copy(models.path(), "busy")?;
    many_questions(&busy)?;
    seal(&busy).await?;

    let dies = async {
        let pid = candidate_pid(&daemon).await?;
        send_signal(pid, Signal::KILL)
    };
    let (swapped, struck) = tokio::join!(swap(&daemon, &busy, &[]), dies);
    struck?;
    let (code, out) = swapped?;
    refused(&daemon, &before, code, &out, "probing", "one of its workers was lost").await?;

    // Stopped nine tenths of the time: alive, and far slower than the one that serves.
    let crawl = async {
        let pid = candidate_pid(&daemon).await?;
        while send_signal(pid, Signal::STOP).is_ok() {
            tokio::time::sleep(Duration::from_millis(90)).await;
            if send_signal(pid, Signal::CONT).is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::Ok(())
    };
    let slow = copy(models.path(), "slow")?;
    fs::write(
        slow.join("smoke.json"),
        json!({"prompts": [{"prompt": "User: Hello\nAssistant: ", "max_tokens": 512}]}).to_string(),
    )?;
    seal(&slow).await?;
    let (swapped, crawled) = tokio::join!(swap(&daemon, &slow, &[]), crawl);
    crawled?;
    let (code, out) = swapped?;
    refused(&daemon, &before, code, &out, "probing", "times as long per token").await?;

    // It passes its probes, takes over, and dies then.
    let late = revision(models.path(), "late").await?;
    let dies_late = async {
        let pid = candidate_pid(&daemon).await?;
        status_where(&daemon, |s| s["rollout"]["phase"] == "soaking").await?;
        send_signal(pid, Signal::KILL)
    };
    let (swapped, struck) = tokio::join!(swap(&daemon, &late, &["--observe", "60s"]), dies_late);
    struck?;
    let (code, out) = swapped?;
    refused(&daemon, &before, code, &out, "soaking", "one of its workers was lost").await
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_first_and_canary_show_in_the_status_and_end_well() -> Result<()> {
    let models = tempfile::tempdir()?;
    let daemon = TestDaemon::demo().await?;
    let (two, three) = (revision(models.path(), "r2").await?, revision(models.path(), "r3").await?);
    let (code, out) = swap(&daemon, &two, &["--strategy", "stop-first", "--observe", "0"]).await?;
    assert_eq!(code, 0, "{out}");
    assert_eq!(served(&daemon).await?, text(&two));
    let (code, _, errors) =
        daemon.ctl(&["swap", &text(&three), "--canary", "25%", "--observe", "3s", "--no-wait"]).await?;
    assert_eq!(code, 0, "{errors}");
    let soaking = status_where(&daemon, |s| s["rollout"]["phase"] == "soaking").await?;
    assert_eq!(soaking["rollout"]["canary_percent"], 25.0);
    assert!(soaking["deployments"].as_array().is_some_and(|d| d.iter().any(|d| d["role"] == "canary")), "{soaking:#}");
    status_where(&daemon, |s| s["rollout"]["outcome"]["result"] == "completed" && s["model"]["dir"] == *text(&three))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_models_are_kept_and_swapped_to() -> Result<()> {
    let models = tempfile::tempdir()?;
    let two = revision(models.path(), "r2").await?;
    let mut daemon = TestDaemon::demo().await?;
    let (code, out, errors) = daemon.ctl(&["model", "add", &text(&two)]).await?;
    assert_eq!(code, 0, "{out}{errors}");
    assert!(out.contains("ernie-ctl swap r2"), "{out}");
    daemon.restart().await?;
    let (code, out, errors) = daemon.ctl(&["swap", "r2", "--observe", "0"]).await?;
    assert_eq!(code, 0, "{out}{errors}");
    let (_, list, _) = daemon.ctl(&["model", "list"]).await?;
    let row = list.lines().find(|l| l.contains("r2")).context("a row")?;
    assert!(row.contains("serving") && row.contains("sealed") && list.contains("previous"), "{list}");
    let (code, _, errors) = daemon.ctl(&["model", "remove", "r2"]).await?;
    assert!(code == 1 && errors.contains("is the serving model"), "{errors}");
    daemon.ctl(&["rollback"]).await?;
    let (code, _, errors) = daemon.ctl(&["model", "remove", "r2"]).await?;
    assert!(code == 1 && errors.contains("swap to another one first"), "{errors}");
    let (code, _, errors) = daemon.ctl(&["swap", "r9"]).await?;
    assert!(code == 1 && errors.contains("no model is called r9"), "{errors}");
    let broken = copy(models.path(), "unsealed")?;
    let (code, _, errors) = daemon.ctl(&["model", "add", &text(&broken)]).await?;
    assert!(code == 1 && errors.contains("model seal"), "{errors}");
    Ok(())
}
