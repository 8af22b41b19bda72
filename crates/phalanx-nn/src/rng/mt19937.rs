//! MT19937 (Matsumoto and Nishimura, 1998): the raw words beneath PyTorch's
//! CPU generator.

/// Words of state.
const N: usize = 624;
/// Distance of the word mixed in by the twist.
const M: usize = 397;

/// The generator's state and the position in it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Mt19937 {
    state: [u32; N],
    next: usize,
}

impl Mt19937 {
    pub(super) fn new(seed: u32) -> Self {
        let mut state = [0; N];
        state[0] = seed;
        for j in 1..N {
            let before = state[j - 1];
            state[j] = 1_812_433_253_u32
                .wrapping_mul(before ^ (before >> 30))
                .wrapping_add(j as u32);
        }
        // The position is at the end: the first draw twists first.
        Self { state, next: N }
    }

    fn twist(&mut self) {
        let s = &mut self.state;
        for k in 0..N {
            let y = (s[k] & 0x8000_0000) | (s[(k + 1) % N] & 0x7FFF_FFFF);
            let odd = if y & 1 == 1 { 0x9908_B0DF } else { 0 };
            s[k] = s[(k + M) % N] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// One tempered word.
    #[inline]
    pub(super) fn word(&mut self) -> u32 {
        if self.next == N {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    }
}
