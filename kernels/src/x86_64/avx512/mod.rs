//! The AVX-512 levels: with bf16 dot products (Zen 4, Sapphire Rapids), and without (Ice Lake).

pub(crate) mod attention;
pub(crate) mod gemm;
mod lanes;
mod peaks;
pub(crate) mod scan;
pub(crate) mod simd;
