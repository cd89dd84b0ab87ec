//! Spans of requests as a small OTLP/HTTP receiver gets them.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use ernied_tests::{DaemonOptions, TestDaemon};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use tokio::net::TcpListener;
use tokio::sync::watch;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const PROMPT: &str = "What is a hot swap?";

/// Takes what is posted, as a collector does.
struct Receiver {
    endpoint: String,
    posted: watch::Receiver<Vec<(String, Bytes)>>,
}

impl Receiver {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let (sender, posted) = watch::channel(Vec::new());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                        let sender = sender.clone();
                        async move {
                            let path = request.uri().path().to_owned();
                            if let Ok(body) = request.into_body().collect().await {
                                sender.send_modify(|all| all.push((path, body.to_bytes())));
                            }
                            Ok::<_, Infallible>(hyper::Response::new(Full::new(Bytes::from_static(b"{}"))))
                        }
                    });
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { endpoint, posted })
    }

    fn spans(&self) -> Result<Vec<Value>> {
        let mut spans = Vec::new();
        for (path, body) in self.posted.borrow().iter() {
            ensure!(path == "/v1/traces", "posted to {path}");
            let message: Value = serde_json::from_slice(body)?;
            for resource in message["resourceSpans"].as_array().context("resourceSpans")? {
                let service = attributes(&resource["resource"]);
                ensure!(service.get("service.name").is_some_and(|v| v["stringValue"] == "ernied"), "{resource}");
                for scope in resource["scopeSpans"].as_array().context("scopeSpans")? {
                    spans.extend(scope["spans"].as_array().context("spans")?.iter().cloned());
                }
            }
        }
        Ok(spans)
    }
}

fn attributes(of: &Value) -> BTreeMap<String, Value> {
    let pairs = of["attributes"].as_array().into_iter().flatten();
    pairs.filter_map(|p| Some((p["key"].as_str()?.to_owned(), p["value"].clone()))).collect()
}

fn nanos(span: &Value, name: &str) -> u64 {
    span[name].as_str().and_then(|t| t.parse().ok()).or(span[name].as_u64()).unwrap_or_default()
}

fn number(span: &Value, name: &str) -> u64 {
    let value = attributes(span).remove(name).unwrap_or_default();
    value["intValue"].as_str().and_then(|n| n.parse().ok()).or(value["intValue"].as_u64()).unwrap_or_default()
}

/// The spans of engine steps that a phase links to; each has to be there once.
fn linked_steps<'a>(spans: &'a [Value], phase: &Value) -> Result<Vec<&'a Value>> {
    let steps = phase["links"].as_array().into_iter().flatten().map(|link| {
        let mut those = spans.iter().filter(|s| s["spanId"] == link["spanId"] && s["traceId"] == link["traceId"]);
        let step = those.next().with_context(|| format!("{link} of {phase} leads nowhere"))?;
        ensure!(step["name"] == "engine step" && those.next().is_none(), "{step}");
        ensure!(nanos(step, "startTimeUnixNano") <= nanos(step, "endTimeUnixNano"), "{step}");
        Ok(step)
    });
    let steps = steps.collect::<Result<Vec<_>>>()?;
    let counted = number(phase, "ernied.steps");
    ensure!(steps.len() as u64 == counted, "{} links, {counted} steps: {phase}", steps.len());
    Ok(steps)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_four_spans_below_its_callers_linked_to_its_steps_without_its_text() -> Result<()> {
    let receiver = Receiver::start().await?;
    let options = DaemonOptions::default().flags(&["--otlp-traces-endpoint", &receiver.endpoint]);
    let mut daemon = TestDaemon::start(options).await?;
    let client = daemon.client();
    let ask = async |headers: &[(&str, &str)]| -> Result<()> {
        let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "temperature": 0.5});
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        let answer = client.request("POST", "/v1/chat/completions", &all, Bytes::from(body.to_string())).await?;
        ensure!(answer.status == 200, "{}", answer.text());
        Ok(())
    };
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    let unsampled = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-00";
    ask(&[("traceparent", &sampled), ("x-request-id", "asked-1")]).await?;
    ask(&[("traceparent", unsampled)]).await?;
    ask(&[]).await?;
    // Spans wait in a batch; a daemon that leaves sends what it has.
    daemon.signal(Signal::TERM)?;
    ensure!(daemon.wait().await?.success(), "{}", daemon.log_text());

    let spans = receiver.spans()?;
    let ours: Vec<&Value> = spans.iter().filter(|s| s["traceId"] == TRACE).collect();
    let named = |name: &str| ours.iter().find(|s| s["name"] == name).with_context(|| format!("no {name} in {ours:#?}"));
    let request = named("chat ernie-demo")?;
    ensure!(request["parentSpanId"] == PARENT, "{request}");
    let mut before = nanos(request, "startTimeUnixNano");
    for name in ["queue", "prefill", "decode"] {
        let phase = named(name)?;
        ensure!(phase["parentSpanId"] == request["spanId"], "{phase}");
        ensure!(nanos(phase, "startTimeUnixNano") >= before, "{name} begins where the phase before it ends: {phase}");
        before = nanos(phase, "endTimeUnixNano");
    }
    ensure!(nanos(request, "endTimeUnixNano") >= before, "{request}");
    let linked = linked_steps(&spans, named("prefill")?)?;
    ensure!(!linked.is_empty(), "a step computed the prompt");
    for step in &linked {
        ensure!(number(step, "ernied.step.prefill_tokens") > 0, "its part of the prompt: {step}");
    }
    let decoded = linked_steps(&spans, named("decode")?)?;
    let tokens = number(request, "gen_ai.usage.output_tokens");
    ensure!(decoded.len() as u64 == tokens - 1, "{} steps brought {tokens} tokens after the prefill", decoded.len());
    let order: Vec<u64> = decoded.iter().map(|step| number(step, "ernied.step.number")).collect();
    ensure!(order.windows(2).all(|w| w[0] < w[1]), "{order:?}");
    ensure!(number(linked.last().context("prefill")?, "ernied.step.number") < order[0], "{linked:?} {order:?}");
    ensure!(decoded.iter().all(|step| step["traceId"] != TRACE), "a step is no part of any one request");
    let said = attributes(request);
    for (name, value) in [
        ("gen_ai.operation.name", json!({"stringValue": "chat"})),
        ("gen_ai.request.model", json!({"stringValue": "ernie-demo"})),
        ("gen_ai.response.id", json!({"stringValue": "asked-1"})),
        ("gen_ai.request.temperature", json!({"doubleValue": 0.5})),
    ] {
        ensure!(said.get(name) == Some(&value), "{name} is {:?}, expected {value}", said.get(name));
    }
    ensure!(said.contains_key("gen_ai.usage.output_tokens") && said.contains_key("gen_ai.latency.time_to_first_token"));
    ensure!(!spans.iter().any(|s| s["traceId"] == "a".repeat(32)), "the caller decided not to sample");
    ensure!(spans.iter().any(|s| s["name"] == "chat ernie-demo" && s["traceId"] != TRACE), "one without a parent");
    for (_, body) in receiver.posted.borrow().iter() {
        let text = String::from_utf8_lossy(body);
        ensure!(!text.contains(PROMPT) && !text.contains("hot swap"), "the prompt is in a span");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_gone_costs_spans_and_no_request() -> Result<()> {
    // A port that nobody listens on.
    let nobody = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let options = DaemonOptions::default().flags(&["--otlp-traces-endpoint", &format!("http://{nobody}")]);
    let mut daemon = TestDaemon::start(options).await?;
    for n in 0..20 {
        let body = json!({"prompt": format!("{n}"), "max_tokens": 4});
        ensure!(daemon.client().post("/v1/completions", &body).await?.status == 200);
    }
    daemon.signal(Signal::TERM)?;
    ensure!(daemon.wait().await?.success(), "{}", daemon.log_text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_one_step_link_to_one_span_and_no_step_is_told_when_not_asked() -> Result<()> {
    for wanted in ["true", "false"] {
        let receiver = Receiver::start().await?;
        let options = DaemonOptions::default()
            .flags(&["--otlp-traces-endpoint", &receiver.endpoint])
            .flag(&format!("--otlp-traces-steps={wanted}"));
        let mut daemon = TestDaemon::start(options).await?;
        let client = daemon.client();
        let body = json!({"prompt": "User: hello\nAssistant: ", "max_tokens": 400, "ignore_eos": true});
        let asks = (0..4).map(|_| client.post("/v1/completions", &body));
        for answer in futures::future::join_all(asks).await {
            ensure!(answer?.status == 200);
        }
        daemon.signal(Signal::TERM)?;
        ensure!(daemon.wait().await?.success(), "{}", daemon.log_text());
        let spans = receiver.spans()?;
        let steps = spans.iter().filter(|s| s["name"] == "engine step").count();
        let decodes: Vec<&Value> = spans.iter().filter(|s| s["name"] == "decode").collect();
        ensure!(decodes.len() == 4, "{decodes:?}");
        if wanted == "false" {
            ensure!(steps == 0 && decodes.iter().all(|d| d["links"].as_array().is_none_or(Vec::is_empty)));
            continue;
        }
        let links = decodes.iter().filter_map(|d| d["links"].as_array()).map(Vec::len).sum::<usize>();
        ensure!(links == 4 * 64, "both ends of each: {links}");
        for decode in &decodes {
            ensure!(number(decode, "ernied.steps") == 399, "{decode}");
        }
        let worked: u64 =
            spans.iter().filter(|s| s["name"] == "engine step").map(|s| number(s, "ernied.step.sequences")).sum();
        ensure!(worked as usize > steps, "no step computed two of four requests at once");
    }
    Ok(())
}
