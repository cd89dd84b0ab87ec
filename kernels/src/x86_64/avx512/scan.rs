//! Scans of rows with AVX-512.

use super::simd::Avx512;
use crate::scan::vector::scan_level;

scan_level!(KERNELS, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c", Avx512);
