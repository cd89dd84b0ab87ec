//! Tables of tile kernels for levels with 16 lanes and 32 registers: AVX-512, and its emulation in tests.
//!
//! A panel is two vectors wide, so a tile always takes the whole of it. Kernels that keep integer and f32 sums at once have
//! room for half as many rows.

/// Defines the kernels of `$level` in the current module, each function with the given attribute: tiles of up to as many rows
/// as the first list counts, or the second for kernels with two sets of sums.
macro_rules! wide_kernels {
    ($level:ty, $full:tt, $half:tt $(, #[$feature:meta])?) => {
        use crate::table::{Tile, TileFn, TileKernels};
        use crate::tiles::{self, DotI4, DotI8};

        crate::wide::wide_kernels!(@tile f32, t, tiles::f32_tile::<$level, MR, 2>(t) $(, #[$feature])?);
        crate::wide::wide_kernels!(@tile bf16, t, tiles::bf16_tile::<$level, MR, 2>(t) $(, #[$feature])?);
        crate::wide::wide_kernels!(
            @tile i8_row, t, tiles::integer_tile::<$level, DotI8, MR, 2, false, false>(t, 128) $(, #[$feature])?
        );
        crate::wide::wide_kernels!(
            @tile i8_group, t, tiles::grouped_tile::<$level, DotI8, MR, 2>(t, 128) $(, #[$feature])?
        );
        crate::wide::wide_kernels!(@tile i4, t, tiles::grouped_tile::<$level, DotI4, MR, 2>(t, 8) $(, #[$feature])?);

        pub(crate) const F32: TileKernels = crate::wide::wide_kernels!(@rows f32, usize::MAX, $full);
        pub(crate) const BF16: TileKernels = crate::wide::wide_kernels!(@rows bf16, usize::MAX, $full);
        // Eight rows as two tiles, so that the next panel is fetched during the second.
        pub(crate) const I8_ROW: TileKernels = crate::wide::wide_kernels!(@rows i8_row, 8, $full);
        pub(crate) const I8_GROUP: TileKernels = crate::wide::wide_kernels!(@rows i8_group, usize::MAX, $half);
        pub(crate) const I4: TileKernels = crate::wide::wide_kernels!(@rows i4, usize::MAX, $half);
    };
    // The same for levels that multiply bf16.
    (bf16 $level:ty, $full:tt $(, #[$feature:meta])?) => {
        crate::wide::wide_kernels!(
            @tile bf16_dot, t, tiles::bf16_dot_tile::<$level, MR, 2>(t) $(, #[$feature])?
        );
        pub(crate) const BF16_DOT: TileKernels = crate::wide::wide_kernels!(@rows bf16_dot, usize::MAX, $full);
    };
    (@tile $name:ident, $t:ident, $body:expr $(, #[$feature:meta])?) => {
        $(#[$feature])?
        unsafe fn $name<const MR: usize>($t: &Tile) {
            // SAFETY: the caller's contract is the kernel's.
            unsafe { $body }
        }
    };
    (@rows $f:ident, $split:expr, [$($rows:literal)*]) => {{
        const TABLE: &[TileFn] = &[$($f::<$rows>),*];
        TileKernels::vectors(TABLE, $split)
    }};
}

pub(crate) use wide_kernels;
