//! Seeded garbling of bytes: what an enemy, a bad disk or another program
//! could feed to a parser. For tests only.
//!
//! Not a fuzzer (`tools/fuzz/` has those, and they look where the code branches):
//! a few thousand changes of sound inputs in a second, on any toolchain, the
//! same ones every time. Beside it, [`alone`] runs a test in a process of its own.
#![forbid(unsafe_code)]

/// Marsaglia's xorshift64: small, seeded, and good enough to spoil bytes.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

/// Where decoders of numbers err.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    i64::MAX as u64,
    u64::MAX,
];

/// No garbled input is longer.
const MOST_BYTES: usize = 1 << 16;

impl Dice {
    /// The next 64 bits.
    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `n`, which is not zero.
    pub fn below(&mut self, n: usize) -> usize {
        (self.roll() % n as u64) as usize
    }

    /// A byte, more often than not one at the end of a range.
    pub fn byte(&mut self) -> u8 {
        match self.below(4) {
            0 => [0, 1, 0x7f, 0x80, 0xfe, 0xff][self.below(6)],
            _ => self.roll() as u8,
        }
    }

    /// So many bytes of noise.
    pub fn noise(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|_| self.roll() as u8).collect()
    }

    /// One to four changes: a byte, a bit, a cut, a run of noise, a doubling.
    pub fn garble(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len().max(1));
            match self.below(6) {
                0 | 1 if !bytes.is_empty() => bytes[at] = self.byte(),
                2 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                3 => bytes.truncate(at),
                4 => {
                    for _ in 0..self.below(9) {
                        let byte = self.byte();
                        bytes.push(byte);
                    }
                }
                _ => {
                    let part = bytes[at.min(bytes.len())..].to_vec();
                    bytes.extend_from_slice(&part);
                    bytes.truncate(MOST_BYTES);
                }
            }
        }
    }

    /// Writes a number from the edge of a range over 1, 2, 4 or 8 bytes, in
    /// either byte order: what a lying length field looks like.
    pub fn lie(&mut self, bytes: &mut [u8]) {
        let width = [1, 2, 4, 8][self.below(4)];
        if bytes.len() < width {
            return;
        }
        let at = self.below(bytes.len() - width + 1);
        let number = EDGES[self.below(EDGES.len())];
        let (little, big) = (number.to_le_bytes(), number.to_be_bytes());
        let number = match self.below(2) {
            0 => &little[..width],
            _ => &big[8 - width..],
        };
        bytes[at..at + width].copy_from_slice(number);
    }
}

/// Feeds a parser with every seed, every prefix of the short ones, and
/// `rounds` garbled ones: changed, with lying numbers, or spliced from two.
///
/// The caller's `feed` must not panic; whatever else it has to promise, it
/// asserts itself.
pub fn feed(seeds: &[Vec<u8>], rounds: usize, mut feed: impl FnMut(&[u8])) {
    let mut dice = Dice(0x5eed_0f9a_2b1e);
    feed(b"");
    for seed in seeds {
        feed(seed);
        for end in 0..seed.len().min(300) {
            feed(&seed[..end]);
        }
    }
    for _ in 0..rounds {
        let mut bytes = match seeds {
            [] => dice.noise(64),
            some => some[dice.below(some.len())].clone(),
        };
        match dice.below(4) {
            0 => dice.lie(&mut bytes),
            1 if !seeds.is_empty() => {
                let other = &seeds[dice.below(seeds.len())];
                let cut = dice.below(bytes.len() + 1);
                let from = dice.below(other.len() + 1);
                bytes.truncate(cut);
                bytes.extend_from_slice(&other[from..]);
            }
            2 => {
                dice.lie(&mut bytes);
                dice.garble(&mut bytes);
            }
            _ => dice.garble(&mut bytes),
        }
        bytes.truncate(MOST_BYTES);
        feed(&bytes);
    }
}

/// Runs the test called `name` again in a process of its own, because peak memory is counted for the
/// whole process, other tests included. True in that process; false in the first one, after it passed.
///
/// # Panics
///
/// If the test cannot be started, or fails.
pub fn alone(name: &str) -> bool {
    const CHILD: &str = "PHALANX_TEST_ALONE";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_garbage_every_time_and_little_of_it_twice() {
        let seeds = [b"a sound input of some length".to_vec(), b"12".to_vec()];
        let mut runs = [Vec::new(), Vec::new()];
        for run in &mut runs {
            feed(&seeds, 2000, |bytes| run.push(bytes.to_vec()));
        }
        assert_eq!(runs[0], runs[1]);
        runs[0].sort();
        runs[0].dedup();
        assert!(runs[0].len() > 1000, "{}", runs[0].len());
        assert!(runs[0].contains(&b"a sound".to_vec()));
    }

    #[test]
    fn nothing_grows_without_limit() {
        let seeds = [vec![7; MOST_BYTES - 1]];
        feed(&seeds, 300, |bytes| assert!(bytes.len() <= MOST_BYTES));
    }
}
