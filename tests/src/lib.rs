//! What the end-to-end tests share: the real binaries, a small HTTP client, a reader of event streams.
//!
//! Tests start `ernied` as an operator would, over real sockets, and break it from outside (signals, files), never
//! through hooks inside.

pub mod cgroup;
pub mod client;
pub mod daemon;
pub mod demo;
pub mod models;
pub mod prometheus;
pub mod storm;

pub use cgroup::MemoryCgroup;
pub use client::{Client, Response, SseReader};
pub use daemon::{DaemonOptions, TestDaemon, binary, ctl};
pub use demo::{Question, questions};
