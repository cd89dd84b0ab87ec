//! Kernels for x86-64: what each level adds to the shared tile kernels.

pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;
