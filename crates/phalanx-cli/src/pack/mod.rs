//! `phalanx pack`: text files as the tokens of a vocabulary, for `train gpt`.

#[cfg(feature = "tokenizers")]
mod tokenizer;

use std::io::{Error as IoError, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_base::files::{as_typed, is_file, try_atomic_write};
use phalanx_data::{Packer, Vocabulary, read_documents, text_files};
use phalanx_train::check_folder_of;

use crate::error::{Error, Result};
use crate::format::{bytes, plural, thousands};
use crate::say;
#[cfg(feature = "tokenizers")]
use tokenizer::of_file;

/// Arguments of `phalanx pack`.
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// Text files, .jsonl files with a document in each line, or folders, of which the .txt and .jsonl files are taken in the
    /// order of their names
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// A tokenizer.json of Hugging Face's tokenizers, or `bytes` for a vocabulary of the 256 bytes
    #[arg(long, value_name = "FILE|bytes")]
    tokenizer: PathBuf,
    /// File to write; it must not exist [default: as the first INPUT, with the ending .tokens]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Field of .jsonl files that has the text
    #[arg(long, default_value = "text", value_name = "NAME")]
    field: String,
    /// Token that ends each document [default: the first of <|endoftext|>, <|end_of_text|>, </s>, <eos> that the tokenizer has]
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
}

/// Tokens that end a document, by the names that they have in vocabularies.
const ENDS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];
/// Bytes of text that are encoded at once, on all cores.
const BATCH: usize = 4 << 20;
/// Between two lines about the progress.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A vocabulary, what tells it from others, and what makes its tokens of texts.
type Tokenizer = (Vocabulary, String, Box<Encode>);
type Encode = dyn Fn(&[String]) -> Result<Vec<Vec<u32>>>;

/// Runs `phalanx pack`.
///
/// # Errors
///
/// `Usage` for flags, files that are not there and an output that is; `Data` for inputs and tokenizers, naming file and place;
/// `DiskFull` and `System` of writing. After an error there is no output.
pub fn run(args: &PackArgs) -> Result<()> {
    let default = || args.inputs[0].with_extension("tokens");
    let output = args.output.clone().unwrap_or_else(default);
    check_folder_of("--output", &output)?;
    if is_file(&output)? {
        let what = format!("{} exists", output.display());
        return Err(Error::usage(what).note("fix", "remove it, or give another --output"));
    }
    let tokenizer = match args.tokenizer.to_str() {
        Some("bytes") => of_bytes(),
        _ => of_file(&args.tokenizer)?,
    };
    let mut files = Vec::new();
    for input in &args.inputs {
        files.extend(text_files(input, &["txt", "jsonl", "ndjson"])?);
    }
    let mut packed = [0; 3];
    try_atomic_write(&output, |out| {
        packed = pack(out, tokenizer, &files, args, &output)?;
        Ok(())
    })?;
    let [documents, tokens, text] = packed;
    say::note(format_args!(
        "{}: {} tokens in {}, {:.2} bytes each\n  train on it: phalanx train gpt --data {}",
        output.display(),
        thousands(tokens),
        plural(documents, "document"),
        text as f64 / tokens as f64,
        as_typed(&output)
    ));
    Ok(())
}

/// The 256 bytes, and a token that ends documents.
fn of_bytes() -> Tokenizer {
    let bytes = (0..=u8::MAX).map(|byte| [byte].into());
    let bytes = bytes.chain([ENDS[0].as_bytes().into()]).collect();
    let encode = |text: &String| text.bytes().map(u32::from).collect();
    let encode = move |texts: &[String]| Ok(texts.iter().map(encode).collect());
    (bytes, "bytes".to_owned(), Box::new(encode))
}

#[cfg(not(feature = "tokenizers"))]
fn of_file(_: &Path) -> Result<Tokenizer> {
    let what = "this build of phalanx reads no tokenizer.json; it has --tokenizer bytes only";
    Err(Error::usage(what).note("try", "cargo build --release --all-features"))
}

/// Writes the documents of `files` to `out`, which is the file `output`. Returns what [`Packer::finish`] does.
fn pack(
    out: &mut dyn Write,
    tokenizer: Tokenizer,
    files: &[PathBuf],
    args: &PackArgs,
    output: &Path,
) -> Result<[usize; 3]> {
    let failed = |e: IoError| Error::io("cannot write", output, e);
    let (vocabulary, name, encode) = tokenizer;
    let find = |name: &str| {
        vocabulary
            .iter()
            .position(|token| **token == *name.as_bytes())
    };
    let end = match &args.end_of_text {
        None => ENDS.into_iter().find_map(find),
        Some(name) => Some(find(name).ok_or_else(|| {
            Error::usage(format!("--end-of-text {name} is no token of the tokenizer"))
        })?),
    };
    if end.is_none() {
        let what = "the tokenizer has no token that ends a document; --end-of-text names one";
        say::note(format_args!("warning: {what}"));
    }
    let packer = Packer::new(out, vocabulary, end.map(|end| end as u32), &name);
    let mut packer = packer.map_err(failed)?;
    let mut write = |texts: &mut Vec<String>, ends: &mut Vec<bool>| -> Result<()> {
        for ((tokens, text), ends) in encode(texts)?.iter().zip(&*texts).zip(ends.drain(..)) {
            packer.push(tokens, text.len() as u64).map_err(failed)?;
            if ends {
                packer.end_document().map_err(failed)?;
            }
        }
        texts.clear();
        Ok(())
    };
    let (mut texts, mut ends, mut size, mut total) = (Vec::new(), Vec::new(), 0, 0);
    let mut due = Instant::now() + LINE_EVERY;
    for file in files {
        read_documents(file, Some(&args.field), &mut |text, ends_here| {
            texts.push(text.to_owned());
            ends.push(ends_here);
            (size, total) = (size + text.len(), total + text.len());
            if size >= BATCH || texts.len() == 1 << 16 {
                size = 0;
                write(&mut texts, &mut ends)?;
            }
            if Instant::now() > due {
                due = Instant::now() + LINE_EVERY;
                say::note(format_args!(
                    "{} packed, in {}",
                    bytes(total),
                    file.display()
                ));
            }
            Ok(())
        })?;
    }
    write(&mut texts, &mut ends)?;
    match packer.finish().map_err(failed)? {
        [_, 0, _] => Err(Error::data(format!(
            "{} has no text",
            args.inputs[0].display()
        ))),
        counts => Ok(counts),
    }
}
