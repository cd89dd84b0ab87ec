//! Server-sent events: framing, headers, keep-alive comments, and the loop that turns answers into events.
//!
//! What is ready is sent in one write; while nothing comes a comment goes out per interval, so that neither client nor proxy
//! gives up during a long prefill. Dropping the body drops the answers, which ends the work.

use super::assemble::Answers;
use super::error::ApiError;
use crate::config::ErrorStyle;
use crate::generate::AnswerEvent;
use axum::body::Body;
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures::FutureExt;
use http::{HeaderValue, header};
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;

/// Events of one write. Enough to save system calls, too little to notice.
const WRITE_BYTES: usize = 16 << 10;

/// Makes the events of one kind of stream.
pub trait StreamForm: Send + 'static {
    /// What comes before any token.
    fn open(&mut self, out: &mut BytesMut);
    /// One event of answer `index`. An error ends the stream.
    fn event(&mut self, index: usize, event: AnswerEvent, out: &mut BytesMut) -> Result<(), ApiError>;
    /// What comes after the last token, without the end mark.
    fn close(&mut self, out: &mut BytesMut);
    /// The end mark.
    fn done(&mut self, out: &mut BytesMut) {
        out.put_slice(b"data: [DONE]\n\n");
    }
    /// An error inside of the stream.
    fn error(&mut self, error: &ApiError, style: ErrorStyle, out: &mut BytesMut) {
        data(out, &error.body(style));
    }
}

/// How streams are kept alive, and how errors look in them.
#[derive(Debug, Clone, Copy)]
pub struct StreamSettings {
    pub keep_alive: Duration,
    pub error_style: ErrorStyle,
}

/// `data: {...}` and a blank line.
pub fn data(out: &mut BytesMut, value: &impl Serialize) {
    out.put_slice(b"data: ");
    json(out, value);
    out.put_slice(b"\n\n");
}

/// With an event name in front, as the typed streams have it.
pub fn named(out: &mut BytesMut, name: &str, value: &impl Serialize) {
    out.put_slice(b"event: ");
    out.put_slice(name.as_bytes());
    out.put_slice(b"\n");
    data(out, value);
}

fn json(out: &mut BytesMut, value: &impl Serialize) {
    let before = out.len();
    if let Err(error) = serde_json::to_writer((&mut *out).writer(), value) {
        // Only a map with keys that are no strings can fail here, and we have none.
        tracing::error!(%error, "an event could not be written as JSON");
        out.truncate(before);
        out.put_slice(b"{}");
    }
}

/// The answer of a stream. `first` is an event that was already waited for.
pub fn response(
    answers: Answers,
    first: Option<(usize, AnswerEvent)>,
    form: impl StreamForm,
    settings: StreamSettings,
) -> Response {
    let state = State { answers, first, form, settings, opened: false, ended: false };
    streamed(futures::stream::unfold(state, |mut state| async move {
        if state.ended {
            return None;
        }
        let bytes = state.write().await;
        Some((Ok::<Bytes, Infallible>(bytes), state))
    }))
}

/// Events that are made elsewhere, with the headers of a stream.
pub fn streamed(events: impl futures::Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct State<F> {
    answers: Answers,
    first: Option<(usize, AnswerEvent)>,
    form: F,
    settings: StreamSettings,
    opened: bool,
    ended: bool,
}

impl<F: StreamForm> State<F> {
    /// The next bytes: everything that is ready, or a keep-alive comment.
    async fn write(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        if !std::mem::replace(&mut self.opened, true) {
            self.form.open(&mut out);
            if let Some((index, event)) = self.first.take() {
                self.take(index, event, &mut out);
            }
            if self.ended || !out.is_empty() {
                return out.freeze();
            }
        }
        let mut comment_at = Instant::now() + self.settings.keep_alive;
        while out.is_empty() && !self.ended {
            tokio::select! {
                biased;
                event = self.answers.next() => self.take_next(event, &mut out),
                () = tokio::time::sleep_until(comment_at) => {
                    out.put_slice(b": keep-alive\n\n");
                    comment_at += self.settings.keep_alive;
                }
            }
        }
        while !self.ended && out.len() < WRITE_BYTES {
            match self.answers.next().now_or_never() {
                Some(event) => self.take_next(event, &mut out),
                None => break,
            }
        }
        out.freeze()
    }

    fn take_next(&mut self, event: Option<(usize, AnswerEvent)>, out: &mut BytesMut) {
        match event {
            Some((index, event)) => self.take(index, event, out),
            None => {
                self.form.close(out);
                self.form.done(out);
                self.ended = true;
            }
        }
    }

    fn take(&mut self, index: usize, event: AnswerEvent, out: &mut BytesMut) {
        if let Err(error) = self.form.event(index, event, out) {
            self.form.error(&error, self.settings.error_style, out);
            self.form.done(out);
            self.ended = true;
        }
    }
}
