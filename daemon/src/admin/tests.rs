//! The control plane over a real socket, with a fleet of scripted workers.

use super::*;
use crate::config::layers::{Layer, Layers, Origin, Raw};
use crate::config::settings::by_key;
use crate::config::{AuditConfig, Environment, file};
use crate::supervisor::scripted::{Script, ScriptedWorkers};
use crate::supervisor::{DeploymentSpec, SupervisorSettings, start};
use crate::telemetry::logging::Logging;
use crate::telemetry::metrics::{CacheSettings, MetricsSetup};
use crate::telemetry::recorder::Recorder;
use crate::text::TextModel;
use ernie_proto::worker::Load;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

pub(super) struct House {
    control: Arc<Control>,
    dir: tempfile::TempDir,
    _logging: Logging,
    /// A level can be changed only while somebody holds the subscriber.
    _subscriber: tracing::Dispatch,
}

const FILE: &str = "[model]\ndemo = true\n[logging]\nlevel = \"info\"\n";

impl House {
    pub(super) async fn open() -> Self {
        let dir = tempfile::tempdir().expect("temp");
        let config_file = dir.path().join("ernied.toml");
        std::fs::write(&config_file, FILE).expect("written");
        let (layer, errors) = file::read(&config_file);
        assert_eq!(errors, []);
        let mut flags = Layer::default();
        let state = Raw::Text(dir.path().display().to_string());
        flags.set(by_key("paths.state_dir").expect("a key"), state, Origin::Flag("state-dir".to_owned()));
        let sources = Sources {
            layers: Layers { flags, file: layer, ..Layers::default() },
            config_file: Some(config_file.clone()),
            environment: Environment::default(),
        };
        let config = crate::config::resolve(&sources.layers, &sources.environment, Some(config_file)).expect("good");
        let text_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny-dense");
        let spec = DeploymentSpec {
            served_names: vec!["ernie".to_owned()],
            revision: "r1".to_owned(),
            model_dir: "model".into(),
            text: Arc::new(TextModel::load(&text_dir).expect("a tokenizer")),
            load: Load::new("model"),
            workers: 1,
        };
        let fleet = start(
            SupervisorSettings::default(),
            Arc::new(ScriptedWorkers::new(|_| Script::default())),
            Vec::new(),
            spec,
        );
        fleet.pick_or_wait(None, Duration::from_secs(60)).await.expect("the scripted model loads");
        let metrics = Arc::new(Metrics::new(MetricsSetup {
            model_name: "ernie".to_owned(),
            engines: 1,
            max_model_len: 100,
            max_num_batched_tokens: 100,
            cache: CacheSettings::default(),
            legacy_names: false,
        }));
        let unlimited = AuditConfig { retention: None, max_bytes: None };
        let audit = crate::audit::start(dir.path(), &unlimited, Arc::clone(&metrics)).await.expect("a store");
        let keys = KeyStore::start(&[], &audit).await.expect("keys");
        let (subscriber, logging) = Logging::build(&config.logging).expect("a log");
        let socket = crate::system::sockets::unix(&config.admin.socket, 0o600).expect("bound");
        let control = Control::new(Parts {
            config,
            sources,
            fleet,
            metrics,
            recorder: Arc::new(Recorder::new(dir.path(), Duration::from_secs(60))),
            audit,
            keys,
            log: logging.control().clone(),
            listening: vec!["http://127.0.0.1:1".to_owned()],
            started: Instant::now(),
            configured: Configured { dir: "model".into(), revision: None, served_names: vec!["ernie".to_owned()] },
        });
        serve(socket, &control).expect("served");
        Self { control, dir, _logging: logging, _subscriber: tracing::Dispatch::new(subscriber) }
    }

    /// Status code and JSON of one exchange.
    async fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.exchange(method, path, body.as_bytes()).await
    }

    /// The same with a body that may be anything.
    pub(super) async fn exchange(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let mut stream = UnixStream::connect(&self.control.config().admin.socket).await.expect("connected");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        let code = answer.split(' ').nth(1).and_then(|c| c.parse().ok()).expect("a status line");
        let text = answer.split_once("\r\n\r\n").map_or("", |(_, b)| b);
        (code, serde_json::from_str(text).unwrap_or(Value::String(text.to_owned())))
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.call("GET", path, &Value::Null).await
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.call("POST", path, &body).await
    }

    /// Acts of the audit store, oldest first.
    async fn acts(&self) -> Vec<String> {
        let (_, rows) = self.get("/v1/audit?limit=1000").await;
        let rows = rows["rows"].as_array().expect("rows").clone();
        rows.iter()
            .map(|r| format!("{} {}", r["act"].as_str().unwrap_or(""), r["kind"].as_str().unwrap_or("")))
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_state_model_workers_and_role() {
    let house = House::open().await;
    let (code, s) = house.get("/v1/status").await;
    assert_eq!(code, 200, "{s}");
    assert_eq!(
        (s["state"].as_str(), s["ready"].as_bool(), s["your_role"].as_str()),
        (Some("serving"), Some(true), Some("admin"))
    );
    assert_eq!(s["model"]["name"], "ernie");
    assert_eq!(s["workers"][0]["state"], "ready");
    serde_json::from_value::<ernie_proto::admin::Status>(s).expect("what ernie-ctl reads");
    let (code, text) = house.get("/v1/metrics").await;
    assert!(code == 200 && text.as_str().is_some_and(|t| t.contains("vllm:num_requests_running")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_file_is_applied_and_a_broken_one_changes_nothing() {
    let house = House::open().await;
    let file = house.dir.path().join("ernied.toml");
    std::fs::write(&file, "[model]\ndemo = true\n[logging]\nlevel = \"debug\"\n[server]\ndrain_timeout = \"7s\"\n")
        .expect("written");
    let (_, diff) = house.get("/v1/config/diff").await;
    assert_eq!(diff["changes"].as_array().map(Vec::len), Some(2), "{diff}");
    assert_eq!(house.control.log().level(), "info", "a diff applies nothing");
    let (code, reply) = house.post("/v1/reload", json!({})).await;
    assert!(code == 200 && reply["applied"] == true, "{reply}");
    assert_eq!(house.control.log().level(), "debug");
    assert_eq!(house.control.config().server.drain_timeout, Duration::from_secs(7));

    std::fs::write(&file, "[model]\ndemo = true\n[server]\nport = 0x1ffff\ndrain_timeout = \"9s\"\nhots = 1\n")
        .expect("written");
    let (_, reply) = house.post("/v1/reload", json!({})).await;
    assert_eq!(reply["applied"], false);
    assert_eq!(reply["refused"].as_array().map(Vec::len), Some(2), "every error: {reply}");
    assert_eq!(house.control.config().server.drain_timeout, Duration::from_secs(7), "the old one stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_needs_a_restart_refuses_the_whole_reload() {
    let house = House::open().await;
    let file = house.dir.path().join("ernied.toml");
    std::fs::write(&file, "[model]\ndemo = true\n[logging]\nlevel = \"debug\"\n[server]\nport = 9\n").expect("written");
    let (_, reply) = house.post("/v1/reload", json!({})).await;
    assert_eq!(reply["applied"], false);
    assert!(
        reply["refused"][0].as_str().is_some_and(|r| r.contains("server.port") && r.contains("restart")),
        "{reply}"
    );
    assert_eq!(house.control.log().level(), "info", "nothing of it was applied");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_is_set_and_unset_at_run_time_and_survives_a_reload() {
    let house = House::open().await;
    let (code, reply) = house.post("/v1/config/set", json!({ "key": "logging.level", "value": "trace" })).await;
    assert!(code == 200 && reply["applied"] == true, "{reply}");
    house.post("/v1/reload", json!({})).await;
    assert_eq!(house.control.log().level(), "trace");
    let (_, shown) = house.get("/v1/config").await;
    let row = shown["settings"]
        .as_array()
        .expect("rows")
        .iter()
        .find(|s| s["key"] == "logging.level")
        .expect("a row")
        .clone();
    assert_eq!(row["origin"], "ernie-ctl set");
    house.post("/v1/config/set", json!({ "key": "logging.level", "value": null })).await;
    assert_eq!(house.control.log().level(), "info");
    for (key, value, code) in [("server.port", "1", 409), ("server.prot", "1", 404)] {
        assert_eq!(house.post("/v1/config/set", json!({ "key": key, "value": value })).await.0, code, "{key}");
    }
    let (_, bad) = house.post("/v1/config/set", json!({ "key": "logging.level", "value": "info,=" })).await;
    assert_eq!(bad["applied"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_act_leaves_an_intent_and_an_outcome() {
    let house = House::open().await;
    house.post("/v1/logs/level", json!({ "level": "debug" })).await;
    house.post("/v1/prefix-cache/reset", Value::Null).await;
    let (code, created) = house.post("/v1/keys/create", json!({ "name": "app", "requests_per_minute": 5 })).await;
    assert_eq!(code, 200, "{created}");
    assert!(created["secret"].as_str().is_some_and(|s| s.starts_with("ek-")));
    assert_eq!(house.call("DELETE", "/v1/keys/app", &Value::Null).await.0, 200);
    assert_eq!(house.call("DELETE", "/v1/keys/app", &Value::Null).await.0, 404);
    house.post("/v1/workers/restart", json!({ "worker": "w999" })).await;
    let acts = house.acts().await;
    for act in ["log.level", "prefix_cache.reset", "key.create", "key.revoke", "worker.restart"] {
        for kind in ["intent", "outcome"] {
            assert!(acts.contains(&format!("{act} {kind}")), "no {act} {kind} in {acts:?}");
        }
    }
    let (_, verdict) = house.get("/v1/audit/verify").await;
    assert_eq!(
        (verdict["intact"].as_bool(), verdict["unfinished"].as_array().map(Vec::len)),
        (Some(true), Some(0)),
        "{verdict}"
    );
    assert!(
        !format!("{:?}", house.get("/v1/audit?limit=1000").await).contains(created["secret"].as_str().expect("secret"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_understood_is_refused_with_a_sentence() {
    let house = House::open().await;
    for (method, path, body, code) in [
        ("GET", "/v1/nothing", "", 404),
        ("POST", "/v1/status", "", 405),
        ("POST", "/v1/logs/level", "{", 400),
        ("POST", "/v1/logs/level", "{\"level\": 7}", 400),
        ("POST", "/v1/logs/level", "{}", 400),
        ("POST", "/v1/workers/restart", "{\"worker\": \"seven\"}", 400),
        ("POST", "/v1/keys/create", "{\"name\": \"a b\"}", 400),
        ("POST", "/v1/drain", "{\"patience_seconds\": -1}", 400),
        ("GET", "/v1/usage?days=0", "", 400),
        ("GET", "/v1/audit?limit=x", "", 400),
        ("GET", "/v1/audit?seq=99999", "", 404),
        ("POST", "/v1/logs/rotate", "", 409),
        ("POST", "/v1/swap", "{\"model_dir\": \"/nowhere\"}", 400),
        ("POST", "/v1/rollback", "", 409),
    ] {
        let body: Value = if body.is_empty() { Value::Null } else { Value::String(body.to_owned()) };
        let text = body.as_str().unwrap_or("").to_owned();
        let mut stream = UnixStream::connect(&house.control.config().admin.socket).await.expect("connected");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")), "{method} {path} {text}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_is_taken_back_unless_the_daemon_leaves() {
    let house = House::open().await;
    let ready = async || house.get("/v1/status").await.1["ready"] == true;
    assert!(ready().await);
    assert_eq!(house.post("/v1/resume", json!({})).await.0, 409, "it does not drain");
    house.post("/v1/drain", json!({ "patience_seconds": 1 })).await;
    assert!(!ready().await);
    assert_eq!(house.post("/v1/resume", json!({})).await.0, 200);
    assert!(ready().await);
    house.post("/v1/drain", json!({ "patience_seconds": 1, "exit": true })).await;
    assert_eq!(house.post("/v1/resume", json!({})).await.0, 409, "it leaves");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_the_fleet_and_may_end_the_daemon() {
    let house = House::open().await;
    let leave = house.control.asked_to_leave();
    let (code, drained) = house.post("/v1/drain", json!({ "patience_seconds": 1, "exit": true })).await;
    assert_eq!((code, drained["failed"].as_u64()), (200, Some(0)));
    assert!(*leave.borrow());
    assert_eq!(house.get("/v1/status").await.1["ready"], false);
}
