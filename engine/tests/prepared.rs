//! Prepared folders: the same logits to the bit as the folder they were made of, in every form; and bytes that are damaged or
//! exchanged are refused, never read past.

mod common;

use common::*;
use ernie_engine::model::{Manifest, WeightPlan, inspect};
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{LoadOptions, Quantization};
use ernie_engine::runner::prepare::prepare;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Prepares `dir` as `options` say into a fresh folder.
fn prepared(options: &LoadOptions) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let report = prepare(options, out.path(), &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    assert!(report.bytes > 0);
    std::fs::copy(options.model_dir.join("config.json"), out.path().join("config.json")).unwrap();
    out
}

fn logits(options: &LoadOptions) -> Vec<Vec<u32>> {
    let mut runner = load(options);
    let rows = alone(&mut runner, &random_tokens(5, 40, 500));
    (0..40).map(|i| bits(&rows[&i])).collect()
}

fn refusal(options: &LoadOptions) -> String {
    let error = CpuRunner::load(options, &mut |_| {}).expect_err("refused").to_string();
    assert!(!error.contains('\n'), "one line: {error}");
    error
}

#[test]
fn a_prepared_model_computes_the_same_to_the_bit() {
    for moe in [false, true] {
        let model = random_model(moe, 11);
        let plain = small(model.path());
        let forms = [
            plain.clone(),
            small_f32(model.path()),
            LoadOptions { quantization: Quantization::Int8, ..plain.clone() },
            LoadOptions { quantization: Quantization::Int4, ..plain },
        ];
        for options in forms {
            let out = prepared(&options);
            // The form is the folder's; nobody has to say it again, and who does is right.
            let silent = LoadOptions { model_dir: out.path().into(), ..small(model.path()) };
            assert_eq!(logits(&silent), logits(&options), "moe {moe} {:?} {:?}", options.dtype, options.quantization);
            logits(&LoadOptions { model_dir: out.path().into(), ..options.clone() });
            assert_eq!(inspect(out.path()).problems, []);
        }
    }
}

#[test]
fn another_form_than_the_prepared_one_is_refused() {
    let model = random_model(false, 12);
    let out = prepared(&small(model.path()));
    let wish = LoadOptions { quantization: Quantization::Int8, ..small(out.path()) };
    assert!(refusal(&wish).contains("prepared in another weight form"));
}

#[test]
fn weights_that_an_earlier_version_prepared_are_still_what_was_asked_for() {
    let model = random_model(false, 15);
    let earlier = LoadOptions { plan: WeightPlan::parse("int8g128-ag-r"), ..small(model.path()) };
    let out = prepared(&earlier);
    let wish = LoadOptions { quantization: Quantization::Int8, ..small(out.path()) };
    assert_eq!(logits(&wish), logits(&earlier));
    let wish = LoadOptions { quantization: Quantization::Int4, ..small(out.path()) };
    assert!(refusal(&wish).contains("prepared in another weight form"));
}

#[test]
fn a_prepared_folder_is_verified_while_it_is_mapped() {
    let model = random_model(true, 13);
    let out = prepared(&small(model.path()));
    let weights = out.path().join("weights-00001.ernie");
    let mut manifest = Manifest::default();
    for name in ["config.json", "prepared.json", "weights-00001.ernie"] {
        let digest = Sha256::digest(std::fs::read(out.path().join(name)).unwrap()).into();
        manifest.digests.insert(name.to_owned(), digest);
    }
    let options = LoadOptions { verify: Some(manifest.clone()), ..small(out.path()) };
    load(&options);
    let whole = std::fs::read(&weights).unwrap();
    let mut flipped = whole.clone();
    let last = flipped.len() - 100;
    flipped[last] ^= 1;
    std::fs::write(&weights, flipped).unwrap();
    assert!(refusal(&options).contains("sha256"));
    std::fs::write(&weights, whole).unwrap();
    let mut short = manifest;
    short.digests.remove("prepared.json");
    assert!(refusal(&LoadOptions { verify: Some(short), ..options }).contains("missing in the manifest"));
}

#[test]
fn damaged_prepared_files_are_refused_by_name() {
    let model = random_model(true, 14);
    let out = prepared(&small(model.path()));
    let (table, weights) = (out.path().join("prepared.json"), out.path().join("weights-00001.ernie"));
    let (text, bytes) = (std::fs::read_to_string(&table).unwrap(), std::fs::read(&weights).unwrap());
    let with_table = |text: &str| {
        std::fs::write(&table, text).unwrap();
        refusal(&small(out.path()))
    };
    for (from, to, cause) in [
        ("\"version\":1", "\"version\":2", "version 2"),
        ("bf16/bf16", "bf17/bf16", "weight forms are unknown"),
        ("weights-00001.ernie", "../weights-00001.ernie", "no name of a weight file"),
        ("\"offset\":0,", "\"offset\":1,", "lies outside its file"),
        ("model.norm.weight", "model.other.weight", "model.norm.weight: it is missing"),
    ] {
        let changed = text.replace(from, to);
        assert_ne!(changed, text, "{from}");
        let error = with_table(&changed);
        assert!(error.contains(cause) && error.contains("prepare"), "{from} -> {to}: {error}");
    }
    assert!(with_table("{").contains("prepared.json"));
    std::fs::write(&table, &text).unwrap();
    // Cut anywhere, and any byte of the first matrix's header broken: an error, or the same model (reserved bytes).
    for length in [0, 63, 64, 1000, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&weights, &bytes[..length]).unwrap();
        assert!(refusal(&small(out.path())).contains("lies outside its file"), "{length} bytes");
    }
    for at in 0..64 {
        let mut broken = bytes.clone();
        broken[at] ^= 0x55;
        std::fs::write(&weights, broken).unwrap();
        let _ = CpuRunner::load(&small(out.path()), &mut |_| {});
    }
    assert!(Path::new(&weights).exists());
}
