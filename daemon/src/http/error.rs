//! Every refusal and failure of the HTTP API, in one place: status, type, code, in both styles.
//!
//! Handlers return an [`ApiError`]; the outermost layer (`layers::finish`) renders it in the server's style. Inside a stream
//! the status has gone out already, and the same body is sent as an event.

use crate::admission::Refusal;
use crate::config::ErrorStyle;
use crate::generate::AnswerFailure;
use crate::keys::{KeyRefusal, LimitRefusal};
use crate::supervisor::SubmitRefusal;
use crate::text::TextError;
use axum::response::{IntoResponse, Response};
use ernie_proto::openai::FieldError;
use ernie_proto::openai::response::{ErrorBody, ErrorObject};
use http::{HeaderValue, StatusCode, header};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// What kind of refusal; each has one status and one name per style.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The body does not have the form of a request.
    Schema,
    /// A value is refused.
    Value,
    /// Prompt and answer do not fit the context.
    ContextLength,
    /// No such model, response, file, batch.
    NotFound,
    UnknownPath,
    MethodNotAllowed,
    Unauthorized,
    Forbidden,
    Timeout,
    TooLarge,
    /// A content encoding that is not read here.
    UnsupportedEncoding,
    Unprocessable,
    /// A limit of the API key.
    RateLimited,
    Internal,
    NotImplemented,
    /// Queue full, loading, draining, restarting.
    Unavailable,
}

impl ErrorKind {
    pub fn status(self) -> StatusCode {
        match self {
            Self::Schema | Self::Value | Self::ContextLength => StatusCode::BAD_REQUEST,
            Self::NotFound | Self::UnknownPath => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::Timeout => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedEncoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Unprocessable => StatusCode::UNPROCESSABLE_ENTITY,
            Self::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotImplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn vllm_type(self) -> &'static str {
        match self {
            Self::Schema => "Bad Request",
            Self::Value | Self::ContextLength => "BadRequestError",
            Self::NotFound => "NotFoundError",
            Self::UnknownPath => "Not Found",
            Self::MethodNotAllowed => "Method Not Allowed",
            Self::Unauthorized => "AuthenticationError",
            Self::Forbidden => "PermissionDeniedError",
            Self::Timeout => "RequestTimeoutError",
            Self::TooLarge => "PayloadTooLargeError",
            Self::UnsupportedEncoding => "UnsupportedMediaTypeError",
            Self::Unprocessable => "UnprocessableEntityError",
            Self::RateLimited => "RateLimitError",
            Self::Internal => "InternalServerError",
            Self::NotImplemented => "NotImplementedError",
            Self::Unavailable => "ServiceUnavailableError",
        }
    }

    fn openai_type(self) -> &'static str {
        match self {
            Self::Unauthorized | Self::Forbidden => "authentication_error",
            Self::RateLimited => "rate_limit_error",
            Self::Internal | Self::NotImplemented | Self::Unavailable => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn openai_code(self) -> Option<&'static str> {
        match self {
            Self::ContextLength => Some("context_length_exceeded"),
            Self::Unauthorized => Some("invalid_api_key"),
            Self::Forbidden => Some("model_not_allowed"),
            Self::UnknownPath => Some("unknown_url"),
            Self::MethodNotAllowed => Some("method_not_allowed"),
            Self::RateLimited => Some("rate_limit_exceeded"),
            Self::NotImplemented => Some("unsupported"),
            Self::Unavailable => Some("overloaded"),
            _ => None,
        }
    }
}

/// One refusal, with whose field it is and when to come back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub kind: ErrorKind,
    pub message: String,
    pub param: Option<String>,
    pub retry_after: Option<Duration>,
    /// OpenAI's word where the kind alone does not say it.
    code: Option<&'static str>,
}

impl ApiError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None, code: None }
    }

    /// A refused value of a field.
    pub fn value(param: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Value, message).with_param(param)
    }

    pub fn with_param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let message = format!("The model `{model}` does not exist. Valid aliases: {}.", served.join(", "));
        let mut error = Self::new(ErrorKind::NotFound, message).with_param("model");
        error.code = Some("model_not_found");
        error
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message).with_retry_after(Duration::from_secs(5))
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    pub fn status(&self) -> StatusCode {
        self.kind.status()
    }

    /// The body in one of the two styles.
    pub fn body(&self, style: ErrorStyle) -> ErrorBody {
        let (kind, code) = match style {
            ErrorStyle::Vllm => (self.kind.vllm_type(), Value::from(self.status().as_u16())),
            ErrorStyle::Openai => {
                (self.kind.openai_type(), self.code.or(self.kind.openai_code()).map_or(Value::Null, Value::from))
            }
        };
        let error =
            ErrorObject { message: self.message.clone(), kind: kind.to_owned(), param: self.param.clone(), code };
        ErrorBody { error }
    }

    /// The complete answer.
    pub fn render(&self, style: ErrorStyle) -> Response {
        let mut response = (self.status(), axum::Json(self.body(style))).into_response();
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.kind == ErrorKind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Rendered later, by `layers::finish`, which knows the style.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

impl From<FieldError> for ApiError {
    fn from(e: FieldError) -> Self {
        Self::new(ErrorKind::Schema, e.to_string()).with_param(e.param())
    }
}

impl From<Refusal> for ApiError {
    fn from(e: Refusal) -> Self {
        Self::new(ErrorKind::Unavailable, e.to_string()).with_retry_after(e.retry_after())
    }
}

impl From<KeyRefusal> for ApiError {
    fn from(e: KeyRefusal) -> Self {
        // Why a key is not accepted is for the log; telling the client would tell a guesser.
        let message = match e {
            KeyRefusal::Missing => e.to_string(),
            _ => "invalid API key".to_owned(),
        };
        Self::new(ErrorKind::Unauthorized, message)
    }
}

impl From<LimitRefusal> for ApiError {
    fn from(e: LimitRefusal) -> Self {
        Self::new(ErrorKind::RateLimited, e.to_string()).with_retry_after(e.retry_after)
    }
}

impl From<SubmitRefusal> for ApiError {
    fn from(e: SubmitRefusal) -> Self {
        match e.retry_after() {
            Some(after) => {
                Self::new(ErrorKind::Unavailable, e.to_string()).with_retry_after(after.max(Duration::from_secs(1)))
            }
            None => Self::new(ErrorKind::Value, e.to_string()),
        }
    }
}

impl From<AnswerFailure> for ApiError {
    fn from(e: AnswerFailure) -> Self {
        match &e {
            AnswerFailure::Engine { retryable: true, .. } => Self::unavailable(e.to_string()),
            AnswerFailure::Engine { .. } => Self::internal(e.to_string()),
            AnswerFailure::Deadline(_) => Self::new(ErrorKind::Timeout, e.to_string()),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(e: TextError) -> Self {
        match &e {
            TextError::Render(_) => Self::value("messages", e.to_string()),
            TextError::NoChatTemplate => Self::new(ErrorKind::Value, e.to_string()),
            TextError::Encode { .. } => Self::value("prompt", e.to_string()),
            _ => Self::internal(e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_styles_say_the_same_in_their_words() {
        let e = ApiError::model_not_found("nope", &["ernie-0.3b".into()]);
        assert_eq!(
            serde_json::to_string(&e.body(ErrorStyle::Vllm)).unwrap(),
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: ernie-0.3b.","type":"NotFoundError","param":"model","code":404}}"#
        );
        assert_eq!(
            serde_json::to_string(&e.body(ErrorStyle::Openai)).unwrap(),
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: ernie-0.3b.","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
    }

    #[test]
    fn a_refused_key_is_never_told_why() {
        for refusal in [KeyRefusal::Unknown, KeyRefusal::Expired, KeyRefusal::Revoked] {
            assert_eq!(ApiError::from(refusal).message, "invalid API key");
        }
    }

    #[test]
    fn overload_says_when_to_come_back_in_whole_seconds() {
        let e = ApiError::unavailable("x").with_retry_after(Duration::from_millis(1500));
        assert_eq!(e.render(ErrorStyle::Vllm).headers()[header::RETRY_AFTER], "2");
    }
}
