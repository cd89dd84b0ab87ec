//! The portable level: plain loops that define what every other level computes.
//!
//! Integer kinds and f32 agree bit for bit with the vector levels (same order of sums, same fused steps); bf16 does too on
//! levels that widen it to f32.

pub(crate) mod attention;
pub(crate) mod matmul;
pub(crate) mod quant;
pub(crate) mod rows;
pub(crate) mod scan;

use crate::isa::Isa;
use crate::rotation::Rotation;
use crate::table::{Form, KernelTable, PeakKernels, RowKernels};

pub(crate) static TABLE: KernelTable = KernelTable {
    isa: Isa::Scalar,
    bf16_form: Form::F32,
    i8_form: Form::I8,
    f32: matmul::F32,
    bf16: matmul::BF16,
    i8_row: matmul::I8,
    i8_group: matmul::I8,
    i4: matmul::I4,
    rows: RowKernels {
        rmsnorm: rows::rmsnorm,
        turn: Rotation::turn_plainly,
        to_bf16: rows::to_bf16,
        to_i8: rows::to_i8,
        silu_f32: rows::silu_f32,
        silu_bf16: rows::silu_bf16,
        store: rows::store,
        add: rows::add,
        row_max: rows::row_max,
        add_scaled: rows::add_scaled,
    },
    peaks: PeakKernels { f32: peak, bf16: peak, int8: peak, int4: peak },
};

/// Independent scalar multiply-adds; what portable code could at best do without vectors.
fn peak() -> f64 {
    const STEPS: u32 = 200_000;
    let mut sums = [1f32; 12];
    let factor = std::hint::black_box(0.999f32);
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = *sum * factor + 0.001;
        }
    }
    std::hint::black_box(sums);
    f64::from(STEPS) * 12.0 * 2.0
}
