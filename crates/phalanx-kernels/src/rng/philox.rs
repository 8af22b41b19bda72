//! Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and
//! Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

/// Multipliers of the two halves of a round.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Weyl increments of the key: golden ratio and sqrt(3) - 1, in 32 bits.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// The number of rounds that the authors recommend.
const ROUNDS: usize = 10;

/// Four random words for `counter` under `key`: a pure function.
///
/// Different (key, counter) pairs give independent-looking words; there is no
/// state to carry, to share or to save.
#[inline]
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [
            (b >> 32) as u32 ^ c[1] ^ k[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ k[1],
            a as u32,
        ];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// A word as a float in [0, 1): its upper 24 bits, all exactly representable.
#[inline]
pub fn unit_f32(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}
