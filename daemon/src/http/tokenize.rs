//! `/tokenize` and `/detokenize`.

use super::call::{Caller, facts};
use super::conversation::conversation;
use super::error::ApiError;
use super::layers::RequestId;
use super::tools::{self, ToolPlan};
use super::{Api, body};
use crate::keys::Principal;
use crate::supervisor::Deployment;
use crate::text::TextError;
use crate::text::chat_template::Conversation;
use axum::extract::{Request, State};
use axum::{Extension, Json};
use ernie_proto::openai::response::{DetokenizeResponse, TokenizeResponse};
use ernie_proto::openai::{ChatCompletionRequest, DetokenizeRequest, TokenizeInput, TokenizeRequest};
use std::sync::Arc;

pub async fn tokenize(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let request = TokenizeRequest::read(body::object(&api, request).await?)?;
    // The same bound as for generating: it is the same work on text.
    let _admitted = api.admit(&caller, 1)?;
    let deployment = api.deployment(&caller, request.model.as_deref()).await?;
    let max_model_len = facts(&deployment).max_model_len;
    let input = match request.input {
        TokenizeInput::Text(text) => Input::Text(text),
        TokenizeInput::Chat(chat) => Input::Chat(placed(&api, &deployment, &chat)?),
    };
    let (add_special, strs) = (request.add_special_tokens, request.return_token_strs);
    let text = deployment.text.clone();
    let (tokens, token_strs) = api
        .text(move || {
            let tokens = match input {
                Input::Text(prompt) => text.encode(&prompt, add_special.unwrap_or(true))?,
                Input::Chat(c) => text.encode_rendered(&text.render(&c)?, add_special.unwrap_or(false))?,
            };
            let piece = |id: &u32| text.tokenizer().piece(*id).unwrap_or_default();
            let token_strs = strs.then(|| tokens.iter().map(piece).collect());
            Ok((tokens, token_strs))
        })
        .await?;
    Ok(Json(TokenizeResponse { count: tokens.len(), max_model_len, tokens, token_strs }))
}

/// The conversation of a chat, tools in their place.
fn placed(api: &Api, deployment: &Deployment, chat: &ChatCompletionRequest) -> Result<Conversation, ApiError> {
    let settings = api.settings();
    let template = deployment.text.template().ok_or(TextError::NoChatTemplate)?;
    let mut conversation = conversation(chat, template, deployment.name(), settings.system_policy, &settings.limits)?;
    if let Some(tools) = ToolPlan::of(chat, &settings.limits)? {
        tools.place(&mut conversation, template);
    }
    tools::flatten(&mut conversation, template);
    Ok(conversation)
}

/// The prompt that a chat request would make.
pub async fn chat_tokens(api: &Api, caller: &Caller, chat: ChatCompletionRequest) -> Result<Vec<u32>, ApiError> {
    let _admitted = api.admit(caller, 1)?;
    let deployment = api.deployment(caller, chat.common.model.as_deref()).await?;
    let conversation = placed(api, &deployment, &chat)?;
    let text = deployment.text.clone();
    api.text(move || Ok(text.encode_rendered(&text.render(&conversation)?, false)?)).await
}

enum Input {
    Text(String),
    Chat(Conversation),
}

pub async fn detokenize(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let request = DetokenizeRequest::read(body::object(&api, request).await?)?;
    let deployment = api.deployment(&caller, request.model.as_deref()).await?;
    // Ids past the vocabulary decode to nothing, as in vLLM.
    let ids: Vec<u32> = request.tokens.iter().map(|&id| u32::try_from(id).unwrap_or(u32::MAX)).collect();
    Ok(Json(DetokenizeResponse { prompt: deployment.text.decode(&ids, false) }))
}
