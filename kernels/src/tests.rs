//! GEMM and experts on every level this CPU has: against f64 over the dequantised operands, against the portable level bit
//! for bit, and against themselves in other company.

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};

use crate::table::{Form, KernelTable};
use crate::*;

pub(crate) const KINDS: [WeightKind; 10] = [
    WeightKind::F32,
    WeightKind::Bf16,
    WeightKind::Int8,
    WeightKind::Int8Group { group: 32 },
    WeightKind::Int8Group { group: 128 },
    WeightKind::Int4 { group: 32, zero_point: false },
    WeightKind::Int4 { group: 64, zero_point: false },
    WeightKind::Int4 { group: 128, zero_point: false },
    WeightKind::Int4 { group: 32, zero_point: true },
    WeightKind::Int4 { group: 128, zero_point: true },
];

/// Every pair of weights and activations.
pub(crate) fn pairs() -> impl Iterator<Item = (WeightKind, ActKind)> {
    KINDS.into_iter().flat_map(|kind| {
        [ActKind::F32, ActKind::Bf16, ActKind::I8, ActKind::I8Group128]
            .into_iter()
            .filter(move |&act| kind.accepts(act))
            .map(move |act| (kind, act))
    })
}

pub(crate) fn random(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| (rng.random::<f32>() + rng.random::<f32>() + rng.random::<f32>() - 1.5) * scale).collect()
}

pub(crate) fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn matrix(
    pool: &Pool,
    kind: WeightKind,
    act: ActKind,
    n: usize,
    k: usize,
    arrange: Arrange,
    seed: u64,
) -> Matrix {
    let bytes = le_bytes(&random(seed, n * k, 0.1));
    match arrange {
        Arrange::Concat => Matrix::pack_with(pool, kind, act, k, &[RowSource::F32(&bytes)], arrange).unwrap(),
        Arrange::GateUp => {
            let (gate, up) = bytes.split_at(bytes.len() / 2);
            Matrix::pack_with(pool, kind, act, k, &[RowSource::F32(gate), RowSource::F32(up)], arrange).unwrap()
        }
    }
}

fn store(pool: &Pool, acts: &Acts, w: &Matrix) -> Vec<f32> {
    let mut out = vec![f32::NAN; acts.rows() * w.n()];
    gemm(pool, acts, w, Out::Store(&mut out));
    out
}

/// The product in f64 over what the operands stand for, and the sum of magnitudes that bounds rounding.
fn oracle(acts: &Acts, w: &Matrix) -> Vec<(f64, f64)> {
    let (a, weights, k) = (acts.dequantized(), w.dequantized(), w.k());
    let mut out = Vec::new();
    for a in a.chunks_exact(k) {
        for w in weights.chunks_exact(k) {
            let products = a.iter().zip(w).map(|(&a, &w)| f64::from(a) * f64::from(w));
            out.push(products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs())));
        }
    }
    out
}

fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what}: value {i} is {a:e}, not {b:e}");
    }
}

/// Whether the level computes this kind in the very steps of the portable level.
fn same_steps(level: &KernelTable, kind: WeightKind) -> bool {
    !(level.bf16_form == Form::Bf16 && kind == WeightKind::Bf16)
}

/// Every level this CPU has, and on x86-64 the emulated wide ones.
fn levels() -> impl Iterator<Item = &'static KernelTable> {
    #[cfg(target_arch = "x86_64")]
    let emulated = [&emulated::WIDE, &emulated::WIDE_BF16];
    #[cfg(not(target_arch = "x86_64"))]
    let emulated = [];
    Isa::all_available().map(KernelTable::of).chain(emulated)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any shape, any kind, any level: close to f64, and equal to the portable level.
    #[test]
    fn products_are_right_on_every_level(
        rows in 1usize..30,
        n in 1usize..140,
        k32 in 1usize..20,
        pair in 0usize..pairs().count(),
        threads in 1usize..3,
        seed in any::<u64>(),
    ) {
        let (kind, act) = pairs().nth(pair).unwrap();
        let (k, pool) = (k32 * 32, Pool::new(threads, false));
        let w = matrix(&pool, kind, act, n, k, Arrange::Concat, seed);
        let x = random(seed ^ 1, rows * k, 3.0);
        let mut portable = Vec::new();
        for level in levels() {
            let mut acts = Acts::with_table(level, rows, k);
            acts.convert(&pool, act, rows, k, &x);
            let out = store(&pool, &acts, &w);
            for (i, (&found, (exact, size))) in out.iter().zip(oracle(&acts, &w)).enumerate() {
                let bound = 4e-6 * size + 1e-6;
                prop_assert!((f64::from(found) - exact).abs() <= bound, "{level} {kind:?} {act:?} value {i}: {found} {exact}");
            }
            if level.isa == Isa::Scalar {
                portable = out;
            } else if same_steps(level, kind) {
                assert_bits(&out, &portable, &format!("{level} {kind:?} {act:?} n {n} k {k} rows {rows}"));
            }
        }
    }
}

/// Short K and K that ends inside a wide step, for few rows and for more than one tile.
#[test]
fn steps_that_do_not_fit_are_computed_all_the_same() {
    let pool = Pool::new(1, false);
    for (kind, act) in pairs() {
        for k in [32, 64, 96, 160, 352] {
            let (n, rows) = (40, 37);
            let w = matrix(&pool, kind, act, n, k, Arrange::Concat, 21);
            let x = random(22, rows * k, 2.0);
            for level in levels() {
                for rows in [1, 5, rows] {
                    let mut acts = Acts::with_table(level, rows, k);
                    acts.convert(&pool, act, rows, k, &x[..rows * k]);
                    let out = store(&pool, &acts, &w);
                    for (i, (&found, (exact, size))) in out.iter().zip(oracle(&acts, &w)).enumerate() {
                        let near = (f64::from(found) - exact).abs() <= 4e-6 * size + 1e-6;
                        assert!(near, "{level} {kind:?} {act:?} k {k} rows {rows} value {i}: {found} {exact}");
                    }
                }
            }
        }
    }
}

/// The promise of the crate: a row's result has the same bits alone and in any company, on one thread and on two.
#[test]
fn a_row_does_not_depend_on_its_company() {
    let pools = [Pool::new(1, false), Pool::new(2, false)];
    let (n, k) = (72, 320);
    for level in levels() {
        for (kind, act) in pairs() {
            let w = matrix(&pools[0], kind, act, n, k, Arrange::Concat, 3);
            let x = random(4, 40 * k, 1.0);
            let mut acts = Acts::with_table(level, 40, k);
            let mut alone = Vec::new();
            for row in 0..40 {
                acts.convert(&pools[0], act, 1, k, &x[row * k..(row + 1) * k]);
                alone.extend(store(&pools[0], &acts, &w));
            }
            // The emulated and portable levels are slow, and their tiles small.
            let most = if std::ptr::eq(level, KernelTable::of(Isa::selected())) { 40 } else { 9 };
            for rows in 2..=most {
                for pool in &pools {
                    acts.convert(pool, act, rows, k, &x[..rows * k]);
                    let out = store(pool, &acts, &w);
                    assert_bits(&out, &alone[..rows * n], &format!("{level} {kind:?} {act:?} {rows} rows"));
                }
            }
        }
    }
}

/// Enough panels and rows for several jobs, several row blocks and prefetching.
#[test]
fn large_products_equal_their_rows_alone() {
    let pools = [Pool::new(1, false), Pool::new(2, false)];
    for level in levels().filter(|level| level.isa != Isa::Scalar) {
        let fast = std::ptr::eq(level, KernelTable::of(Isa::selected()));
        let (n, k, rows) = if fast { (1056, 1024, 131) } else { (160, 128, 131) };
        for (kind, act) in pairs() {
            let w = matrix(&pools[1], kind, act, n, k, Arrange::Concat, 5);
            let x = random(6, rows * k, 1.0);
            let mut acts = Acts::with_table(level, rows, k);
            acts.convert(&pools[1], act, rows, k, &x);
            let all = store(&pools[1], &acts, &w);
            for row in [0, 1, 63, 64, 130] {
                acts.convert(&pools[0], act, 1, k, &x[row * k..(row + 1) * k]);
                let one = store(&pools[0], &acts, &w);
                assert_bits(&one, &all[row * n..(row + 1) * n], &format!("{level} {kind:?} {act:?} row {row}"));
            }
            acts.convert(&pools[0], act, 16, k, &x[..16 * k]);
            let few = store(&pools[1], &acts, &w);
            assert_bits(&few, &all[..16 * n], &format!("{level} {kind:?} {act:?} 16 rows"));
        }
    }
}

#[test]
fn the_other_outputs_equal_storing_first() {
    let pool = Pool::new(2, false);
    for level in levels() {
        for (kind, act) in pairs() {
            for (n, k, rows) in [(150, 96, 5), (64, 64, 1), (2, 32, 3)] {
                let x = random(8, rows * k, 2.0);
                let mut acts = Acts::with_table(level, rows, k);
                acts.convert(&pool, act, rows, k, &x);
                let w = matrix(&pool, kind, act, n, k, Arrange::Concat, 9);
                let stored = store(&pool, &acts, &w);

                let mut residual = random(10, rows * n, 1.0);
                let expected: Vec<f32> = residual.iter().zip(&stored).map(|(a, b)| a + b).collect();
                gemm(&pool, &acts, &w, Out::Add(&mut residual));
                assert_bits(&residual, &expected, "residual");

                let mut best = vec![(0, 0.0); rows];
                gemm(&pool, &acts, &w, Out::ArgMax(&mut best));
                for (row, &(id, value)) in stored.chunks_exact(n).zip(&best) {
                    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!((id as usize, value), (row.iter().position(|&v| v == max).unwrap(), max));
                }
            }
            // A gate/up matrix with a ragged last panel (37 = 2 * 16 + 5), into every kind of activation.
            for (half, k, rows) in [(32usize, 64, 7), (64, 128, 2)] {
                let w = matrix(&pool, kind, act, 2 * half, k, Arrange::GateUp, 11);
                let x = random(12, rows * k, 2.0);
                let mut acts = Acts::with_table(level, rows, k);
                acts.convert(&pool, act, rows, k, &x);
                let stored = store(&pool, &acts, &w);
                let products: Vec<f32> = stored
                    .chunks_exact(2 * half)
                    .flat_map(|row| {
                        (0..half).map(|i| reference::rows::silu(row[i]) * row[half + i]).collect::<Vec<_>>()
                    })
                    .collect();
                for next in [ActKind::F32, ActKind::Bf16, ActKind::I8, ActKind::I8Group128] {
                    let (mut fused, mut plain) =
                        (Acts::with_table(level, rows, half), Acts::with_table(level, rows, half));
                    let rotation = Rotation::new(half);
                    let mut turned = products.clone();
                    turned.chunks_exact_mut(half).for_each(|row| rotation.turn(row));
                    for (turn, expected) in [(None, &products), (Some(&rotation), &turned)] {
                        gemm(&pool, &acts, &w, Out::SiluMul { acts: &mut fused, kind: next, turn });
                        plain.convert(&pool, next, rows, half, expected);
                        assert_bits(
                            &fused.dequantized(),
                            &plain.dequantized(),
                            &format!("{level} {kind:?} silu to {next:?}, turned {}", turn.is_some()),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn parts_keep_their_row_numbers() {
    let pool = Pool::new(1, false);
    let k = 64;
    for (arrange, heights) in [(Arrange::Concat, vec![20, 7, 7]), (Arrange::GateUp, vec![37, 37])] {
        let n: usize = heights.iter().sum();
        let values = random(13, n * k, 1.0);
        let bytes = le_bytes(&values);
        let mut rest = &bytes[..];
        let mut parts = Vec::new();
        for height in heights {
            let (part, tail) = rest.split_at(height * k * 4);
            parts.push(RowSource::F32(part));
            rest = tail;
        }
        let w = Matrix::pack(&pool, WeightKind::F32, k, &parts, arrange).unwrap();
        assert_bits(&w.dequantized(), &values, "dequantised rows");
        let mut acts = Acts::new(1, k);
        acts.convert(&pool, ActKind::F32, 1, k, &random(14, k, 1.0));
        let out = store(&pool, &acts, &w);
        for (row, (found, (exact, _))) in out.iter().zip(oracle(&acts, &w)).enumerate() {
            assert!((f64::from(*found) - exact).abs() < 1e-4, "{arrange:?} row {row}: {found} {exact}");
        }
    }
}

#[test]
fn sources_of_all_types_pack_alike() {
    let pool = Pool::new(2, false);
    let values: Vec<f32> = random(15, 40 * 64, 1.0).into_iter().map(|v| half::bf16::from_f32(v).to_f32()).collect();
    let exact: Vec<f32> = values.iter().map(|&v| half::f16::from_f32(v).to_f32()).collect();
    let bf16: Vec<u8> = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
    let f16: Vec<u8> = exact.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    // One byte off, as tensors in a file may lie.
    let shifted = |bytes: &[u8]| [&[0u8], bytes].concat();
    let (bf16, f16, f32) = (shifted(&bf16), shifted(&f16), shifted(&le_bytes(&values)));
    for kind in KINDS {
        let a = Matrix::pack(&pool, kind, 64, &[RowSource::Bf16(&bf16[1..])], Arrange::Concat).unwrap();
        let b = Matrix::pack(&pool, kind, 64, &[RowSource::F32(&f32[1..])], Arrange::Concat).unwrap();
        assert_bits(&a.dequantized(), &b.dequantized(), "bf16 and f32 source");
        let c = Matrix::pack(&pool, WeightKind::F32, 64, &[RowSource::F16(&f16[1..])], Arrange::Concat).unwrap();
        assert_bits(&c.dequantized(), &exact, "f16 source");
    }
}

#[test]
fn impossible_weights_are_refused_with_the_reason() {
    let pool = Pool::new(1, false);
    let pack = |kind, k, bytes: &[u8], arrange| {
        Matrix::pack(&pool, kind, k, &[RowSource::F32(bytes)], arrange).unwrap_err().to_string()
    };
    assert!(pack(WeightKind::Bf16, 48, &[0; 192], Arrange::Concat).contains("K = 48"));
    assert!(pack(WeightKind::Bf16, 64, &[0; 100], Arrange::Concat).contains("100 bytes"));
    assert!(pack(WeightKind::Bf16, 64, &[0; 256], Arrange::GateUp).contains("two parts"));
    assert!(pack(WeightKind::Int8Group { group: 48 }, 64, &[0; 256], Arrange::Concat).contains("48"));
    let mut values = vec![0.5f32; 3 * 64];
    values[130] = f32::NAN;
    let text = pack(WeightKind::Int8, 64, &le_bytes(&values), Arrange::Concat);
    assert!(text.contains("row 2") && text.contains("not finite"), "{text}");
}

#[test]
fn what_is_not_finite_stays_visible() {
    let pool = Pool::new(1, false);
    let (n, k) = (40, 64);
    for level in levels() {
        for (kind, act) in pairs() {
            let w = matrix(&pool, kind, act, n, k, Arrange::Concat, 16);
            let mut x = random(17, 4 * k, 1.0);
            x[k + 5] = f32::INFINITY;
            x[2 * k + 9] = f32::NAN;
            x[3 * k..].fill(0.0);
            let mut acts = Acts::with_table(level, 4, k);
            acts.convert(&pool, act, 4, k, &x);
            let out = store(&pool, &acts, &w);
            assert!(out[..n].iter().all(|v| v.is_finite()), "{level} {kind:?} row 0");
            assert!(out[n..3 * n].iter().any(|v| !v.is_finite()), "{level} {kind:?} rows 1 and 2");
            assert!(out[3 * n..].iter().all(|&v| v == 0.0), "{level} {kind:?} the zero row");
            let mut best = vec![(0, 0.0); 4];
            gemm(&pool, &acts, &w, Out::ArgMax(&mut best));
            assert!(best[0].1.is_finite() && best[1].1.is_nan() && best[2].1.is_nan(), "{level} {kind:?} {best:?}");
            assert_eq!(best[3], (0, 0.0), "{level} {kind:?}: equal products give the lowest id");
        }
    }
}

#[test]
fn rows_are_normed_gathered_and_converted_alike() {
    let pools = [Pool::new(1, false), Pool::new(2, false)];
    for k in [32, 64, 576, 1024] {
        let rows = 37;
        let x = random(18, rows * k, 5.0);
        let weight = random(19, k, 1.0);
        let mut expected = vec![0f32; rows * k];
        for (x, out) in x.chunks_exact(k).zip(expected.chunks_exact_mut(k)) {
            reference::rows::rmsnorm(x, &weight, 1e-5, out);
            let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / k as f64;
            let exact = f64::from(x[1]) / (mean + 1e-5).sqrt() * f64::from(weight[1]);
            assert!((f64::from(out[1]) - exact).abs() < 1e-5);
        }
        for level in levels() {
            for kind in [ActKind::F32, ActKind::Bf16, ActKind::I8, ActKind::I8Group128] {
                let (mut a, mut b) = (Acts::with_table(level, rows, k), Acts::with_table(level, rows, k));
                let mut normed = vec![0f32; rows * k];
                for pool in &pools {
                    a.rmsnorm(pool, kind, rows, k, &x, &weight, 1e-5, Some(&mut normed));
                    assert_bits(&normed, &expected, &format!("{level} norm"));
                    b.rmsnorm(pool, kind, rows, k, &x, &weight, 1e-5, None);
                    assert_bits(&a.dequantized(), &b.dequantized(), "with and without f32 rows");
                }
                b.convert(&pools[1], kind, rows, k, &expected);
                assert_bits(&a.dequantized(), &b.dequantized(), &format!("{level} {kind:?} fused and apart"));
                let index: Vec<u32> = (0..rows as u32).rev().collect();
                a.gather(&pools[1], kind, k, &expected, &index);
                let (a, b) = (a.dequantized(), b.dequantized());
                for row in 0..rows {
                    let other = rows - 1 - row;
                    assert_bits(&a[row * k..(row + 1) * k], &b[other * k..(other + 1) * k], "gathered");
                }
            }
        }
    }
}

/// A layer of experts by single GEMMs, one row and one expert at a time.
#[allow(clippy::too_many_arguments)] // those of `moe`
fn experts_one_by_one(
    level: &'static KernelTable,
    pool: &Pool,
    normed: &[f32],
    routing: &Routing,
    gate_up: &[Matrix],
    down: &[Matrix],
    turn: Option<&Rotation>,
    x: &mut [f32],
) {
    let (hidden, intermediate) = (gate_up[0].k(), down[0].k());
    let (mut acts, mut products) = (Acts::with_table(level, 1, hidden), Acts::with_table(level, 1, intermediate));
    for (row, (normed, x)) in normed.chunks_exact(hidden).zip(x.chunks_exact_mut(hidden)).enumerate() {
        for choice in row * routing.top_k..(row + 1) * routing.top_k {
            let expert = routing.experts[choice] as usize;
            acts.convert(pool, gate_up[expert].act_kind(), 1, hidden, normed);
            let kind = down[expert].act_kind();
            gemm(pool, &acts, &gate_up[expert], Out::SiluMul { acts: &mut products, kind, turn });
            for (x, y) in x.iter_mut().zip(store(pool, &products, &down[expert])) {
                *x = routing.weights[choice].mul_add(y, *x);
            }
        }
    }
}

#[test]
fn experts_in_one_dispatch_equal_experts_one_by_one() {
    let pools = [Pool::new(1, false), Pool::new(2, false)];
    let (experts, top_k) = (8, 3);
    for (hidden, intermediate) in [(64, 32), (256, 128)] {
        let rotation = Rotation::new(intermediate);
        for level in levels() {
            for (kind, act) in pairs().filter(|&(kind, _)| !matches!(kind, WeightKind::Int8Group { group: 32 })) {
                let layer = |n, k, arrange, seed: u64| -> Vec<Matrix> {
                    (0..experts).map(|e| matrix(&pools[0], kind, act, n, k, arrange, seed + e)).collect()
                };
                let gate_up = layer(2 * intermediate, hidden, Arrange::GateUp, 100);
                let down = layer(hidden, intermediate, Arrange::Concat, 200);
                let mut scratch = MoeScratch::with_table(level, 24, top_k, hidden, intermediate, experts as usize);
                for rows in [1usize, 2, 24] {
                    let normed = random(20, rows * hidden, 1.0);
                    // Expert 5 is never chosen; expert 0 is every row's first or second.
                    let experts = (0..rows as u32).flat_map(|r| [0, 1 + r % 4, 6 + r % 2]).collect();
                    let routing = Routing { experts, weights: random(21, rows * top_k, 1.0), top_k };
                    for turn in [None, Some(&rotation)] {
                        let mut expected = random(22, rows * hidden, 1.0);
                        let mut x = [expected.clone(), expected.clone()];
                        experts_one_by_one(level, &pools[0], &normed, &routing, &gate_up, &down, turn, &mut expected);
                        for (pool, x) in pools.iter().zip(&mut x) {
                            moe(pool, &mut scratch, rows, &normed, &routing, &gate_up, &down, turn, x);
                            assert_bits(x, &expected, &format!("{level} {kind:?} {act:?} {rows} rows"));
                        }
                    }
                }
            }
        }
    }
}
