//! Request bodies: bounded in size and time, JSON only.

use super::Api;
use super::error::{ApiError, ErrorKind};
use axum::extract::Request;
use bytes::Bytes;
use ernie_proto::openai::json;
use http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value};

/// Reads a body that has to be a JSON object.
pub async fn object(api: &Api, request: Request) -> Result<Map<String, Value>, ApiError> {
    check_headers(request.headers())?;
    let bytes = bytes(api, request).await?;
    Ok(json::parse_object(&bytes)?)
}

/// Reads a body of any kind.
pub async fn bytes(api: &Api, request: Request) -> Result<Bytes, ApiError> {
    let most = api.settings().max_body_bytes;
    let too_large = || {
        ApiError::new(ErrorKind::TooLarge, format!("the body is larger than the limit of {most} bytes"))
            .with_param("body")
    };
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|n| n > most) {
        return Err(too_large());
    }
    let limited = Limited::new(request.into_body(), usize::try_from(most).unwrap_or(usize::MAX));
    match tokio::time::timeout(api.settings().body_timeout, limited.collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(e)) => {
            Err(ApiError::new(ErrorKind::Schema, format!("the body could not be read: {e}")).with_param("body"))
        }
        Err(_) => Err(ApiError::new(
            ErrorKind::Timeout,
            format!("the body did not come within {} s", api.settings().body_timeout.as_secs_f64()),
        )
        .with_param("body")),
    }
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence != "application/json" && !(essence.starts_with("application/") && essence.ends_with("+json")) {
        return Err(ApiError::new(
            ErrorKind::Schema,
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        )
        .with_param("Content-Type"));
    }
    let encoding = headers.get(header::CONTENT_ENCODING).map_or("identity", |v| v.to_str().unwrap_or("?")).trim();
    if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
        return Err(ApiError::new(
            ErrorKind::UnsupportedEncoding,
            format!("bodies in content encoding `{encoding}` are not read; send them as they are"),
        )
        .with_param("Content-Encoding"));
    }
    Ok(())
}
