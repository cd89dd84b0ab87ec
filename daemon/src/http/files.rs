//! `/v1/files`: input and output of batches, kept as plain files in the state directory.
//!
//! A file is a folder `files/ID` with `meta.json` and `content`; it is complete when `meta.json` is there, which is written
//! last and renamed into place. Files of one key are never shown to another. Uploads come as `multipart/form-data`.

use super::call::{named_id, unix_now};
use super::error::{ApiError, ErrorKind};
use super::{Api, body};
use crate::keys::Principal;
use axum::extract::{Path as UrlPath, Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::Bytes;
use http::header;
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files of one key; more have to be deleted first.
const FILES_MAX: usize = 1000;

/// The folder of files.
#[derive(Debug, Clone)]
pub struct Files {
    dir: PathBuf,
}

impl Files {
    pub fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("files") }
    }

    fn of(&self, id: &str) -> Result<PathBuf, ApiError> {
        // Ids are ours: nothing else may become a path.
        let ours = id
            .strip_prefix("file-")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric()));
        if ours { Ok(self.dir.join(id)) } else { Err(not_found(id)) }
    }

    /// Keeps a new file; its description.
    pub async fn keep(&self, owner: &str, name: &str, purpose: &str, content: Bytes) -> Result<Value, ApiError> {
        if self.list(owner).await?.len() >= FILES_MAX {
            return Err(ApiError::value("file", format!("this key has {FILES_MAX} files already; delete some first.")));
        }
        let id = named_id("file-");
        let meta = json!({
            "id": id, "object": "file", "bytes": content.len(), "created_at": unix_now(), "filename": name,
            "purpose": purpose, "status": "processed", "owner": owner,
        });
        let (dir, text) = (self.of(&id)?, meta.to_string());
        blocking(move || {
            std::fs::create_dir_all(&dir)?;
            std::fs::write(dir.join("content"), &content)?;
            std::fs::write(dir.join("meta.part"), text)?;
            std::fs::rename(dir.join("meta.part"), dir.join("meta.json"))
        })
        .await?;
        Ok(shown(meta))
    }

    /// The description of a file of this owner.
    pub async fn meta(&self, owner: &str, id: &str) -> Result<Value, ApiError> {
        let path = self.of(id)?.join("meta.json");
        let text = blocking(move || std::fs::read(path)).await.map_err(|_| not_found(id))?;
        let meta: Value = serde_json::from_slice(&text).map_err(|_| not_found(id))?;
        if meta["owner"] == owner { Ok(shown(meta)) } else { Err(not_found(id)) }
    }

    pub async fn content(&self, owner: &str, id: &str) -> Result<Vec<u8>, ApiError> {
        self.meta(owner, id).await?;
        let path = self.of(id)?.join("content");
        blocking(move || std::fs::read(path)).await
    }

    async fn list(&self, owner: &str) -> Result<Vec<Value>, ApiError> {
        let (dir, owner) = (self.dir.clone(), owner.to_owned());
        blocking(move || {
            let mut found = Vec::new();
            let entries = match std::fs::read_dir(dir) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(found),
                Err(e) => return Err(e),
            };
            for entry in entries.flatten() {
                let Ok(text) = std::fs::read(entry.path().join("meta.json")) else { continue };
                let Ok(meta) = serde_json::from_slice::<Value>(&text) else { continue };
                if meta["owner"] == owner {
                    found.push(shown(meta));
                }
            }
            found.sort_by_key(|m| std::cmp::Reverse(m["created_at"].as_u64()));
            Ok(found)
        })
        .await
    }

    async fn remove(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        self.meta(owner, id).await?;
        let dir = self.of(id)?;
        blocking(move || std::fs::remove_dir_all(dir)).await
    }
}

/// Whose a file is stays inside.
fn shown(mut meta: Value) -> Value {
    if let Some(members) = meta.as_object_mut() {
        members.shift_remove("owner");
    }
    meta
}

fn not_found(id: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("No such File object: {id}")).with_param("id")
}

/// Disk work off the event loop.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(ApiError::internal(format!("the state directory can not be used: {e}"))),
        Err(_) => Err(ApiError::internal("work on the state directory broke off")),
    }
}

pub async fn upload(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let files = api.files()?;
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let Some(boundary) = boundary(content_type) else {
        return Err(ApiError::new(ErrorKind::Schema, "files are uploaded as multipart/form-data with a boundary")
            .with_param("Content-Type"));
    };
    let bytes = body::bytes(&api, request).await?;
    let broken = || ApiError::new(ErrorKind::Schema, "the multipart body is broken").with_param("body");
    // Looking for the boundary walks over the whole body.
    let parts = blocking(move || Ok(parts(&bytes, &boundary))).await?.ok_or_else(broken)?;
    let find = |name: &str| parts.iter().find(|p| p.name == name);
    let purpose = find("purpose").and_then(|p| std::str::from_utf8(&p.content).ok()).map(str::trim);
    if purpose != Some("batch") {
        return Err(ApiError::value("purpose", "purpose must be \"batch\"."));
    }
    let file = find("file").ok_or_else(|| ApiError::value("file", "the part `file` is missing."))?;
    let name: String =
        file.file_name.as_deref().unwrap_or("input.jsonl").chars().filter(|c| !c.is_control()).take(200).collect();
    Ok(Json(files.keep(&principal.id, &name, "batch", file.content.clone()).await?))
}

pub async fn list(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
) -> Result<Json<Value>, ApiError> {
    let data = api.files()?.list(&principal.id).await?;
    Ok(Json(json!({"object": "list", "data": data, "has_more": false})))
}

pub async fn describe(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    UrlPath(id): UrlPath<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(api.files()?.meta(&principal.id, &id).await?))
}

pub async fn content(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    UrlPath(id): UrlPath<String>,
) -> Result<Response, ApiError> {
    let bytes = api.files()?.content(&principal.id, &id).await?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response())
}

pub async fn delete(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    UrlPath(id): UrlPath<String>,
) -> Result<Json<Value>, ApiError> {
    api.files()?.remove(&principal.id, &id).await?;
    Ok(Json(json!({"id": id, "object": "file", "deleted": true})))
}

/// One part of a form.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    name: String,
    file_name: Option<String>,
    content: Bytes,
}

fn boundary(content_type: &str) -> Option<String> {
    let (kind, rest) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = rest.split(';').find_map(|p| p.trim().strip_prefix("boundary="))?.trim_matches('"');
    (!value.is_empty() && value.len() <= 70).then(|| value.to_owned())
}

/// The parts of a form. `None`: it is not well formed.
fn parts(body: &Bytes, boundary: &str) -> Option<Vec<Part>> {
    let mark = format!("--{boundary}").into_bytes();
    let mut at = find(body, &mark, 0)? + mark.len();
    let mut parts = Vec::new();
    loop {
        if body[at..].starts_with(b"--") {
            return Some(parts);
        }
        at = find(body, b"\r\n", at)? + 2;
        let head_end = find(body, b"\r\n\r\n", at)?;
        let head = std::str::from_utf8(&body[at..head_end]).ok()?;
        let content_at = head_end + 4;
        let end = find(body, &[b"\r\n".as_slice(), &mark].concat(), content_at)?;
        let disposition = head.split("\r\n").find(|l| l.to_ascii_lowercase().starts_with("content-disposition:"))?;
        let field = |name: &str| {
            disposition
                .split(';')
                .find_map(|p| p.trim().strip_prefix(name)?.strip_prefix('=').map(|v| v.trim_matches('"').to_owned()))
        };
        parts.push(Part { name: field("name")?, file_name: field("filename"), content: body.slice(content_at..end) });
        if parts.len() > 32 {
            return None;
        }
        at = end + 2 + mark.len();
    }
}

fn find(haystack: &[u8], needle: &[u8], from: usize) -> Option<usize> {
    haystack.get(from..)?.windows(needle.len()).position(|w| w == needle).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_taken_apart() {
        let body = "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XX\r\n\
                    Content-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\nContent-Type: application/json\r\n\r\n\
                    {\"a\": 1}\r\n--\n\r\n--XX--\r\n";
        let parts = parts(&Bytes::from(body), "XX").unwrap();
        assert_eq!(parts[0], Part { name: "purpose".into(), file_name: None, content: "batch".into() });
        assert_eq!(parts[1].file_name.as_deref(), Some("a.jsonl"));
        assert_eq!(parts[1].content, "{\"a\": 1}\r\n--\n");
        assert_eq!(boundary("multipart/form-data; boundary=\"XX\"").as_deref(), Some("XX"));
        assert_eq!(boundary("application/json; boundary=XX"), None);
    }

    #[test]
    fn a_form_cut_anywhere_is_broken_and_never_panics() {
        let body = "--X\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nabc\r\n--X--";
        for at in 0..body.len() {
            assert_eq!(parts(&Bytes::copy_from_slice(&body.as_bytes()[..at]), "X"), None, "cut at {at}");
        }
        assert_eq!(parts(&Bytes::from(body), "X").unwrap().len(), 1);
    }

    #[test]
    fn only_our_ids_become_paths() {
        let files = Files::new(Path::new("/state"));
        for id in ["../x", "file-", "file-../../etc", "file-a/b", "x", "file-a\0"] {
            assert!(files.of(id).is_err(), "{id:?}");
        }
        assert!(files.of("file-0123abcd").is_ok());
    }
}
