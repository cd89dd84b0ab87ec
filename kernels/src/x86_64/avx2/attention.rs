//! Attention with AVX2 and FMA: bf16 K and V are widened to f32 in registers, q and P stay f32.
//!
//! 6 rows x 16 keys of f32: 12 accumulators, two operands and a broadcast fill the 16 registers. Widening bf16 takes two more:
//! 5 rows.

use super::simd::Avx2;
use crate::attention::kernels::{AttentionKernels, Operand};
use crate::attention::vector::{Float, Widened, attention_level};

attention_level!(
    F32, Avx2F32, #[target_feature(enable = "avx2,fma,f16c")], Avx2, Float, F32, pack_block_f32,
    tiles: [1 => [4, 2, 1], 2 => [2, 1], 3 => [2, 1], 4 => [1], 5 => [1], 6 => [1]]
);
attention_level!(
    BF16, Avx2Bf16, #[target_feature(enable = "avx2,fma,f16c")], Avx2, Widened, F32, pack_block_bf16,
    tiles: [1 => [4, 2, 1], 2 => [2, 1], 3 => [1], 4 => [1], 5 => [1]]
);
