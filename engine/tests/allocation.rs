//! A step allocates nothing once the runner is warm. Alone in its binary: the counting allocator counts every thread.

mod common;
mod counting;

use common::*;
use counting::ALLOCATIONS;
use ernie_engine::runner::{ModelRunner, Want};
use std::sync::atomic::Ordering;

#[test]
fn a_step_allocates_nothing() {
    for (moe, options) in [(false, small as fn(&std::path::Path) -> _), (true, small), (true, small_f32)] {
        let dir = random_model(moe, 1);
        let mut runner = load(&options(dir.path()));
        let lengths = [200, 100, 1, 40];
        let sequences: Vec<_> = lengths.iter().map(|&len| random_tokens(len as u64, len, 515)).collect();
        let tables = tables(&runner, &lengths, Some(1));
        let pieces: Vec<_> =
            lengths.iter().enumerate().map(|(sequence, &len)| Piece { sequence, tokens: 0..len }).collect();
        let decode: Vec<_> =
            lengths.iter().enumerate().map(|(sequence, &len)| Piece { sequence, tokens: len - 1..len }).collect();
        let mut prefill = batch(&sequences, &tables, &pieces, Some(Want::Greedy));
        prefill.sample_rows.retain(|r| r.token % 20 == 0);
        let greedy = batch(&sequences, &tables, &decode, Some(Want::Greedy));
        let logits = batch(&sequences, &tables, &decode, Some(Want::Logits));
        // The runner warmed itself up; not one step of these shapes was run before.
        for step in [&prefill, &greedy, &logits, &prefill, &logits, &greedy] {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            runner.execute(step).unwrap();
            (0..step.sample_rows.len()).for_each(|i| _ = std::hint::black_box(runner.row(i)));
            let after = ALLOCATIONS.load(Ordering::Relaxed);
            assert_eq!(after - before, 0, "moe {moe}, {} tokens", step.tokens.len());
        }
    }
}
