//! K and V in 8 bits: how a token becomes codes, and how a chunk becomes bf16 again.
//!
//! A block of K (or V) has its bf16 layout with a byte for each element, then one f32 scale per token. A token's codes depend on
//! its own values alone, not on what else its block holds or will hold, so they are the same however a prompt was cut. For the
//! attention a chunk is widened into the thread's scratch, once per tile, and the bf16 kernels of any level run over that.
//! Widening is a product and a rounding to bf16: the same bits at every level.

// Plain index loops: closures inside iterator adapters do not inherit a function's target features.
#![allow(clippy::needless_range_loop)]

use super::kernels::Blocks;
use crate::isa::Isa;
use crate::kv::BLOCK_TOKENS;
use crate::rope::MAX_HEAD_DIM;

/// Bytes of the scales behind a block's codes.
pub(crate) const SCALE_BYTES: usize = BLOCK_TOKENS * 4;
/// Bytes of codes that become one 64-byte line.
const LINE_CODES: usize = 32;
/// Codes reach from -127 to 127.
const CODE_MAX: f32 = 127.0;
/// Below this largest value a token counts as zero: its scale's inverse would not be finite.
const LARGEST_MIN: f32 = f32::MIN_POSITIVE * CODE_MAX;

/// Widens a chunk's blocks to bf16 ones that lie one behind the other.
pub(crate) type WidenFn = unsafe fn(blocks: &Blocks, to: *mut u8);

/// Widening of K and of V.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widen {
    pub(crate) keys: WidenFn,
    pub(crate) values: WidenFn,
}

impl Widen {
    /// The fastest that `isa` allows; all give the same bits.
    pub(crate) fn get(isa: Isa) -> Widen {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => Widen { keys: avx2::<false>, values: avx2::<true> },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Widen { keys: avx512::<false>, values: avx512::<true> },
            // On Arm too: NEON is part of the architecture.
            _ => Widen { keys: plain::<false>, values: plain::<true> },
        }
    }
}

unsafe fn plain<const VALUES: bool>(blocks: &Blocks, to: *mut u8) {
    // SAFETY: handed on.
    unsafe { widen::<VALUES>(blocks, to) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<const VALUES: bool>(blocks: &Blocks, to: *mut u8) {
    // SAFETY: handed on.
    unsafe { widen::<VALUES>(blocks, to) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<const VALUES: bool>(blocks: &Blocks, to: *mut u8) {
    // SAFETY: handed on.
    unsafe { widen::<VALUES>(blocks, to) }
}

/// # Safety
/// The blocks are 8-bit ones of `head_dim`; `to` has room for `count` bf16 ones and nobody else uses it.
#[inline(always)]
unsafe fn widen<const VALUES: bool>(blocks: &Blocks, to: *mut u8) {
    let head_dim = blocks.head_dim;
    let (lines, per_pair) = (head_dim / 2, head_dim / BLOCK_TOKENS);
    for index in 0..blocks.count {
        let ahead = if blocks.ahead[index].is_null() { blocks.at[index] } else { blocks.ahead[index] };
        // SAFETY: a block is `lines` times 32 codes and 16 scales; its bf16 form `lines` times 64 bytes.
        unsafe {
            let codes = blocks.at[index];
            let scales = codes.add(lines * LINE_CODES).cast::<[f32; BLOCK_TOKENS]>().read_unaligned();
            let to = to.add(index * lines * 2 * LINE_CODES);
            for line in 0..lines {
                let (low, high) = if VALUES {
                    let pair = line / per_pair * 2;
                    ([scales[pair]; BLOCK_TOKENS], [scales[pair + 1]; BLOCK_TOKENS])
                } else {
                    (scales, scales)
                };
                let codes = codes.add(line * LINE_CODES).cast::<[i16; BLOCK_TOKENS]>().read_unaligned();
                let mut wide = [0u32; BLOCK_TOKENS];
                for lane in 0..BLOCK_TOKENS {
                    let (first, second) = (codes[lane] << 8 >> 8, codes[lane] >> 8);
                    let first = bf16_in_high_half(f32::from(first) * low[lane]) >> 16;
                    let second = bf16_in_high_half(f32::from(second) * high[lane]) & 0xffff_0000;
                    wide[lane] = first | second;
                }
                to.add(line * 2 * LINE_CODES).cast::<[u32; BLOCK_TOKENS]>().write_unaligned(wide);
                prefetch(ahead.wrapping_add(line * LINE_CODES));
            }
            prefetch(ahead.wrapping_add(lines * LINE_CODES));
        }
    }
}

/// Rounds to nearest even. The NaN of a broken token is the plain one, which rounding leaves a NaN.
#[inline(always)]
fn bf16_in_high_half(x: f32) -> u32 {
    let bits = x.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1))
}

/// Brings one line into L2.
#[inline(always)]
fn prefetch(from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing, wherever it points; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(from.cast());
    }
    #[cfg(target_arch = "aarch64")]
    crate::aarch64::neon::prefetch(from);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = from;
}

/// Writes one token of one head.
///
/// # Safety
/// The destinations are 8-bit blocks of `k.len()` elements per token, which nobody else touches; `offset < 16`.
pub(crate) unsafe fn append_token(offset: usize, k: &[f32], v: &[f32], to_k: *mut u8, to_v: *mut u8) {
    let head_dim = k.len();
    let mut codes = [0u8; MAX_HEAD_DIM];
    let scale_at = head_dim * BLOCK_TOKENS + offset * 4;
    let scale = quantize(k, &mut codes);
    // SAFETY: pairs of head_dim, and offset < 16: inside the block.
    unsafe {
        for pair in 0..head_dim / 2 {
            let at = (pair * BLOCK_TOKENS + offset) * 2;
            to_k.add(at).write(codes[2 * pair]);
            to_k.add(at + 1).write(codes[2 * pair + 1]);
        }
        to_k.add(scale_at).cast::<f32>().write_unaligned(scale);
    }
    let scale = quantize(v, &mut codes);
    // SAFETY: as above.
    unsafe {
        let row = to_v.add(offset / 2 * head_dim * 2 + offset % 2);
        for d in 0..head_dim {
            row.add(2 * d).write(codes[d]);
        }
        to_v.add(scale_at).cast::<f32>().write_unaligned(scale);
    }
}

/// The codes (as bytes) and the scale of one token's values. With a value that is no number, the scale is none either: a
/// broken token must not look whole.
fn quantize(x: &[f32], codes: &mut [u8; MAX_HEAD_DIM]) -> f32 {
    let codes = &mut codes[..x.len()];
    let (mut largest, mut finite) = (0f32, true);
    for &x in x {
        largest = largest.max(x.abs());
        finite &= x.is_finite();
    }
    if !finite || largest < LARGEST_MIN {
        codes.fill(0);
        return if finite { 0.0 } else { f32::NAN };
    }
    let inverse = CODE_MAX / largest;
    for (code, x) in codes.iter_mut().zip(x) {
        // Adding 1.5 * 2^23 rounds to a whole number, to nearest even, and leaves it in the low bits.
        *code = (x * inverse + 12_582_912.0).to_bits() as u8;
    }
    largest / CODE_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::kernels::CHUNK_BLOCKS;
    use crate::memory::AlignedBuf;
    use crate::reference::attention::bf16_bits;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn the_largest_value_keeps_its_size_and_the_others_err_by_half_a_step() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for size in [1e-30f32, 1e-3, 1.0, 40.0, 1e30] {
            let x: Vec<f32> = (0..64).map(|_| size * rng.random_range(-1f32..1.0)).collect();
            let mut codes = [0; MAX_HEAD_DIM];
            let scale = quantize(&x, &mut codes);
            let largest = x.iter().fold(0f32, |a, b| a.max(b.abs()));
            for (x, code) in x.iter().zip(codes) {
                let back = f32::from(code as i8) * scale;
                assert!((back - x).abs() <= 0.501 * scale, "{x} came back as {back}");
                assert!(x.abs() < largest || (code as i8).abs() == 127);
            }
        }
        let mut codes = [1; MAX_HEAD_DIM];
        assert_eq!((quantize(&[0.0, -0.0, 1e-40], &mut codes), codes[..3].to_vec()), (0.0, vec![0; 3]));
        assert!(
            quantize(&[1.0, f32::NAN], &mut codes).is_nan() && quantize(&[f32::INFINITY, 1.0], &mut codes).is_nan()
        );
    }

    #[test]
    fn every_level_widens_to_the_rounded_products() {
        for head_dim in [16, 64, 96, 128, 256] {
            let (part, bf16) = (BLOCK_TOKENS * head_dim + SCALE_BYTES, BLOCK_TOKENS * head_dim * 2);
            let count = 3;
            let mut rng = ChaCha8Rng::seed_from_u64(head_dim as u64);
            let mut keys = AlignedBuf::<u8>::zeroed(count * part);
            let mut values = AlignedBuf::<u8>::zeroed(count * part);
            let mut rows = Vec::new();
            for token in 0..count * BLOCK_TOKENS - 5 {
                let mut row = || -> Vec<f32> { (0..head_dim).map(|_| rng.random_range(-3f32..3.0)).collect() };
                let (mut k, v) = (row(), row());
                k[3] = if token == 20 { f32::NAN } else { k[3] };
                let block = token / BLOCK_TOKENS * part;
                // SAFETY: whole blocks of this head_dim.
                unsafe {
                    let (to_k, to_v) = (keys.as_mut_ptr().add(block), values.as_mut_ptr().add(block));
                    append_token(token % BLOCK_TOKENS, &k, &v, to_k, to_v);
                }
                rows.push((k, v));
            }
            let blocks = |from: &AlignedBuf<u8>| {
                let mut at = [std::ptr::null(); CHUNK_BLOCKS];
                (0..count).for_each(|i| at[i] = from[i * part..].as_ptr());
                Blocks { count, head_dim, at, ahead: [std::ptr::null(); CHUNK_BLOCKS] }
            };
            let expected = |x: &[f32], d: usize| {
                let mut codes = [0; MAX_HEAD_DIM];
                let scale = quantize(x, &mut codes);
                bf16_bits(f32::from(codes[d] as i8) * scale) as u16
            };
            for isa in Isa::all_available() {
                let widen = Widen::get(isa);
                let mut wide = AlignedBuf::<u16>::zeroed(count * bf16 / 2);
                // SAFETY: the level is available, the buffers have the sizes of their blocks.
                unsafe { (widen.keys)(&blocks(&keys), wide.as_mut_ptr().cast()) };
                for (token, (k, _)) in rows.iter().enumerate() {
                    for d in 0..head_dim {
                        let (block, t) = (token / BLOCK_TOKENS, token % BLOCK_TOKENS);
                        let at = block * bf16 / 2 + (d / 2 * BLOCK_TOKENS + t) * 2 + d % 2;
                        assert_eq!(wide[at], expected(k, d), "{isa} K of token {token}, {d} of {head_dim}");
                    }
                }
                // SAFETY: as above.
                unsafe { (widen.values)(&blocks(&values), wide.as_mut_ptr().cast()) };
                for (token, (_, v)) in rows.iter().enumerate() {
                    for d in 0..head_dim {
                        let (block, t) = (token / BLOCK_TOKENS, token % BLOCK_TOKENS);
                        let at = block * bf16 / 2 + (t / 2 * head_dim + d) * 2 + t % 2;
                        assert_eq!(wide[at], expected(v, d), "{isa} V of token {token}, {d} of {head_dim}");
                    }
                }
                assert!(wide[wide.len() - 1] == 0, "tokens that were not written are zero");
            }
        }
    }
}
