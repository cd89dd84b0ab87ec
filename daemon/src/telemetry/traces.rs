//! Traces: each sampled request as OpenTelemetry spans, sent to a collector over OTLP/HTTP. Off unless an endpoint is given.
//!
//! A request's spans are made at its end, from the times that were noted on its card: `request` with `queue`, `prefill` and
//! `decode` below it. A `traceparent` header makes the caller's span the parent and its decision to sample ours. Attributes
//! follow the GenAI conventions; there is no prompt and no answer in them. `prefill` and `decode` link to the engine steps that
//! computed them: a span each, shared by all requests of the step, and a trace of its own since a step is no part of any one
//! request. Spans wait in a bounded queue for a thread of
//! their own; a collector that is slow or gone costs spans, never a request.

use super::metrics::RequestFigures;
use super::requests::Card;
use super::steps::{PhaseSteps, Step, StepLog};
use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::trace::{
    Link, Span, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
    TracerProvider,
};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SamplingResult, SdkTracer, SdkTracerProvider, ShouldSample,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// A collector that takes longer has lost the batch.
const EXPORT_PATIENCE: Duration = Duration::from_secs(5);
/// What a collector may answer; nobody reads it.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// At the daemon's end.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);
/// Spans that wait to be sent; a request that ends may bring a hundred of its steps.
const QUEUE_MAX: usize = 16 * 1024;
/// Name of the span of an engine step.
const STEP: &str = "engine step";

/// Where spans go.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    steps: bool,
}

/// The exporter can not be made.
#[derive(Debug, thiserror::Error)]
#[error("traces can not be sent to {endpoint}: {reason}; give an http:// URL, or leave --otlp-traces-endpoint out")]
pub struct TracesError {
    endpoint: String,
    reason: String,
}

/// The caller's span, from its `traceparent` header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceParent(SpanContext);

impl TraceParent {
    /// `00-<trace id>-<span id>-<flags>`, all lower-case hexadecimal. `None`: not of that form, so there is no parent.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let hex =
            |text: &str, len: usize| text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let whole = hex(version, 2) && hex(trace, 32) && hex(span, 16) && hex(flags, 2) && version != "ff";
        // Version 00 has four parts; later ones may have more.
        if !whole || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()? & TraceFlags::SAMPLED.to_u8());
        let context = SpanContext::new(
            TraceId::from_hex(trace).ok()?,
            SpanId::from_hex(span).ok()?,
            flags,
            true,
            TraceState::default(),
        );
        context.is_valid().then_some(Self(context))
    }
}

impl Traces {
    /// `endpoint`: the collector's address; without a path, OTLP's own is taken. `ratio`: the share of requests without a
    /// parent that is sampled. `steps`: whether requests link to the engine steps that computed them. Must be called inside a runtime.
    pub fn start(endpoint: &str, ratio: f64, steps: bool) -> Result<Self, TracesError> {
        let fail = |reason: String| TracesError { endpoint: endpoint.to_owned(), reason };
        let uri: http::Uri = endpoint.parse().map_err(|e: http::uri::InvalidUri| fail(e.to_string()))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(fail("it is no http:// URL".to_owned()));
        }
        let path = if matches!(uri.path(), "" | "/") { "/v1/traces" } else { "" };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(Hyper {
                runtime: Handle::current(),
                client: Client::builder(TokioExecutor::new()).build_http(),
            })
            .with_protocol(Protocol::HttpJson)
            .with_endpoint(format!("{}{path}", endpoint.trim_end_matches('/')))
            .with_timeout(EXPORT_PATIENCE)
            .build()
            .map_err(|e| fail(e.to_string()))?;
        let resource = Resource::builder()
            .with_service_name("ernied")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
            .build();
        let batches = BatchConfigBuilder::default().with_max_queue_size(QUEUE_MAX).build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(BatchSpanProcessor::builder(exporter).with_batch_config(batches).build())
            .with_sampler(Sampled(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio)))))
            .with_resource(resource)
            .build();
        let tracer = provider.tracer("ernied");
        Ok(Self { provider, tracer, steps })
    }

    pub(super) fn want_steps(&self) -> bool {
        self.steps
    }

    /// A request came to its end, whatever it was.
    pub(super) fn request_ended(&self, card: &Card, figures: &RequestFigures, steps: &StepLog) {
        let parent =
            card.parent.as_ref().map_or_else(Context::new, |p| Context::new().with_remote_span_context(p.0.clone()));
        let mut request = self
            .tracer
            .span_builder(format!("{} {}", card.operation, card.model))
            .with_kind(SpanKind::Server)
            .with_start_time(card.arrival)
            .with_attributes(attributes(card, figures))
            .start_with_context(&self.tracer, &parent);
        if !request.is_recording() {
            return;
        }
        if figures.finished.label() == "error" {
            request.set_status(Status::error("the request could not be finished"));
        }
        let within = parent.with_remote_span_context(request.span_context().clone());
        let [started, first, last] = card.notes.times();
        // Each phase ends where the next begins; one that was never left ends with the request.
        let phases = [
            ("queue", Some(Duration::ZERO), started, None),
            ("prefill", started, first, Some(&steps.prefill)),
            ("decode", first, last.filter(|_| figures.generation_tokens > 1), Some(&steps.decode)),
        ];
        for (name, begin, end, steps) in phases {
            let Some(begin) = begin else { continue };
            if name == "decode" && end.is_none() && figures.generation_tokens <= 1 {
                continue; // one token: there was nothing after the prefill
            }
            let mut builder =
                self.tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(card.arrival + begin);
            if let Some(steps) = steps.filter(|steps| steps.count() > 0) {
                builder = builder.with_attributes([count("ernied.steps", steps.count())]).with_links(self.links(steps));
            }
            let mut span = builder.start_with_context(&self.tracer, &within);
            span.end_with_timestamp(card.arrival + end.unwrap_or(figures.e2e).max(begin));
        }
        request.end_with_timestamp(card.arrival + figures.e2e);
    }

    fn links(&self, steps: &PhaseSteps) -> Vec<Link> {
        let link =
            |step: &Arc<Step>| Link::new(self.step_span(step), vec![count("ernied.step.number", step.number)], 0);
        steps.kept().map(link).collect()
    }

    /// The step's span; made for the first request that refers to it.
    fn step_span(&self, step: &Step) -> SpanContext {
        let made = step.span.get_or_init(|| {
            let mut span = self
                .tracer
                .span_builder(STEP)
                .with_kind(SpanKind::Internal)
                .with_start_time(step.ended.checked_sub(step.took).unwrap_or(step.ended))
                .with_attributes([
                    KeyValue::new("ernied.worker", step.worker.to_string()),
                    count("ernied.step.number", step.number),
                    count("ernied.step.sequences", step.sequences.into()),
                    count("ernied.step.tokens", step.tokens.into()),
                    count("ernied.step.prefill_tokens", step.prefill_tokens.into()),
                ])
                .start_with_context(&self.tracer, &Context::new());
            span.end_with_timestamp(step.ended);
            span.span_context().clone()
        });
        made.clone()
    }

    /// Sends what waits. Blocks.
    pub fn close(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_PATIENCE) {
            tracing::warn!("the last traces were not sent: {error}");
        }
    }
}

fn count(name: &'static str, value: u64) -> KeyValue {
    KeyValue::new(name, i64::try_from(value).unwrap_or(i64::MAX))
}

/// Steps are always taken: there is one only when a request that was taken refers to it.
#[derive(Debug, Clone)]
struct Sampled(Sampler);

impl ShouldSample for Sampled {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let rule = if name == STEP { &Sampler::AlwaysOn } else { &self.0 };
        rule.should_sample(parent, trace, name, kind, attributes, links)
    }
}

fn attributes(card: &Card, figures: &RequestFigures) -> Vec<KeyValue> {
    let finished = StringValue::from(figures.finished.label());
    let seconds = |d: Option<Duration>| d.map(|d| d.as_secs_f64());
    let mut all = vec![
        KeyValue::new("gen_ai.operation.name", card.operation),
        KeyValue::new("gen_ai.provider.name", "ernied"),
        KeyValue::new("gen_ai.request.model", card.model.clone()),
        KeyValue::new("gen_ai.response.model", card.model.clone()),
        KeyValue::new("gen_ai.response.id", card.request_id.to_string()),
        KeyValue::new("gen_ai.request.max_tokens", i64::from(card.max_tokens)),
        KeyValue::new("gen_ai.request.choice.count", i64::from(card.choices)),
        KeyValue::new("gen_ai.request.temperature", f64::from(card.temperature)),
        KeyValue::new("gen_ai.request.top_p", f64::from(card.top_p)),
        KeyValue::new("gen_ai.usage.input_tokens", i64::from(figures.prompt_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", i64::from(figures.generation_tokens)),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", i64::from(figures.cached_tokens)),
        KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(vec![finished]))),
        KeyValue::new("ernied.key", card.key.to_string()),
        KeyValue::new("ernied.revision", card.revision.clone()),
    ];
    // The names that vLLM gives them.
    for (name, value) in [
        ("gen_ai.latency.time_in_queue", seconds(figures.queue)),
        ("gen_ai.latency.time_in_model_prefill", seconds(figures.prefill)),
        ("gen_ai.latency.time_in_model_decode", seconds(figures.decode)),
        ("gen_ai.latency.time_to_first_token", seconds(card.notes.times()[1])),
        ("gen_ai.latency.e2e", Some(figures.e2e.as_secs_f64())),
    ] {
        all.extend(value.map(|v| KeyValue::new(name, v)));
    }
    all
}

/// Sends from the daemon's runtime; the batch thread that asks has none.
#[derive(Debug)]
struct Hyper {
    runtime: Handle,
    client: Client<HttpConnector, Full<Bytes>>,
}

#[async_trait]
impl HttpClient for Hyper {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let exchange = self.runtime.spawn(async move {
            let exchange = async {
                let (parts, body) = client.request(request.map(Full::new)).await?.into_parts();
                let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await?.to_bytes();
                Ok::<_, HttpError>(Response::from_parts(parts, body))
            };
            tokio::time::timeout(EXPORT_PATIENCE, exchange).await?
        });
        exchange.await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_taken_as_the_standard_writes_it_and_nothing_else() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parsed = TraceParent::parse(good).expect("it is the standard's example");
        assert!(parsed.0.is_sampled() && parsed.0.is_remote());
        assert_eq!(parsed.0.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(TraceParent::parse(&format!("cc{}-what-comes", &good[2..])).is_some(), "a later version");
        for bad in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn an_endpoint_that_can_not_be_used_is_a_clear_error() {
        for bad in ["", "collector:4318", "https://collector:4318", "not a url"] {
            let error = Traces::start(bad, 1.0, true).expect_err(bad);
            assert!(error.to_string().contains("--otlp-traces-endpoint"), "{error}");
        }
    }
}
