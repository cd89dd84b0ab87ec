//! Random numbers by counter, not by sequence: Philox4x32-10 keyed by (seed, choice), counting positions. A draw depends on
//! nothing but these three, so batching, preemption and resumption can not change it.

/// A number in [0, 1) with 53 random bits for the token at `position` of choice `choice`.
pub fn uniform(seed: u64, choice: u16, position: u64) -> f64 {
    let [key0, key1] = split(seed);
    let [count0, count1] = split(position);
    let [a, b, ..] = philox4x32_10([count0, count1, u32::from(choice), 0], [key0, key1]);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    // Exact: 53 bits fit a double.
    bits as f64 / (1u64 << 53) as f64
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn split(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (2011).
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [low0, high0] = split(u64::from(counter[0]) * 0xd251_1f53);
        let [low1, high1] = split(u64::from(counter[2]) * 0xcd9e_8d57);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let (counter, key) = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(philox4x32_10(counter, key), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn draws_are_even_and_differ_by_seed_choice_and_position() {
        let mean = (0..10_000).map(|position| uniform(3, 0, position)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let draw = uniform(1, 0, 0);
        assert!(draw != uniform(2, 0, 0) && draw != uniform(1, 1, 0) && draw != uniform(1, 0, 1));
        assert!((0..10_000).all(|position| (0.0..1.0).contains(&uniform(9, 2, position))));
    }
}
