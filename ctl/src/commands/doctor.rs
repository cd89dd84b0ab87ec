//! `doctor`: looks for what is wrong and says what mends it. Works with the daemon down.

use crate::cli::DoctorArgs;
use crate::client::{Admin, Api};
use crate::output::{bad, bytes, good, seconds, show, warn};
use anyhow::Result;
use ernie_proto::admin::Status;
use hyper::Method;
use serde::Serialize;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

/// Read for the speed of the model's disk.
const PROBE_BYTES: u64 = 64 << 20;
/// Below this the model loads so slowly that the cause should be known.
const SLOW_BYTES_PER_SECOND: f64 = 200e6;
const FILES_WANTED: u64 = 4096;
const SPACE_WANTED: u64 = 1 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Grade {
    Good,
    Note,
    Bad,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
struct Finding {
    check: &'static str,
    grade: Grade,
    found: String,
    /// Why it matters. Empty for what is good.
    matters: String,
    /// The command that mends it.
    mend: String,
}

fn ok(check: &'static str, found: impl Into<String>) -> Finding {
    Finding { check, grade: Grade::Good, found: found.into(), matters: String::new(), mend: String::new() }
}

fn note(check: &'static str, found: impl Into<String>, matters: &str, mend: impl Into<String>) -> Finding {
    Finding { check, grade: Grade::Note, found: found.into(), matters: matters.to_owned(), mend: mend.into() }
}

fn wrong(check: &'static str, found: impl Into<String>, matters: &str, mend: impl Into<String>) -> Finding {
    Finding { grade: Grade::Bad, ..note(check, found, matters, mend) }
}

pub(super) async fn run(admin: &Admin, json: bool, args: DoctorArgs) -> Result<ExitCode> {
    let status: Result<Status> = admin.get("/v1/status").await;
    let model = args.model.clone().or_else(|| status.as_ref().ok().and_then(|s| Some(s.model.as_ref()?.dir.clone())));
    let mut findings = Vec::new();
    match &status {
        Ok(s) => {
            findings.push(daemon(s));
            findings.extend(crashes(s));
            findings.push(api(s).await);
        }
        Err(e) => findings.push(note(
            "daemon",
            format!("{e:#}"),
            "the other checks work without it",
            "systemctl start ernied",
        )),
    }
    findings.push(port(args.port, status.as_ref().ok()));
    match &model {
        Some(dir) => {
            findings.extend(model_files(dir));
            findings.push(disk(dir));
            findings.push(memory(dir));
        }
        None => findings.push(note(
            "model",
            "no model folder is known",
            "it can not be looked at",
            "ernie-ctl doctor --model DIR",
        )),
    }
    findings.push(cpu(status.as_ref().ok()));
    findings.push(limits(status.as_ref().ok()));
    findings.push(clock());
    findings.extend(permissions(admin.socket(), args.state_dir.as_deref()));
    findings.push(space(args.state_dir.as_deref().unwrap_or(Path::new("/"))));
    if let Some(only) = &args.check {
        findings.retain(|f| f.check == only);
        if findings.is_empty() {
            anyhow::bail!("there is no check {only:?}; see `ernie-ctl doctor --help`");
        }
    }
    let worst_is_bad = findings.iter().any(|f| f.grade == Grade::Bad);
    show(json, &findings, |f| people(f))?;
    Ok(if worst_is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn people(findings: &[Finding]) -> String {
    let mut out = String::new();
    for f in findings {
        let mark = match f.grade {
            Grade::Good => good("ok  "),
            Grade::Note => warn("note"),
            Grade::Bad => bad("BAD "),
        };
        out.push_str(&format!("{mark} {:<12} {}\n", f.check, f.found));
        if f.grade != Grade::Good {
            out.push_str(&format!("                  why: {}\n                  do:  {}\n", f.matters, f.mend));
        }
    }
    out
}

fn daemon(s: &Status) -> Finding {
    if s.ready {
        return ok("daemon", format!("{} {} serves, up {}", s.version, s.pid, seconds(s.uptime_seconds)));
    }
    let reason = s.reason.clone().unwrap_or_default();
    wrong(
        "daemon",
        format!("{}: {reason}", s.state),
        "requests are refused or held",
        "ernie-ctl status; journalctl -u ernied -n 50",
    )
}

fn crashes(s: &Status) -> Vec<Finding> {
    let lost: Vec<_> = s.workers.iter().filter_map(|w| w.last_failure.as_ref().map(|f| (w, f))).collect();
    if lost.is_empty() {
        return vec![ok("crashes", "no worker was lost since the start")];
    }
    lost.iter()
        .map(|(w, f)| {
            let matters = "requests went on elsewhere, but each death costs a load of the model";
            let mend = match f.reason.as_str() {
                r if r.contains("SIGKILL") => {
                    "dmesg | grep -i 'out of memory'; lower --gpu-memory-utilization or --max-num-seqs"
                }
                r if r.contains("SIGBUS") => "check the model's disk; a file was cut short under the running daemon",
                _ => "ernie-ctl workers; ernie-ctl audit list --act worker",
            };
            note("crashes", format!("slot {}: {} ({} restarts)", w.slot, f.reason, w.restarts), matters, mend)
        })
        .collect()
}

async fn api(s: &Status) -> Finding {
    let Some(url) = s.listening.first() else {
        return note("api", "the daemon listens nowhere", "no client can come", "--port 8000");
    };
    let began = Instant::now();
    let asked = async {
        let api = Api::new(url, None)?;
        api.json(Method::GET, "/version", None).await
    };
    match tokio::time::timeout(Duration::from_secs(5), asked).await {
        Ok(Ok(_)) => ok("api", format!("{url} answers in {}", seconds(began.elapsed().as_secs_f64()))),
        Ok(Err(e)) => wrong(
            "api",
            format!("{url}: {e:#}"),
            "clients can not reach it from here",
            "check --host, firewalls, network namespaces",
        ),
        Err(_) => wrong(
            "api",
            format!("{url} does not answer within 5 s"),
            "clients time out",
            "ernie-ctl top; is the machine out of memory or CPU?",
        ),
    }
}

fn port(port: u16, status: Option<&Status>) -> Finding {
    if status.is_some_and(|s| s.listening.iter().any(|u| u.ends_with(&format!(":{port}")))) {
        return ok("port", format!("{port} is held by the daemon"));
    }
    match std::net::TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) if status.is_some() => {
            note("port", format!("nobody listens on {port}"), "the daemon uses another port", "ernie-ctl status")
        }
        Ok(_) => ok("port", format!("{port} is free")),
        Err(e) => wrong(
            "port",
            format!("{port}: {e}"),
            "ernied can not listen there",
            format!("ss -ltnp 'sport = :{port}' names the holder; stop it or start ernied with --port"),
        ),
    }
}

/// Index, shards, tokenizer, pickles: what names and headers show.
fn model_files(dir: &Path) -> Vec<Finding> {
    let mut out = Vec::new();
    if !dir.is_dir() {
        let mend = "ernied check-config --model DIR; models are never downloaded";
        return vec![wrong("model", format!("{} is not a folder", dir.display()), "there is nothing to load", mend)];
    }
    for name in ["config.json", "tokenizer.json"] {
        if !dir.join(name).is_file() {
            out.push(wrong(
                "model",
                format!("{name} is missing"),
                "the model does not load without it",
                format!("copy {name} of the same revision into {}", dir.display()),
            ));
        }
    }
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|d| d.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    let shards: Vec<&String> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if shards.is_empty() {
        out.push(wrong(
            "model",
            "there is no *.safetensors",
            "weights in pickle files can run code and are never opened",
            "convert them with transformers' save_pretrained(safe_serialization=True)",
        ));
    }
    for shard in &shards {
        if let Err(problem) = safetensors_header(&dir.join(shard)) {
            out.push(wrong(
                "model",
                format!("{shard}: {problem}"),
                "the model does not load",
                "fetch the file again and compare its SHA-256",
            ));
        }
    }
    if let Ok(text) = fs::read_to_string(dir.join("model.safetensors.index.json")) {
        let index: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let mut wanted: Vec<&str> =
            index["weight_map"].as_object().into_iter().flat_map(|m| m.values()).filter_map(|v| v.as_str()).collect();
        wanted.sort_unstable();
        wanted.dedup();
        for absent in wanted.iter().filter(|w| !names.iter().any(|n| n == *w)) {
            out.push(wrong(
                "model",
                format!("the index names {absent}, which is not there"),
                "a part of the weights is missing",
                format!("fetch {absent}"),
            ));
        }
        for extra in shards.iter().filter(|s| !wanted.contains(&s.as_str())) {
            out.push(note(
                "model",
                format!("{extra} is in no index"),
                "it may belong to another revision",
                format!("rm {}", dir.join(extra).display()),
            ));
        }
    }
    for stale in names.iter().filter(|n| n.ends_with(".py") || n.ends_with(".bin")) {
        out.push(note(
            "model",
            format!("{stale} is ignored"),
            "no code and no pickle of a model folder is ever read",
            "nothing; it may be removed",
        ));
    }
    if !names.iter().any(|n| n == "ernie-manifest.json" || n == "SHA256SUMS") {
        out.push(note(
            "model",
            "there is no manifest",
            "files can not be verified before a load",
            format!("cd {} && sha256sum * > SHA256SUMS", dir.display()),
        ));
    }
    if out.is_empty() {
        out.push(ok("model", format!("{}: {} shards, tokenizer and config in place", dir.display(), shards.len())));
    }
    out
}

/// The length field, the header, and the file's size against each other.
fn safetensors_header(path: &Path) -> Result<(), String> {
    let length = fs::metadata(path).map_err(|e| e.to_string())?.len();
    let mut file = fs::File::open(path).map_err(|e| e.to_string())?;
    let mut head = [0u8; 8];
    file.read_exact(&mut head).map_err(|_| format!("has only {length} bytes"))?;
    if head.starts_with(b"version ") {
        return Err("is a Git LFS pointer, not the file itself".to_owned());
    }
    let header = u64::from_le_bytes(head);
    if header > length.saturating_sub(8) || header > 100 << 20 {
        return Err(format!("says its header has {header} bytes, the file has {length}"));
    }
    let mut json = vec![0; usize::try_from(header).map_err(|e| e.to_string())?];
    file.read_exact(&mut json).map_err(|e| e.to_string())?;
    let json: serde_json::Value = serde_json::from_slice(&json).map_err(|e| format!("has a broken header: {e}"))?;
    let end =
        json.as_object().into_iter().flatten().filter_map(|(_, t)| t["data_offsets"][1].as_u64()).max().unwrap_or(0);
    match (8 + header + end).cmp(&length) {
        std::cmp::Ordering::Greater => Err(format!("is cut short: {length} bytes, {} wanted", 8 + header + end)),
        std::cmp::Ordering::Less => Err(format!("has {} bytes too many at its end", length - 8 - header - end)),
        std::cmp::Ordering::Equal => Ok(()),
    }
}

fn weight_bytes(dir: &Path) -> (u64, Option<PathBuf>) {
    let mut sum = 0;
    let mut largest: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let length = fs::metadata(&path).map_or(0, |m| m.len());
            sum += length;
            if largest.as_ref().is_none_or(|(l, _)| length > *l) {
                largest = Some((length, path));
            }
        }
    }
    (sum, largest.map(|(_, p)| p))
}

/// Reads a part of the largest shard from its middle; the page cache may flatter.
fn disk(dir: &Path) -> Finding {
    let (total, Some(largest)) = weight_bytes(dir) else { return note("disk", "nothing to read", "", "") };
    let measured = (|| -> std::io::Result<f64> {
        use std::os::unix::fs::FileExt;
        let file = fs::File::open(&largest)?;
        let length = file.metadata()?.len();
        let wanted = PROBE_BYTES.min(length);
        // What was written or read lately is in memory; ask for the cold end of the file and drop what this read brings.
        let start = length - wanted;
        rustix::fs::fadvise(&file, start, std::num::NonZeroU64::new(wanted), rustix::fs::Advice::DontNeed)?;
        let mut buffer = vec![0; 1 << 20];
        let began = Instant::now();
        let mut at = start;
        while at < length {
            let n = file.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            at += n as u64;
        }
        Ok((at - start) as f64 / began.elapsed().as_secs_f64().max(1e-6))
    })();
    match measured {
        Ok(speed) => {
            let found = format!(
                "{}/s from {}; {} of weights load in about {}",
                bytes(speed as u64),
                dir.display(),
                bytes(total),
                seconds(total as f64 / speed)
            );
            if speed < SLOW_BYTES_PER_SECOND && total as f64 / speed > 10.0 {
                note("disk", found, "starts, restarts and swaps wait for it", "move the model to a local NVMe disk")
            } else {
                ok("disk", found)
            }
        }
        Err(e) => wrong(
            "disk",
            format!("{}: {e}", largest.display()),
            "the weights can not be read",
            "check the disk and permissions",
        ),
    }
}

fn memory(dir: &Path) -> Finding {
    let (weights, _) = weight_bytes(dir);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let available = field("MemAvailable");
    let found =
        format!("weights {} against {} available of {}", bytes(weights), bytes(available), bytes(field("MemTotal")));
    if weights + weights / 4 > available {
        wrong(
            "memory",
            found,
            "weights, KV cache and workspace do not fit; the kernel would kill the worker",
            "free memory, or use --quantization int8",
        )
    } else {
        ok("memory", found)
    }
}

fn cpu(status: Option<&Status>) -> Finding {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // Arm's kernels name them otherwise: asimddp are the dot products of bytes.
    let flags = info.lines().find(|l| l.starts_with("flags") || l.starts_with("Features")).unwrap_or("").to_owned();
    let used_by_us =
        ["avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "asimddp"];
    let has: Vec<&str> = used_by_us.into_iter().filter(|f| flags.split_whitespace().any(|w| w == *f)).collect();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let used = status.and_then(|s| s.model.as_ref()).map(|m| format!("; in use: {}", m.isa)).unwrap_or_default();
    let found = format!("{cores} cores, {}{used}", has.join(" "));
    if cfg!(target_arch = "x86_64") && !has.contains(&"avx2") {
        note(
            "cpu",
            found,
            "without AVX2 the portable kernels run, several times slower",
            "use a machine with AVX2 or AVX-512",
        )
    } else {
        ok("cpu", found)
    }
}

fn limits(status: Option<&Status>) -> Finding {
    let pid = status.map_or_else(|| "self".to_owned(), |s| s.pid.to_string());
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap_or("");
    let soft = line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(u64::MAX);
    if soft < FILES_WANTED {
        note(
            "limits",
            format!("{soft} open files"),
            "each client takes one",
            "LimitNOFILE=65536 in the unit, or ulimit -n 65536",
        )
    } else {
        ok("limits", format!("{soft} open files"))
    }
}

fn clock() -> Finding {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    // 2026-01-01: this program is not older.
    if now < 1_767_225_600 {
        wrong(
            "clock",
            "the clock is in the past",
            "keys expire, audit and log times mislead",
            "timedatectl set-ntp true",
        )
    } else {
        ok("clock", crate::output::moment(i64::try_from(now).unwrap_or(0)))
    }
}

fn permissions(socket: &Path, state_dir: Option<&Path>) -> Vec<Finding> {
    use std::os::unix::fs::PermissionsExt;
    let mut out = Vec::new();
    let mode = |path: &Path| fs::metadata(path).map(|m| m.permissions().mode() & 0o777);
    match mode(socket) {
        Ok(m) if m & 0o007 != 0 => out.push(wrong(
            "permissions",
            format!("{} has mode {m:o}", socket.display()),
            "everybody on this machine may try to control the daemon",
            format!("chmod 0660 {}", socket.display()),
        )),
        Ok(m) => out.push(ok("permissions", format!("{} has mode {m:o}", socket.display()))),
        Err(_) => {}
    }
    if let Some(dir) = state_dir {
        let store = dir.join("audit.db");
        if mode(&store).is_ok_and(|m| m & 0o077 != 0) {
            out.push(wrong(
                "permissions",
                format!("{} can be read by others", store.display()),
                "it holds key hashes and who did what",
                format!("chmod 0600 {}", store.display()),
            ));
        }
    }
    out
}

fn space(dir: &Path) -> Finding {
    match rustix::fs::statvfs(dir) {
        Ok(v) => {
            let free = v.f_bavail * v.f_frsize;
            let found = format!("{} free below {}", bytes(free), dir.display());
            if free < SPACE_WANTED {
                wrong(
                    "space",
                    found,
                    "log lines are dropped and changes refused when the disk is full",
                    "free space; ernie-ctl logs rotate; lower logging.rotate_keep",
                )
            } else {
                ok("space", found)
            }
        }
        Err(e) => note("space", format!("{}: {e}", dir.display()), "it can not be looked at", "check the path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(dir: &Path, name: &str, bytes: &[u8]) {
        fs::write(dir.join(name), bytes).expect("written");
    }

    #[test]
    fn broken_shards_are_named_with_their_fault() {
        let dir = tempfile::tempdir().expect("temp");
        let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let mut whole = (header.len() as u64).to_le_bytes().to_vec();
        whole.extend_from_slice(header);
        whole.extend_from_slice(&[0; 4]);
        for (name, bytes, fault) in [
            ("good.safetensors", whole.clone(), None),
            ("cut.safetensors", whole[..whole.len() - 1].to_vec(), Some("cut short")),
            ("long.safetensors", [whole.as_slice(), &[1]].concat(), Some("too many")),
            ("lfs.safetensors", b"version https://git-lfs".to_vec(), Some("LFS")),
            ("huge.safetensors", u64::MAX.to_le_bytes().to_vec(), Some("header")),
            ("tiny.safetensors", vec![1, 2], Some("only 2 bytes")),
        ] {
            shard(dir.path(), name, &bytes);
            let result = safetensors_header(&dir.path().join(name));
            match fault {
                None => assert_eq!(result, Ok(()), "{name}"),
                Some(words) => assert!(result.clone().is_err_and(|e| e.contains(words)), "{name}: {result:?}"),
            }
        }
    }

    #[test]
    fn an_index_that_names_absent_shards_is_found() {
        let dir = tempfile::tempdir().expect("temp");
        shard(dir.path(), "model.safetensors.index.json", br#"{"weight_map":{"a":"model-1.safetensors"}}"#);
        let findings = model_files(dir.path());
        assert!(
            findings.iter().any(|f| f.grade == Grade::Bad && f.found.contains("model-1.safetensors")),
            "{findings:?}"
        );
    }
}
