//! The vector operations that the tile kernels are written in. One implementation per instruction-set level, and an emulated
//! one, so that the wide kernels' indexing is tested on CPUs that lack their instructions.
//!
//! All methods are `#[inline(always)]`: they are only ever compiled into a function with the level's `target_feature`.

/// One level's vectors of `LANES` 32-bit lanes.
///
/// # Safety
/// Methods may be called only where the level's instructions are available, with pointers valid for one vector (or one
/// element, where the text says so); vector loads and stores may be unaligned.
pub(crate) trait Simd: Copy {
    const LANES: usize;
    /// f32 lanes.
    type F: Copy;
    /// i32 lanes, or groups of four bytes.
    type I: Copy;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, value: Self::F);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `LANES` half floats, widened.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn to_f32(value: Self::I) -> Self::F;

    unsafe fn load_i(from: *const u8) -> Self::I;
    unsafe fn splat_i(value: i32) -> Self::I;
    /// The low halves of all lanes as bf16, widened.
    unsafe fn bf16_low(pairs: Self::I) -> Self::F;
    /// The high halves of all lanes as bf16, widened.
    unsafe fn bf16_high(pairs: Self::I) -> Self::F;
    /// The low four bits of every byte.
    unsafe fn nibbles_low(bytes: Self::I) -> Self::I;
    /// The high four bits of every byte.
    unsafe fn nibbles_high(bytes: Self::I) -> Self::I;

    /// Brings one line into L2.
    unsafe fn prefetch(from: *const u8);
}

/// Levels with a four-way dot product of bytes.
pub(crate) trait ByteDot: Simd {
    /// `acc + the four products` of unsigned `w` and signed `a`, in each lane, exact.
    unsafe fn dot(acc: Self::I, w: Self::I, a: Self::I) -> Self::I;
}

/// Levels with a two-way dot product of bf16.
pub(crate) trait Bf16Dot: Simd {
    /// `acc + w.high * a.high + w.low * a.low` in each lane.
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, a: Self::I) -> Self::F;
}
