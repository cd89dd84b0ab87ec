//! Around every exchange: request id, preflight, key, panic, error form, count.

use super::error::{ApiError, ErrorKind};
use super::{Api, auth};
use crate::keys::{Budget, Principal};
use crate::telemetry::traces::TraceParent;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::time::Instant;

/// Longest request id that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Id of an exchange: the client's `X-Request-Id` or a fresh one.
#[derive(Debug, Clone)]
pub struct RequestId {
    pub id: Arc<str>,
    /// When the request came in.
    pub arrival: Instant,
    /// The caller's span, from `traceparent`.
    pub parent: Option<TraceParent>,
}

impl RequestId {
    fn of(headers: &HeaderMap) -> Self {
        let given = headers.get("x-request-id").and_then(|v| v.to_str().ok());
        let usable =
            |id: &&str| !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX && id.bytes().all(|b| b.is_ascii_graphic());
        let id = given.filter(usable).map_or_else(|| Arc::from(fresh_id()), Arc::from);
        let parent = headers.get("traceparent").and_then(|v| v.to_str().ok()).and_then(TraceParent::parse);
        Self { id, arrival: Instant::now(), parent }
    }
}

/// Sixteen hexadecimal digits.
pub fn fresh_id() -> String {
    format!("{:016x}", rand::random::<u64>())
}

/// The outermost layer.
pub async fn finish(State(api): State<Arc<Api>>, mut request: Request, next: Next) -> Response {
    let request_id = RequestId::of(request.headers());
    let method = request.method().clone();
    let matched = request.extensions().get::<MatchedPath>().map(|m| m.as_str().to_owned());
    request.extensions_mut().insert(request_id.clone());

    let inner = AssertUnwindSafe(guarded(&api, request, next)).catch_unwind().await;
    let mut response = match inner {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => error.into_response(),
        Err(_) => {
            tracing::error!(request_id = &*request_id.id, handler = matched.as_deref(), "a handler panicked");
            ApiError::internal("the server made a mistake; the request id helps to find it").into_response()
        }
    };
    let key = response.extensions_mut().remove::<Principal>();
    if let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() {
        let allow = response.headers_mut().remove(header::ALLOW);
        response = error.render(api.settings().error_style);
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
    }
    if let Ok(id) = HeaderValue::from_str(&request_id.id) {
        response.headers_mut().insert("x-request-id", id);
    }
    if let Some(key) = key {
        tell_budgets(api.keys.budgets(&key), response.headers_mut());
    }
    if api.is_leaving() {
        // The client's next request belongs to another server; on a new connection it gets there.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let handler = matched.as_deref().unwrap_or("none");
    api.metrics.http_request(method.as_str(), handler, response.status().as_u16(), request_id.arrival.elapsed());
    response
}

/// OpenAI's headers for what the key may still do in this minute.
fn tell_budgets([requests, tokens]: [Option<Budget>; 2], headers: &mut HeaderMap) {
    for (what, budget) in [("requests", requests), ("tokens", tokens)] {
        let Some(budget) = budget else { continue };
        let full_in = format!("{}s", budget.full_in().as_secs_f64().ceil());
        for (name, value) in
            [("limit", budget.limit.to_string()), ("remaining", budget.left.to_string()), ("reset", full_in)]
        {
            let name = HeaderName::try_from(format!("x-ratelimit-{name}-{what}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
}

/// The key comes before anything that a request can cause.
async fn guarded(api: &Arc<Api>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    let path = request.uri().path();
    if request.headers().contains_key(header::UPGRADE) {
        return Err(ApiError::new(ErrorKind::Schema, "protocol upgrades are not offered").with_param("Upgrade"));
    }
    if auth::is_open_path(request.method(), path) {
        // Without a CORS answer (that layer is further out and answers allowed origins itself). The router adds `Allow`.
        if request.method() == Method::OPTIONS && request.extensions().get::<MatchedPath>().is_some() {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        return Ok(next.run(request).await);
    }
    match api.keys.authenticate(request.headers()) {
        Ok(principal) => {
            if !auth::is_in_scope(principal.scope, path) {
                api.metrics.key_refused("other");
                return Err(ApiError::new(ErrorKind::Forbidden, "this API key is for monitoring only"));
            }
            request.extensions_mut().insert(principal.clone());
            let mut response = next.run(request).await;
            response.extensions_mut().insert(principal);
            Ok(response)
        }
        Err(refusal) => {
            api.metrics.key_refused(refusal.reason());
            Err(refusal.into())
        }
    }
}

pub async fn unknown_path(request: Request) -> ApiError {
    let path = request.uri().path();
    let shown: String = path.chars().take(128).collect();
    ApiError::new(ErrorKind::UnknownPath, format!("Not Found: there is no {shown}"))
}

pub async fn method_not_allowed(request: Request) -> ApiError {
    ApiError::new(ErrorKind::MethodNotAllowed, format!("Method Not Allowed: {} is not offered here", request.method()))
}

/// What a client may ask of another kind of model.
pub async fn not_offered(request: Request) -> ApiError {
    let message = format!("{} is not offered: this server completes and chats", request.uri().path());
    ApiError::new(ErrorKind::NotImplemented, message)
}
