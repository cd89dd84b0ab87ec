//! Attention with AVX-512. With bf16 dot products q and P are bf16 and a line of K or V is one instruction per row; without, bf16
//! is widened to f32 in registers.

use super::simd::{Avx512, Avx512Bf16};
use crate::attention::kernels::{AttentionKernels, Operand};
use crate::attention::vector::{Dotted, Float, Widened, attention_512, attention_level};

attention_512!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")],
    Avx512,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")],
    Avx512Bf16
);
