//! Which paths are open without a key, and what a key's scope opens.
//!
//! Everything is closed by default when keys are configured: a path is open only when it is, byte for byte, on a short list.
//! `//v1/models`, `/V1/`, `/v1%2fmodels`, `/health/../v1` are not on it. Whose a key is, `keys` knows.

use crate::keys::Scope;
use http::Method;

/// Paths that probes and load balancers ask without a key.
const OPEN_PATHS: [&str; 10] = [
    "/health",
    "/health/live",
    "/health/ready",
    "/health/startup",
    "/ping",
    "/version",
    "/ready",
    "/readyz",
    "/livez",
    "/healthz",
];

/// Whether a request needs no key. `path` is the raw path of the request line.
pub fn is_open_path(method: &Method, path: &str) -> bool {
    // A CORS preflight carries no credentials; it is answered without reaching a handler.
    method == Method::OPTIONS
        || ((method == Method::GET || method == Method::HEAD) && OPEN_PATHS.contains(&path))
        || (method == Method::POST && path == "/ping")
}

/// Whether a key of this scope may ask for a path at all.
pub fn is_in_scope(scope: Scope, path: &str) -> bool {
    match scope {
        Scope::Inference => true,
        Scope::Monitor => OPEN_PATHS.contains(&path) || matches!(path, "/metrics" | "/metrics/" | "/load"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_paths_are_open() {
        for path in OPEN_PATHS {
            assert!(is_open_path(&Method::GET, path));
        }
        for path in [
            "//health",
            "/health/",
            "/Health",
            "/health/../v1/models",
            "/health/x",
            "/v1/models",
            "//v1/models",
            "/V1/models",
            "/v1%2fmodels",
            "/./v1/models",
            "/metrics",
            "/tokenize",
            "/invocations",
            "/",
            "",
            "*",
            "/health%00",
            "/load",
        ] {
            assert!(!is_open_path(&Method::GET, path), "{path}");
            assert!(!is_open_path(&Method::POST, path), "{path}");
        }
        assert!(!is_open_path(&Method::DELETE, "/health"));
        assert!(is_open_path(&Method::OPTIONS, "/v1/models"));
    }

    #[test]
    fn a_monitors_key_opens_the_figures_only() {
        for path in ["/metrics", "/metrics/", "/health", "/load", "/version"] {
            assert!(is_in_scope(Scope::Monitor, path));
        }
        for path in ["/v1/models", "/v1/chat/completions", "/tokenize", "//metrics", "/metrics/x"] {
            assert!(!is_in_scope(Scope::Monitor, path), "{path}");
            assert!(is_in_scope(Scope::Inference, path));
        }
    }
}
