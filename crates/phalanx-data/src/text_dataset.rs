//! Text for language models that predict the next character.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::{Dataset, synthetic};
use phalanx_base::files::{found, open_regular, read_open};
use phalanx_base::text::{grouped, one_line};
use phalanx_base::{Error, Result};

/// Bytes of the largest text; its tokens take four times as much memory.
const MAX_BYTES: u64 = 256 << 20;
/// The file that is read where a folder is given.
const FILE: &str = "input.txt";

/// A text as sequences of `context` characters, whose targets are the characters that follow
/// each.
///
/// Characters are numbered by their code points, as nanoGPT numbers them: token 0 is the
/// lowest that occurs in the text. An epoch passes once over the text, in sequences that do not
/// overlap; where they begin differs between epochs. With [`every_window`](Self::every_window) it has the sequence of each
/// place of the text.
#[derive(Clone)]
pub struct TextDataset {
    /// Of the file, or what the text is.
    name: String,
    tokens: Arc<[u32]>,
    /// The part of `tokens` that is this data set.
    part: Range<usize>,
    vocabulary: Arc<[char]>,
    context: usize,
    every_window: bool,
    sha256: String,
}

/// Sequences of characters.
#[derive(Clone, Debug, Default)]
pub struct TextBatch {
    /// Characters by number, one sequence after the other.
    pub tokens: Vec<u32>,
    /// The character after each of [`tokens`](Self::tokens).
    pub targets: Vec<u32>,
}

impl TextDataset {
    /// Reads the UTF-8 text file at `path`, or `input.txt` in that folder. `context` is the
    /// length of a sequence.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file; `Data` when it is not UTF-8, shorter than a sequence
    /// and its next character, or larger than 256 MiB; `System` when it cannot be read.
    pub fn open(path: &Path, context: usize) -> Result<Self> {
        let inside = path.join(FILE);
        let is_folder = found(path)?.is_some_and(|there| there.is_dir());
        let path = if is_folder { &*inside } else { path };
        let shown = path.display();
        let file = open_regular(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::usage(format!(
                "no text file {shown}\n  give a UTF-8 text file, or a folder with {FILE}, such as that of \
                 https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare"
            ))
            .with_source(source),
            _ => Error::not_opened("text file", path, source),
        })?;
        let bytes = read_open(path, file, MAX_BYTES)?;
        // A longer mark may begin with a shorter one.
        const MARKS: [(&[u8], &str); 4] = [
            (b"\xff\xfe\0\0", "UTF-32LE"),
            (b"\0\0\xfe\xff", "UTF-32BE"),
            (b"\xff\xfe", "UTF-16LE"),
            (b"\xfe\xff", "UTF-16BE"),
        ];
        if let Some((_, encoding)) = MARKS.iter().find(|(mark, _)| bytes.starts_with(mark)) {
            // By these names `iconv` takes the mark away.
            let from = &encoding[..6];
            return Err(Error::data(format!(
                "{shown} is {encoding} text, not UTF-8 (by its byte order mark)\n  convert it with \
                 iconv -f {from} -t UTF-8"
            )));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            Error::data(format!(
                "{shown} is not UTF-8 text: byte {at} does not fit\n  convert it, for example with \
                 iconv -f LATIN1 -t UTF-8"
            ))
        })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The byte order mark of UTF-8.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        Self::from_text(&one_line(&name), text, context)
    }

    /// `text`, which is called `name` in output.
    ///
    /// # Errors
    ///
    /// `Data` when it is shorter than a sequence and its next character; `Usage` when `context`
    /// is 0.
    pub fn from_text(name: &str, text: &str, context: usize) -> Result<Self> {
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let number = |c| vocabulary.binary_search(&c).unwrap_or_default() as u32;
        let tokens: Arc<[u32]> = text.chars().map(number).collect();
        let all = TextDataset {
            name: name.to_owned(),
            part: 0..tokens.len(),
            tokens,
            vocabulary: vocabulary.into(),
            context,
            every_window: false,
            sha256: hex::encode(Sha256::digest(text)),
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

    /// The first characters, `share` of all, and those after them: 0.9 for training and
    /// validation as in nanoGPT. Both have the vocabulary of the whole text.
    ///
    /// # Errors
    ///
    /// `Data` when one of them is shorter than a sequence and its next character.
    pub fn split(self, share: f64) -> Result<(Self, Self)> {
        let Range { start, end } = self.part;
        let middle = start + ((end - start) as f64 * share.clamp(0.0, 1.0)) as usize;
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
    /// nanoGPT's `get_batch` draws them, none twice. An epoch is very long then: train with `--max-steps`.
    #[must_use]
    pub fn every_window(self) -> Self {
        TextDataset {
            every_window: true,
            ..self
        }
    }

    fn checked(self, part: &str) -> Result<Self> {
        if self.context == 0 {
            return Err(Error::usage("the context of a text must be at least 1"));
        }
        if self.part.len() <= self.context {
            return Err(Error::data(format!(
                "{part}{} has {} characters; a context of {} needs at least {}\n  use a longer text or a shorter context",
                self.name,
                grouped(self.part.len() as u64),
                self.context,
                self.context.saturating_add(1)
            )));
        }
        Ok(self)
    }

    /// The characters by number.
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// Number of characters, of which all but the first can be targets.
    pub fn characters(&self) -> usize {
        self.part.len()
    }

    /// Length of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The numbers of the characters of `text`; `None` where one does not occur in the data set's
    /// text.
    pub fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let number = |c| self.vocabulary.binary_search(&c).ok().map(|i| i as u32);
        text.chars().map(number).collect()
    }

    /// The characters with these numbers; U+FFFD for numbers that are none.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let character = |token: &u32| self.vocabulary.get(*token as usize).copied();
        tokens
            .iter()
            .map(|t| character(t).unwrap_or('\u{fffd}'))
            .collect()
    }

    /// From one sequence to the next.
    fn stride(&self) -> usize {
        match self.every_window {
            true => 1,
            false => self.context,
        }
    }

    /// Where the first sequence of epoch `epoch` begins: at the beginning in epoch 0.
    fn shift(&self, epoch: u64) -> usize {
        if self.every_window {
            return 0;
        }
        let free = self.part.len() - 1 - Dataset::len(self) * self.context;
        let places = self.context.min(free + 1) as u64;
        // Fibonacci hashing: D. Knuth, The Art of Computer Programming 3, 6.4.
        ((epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % places) as usize
    }
}

impl Dataset for TextDataset {
    type Batch = TextBatch;

    /// Sequences of an epoch. What is left at the end of the text is at least as long as all
    /// shifts of the first sequence, where the text is not shorter than two sequences.
    fn len(&self) -> usize {
        let places = self.part.len() - self.context;
        (places / self.stride()).max(1)
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut TextBatch) -> Result<()> {
        batch.tokens.clear();
        batch.targets.clear();
        let (text, shift) = (&self.tokens[self.part.clone()], self.shift(epoch));
        for &index in indices {
            let Some(at) = usize::try_from(index)
                .ok()
                .filter(|i| *i < Dataset::len(self))
            else {
                return Err(Error::usage(format!(
                    "{} has {} sequences, so there is no sequence {index}",
                    self.name,
                    Dataset::len(self)
                )));
            };
            let at = at * self.stride() + shift;
            batch.tokens.extend(&text[at..at + self.context]);
            batch.targets.extend(&text[at + 1..=at + self.context]);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        format!(
            "{}, {} characters, {} distinct",
            self.name,
            grouped(self.part.len() as u64),
            self.vocabulary.len()
        )
    }

    fn content(&self) -> String {
        let Range { start, end } = self.part;
        let windows = if self.every_window {
            ", every window"
        } else {
            ""
        };
        format!(
            "text {start} to {end}, context {}{windows}, SHA-256 {:.16}",
            self.context, self.sha256
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
    use phalanx_base::ErrorKind;

    fn batch(set: &TextDataset, epoch: u64, indices: &[u64]) -> TextBatch {
        let mut batch = TextBatch::default();
        set.read_batch(epoch, indices, &mut batch).expect("a batch");
        batch
    }

    #[test]
    fn sequences_and_targets_are_those_of_the_text() {
        let set = TextDataset::from_text("t", "hello world, ä", 4).expect("long enough");
        assert_eq!(
            set.vocabulary(),
            [' ', ',', 'd', 'e', 'h', 'l', 'o', 'r', 'w', 'ä']
        );
        assert_eq!((Dataset::len(&set), set.characters()), (2, 14));
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
        assert_eq!((train.characters(), test.characters()), (18, 2));
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
    }

    #[test]
    fn tiny_shakespeare_is_numbered_as_nanogpt_does() {
        let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
        let set = std::env::var_os("PHALANX_DATA").map(Into::into);
        let folders = [set, Some(near), Some("/work/shared/data".into())];
        let mut folders = folders.into_iter().flatten();
        let found = folders.find_map(|folder: std::path::PathBuf| {
            let path = folder.join("tinyshakespeare");
            path.join(FILE).is_file().then_some(path)
        });
        let Some(path) = found else {
            eprintln!(
                "skipped: no Tiny Shakespeare here; set PHALANX_DATA to the folder above tinyshakespeare"
            );
            return;
        };
        let set = TextDataset::open(&path, 64).expect("the real file");
        assert_eq!((set.characters(), set.vocabulary().len()), (1_115_394, 65));
        // "First Citizen:" by nanoGPT's stoi.
        let first = [18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52, 10];
        assert_eq!(batch(&set, 0, &[0]).tokens[..14], first);
        let (train, test) = set.split(0.9).expect("long enough");
        assert_eq!(
            (train.characters(), test.characters()),
            (1_003_854, 111_540)
        );
    }
}
