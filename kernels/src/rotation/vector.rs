//! The turn of one row on vectors: the same sums as the portable form, two distances a walk.

use super::Rotation;
use crate::lanes::Lanes;

/// As [`Rotation::turn_plainly`], bit for bit.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn turn_row<S: Lanes>(rotation: &Rotation, row: &mut [f32]) {
    let Rotation { block, odd, mix, signs } = rotation;
    if *block < 4 * S::LANES {
        return rotation.turn_plainly(row);
    }
    assert_eq!(row.len(), signs.len(), "one value per channel");
    // SAFETY: the row is a whole number of blocks, and a block a whole number of groups of vectors.
    unsafe {
        let x = row.as_mut_ptr();
        for at in (0..row.len()).step_by(4 * S::LANES) {
            let mut v = [S::zero(); 4];
            for i in 0..4 {
                let from = at + i * S::LANES;
                v[i] = within::<S>(S::mul(S::load(x.add(from)), S::load(signs.as_ptr().add(from))));
            }
            let v = four::<S>(v);
            for i in 0..4 {
                S::store(x.add(at + i * S::LANES), v[i]);
            }
        }
        let mut distance = 4 * S::LANES;
        while distance < *block {
            let two = 2 * distance == *block;
            for group in (0..row.len()).step_by(if two { 2 * distance } else { 4 * distance }) {
                for at in (group..group + distance).step_by(S::LANES) {
                    if two {
                        let (low, high) = (x.add(at), x.add(at + distance));
                        let (a, b) = (S::load(low), S::load(high));
                        S::store(low, S::add(a, b));
                        S::store(high, S::sub(a, b));
                        continue;
                    }
                    let mut v = [S::zero(); 4];
                    for i in 0..4 {
                        v[i] = S::load(x.add(at + i * distance));
                    }
                    let v = four::<S>(v);
                    for i in 0..4 {
                        S::store(x.add(at + i * distance), v[i]);
                    }
                }
            }
            distance *= 4;
        }
        match odd {
            _ if mix.is_empty() => {}
            3 => mixed::<S, 3>(x, *block, mix),
            5 => mixed::<S, 5>(x, *block, mix),
            7 => mixed::<S, 7>(x, *block, mix),
            9 => mixed::<S, 9>(x, *block, mix),
            _ => rotation.mix_blocks(row, 1),
        }
    }
}

/// The distances inside a vector.
#[inline(always)]
unsafe fn within<S: Lanes>(v: S::F) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let mut v = S::butterfly::<2>(S::butterfly::<1>(v));
        if S::LANES > 4 {
            v = S::butterfly::<4>(v);
        }
        if S::LANES > 8 {
            v = S::butterfly::<8>(v);
        }
        v
    }
}

/// Two distances at once.
#[inline(always)]
unsafe fn four<S: Lanes>([a, b, c, d]: [S::F; 4]) -> [S::F; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        let (a, b, c, d) = (S::add(a, b), S::sub(a, b), S::add(c, d), S::sub(c, d));
        [S::add(a, c), S::add(b, d), S::sub(a, c), S::sub(b, d)]
    }
}

/// Mixes `N` blocks, value by value.
#[inline(always)]
unsafe fn mixed<S: Lanes, const N: usize>(x: *mut f32, block: usize, mix: &[f32]) {
    // SAFETY: the row holds N blocks, `mix` N x N factors.
    unsafe {
        for at in (0..block).step_by(S::LANES) {
            let mut old = [S::zero(); N];
            for i in 0..N {
                old[i] = S::load(x.add(i * block + at));
            }
            for j in 0..N {
                let mut sum = S::mul(old[0], S::splat(mix[j]));
                for i in 1..N {
                    sum = S::add(sum, S::mul(old[i], S::splat(mix[i * N + j])));
                }
                S::store(x.add(j * block + at), sum);
            }
        }
    }
}
