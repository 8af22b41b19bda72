//! Packed text: the tokens of documents in one file, which is read by position.
//!
//! | part of the file | is |
//! |---|---|
//! | magic | `phxtok1` and a newline; the digit is the version |
//! | tokens | little-endian, of 2 bytes, or 4 where the vocabulary has more than 65,536 |
//! | description | JSON: [`Description`] |
//! | end | bytes of the description (u64, little-endian), and its SHA-256 |
//!
//! The file is not mapped into memory: another process may shorten or change it, which a Rust reference must not see. The
//! blocks that are read are compared with their sums, so a change is an error that names the file.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use phalanx_base::files::open_regular;
use phalanx_base::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"phxtok1\n";
/// Most bytes of the description, which is read into memory.
const MAX_DESCRIPTION: u64 = 1 << 32;
/// Bytes of tokens with a sum of their own.
const BLOCK: usize = 1 << 14;
pub(crate) const END: usize = 8 + 32;

/// The bytes of each token, by its number.
pub type Vocabulary = Vec<Box<[u8]>>;

/// What a packed file has beside its tokens.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Description {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// The number of the first token of each document.
    pub(crate) documents: Vec<usize>,
    pub(crate) vocabulary: Vocabulary,
    /// The token that ends each document.
    pub(crate) end_of_text: Option<u32>,
    /// Bytes of the text; 0 where tokens are characters.
    pub(crate) bytes: u64,
    /// SHA-256 of the tokenizer's file.
    pub(crate) tokenizer: String,
    /// CRC-32 of each 16 KiB of tokens.
    pub(crate) sums: Vec<u32>,
}

impl Description {
    /// Bytes of a token.
    fn width(&self) -> usize {
        if self.vocabulary.len() > 1 << 16 {
            4
        } else {
            2
        }
    }
}

/// Writes a file of packed text, with which [`TextDataset::open`](crate::TextDataset::open) trains.
///
/// ```
/// use phalanx_data::{Packer, TextDataset};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vocabulary = ["to ", "be ", "or ", "not "].map(|token| token.as_bytes().into());
/// let mut file = Vec::new();
/// let mut packer = Packer::new(&mut file, vocabulary.into(), None, "")?;
/// packer.push(&[0, 1, 2, 3, 0, 1], 18)?;
/// packer.finish()?;
/// # let path = std::env::temp_dir().join(format!("packer-{}.tokens", std::process::id()));
/// std::fs::write(&path, file)?;
/// let text = TextDataset::open(&path, 3)?;
/// assert_eq!(text.decode(&[2, 3]), "or not ");
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
pub struct Packer<'w> {
    out: &'w mut dyn Write,
    about: Description,
    block: Vec<u8>,
    /// Whether the last token was of a document that has not ended.
    inside: bool,
}

impl<'w> Packer<'w> {
    /// Writes to `out`. `end_of_text` is the token that ends each document; `tokenizer` tells vocabularies apart, as the SHA-256
    /// of a tokenizer's file does.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn new(
        out: &'w mut dyn Write,
        vocabulary: Vocabulary,
        end_of_text: Option<u32>,
        tokenizer: &str,
    ) -> io::Result<Self> {
        out.write_all(MAGIC)?;
        let about = Description {
            vocabulary,
            end_of_text,
            tokenizer: tokenizer.to_owned(),
            ..Description::default()
        };
        Ok(Packer {
            out,
            about,
            block: Vec::with_capacity(BLOCK),
            inside: false,
        })
    }

    /// Adds `tokens` to the document, and `bytes` to those of the text, by which a training has bits per byte. The token that
    /// ends a document does so here too.
    ///
    /// # Errors
    ///
    /// Those of writing, and for a token that the vocabulary does not have.
    pub fn push(&mut self, tokens: &[u32], bytes: u64) -> io::Result<()> {
        let (width, about) = (self.about.width(), &mut self.about);
        about.bytes += bytes;
        for token in tokens {
            if *token as usize >= about.vocabulary.len() {
                return Err(io::Error::other("a token is not in the vocabulary"));
            }
            if !self.inside {
                about.documents.push(about.tokens);
            }
            self.inside = Some(*token) != about.end_of_text;
            about.tokens += 1;
            self.block.extend(&token.to_le_bytes()[..width]);
            if self.block.len() == BLOCK {
                about.sums.push(crc32fast::hash(&self.block));
                self.out.write_all(&self.block)?;
                self.block.clear();
            }
        }
        Ok(())
    }

    /// Ends the document, where there is one, with its token.
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    pub fn end_document(&mut self) -> io::Result<()> {
        if let (Some(token), true) = (self.about.end_of_text, self.inside) {
            self.push(&[token], 0)?;
        }
        self.inside = false;
        Ok(())
    }

    /// Ends the file. Returns the numbers of documents, of tokens and of the bytes of their text.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn finish(self) -> io::Result<[usize; 3]> {
        let (mut about, block) = (self.about, self.block);
        about.sums.push(crc32fast::hash(&block));
        let json = serde_json::to_vec(&about)?;
        let size = (json.len() as u64).to_le_bytes();
        for part in [&block[..], &json, &size, &Sha256::digest(&json)] {
            self.out.write_all(part)?;
        }
        Ok([about.documents.len(), about.tokens, about.bytes as usize])
    }
}

/// Tokens of a text.
pub(crate) struct Tokens {
    pub(crate) about: Description,
    /// SHA-256 of the text, or of a file's description.
    pub(crate) sha256: String,
    pub(crate) source: Source,
}

/// Where tokens are.
pub(crate) enum Source {
    Memory(Vec<u32>),
    File(PathBuf, File),
}

impl Tokens {
    /// Those of the file at `path`; `None` where it is none of packed text.
    ///
    /// # Errors
    ///
    /// `Data` when it is of another version, truncated or changed; `System` when it cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Option<Tokens>> {
        let Ok(file) = open_regular(path) else {
            return Ok(None);
        };
        let mut magic = [0; 8];
        if file.read_exact_at(&mut magic, 0).is_err() || magic[..6] != MAGIC[..6] {
            return Ok(None);
        }
        if magic != *MAGIC {
            return Err(wrong(path, "is packed text of another version of Phalanx"));
        }
        let changed = || wrong(path, "is truncated, or was changed after it was packed");
        let length = file.metadata();
        let length = length.map_err(|e| Error::io("cannot read", path, e))?.len();
        let end_at = length.checked_sub(END as u64).ok_or_else(changed)?;
        let end = read_at(path, &file, end_at, END)?;
        let size = u64::from_le_bytes(end.as_chunks().0[0]);
        let json_at = end_at.checked_sub(size).filter(|_| size <= MAX_DESCRIPTION);
        let json_at = json_at.ok_or_else(changed)?;
        let json = read_at(path, &file, json_at, size as usize)?;
        let sha256 = Sha256::digest(&json);
        if sha256[..] != end[8..] {
            return Err(changed());
        }
        let about: Description = serde_json::from_slice(&json).map_err(|_| changed())?;
        let data = about
            .tokens
            .checked_mul(about.width())
            .ok_or_else(changed)?;
        let fits = json_at.checked_sub(MAGIC.len() as u64) == Some(data as u64)
            && about.sums.len() == data / BLOCK + 1
            && about.documents.is_sorted();
        if !fits {
            return Err(changed());
        }
        let source = Source::File(path.to_owned(), file);
        let sha256 = hex::encode(sha256);
        Ok(Some(Tokens {
            about,
            sha256,
            source,
        }))
    }

    /// Replaces `out` by the tokens `range`, which lie within the text.
    ///
    /// # Errors
    ///
    /// `Data`, naming the file and the byte, when it is not as it was packed; `System` when it cannot be read.
    pub(crate) fn read(&self, range: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        out.clear();
        let (path, file) = match &self.source {
            Source::Memory(tokens) => {
                out.extend(&tokens[range]);
                return Ok(());
            }
            Source::File(path, file) => (path, file),
        };
        let width = self.about.width();
        let first = range.start * width / BLOCK;
        let end = (range.end * width).next_multiple_of(BLOCK);
        let bytes = end.min(self.about.tokens * width) - first * BLOCK;
        let at = MAGIC.len() + first * BLOCK;
        let bytes = read_at(path, file, at as u64, bytes)?;
        for (i, block) in bytes.chunks(BLOCK).enumerate() {
            if self.about.sums[first + i] != crc32fast::hash(block) {
                let at = at + i * BLOCK;
                let what = format!("was changed after it was packed: the 16 KiB from byte {at} on");
                return Err(wrong(path, &what));
            }
        }
        let skip = range.start - first * (BLOCK / width);
        let tokens = bytes.chunks_exact(width).skip(skip).take(range.len());
        out.extend(tokens.map(|b| b.iter().rev().fold(0, |n, b| (n << 8) | u32::from(*b))));
        Ok(())
    }
}

fn read_at(path: &Path, file: &File, at: u64, size: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; size];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => Ok(bytes),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(wrong(path, "is truncated")),
        Err(e) => Err(Error::io("cannot read", path, e)),
    }
}

/// An error about the file at `path`.
fn wrong(path: &Path, what: &str) -> Error {
    let what = format!("{} {what}", path.display());
    Error::data(what).note("fix", "pack it again: phalanx pack")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::{packed_file, sealed};
    use phalanx_base::ErrorKind;

    fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("x.tokens");
        std::fs::write(&path, bytes).expect("written");
        (dir, path)
    }

    fn refused(bytes: &[u8]) -> String {
        let (_dir, path) = write(bytes);
        let error = Tokens::open(&path).err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Data);
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        text
    }

    #[test]
    fn every_range_is_what_was_packed() {
        // Two bytes a token, and four.
        for vocabulary in [300, 70_000] {
            let tokens = |count: u32| (1..=count).map(move |i| 1 + i * 7919 % (vocabulary - 1));
            let documents = [10, 0, 20_000, 1].map(|count| tokens(count).collect::<Vec<_>>());
            let mut all = Vec::new();
            for document in documents.iter().filter(|document| !document.is_empty()) {
                all.extend(document);
                all.push(0);
            }
            let documents = documents.each_ref().map(Vec::as_slice);
            let (_dir, path) = write(&packed_file(&documents, vocabulary));
            let packed = Tokens::open(&path).expect("read").expect("packed");
            let about = &packed.about;
            assert_eq!(about.tokens, all.len());
            assert_eq!(about.documents, [0, 11, 20_012]);
            assert_eq!((about.bytes, about.end_of_text), (20_011, Some(0)));
            assert_eq!(about.vocabulary.len(), vocabulary as usize);
            assert_eq!(*about.vocabulary[1], *b"\"");
            let mut got = Vec::new();
            // At both sides of a block's end, within one, over several, and all.
            for range in [
                0..1,
                4090..4100,
                8191..8193,
                12..13,
                3000..20_000,
                0..all.len(),
            ] {
                packed.read(range.clone(), &mut got).expect("tokens");
                assert_eq!(got, all[range]);
            }
        }
    }

    #[test]
    fn what_was_changed_is_named() {
        let tokens: Vec<u32> = (0..9000).map(|i| 1 + i % 50).collect();
        let good = packed_file(&[&tokens, &[1, 2]], 60);
        assert!(Tokens::open(&write(&good).1).is_ok());
        for length in [8, 8 + END, 5000, good.len() - 1] {
            assert!(
                refused(&good[..length]).contains("is truncated"),
                "{length}"
            );
        }
        let longer = [&good[..], b"x"].concat();
        assert!(refused(&longer).contains("is truncated, or was changed"));
        let mut other = good.clone();
        other[6] = b'2';
        assert!(refused(&other).contains("another version"));
        // Each byte behind the tokens decides.
        for at in 8 + 2 * 9004..good.len() {
            let mut other = good.clone();
            other[at] ^= 1;
            refused(&other);
        }
        // A byte of the second block of tokens.
        let mut other = good.clone();
        other[8 + BLOCK + 7] ^= 1;
        let (_dir, path) = write(&other);
        let packed = Tokens::open(&path).expect("read").expect("packed");
        let mut got = Vec::new();
        packed.read(0..8192, &mut got).expect("the first block");
        assert_eq!(got, tokens[..8192]);
        let error = packed.read(8191..8193, &mut got).expect_err("changed");
        let words = format!("16 KiB from byte {} on", 8 + BLOCK);
        assert!(error.to_string().contains(&words), "{error}");
        // It becomes shorter while it is open.
        File::options()
            .write(true)
            .open(&path)
            .expect("open")
            .set_len(9000)
            .expect("cut");
        let error = packed.read(0..5, &mut got).expect_err("cut");
        assert_eq!(error.kind(), ErrorKind::Data);
    }

    /// Of a program that computes checksums, too.
    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        let good = packed_file(&[&[1, 2], &[3]], 9);
        for (text, other) in [
            ("\"tokens\":5", "\"tokens\":6"),
            ("\"tokens\":5", "\"tokens\":18446744073709551615"),
            ("\"documents\":[0,3]", "\"documents\":[3,0]"),
            ("\"sums\":[", "\"sums\":[1,"),
            ("\"bytes\":3", "\"bytes\":-3"),
        ] {
            assert!(contains(&good, text), "{text}");
            refused(&sealed(&good, text, other));
        }
        let same = sealed(&good, "", "");
        assert_eq!(same, good);
        let mut out = Vec::new();
        let mut packer = Packer::new(&mut out, vec![Box::default()], None, "").expect("start");
        let error = packer.push(&[1], 1).expect_err("no such token");
        assert!(error.to_string().contains("not in the vocabulary"));
    }

    fn contains(bytes: &[u8], text: &str) -> bool {
        String::from_utf8_lossy(bytes).contains(text)
    }
}
