//! Model folders that can not be loaded: each is refused in one line that names the file, the cause and a remedy, before
//! anything is allocated for it.

mod common;

use common::*;
use ernie_engine::model::checkpoint::TensorProblemKind;
use ernie_engine::model::{Checkpoint, CheckpointError, Manifest, ModelConfig};
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{LoadError, LoadOptions};
use sha2::{Digest, Sha256};
use std::path::Path;

fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
    let (config, _) = ModelConfig::read(dir).unwrap();
    Checkpoint::open(dir, &config)
}

/// A copy of a golden folder's files.
fn copied(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden_dir(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// The message for a folder whose `model.safetensors` has these bytes.
fn refusal(bytes: &[u8]) -> String {
    let dir = copied("tiny-dense");
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let error = open(dir.path()).expect_err("these bytes are no model").to_string();
    assert!(!error.contains('\n'), "one line: {error}");
    assert!(error.contains("model.safetensors: "), "names the file: {error}");
    assert!(error.contains("; "), "gives a remedy: {error}");
    error
}

fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn malformed_files_are_refused_by_file_cause_and_remedy() {
    let header_beyond = {
        let mut bytes = with_header("{}", 0);
        bytes[..8].copy_from_slice(&1000u64.to_le_bytes());
        bytes
    };
    let header_huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    let not_utf8 = [&4u64.to_le_bytes()[..], &[0x7b, 0xff, 0xfe, 0x7d]].concat();
    let tensor =
        |offsets: &str, shape: &str| format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#);
    let overlapping = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let whole = std::fs::read(golden_dir("tiny-dense").join("model.safetensors")).unwrap();
    let longer = [&whole[..], b"xyz"].concat();
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 721495552\n";
    let cases: &[(&[u8], &str)] = &[
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (&header_beyond, "header length 1000 reaches beyond the end of the file (10 bytes)"),
        (&header_huge, "more than the 100 MB a header may have"),
        (&not_utf8, "the header is not UTF-8"),
        (&with_header("{nonsense", 0), "the header is not a table of tensors"),
        (&with_header("[]", 0), "the header is not a table of tensors"),
        (&with_header(overlapping, 12), "overlaps another tensor"),
        (&with_header(&tensor("[0,8]", "[3]"), 8), "t has another number of bytes than its shape and type say"),
        (&with_header(&tensor("[8,0]", "[2]"), 8), "t overlaps another tensor or leaves a gap"),
        (&with_header(&tensor("[0,8]", "[9223372036854775807,4]"), 8), "shape overflows"),
        (&with_header(&tensor("[0,8]", "[-1]"), 8), "the header is not a table of tensors"),
        (&with_header(&tensor("[0,8]", "[2]"), 5), "is cut off"),
        (&whole[..whole.len() - 1], "is cut off"),
        (&whole[..5000], "is cut off"),
        (&longer, "3 bytes follow the last tensor"),
        (lfs, "a Git LFS pointer"),
    ];
    for (bytes, cause) in cases {
        let error = refusal(bytes);
        assert!(error.contains(cause), "{cause:?} is not in {error:?}");
    }
}

#[test]
fn a_header_cut_or_flipped_anywhere_never_panics() {
    let whole = std::fs::read(golden_dir("tiny-dense").join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let dir = copied("tiny-dense");
    let file = dir.path().join("model.safetensors");
    for i in (0..header).step_by(7) {
        std::fs::write(&file, &whole[..i]).unwrap();
        open(dir.path()).expect_err("a cut header");
        let mut flipped = whole.clone();
        flipped[i] ^= 1 << (i % 8);
        std::fs::write(&file, &flipped).unwrap();
        // Some flips make another valid header (white space, metadata); none may panic.
        drop(open(dir.path()));
    }
}

#[test]
fn every_tensor_that_does_not_fit_is_listed_at_once() {
    let dir = edited("tiny-moe", |tensors| {
        tensors.remove("model.norm.weight").unwrap();
        tensors.get_mut("model.layers.1.self_attn.v_proj.weight").unwrap().shape.reverse();
        let k = tensors.get_mut("model.layers.1.self_attn.k_proj.weight").unwrap();
        *k = Stored { dtype: safetensors::tensor::Dtype::I16, ..k.clone() };
        tensors.insert("model.layers.9.mlp.gate.weight".into(), Stored::f32(&[1], [0.0].into_iter()));
        tensors.insert("model.mtp_block.0.norm.weight".into(), Stored::f32(&[1], [0.0].into_iter()));
        tensors.insert("lm_head.weight".into(), Stored::f32(&[1], [0.0].into_iter()));
    });
    let error = open(dir.path()).unwrap_err();
    let text = error.to_string();
    let CheckpointError::Tensors { problems, .. } = error else { panic!("{text}") };
    let kinds: Vec<_> = problems.iter().map(|p| (p.name.as_str(), &p.kind)).collect();
    assert_eq!(
        kinds,
        [
            ("model.layers.1.self_attn.k_proj.weight", &TensorProblemKind::WrongDtype { found: "I16".into() }),
            (
                "model.layers.1.self_attn.v_proj.weight",
                &TensorProblemKind::WrongShape { found: vec![64, 32], expected: vec![32, 64] }
            ),
            ("model.norm.weight", &TensorProblemKind::Missing),
            ("model.layers.9.mlp.gate.weight", &TensorProblemKind::Unused),
        ],
        "{text}"
    );
    assert_eq!(text.lines().count(), 5, "{text}");
}

#[test]
fn a_wrong_shape_is_told_with_both_shapes() {
    let dir = edited("tiny-dense", |tensors| {
        let q = tensors.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap();
        q.shape.reverse();
    });
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: model.layers.0.self_attn.q_proj.weight has shape [64, 128], config.json asks for [128, 64]"), "{error}");
}

#[test]
fn shards_and_index_must_agree() {
    let problems = |dir: &Path| match open(dir).unwrap_err() {
        CheckpointError::Tensors { problems, .. } => problems,
        other => panic!("{other}"),
    };
    let index_of = |dir: &Path| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap()).unwrap()
    };
    let first = "model-00001-of-00002.safetensors";
    let second = "model-00002-of-00002.safetensors";

    let dir = copied("tiny-moe-sharded");
    open(dir.path()).unwrap();
    std::fs::remove_file(dir.path().join(second)).unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(second) && error.contains("copy all shards"), "{error}");

    // A tensor in two shards; one that the index puts elsewhere; one that it does not know.
    let dir = copied("tiny-moe-sharded");
    let (mut a, all) = (Tensors::new(), read_tensors(dir.path()));
    let index = index_of(dir.path());
    let home = |name: &str| index["weight_map"][name].as_str().unwrap().to_owned();
    all.iter().filter(|(n, _)| home(n) == first).for_each(|(n, t)| drop(a.insert(n.clone(), t.clone())));
    let foreign = all.keys().find(|n| home(n) == second).unwrap().clone();
    a.insert(foreign.clone(), all[&foreign].clone());
    write_file(&dir.path().join(first), &a);
    let found = problems(dir.path());
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (found[0].name.as_str(), &found[0].kind),
        (foreign.as_str(), &TensorProblemKind::Duplicated { also_in: second.into() })
    );

    let dir = copied("tiny-moe-sharded");
    let moved = all.keys().find(|n| home(n) == first).unwrap().clone();
    let mut index = index_of(dir.path());
    index["weight_map"][&moved] = second.into();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(problems(dir.path()).len(), 1);
    index["weight_map"].as_object_mut().unwrap().remove(&moved);
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(problems(dir.path())[0].kind, TensorProblemKind::NotInIndex);
    index["weight_map"][&moved] = "../outside.safetensors".into();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no file name of a shard"), "{error}");
}

#[test]
fn folders_without_safetensors_are_refused_with_the_way_out() {
    for (name, cause) in [
        ("pytorch_model.bin", "pickle"),
        ("model.pdparams", "Paddle"),
        ("model.gguf", "GGUF"),
        ("other.safetensors", "rename a single file"),
        ("readme.txt", "copy the model's safetensors files"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(golden_dir("tiny-dense").join("config.json"), dir.path().join("config.json")).unwrap();
        std::fs::write(dir.path().join(name), b"x").unwrap();
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(cause), "{name}: {error}");
    }
    let dir = copied("tiny-moe-sharded");
    std::fs::write(dir.path().join("model.safetensors"), b"x").unwrap();
    assert!(open(dir.path()).unwrap_err().to_string().contains("remove the one that is left over"));
}

fn sealed(dir: &Path) -> Manifest {
    let mut manifest = Manifest::default();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let digest = Sha256::digest(std::fs::read(&path).unwrap()).into();
        manifest.digests.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), digest);
    }
    manifest
}

#[test]
fn a_sealed_folder_loads_and_a_flipped_byte_does_not() {
    for name in ["tiny-dense", "tiny-moe-sharded"] {
        let dir = copied(name);
        let manifest = sealed(dir.path());
        let options = |verify| LoadOptions { verify: Some(verify), ..small(dir.path()) };
        load(&options(manifest.clone()));
        let refused = |manifest: &Manifest| {
            CpuRunner::load(&options(manifest.clone()), &mut |_| {}).expect_err("refused").to_string()
        };
        for file in manifest.digests.keys().filter(|n| n.contains("safetensors") || *n == "config.json") {
            let path = dir.path().join(file);
            let whole = std::fs::read(&path).unwrap();
            let mut flipped = whole.clone();
            // The last byte but one: weights in a shard, white space or a brace in JSON.
            let at = flipped.len() - 2;
            flipped[at] = if file.ends_with(".json") { b' ' } else { flipped[at] ^ 1 };
            if flipped != whole {
                std::fs::write(&path, &flipped).unwrap();
                let error = refused(&manifest);
                assert!(error.contains(file.as_str()), "{file}: {error}");
            }
            std::fs::write(&path, &whole).unwrap();
            let mut unlisted = manifest.clone();
            unlisted.digests.remove(file).unwrap();
            let error = refused(&unlisted);
            assert!(error.contains(file.as_str()) && error.contains("missing in the manifest"), "{error}");
        }
        load(&options(manifest));
    }
}

#[test]
fn kv_memory_that_holds_no_sequence_is_refused_with_the_numbers() {
    let refused = |options: LoadOptions| CpuRunner::load(&options, &mut |_| {}).unwrap_err();
    let base = || small(&golden_dir("tiny-dense"));
    // 3 layers x 2 heads x 16 x 2 (k and v) x 2 bytes x 16 tokens = 6 KiB a block.
    let error = refused(LoadOptions { kv_cache_bytes: Some(6 << 10), ..base() });
    let LoadError::KvTooSmall { holds, max_model_len, .. } = &error else { panic!("{error}") };
    assert_eq!((*holds, *max_model_len), (16, 512));
    assert!(error.to_string().contains("= 16 tokens") && error.to_string().contains("--max-model-len"), "{error}");
    // Not asked for a length: what fits is served, unless it is next to nothing.
    let clamped = load(&LoadOptions { kv_cache_bytes: Some(100 * (6 << 10)), max_model_len: None, ..base() });
    use ernie_engine::runner::ModelRunner;
    assert_eq!((clamped.limits().max_model_len, clamped.limits().num_blocks), (1600, 100));
    refused(LoadOptions { kv_cache_bytes: Some(6 << 10), max_model_len: None, ..base() });
    // The budget is too small for the weights alone, or for anything beside them.
    let error = refused(LoadOptions { memory_bytes: 1000, kv_cache_bytes: None, ..base() });
    assert!(matches!(error, LoadError::Memory { .. }), "{error}");
    let error = refused(LoadOptions { memory_bytes: 1 << 20, kv_cache_bytes: None, ..base() });
    assert!(matches!(error, LoadError::KvTooSmall { .. }), "{error}");
    // With a budget, no more blocks than all sequences can fill.
    let roomy = load(&LoadOptions { kv_cache_bytes: None, ..base() });
    assert_eq!(roomy.limits().num_blocks, 40 * 512 / 16);
}
