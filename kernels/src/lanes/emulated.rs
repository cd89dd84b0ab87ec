//! [`Lanes`] in plain code, for tests of the 512-bit kernels on CPUs without them.

use super::Lanes;
use crate::emulated::Wide;
use crate::reference::attention::bf16_bits;

fn map(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// x86's maximum: the second operand if either is NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

// SAFETY (of every block): the trait's contract gives valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Wide {
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map(a, b, |a, b| a + b)
    }
    unsafe fn sub(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map(a, b, |a, b| a - b)
    }
    unsafe fn max(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map(a, b, larger)
    }
    unsafe fn first(count: usize, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if i < count { a[i] } else { b[i] })
    }
    unsafe fn load_first(count: usize, from: *const f32) -> [f32; 16] {
        std::array::from_fn(|i| if i < count { unsafe { *from.add(i) } } else { 0.0 })
    }
    unsafe fn at_least(a: [f32; 16], b: [f32; 16]) -> u32 {
        (0..16).map(|i| u32::from(a[i] >= b[i]) << i).sum()
    }
    unsafe fn reduce_max(a: [f32; 16]) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, larger)
    }
    unsafe fn reduce_add(mut a: [f32; 16]) -> f32 {
        for width in [8, 4, 2, 1] {
            (0..width).for_each(|i| a[i] += a[i + width]);
        }
        a[0]
    }
    unsafe fn power_of_two(shifted: [f32; 16]) -> [f32; 16] {
        shifted.map(|x| f32::from_bits(x.to_bits().wrapping_add(127) << 23))
    }
    unsafe fn store_bf16(to: *mut u16, a: [f32; 16]) {
        for (i, x) in a.into_iter().enumerate() {
            unsafe { to.add(i).write(bf16_bits(x) as u16) };
        }
    }
    unsafe fn butterfly<const DISTANCE: usize>(a: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if i & DISTANCE == 0 { a[i] + a[i ^ DISTANCE] } else { a[i ^ DISTANCE] - a[i] })
    }
    unsafe fn rotate(pairs: [f32; 16], cos_sin: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| {
            let (cos, sin, other) = (cos_sin[i & !1], cos_sin[i | 1], pairs[i ^ 1]);
            if i % 2 == 0 { pairs[i] * cos - other * sin } else { pairs[i] * cos + other * sin }
        })
    }
}
