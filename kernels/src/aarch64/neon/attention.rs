//! Attention with NEON: bf16 K and V are widened to f32 in registers, q and P stay f32.
//!
//! 16 keys are four vectors. 6 rows of them are 24 accumulators, with four operands and a broadcast 29 of the 32 registers;
//! widening bf16 holds the pairs as well, which leaves room for 4 rows. One or two rows take two lines, for more chains: with four
//! the compiler copies registers about.

use super::simd::Neon;
use crate::attention::kernels::{AttentionKernels, Operand};
use crate::attention::vector::{Float, Widened, attention_level};

attention_level!(
    F32, NeonF32, #[target_feature(enable = "neon")], Neon, Float, F32, pack_block_f32,
    tiles: [1 => [2, 1], 2 => [2, 1], 3 => [1], 4 => [1], 5 => [1], 6 => [1]]
);
attention_level!(
    BF16, NeonBf16, #[target_feature(enable = "neon")], Neon, Widened, F32, pack_block_bf16,
    tiles: [1 => [2, 1], 2 => [2, 1], 3 => [1], 4 => [1]]
);
