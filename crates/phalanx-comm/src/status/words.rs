//! Ranks and texts as 64-bit words of memory that several processes map.

/// Ranks as bits, for the lowest 1024 ranks.
pub(crate) type Mask = [u64; MASK_WORDS];
pub(crate) const MASK_WORDS: usize = 16;

/// The ranks whose bits are set in `words`.
pub(crate) fn ranks_of(words: &[u64]) -> Vec<u32> {
    let ranks = 0..64 * words.len();
    ranks
        .filter(|rank| words[rank / 64] >> (rank % 64) & 1 == 1)
        .map(|rank| rank as u32)
        .collect()
}

/// Sets the bit of `rank`, if there is one.
#[inline]
pub(crate) fn set_rank(words: &mut [u64], rank: usize) {
    if let Some(word) = words.get_mut(rank / 64) {
        *word |= 1 << (rank % 64);
    }
}

/// `text` truncated at a character boundary to at most `bytes` bytes.
pub(crate) fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// `text` as words, padded with zeros, through `store`.
pub(crate) fn write_text(text: &str, words: usize, mut store: impl FnMut(usize, u64)) {
    let bytes = cut(text, 8 * words).as_bytes();
    for index in 0..words {
        let mut word = [0; 8];
        let part = bytes.get(8 * index..).unwrap_or_default();
        let part = &part[..part.len().min(8)];
        word[..part.len()].copy_from_slice(part);
        store(index, u64::from_le_bytes(word));
    }
}

/// The text in `words`, up to the first zero. Invalid text and control characters
/// become question marks, since it will be printed.
pub(crate) fn read_text(words: impl Iterator<Item = u64>) -> String {
    let bytes: Vec<u8> = words
        .flat_map(u64::to_le_bytes)
        .take_while(|byte| *byte != 0)
        .collect();
    printable(&String::from_utf8_lossy(&bytes))
}

/// The same text without control characters.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back_cut_at_characters() {
        for (text, want) in [
            ("backward", "backward"),
            ("", ""),
            ("exactly sixteen!", "exactly sixteen!"),
            ("more than sixteen", "more than sixtee"),
            ("fifteen bytes, é", "fifteen bytes, "),
        ] {
            let mut words = [7; 2];
            write_text(text, 2, |i, word| words[i] = word);
            assert_eq!(read_text(words.into_iter()), want);
        }
        let escape = u64::from_le_bytes(*b"a\x1b[2Jb\n\0");
        assert_eq!(read_text([escape].into_iter()), "a?[2Jb?");
    }
}
