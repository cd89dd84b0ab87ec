//! The AVX-512 levels: with bf16 dot products (Zen 4, Sapphire Rapids), and without (Ice Lake).

pub(crate) mod attention;
mod lanes;
pub(crate) mod scan;
mod simd;
