//! Compute kernels of ernied on plain slices: packed matrices, GEMMs, experts, attention and sampling, and the thread pool
//! they run on.
//!
//! Everything here is batch-invariant: a row's result depends on that row, the weights and the instruction-set level, never
//! on the number of rows, of threads, or on how work was cut. Nothing here knows models, files, processes or text. The hot
//! path allocates nothing; `unsafe` stays inside the kernels and the few wrappers that hand them checked slices.

// Register tiles are indexed by row and vector on purpose: iterators over them keep the compiler from seeing registers.
#![allow(clippy::needless_range_loop)]
// Parts of the shared kernels serve levels of x86-64 only.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

pub mod act;
pub mod attention;
pub mod bench;
pub mod compensate;
pub mod gemm;
pub mod isa;
pub mod kv;
pub mod matrix;
pub mod memory;
pub mod moe;
pub mod ops;
pub mod prepared;
pub mod rotation;
pub mod sample;
pub mod threads;

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod epilogue;
mod lanes;
mod pack;
mod reference;
mod rope;
mod scan;
mod simd;
mod table;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use act::{ActKind, Acts};
pub use attention::{AttentionScratch, RopeTable, Span, attention, rope_append};
pub use compensate::Compensation;
pub use gemm::{Out, gemm};
pub use isa::Isa;
pub use kv::{KvCache, KvKind};
pub use matrix::{Arrange, ComputedRows, Matrix, PackError, RowSource, WeightKind};
pub use memory::AlignedBuf;
pub use moe::{MoeScratch, Routing, moe};
pub use rotation::Rotation;
pub use threads::Pool;

// Emulates levels of x86-64: elsewhere its kernels would be compiled and walked for nothing.
#[cfg(all(test, target_arch = "x86_64"))]
mod emulated;
#[cfg(test)]
mod tests;
