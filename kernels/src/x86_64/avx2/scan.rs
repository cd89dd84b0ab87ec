//! Scans of rows with AVX2.

use super::simd::Avx2;
use crate::scan::vector::scan_level;

scan_level!(KERNELS, "avx2,fma,f16c", Avx2);
