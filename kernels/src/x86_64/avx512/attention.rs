//! Attention with AVX-512. With bf16 dot products q and P are bf16 and a line of K or V is one instruction per row; without, bf16
//! is widened to f32 in registers.
//!
//! 12 rows x 2 lines are 24 of the 32 registers; fewer rows take more lines, so that enough chains are under way.

use super::simd::{Avx512, Avx512Bf16};
use crate::attention::kernels::{AttentionKernels, Operand};
use crate::attention::vector::{Dotted, Float, Widened, attention_level};

attention_level!(
    F32, F32Level, #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")],
    Avx512, Float, F32, pack_block_f32,
    tiles: [
        1 => [8, 4, 2, 1], 2 => [8, 4, 2, 1], 3 => [4, 2, 1], 4 => [4, 2, 1], 5 => [4, 2, 1], 6 => [2, 1],
        7 => [2, 1], 8 => [2, 1], 9 => [2, 1], 10 => [2, 1], 11 => [2, 1], 12 => [2, 1]
    ]
);
attention_level!(
    WIDENED, WidenedLevel, #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")],
    Avx512, Widened, F32, pack_block_bf16,
    tiles: [
        1 => [8, 4, 2, 1], 2 => [8, 4, 2, 1], 3 => [4, 2, 1], 4 => [4, 2, 1], 5 => [4, 2, 1], 6 => [2, 1],
        7 => [2, 1], 8 => [2, 1], 9 => [2, 1], 10 => [2, 1], 11 => [2, 1], 12 => [2, 1]
    ]
);
attention_level!(
    BF16, Bf16Level,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")],
    Avx512Bf16, Dotted, Bf16, pack_block_bf16,
    tiles: [
        1 => [8, 4, 2, 1], 2 => [8, 4, 2, 1], 3 => [4, 2, 1], 4 => [4, 2, 1], 5 => [4, 2, 1], 6 => [2, 1],
        7 => [2, 1], 8 => [2, 1], 9 => [2, 1], 10 => [2, 1], 11 => [2, 1], 12 => [2, 1]
    ]
);
