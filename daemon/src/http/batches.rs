//! `/v1/batches`: a file of requests worked off in the background, at low priority, across restarts.
//!
//! A batch is a folder `batches/ID` with `batch.json` (what was asked and how far it is), `output.jsonl` and `errors.jsonl`, a
//! line per finished request. One runner works on one batch at a time, a few requests at once, behind all interactive ones.
//! After a restart it goes on with the lines that have no result; a line that was cut off by the restart is run again.

use super::call::{Caller, named_id, unix_now};
use super::chat::{self, Chat};
use super::completions;
use super::error::{ApiError, ErrorKind};
use super::files::{Files, blocking};
use super::layers::RequestId;
use super::{Api, body};
use crate::config::ErrorStyle;
use crate::keys::{Principal, Scope};
use axum::extract::{Path as UrlPath, Request, State};
use axum::{Extension, Json};
use bytes::Bytes;
use ernie_proto::openai::fields::{Fields, Loc};
use ernie_proto::openai::{ChatCompletionRequest, CompletionRequest, json as strict};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Behind everything that a person waits for.
const PRIORITY: i64 = 1_000_000;
/// Requests of a batch under way at the same time.
const AT_ONCE: usize = 8;
/// Lines of one batch, as at OpenAI.
const LINES_MAX: usize = 50_000;
/// Batches that wait or run.
const WAITING_MAX: usize = 100;
/// Pause before a request that was refused for lack of room is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The folder of batches and the bell of its runner.
#[derive(Debug)]
pub struct Batches {
    dir: PathBuf,
    bell: Notify,
}

impl Batches {
    pub fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("batches"), bell: Notify::new() }
    }

    fn of(&self, id: &str) -> Result<PathBuf, ApiError> {
        let ours = id
            .strip_prefix("batch_")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric()));
        if ours { Ok(self.dir.join(id)) } else { Err(not_found(id)) }
    }

    async fn read(&self, id: &str) -> Result<Map<String, Value>, ApiError> {
        let path = self.of(id)?.join("batch.json");
        let text = blocking(move || std::fs::read(path)).await.map_err(|_| not_found(id))?;
        whole(&text).ok_or_else(|| not_found(id))
    }

    async fn read_of(&self, owner: &str, id: &str) -> Result<Map<String, Value>, ApiError> {
        let batch = self.read(id).await?;
        if batch["owner"]["id"] == owner { Ok(batch) } else { Err(not_found(id)) }
    }

    async fn write(&self, id: &str, batch: &Map<String, Value>) -> Result<(), ApiError> {
        let (dir, text) = (self.of(id)?, Value::Object(batch.clone()).to_string());
        blocking(move || {
            std::fs::create_dir_all(&dir)?;
            std::fs::write(dir.join("batch.part"), text)?;
            std::fs::rename(dir.join("batch.part"), dir.join("batch.json"))
        })
        .await
    }

    /// All batches, oldest first.
    async fn all(&self) -> Result<Vec<Map<String, Value>>, ApiError> {
        let dir = self.dir.clone();
        blocking(move || {
            let mut found: Vec<Map<String, Value>> = Vec::new();
            if let Ok(entries) = std::fs::read_dir(dir) {
                let texts = entries.flatten().filter_map(|e| std::fs::read(e.path().join("batch.json")).ok());
                found.extend(texts.filter_map(|t| whole(&t)));
            }
            found.sort_by(|a, b| {
                (a["created_at"].as_u64(), a["id"].as_str()).cmp(&(b["created_at"].as_u64(), b["id"].as_str()))
            });
            Ok(found)
        })
        .await
    }
}

/// A `batch.json` with everything that is read from it; one that somebody edited into something else is none.
fn whole(text: &[u8]) -> Option<Map<String, Value>> {
    let batch: Map<String, Value> = serde_json::from_slice(text).ok()?;
    let members = ["id", "status", "owner", "endpoint", "input_file_id", "created_at"];
    members.iter().all(|m| batch.contains_key(*m)).then_some(batch)
}

fn not_found(id: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("No batch found with id '{id}'.")).with_param("batch_id")
}

/// Whose a batch is stays inside.
fn shown(mut batch: Map<String, Value>) -> Json<Value> {
    batch.shift_remove("owner");
    Json(Value::Object(batch))
}

fn is_open(batch: &Map<String, Value>) -> bool {
    matches!(batch["status"].as_str(), Some("validating" | "in_progress" | "cancelling"))
}

pub async fn create(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (files, batches) = (api.files()?, api.batches()?);
    let mut f = Fields::new(Loc::body(), body::object(&api, request).await?);
    let Some(input) = f.string("input_file_id")? else { return Err(f.missing("input_file_id").into()) };
    let endpoint = f.string("endpoint")?.unwrap_or_default();
    if !matches!(endpoint.as_str(), "/v1/chat/completions" | "/v1/completions") {
        return Err(ApiError::value("endpoint", "endpoint must be /v1/chat/completions or /v1/completions."));
    }
    files.meta(&principal.id, &input).await?;
    if batches.all().await?.iter().filter(|b| is_open(b)).count() >= WAITING_MAX {
        return Err(ApiError::unavailable(format!("{WAITING_MAX} batches are waiting already")));
    }
    let now = unix_now();
    let id = named_id("batch_");
    let owner = json!({
        "id": &*principal.id, "name": &*principal.name, "cache_salt": principal.cache_salt, "models": principal.models,
    });
    let batch = json!({
        "id": id, "object": "batch", "endpoint": endpoint, "errors": null, "input_file_id": input,
        "completion_window": f.string("completion_window")?.unwrap_or_else(|| "24h".to_owned()),
        "status": "validating", "output_file_id": null, "error_file_id": null, "created_at": now,
        "in_progress_at": null, "expires_at": null, "finalizing_at": null, "completed_at": null, "failed_at": null,
        "expired_at": null, "cancelling_at": null, "cancelled_at": null,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": f.value("metadata"), "owner": owner,
    });
    let batch = batch.as_object().cloned().unwrap_or_default();
    batches.write(&id, &batch).await?;
    batches.bell.notify_one();
    Ok(shown(batch))
}

pub async fn list(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
) -> Result<Json<Value>, ApiError> {
    let mut all = api.batches()?.all().await?;
    all.retain(|b| b["owner"]["id"] == *principal.id);
    let data: Vec<Value> = all.into_iter().rev().take(100).map(|b| shown(b).0).collect();
    Ok(Json(json!({"object": "list", "data": data, "has_more": false})))
}

pub async fn describe(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    UrlPath(id): UrlPath<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(shown(api.batches()?.read_of(&principal.id, &id).await?))
}

/// The runner sees it before it takes the next line.
pub async fn cancel(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    UrlPath(id): UrlPath<String>,
) -> Result<Json<Value>, ApiError> {
    let batches = api.batches()?;
    let batch = batches.read_of(&principal.id, &id).await?;
    if !is_open(&batch) {
        return Err(ApiError::value("batch_id", format!("a batch that is {} can not be cancelled.", batch["status"])));
    }
    let dir = batches.of(&id)?;
    blocking(move || std::fs::write(dir.join("cancel"), b"")).await?;
    batches.bell.notify_one();
    let mut batch = batch;
    batch.insert("status".into(), json!("cancelling"));
    batch.insert("cancelling_at".into(), json!(unix_now()));
    Ok(shown(batch))
}

/// Works off batches until the daemon ends. One per daemon.
pub async fn run(api: Arc<Api>) {
    let (Ok(files), Ok(batches)) = (api.files(), api.batches()) else { return };
    loop {
        let next = match batches.all().await {
            Ok(all) => all.into_iter().find(is_open),
            Err(error) => {
                tracing::warn!(%error, "batches can not be read");
                None
            }
        };
        match next {
            None => batches.bell.notified().await,
            Some(batch) => {
                let id = batch["id"].as_str().unwrap_or_default().to_owned();
                if let Err(error) = work(&api, files, batches, batch).await {
                    tracing::warn!(batch = id, %error, "a batch could not go on");
                    fail(batches, &id, &error).await;
                }
            }
        }
    }
}

async fn fail(batches: &Batches, id: &str, error: &ApiError) {
    let Ok(mut batch) = batches.read(id).await else { return };
    batch.insert("status".into(), json!("failed"));
    batch.insert("failed_at".into(), json!(unix_now()));
    batch.insert("errors".into(), json!({"object": "list", "data": [{"code": "failed", "message": error.message}]}));
    if batches.write(id, &batch).await.is_err() {
        // The disk does not take it: do not turn in circles.
        tokio::time::sleep(REFUSED_PAUSE).await;
    }
}

/// One line of the input.
struct Line {
    custom_id: Value,
    body: Result<Map<String, Value>, ApiError>,
}

async fn work(api: &Arc<Api>, files: &Files, batches: &Batches, mut batch: Map<String, Value>) -> Result<(), ApiError> {
    let id = batch["id"].as_str().unwrap_or_default().to_owned();
    let endpoint = batch["endpoint"].as_str().unwrap_or_default().to_owned();
    let owner = principal(&batch["owner"]);
    let dir = batches.of(&id)?;
    let input = files.content(&owner.id, batch["input_file_id"].as_str().unwrap_or_default()).await?;
    let lines = blocking({
        let endpoint = endpoint.clone();
        move || Ok(lines(&input, &endpoint))
    })
    .await??;
    let (output, errors) = (dir.join("output.jsonl"), dir.join("errors.jsonl"));
    let (done, mut failed) = blocking({
        let (output, errors) = (output.clone(), errors.clone());
        move || Ok((whole_lines(&output)?, whole_lines(&errors)?))
    })
    .await?;
    let seen: HashSet<String> = done.iter().chain(&failed).cloned().collect();
    let mut completed = done.len();
    let total = lines.len();
    batch.insert("status".into(), json!("in_progress"));
    batch.insert("in_progress_at".into(), json!(unix_now()));
    batch.insert("request_counts".into(), json!({"total": total, "completed": completed, "failed": failed.len()}));
    batches.write(&id, &batch).await?;

    let open: Vec<Line> = lines.into_iter().filter(|l| !seen.contains(&l.custom_id.to_string())).collect();
    let cancel = dir.join("cancel");
    let (runner, kind, who, stop) = (api.clone(), endpoint.clone(), owner.clone(), cancel.clone());
    let mut results = futures::stream::iter(open)
        .map(move |line| {
            let (api, endpoint, owner, cancel) = (runner.clone(), kind.clone(), who.clone(), stop.clone());
            async move {
                if exists(cancel).await {
                    return None;
                }
                Some(one(&api, &endpoint, &owner, line).await)
            }
        })
        .buffer_unordered(AT_ONCE);
    while let Some(result) = results.next().await {
        let Some((custom_id, ok, text)) = result else { continue };
        let path = if ok { output.clone() } else { errors.clone() };
        blocking(move || {
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
            file.write_all(text.as_bytes())
        })
        .await?;
        if ok {
            completed += 1;
        } else {
            failed.push(custom_id);
        }
        batch.insert("request_counts".into(), json!({"total": total, "completed": completed, "failed": failed.len()}));
        batches.write(&id, &batch).await?;
    }
    drop(results);

    for (path, member) in [(&output, "output_file_id"), (&errors, "error_file_id")] {
        let path = path.clone();
        let content = blocking(move || match std::fs::read(path) {
            Ok(content) => Ok(Some(content)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        })
        .await?;
        if let Some(content) = content {
            let name = format!("{id}_{}.jsonl", member.trim_end_matches("_file_id"));
            let kept = files.keep(&owner.id, &name, "batch_output", Bytes::from(content)).await?;
            batch.insert(member.into(), kept["id"].clone());
        }
    }
    let cancelled = exists(cancel).await;
    let (status, at) = if cancelled { ("cancelled", "cancelled_at") } else { ("completed", "completed_at") };
    batch.insert("status".into(), json!(status));
    batch.insert(at.into(), json!(unix_now()));
    batches.write(&id, &batch).await?;
    tracing::info!(batch = id, completed, failed = failed.len(), total, "batch {status}");
    Ok(())
}

async fn exists(path: PathBuf) -> bool {
    blocking(move || path.try_exists()).await.unwrap_or(false)
}

/// The lines of the input file; a broken line is a failed request, not a failed batch.
fn lines(input: &[u8], endpoint: &str) -> Result<Vec<Line>, ApiError> {
    let mut lines = Vec::new();
    let mut ids = HashSet::new();
    for (number, text) in input.split(|b| *b == b'\n').enumerate() {
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if lines.len() == LINES_MAX {
            return Err(ApiError::value("input_file_id", format!("a batch has at most {LINES_MAX} lines.")));
        }
        let refused = |message: String| Err(ApiError::value(&format!("line {}", number + 1), message));
        let fallback = json!(format!("line-{}", number + 1));
        let line = match strict::parse_object(text) {
            Err(e) => Line { custom_id: fallback, body: Err(e.into()) },
            Ok(mut members) => {
                let custom_id = members.get("custom_id").filter(|c| c.is_string()).cloned().unwrap_or(fallback);
                let url = members.get("url").and_then(Value::as_str).unwrap_or(endpoint).to_owned();
                let body = match members.shift_remove("body") {
                    _ if url != endpoint => refused(format!("url is {url}, the batch is for {endpoint}")),
                    Some(Value::Object(body)) => Ok(body),
                    _ => refused("body must be an object".to_owned()),
                };
                Line { custom_id, body }
            }
        };
        if !ids.insert(line.custom_id.to_string()) {
            return Err(ApiError::value("input_file_id", format!("custom_id {} comes twice.", line.custom_id)));
        }
        lines.push(line);
    }
    if lines.is_empty() {
        return Err(ApiError::value("input_file_id", "the file has no lines."));
    }
    Ok(lines)
}

/// Custom ids of the results in a file; a last line that was cut off is removed.
fn whole_lines(path: &Path) -> std::io::Result<Vec<String>> {
    let content = match std::fs::read(path) {
        Ok(content) => content,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let whole = content.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    if whole < content.len() {
        std::fs::OpenOptions::new().write(true).open(path)?.set_len(whole as u64)?;
    }
    let values = content[..whole].split(|b| *b == b'\n').filter_map(|l| serde_json::from_slice::<Value>(l).ok());
    Ok(values.map(|v| v["custom_id"].to_string()).collect())
}

/// Runs one line: its custom id, whether it was answered, and the line of its result.
async fn one(api: &Arc<Api>, endpoint: &str, owner: &Principal, line: Line) -> (String, bool, String) {
    let request_id = named_id("batch-");
    let answered = match line.body {
        Err(e) => Err(e),
        Ok(body) => loop {
            match answer(api, endpoint, owner, &request_id, body.clone()).await {
                // No room, a restart under way, a limit of the key: a batch has time.
                Err(e) if e.retry_after.is_some() => tokio::time::sleep(REFUSED_PAUSE).await,
                other => break other,
            }
        },
    };
    let (ok, status, body) = match answered {
        Ok(body) => (true, 200, body),
        Err(e) => (false, e.status().as_u16(), json!(e.body(ErrorStyle::Vllm))),
    };
    let result = json!({
        "id": named_id("batch_req_"), "custom_id": line.custom_id, "error": null,
        "response": {"status_code": status, "request_id": request_id, "body": body},
    });
    (line.custom_id.to_string(), ok, format!("{result}\n"))
}

async fn answer(
    api: &Arc<Api>,
    endpoint: &str,
    owner: &Principal,
    request_id: &str,
    mut body: Map<String, Value>,
) -> Result<Value, ApiError> {
    body.insert("priority".into(), json!(PRIORITY));
    body.insert("stream".into(), Value::Null);
    body.insert("stream_options".into(), Value::Null);
    let request_id = RequestId { id: Arc::from(request_id), arrival: Instant::now(), parent: None };
    let caller = Caller { principal: owner.clone(), request_id, deadline: None };
    let whole = if endpoint == "/v1/chat/completions" {
        let request = ChatCompletionRequest::read(body)?;
        let Chat { mut answers, form, .. } = chat::begin(api, caller, request, false).await?;
        serde_json::to_value(chat::collect(&mut answers, form).await?)
    } else {
        let request = CompletionRequest::read(body)?;
        let (mut answers, form) = completions::begin(api, caller, request, false).await?;
        serde_json::to_value(completions::collect(&mut answers, form).await?)
    };
    whole.map_err(|e| ApiError::internal(e.to_string()))
}

/// Whose batch it is, as it was kept.
pub(super) fn principal(owner: &Value) -> Principal {
    let text = |name: &str| Arc::from(owner[name].as_str().unwrap_or("anonymous"));
    let models = owner["models"].as_array();
    Principal {
        id: text("id"),
        name: text("name"),
        cache_salt: owner["cache_salt"].as_u64().unwrap_or(0),
        models: models.map(|m| m.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect()),
        scope: Scope::Inference,
    }
}
