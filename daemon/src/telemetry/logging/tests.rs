//! Formats as existing greps expect them; rotation under load; levels at run time.

use super::*;
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use tracing::Dispatch;

pub(super) fn config(file: &Path, format: LogFormat) -> LoggingConfig {
    LoggingConfig {
        format,
        level: "info".to_owned(),
        file: Some(file.to_owned()),
        rotate_bytes: 1 << 30,
        rotate_every: None,
        rotate_keep: 1000,
        total_bytes: None,
        compress: true,
        requests: true,
        slow_request: None,
        stats: true,
    }
}

/// What lies in the log file and its old ones.
fn written(dir: &Path) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(dir).expect("listed").flatten() {
        let bytes = std::fs::read(entry.path()).expect("read");
        if entry.path().extension().is_some_and(|e| e == "gz") {
            flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut all).expect("a whole gzip file");
        } else {
            all.push_str(std::str::from_utf8(&bytes).expect("whole characters"));
        }
    }
    all
}

fn one_line(format: LogFormat) -> String {
    let dir = tempfile::tempdir().expect("temp");
    let (subscriber, logging) = Logging::build(&config(&dir.path().join("ernied.log"), format)).expect("opened");
    tracing::dispatcher::with_default(&Dispatch::new(subscriber), || {
        tracing::info!(answer = 42, "Serving on http://x")
    });
    drop(logging);
    written(dir.path())
}

#[test]
fn each_format_is_the_one_that_greps_expect() {
    let vllm = one_line(LogFormat::Vllm);
    let shape = vllm.split(['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']).collect::<String>();
    assert!(shape.starts_with("INFO - :: [tests.rs:] Serving on http://x"), "{vllm}");
    let bracket = one_line(LogFormat::Bracket);
    assert!(bracket.starts_with('[') && bracket.contains("] INFO Serving on http://x"), "{bracket}");
    let text = one_line(LogFormat::Text);
    assert!(text.contains(" INFO ernied::telemetry::logging::tests: Serving on http://x answer=42"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&one_line(LogFormat::Json)).expect("JSON");
    assert_eq!((json["message"].as_str(), json["answer"].as_i64()), (Some("Serving on http://x"), Some(42)));
}

#[test]
fn no_line_is_lost_or_torn_by_rotations_under_load() {
    const TASKS: usize = 8;
    const LINES: usize = 12_500;
    let dir = tempfile::tempdir().expect("temp");
    let mut config = config(&dir.path().join("ernied.log"), LogFormat::Bracket);
    config.rotate_bytes = 256 * 1024;
    let (subscriber, logging) = Logging::build(&config).expect("opened");
    let dispatch = Dispatch::new(subscriber);
    std::thread::scope(|scope| {
        for task in 0..TASKS {
            let dispatch = dispatch.clone();
            scope.spawn(move || {
                tracing::dispatcher::with_default(&dispatch, || {
                    for line in 0..LINES {
                        tracing::info!("line {task}-{line} end");
                    }
                });
            });
        }
        for _ in 0..20 {
            logging.control().rotate();
            std::thread::yield_now();
        }
    });
    let control = logging.control().clone();
    drop(logging);
    assert_eq!(control.dropped(), 0);
    let text = written(dir.path());
    let mut seen = BTreeSet::new();
    for line in text.lines().filter(|l| l.contains("] INFO line ")) {
        let body = line.split("] INFO line ").nth(1).and_then(|b| b.strip_suffix(" end"));
        assert!(seen.insert(body.unwrap_or_else(|| panic!("torn: {line:?}")).to_owned()), "twice: {line}");
    }
    assert_eq!(seen.len(), TASKS * LINES);
    let files = std::fs::read_dir(dir.path()).expect("listed").count();
    assert!(files > 10, "only {files} files: nothing was rotated");
}

#[test]
fn old_files_beyond_the_number_kept_go() {
    let dir = tempfile::tempdir().expect("temp");
    let mut config = config(&dir.path().join("ernied.log"), LogFormat::Bracket);
    (config.rotate_bytes, config.rotate_keep) = (4096, 3);
    let (subscriber, logging) = Logging::build(&config).expect("opened");
    tracing::dispatcher::with_default(&Dispatch::new(subscriber), || {
        for line in 0..2000 {
            tracing::info!("a line that fills the file, number {line}");
        }
    });
    drop(logging);
    assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 4, "three old ones and the current one");
}

#[test]
fn a_reopen_goes_on_in_a_new_file_of_the_same_name() {
    let dir = tempfile::tempdir().expect("temp");
    let path = dir.path().join("ernied.log");
    let (subscriber, logging) = Logging::build(&config(&path, LogFormat::Bracket)).expect("opened");
    let dispatch = Dispatch::new(subscriber);
    tracing::dispatcher::with_default(&dispatch, || tracing::info!("first"));
    // The writer thread is asked once its queue is empty: opened again by the next line at the latest.
    while !std::fs::read_to_string(&path).is_ok_and(|t| t.contains("first")) {
        std::thread::yield_now();
    }
    std::fs::rename(&path, dir.path().join("moved")).expect("as logrotate does");
    tracing::dispatcher::with_default(&dispatch, || {
        logging.control().reopen();
        tracing::info!("second");
    });
    drop(logging);
    assert!(std::fs::read_to_string(&path).expect("made anew").contains("second"));
    assert!(std::fs::read_to_string(dir.path().join("moved")).expect("kept").contains("first"));
}

#[test]
fn the_level_changes_at_run_time_and_nonsense_is_refused() {
    let dir = tempfile::tempdir().expect("temp");
    let (subscriber, logging) = Logging::build(&config(&dir.path().join("l"), LogFormat::Bracket)).expect("opened");
    tracing::dispatcher::with_default(&Dispatch::new(subscriber), || {
        tracing::debug!("hidden");
        logging.control().set_level("debug").expect("a level");
        tracing::debug!("shown");
        assert!(logging.control().set_level("info,=").is_err());
        assert_eq!(logging.control().level(), "debug");
    });
    drop(logging);
    let text = written(dir.path());
    assert!(text.contains("shown") && !text.contains("hidden"), "{text}");
}

#[test]
fn a_warning_that_repeats_becomes_a_few_lines_and_a_count() {
    let dir = tempfile::tempdir().expect("temp");
    let (subscriber, logging) = Logging::build(&config(&dir.path().join("l"), LogFormat::Bracket)).expect("opened");
    tracing::dispatcher::with_default(&Dispatch::new(subscriber), || {
        for n in 0..1000 {
            tracing::warn!("again {n}");
            tracing::info!("info is never folded {n}");
        }
    });
    let repeated = logging.control().repeated();
    drop(logging);
    let text = written(dir.path());
    assert_eq!(text.matches("WARNING again").count(), 10);
    assert_eq!(text.matches("never folded").count(), 1000);
    assert_eq!(repeated.len(), 1);
    assert_eq!(repeated[0].count, 990);
    assert!(repeated[0].place.contains("tests.rs:"), "{}", repeated[0].place);
}

#[test]
fn a_log_file_that_can_not_be_opened_is_a_clear_error() {
    let dir = tempfile::tempdir().expect("temp");
    std::fs::create_dir(dir.path().join("log")).expect("made");
    let e = Logging::build(&config(&dir.path().join("log"), LogFormat::Text)).map(|_| ()).expect_err("a folder");
    assert!(e.to_string().contains("--log-file"), "{e}");
}
