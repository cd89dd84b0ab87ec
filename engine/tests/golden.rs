//! Parity with transformers on the golden checkpoints, in float32, and proof that the goldens would notice the mistakes
//! that other implementations made (half-split rotation, a dropped or misplaced correction bias).

mod common;

use common::*;
use ernie_engine::model::Observer;
use ernie_engine::runner::{ModelRunner, Row, Want};
use ernie_kernels::Routing;
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn prompts(name: &str) -> Vec<Value> {
    golden(name)["prompts"].as_array().unwrap().clone()
}

#[test]
fn greedy_ids_are_those_of_transformers() {
    for name in GOLDEN {
        let mut runner = load(&small_f32(&golden_dir(name)));
        for prompt in prompts(name) {
            let expected = ids(&prompt["greedy"]);
            let got = greedy(&mut runner, &ids(&prompt["ids"]), expected.len());
            assert_eq!(got, expected, "{name} {}", prompt["name"]);
        }
    }
}

#[test]
fn logits_are_within_a_thousandth_of_transformers() {
    for name in GOLDEN {
        let mut runner = load(&small_f32(&golden_dir(name)));
        for prompt in prompts(name) {
            let prompt_ids = ids(&prompt["ids"]);
            let rows = alone(&mut runner, &prompt_ids);
            let row = &rows[&(prompt_ids.len() - 1)];
            for pair in prompt["logits"]["top"].as_array().unwrap() {
                let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap() as f32);
                assert!((row[id] - value).abs() < 1e-3, "{name} {}: id {id} {} {value}", prompt["name"], row[id]);
            }
            let n = row.len() as f64;
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let l2 = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let std = (l2 * l2 / n - mean * mean).sqrt();
            for (what, got) in [("mean", mean), ("std", std), ("l2", l2)] {
                let expected = prompt["logits"][what].as_f64().unwrap();
                assert!((got - expected).abs() < 1e-3 * expected.abs().max(1.0), "{name} {what}: {got} {expected}");
            }
        }
    }
}

/// Chosen experts and their weights at the last token, per MoE layer.
#[derive(Default)]
struct LastRouting(Vec<Vec<(u32, f32)>>);

impl Observer for LastRouting {
    fn routed(&mut self, _layer: usize, routing: &Routing, rows: usize) {
        let last = (rows - 1) * routing.top_k..rows * routing.top_k;
        let mut chosen: Vec<_> =
            routing.experts[last.clone()].iter().copied().zip(routing.weights[last].iter().copied()).collect();
        chosen.sort_by_key(|c| c.0);
        self.0.push(chosen);
    }
}

fn routing_of(runner: &mut ernie_engine::runner::cpu::CpuRunner, prompt: &[u32]) -> Vec<Vec<(u32, f32)>> {
    let tables = tables(runner, &[prompt.len()], None);
    let pieces = [Piece { sequence: 0, tokens: 0..prompt.len() }];
    let mut observer = LastRouting::default();
    runner.execute_observed(&batch(&[prompt.to_vec()], &tables, &pieces, Some(Want::Greedy)), &mut observer).unwrap();
    observer.0
}

fn golden_routing(prompt: &Value) -> Vec<Vec<(u32, f32)>> {
    let layer = |layer: &Value| {
        let weights = layer["weights"].as_array().unwrap().iter().map(|w| w.as_f64().unwrap() as f32);
        let mut chosen: Vec<_> = ids(&layer["experts"]).into_iter().zip(weights).collect();
        chosen.sort_by_key(|c| c.0);
        chosen
    };
    prompt["router"].as_array().unwrap().iter().map(layer).collect()
}

/// The experts are the same and every weight is within `tolerance`.
fn same_routing(a: &[Vec<(u32, f32)>], b: &[Vec<(u32, f32)>], tolerance: f32) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() <= tolerance)
        })
}

#[test]
fn chosen_experts_and_their_weights_are_those_of_transformers() {
    for name in ["tiny-moe", "tiny-moe-sharded"] {
        let mut runner = load(&small_f32(&golden_dir(name)));
        for prompt in prompts(name) {
            let (got, expected) = (routing_of(&mut runner, &ids(&prompt["ids"])), golden_routing(&prompt));
            assert_eq!(expected.len(), 3);
            assert!(same_routing(&got, &expected, 1e-4), "{name} {}: {got:?} {expected:?}", prompt["name"]);
        }
    }
}

#[test]
fn expert_counters_count_every_routed_token() {
    let mut runner = load(&small_f32(&golden_dir("tiny-moe")));
    assert!(runner.expert_tokens().iter().flatten().all(|&n| n == 0), "the warm-up is not counted");
    alone(&mut runner, &random_tokens(1, 20, 512));
    let per_layer: Vec<u64> = runner.expert_tokens().iter().map(|l| l.iter().sum()).collect();
    assert_eq!(per_layer, [0, 40, 40, 40], "20 tokens to two experts each; the first layer is dense");
    assert!(load(&small_f32(&golden_dir("tiny-dense"))).expert_tokens().iter().all(Vec::is_empty));
}

/// How many prompts' greedy ids an edited model still gets right.
fn prompts_still_right(name: &str, edit: impl FnOnce(&mut Tensors)) -> usize {
    let dir = edited(name, edit);
    let mut runner = load(&small_f32(dir.path()));
    let right = |p: &&Value| greedy(&mut runner, &ids(&p["ids"]), ids(&p["greedy"]).len()) == ids(&p["greedy"]);
    prompts(name).iter().filter(right).count()
}

#[test]
fn an_unedited_copy_of_a_golden_model_is_right() {
    for name in GOLDEN {
        assert_eq!(prompts_still_right(name, |_| {}), prompts(name).len(), "{name}");
    }
}

/// Reorders the rows of each head so that rotating neighbours computes what half-split rotation of the original does:
/// row 2i takes the place of i, row 2i+1 that of i + head_dim/2. Scores q.k do not see a common reordering otherwise.
fn half_split(tensors: &mut Tensors, head_dim: usize) {
    for (name, tensor) in tensors.iter_mut().filter(|(n, _)| n.contains("q_proj") || n.contains("k_proj")) {
        let (rows, values) = (tensor.shape[0], tensor.values());
        let row = |r: usize| values[r * tensor.shape[1]..(r + 1) * tensor.shape[1]].iter().copied();
        let from = |r: usize| r / head_dim * head_dim + (r % head_dim) / 2 + (r % 2) * head_dim / 2;
        let edited = Stored::bf16(&tensor.shape, (0..rows).flat_map(|r| row(from(r))));
        assert_ne!(edited.bytes, tensor.bytes, "{name}");
        *tensor = edited;
    }
}

#[test]
fn half_split_rotation_would_be_noticed() {
    for name in GOLDEN {
        let right = prompts_still_right(name, |tensors| half_split(tensors, 16));
        // A prompt of one token has only position 0 at first, but its continuation does not.
        assert_eq!(right, 0, "{name}: greedy ids of half-split rotation must differ");
    }
}

#[test]
fn a_dropped_correction_bias_would_be_noticed() {
    for name in ["tiny-moe", "tiny-moe-sharded"] {
        let dropped = |tensors: &mut Tensors| {
            for (_, bias) in tensors.iter_mut().filter(|(n, _)| n.ends_with("e_score_correction_bias")) {
                *bias = Stored::f32(&bias.shape.clone(), std::iter::repeat_n(0.0, bias.shape.iter().product()));
            }
        };
        assert_eq!(prompts_still_right(name, dropped), 0, "{name}");
        let dir = edited(name, dropped);
        let mut runner = load(&small_f32(dir.path()));
        let same = |p: &&Value| same_routing(&routing_of(&mut runner, &ids(&p["ids"])), &golden_routing(p), 1e-4);
        assert!(prompts(name).iter().filter(same).count() < prompts(name).len() / 2, "{name}: other experts");
    }
}

#[test]
fn a_correction_bias_in_the_weights_would_be_noticed() {
    for name in ["tiny-moe", "tiny-moe-sharded"] {
        let tensors = read_tensors(&golden_dir(name));
        for prompt in prompts(name) {
            for (layer, chosen) in golden_routing(&prompt).iter().enumerate() {
                let bias =
                    tensors[&format!("model.layers.{}.mlp.moe_statics.e_score_correction_bias", layer + 1)].values();
                let sum: f32 = chosen.iter().map(|c| bias[c.0 as usize]).sum();
                // The goldens do not tell how much probability the chosen had together: whatever it was,
                // (p + bias) / sum(p + bias) is further from the golden weight than the parity test tolerates.
                for mass in (1..=100).map(|percent| percent as f32 / 100.0) {
                    let off = chosen.iter().map(|c| ((c.1 * mass + bias[c.0 as usize]) / (mass + sum) - c.1).abs());
                    assert!(off.fold(0.0, f32::max) > 2e-4, "{name} {} layer {layer} mass {mass}", prompt["name"]);
                }
            }
        }
    }
}

#[test]
fn bf16_weights_answer_like_float32_on_nearly_every_step() {
    for name in GOLDEN {
        let mut runner = load(&small(&golden_dir(name)));
        let (mut equal, mut total) = (0, 0);
        for prompt in prompts(name) {
            // Teacher-forced: one rounded choice must not derail the rest.
            let (prompt_ids, expected) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
            let all: Vec<u32> = prompt_ids.iter().chain(&expected).copied().collect();
            let rows = alone(&mut runner, &all);
            for (i, id) in expected.iter().enumerate() {
                let (best, _) = ernie_kernels::sample::argmax(&rows[&(prompt_ids.len() - 1 + i)]);
                equal += usize::from(best == *id);
                total += 1;
            }
        }
        assert!(equal * 100 >= total * 95, "{name}: {equal} of {total}");
    }
}

#[test]
fn a_greedy_row_is_the_argmax_of_its_logits() {
    for (name, float32) in [("tiny-dense", true), ("tiny-moe", true), ("tiny-moe", false)] {
        let options = if float32 { small_f32(&golden_dir(name)) } else { small(&golden_dir(name)) };
        let mut runner = load(&options);
        let sequences = [random_tokens(3, 50, 512)];
        let tables = tables(&runner, &[50], None);
        let pieces = [Piece { sequence: 0, tokens: 0..50 }];
        let rows = run(&mut runner, &sequences, &tables, &[pieces.to_vec()]).remove(0);
        let mut step = batch(&sequences, &tables, &pieces, Some(Want::Greedy));
        for mixed in [false, true] {
            if mixed {
                step.sample_rows[7].want = Want::Logits;
            }
            runner.execute(&step).unwrap();
            for i in 0..50 {
                let (id, value) = ernie_kernels::sample::argmax(&rows[&i]);
                match runner.row(i) {
                    Row::Greedy { token, logit } => assert_eq!((token, logit.to_bits()), (id, value.to_bits())),
                    Row::Logits(row) => assert!(mixed && i == 7 && bits(row) == bits(&rows[&i])),
                }
            }
        }
    }
}
