//! Sixteen lanes in plain code: the wide levels' kernels, run by tests on CPUs without AVX-512. What stays untested there is
//! the handful of intrinsics in `x86_64/avx512/simd.rs`. Few rows per tile, to keep the test build short.

use crate::isa::Isa;
use crate::reference::{self, matmul::widen};
use crate::simd::{Bf16Dot, ByteDot, Simd};
use crate::table::{Form, KernelTable};

#[derive(Clone, Copy)]
pub(crate) struct Wide;

/// Applies `$f` lane by lane.
macro_rules! lanes {
    ($i:ident => $f:expr) => {{
        let mut out = [Default::default(); 16];
        for $i in 0..16 {
            out[$i] = $f;
        }
        out
    }};
}

// SAFETY (of every block): the trait's contract gives valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Wide {
    const LANES: usize = 16;
    type F = [f32; 16];
    type I = [u32; 16];

    unsafe fn zero() -> [f32; 16] {
        [0.0; 16]
    }
    unsafe fn splat(value: f32) -> [f32; 16] {
        [value; 16]
    }
    unsafe fn load(from: *const f32) -> [f32; 16] {
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }
    unsafe fn store(to: *mut f32, value: [f32; 16]) {
        unsafe { to.cast::<[f32; 16]>().write_unaligned(value) }
    }
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        lanes!(i => a[i] * b[i])
    }
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }
    unsafe fn load_f16(from: *const u16) -> [f32; 16] {
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        lanes!(i => half::f16::from_bits(bits[i]).to_f32())
    }
    unsafe fn to_f32(value: [u32; 16]) -> [f32; 16] {
        lanes!(i => value[i] as i32 as f32)
    }
    unsafe fn load_i(from: *const u8) -> [u32; 16] {
        unsafe { from.cast::<[u32; 16]>().read_unaligned() }
    }
    unsafe fn splat_i(value: i32) -> [u32; 16] {
        [value as u32; 16]
    }
    unsafe fn bf16_low(pairs: [u32; 16]) -> [f32; 16] {
        lanes!(i => f32::from_bits(pairs[i] << 16))
    }
    unsafe fn bf16_high(pairs: [u32; 16]) -> [f32; 16] {
        lanes!(i => f32::from_bits(pairs[i] & 0xffff_0000))
    }
    unsafe fn nibbles_low(bytes: [u32; 16]) -> [u32; 16] {
        lanes!(i => bytes[i] & 0x0f0f_0f0f)
    }
    unsafe fn nibbles_high(bytes: [u32; 16]) -> [u32; 16] {
        lanes!(i => (bytes[i] >> 4) & 0x0f0f_0f0f)
    }
    unsafe fn prefetch(_: *const u8) {}
}

impl ByteDot for Wide {
    unsafe fn dot(acc: [u32; 16], w: [u32; 16], a: [u32; 16]) -> [u32; 16] {
        lanes!(i => {
            let (w, a) = (w[i].to_le_bytes(), a[i].to_le_bytes());
            let products = w.iter().zip(a).map(|(&w, a)| i32::from(w) * i32::from(a as i8));
            (acc[i] as i32 + products.sum::<i32>()) as u32
        })
    }
}

impl Bf16Dot for Wide {
    unsafe fn dot_bf16(acc: [f32; 16], w: [u32; 16], a: [u32; 16]) -> [f32; 16] {
        let high = |x: u32| widen((x >> 16) as u16);
        let low = |x: u32| widen(x as u16);
        lanes!(i => low(w[i]).mul_add(low(a[i]), high(w[i]).mul_add(high(a[i]), acc[i])))
    }
}

mod kernels {
    use super::Wide;
    crate::wide::wide_kernels!(Wide, [1 2 3], [1 2]);
    crate::wide::wide_kernels!(bf16 Wide, [1 2 3]);
}

pub(crate) static WIDE: KernelTable = KernelTable {
    isa: Isa::Avx512,
    bf16_form: Form::F32,
    i8_form: Form::I8,
    f32: kernels::F32,
    bf16: kernels::BF16,
    i8_row: kernels::I8_ROW,
    i8_group: kernels::I8_GROUP,
    i4: kernels::I4,
    ..reference::TABLE
};

pub(crate) static WIDE_BF16: KernelTable =
    KernelTable { isa: Isa::Avx512Bf16, bf16_form: Form::Bf16, bf16: kernels::BF16_DOT, ..WIDE };
