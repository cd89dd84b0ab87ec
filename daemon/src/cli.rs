//! The command line: which role this process plays, and the flags of `serve` from the table of settings.
//!
//! Flags are taken as text and judged together with file and environment, so that one run tells everything that is wrong.
//! Exit codes: 0 done, 1 failed while running, 2 the command line or configuration is wrong, 3 an address is taken.

use crate::config::layers::{Layer, Layers, Origin, Raw, apply_compat, from_env};
use crate::config::settings::{COMPAT, Kind, SETTINGS};
use crate::config::{self, Config, ConfigError, ConfigErrors, Environment, Sources};
use crate::offline::{Calibrate, ModelTask, ModelVerb, Wish};
use clap::{Arg, ArgAction, ArgMatches, Command};
use ernie_proto::worker::{Dtype, Quantization};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// The command line or the configuration is wrong.
pub const EXIT_CONFIG: u8 = 2;
/// An address or socket is taken by another process.
pub const EXIT_ADDRESS: u8 = 3;

/// What this process is to do.
#[derive(Debug)]
pub enum Role {
    Serve(Box<Config>, Box<Sources>),
    /// The engine process.
    Worker,
    /// Work on a model folder, without a daemon.
    Model(ModelTask),
    /// Only measurements whose name holds this.
    BenchKernels(String),
    /// Everything was said already.
    Done(ExitCode),
}

/// Reads the command line, and for `serve` and `check-config` all sources of the configuration.
pub fn role() -> Role {
    let arguments = std::env::args_os().map(dashes);
    let matches = match command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(e) => {
            // Help and version are "errors" that go to standard output.
            let _ = e.print();
            return Role::Done(if e.use_stderr() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::SUCCESS });
        }
    };
    match matches.subcommand() {
        Some(("serve", m)) => serve(m),
        Some(("check-config", m)) => Role::Done(check_config(m)),
        Some(("worker", _)) => Role::Worker,
        Some(("model", m)) => model(m),
        Some(("bench-kernels", m)) => Role::BenchKernels(m.get_one::<String>("FILTER").cloned().unwrap_or_default()),
        _ => Role::Done(ExitCode::from(EXIT_CONFIG)), // clap demands a subcommand
    }
}

/// vLLM takes `--max_model_len` for `--max-model-len`; so do we.
fn dashes(argument: OsString) -> OsString {
    match argument.to_str() {
        Some(text) if text.starts_with("--") => {
            let (flag, value) = text.split_once('=').map_or((text, None), |(f, v)| (f, Some(v)));
            let flag = flag.replace('_', "-");
            value.map_or(flag.clone(), |v| format!("{flag}={v}")).into()
        }
        _ => argument,
    }
}

/// The whole command line; also the source of completions and man pages.
pub fn command() -> Command {
    Command::new("ernied")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Serves ERNIE-4.5 models: OpenAI-compatible API, supervised workers, control plane")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(with_settings(
            Command::new("serve").about("Serve a model").after_help(
                "Examples:\n  ernied serve --demo\n  ernied serve models/ERNIE-4.5-0.3B-PT --port 8000 --max-model-len 8192\n  \
                 ernied serve --config /etc/ernied/ernied.toml\n\nPrecedence: flags, ERNIED_* environment, file, defaults.",
            ),
        ))
        .subcommand(with_settings(
            Command::new("check-config")
                .about("Report everything that is wrong with the configuration, or print what would be used")
                .arg(Arg::new("example").long("example").action(ArgAction::SetTrue).help("print an example file with every setting")),
        ))
        .subcommand(Command::new("worker").about("The engine process; started by `serve`, never by hand").hide(true))
        .subcommand(model_command())
        .subcommand(
            Command::new("bench-kernels")
                .about("Measure the compute kernels on this machine")
                .arg(Arg::new("FILTER").help("only measurements whose name holds this")),
        )
}

/// The verbs that work on folders; `ernie-ctl model` hands them on.
fn model_command() -> Command {
    let verb = |name: &'static str, about: &'static str| {
        Command::new(name)
            .about(about)
            .arg(Arg::new("DIR").required(true).value_parser(clap::value_parser!(PathBuf)).help("folder of the model"))
            .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("print JSON, for programs"))
    };
    Command::new("model")
        .about("Look at, seal and verify model folders, without a daemon")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            verb("inspect", "What a folder holds and everything that is wrong with it; loads nothing, runs no code")
                .arg(
                    Arg::new("blocks")
                        .long("blocks")
                        .value_name("N")
                        .default_value("0")
                        .value_parser(clap::value_parser!(u64))
                        .help("KV blocks to give the memory of; 0: those of one sequence of full length"),
                ),
        )
        .subcommand(verb("seal", "Write SHA256SUMS, which says what every file has to be"))
        .subcommand(verb("verify", "Compare every file with SHA256SUMS"))
        .subcommand(
            verb("prepare", "Write a second folder with the weights in kernel layout; loading it packs nothing")
                .arg(Arg::new("OUT").required(true).value_parser(clap::value_parser!(PathBuf)).help("folder to make"))
                .arg(word("quantization", &["none", "int8", "int4"], "weight form to prepare"))
                .arg(word("dtype", &["auto", "bfloat16", "float32"], "number type to prepare"))
                .arg(
                    Arg::new("calibrate")
                        .long("calibrate")
                        .value_name("self:TOKENS|FILE")
                        .value_parser(clap::value_parser!(Calibrate))
                        .help("round int4 weights for a text: a file, or what the model writes by itself (int8 gains nothing by it)"),
                ),
        )
}

/// A flag with a few words to choose from; the first is the default.
fn word(name: &'static str, words: &'static [&'static str], help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser(words.to_vec()).default_value(words[0]).help(help)
}

fn model(matches: &ArgMatches) -> Role {
    let Some((name, m)) = matches.subcommand() else { return Role::Done(ExitCode::from(EXIT_CONFIG)) };
    let verb = match name {
        "inspect" => ModelVerb::Inspect { blocks: m.get_one("blocks").copied().unwrap_or_default() },
        "seal" => ModelVerb::Seal,
        "prepare" => ModelVerb::Prepare {
            out: m.get_one::<PathBuf>("OUT").cloned().unwrap_or_default(),
            form: Wish {
                quantization: match m.get_one::<String>("quantization").map(String::as_str) {
                    Some("int8") => Quantization::Int8,
                    Some("int4") => Quantization::Int4,
                    _ => Quantization::None,
                },
                dtype: match m.get_one::<String>("dtype").map(String::as_str) {
                    Some("bfloat16") => Dtype::Bfloat16,
                    Some("float32") => Dtype::Float32,
                    _ => Dtype::Auto,
                },
                calibrate: m.get_one::<Calibrate>("calibrate").cloned(),
            },
        },
        _ => ModelVerb::Verify,
    };
    let dir = m.get_one::<PathBuf>("DIR").cloned().unwrap_or_default();
    Role::Model(ModelTask { verb, dir, json: m.get_flag("json") })
}

fn with_settings(command: Command) -> Command {
    let mut command =
        command.arg(Arg::new("MODEL").help("folder of the model, the same as --model").conflicts_with("model")).arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .help("settings in TOML")
                .env("ERNIED_CONFIG")
                .value_parser(clap::value_parser!(PathBuf)),
        );
    for s in SETTINGS {
        let mut help = s.help.to_owned();
        if !s.default.is_empty() {
            help.push_str(&format!(" [default: {}]", s.default));
        }
        command = command.arg(flag(s.flag, s.kind, help));
        if s.kind == Kind::Switch {
            command = command.arg(
                Arg::new(no(s.flag)).long(no(s.flag)).action(ArgAction::SetTrue).hide(true).overrides_with(s.flag),
            );
        }
    }
    for c in COMPAT {
        command = command.arg(flag(c.flag, c.kind, c.help.to_owned()).help_heading("Flags of vLLM"));
    }
    command
}

fn flag(name: &'static str, kind: Kind, help: String) -> Arg {
    let arg = Arg::new(name).long(name).help(help);
    match kind {
        Kind::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true").value_name("BOOL"),
        Kind::Value(word) => arg.value_name(word).action(ArgAction::Set).overrides_with(name),
        Kind::List(word) | Kind::SecretList(word) => arg.value_name(word).action(ArgAction::Append).num_args(1..),
    }
}

fn no(flag: &str) -> &'static str {
    // Leaked once per flag and process: clap wants static names without its `string` feature.
    Box::leak(format!("no-{flag}").into_boxed_str())
}

/// The flags' layer.
fn flags(matches: &ArgMatches) -> (Layer, Vec<ConfigError>) {
    let mut layer = Layer::default();
    let mut errors = Vec::new();
    let values = |name: &str| -> Option<Vec<String>> {
        (matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine))
            .then(|| matches.get_many::<String>(name).map(|v| v.cloned().collect()).unwrap_or_default())
    };
    for s in SETTINGS {
        let mut given = values(s.flag);
        if s.key == "model.path"
            && let Some(model) = matches.get_one::<String>("MODEL")
        {
            given = Some(vec![model.clone()]);
        }
        if s.kind == Kind::Switch && matches.get_flag(no(s.flag)) {
            given = Some(vec!["false".to_owned()]);
        }
        let Some(mut given) = given else { continue };
        let raw = match s.kind {
            Kind::List(_) | Kind::SecretList(_) => Raw::List(given),
            Kind::Switch | Kind::Value(_) => Raw::Text(given.pop().unwrap_or_default()),
        };
        layer.set(s, raw, Origin::Flag(s.flag.to_owned()));
    }
    for c in COMPAT {
        if let Some(given) = values(c.flag)
            && let Err(e) = apply_compat(&mut layer, c.flag, &given)
        {
            errors.push(e);
        }
    }
    (layer, errors)
}

/// Reads all sources and checks them; all errors of all sources together.
fn gather(matches: &ArgMatches) -> (Sources, Result<Config, ConfigErrors>) {
    let config_file = matches.get_one::<PathBuf>("config").cloned();
    let variables = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let (flags, mut errors) = flags(matches);
    let (env, more) = from_env(variables);
    errors.extend(more);
    let (file, more) = config_file.as_deref().map(config::file::read).unwrap_or_default();
    errors.extend(more);
    let layers = Layers { run_time: Layer::default(), flags, env, file };
    let environment = Environment::of_process();
    let config = match config::resolve(&layers, &environment, config_file.clone()) {
        Ok(config) if errors.is_empty() => Ok(config),
        Ok(_) => Err(ConfigErrors(errors)),
        Err(e) => {
            errors.extend(e.0);
            Err(ConfigErrors(errors))
        }
    };
    (Sources { layers, config_file, environment }, config)
}

fn serve(matches: &ArgMatches) -> Role {
    let (sources, config) = gather(matches);
    let config = match config {
        Ok(config) => config,
        Err(errors) => return Role::Done(refuse(&errors)),
    };
    let preflight = config::preflight::check(&config);
    if !preflight.is_empty() {
        return Role::Done(refuse(&ConfigErrors(preflight)));
    }
    Role::Serve(Box::new(config), Box::new(sources))
}

fn refuse(errors: &ConfigErrors) -> ExitCode {
    complain(&format!("ernied: {errors}"));
    ExitCode::from(EXIT_CONFIG)
}

fn check_config(matches: &ArgMatches) -> ExitCode {
    if matches.get_flag("example") {
        say(&config::show::example());
        return ExitCode::SUCCESS;
    }
    let (sources, config) = gather(matches);
    let problems = match config {
        Ok(config) => config::preflight::check(&config),
        Err(errors) => errors.0,
    };
    if !problems.is_empty() {
        return refuse(&ConfigErrors(problems));
    }
    for row in config::show::all(&sources.layers) {
        if let Some(value) = row.value {
            say(&format!("{:<32} {value}  ({})\n", row.key, row.origin));
        }
    }
    for notice in sources.layers.notices() {
        say(&format!("notice: {notice}\n"));
    }
    say("the configuration is good\n");
    ExitCode::SUCCESS
}

/// To standard output; a closed pipe (`| head`) ends silently.
fn say(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

pub(crate) fn complain(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(arguments: &[&str]) -> Result<Layer, String> {
        let line = ["ernied", "serve"].iter().chain(arguments).map(|a| dashes(OsString::from(a)));
        let matches = command().try_get_matches_from(line).expect("the line parses");
        let (layer, errors) = flags(matches.subcommand().expect("serve").1);
        if errors.is_empty() { Ok(layer) } else { Err(ConfigErrors(errors).to_string()) }
    }

    fn text(layer: &Layer, key: &str) -> String {
        match &layer.get(key).expect("set").0 {
            Raw::Text(text) => text.clone(),
            Raw::List(items) => items.join(","),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn a_command_line_of_vllm_starts_ernied() {
        let l = layer(&[
            "/models/ernie",
            "--served-model-name",
            "a",
            "b",
            "--host",
            "0.0.0.0",
            "--port=8001",
            "--max_model_len",
            "8192",
            "--max-num-seqs",
            "256",
            "--dtype",
            "bfloat16",
            "--gpu-memory-utilization",
            "0.92",
            "--enforce-eager",
            "--tensor-parallel-size",
            "1",
            "--enable-prefix-caching",
            "--disable-log-stats",
            "--disable-log-requests",
            "--swap-space",
            "4",
            "--trust-remote-code",
        ])
        .expect("taken");
        assert_eq!(text(&l, "model.path"), "/models/ernie");
        assert_eq!(text(&l, "model.served_names"), "a,b");
        assert_eq!(text(&l, "model.max_model_len"), "8192");
        assert_eq!(text(&l, "engine.prefix_caching"), "true");
        assert_eq!(text(&l, "logging.stats"), "false");
        assert_eq!(text(&l, "logging.requests"), "false");
        assert!(l.notices.iter().any(|n| n.contains("--enforce-eager has no effect")), "{:?}", l.notices);
    }

    #[test]
    fn switches_have_a_no_form_and_the_last_one_wins() {
        assert_eq!(text(&layer(&["--no-enable-prefix-caching"]).expect("taken"), "engine.prefix_caching"), "false");
        assert_eq!(text(&layer(&["--enable-prefix-caching=false"]).expect("taken"), "engine.prefix_caching"), "false");
        let both = layer(&["--enable-prefix-caching", "--no-enable-prefix-caching"]).expect("taken");
        assert_eq!(text(&both, "engine.prefix_caching"), "false");
    }

    #[test]
    fn an_awq_path_is_the_model_path_and_says_so() {
        let l = layer(&["--quantization", "int4", "--awq-ckpt-path", "/models/awq"]).expect("taken");
        assert_eq!(text(&l, "model.path"), "/models/awq");
        assert!(l.notices.iter().any(|n| n.contains("another word for --model")));
        let e = layer(&["/models/a", "--awq-ckpt-path", "/models/b"]).expect_err("two different models");
        assert!(e.contains("is the same setting as --model"), "{e}");
    }

    #[test]
    fn a_model_is_not_split_over_processes() {
        let e = layer(&["--tensor-parallel-size", "2"]).expect_err("refused");
        assert!(e.contains("use --workers N"), "{e}");
    }
}
