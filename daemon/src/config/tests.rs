//! Precedence, errors, secrets, reloads: the configuration as its users meet it.

use super::layers::{Layer, Layers, Origin, Raw};
use super::reload::{blockers, diff};
use super::settings::{Change, Kind, SETTINGS, by_key};
use super::*;
use std::path::Path;

fn environment() -> Environment {
    Environment { home: Some("/homes/x".into()), ..Environment::default() }
}

fn file(text: &str) -> Layer {
    parsed(text).unwrap_or_else(|e| panic!("{e}"))
}

fn parsed(text: &str) -> Result<Layer, String> {
    whole(file::parse(Path::new("ernied.toml"), text))
}

fn from_env(vars: impl IntoIterator<Item = (String, String)>) -> Result<Layer, String> {
    whole(layers::from_env(vars))
}

fn whole((layer, errors): (Layer, Vec<ConfigError>)) -> Result<Layer, String> {
    if errors.is_empty() { Ok(layer) } else { Err(ConfigErrors(errors).to_string()) }
}

fn flags(pairs: &[(&str, &str)]) -> Layer {
    let mut layer = Layer::default();
    for (key, value) in pairs {
        let setting = by_key(key).expect("a key");
        layer.set(setting, Raw::Text((*value).to_owned()), Origin::Flag(setting.flag.to_owned()));
    }
    layer
}

fn resolved(layers: &Layers) -> Result<Config, ConfigErrors> {
    resolve(layers, &environment(), None)
}

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let mut layers = Layers {
        file: file("[server]\nport = 1001\nhost = \"0.0.0.0\"\n[model]\ndemo = true\n[engine]\nmax_num_seqs = 7\n"),
        env: from_env([
            ("ERNIED_PORT".to_owned(), "1002".to_owned()),
            ("ERNIED_MAX_NUM_SEQS".to_owned(), "8".to_owned()),
        ])
        .expect("good"),
        flags: flags(&[("server.port", "1003")]),
        ..Layers::default()
    };
    let c = resolved(&layers).expect("good");
    assert_eq!((c.server.port, c.engine.max_num_seqs, c.server.host.to_string().as_str()), (1003, 8, "0.0.0.0"));
    assert_eq!(c.engine.max_num_batched_tokens, 2048, "the default");
    layers.run_time = flags(&[("server.port", "1004")]);
    assert_eq!(resolved(&layers).expect("good").server.port, 1004);
    let origins = show::all(&layers);
    let origin = |key: &str| origins.iter().find(|s| s.key == key).expect("a key").origin.clone();
    assert_eq!(origin("server.host"), "ernied.toml:3");
    assert_eq!(origin("engine.max_num_seqs"), "environment ERNIED_MAX_NUM_SEQS");
    assert_eq!(origin("engine.threads"), "default");
}

#[test]
fn every_error_is_reported_at_once_with_key_origin_value_and_remedy() {
    let layers = Layers {
        file: file("[server]\nport = \"many\"\ndrain_timeout = \"soon\"\n[engine]\nmemory_utilization = 1.5\n"),
        env: from_env([("ERNIED_DTYPE".to_owned(), "float16".to_owned())]).expect("good"),
        flags: flags(&[("engine.max_num_seqs", "0"), ("model.demo", "true")]),
        ..Layers::default()
    };
    let errors = resolved(&layers).expect_err("bad");
    let text = errors.to_string();
    for (key, origin, value, remedy) in [
        ("server.port", "ernied.toml:2", "many", "the default is 8000"),
        ("server.drain_timeout", "ernied.toml:3", "soon", "500ms, 30s"),
        ("engine.memory_utilization", "ernied.toml:5", "1.5", "such as 0.9"),
        ("model.dtype", "environment ERNIED_DTYPE", "float16", "bfloat16 takes the same memory"),
        ("engine.max_num_seqs", "--max-num-seqs", "0", "from 1 to 4096"),
    ] {
        let line = text.lines().find(|l| l.contains(key)).unwrap_or_else(|| panic!("{key} is not in:\n{text}"));
        assert!(line.contains(origin) && line.contains(value) && line.contains(remedy), "{line}");
    }
    assert_eq!(errors.0.len(), 5, "{text}");
}

#[test]
fn kv_is_kept_in_the_types_there_are_and_others_are_refused_with_the_one_to_use() {
    let with = |word: &str| {
        let flags = flags(&[("engine.kv_cache_dtype", word), ("model.demo", "true")]);
        resolved(&Layers { flags, ..Layers::default() }).map(|config| config.engine.kv_dtype)
    };
    for (word, dtype) in [("auto", KvDtype::Auto), ("bfloat16", KvDtype::Bfloat16), ("int8", KvDtype::Int8)] {
        assert_eq!(with(word).expect("good"), dtype);
    }
    for (word, remedy) in [("fp8", "int8 takes"), ("fp8_e5m2", "int8 takes"), ("int4", "auto, bfloat16 or int8")] {
        let error = with(word).expect_err("bad").to_string();
        assert!(error.contains("engine.kv_cache_dtype") && error.contains(word) && error.contains(remedy), "{error}");
    }
}

#[test]
fn a_file_with_several_faults_names_each_with_its_line() {
    let text = "[server]\nprot = 8000\n[enigne]\nx = 1\n[logging]\nlevel = { a = 1 }\nformat = \"json\"\n";
    let errors = parsed(text).expect_err("bad");
    assert!(errors.contains("ernied.toml:2: there is no setting server.prot; did you mean server.port?"), "{errors}");
    assert!(errors.contains("ernied.toml:4: there is no setting enigne.x"), "{errors}");
    assert!(errors.contains("ernied.toml:6: logging.level is a table"), "{errors}");
}

#[test]
fn broken_toml_is_told_with_its_line() {
    let errors = parsed("[server]\nhost = 127.0.0.1\nport = 1\n").expect_err("bad");
    assert!(errors.contains("ernied.toml:2"), "{errors}");
}

#[test]
fn a_mistyped_variable_is_not_silent() {
    let e = from_env([("ERNIED_MAX_NUM_SEQ".to_owned(), "8".to_owned())]).expect_err("bad");
    assert!(e.contains("ERNIED_MAX_NUM_SEQ") && e.contains("did you mean ERNIED_MAX_NUM_SEQS"), "{e}");
    from_env([("ERNIED_ISA".to_owned(), "avx2".to_owned()), ("PATH".to_owned(), "/bin".to_owned())]).expect("not ours");
}

#[test]
fn without_a_model_the_error_names_both_ways() {
    let e = resolved(&Layers::default()).expect_err("no model").to_string();
    assert!(e.contains("`ernied serve DIR`") && e.contains("`ernied serve --demo`"), "{e}");
    let both = Layers { flags: flags(&[("model.path", "/m"), ("model.demo", "true")]), ..Layers::default() };
    assert!(resolved(&both).expect_err("both").to_string().contains("give either a model folder or --demo"));
}

#[test]
fn secrets_are_never_shown() {
    let mut layer = flags(&[("model.demo", "true")]);
    layer.set(
        by_key("server.api_keys").expect("a key"),
        Raw::List(vec!["sk-very-secret".into(), "short".into()]),
        Origin::Flag("api-key".into()),
    );
    let layers = Layers { flags: layer, ..Layers::default() };
    let e = resolved(&layers).expect_err("one key is too short").to_string();
    assert!(e.contains("has only 5 characters") && !e.contains("sk-very-secret"), "{e}");
    assert!(!format!("{:?}", show::all(&layers)).contains("sk-very-secret"));
    assert!(!format!("{:?}", Secret::new("sk-very-secret".into())).contains("secret-"));
    let difference = diff(&Layers::default(), &layers);
    assert!(!format!("{difference:?}").contains("sk-very-secret"));
}

#[test]
fn a_difference_says_what_a_change_needs() {
    let before = Layers { file: file("[model]\ndemo = true\n"), ..Layers::default() };
    let after = Layers {
        file: file(
            "[model]\ndemo = true\n[logging]\nlevel = \"debug\"\n[server]\nport = 9\n[engine]\nmax_num_seqs = 5\n",
        ),
        ..Layers::default()
    };
    let found = diff(&before, &after);
    let change = |key: &str| found.iter().find(|d| d.key == key).map(|d| d.change);
    assert_eq!(change("logging.level"), Some(Change::Live));
    assert_eq!(change("server.port"), Some(Change::Daemon));
    assert_eq!(change("engine.max_num_seqs"), Some(Change::Workers));
    assert_eq!(blockers(&found).len(), 2);
    let same_value = Layers { file: file("[model]\ndemo = true\n[server]\nport = 8000\n"), ..Layers::default() };
    assert_eq!(diff(&before, &same_value), [], "a default that is spelled out is no change");
}

#[test]
fn the_example_file_is_good_and_complete() {
    let example = show::example();
    let live: String = example
        .lines()
        .map(|l| match l.strip_prefix('#') {
            Some(rest) if !rest.starts_with(' ') => rest.to_owned(),
            _ => l.to_owned(),
        })
        .map(|l| l + "\n")
        .collect();
    let layer = parsed(&live).unwrap_or_else(|e| panic!("{e}\n{live}"));
    assert_eq!(layer.keys().count(), SETTINGS.len());
    let mut layers = Layers { file: layer, ..Layers::default() };
    layers.flags = flags(&[("model.demo", "true")]);
    resolved(&layers).unwrap_or_else(|e| panic!("{e}"));
}

/// `ERNIED_TEST_BLESS=1 cargo test -p ernied reference_is_current` writes the page anew.
#[test]
fn the_configuration_reference_is_current() {
    let page = format!(
        "# Configuration\n\nMade from the table of settings. Precedence: flags, `ERNIED_*` environment, the file given with \
         `--config`, defaults. `ernied check-config --example` prints a file with everything; `ernie-ctl config show --origin` \
         tells where each value in force comes from.\n\n{}",
        show::reference()
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    if std::env::var_os("ERNIED_TEST_BLESS").is_some() {
        std::fs::write(&path, &page).expect("written");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("docs/configuration.md"), page);
}

#[test]
fn the_table_is_sound() {
    for (i, s) in SETTINGS.iter().enumerate() {
        assert!(s.key.contains('.') && !s.help.is_empty(), "{}", s.key);
        assert!(!SETTINGS[i + 1..].iter().any(|o| o.key == s.key || o.flag == s.flag), "{} is there twice", s.key);
        assert!(s.kind != Kind::Switch || matches!(s.default, "true" | "false"), "{}", s.key);
    }
}

#[test]
fn places_come_from_systemd_then_xdg_then_home() {
    let layers = Layers { flags: flags(&[("model.demo", "true")]), ..Layers::default() };
    let place = |e: Environment| {
        let c = resolve(&layers, &e, None).expect("good");
        (c.paths.state_dir.display().to_string(), c.admin.socket.display().to_string())
    };
    let home = Environment { home: Some("/h".into()), ..Environment::default() };
    assert_eq!(place(home.clone()), ("/h/.local/state/ernied".into(), "/h/.local/state/ernied/run/admin.sock".into()));
    let xdg = Environment { xdg_state_home: Some("/s".into()), xdg_runtime_dir: Some("/r".into()), ..home.clone() };
    assert_eq!(place(xdg.clone()), ("/s/ernied".into(), "/r/ernied/admin.sock".into()));
    let systemd = Environment {
        state_directory: Some("/var/lib/ernied".into()),
        runtime_directory: Some("/run/ernied".into()),
        ..xdg
    };
    assert_eq!(place(systemd), ("/var/lib/ernied".into(), "/run/ernied/admin.sock".into()));
    assert!(resolve(&layers, &Environment::default(), None).is_err(), "nowhere to write");
}

#[test]
fn a_missing_model_folder_tells_what_is_there_instead() {
    let dir = tempfile::tempdir().expect("temp");
    std::fs::create_dir(dir.path().join("ERNIE-4.5-0.3B-PT")).expect("made");
    let e = preflight::model(&dir.path().join("ERNIE-0.3B"), true);
    assert!(e[0].to_string().contains("does not exist") && e[0].to_string().contains("ERNIE-4.5-0.3B-PT"), "{}", e[0]);
    let model = dir.path().join("ERNIE-4.5-0.3B-PT");
    std::fs::write(model.join("pytorch_model.bin"), b"x").expect("written");
    let text: Vec<String> = preflight::model(&model, true).iter().map(ToString::to_string).collect();
    assert_eq!(text.len(), 3, "{text:?}");
    assert!(text[2].contains("a pickle can run code") && text[2].contains("safe_serialization=True"), "{}", text[2]);
    assert_eq!(preflight::model(&model, false).len(), 2, "the tokenizer may lie elsewhere");
}
