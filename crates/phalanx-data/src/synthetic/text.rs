//! Generated text.

use crate::words::Words;

/// The sample whose random numbers the text takes; no digit has it.
const SAMPLE: u64 = 1 << 63;
/// Words that sentences are made of.
const WORDS: usize = 48;
/// Words that may follow a word.
const NEXT: usize = 3;

/// Text of `characters` ASCII characters, which a language model can learn: sentences of words
/// from a small generated vocabulary, where each word has three possible successors. The same
/// seed gives the same text, and a longer one begins with a shorter one.
///
/// ```
/// let text = phalanx_data::synthetic::text(1000, 1);
/// assert!(text.starts_with(&phalanx_data::synthetic::text(100, 1)));
/// ```
pub fn text(characters: usize, seed: u64) -> String {
    let mut random = Words::new(seed, SAMPLE);
    let mut below = |n: usize| random.below(n as u32) as usize;
    let words: Vec<String> = (0..WORDS)
        .map(|_| {
            let syllables = 1 + below(3);
            let mut word = String::new();
            for _ in 0..syllables {
                word.push(char::from(b"bcdfghjklmnprstvwz"[below(18)]));
                word.push(char::from(b"aeiou"[below(5)]));
            }
            word
        })
        .collect();
    let next: Vec<[usize; NEXT]> = (0..WORDS)
        .map(|_| [(); NEXT].map(|()| below(WORDS)))
        .collect();
    let (mut text, mut word) = (String::with_capacity(characters + 16), 0);
    while text.len() < characters {
        for i in 0..4 + below(6) {
            text.push_str(if i > 0 { " " } else { "" });
            text.push_str(&words[word]);
            // The first successor comes in half of all cases.
            word = next[word][below(2 * NEXT - 2).saturating_sub(1)];
        }
        text.push_str(".\n");
    }
    text.truncate(characters);
    text
}
