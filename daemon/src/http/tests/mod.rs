//! The API against a scripted worker: shapes as vLLM answered them, streams, errors, hostile bodies.

mod batches;
mod errors;
mod front;
mod fuzz;
mod golden;
mod hostile;
mod matrix;
mod messages;
mod responses;
mod streams;
mod worker;

use super::{Api, HttpSettings, router};
use crate::admission::{Admission, AdmissionLimits};
use crate::config::{AuditConfig, Secret};
use crate::keys::KeyStore;
use crate::supervisor::{self, DeploymentSpec, SupervisorSettings};
use crate::telemetry::metrics::{CacheSettings, Metrics, MetricsSetup};
use crate::text::{TextModel, fixtures};
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use ernie_proto::worker::{FinishReason, Load, Submit};
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tower::ServiceExt;
use worker::{Answer, AnsweringWorkers};

/// The model that vLLM's recorded answers came from.
const MODEL: &str = "ernie-0.3b";
const VOCAB: u32 = 103_424;
const CONTEXT: u32 = 4096;

struct House {
    router: Router,
    api: Arc<Api>,
    workers: AnsweringWorkers,
    text: Arc<TextModel>,
    _state: tempfile::TempDir,
}

/// How a house is set up.
struct Plan {
    settings: HttpSettings,
    keys: Vec<&'static str>,
    limits: AdmissionLimits,
    loads: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            settings: HttpSettings::default(),
            keys: Vec::new(),
            limits: AdmissionLimits { running_max: 64, queued_max: 64, queued_tokens_max: None },
            loads: true,
        }
    }
}

impl House {
    /// Every request gets `answer`.
    async fn answering(answer: impl Fn(&TextModel, &Submit) -> Answer + Send + Sync + 'static) -> House {
        House::with(Plan::default(), answer).await
    }

    /// Every choice says `text`, one byte per token, and ends its turn.
    async fn saying(text: &'static str) -> House {
        House::answering(move |model, submit| say(model, submit, text)).await
    }

    async fn with(plan: Plan, answer: impl Fn(&TextModel, &Submit) -> Answer + Send + Sync + 'static) -> House {
        let text = Arc::new(fixtures::text_model());
        let model = text.clone();
        let mut workers = AnsweringWorkers::new(VOCAB, CONTEXT, move |submit| answer(&model, submit));
        if !plan.loads {
            workers.loads = tokio_util::sync::CancellationToken::new();
        }
        let spec = DeploymentSpec {
            served_names: vec![MODEL.to_owned()],
            revision: "c2c559ce".to_owned(),
            model_dir: "models/ernie-0.3b".into(),
            text: text.clone(),
            load: Load::new("models/ernie-0.3b"),
            workers: 1,
        };
        let fleet = supervisor::start(SupervisorSettings::default(), Arc::new(workers.clone()), Vec::new(), spec);
        if plan.loads {
            fleet.pick_or_wait(None, Duration::from_secs(60)).await.expect("the scripted model loads");
        }
        let metrics = Arc::new(Metrics::new(MetricsSetup {
            model_name: MODEL.to_owned(),
            engines: 1,
            max_model_len: CONTEXT,
            max_num_batched_tokens: 2048,
            cache: CacheSettings::default(),
            legacy_names: false,
        }));
        let keys: Vec<Secret> = plan.keys.iter().map(|k| Secret::new((*k).to_owned())).collect();
        let state = tempfile::tempdir().unwrap();
        let unlimited = AuditConfig { retention: None, max_bytes: None };
        let audit = crate::audit::start(state.path(), &unlimited, metrics.clone()).await.unwrap();
        let keys = KeyStore::start(&keys, &audit).await.unwrap();
        let api = Api::new(fleet, Admission::new(plan.limits), metrics, keys, plan.settings);
        House { router: router(api.clone()), api, workers, text, _state: state }
    }

    async fn call(&self, request: Request<Body>) -> Reply {
        let response = self.router.clone().oneshot(request).await.expect("the router never fails");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("our bodies never fail").to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    async fn post(&self, path: &str, body: &Value) -> Reply {
        self.call(post(path, body.to_string())).await
    }

    async fn get(&self, path: &str) -> Reply {
        self.call(Request::get(path).body(Body::empty()).unwrap()).await
    }

    async fn chat(&self, extra: Value) -> Reply {
        self.post("/v1/chat/completions", &with_messages(extra)).await
    }

    async fn complete(&self, extra: Value) -> Reply {
        let mut body = serde_json::json!({"model": MODEL, "prompt": "time year"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        self.post("/v1/completions", &body).await
    }
}

fn with_messages(extra: Value) -> Value {
    let mut body = serde_json::json!({"model": MODEL, "messages": [{"role": "user", "content": "time year people"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

struct Reply {
    status: StatusCode,
    headers: http::HeaderMap,
    body: Bytes,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    #[track_caller]
    fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    /// The JSON of every `data:` event; the end mark must be the last.
    #[track_caller]
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        let text = self.text();
        let mut events: Vec<&str> = text.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':')).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

/// The byte tokens of a text.
fn byte_tokens(model: &TextModel, text: &str) -> Vec<u32> {
    text.bytes().map(|b| model.tokenizer().id_of(&format!("<0x{b:02X}>")).unwrap()).collect()
}

/// Every choice says the same, and ends its turn.
fn say(model: &TextModel, submit: &Submit, text: &str) -> Answer {
    let mut tokens = byte_tokens(model, text);
    tokens.push(model.eos_token_ids()[0]);
    let mut answer = Answer::of(tokens, FinishReason::Eos);
    answer.choices = vec![answer.choices[0].clone(); submit.choices.len()];
    answer
}
