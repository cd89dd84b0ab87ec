//! An orthogonal change of basis: of weights while they are packed, and of rows on their way to a quantised matrix.
//!
//! Trained transformers keep a few channels ten to fifty times larger than the rest. Quantised values share a scale, so such
//! a channel takes the precision of its neighbours away. Turned by an orthogonal matrix R it is spread over all channels and
//! none stands out, and products stay what they were: `x W` is `(x R) (Rᵀ W)`.
//!
//! R is a diagonal of signs, then a Hadamard matrix of the largest power of two that divides the width, side by side with
//! a cosine matrix of what is left: n log n operations a row, and the same matrix wherever a model is loaded. Every level
//! takes the same sums in the same order: additions of pairs at distances 1, 2, 4 …, then the mixing of the blocks.

mod vector;

use std::f32::consts::{FRAC_1_SQRT_2, PI};

use crate::isa::Isa;
use crate::table::KernelTable;

pub(crate) use vector::turn_row;

/// Odd parts up to this are mixed too; the cost of a row grows with it.
const ODD_MAX: usize = 64;

/// The matrix R of one width.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// Power of two; the Hadamard part's width.
    block: usize,
    odd: usize,
    /// `[odd][odd]`, orthogonal; empty: the blocks are not mixed.
    mix: Vec<f32>,
    /// Of each channel, with the Hadamard matrix's norm.
    signs: Vec<f32>,
}

impl Rotation {
    /// The matrix of `width` channels.
    pub fn new(width: usize) -> Self {
        let block = 1usize << width.trailing_zeros();
        let odd = width / block;
        let mix = if (2..=ODD_MAX).contains(&odd) { cosines(odd) } else { Vec::new() };
        let norm = 1.0 / (block as f32).sqrt();
        let signs = (0..width as u64).map(|i| if splitmix(i) & 1 == 0 { norm } else { -norm }).collect();
        Self { block, odd, mix, signs }
    }

    /// Channels.
    pub fn width(&self) -> usize {
        self.signs.len()
    }

    /// `x = x R` for a row x.
    pub fn turn(&self, row: &mut [f32]) {
        // SAFETY: the selected level is available.
        unsafe { (KernelTable::of(Isa::selected()).rows.turn)(self, row) }
    }

    /// The portable form, which defines the order of the sums.
    pub(crate) fn turn_plainly(&self, row: &mut [f32]) {
        self.turn_columns(row, 1);
    }

    /// `X = Rᵀ X` for X of `[width][columns]`.
    pub fn turn_columns(&self, x: &mut [f32], columns: usize) {
        assert_eq!(x.len(), self.width() * columns, "one row per channel");
        for (row, &sign) in x.chunks_exact_mut(columns).zip(&self.signs) {
            row.iter_mut().for_each(|value| *value *= sign);
        }
        for block in x.chunks_exact_mut(self.block * columns) {
            hadamard(block, columns);
        }
        if !self.mix.is_empty() {
            self.mix_blocks(x, columns);
        }
    }

    fn mix_blocks(&self, x: &mut [f32], columns: usize) {
        let stride = self.block * columns;
        // A row alone is turned while a step runs, which allocates nothing.
        let mut few = [0.0; ODD_MAX];
        let mut many = Vec::new();
        let old = if columns == 1 {
            &mut few[..self.odd]
        } else {
            many.resize(self.odd * columns, 0.0);
            &mut many[..]
        };
        for at in (0..stride).step_by(columns) {
            for (i, old) in old.chunks_exact_mut(columns).enumerate() {
                old.copy_from_slice(&x[i * stride + at..][..columns]);
            }
            for j in 0..self.odd {
                let out = &mut x[j * stride + at..][..columns];
                out.fill(0.0);
                for (i, old) in old.chunks_exact(columns).enumerate() {
                    let factor = self.mix[i * self.odd + j];
                    out.iter_mut().zip(old).for_each(|(out, old)| *out += factor * old);
                }
            }
        }
    }
}

/// Multiplies by the Hadamard matrix of entries +1 and -1, in place: `[power of two][columns]`.
fn hadamard(x: &mut [f32], columns: usize) {
    let mut half = columns;
    // Strides of one, two and four numbers do not fill a vector: those steps are taken eight numbers at a time.
    if columns == 1 && x.len() >= 8 {
        x.as_chunks_mut::<8>().0.iter_mut().for_each(hadamard8);
        half = 8;
    }
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

#[inline(always)]
fn hadamard8(x: &mut [f32; 8]) {
    let [a, b, c, d, e, f, g, h] = *x;
    let (a, b, c, d, e, f, g, h) = (a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h);
    let (a, b, c, d, e, f, g, h) = (a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h);
    *x = [a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h];
}

/// The orthonormal cosine matrix (DCT-II) of this size.
fn cosines(n: usize) -> Vec<f32> {
    let scale = (2.0 / n as f32).sqrt();
    let entry = |i: usize, j: usize| {
        let first = if j == 0 { FRAC_1_SQRT_2 } else { 1.0 };
        scale * first * (PI * (i as f32 + 0.5) * j as f32 / n as f32).cos()
    };
    (0..n * n).map(|at| entry(at / n, at % n)).collect()
}

/// A fixed, well-mixed function of `i`.
fn splitmix(i: u64) -> u64 {
    let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| (splitmix(seed * 1_000_003 + i) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum()
    }

    #[test]
    fn products_are_the_same_in_the_turned_basis() {
        for width in [32, 64, 576, 1024, 2560, 96 * 67] {
            let rotation = Rotation::new(width);
            let (x, w) = (values(1, width), values(2, width));
            let (mut turned_x, mut turned_w) = (x.clone(), w.clone());
            rotation.turn(&mut turned_x);
            rotation.turn(&mut turned_w);
            let error = (dot(&x, &w) - dot(&turned_x, &turned_w)).abs();
            assert!(error < 1e-3, "width {width}: off by {error}");
            assert!((dot(&x, &x) - dot(&turned_x, &turned_x)).abs() < 1e-2, "width {width}: the length changed");
        }
    }

    #[test]
    fn columns_turn_like_rows() {
        let rotation = Rotation::new(96);
        let mut matrix = values(3, 96 * 32);
        let mut column: Vec<f32> = matrix.iter().skip(5).step_by(32).copied().collect();
        rotation.turn_columns(&mut matrix, 32);
        rotation.turn(&mut column);
        for (row, value) in column.iter().enumerate() {
            assert!((matrix[row * 32 + 5] - value).abs() < 1e-5);
        }
    }

    #[test]
    fn every_level_turns_a_row_to_the_same_bits() {
        // Blocks smaller than a group of vectors, of an odd and an even number of doublings, and all ways of mixing.
        for width in [32, 96, 192, 512, 640, 1024, 1536, 3072, 896, 1152, 64 * 11, 96 * 67] {
            let rotation = Rotation::new(width);
            let x = values(width as u64, width);
            let mut expected = x.clone();
            rotation.turn_plainly(&mut expected);
            let levels = crate::Isa::all_available().map(|isa| crate::table::KernelTable::of(isa).rows.turn);
            #[cfg(target_arch = "x86_64")]
            let levels = levels.chain([emulated_turn as _]);
            for turn in levels {
                let mut found = x.clone();
                // SAFETY: the level is available.
                unsafe { turn(&rotation, &mut found) };
                assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "width {width}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn emulated_turn(rotation: &Rotation, row: &mut [f32]) {
        // SAFETY: plain code.
        unsafe { turn_row::<crate::emulated::Wide>(rotation, row) }
    }

    #[test]
    fn a_huge_channel_is_spread_over_all() {
        for width in [576, 1024, 2560] {
            let mut x = values(4, width);
            x[300] = 48.0;
            Rotation::new(width).turn(&mut x);
            let largest = x.iter().fold(0f32, |max, x| max.max(x.abs()));
            let rms = (dot(&x, &x) / width as f64).sqrt() as f32;
            assert!(largest < 5.0 * rms, "width {width}: {largest} among values of {rms}");
        }
    }
}
