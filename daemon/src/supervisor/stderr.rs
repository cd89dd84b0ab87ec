//! A worker's standard error: read without end, passed on to the log within reason, its last lines kept.
//!
//! A worker that writes without measure costs the daemon a read loop and nothing else: a line is cut at
//! [`LINE_BYTES_MAX`], a second passes [`LINES_PER_SECOND`] on, what is left out is counted.

use ernie_proto::ids::WorkerId;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;
use tracing::{info, warn};

/// The rest of a longer line is dropped.
const LINE_BYTES_MAX: usize = 512;

/// Lines kept for the reason of a crash.
const TAIL_LINES: usize = 20;

/// Lines per second that reach the log; more are counted.
const LINES_PER_SECOND: u32 = 100;

/// The last lines of a stream.
#[derive(Debug, Default)]
pub(super) struct StderrTail {
    lines: VecDeque<String>,
    /// The line being read.
    line: Vec<u8>,
    /// Whether bytes of it were dropped.
    cut: bool,
}

impl StderrTail {
    /// Takes what was read; tells each complete line.
    fn take(&mut self, mut bytes: &[u8], mut told: impl FnMut(&str)) {
        while !bytes.is_empty() {
            let end = bytes.iter().position(|&b| b == b'\n');
            let part = &bytes[..end.unwrap_or(bytes.len())];
            let room = LINE_BYTES_MAX.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            self.cut |= part.len() > room;
            match end {
                Some(end) => {
                    if let Some(line) = self.end_line() {
                        told(line);
                    }
                    bytes = &bytes[end + 1..];
                }
                None => break,
            }
        }
    }

    fn end_line(&mut self) -> Option<&str> {
        let mut line = String::from_utf8_lossy(&self.line).trim_end().to_string();
        if std::mem::take(&mut self.cut) {
            line.push_str(" [...]");
        }
        self.line.clear();
        if line.is_empty() {
            return None;
        }
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        self.lines.back().map(String::as_str)
    }

    pub(super) fn into_lines(mut self) -> Vec<String> {
        self.end_line();
        self.lines.into()
    }
}

/// Reads to the end of the stream.
pub(super) async fn follow(mut stream: impl AsyncRead + Unpin, worker: WorkerId, pid: u32) -> StderrTail {
    let mut tail = StderrTail::default();
    let mut buffer = vec![0; 64 << 10];
    let mut second = Instant::now();
    let (mut passed, mut dropped) = (0, 0u64);
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        if second.elapsed() >= Duration::from_secs(1) {
            if dropped > 0 {
                warn!(%worker, pid, dropped, "worker writes too much to standard error; lines were left out");
            }
            (second, passed, dropped) = (Instant::now(), 0, 0);
        }
        tail.take(&buffer[..read], |line| {
            if passed < LINES_PER_SECOND {
                passed += 1;
                info!(target: "ernied::worker", %worker, pid, "{line}");
            } else {
                dropped += 1;
            }
        });
        // A flood leaves the other tasks of this thread their turns.
        tokio::task::yield_now().await;
    }
    tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_and_only_the_last_ones_are_kept() {
        let mut tail = StderrTail::default();
        let mut told = 0;
        for i in 0..50 {
            tail.take(format!("line {i}").as_bytes(), |_| told += 1);
            tail.take(b"\n\n", |_| told += 1);
        }
        tail.take(&[b'x'; 10 * LINE_BYTES_MAX], |_| told += 1);
        assert_eq!(told, 50);
        assert!(tail.line.capacity() <= 2 * LINE_BYTES_MAX);
        let lines = tail.into_lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines[TAIL_LINES - 2], "line 49");
        assert!(lines[TAIL_LINES - 1].ends_with("xxx [...]"));
    }

    #[tokio::test]
    async fn a_flood_is_read_to_its_end_in_bounded_memory() {
        let (mut writer, reader) = tokio::io::duplex(1 << 20);
        let follower = tokio::spawn(follow(reader, WorkerId(1), 1));
        let chunk = vec![b'y'; 1 << 20];
        for _ in 0..64 {
            tokio::io::AsyncWriteExt::write_all(&mut writer, &chunk).await.expect("read on the other side");
        }
        drop(writer);
        let lines = follower.await.expect("ends with the stream").into_lines();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].len() < 2 * LINE_BYTES_MAX);
    }
}
