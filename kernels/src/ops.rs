//! The small operations between GEMMs: norms outside of a conversion, the embedding lookup, the experts' router.

use crate::isa::Isa;
use crate::moe::Routing;
use crate::scan::{DOT_TOKENS, ScanKernels};
use crate::table::KernelTable;
use crate::threads::{Pool, SharedMut};

/// Most experts that [`route`] handles.
pub const EXPERTS_MAX: usize = 512;
/// Values per job below which a lookup is not shared out.
const JOB_VALUES: usize = 1 << 14;
/// Up to this many logits a few tokens' router is shared out by experts.
const SHARED_LOGITS: usize = 1024;

/// `out = x * rsqrt(mean(x^2) + eps) * weight` for each row, in f32.
///
/// # Panics
/// If lengths disagree.
pub fn rmsnorm(rows: usize, k: usize, src: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(src.len() == rows * k && out.len() == rows * k && weight.len() == k, "rows and weight must be k long");
    let norm = KernelTable::of(Isa::selected()).rows.rmsnorm;
    for (src, out) in src.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
        // SAFETY: all are k long; `of` has checked the level.
        unsafe { norm(src, weight, eps, out) };
    }
}

/// `out[i] = table[ids[i]]`, widened; `table` is row-major bf16 as it lies in a safetensors file.
///
/// # Panics
/// If an id is beyond the table or `out` is not `[ids][hidden]`.
pub fn embed_bf16(pool: &Pool, table: &[u8], hidden: usize, ids: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * hidden, "out must be [ids][hidden]");
    assert!(ids.iter().all(|&id| (id as usize + 1) * hidden * 2 <= table.len()), "a token id is beyond the embedding");
    let out = SharedMut::new(out);
    let per_job = (JOB_VALUES / hidden).max(1);
    pool.run(ids.len().div_ceil(per_job), &|job, _| {
        for (i, &id) in ids.iter().enumerate().skip(job * per_job).take(per_job) {
            // SAFETY: row i belongs to this job and lies inside out.
            let to = unsafe { out.part(i * hidden, hidden) };
            let row = &table[id as usize * hidden * 2..][..hidden * 2];
            for (to, bytes) in to.iter_mut().zip(row.chunks_exact(2)) {
                *to = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
            }
        }
    });
}

/// Chooses `routing.top_k` experts for each row.
///
/// Logits are `normed . gate` in f32, softmax runs over all experts, the choice is by `probability + bias` (lowest id on ties),
/// and the weights are the probabilities themselves, divided by `max(their sum, norm_min)`. `gate` is `[experts][hidden]`.
///
/// # Panics
/// If lengths disagree, or there are more than [`EXPERTS_MAX`] experts or fewer than `top_k`.
pub fn route(
    pool: &Pool,
    rows: usize,
    normed: &[f32],
    gate: &[f32],
    bias: &[f32],
    norm_min: f32,
    routing: &mut Routing,
) {
    route_with(Isa::selected(), pool, rows, normed, gate, bias, norm_min, routing);
}

/// [`route`] at a given level.
#[allow(clippy::too_many_arguments)]
pub fn route_with(
    isa: Isa,
    pool: &Pool,
    rows: usize,
    normed: &[f32],
    gate: &[f32],
    bias: &[f32],
    norm_min: f32,
    routing: &mut Routing,
) {
    let (experts, top_k) = (bias.len(), routing.top_k);
    assert!((1..=EXPERTS_MAX).contains(&experts), "{experts} experts: the router handles 1 to {EXPERTS_MAX}");
    assert!((1..=experts).contains(&top_k), "{top_k} of {experts} experts can not be chosen");
    assert!(gate.len().is_multiple_of(experts), "gate must be [experts][hidden]");
    let hidden = gate.len() / experts;
    assert_eq!(normed.len(), rows * hidden, "normed must be [rows][hidden]");
    routing.experts.resize(rows * top_k, 0);
    routing.weights.resize(rows * top_k, 0.0);
    let kernels = ScanKernels::get(isa);
    let chosen = SharedMut::new(&mut routing.experts);
    let weights = SharedMut::new(&mut routing.weights);
    let choose = |row: usize, logits: &mut [f32]| {
        // SAFETY: each row is chosen by one job; both arrays hold rows * top_k values.
        unsafe {
            let (chosen, weights) = (chosen.part(row * top_k, top_k), weights.part(row * top_k, top_k));
            choose(logits, bias, norm_min, chosen, weights);
        }
    };
    if rows * experts <= SHARED_LOGITS && rows <= DOT_TOKENS {
        // A decoding step: the gate's rows are shared out, since reading them is what takes time.
        let mut logits = [0f32; SHARED_LOGITS];
        let at = SharedMut::new(&mut logits);
        let jobs = pool.threads().min(experts);
        pool.run(jobs, &|job, _| {
            let (from, to) = (job * experts / jobs, (job + 1) * experts / jobs);
            // SAFETY: the job writes columns from..to of `rows` rows; the level was checked.
            unsafe { (kernels.dots)(normed, &gate[from * hidden..to * hidden], hidden, at.get().add(from), experts) };
        });
        logits[..rows * experts].chunks_exact_mut(experts).enumerate().for_each(|(row, logits)| choose(row, logits));
        return;
    }
    pool.run(rows.div_ceil(DOT_TOKENS), &|job, _| {
        let (from, to) = (job * DOT_TOKENS, ((job + 1) * DOT_TOKENS).min(rows));
        let mut logits = [0f32; DOT_TOKENS * EXPERTS_MAX];
        // SAFETY: `logits` has room for DOT_TOKENS rows of `experts`; the level was checked.
        unsafe { (kernels.dots)(&normed[from * hidden..to * hidden], gate, hidden, logits.as_mut_ptr(), experts) };
        for (row, logits) in (from..to).zip(logits.chunks_exact_mut(experts)) {
            choose(row, logits);
        }
    });
}

/// One token's experts. `logits` become probabilities.
fn choose(logits: &mut [f32], bias: &[f32], norm_min: f32, chosen: &mut [u32], weights: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in logits.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    logits.iter_mut().for_each(|x| *x /= sum);
    for slot in 0..chosen.len() {
        let mut best: Option<(usize, f32)> = None;
        for (expert, (p, bias)) in logits.iter().zip(bias).enumerate() {
            let score = p + bias;
            let taken = chosen[..slot].contains(&(expert as u32));
            if !taken && best.is_none_or(|(_, best)| score > best) {
                best = Some((expert, score));
            }
        }
        // Scores of NaN (a broken row) never compare; the first expert not taken stands in and keeps the NaN weight.
        let (expert, _) = best.expect("top_k is at most the number of experts");
        chosen[slot] = expert as u32;
        weights[slot] = logits[expert];
    }
    let scale = weights.iter().sum::<f32>().max(norm_min);
    weights.iter_mut().for_each(|w| *w /= scale);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn values(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..len).map(|_| rng.random_range(-1.0f32..1.0)).collect()
    }

    fn routing(top_k: usize) -> Routing {
        Routing { experts: Vec::new(), weights: Vec::new(), top_k }
    }

    #[test]
    fn the_bias_chooses_experts_and_stays_out_of_the_weights() {
        let pool = Pool::new(2, false);
        for isa in Isa::all_available() {
            for (hidden, experts, top_k) in [(64, 8, 2), (256, 64, 6), (2560, 64, 6), (33, 5, 5), (1024, 130, 8)] {
                for rows in [1, 3, 4, 5, 33] {
                    let (x, gate) = (values(rows * hidden, 1), values(experts * hidden, 2));
                    let mut bias = values(experts, 3);
                    bias.iter_mut().for_each(|b| *b *= 0.2);
                    let mut routing = routing(top_k);
                    route_with(isa, &pool, rows, &x, &gate, &bias, 1e-12, &mut routing);
                    for row in 0..rows {
                        let logits: Vec<f64> = gate
                            .chunks(hidden)
                            .map(|w| w.iter().zip(&x[row * hidden..]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum())
                            .collect();
                        let max = logits.iter().copied().fold(f64::MIN, f64::max);
                        let sum: f64 = logits.iter().map(|l| (l - max).exp()).sum();
                        let p: Vec<f64> = logits.iter().map(|l| (l - max).exp() / sum).collect();
                        let mut order: Vec<usize> = (0..experts).collect();
                        let score = |e: usize| p[e] + f64::from(bias[e]);
                        order.sort_by(|&a, &b| score(b).partial_cmp(&score(a)).unwrap());
                        let want = &order[..top_k];
                        let got: Vec<usize> =
                            routing.experts[row * top_k..][..top_k].iter().map(|&e| e as usize).collect();
                        assert_eq!(got, want, "{isa} {hidden} {experts} row {row}");
                        let total: f64 = want.iter().map(|&e| p[e]).sum();
                        for (slot, &e) in want.iter().enumerate() {
                            let weight = f64::from(routing.weights[row * top_k + slot]);
                            assert!((weight - p[e] / total).abs() < 1e-4, "{isa} {weight} {}", p[e] / total);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_rows_experts_and_weights_do_not_depend_on_its_company_or_the_threads() {
        let (hidden, experts, top_k, rows) = (576, 64, 6, 41);
        let (x, gate, bias) = (values(rows * hidden, 4), values(experts * hidden, 5), vec![0.0; experts]);
        for isa in Isa::all_available() {
            let mut all = routing(top_k);
            route_with(isa, &Pool::new(2, false), rows, &x, &gate, &bias, 1e-12, &mut all);
            for threads in [1, 2, 3] {
                let pool = Pool::new(threads, false);
                for start in 0..rows {
                    let count = (start % 7 + 1).min(rows - start);
                    let mut some = routing(top_k);
                    let part = &x[start * hidden..(start + count) * hidden];
                    route_with(isa, &pool, count, part, &gate, &bias, 1e-12, &mut some);
                    assert_eq!(some.experts, all.experts[start * top_k..(start + count) * top_k], "{isa} {start}");
                    let bits = |w: &[f32]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&some.weights), bits(&all.weights[start * top_k..][..count * top_k]), "{isa}");
                }
            }
        }
    }

    #[test]
    fn equal_scores_go_to_the_lowest_expert() {
        let mut routing = routing(3);
        let gate = vec![0.0; 6 * 32];
        route(&Pool::new(1, false), 1, &values(32, 6), &gate, &[0.0, 0.1, 0.1, 0.0, 0.1, 0.1], 1e-12, &mut routing);
        assert_eq!(routing.experts, [1, 2, 4]);
        assert!(routing.weights.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-6));
    }

    #[test]
    fn rows_of_the_embedding_are_widened_as_they_are() {
        let hidden = 48;
        let table: Vec<half::bf16> = values(10 * hidden, 7).into_iter().map(half::bf16::from_f32).collect();
        let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
        let ids = [9, 0, 3, 3];
        let mut out = vec![0.0; ids.len() * hidden];
        embed_bf16(&Pool::new(2, false), &bytes, hidden, &ids, &mut out);
        for (row, id) in out.chunks(hidden).zip(ids) {
            assert!(row.iter().zip(&table[id as usize * hidden..]).all(|(a, b)| *a == b.to_f32()));
        }
    }
}
