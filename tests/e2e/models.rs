//! `ernie-ctl model inspect | seal | verify | prepare`, without a daemon: each problem in one line, with its remedy.

use anyhow::{Context, Result, ensure};
use ernied_tests::models::{copy, poke, revision, seal, tensor, text};
use ernied_tests::{DaemonOptions, TestDaemon, ctl};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// `ernie-ctl model …` with no daemon behind it.
async fn model(arguments: &[&str]) -> Result<(i32, String)> {
    let (code, out, errors) = ctl(Path::new("/nonexistent"), &[&["model"], arguments].concat()).await?;
    Ok((code, out + &errors))
}

/// The problems that `inspect` finds, each a line.
async fn problems(dir: &Path) -> Result<Vec<String>> {
    let (code, out) = model(&["inspect", "--json", &text(dir)]).await?;
    let found: Value = serde_json::from_str(&out).with_context(|| out.clone())?;
    let problems: Vec<String> = serde_json::from_value(found["problems"].clone())?;
    ensure!(code == i32::from(!problems.is_empty()), "exit status {code} with {problems:?}");
    assert!(problems.iter().all(|problem| !problem.contains('\n')), "{problems:#?}");
    Ok(problems)
}

/// Exactly one problem, which holds all of these.
async fn one_problem(dir: &Path, parts: &[&str]) -> Result<()> {
    let problems = problems(dir).await?;
    assert_eq!(problems.len(), 1, "{problems:#?}");
    for part in parts {
        assert!(problems[0].contains(part), "no {part:?} in {:?}", problems[0]);
    }
    Ok(())
}

/// The demo model split into two shards with an index.
fn sharded(parent: &Path, note: &str) -> Result<std::path::PathBuf> {
    let dir = copy(parent, note)?;
    let bytes = fs::read(dir.join("model.safetensors"))?;
    fs::remove_file(dir.join("model.safetensors"))?;
    let header = u64::from_le_bytes(*bytes.first_chunk().context("a header")?) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header])?;
    let mut index = serde_json::Map::new();
    for (number, file) in [(0, "model-00001-of-00002.safetensors"), (1, "model-00002-of-00002.safetensors")] {
        let (mut own, mut data) = (serde_json::Map::new(), Vec::new());
        let tensors = table.as_object().context("a table")?.iter().filter(|(name, _)| *name != "__metadata__");
        for (i, (name, info)) in tensors.enumerate() {
            if i % 2 != number {
                continue;
            }
            let at = |i: usize| info["data_offsets"][i].as_u64().unwrap_or_default() as usize + 8 + header;
            let begin = data.len();
            data.extend_from_slice(&bytes[at(0)..at(1)]);
            let mut info = info.clone();
            info["data_offsets"] = json!([begin, data.len()]);
            own.insert(name.clone(), info);
            index.insert(name.clone(), json!(file));
        }
        let own = Value::Object(own).to_string();
        let mut shard = (own.len() as u64).to_le_bytes().to_vec();
        shard.extend_from_slice(own.as_bytes());
        shard.extend(data);
        fs::write(dir.join(file), shard)?;
    }
    let index = json!({"metadata": {}, "weight_map": index}).to_string();
    fs::write(dir.join("model.safetensors.index.json"), index)?;
    Ok(dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_tells_what_a_folder_holds_and_loads_nothing() -> Result<()> {
    let models = tempfile::tempdir()?;
    let dir = copy(models.path(), "sound")?;
    fs::write(dir.join("modeling_ernie.py"), "raise SystemExit('run')")?;
    let (code, out) = model(&["inspect", &text(&dir)]).await?;
    assert_eq!(code, 0, "{out}");
    for expected in [
        "MoE, 2 of 8 experts per token",
        "not sealed",
        "4096 tokens",
        "experts: ",
        "BF16",
        "a block of 16 tokens",
        "modeling_ernie.py",
        "scripts are never run",
        "problems   none",
    ] {
        assert!(out.contains(expected), "no {expected:?} in:\n{out}");
    }
    let revision = seal(&dir).await?;
    let (_, out) = model(&["inspect", &text(&dir), "--blocks", "10", "--json"]).await?;
    let found: Value = serde_json::from_str(&out)?;
    assert_eq!((&found["revision"], &found["shape"]["memory"]["blocks"]), (&json!(revision), &json!(10)));
    assert!(found["shape"]["parameters"].as_u64() > found["shape"]["parameters_active"].as_u64());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_problem_is_one_line_with_file_cause_and_remedy() -> Result<()> {
    let models = tempfile::tempdir()?;
    let at = models.path();
    assert_eq!(problems(&sharded(at, "sharded")?).await?, Vec::<String>::new());
    let second = "model-00002-of-00002.safetensors";

    let dir = sharded(at, "absent-shard")?;
    fs::remove_file(dir.join(second))?;
    one_problem(&dir, &[second, "does not have it", "copy all shards"]).await?;

    let dir = sharded(at, "cut-shard")?;
    poke(&dir.join(second), |bytes| bytes.truncate(bytes.len() - 7))?;
    one_problem(&dir, &[second, "cut off", "copy the file again"]).await?;

    let dir = sharded(at, "twice")?;
    fs::copy(dir.join(second), dir.join("model-00001-of-00002.safetensors"))?;
    let found = problems(&dir).await?;
    assert!(found.iter().any(|p| p.contains("is also in") && p.contains("keep one of the two")), "{found:#?}");
    assert!(found.iter().any(|p| p.contains("is not there although")), "{found:#?}");

    let header = |dir: &Path, change: &dyn Fn(&mut Value)| -> Result<()> {
        poke(&dir.join("model.safetensors"), |bytes| {
            let length = u64::from_le_bytes(*bytes.first_chunk().expect("a header")) as usize;
            let mut table: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
            change(&mut table);
            let text = table.to_string();
            let data = bytes.split_off(8 + length);
            *bytes = (text.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(text.as_bytes());
            bytes.extend(data);
        })
    };
    let norm = "model.norm.weight";
    let renamed = |table: &mut Value| {
        let entry = table.as_object_mut().and_then(|t| t.remove(norm)).expect("there");
        table["model.other.weight"] = entry;
    };
    let dir = copy(at, "renamed")?;
    header(&dir, &renamed)?;
    let found = problems(&dir).await?;
    assert!(found.iter().any(|p| p.contains("model.norm.weight is missing")), "{found:#?}");
    assert!(found.iter().any(|p| p.contains("model.other.weight is not used")), "{found:#?}");

    let dir = copy(at, "dtype")?;
    header(&dir, &|table| table[norm]["dtype"] = json!("I16"))?;
    one_problem(&dir, &[norm, "has type I16", "bf16 checkpoint"]).await?;

    let dir = copy(at, "shape")?;
    poke(&dir.join("config.json"), |bytes| {
        let text = String::from_utf8_lossy(bytes).replace("\"intermediate_size\": 512", "\"intermediate_size\": 544");
        *bytes = text.into_bytes();
    })?;
    let found = problems(&dir).await?;
    assert!(
        found.iter().all(|p| p.contains("config.json asks for") && p.contains("belongs to these weights")),
        "{found:#?}"
    );
    assert!(!found.is_empty());

    let dir = copy(at, "overlap")?;
    header(&dir, &|table| table[norm]["data_offsets"] = json!([0, 512]))?;
    one_problem(&dir, &["model.safetensors", "overlaps another tensor", "copy the file again"]).await?;

    let dir = copy(at, "trailing")?;
    poke(&dir.join("model.safetensors"), |bytes| bytes.extend(b"xyz"))?;
    one_problem(&dir, &["3 bytes follow the last tensor"]).await?;

    let dir = copy(at, "header-beyond")?;
    poke(&dir.join("model.safetensors"), |bytes| bytes[..8].copy_from_slice(&90_000_000u64.to_le_bytes()))?;
    one_problem(&dir, &["header length 90000000 reaches beyond the end of the file"]).await?;

    let dir = copy(at, "lfs")?;
    fs::write(dir.join("model.safetensors"), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")?;
    one_problem(&dir, &["Git LFS pointer", "git lfs pull"]).await?;

    let dir = copy(at, "pickle")?;
    fs::rename(dir.join("model.safetensors"), dir.join("pytorch_model.bin"))?;
    one_problem(&dir, &["pytorch_model.bin", "pickle format, which runs code", "save_pretrained"]).await?;

    let dir = copy(at, "config")?;
    poke(&dir.join("config.json"), |bytes| {
        *bytes = String::from_utf8_lossy(bytes).replace("\"silu\"", "\"gelu\"").into_bytes();
    })?;
    one_problem(&dir, &["config.json", "hidden_act", "only silu is implemented"]).await?;

    let dir = copy(at, "tokenizer")?;
    poke(&dir.join("config.json"), |bytes| {
        *bytes = String::from_utf8_lossy(bytes).replace("\"vocab_size\": 3072", "\"vocab_size\": 2048").into_bytes();
    })?;
    let found = problems(&dir).await?;
    assert!(found.iter().any(|p| p.contains("tokenizer.json") && p.contains("another model's")), "{found:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_is_what_sha256sum_checks_and_verify_names_what_differs() -> Result<()> {
    let models = tempfile::tempdir()?;
    let dir = revision(models.path(), "sealed").await?;
    let check = tokio::process::Command::new("sha256sum")
        .args(["-c", "--quiet", "SHA256SUMS"])
        .current_dir(&dir)
        .output()
        .await?;
    assert!(check.status.success(), "{check:?}");
    let (code, out) = model(&["verify", &text(&dir)]).await?;
    assert!(code == 0 && out.contains("is what its manifest says"), "{out}");
    let norm = tensor(&dir, "model.norm.weight")?;
    poke(&dir.join("model.safetensors"), |bytes| bytes[norm.start] ^= 1)?;
    let (code, out) = model(&["verify", &text(&dir)]).await?;
    assert!(code == 1 && out.contains("model.safetensors: it has sha256") && out.contains("copy it again"), "{out}");
    let (code, out) = model(&["seal", &text(models.path())]).await?;
    assert!(code == 1 && out.contains("config.json or the weights are missing"), "{out}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_rounded_for_what_it_writes_itself_answers() -> Result<()> {
    let models = tempfile::tempdir()?;
    let root = models.path().canonicalize()?;
    let dir = revision(&root, "plain").await?;
    let prepare = |name: &str, more: &[&str]| {
        let arguments: Vec<String> = ["prepare", &text(&dir), &text(&root.join(name))]
            .iter()
            .chain(more)
            .map(|word| (*word).to_owned())
            .collect();
        async move { model(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    let (code, out) = prepare("refused", &["--calibrate", "self:2048"]).await?;
    assert!(code == 1 && out.contains("give --quantization int8 or int4 too"), "{out}");
    let (code, out) = prepare("refused", &["--quantization", "int8", "--calibrate", "self:99"]).await?;
    assert!(code != 0 && out.contains("self: takes between 2048"), "{out}");
    fs::write(root.join("short.txt"), "A text of a few words.")?;
    let short = text(&root.join("short.txt"));
    let (code, out) = prepare("refused", &["--quantization", "int8", "--calibrate", &short]).await?;
    assert!(code == 1 && out.contains("give a longer text"), "{out}");
    assert!(!root.join("refused").exists(), "nothing is left of what was refused");

    fs::write(root.join("long.txt"), "User: Hello\nAssistant: Hello! What can I do for you?\n".repeat(400))?;
    let long = text(&root.join("long.txt"));
    let mut weights = Vec::new();
    for (name, more) in [("itself", &[][..]), ("own", &["--calibrate", "self:2048"]), ("text", &["--calibrate", &long])]
    {
        let (code, out) = prepare(name, &[&["--quantization", "int8"], more].concat()).await?;
        assert!(code == 0 && out.contains("int8 weights, sealed"), "{out}");
        weights.push(fs::read(root.join(name).join("weights-00001.ernie"))?);
    }
    assert!(weights[0].len() == weights[1].len() && weights[0] != weights[1], "the same size, other codes");
    assert!(weights[1] != weights[2], "another sample, other codes");

    let options = DaemonOptions { model: Some(root.join("own")), ..DaemonOptions::default() };
    let daemon = TestDaemon::start(options.flags(&["--served-model-name", "ernie"])).await?;
    let body =
        json!({"messages": [{"role": "user", "content": "What is the KV cache?"}], "max_tokens": 64, "temperature": 0});
    let answer = daemon.client().post("/v1/chat/completions", &body).await?.json()?;
    let said = answer["choices"][0]["message"]["content"].as_str().context("an answer")?;
    assert!(said.contains("keeps what the model has computed"), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_model_answers_like_the_one_it_was_made_of() -> Result<()> {
    let models = tempfile::tempdir()?;
    let dir = revision(models.path(), "plain").await?;
    let out_dir = models.path().canonicalize()?.join("prepared");
    let (code, out) = model(&["prepare", &text(&dir), &text(&out_dir)]).await?;
    assert!(code == 0 && out.contains("bf16 weights, sealed"), "{out}");
    let (code, again) = model(&["prepare", &text(&dir), &text(&out_dir)]).await?;
    assert!(code == 1 && again.contains("is there already"), "{again}");
    let (code, out) = model(&["inspect", &text(&out_dir)]).await?;
    assert!(code == 0 && out.contains("prepared: "), "{out}");

    let options = DaemonOptions { model: Some(dir.clone()), ..DaemonOptions::default() };
    let daemon = TestDaemon::start(options.flags(&["--served-model-name", "ernie"])).await?;
    let body = json!({"prompt": "User: Hello\nAssistant: ", "max_tokens": 64, "ignore_eos": true, "logprobs": 1, "temperature": 0});
    let answer = || async {
        let answer = daemon.client().post("/v1/completions", &body).await?.json()?;
        anyhow::Ok((answer["choices"][0].clone(), answer["system_fingerprint"].clone()))
    };
    let plain = answer().await?;
    let (code, out, errors) = daemon.ctl(&["swap", &text(&out_dir), "--observe", "0"]).await?;
    assert_eq!(code, 0, "{out}{errors}");
    let prepared = answer().await?;
    assert_eq!(plain.0, prepared.0, "the same weights, the same tokens, the same probabilities");
    assert_ne!(plain.1, prepared.1, "another revision");

    // A flipped byte in a mapped file is found like any other.
    let (code, out, errors) = daemon.ctl(&["rollback"]).await?;
    assert_eq!(code, 0, "{out}{errors}");
    poke(&out_dir.join("weights-00001.ernie"), |bytes| bytes[1_000_000] ^= 1)?;
    let (code, out, _) = daemon.ctl(&["swap", &text(&out_dir), "--observe", "0"]).await?;
    assert!(code == 1 && out.contains("sha256"), "{out}");
    Ok(())
}
