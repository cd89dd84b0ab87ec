//! Kernels for 64-bit Arm: what each level adds to the shared tile kernels.

pub(crate) mod neon;
