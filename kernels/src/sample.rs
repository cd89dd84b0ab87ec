//! What sampling asks of a row of logits: the largest, the k largest, and the normaliser. Penalties, filters and drawing are
//! the engine's.

use crate::isa::Isa;
use crate::scan::ScanKernels;

/// Candidates kept before they are cut back to k; a multiple of 16.
const CANDIDATES: usize = 4096;
/// Groups of a row whose maxima give the first threshold, for small k and for larger k.
const GROUPS_FEW: usize = 1024;
const GROUPS_MANY: usize = 4096;

/// The most likely token: lowest id on ties, and its value; NaN if any value of the row is not finite.
///
/// # Panics
/// If the row is empty.
pub fn argmax(row: &[f32]) -> (u32, f32) {
    argmax_with(Isa::selected(), row)
}

/// [`argmax`] at a given level.
pub fn argmax_with(isa: Isa, row: &[f32]) -> (u32, f32) {
    assert!(!row.is_empty(), "a row of logits is empty");
    // SAFETY: `get` has checked the level.
    let best = unsafe { (ScanKernels::get(isa).row_max)(row) };
    (best.index as u32, if best.finite { best.value } else { f32::NAN })
}

/// `ln(sum(exp(row)))` in a fixed order. Values of -inf count nothing; NaN if a value is NaN or +inf.
///
/// # Panics
/// If the row is empty.
pub fn log_sum_exp(row: &[f32]) -> f32 {
    log_sum_exp_with(Isa::selected(), row)
}

/// [`log_sum_exp`] at a given level.
pub fn log_sum_exp_with(isa: Isa, row: &[f32]) -> f32 {
    assert!(!row.is_empty(), "a row of logits is empty");
    // SAFETY: `get` has checked the level.
    let best = unsafe { (ScanKernels::get(isa).row_max)(row) };
    if best.finite || best.value.is_finite() {
        return best.value + sum_exp_with(isa, row, best.value, 1.0).ln();
    }
    // Only -inf: nothing to sum. Else +inf or NaN.
    if row.iter().all(|&x| x == f32::NEG_INFINITY) { f32::NEG_INFINITY } else { f32::NAN }
}

/// `sum exp((x - max) * scale)` in a fixed order: the normaliser at temperature `1 / scale`.
pub fn sum_exp(row: &[f32], max: f32, scale: f32) -> f32 {
    sum_exp_with(Isa::selected(), row, max, scale)
}

/// [`sum_exp`] at a given level.
pub fn sum_exp_with(isa: Isa, row: &[f32], max: f32, scale: f32) -> f32 {
    // SAFETY: `get` has checked the level.
    unsafe { (ScanKernels::get(isa).sum_exp)(row, max, scale) }
}

/// The k largest values with their ids, by value descending, then id ascending. NaN are left out.
///
/// `out` is cleared; it allocates only until it has once held k pairs.
pub fn top_k(row: &[f32], k: usize, out: &mut Vec<(u32, f32)>) {
    top_k_with(Isa::selected(), row, k, out);
}

/// [`top_k`] at a given level.
///
/// A threshold comes first: the k-th largest of the maxima of disjoint groups, which at least k values reach. Only values above
/// it are collected and sorted; it rises whenever too many were collected.
pub fn top_k_with(isa: Isa, row: &[f32], k: usize, out: &mut Vec<(u32, f32)>) {
    out.clear();
    let k = k.min(row.len());
    if k == 0 {
        return;
    }
    let kernels = ScanKernels::get(isa);
    if 2 * k > CANDIDATES {
        top_many(row, k, out);
        return;
    }
    let mut keys = [0u64; CANDIDATES];
    let mut kept = 0;
    let mut threshold = first_threshold(kernels, row, k);
    let (mut ids, mut values) = ([0u32; CANDIDATES], [0f32; CANDIDATES]);
    let mut at = 0;
    while at < row.len() {
        let room = CANDIDATES - kept;
        // SAFETY: `get` has checked the level; both buffers are as long as said.
        let (stop, found) = unsafe { (kernels.collect)(row, at, threshold, &mut ids[..room], &mut values[..room]) };
        for i in 0..found {
            keys[kept + i] = key(ids[i], values[i]);
        }
        (at, kept) = (stop, kept + found);
        if at < row.len() {
            // Full: keep the best k. A later equal value has a higher id and loses, but `>=` may still collect it.
            keys[..kept].select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
            kept = k;
            threshold = value_of(keys[k - 1]);
        }
    }
    let keys = &mut keys[..kept];
    if kept > k {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    }
    let best = kept.min(k);
    keys[..best].sort_unstable_by(|a, b| b.cmp(a));
    out.extend(keys[..best].iter().map(|&key| (id_of(key), value_of(key))));
}

/// A value that at least k values of the row reach, or -inf.
fn first_threshold(kernels: &ScanKernels, row: &[f32], k: usize) -> f32 {
    let groups = if k <= GROUPS_FEW / 8 { GROUPS_FEW } else { GROUPS_MANY };
    if row.len() < 2 * groups || k > groups / 2 {
        return f32::NEG_INFINITY;
    }
    let mut maxima = [0f32; GROUPS_MANY];
    let maxima = &mut maxima[..groups];
    // SAFETY: the kernels' level was checked; groups is a multiple of 16.
    unsafe { (kernels.group_maxima)(row, maxima) };
    *maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// For k beyond the candidate buffer: select among all.
fn top_many(row: &[f32], k: usize, out: &mut Vec<(u32, f32)>) {
    let order = |a: &(u32, f32), b: &(u32, f32)| key(b.0, b.1).cmp(&key(a.0, a.1));
    out.extend(row.iter().enumerate().filter(|(_, x)| !x.is_nan()).map(|(id, &x)| (id as u32, x)));
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, order);
        out.truncate(k);
    }
    out.sort_unstable_by(order);
}

/// Orders by value, then by lower id: the larger key is the better candidate.
fn key(id: u32, value: f32) -> u64 {
    // -0.0 and 0.0 are one value.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn id_of(key: u64) -> u32 {
    !(key as u32)
}

fn value_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const VOCABULARY: usize = 103_424;

    fn logits(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..len).map(|_| rng.random_range(-12.0f32..12.0)).collect()
    }

    fn sorted(row: &[f32], k: usize) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> =
            row.iter().enumerate().filter(|(_, x)| !x.is_nan()).map(|(i, &x)| (i as u32, x)).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        all.truncate(k);
        all
    }

    #[test]
    fn the_first_of_equal_maxima_wins_and_a_broken_row_says_so() {
        for isa in Isa::all_available() {
            for len in [1, 3, 15, 16, 17, 63, 64, 65, 1023, 1025, 5000, VOCABULARY] {
                let mut row = logits(len, 1);
                let (first, second) = (len / 3, len - 1);
                row[first] = 50.0;
                row[second] = 50.0;
                assert_eq!(argmax_with(isa, &row), (first as u32, 50.0), "{isa} {len}");
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut row = row.clone();
                    row[len / 2] = bad;
                    assert!(argmax_with(isa, &row).1.is_nan(), "{isa} {len} {bad}");
                }
                assert_eq!(argmax_with(isa, &vec![-7.5; len]), (0, -7.5), "{isa} {len}");
            }
        }
    }

    #[test]
    fn the_normaliser_is_exact_to_rounding_and_masked_tokens_count_nothing() {
        for isa in Isa::all_available() {
            for len in [1, 17, 1000, VOCABULARY] {
                let mut row = logits(len, 2);
                row.iter_mut().skip(1).step_by(5).for_each(|x| *x = f32::NEG_INFINITY);
                for scale in [1.0f32, 1.25, 0.1] {
                    let max = row.iter().copied().fold(f32::MIN, f32::max);
                    let want: f64 =
                        row.iter().map(|&x| ((f64::from(x) - f64::from(max)) * f64::from(scale)).exp()).sum();
                    let got = f64::from(sum_exp_with(isa, &row, max, scale));
                    assert!((got / want - 1.0).abs() < 2e-6, "{isa} {len} {scale}: {got} {want}");
                }
                let want = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
                assert!((f64::from(log_sum_exp_with(isa, &row)) - want).abs() < 1e-5, "{isa} {len}");
            }
            assert_eq!(log_sum_exp_with(isa, &[f32::NEG_INFINITY; 40]), f32::NEG_INFINITY);
            assert!(log_sum_exp_with(isa, &[1.0, f32::NAN, 2.0]).is_nan());
            assert!(log_sum_exp_with(isa, &[1.0, f32::INFINITY, 2.0]).is_nan());
        }
    }

    #[test]
    fn the_best_k_are_those_of_a_full_sort() {
        let mut rows = vec![logits(VOCABULARY, 3), logits(1000, 4), logits(37, 5)];
        rows.push((0..VOCABULARY).map(|i| i as f32 * 0.25).collect());
        rows.push((0..VOCABULARY).map(|i| -(i as f32)).collect());
        rows.push(vec![1.5; VOCABULARY]);
        rows.push((0..VOCABULARY).map(|i| [0.0, -0.0, -3.0][i % 3]).collect());
        let mut holes = logits(VOCABULARY, 6);
        holes.iter_mut().step_by(3).for_each(|x| *x = f32::NEG_INFINITY);
        holes.iter_mut().step_by(7).for_each(|x| *x = f32::NAN);
        rows.push(holes);
        let mut out = Vec::new();
        for isa in Isa::all_available() {
            for (index, row) in rows.iter().enumerate() {
                for k in [1, 2, 20, 50, 129, 1000, 2048, 3000, VOCABULARY] {
                    top_k_with(isa, row, k, &mut out);
                    assert_eq!(out, sorted(row, k), "{isa} row {index} k {k}");
                }
            }
        }
    }

    #[test]
    fn a_nan_hides_no_value_beside_it() {
        let mut row = vec![0.0; VOCABULARY];
        for (i, spacing) in [4, 8, 16, 32, 48].into_iter().cycle().take(50).enumerate() {
            (row[i * 2000 + 5], row[i * 2000 + 5 + spacing]) = (100.0 + i as f32, f32::NAN);
        }
        let mut out = Vec::new();
        for isa in Isa::all_available() {
            top_k_with(isa, &row, 50, &mut out);
            assert_eq!(out, sorted(&row, 50), "{isa}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn short_rows_with_ties_are_ordered_as_by_a_sort(
            row in prop::collection::vec(prop_oneof![(-3i32..3).prop_map(|x| x as f32), Just(f32::NEG_INFINITY)], 1..200),
            k in 0usize..210,
        ) {
            let mut out = Vec::new();
            for isa in Isa::all_available() {
                top_k_with(isa, &row, k, &mut out);
                prop_assert_eq!(&out, &sorted(&row, k), "{}", isa);
            }
        }
    }
}
