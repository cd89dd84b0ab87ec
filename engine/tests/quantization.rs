//! What quantised forms of a model keep of it: a turned residual stream is the same model, outliers do not spoil 8-bit
//! activations, rounding for the inputs beats rounding for itself.

mod common;

use common::*;
use ernie_engine::model::{Calibration, WeightPlan};
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{LoadOptions, Quantization};
use std::path::Path;
use std::sync::Arc;

fn with_plan(dir: &Path, name: &str) -> LoadOptions {
    LoadOptions { plan: Some(WeightPlan::parse(name).unwrap()), ..small(dir) }
}

/// Logits of a fixed sequence, position after position.
fn logits(runner: &mut CpuRunner) -> Vec<f32> {
    let rows = alone(runner, &random_tokens(5, 200, 515));
    let mut positions: Vec<_> = rows.keys().copied().collect();
    positions.sort_unstable();
    positions.iter().flat_map(|p| rows[p].iter().copied()).collect()
}

/// Root mean square of the difference, relative to the expected values.
fn error(expected: &[f32], got: &[f32]) -> f64 {
    assert_eq!(expected.len(), got.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let wrong: f64 = expected.iter().zip(got).map(|(a, b)| square(a - b)).sum();
    (wrong / expected.iter().map(|&a| square(a)).sum::<f64>()).sqrt()
}

fn error_of(dir: &Path, name: &str) -> f64 {
    let expected = logits(&mut load(&with_plan(dir, "f32")));
    error(&expected, &logits(&mut load(&with_plan(dir, name))))
}

#[test]
fn a_turned_model_is_the_same_model() {
    for plan in ["f32-r", "f32-rr"] {
        for moe in [false, true] {
            let dir = random_model(moe, 21);
            let found = error_of(dir.path(), plan);
            assert!(found < 1e-4, "{plan}, moe {moe}: logits off by {found}");
        }
        for name in GOLDEN {
            let expected = logits_of_golden(name, "f32");
            let found = error(&expected, &logits_of_golden(name, plan));
            assert!(found < 1e-4, "{plan}, {name}: logits off by {found}");
        }
    }
}

fn logits_of_golden(name: &str, plan: &str) -> Vec<f32> {
    let dir = golden_dir(name);
    let mut runner = load(&with_plan(&dir, plan));
    let vocab = runner.report().config.vocab_size as u32;
    let rows = alone(&mut runner, &random_tokens(6, 64, vocab));
    let mut positions: Vec<_> = rows.keys().copied().collect();
    positions.sort_unstable();
    positions.iter().flat_map(|p| rows[p].iter().copied()).collect()
}

/// A model in which one residual channel is far larger than all others, as the published 0.3B has one.
fn with_a_huge_channel(moe: bool) -> tempfile::TempDir {
    let config = random_config(moe);
    let mut tensors = random_tensors(&config, 22);
    let hidden = 128;
    let embedding = tensors.get_mut("model.embed_tokens.weight").unwrap();
    let values: Vec<f32> = embedding.values();
    let huge = values.iter().enumerate().map(|(i, &x)| if i % hidden == 37 { 4.0 + x } else { x });
    *embedding = Stored::bf16(&embedding.shape.clone(), huge);
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config, &tensors);
    dir
}

#[test]
fn one_huge_channel_does_not_spoil_the_others() {
    for moe in [false, true] {
        let dir = with_a_huge_channel(moe);
        let plain = error_of(dir.path(), "int8");
        for turned in ["int8-dg-r", "int8-rr"] {
            let found = error_of(dir.path(), turned);
            println!("moe {moe}: int8 {plain:.4}, {turned} {found:.4}");
            assert!(found < 0.8 * plain, "moe {moe}: {found} with {turned} against {plain} with the channel as it is");
            assert!(found < 0.03, "moe {moe}, {turned}: {found}");
        }
    }
}

#[test]
fn rounding_for_the_inputs_brings_the_model_closer() {
    for moe in [false, true] {
        let dir = with_a_huge_channel(moe);
        let sequences = (0..32).map(|i| random_tokens(900 + i, 128, 515));
        let calibration = Some(Arc::new(Calibration::new(sequences)));
        let expected = logits(&mut load(&with_plan(dir.path(), "f32")));
        let plain = with_plan(dir.path(), "int4g128-dg-r");
        let informed = LoadOptions { calibration, ..plain.clone() };
        let plain = error(&expected, &logits(&mut load(&plain)));
        let informed = error(&expected, &logits(&mut load(&informed)));
        println!("moe {moe}: int4 {plain:.4}, calibrated {informed:.4}");
        assert!(informed < plain, "moe {moe}: {informed} is no better than {plain}");
    }
}

#[test]
fn calibrated_weights_are_the_same_every_time() {
    let dir = random_model(true, 23);
    let sequences = (0..16).map(|i| random_tokens(i, 128, 515));
    let calibration = Some(Arc::new(Calibration::new(sequences)));
    let options = |threads| LoadOptions {
        calibration: calibration.clone(),
        threads,
        quantization: Quantization::Int4,
        ..small(dir.path())
    };
    let (one, two) = (logits(&mut load(&options(1))), logits(&mut load(&options(2))));
    assert!(one.iter().zip(&two).all(|(a, b)| a.to_bits() == b.to_bits()), "threads changed the weights");
}
