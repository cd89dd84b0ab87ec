//! `/openapi.json`: the API described for machines.
//!
//! The document is kept as a file, so that what clients are promised changes only on purpose; a test holds it against the
//! router in both directions.

use http::{HeaderValue, header};

const DOCUMENT: &str = include_str!("openapi.json");

pub async fn document() -> ([(header::HeaderName, HeaderValue); 1], &'static str) {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], DOCUMENT)
}

#[cfg(test)]
pub(super) fn parsed() -> serde_json::Value {
    serde_json::from_str(DOCUMENT).expect("the document is JSON")
}
