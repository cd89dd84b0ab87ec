//! Scans of rows with NEON.

use super::simd::Neon;
use crate::scan::vector::scan_level;

scan_level!(KERNELS, "neon", Neon);
