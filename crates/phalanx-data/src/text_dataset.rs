//! Text for language models that predict the next token.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use phalanx_nn::rng::philox::philox4x32_10;
use sha2::{Digest, Sha256};

use crate::packed::{Description, Source, Tokens};
use crate::text_files::{read_documents, text_files};
use crate::{Dataset, synthetic};
use phalanx_base::text::{grouped, one_line};
use phalanx_base::{Error, Result, refuse};

/// Bytes of the largest text; its tokens take four times as much memory.
const MAX_BYTES: usize = 256 << 20;
/// Separates the random numbers of windows from others with the same seed.
const STREAM: u32 = 0x7769_6e64; // "wind"

/// A text as sequences of `context` tokens, whose targets are the tokens that follow each: the characters of a text, or the
/// tokens of a file that `phalanx pack` or a [`Packer`](crate::Packer) has written.
///
/// Characters are numbered by their code points, as nanoGPT numbers them: token 0 is the
/// lowest that occurs in the text. An epoch passes once over the text, in sequences that do not
/// overlap; where they begin differs between epochs. A sequence may go from one document into the next, as nanoGPT's do. Other
/// sequences: [`every_window`](Self::every_window), [`random_windows`](Self::random_windows),
/// [`within_documents`](Self::within_documents).
#[derive(Clone)]
pub struct TextDataset {
    /// Of the file, or what the text is.
    name: String,
    text: Arc<Tokens>,
    /// The tokens that are this data set.
    part: Range<usize>,
    context: usize,
    windows: Windows,
}

/// Where sequences begin.
#[derive(Clone)]
enum Windows {
    /// One after the other.
    InOrder,
    /// At each place.
    Every,
    /// At places that are drawn by this seed.
    Random(u64),
    /// At these places.
    At(Arc<[usize]>),
}

/// Sequences of tokens.
#[derive(Clone, Debug, Default)]
pub struct TextBatch {
    /// Tokens by number, one sequence after the other.
    pub tokens: Vec<u32>,
    /// The token after each of [`tokens`](Self::tokens).
    pub targets: Vec<u32>,
}

impl TextDataset {
    /// Opens the UTF-8 text file at `path`, all `.txt` files below that folder, in the order of their names and joined as they
    /// are, or a file of `phalanx pack`. `context` is the length of a sequence.
    ///
    /// A packed file may be larger than memory: its tokens are read when a batch needs them, and compared with the checksums
    /// that were packed with them.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file; `Data` when it is not UTF-8, shorter than a sequence
    /// and its next token, text larger than 256 MiB, or a packed file that is of another version, truncated or changed;
    /// `System` when it cannot be read.
    pub fn open(path: &Path, context: usize) -> Result<Self> {
        let name = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            one_line(&name).into_owned()
        };
        if let Some(packed) = Tokens::open(path)? {
            return Self::new(&name(path), packed, context);
        }
        let (files, mut text) = (text_files(path, &["txt"])?, String::new());
        for file in &files {
            read_documents(file, None, &mut |piece, _| {
                text.push_str(piece);
                match text.len() > MAX_BYTES {
                    true => Err(Error::data(format!(
                        "{} has more than 256 MiB of text\n  pack it first: phalanx pack",
                        path.display()
                    ))),
                    false => Ok(()),
                }
            })?;
        }
        let mut name = name(&files[0]);
        if files.len() > 1 {
            name += &format!(" and {} more", files.len() - 1);
        }
        Self::from_text(&name, &text, context)
    }

    /// `text`, which is called `name` in output.
    ///
    /// # Errors
    ///
    /// `Data` when it is shorter than a sequence and its next character; `Usage` when `context`
    /// is 0.
    pub fn from_text(name: &str, text: &str, context: usize) -> Result<Self> {
        let all: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let number = |c| all.binary_search(&c).unwrap_or_default() as u32;
        let tokens: Vec<u32> = text.chars().map(number).collect();
        let bytes = all.iter().map(|c| c.to_string().into_bytes().into());
        let about = Description {
            tokens: tokens.len(),
            vocabulary: bytes.collect(),
            ..Description::default()
        };
        let text = Tokens {
            about,
            sha256: hex::encode(Sha256::digest(text)),
            source: Source::Memory(tokens),
        };
        Self::new(name, text, context)
    }

    fn new(name: &str, text: Tokens, context: usize) -> Result<Self> {
        let all = TextDataset {
            name: name.to_owned(),
            part: 0..text.about.tokens,
            text: Arc::new(text),
            context,
            windows: Windows::InOrder,
        };
        all.checked("")
    }

    /// Generated text of `characters` characters ([`synthetic::text`]).
    ///
    /// # Errors
    ///
    /// As [`from_text`](Self::from_text).
    pub fn synthetic(characters: usize, seed: u64, context: usize) -> Result<Self> {
        Self::from_text(
            "synthetic text",
            &synthetic::text(characters, seed),
            context,
        )
    }

    /// The first tokens, `share` of all, and those after them: 0.9 for training and
    /// validation as in nanoGPT. Both have the vocabulary of the whole text. The second begins with a document where one
    /// begins near: not farther away than a hundredth of all tokens.
    ///
    /// # Errors
    ///
    /// `Data` when one of them is shorter than a sequence and its next token.
    pub fn split(self, share: f64) -> Result<(Self, Self)> {
        let Range { start, end } = self.part;
        let middle = start + ((end - start) as f64 * share.clamp(0.0, 1.0)) as usize;
        let far = |at: &usize| at.abs_diff(middle);
        let near = self.documents().filter(|at| far(at) <= (end - start) / 100);
        let middle = near.min_by_key(far).unwrap_or(middle);
        let part = |part: Range<usize>| TextDataset {
            part,
            ..self.clone()
        };
        let (first, second) = (part(start..middle), part(middle..end));
        Ok((
            first.checked("the first part of ")?,
            second.checked("the last part of ")?,
        ))
    }

    /// The same with a sequence for each place of the text where one may begin, so that a shuffled epoch has random windows as
    /// nanoGPT's `get_batch` draws them, none twice. An epoch is very long then: train with `--max-steps`. The order of an
    /// epoch takes 8 bytes of memory for each place; a text of more than some 100 million tokens has
    /// [`random_windows`](Self::random_windows).
    #[must_use]
    pub fn every_window(self) -> Self {
        let windows = Windows::Every;
        TextDataset { windows, ..self }
    }

    /// The same with sequences that begin at places which `seed`, the epoch and the sequence's number decide, as nanoGPT's
    /// `get_batch` draws them. An epoch has as many as do not overlap when they are in order.
    #[must_use]
    pub fn random_windows(self, seed: u64) -> Self {
        let windows = Windows::Random(seed);
        TextDataset { windows, ..self }
    }

    /// The same with sequences that do not go beyond the end of a document: those of a document one after the other, the last of
    /// which ends with the document and so overlaps the one before. Documents that are not longer than a sequence are left out.
    /// A text file is one document.
    ///
    /// # Errors
    ///
    /// `Data` when no document is long enough.
    pub fn within_documents(self) -> Result<Self> {
        let (context, mut places, mut start) = (self.context, Vec::new(), self.part.start);
        for end in self.documents().chain([self.part.end]) {
            if end - start > context {
                let last = end - 1 - context;
                places.extend((start..last).step_by(context));
                places.push(last);
            }
            start = end;
        }
        if places.is_empty() {
            let what = format!(
                "{} has no document of more than {context} tokens",
                self.name
            );
            return Err(Error::data(what).note("try", "a shorter context"));
        }
        let windows = Windows::At(places.into());
        Ok(TextDataset { windows, ..self })
    }

    /// Where documents begin within this part.
    fn documents(&self) -> impl Iterator<Item = usize> {
        let Range { start, end } = self.part;
        let all = self.text.about.documents.iter().copied();
        all.filter(move |at| *at > start && *at < end)
    }

    fn checked(self, part: &str) -> Result<Self> {
        if self.context == 0 {
            refuse!("the context of a text must be at least 1");
        }
        if self.part.len() <= self.context {
            return Err(Error::data(format!(
                "{part}{} has {}; a context of {} needs at least {}\n  use a longer text or a shorter context",
                self.name,
                self.size(),
                self.context,
                self.context.saturating_add(1)
            )));
        }
        Ok(self)
    }

    /// Number of tokens, for people.
    fn size(&self) -> String {
        let unit = match self.bytes_per_token() {
            None => "characters",
            Some(_) => "tokens",
        };
        format!("{} {unit}", grouped(self.part.len() as u64))
    }

    /// The bytes of each token, by its number.
    pub fn vocabulary(&self) -> &[Box<[u8]>] {
        &self.text.about.vocabulary
    }

    /// Number of tokens, of which all but the first can be targets.
    pub fn tokens(&self) -> usize {
        self.part.len()
    }

    /// Bytes of text for each token, of the whole packed file; `None` where tokens are characters.
    pub fn bytes_per_token(&self) -> Option<f64> {
        let about = &self.text.about;
        (about.bytes > 0).then(|| about.bytes as f64 / about.tokens as f64)
    }

    /// Length of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The token after which text begins: the one that ends documents, else a newline, else token 0.
    pub fn first_token(&self) -> u32 {
        let mut tokens = self.vocabulary().iter();
        let newline = tokens.position(|token| **token == *b"\n");
        let end_of_text = self.text.about.end_of_text;
        end_of_text.unwrap_or(newline.unwrap_or_default() as u32)
    }

    /// The tokens of the characters of `text`; `None` where one is no token. What the tokenizer of a packed file would join
    /// stays apart.
    pub fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let numbers = self.vocabulary().iter().zip(0..);
        let numbers: BTreeMap<&[u8], u32> = numbers.map(|(token, n)| (&**token, n)).collect();
        let number = |c: char| numbers.get(c.to_string().as_bytes()).copied();
        text.chars().map(number).collect()
    }

    /// The text of these tokens; U+FFFD for numbers that are none, and for bytes that are not UTF-8.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let none = "\u{fffd}".as_bytes();
        let bytes = |token: &u32| self.vocabulary().get(*token as usize).map_or(none, |b| b);
        let bytes: Vec<u8> = tokens.iter().flat_map(bytes).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Where the first sequence of epoch `epoch` begins: at the beginning in epoch 0.
    fn shift(&self, epoch: u64) -> usize {
        let free = self.part.len() - 1 - Dataset::len(self) * self.context;
        let places = self.context.min(free + 1) as u64;
        // Fibonacci hashing: D. Knuth, The Art of Computer Programming 3, 6.4.
        ((epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % places) as usize
    }

    /// The first token of sequence `index`.
    fn place(&self, epoch: u64, index: usize) -> usize {
        let start = self.part.start;
        match &self.windows {
            Windows::InOrder => start + index * self.context + self.shift(epoch),
            Windows::Every => start + index,
            Windows::Random(seed) => {
                let counter = [index as u32, (index >> 32) as u32, epoch as u32, STREAM];
                let [low, high, ..] = philox4x32_10(counter, [*seed as u32, (*seed >> 32) as u32]);
                let number = u128::from(low) | (u128::from(high) << 32);
                let places = (self.part.len() - self.context) as u128;
                start + ((number * places) >> 64) as usize
            }
            Windows::At(places) => places[index],
        }
    }
}

impl Dataset for TextDataset {
    type Batch = TextBatch;

    /// Sequences of an epoch. What is left at the end of the text is at least as long as all
    /// shifts of the first sequence, where the text is not shorter than two sequences.
    fn len(&self) -> usize {
        let places = self.part.len() - self.context;
        match &self.windows {
            Windows::InOrder | Windows::Random(_) => (places / self.context).max(1),
            Windows::Every => places,
            Windows::At(places) => places.len(),
        }
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut TextBatch) -> Result<()> {
        batch.tokens.clear();
        batch.targets.clear();
        let mut window = Vec::new();
        for &index in indices {
            let Some(index) = usize::try_from(index)
                .ok()
                .filter(|i| *i < Dataset::len(self))
            else {
                refuse!(
                    "{} has {} sequences, so there is no sequence {index}",
                    self.name,
                    Dataset::len(self)
                );
            };
            let at = self.place(epoch, index);
            self.text.read(at..at + self.context + 1, &mut window)?;
            batch.tokens.extend(&window[..self.context]);
            batch.targets.extend(&window[1..]);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let (name, size, vocabulary) = (&self.name, self.size(), self.vocabulary().len());
        format!("{name}, {size}, {vocabulary} distinct")
    }

    fn content(&self) -> String {
        let Range { start, end } = self.part;
        let windows = match self.windows {
            Windows::InOrder => String::new(),
            Windows::Every => ", every window".to_owned(),
            Windows::Random(seed) => format!(", random windows of seed {seed}"),
            Windows::At(_) => ", within documents".to_owned(),
        };
        format!(
            "text {start} to {end}, context {}{windows}, SHA-256 {:.16}",
            self.context, self.text.sha256
        )
    }
}

impl fmt::Debug for TextDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextDataset")
            .field("name", &self.name)
            .field("part", &self.part)
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::packed_file;
    use phalanx_base::ErrorKind;

    /// A packed file with these documents, each of which token 0 ends, and all their tokens.
    fn packed(lengths: &[u32], context: usize) -> (TextDataset, Vec<u32>) {
        let documents = lengths
            .iter()
            .map(|n| (1..*n).map(|i| 1 + i % 40).collect());
        let documents: Vec<Vec<u32>> = documents.collect();
        let file: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("p.tokens");
        std::fs::write(&path, packed_file(&file, 50)).expect("written");
        let set = TextDataset::open(&path, context).expect("packed text");
        let all = documents.into_iter().flat_map(|mut document| {
            document.push(0);
            document
        });
        (set, all.collect())
    }

    fn batch(set: &TextDataset, epoch: u64, indices: &[u64]) -> TextBatch {
        let mut batch = TextBatch::default();
        set.read_batch(epoch, indices, &mut batch).expect("a batch");
        batch
    }

    #[test]
    fn sequences_and_targets_are_those_of_the_text() {
        let set = TextDataset::from_text("t", "hello world, ä", 4).expect("long enough");
        let vocabulary = [" ", ",", "d", "e", "h", "l", "o", "r", "w", "ä"];
        assert_eq!(
            set.vocabulary(),
            vocabulary.map(|c| Box::from(c.as_bytes()))
        );
        assert_eq!((Dataset::len(&set), set.tokens()), (2, 14));
        let both = batch(&set, 0, &[1, 0]);
        assert_eq!(set.decode(&both.tokens), "o wohell");
        assert_eq!(set.decode(&both.targets), " worello");
        assert_eq!(set.encode("hold"), Some(vec![4, 6, 5, 2]));
        assert_eq!(set.encode("help"), None);
        assert_eq!(set.decode(&[9, 10]), "ä\u{fffd}");
        let error = set.read_batch(0, &[2], &mut TextBatch::default());
        assert!(
            error
                .expect_err("too far")
                .to_string()
                .contains("no sequence 2")
        );
    }

    #[test]
    fn every_window_is_a_sequence() {
        let text: String = ('a'..='z').collect();
        for context in [1, 4, 25] {
            let set = TextDataset::from_text("t", &text, context).expect("long enough");
            let content = set.content();
            let set = set.every_window();
            assert_ne!(set.content(), content);
            let all: Vec<u64> = (0..Dataset::len(&set) as u64).collect();
            assert_eq!(all.len(), 26 - context);
            let batch = batch(&set, 3, &all);
            let windows = batch
                .tokens
                .chunks(context)
                .zip(batch.targets.chunks(context));
            for (at, (tokens, targets)) in (0u32..).zip(windows) {
                let run = |first: u32| (first..first + context as u32).collect::<Vec<_>>();
                assert_eq!((tokens, targets), (&run(at)[..], &run(at + 1)[..]));
            }
        }
    }

    #[test]
    fn every_epoch_and_length_stays_within_the_text() {
        let text: String = ('a'..='z').collect();
        for (length, context) in (2..26).flat_map(|n| (1..n).map(move |c| (n, c))) {
            let set = TextDataset::from_text("t", &text[..length], context).expect("long enough");
            let all: Vec<u64> = (0..Dataset::len(&set) as u64).collect();
            let mut first = BTreeSet::new();
            for epoch in 0..100 {
                let batch = batch(&set, epoch, &all);
                assert!(batch.tokens.windows(2).all(|pair| pair[1] == pair[0] + 1));
                assert!(
                    batch
                        .tokens
                        .iter()
                        .zip(&batch.targets)
                        .all(|(a, b)| *b == a + 1)
                );
                first.insert(batch.tokens[0]);
            }
            let places = context.min(length - Dataset::len(&set) * context);
            assert_eq!(first, (0..places as u32).collect(), "{length}, {context}");
        }
    }

    #[test]
    fn parts_share_the_vocabulary_and_no_character() {
        let set = TextDataset::from_text("t", "aaaaaaaaabbbbbbbbbbc", 1).expect("long enough");
        let (train, test) = set.clone().split(0.9).expect("long enough");
        assert_eq!((train.tokens(), test.tokens()), (18, 2));
        assert_eq!(train.vocabulary(), test.vocabulary());
        assert_ne!(train.content(), test.content());
        let error = set.split(0.99).expect_err("the last part is too short");
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(
            error
                .to_string()
                .starts_with("the last part of t has 1 characters"),
            "{error}"
        );
    }

    #[test]
    fn generated_text_is_learnable_and_follows_from_the_seed() {
        let (text, other) = (synthetic::text(20_000, 1), synthetic::text(20_000, 2));
        assert_ne!(text, other);
        assert_eq!(text, synthetic::text(20_000, 1));
        assert_eq!(text.len(), 20_000);
        let pairs: BTreeSet<_> = text
            .split_whitespace()
            .zip(text.split_whitespace().skip(1))
            .collect();
        let words: BTreeSet<_> = text.split_whitespace().collect();
        assert!(words.len() > 20 && words.len() <= 2 * 48, "{}", words.len());
        // Each word, with or without a full stop, has few successors.
        assert!(pairs.len() < 6 * words.len(), "{}", pairs.len());
    }

    #[test]
    fn files_that_are_no_text_are_named() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("input.txt");
        let error = TextDataset::open(&path, 8).expect_err("no file");
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error
                .to_string()
                .starts_with(&format!("no text file {}", path.display()))
        );
        for (bytes, context, words) in [
            (&b"abc\xff\xfe"[..], 2, "is not UTF-8 text: byte 3"),
            (
                b"\xff\xfea\0b\0",
                1,
                "is UTF-16LE text, not UTF-8 (by its byte order mark)\n  convert it with iconv -f UTF-16 -t UTF-8",
            ),
            (b"\xfe\xff\0a\0b", 1, "is UTF-16BE text"),
            (b"\xff\xfe\0\0a\0\0\0", 1, "is UTF-32LE text"),
            (b"\0\0\xfe\xff\0\0\0a", 1, "iconv -f UTF-32 -t UTF-8"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                1,
                "input.txt: it is a Git LFS pointer",
            ),
            (
                b"abc",
                3,
                "input.txt has 3 characters; a context of 3 needs at least 4",
            ),
            (b"", usize::MAX, "input.txt has 0 characters"),
            (b"phxtok9\n", 1, "input.txt is packed text of another"),
            (b"abc", 0, "at least 1"),
        ] {
            std::fs::write(&path, bytes).expect("written");
            let error = TextDataset::open(&path, context).expect_err("not usable");
            assert!(error.render().contains(words), "{error}");
        }
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("gone", &link).expect("link");
        let error = TextDataset::open(&link, 3).expect_err("it leads nowhere");
        assert!(error.render().contains("cannot follow the link"), "{error}");
        // The mark of UTF-8 is no character.
        std::fs::write(&path, "\u{feff}abcd").expect("written");
        let set = TextDataset::open(dir.path(), 3).expect("the folder's file");
        assert_eq!(set.describe(), "input.txt, 4 characters, 4 distinct");
        // Files are joined as they are.
        std::fs::create_dir(dir.path().join("a")).expect("folder");
        std::fs::write(dir.path().join("a/z.txt"), "xyz").expect("written");
        std::fs::remove_file(&link).expect("removed");
        let set = TextDataset::open(dir.path(), 6).expect("two files");
        assert_eq!(set.describe(), "z.txt and 1 more, 7 characters, 7 distinct");
        assert_eq!(set.decode(&batch(&set, 0, &[0]).tokens), "xyzabc");
    }

    #[test]
    fn packed_tokens_are_sequences_as_characters_are() {
        let (set, all) = packed(&[5, 9000, 2, 700], 9);
        assert_eq!(set.describe(), "p.tokens, 9,707 tokens, 50 distinct");
        assert_eq!((set.first_token(), set.encode("!#é")), (0, None));
        assert_eq!(set.decode(&[0, 1, 50]), "!\"\u{fffd}");
        // Of the bytes, the four ends are none.
        assert_eq!(set.bytes_per_token(), Some(9703.0 / 9707.0));
        for epoch in [0, 1, 5] {
            let indices: Vec<u64> = (0..Dataset::len(&set) as u64).collect();
            let batch = batch(&set, epoch, &indices);
            let shift = set.shift(epoch);
            assert_eq!(batch.tokens, all[shift..][..batch.tokens.len()]);
            assert_eq!(batch.targets, all[shift + 1..][..batch.tokens.len()]);
        }
        // The border is that of documents, where one is near.
        let (train, test) = set.clone().split(0.925).expect("long enough");
        assert_eq!((train.tokens(), test.tokens()), (9005, 702));
        assert_eq!(batch(&test, 0, &[0]).tokens, all[9005..9014]);
        let (train, _) = set.clone().split(0.5).expect("long enough");
        assert_eq!(train.tokens(), 4853);
        assert_ne!(train.content(), set.content());
    }

    #[test]
    fn random_windows_are_drawn_for_each_epoch() {
        let (set, all) = packed(&[20, 11], 4);
        let order = set.content();
        let set = set.random_windows(3);
        assert_ne!(set.content(), order);
        let indices: Vec<u64> = (0..Dataset::len(&set) as u64).collect();
        assert_eq!(indices.len(), 6);
        let mut places = vec![0; 27];
        for epoch in 0..1000 {
            let batch = batch(&set, epoch, &indices);
            for (index, tokens) in batch.tokens.chunks(4).enumerate() {
                let place = set.place(epoch, index);
                assert_eq!(tokens, &all[place..place + 4]);
                assert_eq!(batch.targets[index * 4..][..4], all[place + 1..place + 5]);
                places[place] += 1;
            }
        }
        // 222 on average, with a standard deviation of 15.
        assert!(places.iter().all(|n| (150..300).contains(n)), "{places:?}");
    }

    #[test]
    fn within_documents_no_sequence_has_tokens_of_two() {
        let lengths = [3, 2, 9, 4, 5, 30, 13, 2];
        for context in 1..8 {
            let (set, all) = packed(&lengths, context);
            let set = set.within_documents().expect("long enough");
            let mut expected = Vec::new();
            let mut start = 0;
            for length in lengths.map(|n| n as usize) {
                let end = start + length;
                let mut at = start;
                while at < end && length > context {
                    let first = at.min(end - 1 - context);
                    expected.push(first);
                    at += context;
                    if first + context + 1 == end {
                        break;
                    }
                }
                start = end;
            }
            let count = Dataset::len(&set);
            let places: Vec<usize> = (0..count).map(|index| set.place(7, index)).collect();
            assert_eq!(places, expected, "{context}");
            let batch = batch(&set, 0, &[count as u64 - 1]);
            assert_eq!(batch.targets, all[places[count - 1] + 1..][..context]);
        }
        let (set, _) = packed(&lengths, 30);
        let error = set.within_documents().expect_err("30 are not enough");
        assert_eq!(error.kind(), ErrorKind::Data);
        // A part begins and ends within documents.
        let (set, _) = packed(&[100, 100], 4);
        let (first, _) = set.split(0.75).expect("long enough");
        let first = first.within_documents().expect("long enough");
        assert_eq!(Dataset::len(&first), 25 + 13);
        assert_eq!(first.place(0, 37), 145);
        let text = TextDataset::from_text("t", "abcdefg", 3).expect("long enough");
        assert_eq!(Dataset::len(&text.within_documents().expect("one")), 2);
    }

    #[test]
    fn tiny_shakespeare_is_numbered_as_nanogpt_does() {
        let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
        let set = std::env::var_os("PHALANX_DATA").map(Into::into);
        let folders = [set, Some(near), Some("/work/shared/data".into())];
        let mut folders = folders.into_iter().flatten();
        let found = folders.find_map(|folder: std::path::PathBuf| {
            let path = folder.join("tinyshakespeare");
            path.join("input.txt").is_file().then_some(path)
        });
        let Some(path) = found else {
            eprintln!(
                "skipped: no Tiny Shakespeare here; set PHALANX_DATA to the folder above tinyshakespeare"
            );
            return;
        };
        let set = TextDataset::open(&path, 64).expect("the real file");
        assert_eq!((set.tokens(), set.vocabulary().len()), (1_115_394, 65));
        // "First Citizen:" by nanoGPT's stoi.
        let first = [18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52, 10];
        assert_eq!(batch(&set, 0, &[0]).tokens[..14], first);
        let (train, test) = set.split(0.9).expect("long enough");
        assert_eq!((train.tokens(), test.tokens()), (1_003_854, 111_540));
    }
}
