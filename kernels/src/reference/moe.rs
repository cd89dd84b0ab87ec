//! A mixture layer in f64 over dequantised weights: what `moe` must come close to.
