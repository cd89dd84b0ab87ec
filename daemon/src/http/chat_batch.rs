//! `/v1/chat/completions/batch`: several conversations in one call, one choice each, answered together.

use super::call::Caller;
use super::chat::{self, Chat};
use super::error::ApiError;
use super::layers::RequestId;
use super::{Api, body};
use crate::keys::Principal;
use axum::extract::{Request, State};
use axum::{Extension, Json};
use ernie_proto::openai::ChatCompletionRequest;
use ernie_proto::openai::fields::{Loc, as_list};
use ernie_proto::openai::response::ChatCompletion;
use futures::future::try_join_all;
use std::sync::Arc;

pub async fn completions(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Json<ChatCompletion>, ApiError> {
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let mut body = body::object(&api, request).await?;
    let loc = Loc::body().member("messages");
    let conversations = as_list(loc, body.shift_remove("messages").unwrap_or_default())?;
    let most = api.settings().limits.prompts_max;
    if conversations.is_empty() || conversations.len() > most {
        let message = format!("messages must be a list of 1 to {most} conversations, got {}.", conversations.len());
        return Err(ApiError::value("messages", message));
    }
    // All are read before the first one starts.
    let mut requests = Vec::with_capacity(conversations.len());
    for conversation in conversations {
        let mut one = body.clone();
        one.insert("messages".into(), conversation);
        let request = ChatCompletionRequest::read(one)?;
        if request.common.stream == Some(true) {
            return Err(ApiError::value("stream", "streaming is not offered for a batch of conversations."));
        }
        if request.common.n.is_some_and(|n| n != 1) {
            return Err(ApiError::value("n", "n must be 1 for a batch of conversations."));
        }
        requests.push(request);
    }
    let mut chats = Vec::with_capacity(requests.len());
    for request in requests {
        chats.push(chat::begin(&api, caller.clone(), request, false).await?);
    }
    let answered =
        chats.into_iter().map(|Chat { mut answers, form, .. }| async move { chat::collect(&mut answers, form).await });
    let mut all = try_join_all(answered).await?.into_iter();
    let mut whole = all.next().ok_or_else(|| ApiError::internal("a batch without an answer"))?;
    for (i, one) in all.enumerate() {
        for mut choice in one.choices {
            choice.index = i as u32 + 1;
            whole.choices.push(choice);
        }
        whole.usage.prompt_tokens += one.usage.prompt_tokens;
        whole.usage.completion_tokens += one.usage.completion_tokens;
        whole.usage.total_tokens += one.usage.total_tokens;
        whole.usage.prompt_tokens_details.cached_tokens += one.usage.prompt_tokens_details.cached_tokens;
    }
    Ok(Json(whole))
}
