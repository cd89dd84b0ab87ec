//! What goes wrong at the admin socket, as status, word and sentence.

use super::peer::Role;
use crate::audit::{Actor, AuditUnavailable, StoreError};
use crate::config::ConfigErrors;
use crate::keys::KeyError;
use axum::Json;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use ernie_proto::admin::{ErrorBody, ErrorReply};

#[derive(Debug)]
pub(crate) struct AdminError {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl AdminError {
    pub(super) fn forbidden(actor: &Actor, needs: Role, has: &str) -> Self {
        let message = format!(
            "{actor} has the role {has}; this takes {}; add the user to admin.admin_uids, or a group to admin.operator_gids \
             or admin.viewer_gids",
            needs.as_str()
        );
        Self { status: StatusCode::FORBIDDEN, code: "forbidden", message }
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code: "invalid", message: message.into() }
    }

    pub(super) fn missing(message: impl Into<String>) -> Self {
        Self { status: StatusCode::NOT_FOUND, code: "not_found", message: message.into() }
    }

    pub(super) fn conflict(message: impl Into<String>) -> Self {
        Self { status: StatusCode::CONFLICT, code: "conflict", message: message.into() }
    }

    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, code: "unavailable", message: message.into() }
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let body = ErrorReply { error: ErrorBody { code: self.code.to_owned(), message: self.message } };
        (self.status, Json(body)).into_response()
    }
}

impl From<AuditUnavailable> for AdminError {
    fn from(e: AuditUnavailable) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, code: "audit_unavailable", message: e.to_string() }
    }
}

impl From<StoreError> for AdminError {
    fn from(e: StoreError) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, code: "internal", message: e.to_string() }
    }
}

impl From<KeyError> for AdminError {
    fn from(e: KeyError) -> Self {
        match e {
            KeyError::Invalid(m) => Self::invalid(m),
            e @ KeyError::Exists(_) => Self::conflict(e.to_string()),
            e @ KeyError::NotFound(_) => Self::missing(e.to_string()),
            KeyError::Audit(e) => e.into(),
            KeyError::Store(e) => e.into(),
        }
    }
}

impl From<ConfigErrors> for AdminError {
    fn from(e: ConfigErrors) -> Self {
        Self::invalid(e.to_string())
    }
}

/// Reads a JSON body; the error names the field.
pub(super) fn body<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, AdminError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|e| AdminError::invalid(format!("the body is not what this verb takes: {e}")))
}

pub(super) async fn not_found(uri: Uri) -> AdminError {
    AdminError::missing(format!("there is no {}; this is ernied {}", uri.path(), env!("CARGO_PKG_VERSION")))
}
