//! What every generating endpoint does in the same way: who, which model, permit, deadline, prompt ids, fleet.

use super::Api;
use super::error::{ApiError, ErrorKind};
use super::layers::{RequestId, fresh_id};
use super::validate::{Checked, ModelFacts};
use crate::generate::{self, Admitted, Answer, AnswerEvent, GenerateRequest};
use crate::keys::Principal;
use crate::supervisor::Deployment;
use crate::telemetry::metrics::Rejection;
use crate::text::reasoning::ReasoningSplitter;
use crate::text::{TextError, TextModel};
use http::HeaderMap;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// How long a stream waits for its first event before its headers go out: a failure within it still has a proper status.
const FIRST_EVENT_PATIENCE: Duration = Duration::from_millis(300);

/// Longest deadline that a client may set.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Who asks, since when, until when.
#[derive(Debug, Clone)]
pub struct Caller {
    pub principal: Principal,
    pub request_id: RequestId,
    pub deadline: Option<Instant>,
}

impl Caller {
    /// `X-Request-Timeout: SECONDS` sets the deadline, within the server's own.
    pub fn new(api: &Api, principal: Principal, request_id: RequestId, headers: &HeaderMap) -> Result<Self, ApiError> {
        let asked = match headers.get("x-request-timeout") {
            None => None,
            Some(value) => {
                let seconds = value.to_str().ok().and_then(|v| v.trim().parse::<f64>().ok());
                match seconds.filter(|s| s.is_finite() && *s > 0.0) {
                    Some(s) => Some(Duration::from_secs_f64(s.min(DEADLINE_MAX.as_secs_f64()))),
                    None => {
                        let message = "X-Request-Timeout must be a positive number of seconds";
                        return Err(ApiError::value("X-Request-Timeout", message));
                    }
                }
            }
        };
        let limit = match (asked, api.settings().request_timeout) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let deadline = limit.map(|l| request_id.arrival + l);
        Ok(Self { principal, request_id, deadline })
    }
}

/// Names of one answer.
#[derive(Debug, Clone)]
pub struct CallIdentity {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
}

impl CallIdentity {
    pub fn new(prefix: &str, caller: &Caller, deployment: &Deployment, given: Option<&str>) -> Self {
        let usable = |id: &&str| !id.is_empty() && id.len() <= 128 && id.bytes().all(|b| b.is_ascii_graphic());
        let id = given.filter(usable).unwrap_or(&caller.request_id.id);
        let revision: String = deployment.revision.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
        Self {
            id: format!("{prefix}-{id}"),
            created: unix_now(),
            model: deployment.name().to_owned(),
            fingerprint: format!("ernied-{}-{revision}", env!("CARGO_PKG_VERSION")),
        }
    }
}

/// Whole seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A fresh id with a prefix, `call_0123456789abcdef`.
pub fn named_id(prefix: &str) -> String {
    format!("{prefix}{}", fresh_id())
}

pub fn facts(deployment: &Deployment) -> ModelFacts<'_> {
    ModelFacts {
        vocab_size: deployment.loaded.vocab_size,
        max_model_len: deployment.loaded.max_model_len,
        eos_token_ids: deployment.text.eos_token_ids(),
        defaults: deployment.text.generation_defaults(),
    }
}

impl Api {
    /// Room for so many choices, and one request of the key, before anything costly.
    pub fn admit(&self, caller: &Caller, choices: usize) -> Result<Arc<Admitted>, ApiError> {
        let permit = self.admission.admit(choices.max(1)).map_err(|refusal| {
            self.metrics.rejected(Rejection::QueuedRequests);
            ApiError::from(refusal)
        })?;
        let key = self.keys.admit(&caller.principal).map_err(|refusal| {
            self.metrics.key_refused("limit");
            ApiError::from(refusal)
        })?;
        Ok(Arc::new(Admitted { permit, key, keys: self.keys.clone(), principal: caller.principal.clone() }))
    }

    /// The deployment for a request, by the name it asks for.
    pub async fn deployment(&self, caller: &Caller, model: Option<&str>) -> Result<Arc<Deployment>, ApiError> {
        let key = Some(&*caller.principal.id);
        let deployment = match self.fleet.pick(key) {
            Some(deployment) => deployment,
            None => self.fleet.pick_or_wait(key, self.settings().model_patience).await?,
        };
        if let Some(model) = model
            && !deployment.served_names.iter().any(|n| n == model)
        {
            return Err(ApiError::model_not_found(model, &deployment.served_names));
        }
        if let Some(allowed) = &caller.principal.models
            && !deployment.served_names.iter().any(|n| allowed.contains(n))
        {
            self.metrics.key_refused("model");
            let message = format!("this API key may not use the model `{}`", deployment.name());
            return Err(ApiError::new(ErrorKind::Forbidden, message).with_param("model"));
        }
        Ok(deployment)
    }

    /// Members that nobody knows: named in the log, or refused.
    pub fn unknown_members(&self, unknown: &[String]) -> Result<(), ApiError> {
        let Some(first) = unknown.first() else { return Ok(()) };
        if self.settings().strict_requests {
            return Err(ApiError::value(first, format!("the field `{first}` is not known (--strict-requests)")));
        }
        let shown: Vec<String> = unknown.iter().take(8).map(|n| n.chars().take(64).collect()).collect();
        tracing::debug!(fields = shown.join(","), "request fields without effect");
        Ok(())
    }

    /// Runs work on text off the event loop.
    pub async fn text<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        match self.texts.run(work).await {
            Some(result) => result,
            None => Err(ApiError::internal("the text of this request could not be worked on")),
        }
    }

    /// Hands one prompt to the fleet.
    pub async fn generate(
        &self,
        caller: &Caller,
        deployment: &Arc<Deployment>,
        checked: &Checked,
        work: PromptWork,
        admitted: &Arc<Admitted>,
    ) -> Result<Answer, ApiError> {
        if let Err(refusal) = admitted.permit.wait_with(work.prompt.len() as u64) {
            self.metrics.rejected(Rejection::QueuedTokens);
            return Err(refusal.into());
        }
        let most = work.prompt.len() as u64 + u64::from(work.max_tokens) * u64::from(checked.choices);
        admitted.key.take_tokens(most).map_err(|refusal| {
            self.metrics.key_refused("limit");
            ApiError::from(refusal)
        })?;
        let mut sampling = checked.sampling.clone();
        sampling.max_tokens = work.max_tokens;
        sampling.bad_words = work.bad_words;
        // Prompts of one call draw different numbers.
        sampling.seed = sampling.seed.wrapping_add(work.index as u64);
        let request = GenerateRequest {
            deployment: deployment.clone(),
            prompt: Arc::new(work.prompt),
            choices: checked.choices,
            sampling,
            stops: checked.stops.clone(),
            include_stop: checked.include_stop,
            skip_special_tokens: checked.skip_special_tokens,
            reasoning: work.reasoning,
            priority: checked.priority,
            cache_salt: salt(&caller.principal, checked.cache_salt.as_deref()),
            owner: caller.principal.cache_salt,
            arrival: caller.request_id.arrival,
            deadline: caller.deadline,
            request_id: caller.request_id.id.clone(),
            operation: work.operation,
            parent: caller.request_id.parent.clone(),
            log: self.settings().log_requests,
            slow: self.settings().slow_request,
        };
        Ok(generate::generate(&self.fleet, &self.metrics, &self.observers, request, admitted.clone()).await?)
    }
}

/// One prompt, ready for the fleet.
#[derive(Debug, Clone)]
pub struct PromptWork {
    /// For traces: `chat` or `text_completion`.
    pub operation: &'static str,
    pub index: usize,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub bad_words: Vec<Vec<u32>>,
    pub reasoning: Option<ReasoningSplitter>,
}

/// The key's salt, told apart further by the request's own.
fn salt(principal: &Principal, own: Option<&str>) -> u64 {
    let Some(own) = own else { return principal.cache_salt };
    let mut hash = Sha256::new();
    hash.update(b"ernied request salt");
    hash.update(principal.cache_salt.to_le_bytes());
    hash.update(own.as_bytes());
    let mut salt = [0u8; 8];
    salt.copy_from_slice(&hash.finalize()[..8]);
    u64::from_le_bytes(salt)
}

/// Token sequences of words that must not come: as they stand, and with a space in front, as they are inside of a text.
pub fn bad_words(text: &TextModel, words: &[String]) -> Result<Vec<Vec<u32>>, TextError> {
    let mut sequences = Vec::new();
    for word in words {
        let word = word.trim_start();
        for form in [word.to_owned(), format!(" {word}")] {
            let ids = text.encode(&form, false)?;
            if !ids.is_empty() && !sequences.contains(&ids) {
                sequences.push(ids);
            }
        }
    }
    Ok(sequences)
}

/// Waits a moment for the first event, so that what fails at once fails with a status.
pub async fn first_event(answers: &mut super::assemble::Answers) -> Result<Option<(usize, AnswerEvent)>, ApiError> {
    match tokio::time::timeout(FIRST_EVENT_PATIENCE, answers.next()).await {
        Ok(Some((_, AnswerEvent::Failed(failure)))) => Err(failure.into()),
        Ok(first) => Ok(first),
        Err(_) => Ok(None),
    }
}
