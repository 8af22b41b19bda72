//! MT19937 (Matsumoto and Nishimura, 1998): the raw words beneath PyTorch's
//! CPU generator.

/// Words of state.
const N: usize = 624;
/// Distance of the word mixed in by the twist.
const M: usize = 397;

/// The generator's state and the position in it.
#[derive(Clone, PartialEq, Eq)]
pub struct Mt19937 {
    state: [u32; N],
    next: usize,
}

impl Mt19937 {
    /// The state that this seed gives.
    pub fn new(seed: u32) -> Self {
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
        let mixed = |this: u32, next: u32| {
            let y = (this & 0x8000_0000) | (next & 0x7FFF_FFFF);
            (y >> 1) ^ ((y & 1).wrapping_neg() & 0x9908_B0DF)
        };
        // In two runs without a remainder, which the compiler turns into vectors.
        for k in 0..N - M {
            s[k] = s[k + M] ^ mixed(s[k], s[k + 1]);
        }
        for k in N - M..N - 1 {
            s[k] = s[k + M - N] ^ mixed(s[k], s[k + 1]);
        }
        s[N - 1] = s[M - 1] ^ mixed(s[N - 1], s[0]);
        self.next = 0;
    }

    /// Fills `out` with the next words, as the bits of floats.
    pub fn fill(&mut self, out: &mut [f32]) {
        let mut rest = out;
        while !rest.is_empty() {
            if self.next == N {
                self.twist();
            }
            let n = rest.len().min(N - self.next);
            let (now, later) = rest.split_at_mut(n);
            for (o, &word) in now.iter_mut().zip(&self.state[self.next..]) {
                *o = f32::from_bits(tempered(word));
            }
            self.next += n;
            rest = later;
        }
    }

    /// One tempered word.
    #[inline]
    pub fn word(&mut self) -> u32 {
        if self.next == N {
            self.twist();
        }
        self.next += 1;
        tempered(self.state[self.next - 1])
    }
}

#[inline(always)]
fn tempered(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9D2C_5680;
    y ^= (y << 15) & 0xEFC6_0000;
    y ^ (y >> 18)
}
