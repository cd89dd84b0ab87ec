//! Background responses: answered at once with an id, worked on without the client, retrieved or cancelled later.
//!
//! Its events may be followed while it runs (`stream`), by the client that began it and by any that comes later.
//!
//! One that the daemon's end interrupts is run again from the beginning after the next start. Whoever takes a response out of
//! `Running` says how it ended: its own task, or a cancel.

use super::super::call::Caller;
use super::super::chat::{self, Chat};
use super::super::error::{ApiError, ErrorKind};
use super::super::layers::RequestId;
use super::super::sse::{self, StreamForm};
use super::super::{Api, batches};
use super::store::Kept;
use super::tape::Tape;
use super::{Asked, ResponseStream, Shape};
use crate::config::ErrorStyle;
use crate::keys::Principal;
use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use ernie_proto::openai::ChatCompletionRequest;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pause before one that was refused for lack of room is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// Responses under way without a client.
#[derive(Debug, Default)]
pub struct Running {
    /// Held for a look-up only, never across a wait. Bounded by admission.
    by_id: Mutex<HashMap<String, Run>>,
}

#[derive(Debug)]
struct Run {
    token: CancellationToken,
    /// There is one if streaming was asked for.
    tape: Option<Arc<Tape>>,
}

impl Running {
    fn begin(&self, id: &str, tape: Option<Arc<Tape>>) -> CancellationToken {
        let token = CancellationToken::new();
        let run = Run { token: token.clone(), tape };
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned(), run);
        token
    }

    /// The right to say how it ended; only one gets it.
    fn take(&self, id: &str) -> Option<CancellationToken> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner).remove(id).map(|run| run.token)
    }

    fn tape(&self, id: &str) -> Option<Arc<Tape>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner).get(id)?.tape.clone()
    }
}

/// Begins one; its object as it is now, or its events.
pub(super) async fn begin(api: &Arc<Api>, caller: Caller, asked: Asked) -> Result<Response, ApiError> {
    if !asked.store {
        return Err(ApiError::value("store", "a background response is retrieved later, so it has to be stored."));
    }
    let owner = caller.principal.clone();
    // Everything that can be refused is refused here, with a status.
    let chat = chat::begin(api, caller, ChatCompletionRequest::read(asked.chat.clone())?, asked.stream).await?;
    let shape = Shape::new(asked, owner.id.clone(), api.clone());
    let object = shape.object(&chat.form, "queued", None, &[]);
    let kept = Kept {
        owner: owner.id.clone(),
        response: shape.object(&chat.form, "in_progress", None, &[]),
        messages: shape.asked.messages.clone(),
        asked: Some(remembered(&owner, &shape)),
    };
    let tape = shape.asked.stream.then(Tape::new);
    let token = api.running.begin(&shape.id, tape.clone());
    api.keep_response(kept).await;
    match tape {
        None => {
            tokio::spawn(work(api.clone(), chat, shape, token));
            Ok(Json(object).into_response())
        }
        Some(tape) => {
            let events = tape.follow(0, api.settings().keep_alive);
            tokio::spawn(play(api.clone(), chat, shape, token, tape));
            Ok(sse::streamed(events))
        }
    }
}

/// The events of one that runs, from number `from` on. `None`: it has ended, or was not begun as a stream.
pub(super) fn follow(api: &Api, id: &str, from: usize) -> Option<Response> {
    let tape = api.running.tape(id)?;
    Some(sse::streamed(tape.follow(from, api.settings().keep_alive)))
}

/// Runs what an earlier life of the daemon did not end.
pub async fn resume(api: Arc<Api>) {
    let unfinished = match api.responses.unfinished().await {
        Ok(unfinished) => unfinished,
        Err(error) => {
            tracing::warn!(%error, "background responses of before can not be read");
            return;
        }
    };
    for kept in unfinished {
        let Some(asked) = kept.asked.clone() else { continue };
        let id = kept.id().to_owned();
        tracing::info!(response = id, "a background response is begun again");
        let token = api.running.begin(&id, None);
        let owner = batches::principal(&asked["owner"]);
        let shape = Shape {
            id: id.clone(),
            created: kept.response["created_at"].as_u64().unwrap_or(0),
            asked: Asked::remembered(&asked),
            owner: owner.id.clone(),
            api: api.clone(),
        };
        let request_id = RequestId { id: Arc::from(id), arrival: Instant::now(), parent: None };
        let caller = Caller { principal: owner, request_id, deadline: None };
        match again(&api, &caller, &shape.asked).await {
            Ok(chat) => drop(tokio::spawn(work(api.clone(), chat, shape, token))),
            Err(error) => {
                api.running.take(&shape.id);
                api.keep_response(Kept { asked: None, response: failed(kept.response.clone(), &error), ..kept }).await;
            }
        }
    }
}

/// Begins a chat, waiting as long as there is no model or no room for it.
async fn again(api: &Arc<Api>, caller: &Caller, asked: &Asked) -> Result<Chat, ApiError> {
    loop {
        let request = ChatCompletionRequest::read(asked.chat.clone())?;
        match chat::begin(api, caller.clone(), request, false).await {
            Err(error) if error.retry_after.is_some() => tokio::time::sleep(REFUSED_PAUSE).await,
            begun => return begun,
        }
    }
}

/// Ends one that has not ended.
pub async fn cancel(api: &Arc<Api>, owner: &str, id: &str) -> Result<Value, ApiError> {
    let kept = api.responses.get(owner, id).await?;
    if kept.response["background"] != true {
        return Err(ApiError::value("response_id", "Cannot cancel a synchronous response."));
    }
    let Some(token) = api.running.take(id) else { return Ok(kept.response) };
    token.cancel();
    let mut response = kept.response.clone();
    response["status"] = json!("cancelled");
    api.keep_response(Kept { asked: None, response: response.clone(), ..kept }).await;
    Ok(response)
}

/// Removes one that is to be deleted, without a word about its end.
pub fn forget(api: &Api, id: &str) {
    if let Some(token) = api.running.take(id) {
        token.cancel();
    }
}

async fn work(api: Arc<Api>, chat: Chat, shape: Shape, token: CancellationToken) {
    let Chat { mut answers, form, .. } = chat;
    let begun = shape.object(&form, "in_progress", None, &[]);
    let (id, owner, messages) = (shape.id.clone(), shape.owner.clone(), shape.asked.messages.clone());
    // Dropping the answers aborts the work in the engine.
    let ended = tokio::select! {
        () = token.cancelled() => return,
        ended = super::collected(&mut answers, form, &shape) => ended,
    };
    if api.running.take(&id).is_none() {
        return;
    }
    let kept = match ended {
        Ok((object, messages)) => Kept { owner, response: object, messages, asked: None },
        Err(error) => Kept { owner, response: failed(begun, &error), messages, asked: None },
    };
    api.keep_response(kept).await;
}

/// As [`work`], with the events on a tape while they come.
async fn play(api: Arc<Api>, chat: Chat, shape: Shape, token: CancellationToken, tape: Arc<Tape>) {
    let Chat { mut answers, form, .. } = chat;
    let begun = shape.object(&form, "in_progress", None, &[]);
    let (id, owner, messages) = (shape.id.clone(), shape.owner.clone(), shape.asked.messages.clone());
    let mut stream = ResponseStream::new(form, shape);
    let mut written = BytesMut::new();
    stream.open(&mut written);
    loop {
        tape.add(&mut written);
        let event = tokio::select! {
            () = token.cancelled() => break,
            event = answers.next() => event,
        };
        let error = match event {
            Some((index, event)) => match stream.event(index, event, &mut written) {
                Ok(()) => continue,
                Err(error) => Some(error),
            },
            None => None,
        };
        // Whoever cancelled it has said how it ended.
        if api.running.take(&id).is_some() {
            match error {
                None => stream.close(&mut written),
                Some(error) => {
                    stream.error(&error, api.settings().error_style, &mut written);
                    api.keep_response(Kept { owner, response: failed(begun, &error), messages, asked: None }).await;
                }
            }
            tape.add(&mut written);
        }
        break;
    }
    tape.end();
}

fn failed(mut object: Value, error: &ApiError) -> Value {
    object["status"] = json!("failed");
    let code = if error.kind == ErrorKind::RateLimited { "rate_limit_exceeded" } else { "server_error" };
    object["error"] = json!({"code": code, "message": error.body(ErrorStyle::Vllm).error.message});
    object
}

/// What is needed to run it again.
fn remembered(owner: &Principal, shape: &Shape) -> Value {
    let owner = json!({
        "id": &*owner.id, "name": &*owner.name, "cache_salt": owner.cache_salt, "models": owner.models,
    });
    let Asked { chat, messages, repeated, .. } = &shape.asked;
    json!({"owner": owner, "chat": chat, "messages": messages, "repeated": repeated})
}
