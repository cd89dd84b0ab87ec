//! Batch invariance of the real runner: logits of a sequence are bit-equal however it is cut into steps, whoever shares
//! its batch, wherever its blocks lie and however many threads compute it; for every weight kind, dense and MoE.

mod common;

use common::*;
use ernie_engine::model::WeightPlan;
use ernie_engine::runner::options::LoadOptions;
use ernie_engine::runner::{ModelRunner, StepBatch};
use ernie_kernels::{KvKind, WeightKind};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::path::Path;

/// Crosses a 128-key attention chunk and ends inside a block.
const LEN: usize = 150;

fn plans() -> Vec<(&'static str, WeightPlan)> {
    let names = [
        "f32",
        "bf16",
        "bf16-kv8",
        "int8",
        "int8-ag",
        "int8-ag-kv8",
        "int8g128-dg",
        "int4g128",
        "int4g32zp-ag-h16",
        "int8-dg-r",
        "int4g128-dg-r",
    ];
    let mut plans: Vec<_> = names.iter().map(|&name| (name, WeightPlan::parse(name).unwrap())).collect();
    let int4 = WeightKind::Int4 { group: 64, zero_point: false };
    plans.push(("int4 experts", WeightPlan { experts: int4.into(), ..WeightPlan::uniform(WeightKind::Bf16) }));
    plans.push(("f32 with bf16 kv", WeightPlan { kv: KvKind::Bf16, ..WeightPlan::float32() }));
    plans
}

fn options(dir: &Path, plan: WeightPlan, threads: usize) -> LoadOptions {
    LoadOptions { plan: Some(plan), threads, ..small(dir) }
}

fn assert_same(what: &str, expected: &HashMap<usize, Vec<f32>>, got: &HashMap<usize, Vec<f32>>) {
    assert!(!got.is_empty(), "{what}: nothing was computed");
    for (position, row) in got {
        let differing = row.iter().zip(&expected[position]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differing, 0, "{what}: logits at position {position} differ");
    }
}

fn piece(sequence: usize, tokens: std::ops::Range<usize>) -> Piece {
    Piece { sequence, tokens }
}

/// Runs `check` for every weight kind, dense and MoE.
fn for_every_kind(check: impl Fn(&str, &Path, WeightPlan)) {
    for moe in [false, true] {
        let dir = random_model(moe, 11);
        for (name, plan) in plans() {
            check(&format!("{} {name}", if moe { "moe" } else { "dense" }), dir.path(), plan);
        }
    }
}

#[test]
fn one_token_at_a_time_gives_the_bits_of_one_step() {
    for_every_kind(|what, dir, plan| {
        let mut runner = load(&options(dir, plan, 2));
        let ids = random_tokens(1, LEN, 515);
        let expected = alone(&mut runner, &ids);
        assert!(expected[&(LEN - 1)].iter().all(|x| x.is_finite()), "{what}");
        let steps: Vec<_> = (0..LEN).map(|i| vec![piece(0, i..i + 1)]).collect();
        let tables = tables(&runner, &[LEN], None);
        assert_same(what, &expected, &run(&mut runner, &[ids], &tables, &steps)[0]);
    });
}

#[test]
fn a_prompt_cut_at_any_boundary_gives_the_same_bits() {
    for_every_kind(|what, dir, plan| {
        let mut runner = load(&options(dir, plan, 2));
        let ids = random_tokens(2, LEN, 515);
        let expected = alone(&mut runner, &ids);
        // Every boundary for the form that is served most; the other kinds share the attention and differ in GEMMs only.
        let every = if what.ends_with("bf16") || what.ends_with("bf16-kv8") { 1 } else { 13 };
        for cut in (1..LEN).step_by(every) {
            let tables = tables(&runner, &[LEN], (cut % 3 == 0).then_some(cut as u64));
            let steps = [vec![piece(0, 0..cut)], vec![piece(0, cut..LEN)]];
            let got = run(&mut runner, std::slice::from_ref(&ids), &tables, &steps);
            assert_same(&format!("{what}, cut at {cut}"), &expected, &got[0]);
        }
    });
}

/// Random pieces of many sequences until all are computed; every sequence is first come, first cut.
fn random_steps(rng: &mut ChaCha8Rng, lengths: &[usize]) -> Vec<Vec<Piece>> {
    let mut done = vec![0; lengths.len()];
    let mut steps = Vec::new();
    while done.iter().zip(lengths).any(|(d, l)| d < l) {
        let (mut step, mut budget) = (Vec::new(), 512);
        for (i, &len) in lengths.iter().enumerate() {
            // Some only arrive later, some pause, some decode one by one.
            if done[i] == len || budget == 0 || rng.random_range(0..4) == 0 {
                continue;
            }
            let most = if rng.random_range(0..2) == 0 { 1 } else { 70 };
            let n = (len - done[i]).min(rng.random_range(1..=most)).min(budget);
            step.push(piece(i, done[i]..done[i] + n));
            done[i] += n;
            budget -= n;
        }
        if !step.is_empty() {
            steps.push(step);
        }
    }
    steps
}

#[test]
fn company_does_not_change_a_bit() {
    for_every_kind(|what, dir, plan| {
        let mut runner = load(&options(dir, plan, 2));
        for batch in [2, 8, 33] {
            let mut rng = ChaCha8Rng::seed_from_u64(batch as u64);
            let lengths: Vec<_> = (0..batch).map(|i| if i == 0 { LEN } else { rng.random_range(1..LEN) }).collect();
            let sequences: Vec<_> =
                lengths.iter().enumerate().map(|(i, &len)| random_tokens(100 + i as u64, len, 515)).collect();
            let tables = tables(&runner, &lengths, Some(7));
            let steps = random_steps(&mut rng, &lengths);
            let got = run(&mut runner, &sequences, &tables, &steps);
            // All of them are the product's promise; alone is the slow part, so every fourth is compared.
            for i in (0..batch).step_by(4).chain([1]) {
                let expected = alone(&mut runner, &sequences[i]);
                assert_eq!(got[i].len(), lengths[i]);
                assert_same(&format!("{what}, sequence {i} of {batch}"), &expected, &got[i]);
            }
        }
    });
}

#[test]
fn one_thread_and_two_threads_agree() {
    for_every_kind(|what, dir, plan| {
        let ids = random_tokens(4, LEN, 515);
        let [one, two, three] = [1, 2, 3].map(|threads| alone(&mut load(&options(dir, plan, threads)), &ids));
        assert_same(&format!("{what}, two threads"), &one, &two);
        assert_same(&format!("{what}, three threads"), &one, &three);
    });
}

#[test]
fn the_golden_models_are_batch_invariant() {
    for name in GOLDEN {
        let mut runner = load(&small(&golden_dir(name)));
        let lengths = [LEN, 40, 3, 77];
        let sequences: Vec<_> = lengths.iter().enumerate().map(|(i, &len)| random_tokens(i as u64, len, 512)).collect();
        let tables = tables(&runner, &lengths, Some(3));
        let steps = random_steps(&mut ChaCha8Rng::seed_from_u64(5), &lengths);
        let got = run(&mut runner, &sequences, &tables, &steps);
        for (i, ids) in sequences.iter().enumerate() {
            assert_same(name, &alone(&mut runner, ids), &got[i]);
        }
    }
}

#[test]
fn only_sampled_rows_are_computed_to_the_end_with_the_same_bits() {
    for moe in [false, true] {
        let dir = random_model(moe, 3);
        let mut runner = load(&small(dir.path()));
        let ids = random_tokens(6, LEN, 515);
        let expected = alone(&mut runner, &ids);
        let tables = tables(&runner, &[LEN], None);
        let sequences = [ids];
        for rows in [vec![LEN - 1], vec![0], vec![3, 64, 65, 149], vec![]] {
            let mut step = batch(&sequences, &tables, &[piece(0, 0..LEN)], None);
            let want = ernie_engine::runner::Want::Logits;
            step.sample_rows =
                rows.iter().map(|&r| ernie_engine::runner::SampleRow { token: r as u32, want }).collect();
            runner.execute(&step).unwrap();
            for (i, r) in rows.iter().enumerate() {
                let ernie_engine::runner::Row::Logits(row) = runner.row(i) else { panic!() };
                assert_eq!(bits(row), bits(&expected[r]), "row {r}");
            }
        }
    }
}

#[test]
fn a_copied_block_serves_as_the_original_does() {
    for float32 in [true, false] {
        let dir = random_model(false, 3);
        let mut runner = load(&if float32 { small_f32(dir.path()) } else { small(dir.path()) });
        let ids = random_tokens(8, 40, 515);
        let expected = alone(&mut runner, &ids);
        let sequences = [ids];
        run(&mut runner, &sequences, &[vec![4, 9, 2]], &[vec![piece(0, 0..38)]]);
        // The last block is shared until now: the next step writes to a copy of it.
        let mut step =
            batch(&sequences, &[vec![4, 9, 7]], &[piece(0, 38..40)], Some(ernie_engine::runner::Want::Logits));
        step.copies.push((2, 7));
        runner.execute(&step).unwrap();
        let ernie_engine::runner::Row::Logits(row) = runner.row(1) else { panic!() };
        assert_eq!(bits(row), bits(&expected[&39]));
    }
}

#[test]
fn more_logits_than_there_is_room_for_are_computed_in_parts() {
    let dir = random_model(false, 3);
    let ids = random_tokens(9, 30, 515);
    let expected = alone(&mut load(&small(dir.path())), &ids);
    let mut runner = load(&LoadOptions { max_num_seqs: 4, ..small(dir.path()) });
    assert_same("four rows at a time", &expected, &alone(&mut runner, &ids));
}

#[test]
fn a_batch_beyond_the_sizes_is_refused_and_not_computed() {
    let dir = random_model(false, 3);
    let mut runner = load(&small(dir.path()));
    let sequences = [random_tokens(8, 40, 515)];
    let good = batch(&sequences, &[vec![4, 9, 2]], &[piece(0, 0..40)], Some(ernie_engine::runner::Want::Greedy));
    runner.execute(&good).unwrap();
    let mut broken = |what: &str, break_it: &dyn Fn(&mut StepBatch)| {
        let mut step = good.clone();
        break_it(&mut step);
        let error = runner.execute(&step).expect_err(what).to_string();
        assert!(error.starts_with("step refused: ") && error.contains("defect of the scheduler"), "{error}");
    };
    broken("no token", &|s| s.clear());
    broken("token id", &|s| s.tokens[3] = 515);
    broken("positions", &|s| s.positions[0] = 1);
    broken("slot", &|s| s.slots[0] = u32::MAX);
    broken("block", &|s| s.block_tables[2] = 1 << 20);
    broken("copy", &|s| s.copies.push((0, 1 << 20)));
    broken("table too short", &|s| s.sequences[0].table_len = 2);
    broken("table beyond", &|s| s.sequences[0].table_start = 1);
    broken("tokens of nobody", &|s| s.sequences[0].token_len = 39);
    broken("context", &|s| s.sequences[0].context_len = 1 << 20);
    broken("sample rows", &|s| s.sample_rows.swap(0, 1));
    broken("sample row", &|s| s.sample_rows[39].token = 40);
    broken("slots", &|s| s.slots.truncate(39));
}
