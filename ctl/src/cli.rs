//! The command line. Every verb has an example in its help.

use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Looks after a running ernied.
#[derive(Debug, Parser)]
#[command(name = "ernie-ctl", version, max_term_width = 110)]
pub(crate) struct Cli {
    /// Admin socket of the daemon [default: the one of this user's daemon, else /run/ernied/admin.sock]
    #[arg(long, global = true, env = ernie_proto::admin::SOCKET_VARIABLE, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Print JSON, for programs
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Everything at a glance: model, workers, queue, KV, throughput
    #[command(
        after_help = "Examples:\n  ernie-ctl status\n  ernie-ctl status --json | jq .kv.usage\n  ernie-ctl status --check && echo ready"
    )]
    Status {
        /// Exit with 4 when the daemon is not ready
        #[arg(long)]
        check: bool,
        /// Draw again every N seconds
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
        watch: Option<f64>,
    },
    /// A live screen: throughput, queue, KV cache, workers, rollout
    Top {
        #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
        interval: f64,
    },
    /// The worker processes
    #[command(
        alias = "worker",
        after_help = "Examples:\n  ernie-ctl workers\n  ernie-ctl worker list\n  ernie-ctl worker restart w1\n  ernie-ctl worker drain w1"
    )]
    Workers {
        #[command(subcommand)]
        act: Option<WorkersAct>,
    },
    /// Take no new requests and let the running ones end
    #[command(after_help = "Examples:\n  ernie-ctl drain --timeout 60\n  ernie-ctl drain --exit")]
    Drain {
        /// Seconds the running requests may take [default: server.drain_timeout]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<f64>,
        /// End the daemon when drained
        #[arg(long)]
        exit: bool,
    },
    /// Take requests again after a drain
    Resume,
    /// Read the configuration file again and apply what can be applied, or nothing
    Reload,
    /// Settings: where they come from, what a reload would change
    #[command(
        after_help = "Examples:\n  ernie-ctl config show --origin\n  ernie-ctl config diff\n  ernie-ctl config set logging.level debug\n  ernie-ctl config set logging.level --unset"
    )]
    Config {
        #[command(subcommand)]
        act: ConfigAct,
    },
    /// The log: level, rotation, last lines
    #[command(
        after_help = "Examples:\n  ernie-ctl logs level info,ernied::supervisor=debug\n  ernie-ctl logs rotate\n  ernie-ctl logs tail -n 50 --follow"
    )]
    Logs {
        #[command(subcommand)]
        act: LogsAct,
    },
    /// API keys
    #[command(
        after_help = "Examples:\n  ernie-ctl key create chat-app --rpm 600 --daily-tokens 2000000\n  ernie-ctl key list\n  ernie-ctl key revoke chat-app"
    )]
    Key {
        #[command(subcommand)]
        act: KeyAct,
    },
    /// Tokens and requests per key and day
    Usage {
        /// Days back, today included
        #[arg(long, default_value_t = 7)]
        days: u32,
    },
    /// Who did what: list, show, verify, export
    #[command(
        after_help = "Examples:\n  ernie-ctl audit list --act key\n  ernie-ctl audit show 42\n  ernie-ctl audit verify\n  ernie-ctl audit export > audit.jsonl"
    )]
    Audit {
        #[command(subcommand)]
        act: AuditAct,
    },
    /// Replace the model by another one, without a lost request
    #[command(
        after_help = "Examples:\n  ernie-ctl swap models/ERNIE-4.5-0.3B-PT-v2 --observe 10m\n  ernie-ctl swap r2 --canary 10%\n  ernie-ctl swap r2 --strategy stop-first --no-wait"
    )]
    Swap(SwapArgs),
    /// Go back to the previous model, or end the rollout under way
    Rollback {
        /// Why, for the audit store
        #[arg(long)]
        reason: Option<String>,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
    },
    /// Model folders: names, what is in them, seals; inspect, seal, verify and prepare work with the daemon down
    #[command(
        after_help = "Examples:\n  ernie-ctl model inspect models/ERNIE-4.5-0.3B-PT\n  ernie-ctl model seal models/ERNIE-4.5-0.3B-PT\n  ernie-ctl model add models/ERNIE-4.5-0.3B-PT --name r1\n  ernie-ctl model list"
    )]
    Model {
        #[command(subcommand)]
        act: ModelAct,
    },
    /// KV memory: blocks used, shared, cached, swapped; who holds the most
    #[command(after_help = "Examples:\n  ernie-ctl kv\n  ernie-ctl kv --top 3 --json\n  ernie-ctl kv drop-prefixes")]
    Kv {
        #[command(subcommand)]
        act: Option<KvAct>,
        /// Rows of keys and of sequences
        #[arg(long, default_value_t = 10)]
        top: usize,
    },
    /// Change a setting until the next restart (the same as `config set KEY VALUE`)
    #[command(after_help = "Examples:\n  ernie-ctl set swap.policy=always\n  ernie-ctl set logging.level=debug")]
    Set {
        /// KEY=VALUE
        #[arg(value_name = "KEY=VALUE")]
        assignment: String,
    },
    /// Drop the cached prefixes of all workers
    ResetPrefixCache,
    /// The daemon's metrics as text
    Metrics,
    /// The flight recorder: write down the last minutes, explain what was written
    #[command(
        after_help = "Examples:\n  ernie-ctl debug dump\n  ernie-ctl debug explain /var/lib/ernied/flight/flight-20260126T142207.123Z-w1.json"
    )]
    Debug {
        #[command(subcommand)]
        act: DebugAct,
    },
    /// Follow what happens: workers, rollouts, administrative acts
    Events {
        /// Begin with the last N events
        #[arg(short = 'n', long, default_value_t = 10)]
        lines: u32,
    },
    /// Chat with the model in the terminal
    #[command(after_help = "Examples:\n  ernie-ctl chat\n  ernie-ctl chat -m 请用一句话介绍人工智能")]
    Chat(ChatArgs),
    /// Look for what is wrong, with the command that mends it; works with the daemon down
    #[command(
        after_help = "Examples:\n  ernie-ctl doctor\n  ernie-ctl doctor --model models/ERNIE-4.5-0.3B-PT --port 8000"
    )]
    Doctor(DoctorArgs),
    /// Load the API and measure it
    #[command(
        after_help = "Examples:\n  ernie-ctl bench --profile a10-512-256\n  ernie-ctl bench --profile swap --models r1,r2 --observe 5s\n  ernie-ctl bench --concurrency 16 --input 128 --output 64 --requests 64\n  ernie-ctl bench --compare http://other:8000 --profile c100-320"
    )]
    Bench(BenchArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Write man pages into a folder
    #[command(hide = true)]
    Man { dir: PathBuf },
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkersAct {
    /// State, load, age of the last step, why the last one died
    List,
    /// Let a worker end what it has, without new requests, and replace it then (restart --graceful)
    Drain {
        /// As shown by `worker list`: w3
        worker: String,
    },
    /// Replace a worker process; its requests go on at the next one
    Restart {
        /// As shown by `worker list`: w3
        worker: String,
        /// Let its running requests end first
        #[arg(long)]
        graceful: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum KvAct {
    /// Drop the cached prefixes of all workers, swapped ones too
    DropPrefixes,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigAct {
    /// All settings in force
    Show {
        /// Where each value comes from
        #[arg(long)]
        origin: bool,
        /// Only settings that are not at their default
        #[arg(long)]
        changed: bool,
    },
    /// What a reload would change
    Diff,
    /// Change a setting until the next restart
    Set {
        key: String,
        #[arg(required_unless_present = "unset")]
        value: Option<String>,
        /// Go back to file and flags
        #[arg(long, conflicts_with = "value")]
        unset: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DebugAct {
    /// Write down the last minutes: steps, requests and events, as ids and figures
    Dump,
    /// Tell the story of a file; needs no daemon
    Explain {
        /// As written by `debug dump`, or by the daemon when a worker was lost
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum LogsAct {
    /// Level, file, dropped lines
    Show,
    /// Change the level at once
    Level { level: String },
    /// Begin a new log file
    Rotate,
    /// The last lines of the log file
    Tail {
        #[arg(short = 'n', long, default_value_t = 20)]
        lines: usize,
        /// Go on with new lines, over rotations
        #[arg(short, long)]
        follow: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyAct {
    /// Make a key; it is shown once
    Create(KeyArgs),
    /// All keys
    List,
    /// End a key at once
    Revoke {
        /// Id or name
        key: String,
    },
    /// A new secret with the old limits; the old one ends
    Rotate {
        /// Id or name
        key: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// What the key is for
    #[arg(required_unless_present = "name_flag")]
    pub(crate) name: Option<String>,
    #[arg(long = "name", value_name = "NAME", hide = true, conflicts_with = "name")]
    pub(crate) name_flag: Option<String>,
    /// inference: the whole API; monitor: metrics and health only
    #[arg(long, default_value = "inference")]
    pub(crate) scope: String,
    /// Requests per minute
    #[arg(long, default_value_t = 0)]
    pub(crate) rpm: u32,
    /// Tokens per minute
    #[arg(long, default_value_t = 0)]
    pub(crate) tpm: u32,
    /// Tokens per UTC day
    #[arg(long, default_value_t = 0)]
    pub(crate) daily_tokens: u64,
    /// Requests at the same time
    #[arg(long, default_value_t = 0)]
    pub(crate) max_concurrency: u32,
    /// Days until it expires
    #[arg(long, value_name = "DAYS")]
    pub(crate) expires: Option<f64>,
    /// Served names it may use [default: all]
    #[arg(long, value_delimiter = ',')]
    pub(crate) models: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditAct {
    /// The newest rows
    List {
        /// Only this act or group of acts: key, key.create, rollout
        #[arg(long)]
        act: Option<String>,
        #[arg(short = 'n', long, default_value_t = 30)]
        limit: u32,
    },
    /// One row with everything
    Show { seq: i64 },
    /// Check the hash chain; exit 1 when it is broken
    Verify,
    /// All rows as JSON lines
    Export,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelAct {
    /// Give a sealed folder a name
    Add {
        dir: PathBuf,
        /// [default: the folder's name]
        #[arg(long)]
        name: Option<String>,
    },
    /// Folders with a name or a part in what is served
    List,
    /// Forget a name; files are never removed
    Remove { name: String },
    /// What a folder holds and everything that is wrong with it; loads nothing, runs no code
    Inspect {
        dir: PathBuf,
        /// KV blocks to give the memory of [default: those of one sequence of full length]
        #[arg(long, value_name = "N")]
        blocks: Option<u64>,
    },
    /// Write SHA256SUMS, which says what every file has to be
    Seal { dir: PathBuf },
    /// Compare every file with SHA256SUMS
    Verify { dir: PathBuf },
    /// Write a second folder with the weights in kernel layout; loading it packs nothing
    Prepare {
        dir: PathBuf,
        /// Folder to make
        out: PathBuf,
        /// none, int8, int4
        #[arg(long)]
        quantization: Option<String>,
        /// auto, bfloat16, float32
        #[arg(long)]
        dtype: Option<String>,
        /// Round int4 weights for a text: a file, or what the model writes by itself (int8 gains nothing by it)
        #[arg(long, value_name = "self:TOKENS|FILE")]
        calibrate: Option<OsString>,
    },
}

/// `90s`, `10m`, `1.5h`; a bare number is seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0), ("", 1.0)];
    let (digits, unit) = units.iter().find_map(|(u, f)| Some((text.strip_suffix(u)?, f))).unwrap_or((text, &1.0));
    match digits.parse::<f64>() {
        Ok(n) if n >= 0.0 && n.is_finite() => Ok(n * unit),
        _ => Err("expected a duration such as 90s, 10m or 0".to_owned()),
    }
}

/// `10%` or `10`.
fn percent(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>() {
        Ok(n) if n > 0.0 && n <= 100.0 => Ok(n),
        _ => Err("expected a share above 0 % and up to 100 %, such as 10%".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct SwapArgs {
    /// Folder of the new model, or a name that `model add` gave to one
    pub(crate) model: PathBuf,
    /// Names to serve it under [default: the present ones]
    #[arg(long)]
    pub(crate) served_model_name: Vec<String>,
    /// auto, side-by-side, stop-first
    #[arg(long, default_value = "auto")]
    pub(crate) strategy: String,
    /// How long the old one stays warm: 10m, 90s, 0 [default: rollout.observe]
    #[arg(long, value_name = "DURATION", value_parser = seconds)]
    pub(crate) observe: Option<f64>,
    /// Share of the keys that go to the new one meanwhile: 10%
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub(crate) canary: Option<f64>,
    /// Take a model without a manifest
    #[arg(long)]
    pub(crate) force_unsealed: bool,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// Base of the API [default: asked of the daemon]
    #[arg(long, env = "ERNIED_URL")]
    pub(crate) url: Option<String>,
    /// API key
    #[arg(long, env = "ERNIED_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Served name [default: the first one the API lists]
    #[arg(long)]
    pub(crate) model: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Ask this and leave
    #[arg(short, long)]
    pub(crate) message: Option<String>,
    /// System message
    #[arg(long)]
    pub(crate) system: Option<String>,
    #[arg(long)]
    pub(crate) temperature: Option<f32>,
    #[arg(long, default_value_t = 512)]
    pub(crate) max_tokens: u32,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Model folder to look at [default: the one that is served]
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Port to look at
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    /// State directory to look at
    #[arg(long)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Only this check: port, model, disk, memory, cpu, limits, clock, permissions, space, crashes, api
    pub(crate) check: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// A named load: a10-512-256 (N2), batch8 (E3), c100-320 (N6), burst (100 at once, prompts of 160 to 480), prefix (chats behind one system prompt, with and without cache), chat (short), long; swap: swaps under steady load
    #[arg(long)]
    pub(crate) profile: Option<String>,
    /// Requests at the same time
    #[arg(long)]
    pub(crate) concurrency: Option<u32>,
    /// Prompt tokens, about
    #[arg(long)]
    pub(crate) input: Option<u32>,
    /// Tokens to generate, exactly
    #[arg(long)]
    pub(crate) output: Option<u32>,
    /// Requests in all
    #[arg(long)]
    pub(crate) requests: Option<u32>,
    /// Leading prompt tokens that are the same in every request
    #[arg(long, value_name = "TOKENS")]
    pub(crate) shared_prefix: Option<u32>,
    /// Send random token ids instead of words (for vocabularies of real models)
    #[arg(long)]
    pub(crate) token_ids: bool,
    /// Chooses the prompts; another seed meets no cached prefix of an earlier run
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// swap: folders or names of the models to swap to, in turns
    #[arg(long, value_delimiter = ',')]
    pub(crate) models: Vec<PathBuf>,
    /// swap: how often
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) swaps: u32,
    /// swap: how long each new model is observed
    #[arg(long, value_name = "DURATION", value_parser = seconds, default_value = "5s")]
    pub(crate) observe: f64,
    /// swap: requests per second
    #[arg(long, value_name = "N", default_value_t = 50.0)]
    pub(crate) rate: f64,
    /// A second server to measure right after, side by side
    #[arg(long, value_name = "URL")]
    pub(crate) compare: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_shares_are_taken_as_people_write_them() {
        for (text, n) in [("10m", 600.0), ("90s", 90.0), ("0", 0.0), ("1.5h", 5400.0), ("250ms", 0.25), ("5", 5.0)] {
            assert_eq!(seconds(text), Ok(n), "{text}");
        }
        for text in ["", "soon", "-1s", "nan", "inf"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!((percent("10%"), percent("2.5")), (Ok(10.0), Ok(2.5)));
        for text in ["0", "0%", "101%", "x"] {
            assert!(percent(text).is_err(), "{text}");
        }
    }
}
