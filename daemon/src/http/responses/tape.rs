//! What a background response has streamed so far, so that clients may come, go, and come back.
//!
//! The worker of the response writes, any number of readers follow from any event on. Events are numbered from 0, which is
//! their `sequence_number`. A tape holds no more than one answer and goes with the last who has it.

use bytes::{Bytes, BytesMut};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[derive(Debug)]
pub(super) struct Tape {
    state: watch::Sender<State>,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Bytes>,
    ended: bool,
}

impl Tape {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: watch::Sender::new(State::default()) })
    }

    /// Takes the whole events out of `written`.
    pub(super) fn add(&self, written: &mut BytesMut) {
        if written.is_empty() {
            return;
        }
        self.state.send_modify(|state| {
            // JSON has no line ends of its own, so a blank line ends an event and nothing else.
            while let Some(at) = written.windows(2).position(|pair| pair == b"\n\n") {
                state.events.push(written.split_to(at + 2).freeze());
            }
        });
    }

    pub(super) fn end(&self) {
        self.state.send_modify(|state| state.ended = true);
    }

    /// The events from number `from` on, as they come, with comments while none do.
    pub(super) fn follow(
        &self,
        from: usize,
        keep_alive: Duration,
    ) -> impl futures::Stream<Item = Result<Bytes, Infallible>> + Send + use<> {
        futures::stream::unfold((self.state.subscribe(), from), move |(mut state, from)| async move {
            loop {
                {
                    let now = state.borrow_and_update();
                    if let Some(new) = now.events.get(from..).filter(|new| !new.is_empty()) {
                        let (bytes, next) = (new.concat(), now.events.len());
                        drop(now);
                        return Some((Ok(Bytes::from(bytes)), (state, next)));
                    }
                    if now.ended {
                        return None;
                    }
                }
                match tokio::time::timeout(keep_alive, state.changed()).await {
                    Ok(Ok(())) => {}
                    // The writer is gone without an end: the daemon leaves.
                    Ok(Err(_)) => return None,
                    Err(_) => return Some((Ok(Bytes::from_static(b": keep-alive\n\n")), (state, from))),
                }
            }
        })
    }
}
