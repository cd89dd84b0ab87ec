//! `debug dump | explain`: the flight recorder's files, and the story they tell.
//!
//! [`explain`] is pure: a flight in, text out. It states figures first and conclusions last, each with the figures it rests
//! on, so that a reader can disagree.

use crate::cli::DebugAct;
use crate::client::Admin;
use crate::output;
use anyhow::{Context, Result, ensure};
use ernie_proto::admin::FlightDump;
use ernie_proto::flight::{FLIGHT_FORMAT, Flight, FlightRequest, FlightSecond, FlightStep};
use ernie_proto::ids::WorkerId;
use std::fmt::Write;

/// Seconds, steps and requests that are listed one by one.
const SECONDS_SHOWN: usize = 12;
const STEPS_SHOWN: usize = 8;
const REQUESTS_SHOWN: usize = 12;
const EVENTS_SHOWN: usize = 30;

pub(super) async fn run(admin: &Admin, json: bool, act: DebugAct) -> Result<()> {
    match act {
        DebugAct::Dump => {
            let dump: FlightDump = admin.post("/v1/debug/dump", &serde_json::json!({})).await?;
            output::show(json, &dump, |d| {
                let path = d.path.display();
                format!(
                    "{path}: {} steps, {} requests\nread it with: ernie-ctl debug explain {path}\n",
                    d.steps, d.requests
                )
            })
        }
        DebugAct::Explain { file } => {
            let bytes = std::fs::read(&file).with_context(|| format!("{} can not be read", file.display()))?;
            let flight: Flight = serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is no flight: `ernie-ctl debug dump` writes one", file.display()))?;
            ensure!(
                flight.format <= FLIGHT_FORMAT,
                "{} was written by a newer ernied ({}); use its ernie-ctl",
                file.display(),
                flight.version
            );
            output::show(json, &flight, explain)
        }
    }
}

fn explain(flight: &Flight) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "ernied {} (pid {}), written {}", flight.version, flight.pid, moment(flight.at_ms));
    let _ = writeln!(out, "why: {}", flight.reason);
    let worker = flight.worker.or_else(|| flight.steps.last().map(|s| s.worker));
    events(&mut out, flight);
    if let Some(worker) = worker {
        seconds(&mut out, flight, worker);
        steps(&mut out, flight, worker);
    }
    requests(&mut out, flight);
    let _ = writeln!(out, "\nwhat stands out");
    for finding in findings(flight, worker) {
        let _ = writeln!(out, "  - {finding}");
    }
    out
}

fn events(out: &mut String, flight: &Flight) {
    let skipped = flight.events.len().saturating_sub(EVENTS_SHOWN);
    let _ = writeln!(out, "\nwhat happened (last {} s)", flight.window_seconds);
    if flight.events.is_empty() {
        let _ = writeln!(out, "  nothing but steps");
    }
    if skipped > 0 {
        let _ = writeln!(out, "  … {skipped} earlier events");
    }
    for event in &flight.events[skipped..] {
        let worker = event.worker.map_or_else(String::new, |w| format!("{} ", WorkerId(w)));
        let _ = writeln!(out, "  {}  {:<22} {worker}{}", moment(event.at_ms), event.kind, event.text);
    }
}

fn seconds(out: &mut String, flight: &Flight, worker: u64) {
    let of: Vec<&FlightSecond> = flight.seconds.iter().filter(|s| s.worker == worker).collect();
    let Some(first) = of.first() else { return };
    let _ =
        writeln!(out, "\nthe last seconds of {} (slot {}), of {} with steps", WorkerId(worker), first.slot, of.len());
    let rows = of.iter().rev().take(SECONDS_SHOWN).rev().map(|s| {
        vec![
            moment(s.at * 1000),
            s.steps.to_string(),
            s.tokens.to_string(),
            s.prefill_tokens.to_string(),
            micros(s.step_us_sum / u64::from(s.steps.max(1))),
            micros(s.step_us_max),
            s.running.to_string(),
            s.waiting.to_string(),
            format!("{:.0} %", 100.0 * kv_used(s)),
            s.preemptions.to_string(),
            output::bytes(s.resident_bytes),
        ]
    });
    let header =
        ["", "steps", "tokens", "of prompts", "step mean", "max", "running", "waiting", "KV", "preempted", "memory"];
    indent(out, &output::table(&header, rows));
}

fn steps(out: &mut String, flight: &Flight, worker: u64) {
    let of: Vec<&FlightStep> = flight.steps.iter().filter(|s| s.worker == worker).collect();
    if of.is_empty() {
        return;
    }
    let _ = writeln!(out, "\nits last steps");
    let rows = of.iter().rev().take(STEPS_SHOWN).rev().map(|s| {
        vec![
            moment(s.at_ms),
            micros(s.step_us),
            format!("{} tokens ({} of prompts)", s.tokens, s.prefill_tokens),
            format!("{} sequences", s.sequences),
            format!("{} running, {} waiting", s.running, s.waiting),
            format!("{} blocks free", s.blocks_free),
        ]
    });
    indent(out, &output::table(&["", "took", "", "", "", ""], rows));
}

fn requests(out: &mut String, flight: &Flight) {
    let (ended, under_way): (Vec<_>, Vec<_>) = flight.requests.iter().partition(|r| r.ended_ms.is_some());
    let mut ends = std::collections::BTreeMap::<&str, usize>::new();
    for request in &ended {
        *ends.entry(request.finished.as_deref().unwrap_or("?")).or_default() += 1;
    }
    let ends: Vec<String> = ends.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let _ = writeln!(out, "\nrequests: {} ended ({}), {} under way", ended.len(), ends.join(", "), under_way.len());
    let ago = |at: Option<u64>| {
        at.map_or_else(|| "never".to_owned(), |at| format!("{:.1} s", flight.at_ms.saturating_sub(at) as f64 / 1e3))
    };
    let rows = under_way.iter().take(REQUESTS_SHOWN).map(|r| {
        vec![
            r.id.clone(),
            r.key.clone(),
            ago(Some(r.arrived_ms)),
            r.prompt_tokens.to_string(),
            format!("{} of {}", r.generated, u64::from(r.max_tokens) * u64::from(r.choices.max(1))),
            ago(r.started_ms),
            ago(r.last_token_ms),
        ]
    });
    if !under_way.is_empty() {
        let header = ["id", "key", "arrived before", "prompt", "generated", "begun before", "last token before"];
        indent(out, &output::table(&header, rows));
    }
    if under_way.len() > REQUESTS_SHOWN {
        let _ = writeln!(out, "  … and {} more (--json has all)", under_way.len() - REQUESTS_SHOWN);
    }
}

/// Conclusions, each with the figures it rests on. Never empty.
fn findings(flight: &Flight, worker: Option<u64>) -> Vec<String> {
    let mut found = Vec::new();
    let lost = flight.events.iter().rev().find(|e| e.kind == "worker.lost" && e.worker == worker);
    let Some(worker) = worker else {
        return vec!["no worker made a step within the window: nothing was asked of the engine".to_owned()];
    };
    let of: Vec<&FlightStep> = flight.steps.iter().filter(|s| s.worker == worker && s.tokens > 0).collect();
    if let (Some(lost), Some(last)) = (lost, of.last()) {
        let silent = lost.at_ms.saturating_sub(last.at_ms);
        let before = &of[..of.len() - 1];
        let mean = before.iter().map(|s| s.step_us).sum::<u64>() / (before.len() as u64).max(1);
        let what = if last.running + last.waiting == 0 {
            "it was idle, with nothing to do"
        } else if silent > 20 * (mean / 1000).max(50) {
            "it stood still rather than being slow"
        } else {
            "it was at work until the end"
        };
        found.push(format!(
            "its last step came {:.1} s before it was given up; its {} steps before took {} on average: {what}",
            silent as f64 / 1e3,
            before.len(),
            micros(mean)
        ));
    } else if lost.is_some() {
        found.push("it made no step within the window: it was lost idle, or while loading".to_owned());
    }
    if let Some(lost) = lost {
        found.extend(cause(&lost.text));
    }
    let deaths = flight.events.iter().filter(|e| e.kind == "worker.lost").count();
    if deaths > 1 {
        found.push(format!("{deaths} workers were lost within the window: look at what they have in common above"));
    }
    let seconds: Vec<&FlightSecond> = flight.seconds.iter().filter(|s| s.worker == worker).collect();
    if let (Some(first), Some(last)) = (seconds.first(), seconds.last()) {
        let (from, to) = (first.resident_bytes, last.resident_bytes);
        if to > from + from / 5 && to - from > 64 << 20 {
            found.push(format!("its memory rose from {} to {}", output::bytes(from), output::bytes(to)));
        }
        if kv_used(last) > 0.95 {
            found.push(format!(
                "KV blocks were used up ({:.0} %), {} preemptions since load: long sequences, or too many at once",
                100.0 * kv_used(last),
                last.preemptions
            ));
        }
        let slowest = seconds.iter().max_by_key(|s| s.step_us_max).map_or(0, |s| s.step_us_max);
        if slowest > 1_000_000 {
            found.push(format!("its slowest step took {}: long prompts, or a busy machine", micros(slowest)));
        }
        if last.waiting > last.running.max(8) {
            found.push(format!("{} sequences waited while {} ran", last.waiting, last.running));
        }
    }
    let oldest = flight.requests.iter().filter(|r| r.ended_ms.is_none()).min_by_key(|r| r.arrived_ms);
    found.extend(oldest.map(|r| oldest_request(r, flight.at_ms)));
    if flight.events.iter().any(|e| e.kind == "requests.resumed") {
        found.push("its requests went on at another worker".to_owned());
    }
    if found.is_empty() {
        found.push("nothing: steps came, none was slow, and no worker was lost".to_owned());
    }
    found
}

fn oldest_request(request: &FlightRequest, now: u64) -> String {
    format!(
        "the oldest request under way is {} ({} prompt tokens), {:.1} s old",
        request.id,
        request.prompt_tokens,
        now.saturating_sub(request.arrived_ms) as f64 / 1e3
    )
}

/// What the end of a process says about its cause.
fn cause(reason: &str) -> Option<String> {
    let sentence = if reason.contains("stalled") {
        "it was ended by the supervisor because it stalled: stopped from outside (SIGSTOP, a frozen cgroup, a debugger), \
         swapped out, waiting for a disk, or turning in a loop"
    } else if reason.contains("SIGKILL") {
        "SIGKILL from outside is the kernel's out-of-memory killer more often than not: `dmesg | grep -i oom`, then lower \
         engine.memory_utilization"
    } else if reason.contains("SIGBUS") {
        "SIGBUS: a model file was cut short while it was mapped, or huge pages ran out; `ernie-ctl doctor model`"
    } else if reason.contains("SIGILL") {
        "SIGILL: an instruction this processor does not have; ERNIED_ISA=scalar tells whether it is a kernel's fault"
    } else if reason.contains("SIGSEGV") || reason.contains("SIGABRT") || reason.contains("exit status 101") {
        "a bug in the worker: its last lines are in `ernie-ctl audit list --act worker.lost`; please report them with this file"
    } else {
        return None;
    };
    Some(sentence.to_owned())
}

fn kv_used(second: &FlightSecond) -> f64 {
    let total = f64::from(second.blocks_total.max(1));
    f64::from(second.blocks_total.saturating_sub(second.blocks_free)) / total
}

fn micros(us: u64) -> String {
    output::seconds(us as f64 / 1e6)
}

/// Local time of day with milliseconds.
fn moment(ms: u64) -> String {
    jiff::Timestamp::from_millisecond(i64::try_from(ms).unwrap_or(i64::MAX))
        .map(|t| t.to_zoned_datetime(jiff::tz::TimeZone::system()).strftime("%m-%d %H:%M:%S.%3f").to_string())
        .unwrap_or_else(|_| ms.to_string())
}

fn indent(out: &mut String, table: &str) {
    for line in table.lines() {
        let _ = writeln!(out, "  {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ernie_proto::flight::FlightEvent;

    /// A worker that makes a step every five milliseconds until second 10, and is given up ten seconds later.
    fn stall(reason: &str, silent_ms: u64) -> Flight {
        let end = 1_700_000_010_000;
        let step = |n: u64| FlightStep {
            at_ms: end - 5 * (1000 - n),
            worker: 3,
            step_us: 5000,
            tokens: 4,
            running: 4,
            ..FlightStep::default()
        };
        Flight {
            format: FLIGHT_FORMAT,
            at_ms: end + silent_ms,
            worker: Some(3),
            reason: format!("worker w3 was lost: {reason}"),
            events: vec![FlightEvent {
                at_ms: end + silent_ms,
                kind: "worker.lost".to_owned(),
                worker: Some(3),
                text: reason.to_owned(),
            }],
            steps: (0..1000).map(step).collect(),
            seconds: vec![FlightSecond {
                at: end / 1000,
                worker: 3,
                steps: 200,
                blocks_total: 100,
                blocks_free: 2,
                ..FlightSecond::default()
            }],
            requests: vec![FlightRequest { id: "abc".to_owned(), arrived_ms: end - 1000, ..FlightRequest::default() }],
            ..Flight::default()
        }
    }

    #[test]
    fn a_stall_reads_as_standing_still() {
        let text = explain(&stall("it stalled: it finished no step for 10s with work queued", 10_000));
        for expected in
            ["stood still", "10.0 s before", "SIGSTOP", "KV blocks were used up (98 %)", "abc", "11.0 s old", "w3"]
        {
            assert!(text.contains(expected), "no {expected:?} in:\n{text}");
        }
    }

    #[test]
    fn a_kill_reads_as_a_sudden_end() {
        let text = explain(&stall("it closed its socket (killed by signal 9 (SIGKILL: by …))", 3));
        for expected in ["at work until the end", "out-of-memory"] {
            assert!(text.contains(expected), "no {expected:?} in:\n{text}");
        }
    }

    #[test]
    fn an_empty_flight_says_that_there_was_nothing() {
        let text = explain(&Flight::default());
        assert!(text.contains("nothing was asked of the engine"), "{text}");
    }
}
