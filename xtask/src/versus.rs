//! `cargo xtask versus`: this tree's ernied against any OpenAI-compatible server, interleaved in the same minutes.
//!
//! Shared machines change their memory bandwidth by a factor of two within a minute, so a figure without its peer's figure
//! from the same run says nothing. Each round measures ours, then theirs, at every level of users; while one is
//! measured the peers are stopped (SIGSTOP), because some spin when idle; ours parks its threads, and a daemon that was
//! stopped would rightly ask whether its worker still lives. Ratios are of the medians over the rounds.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use xshell::{Shell, cmd};

pub(crate) const USAGE: &str = "\
cargo xtask versus --model DIR --peer NAME=COMMAND [--peer …] [options]

  --model DIR          model folder that ours serves
  --ours \"FLAGS\"       more flags for `ernied serve` (e.g. \"--quantization int8\")
  --peer NAME=COMMAND  a server to start, with {port} where its port goes, e.g.
                       --peer 'llama=llama-server -m f.gguf -t 2 -np 16 -c 8192 --port {port}'
  --peer-url NAME=URL  a server that runs already (it is not stopped in between)
  --users 1,16,32      levels (default 1,16,32)
  --input 320          prompt tokens
  --output 64          generated tokens
  --requests 2         requests per user and level (at least 8 in all)
  --rounds 3           repetitions
";

/// A start may load gigabytes from a cold disk.
const START_PATIENCE: Duration = Duration::from_secs(300);

const OUR_PORT: u16 = 18_100;

struct Options {
    model: String,
    ours: Vec<String>,
    peers: Vec<(String, String)>,
    urls: Vec<(String, String)>,
    users: Vec<u32>,
    input: u32,
    output: u32,
    requests: u32,
    rounds: u32,
}

/// One server of the comparison.
struct Contender {
    name: String,
    url: String,
    process: Option<Child>,
}

impl Drop for Contender {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            signal(process, "CONT");
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

pub(crate) fn run(sh: &Shell, arguments: &[String]) -> Result<()> {
    let options = parse(arguments)?;
    cmd!(sh, "cargo build --release --locked -p ernied -p ernie-ctl").run()?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh.current_dir().join("target"), PathBuf::from);
    let release = target.join("release");
    let state = sh.create_temp_dir()?;
    let mut contenders = Vec::new();
    let port = OUR_PORT.to_string();
    let mut ours = start(release.join("ernied").to_str().context("path")?);
    ours.args(["serve", &options.model, "--host", "127.0.0.1", "--port", &port]);
    ours.arg("--state-dir").arg(state.path()).arg("--admin-socket").arg(state.path().join("admin.sock"));
    ours.args(&options.ours);
    contenders.push(launch("ernied", ours, OUR_PORT)?);
    for (i, (name, command)) in options.peers.iter().enumerate() {
        let port = OUR_PORT + 1 + u16::try_from(i)?;
        let command = command.replace("{port}", &port.to_string());
        let mut words = command.split_whitespace();
        let mut peer = start(words.next().context("an empty peer command")?);
        peer.args(words);
        contenders.push(launch(name, peer, port)?);
    }
    for (name, url) in &options.urls {
        contenders.push(Contender { name: name.clone(), url: url.clone(), process: None });
    }

    let ctl = release.join("ernie-ctl");
    // Prompts that no earlier run has left in a peer's prefix cache.
    let first_seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let mut results: BTreeMap<(u32, usize), Vec<Value>> = BTreeMap::new();
    for round in 0..options.rounds {
        for &users in &options.users {
            for (i, contender) in contenders.iter().enumerate() {
                for other in peers(&contenders) {
                    signal(other, "STOP");
                }
                if let Some(process) = &contender.process {
                    signal(process, "CONT");
                }
                let requests = (users * options.requests).max(8).to_string();
                let (input, output, users_text) =
                    (options.input.to_string(), options.output.to_string(), users.to_string());
                let seed = (first_seed + u64::from(round) * 1_000_003 + u64::from(users) * 7919).to_string();
                let url = &contender.url;
                let text = cmd!(sh, "{ctl} --json bench --url {url} --concurrency {users_text} --input {input} --output {output} --requests {requests} --seed {seed}")
                    .quiet()
                    .read()?;
                let report: Value = serde_json::from_str(&text)?;
                let report = report.get(0).cloned().unwrap_or(report);
                eprintln!(
                    "round {} users {users:>3} {:<12} {:>8.1} tok/s  TTFT p50 {:>7.0} ms  gap p50 {:>6.1} ms p99 {:>8.1} ms",
                    round + 1,
                    contender.name,
                    number(&report, &["output_tokens_per_second"]),
                    number(&report, &["ttft_ms", "p50"]),
                    number(&report, &["itl_ms", "p50"]),
                    number(&report, &["itl_ms", "p99"]),
                );
                results.entry((users, i)).or_default().push(report);
            }
        }
    }
    print_table(&contenders, &options, &results);
    Ok(())
}

/// The processes of all but ours, which comes first.
fn peers(contenders: &[Contender]) -> impl Iterator<Item = &Child> {
    contenders.iter().skip(1).filter_map(|c| c.process.as_ref())
}

fn print_table(contenders: &[Contender], options: &Options, results: &BTreeMap<(u32, usize), Vec<Value>>) {
    println!(
        "| users | server | out tok/s | ours / theirs | TTFT p50 ms | TTFT p99 ms | gap p50 ms | gap p99 ms |\n|---:|---|---:|---:|---:|---:|---:|---:|"
    );
    for &users in &options.users {
        let median_of = |i: usize, path: &[&str]| {
            let mut values: Vec<f64> =
                results.get(&(users, i)).into_iter().flatten().map(|r| number(r, path)).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let ours = median_of(0, &["output_tokens_per_second"]);
        for (i, contender) in contenders.iter().enumerate() {
            let rate = median_of(i, &["output_tokens_per_second"]);
            println!(
                "| {users} | {} | {rate:.1} | {:.2} | {:.0} | {:.0} | {:.1} | {:.1} |",
                contender.name,
                ours / rate,
                median_of(i, &["ttft_ms", "p50"]),
                median_of(i, &["ttft_ms", "p99"]),
                median_of(i, &["itl_ms", "p50"]),
                median_of(i, &["itl_ms", "p99"]),
            );
        }
    }
}

fn number(report: &Value, path: &[&str]) -> f64 {
    path.iter().fold(report, |v, key| &v[*key]).as_f64().unwrap_or(f64::NAN)
}

#[allow(clippy::disallowed_methods, reason = "xtask is no part of the daemon")]
fn start(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn launch(name: &str, mut command: Command, port: u16) -> Result<Contender> {
    let process = command.spawn().with_context(|| format!("{name} does not start: {command:?}"))?;
    let mut contender =
        Contender { name: name.to_owned(), url: format!("http://127.0.0.1:{port}"), process: Some(process) };
    let begin = Instant::now();
    while !healthy(port) {
        if let Some(status) = contender.process.as_mut().map(Child::try_wait).transpose()?.flatten() {
            bail!("{name} ended with {status} before it was healthy: {command:?}");
        }
        ensure!(begin.elapsed() < START_PATIENCE, "{name} is not healthy after {START_PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{name} healthy after {:.2} s", begin.elapsed().as_secs_f64());
    Ok(contender)
}

/// A bare `GET /health`: this program needs no HTTP client for more.
fn healthy(port: u16) -> bool {
    use std::io::{Read, Write};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
    if stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").is_err() {
        return false;
    }
    let mut head = [0u8; 12];
    stream.read_exact(&mut head).is_ok() && &head[9..12] == b"200"
}

/// To the server and everything it started.
#[allow(clippy::disallowed_methods, reason = "xtask is no part of the daemon")]
fn signal(process: &Child, name: &str) {
    let pid = process.id().to_string();
    let _ = Command::new("pkill").args([&format!("-{name}"), "-P", &pid]).status();
    let _ = Command::new("kill").args([&format!("-{name}"), &pid]).status();
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        model: String::new(),
        ours: Vec::new(),
        peers: Vec::new(),
        urls: Vec::new(),
        users: vec![1, 16, 32],
        input: 320,
        output: 64,
        requests: 2,
        rounds: 3,
    };
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let value = rest.next().with_context(|| format!("{flag} needs a value\n{USAGE}"))?;
        let pair = || {
            value
                .split_once('=')
                .map(|(n, v)| (n.to_owned(), v.to_owned()))
                .with_context(|| format!("{flag} NAME=VALUE"))
        };
        match flag.as_str() {
            "--model" => options.model = value.clone(),
            "--ours" => options.ours = value.split_whitespace().map(str::to_owned).collect(),
            "--peer" => options.peers.push(pair()?),
            "--peer-url" => options.urls.push(pair()?),
            "--users" => options.users = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--input" => options.input = value.parse()?,
            "--output" => options.output = value.parse()?,
            "--requests" => options.requests = value.parse()?,
            "--rounds" => options.rounds = value.parse()?,
            _ => bail!("unknown option {flag}\n{USAGE}"),
        }
    }
    ensure!(!options.model.is_empty(), "--model is needed\n{USAGE}");
    Ok(options)
}
