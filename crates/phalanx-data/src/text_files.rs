//! Text files: those in folders, and their documents in pieces.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use phalanx_base::files::{found, open_regular};
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result, refuse};
use serde_json::{Map, Value};

use crate::listing::{MAX_DEPTH, list};

/// Bytes of the longest piece. With those that are encoded at once it decides how much memory packing takes.
const PIECE: usize = 1 << 19;

/// What takes the pieces of documents, one after the other, and whether a document ends with the piece.
type Each<'a> = &'a mut dyn FnMut(&str, bool) -> Result<()>;

/// The file `path`; of a folder, those below it whose names end in one of `endings` (`txt`), in the order of their names. Names
/// that begin with a dot are left out.
///
/// # Errors
///
/// `Usage` when a folder has no such file; `System` when it cannot be read.
pub fn text_files(path: &Path, endings: &[&str]) -> Result<Vec<PathBuf>> {
    if !found(path)?.is_some_and(|there| there.is_dir()) {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    let is_text = |file: &Path| endings.iter().any(|ending| has_ending(file, ending));
    list(path, Path::new(""), MAX_DEPTH, &is_text, &mut files)?;
    if files.is_empty() {
        refuse!("{} has no .{} file", path.display(), endings.join(" or ."));
    }
    Ok(files.iter().map(|file| path.join(file)).collect())
}

fn has_ending(file: &Path, ending: &str) -> bool {
    file.extension()
        .is_some_and(|own| own.eq_ignore_ascii_case(ending))
}

/// Gives `each` the documents of `path`: of a `.jsonl` file the text of `field` in each line, if there is a field, else the
/// whole file. A document of more than 512 KiB comes in pieces, with `true` for the last of each document. They are cut after
/// lines, as far as possible where the line's end stands between two characters that are not white space: there, byte-level
/// tokenizers find the same words on both sides.
///
/// # Errors
///
/// `Usage` when there is no such file; `Data`, naming file and place, when it is not UTF-8, not JSON or without the field, and
/// when it changes while it is read; `System` when it cannot be read; those of `each`.
pub fn read_documents(path: &Path, field: Option<&str>, each: Each<'_>) -> Result<()> {
    let shown = path.display();
    let file = open_regular(path).map_err(|e| Error::not_opened("text file", path, e))?;
    let stamp = || -> Result<_> {
        let about = file.metadata();
        let about = about.map_err(|e| Error::io("cannot read", path, e))?;
        Ok((about.len(), about.mtime(), about.mtime_nsec()))
    };
    let before = stamp()?;
    let is_json = ["jsonl", "ndjson"]
        .iter()
        .any(|ending| has_ending(path, ending));
    match field.filter(|_| is_json) {
        Some(field) => objects(path, &file, field, each)?,
        None => pieces(path, &file, each)?,
    }
    match stamp()? == before {
        true => Ok(()),
        false => Err(Error::data(format!(
            "{shown} has changed while it was read"
        ))),
    }
}

fn objects(path: &Path, file: &File, field: &str, each: Each<'_>) -> Result<()> {
    let wrong = |what: String| Error::data(format!("{}, {what}", path.display()));
    let objects = serde_json::Deserializer::from_reader(BufReader::new(file));
    for (i, object) in objects.into_iter::<Map<String, Value>>().enumerate() {
        let object = object.map_err(|e| match e.is_io() {
            true => Error::io("cannot read", path, e.into()),
            false => wrong(format!("document {}: {e}", i + 1)),
        })?;
        let Some(Value::String(text)) = object.get(field) else {
            let names: Vec<_> = object.keys().map(|name| one_line(name)).collect();
            let (i, names) = (i + 1, names.join(", "));
            let what = format!("document {i} has no text {field:?}\n  it has {names}");
            return Err(wrong(what));
        };
        pieces(path, text.as_bytes(), each)?;
    }
    Ok(())
}

fn pieces(path: &Path, mut from: impl Read, each: Each<'_>) -> Result<()> {
    let (mut bytes, mut at) = (Vec::with_capacity(PIECE), 0);
    loop {
        let room = (PIECE - bytes.len()) as u64;
        let got = from.by_ref().take(room).read_to_end(&mut bytes);
        got.map_err(|e| Error::io("cannot read", path, e))?;
        let ends = bytes.len() < PIECE;
        let text = utf8(path, at, &bytes, ends)?;
        let cut = if ends { text.len() } else { seam(text) };
        // The byte order mark of UTF-8.
        let mark = if at == 0 { "\u{feff}" } else { "" };
        let text = &text[..cut];
        each(text.strip_prefix(mark).unwrap_or(text), ends)?;
        if ends {
            return Ok(());
        }
        bytes.drain(..cut);
        at += cut;
    }
}

/// The text of `bytes`, which begin at byte `at` of a file. Unless they end it, the last character may be cut off.
pub(crate) fn utf8<'b>(path: &Path, at: usize, bytes: &'b [u8], ends: bool) -> Result<&'b str> {
    // A longer mark may begin with a shorter one.
    const MARKS: [(&[u8], &str); 4] = [
        (b"\xff\xfe\0\0", "UTF-32LE"),
        (b"\0\0\xfe\xff", "UTF-32BE"),
        (b"\xff\xfe", "UTF-16LE"),
        (b"\xfe\xff", "UTF-16BE"),
    ];
    let shown = path.display();
    if let Some((_, encoding)) = MARKS.iter().find(|(mark, _)| bytes.starts_with(mark))
        && at == 0
    {
        // By these names `iconv` takes the mark away.
        let from = &encoding[..6];
        return Err(Error::data(format!(
            "{shown} is {encoding} text, not UTF-8 (by its byte order mark)\n  convert it with \
             iconv -f {from} -t UTF-8"
        )));
    }
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    let good = error.valid_up_to();
    if error.error_len().is_none() && !ends {
        return utf8(path, at, &bytes[..good], ends);
    }
    let at = at + good;
    Err(Error::data(format!(
        "{shown} is not UTF-8 text: byte {at} does not fit\n  convert it, for example with \
         iconv -f LATIN1 -t UTF-8"
    )))
}

/// Where to cut `text`, of which more follows.
fn seam(text: &str) -> usize {
    let between = |at: &usize| {
        let before = text[..*at].chars().next_back();
        let after = text[at + 1..].chars().next();
        [before, after].map(|c| c.is_some_and(|c| !c.is_whitespace())) == [true; 2]
    };
    let mut ends = text.rmatch_indices('\n').map(|(at, _)| at);
    let line = ends.find(between).or_else(|| text.rfind('\n'));
    // A space belongs to the word after it.
    let space = || text.rfind(char::is_whitespace).filter(|at| *at > 0);
    line.map(|at| at + 1).or_else(space).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_base::ErrorKind;

    /// The documents of a file, and the pieces of each.
    fn read(path: &Path) -> Result<Vec<Vec<String>>> {
        let mut documents = vec![Vec::new()];
        read_documents(path, Some("text"), &mut |text, ends| {
            assert!(text.len() <= PIECE);
            documents.last_mut().expect("one").push(text.to_owned());
            if ends {
                documents.push(Vec::new());
            }
            Ok(())
        })?;
        assert_eq!(documents.pop(), Some(Vec::new()));
        Ok(documents)
    }

    #[test]
    fn pieces_are_the_text_and_end_where_words_do() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("a.txt");
        let lines: String = (0..90_000).map(|i| format!("{i} 東京\n\n  in\n")).collect();
        let (words, word) = (" 東京".repeat(200_000), "東京🏽".repeat(100_000));
        let (blank, exact) = ("\n".repeat(PIECE + 1), "x".repeat(PIECE));
        for (text, good) in [
            (&lines, Some("in\n")),
            (&words, Some("京")),
            (&word, None),
            (&blank, None),
            (&exact, None),
            (&"\u{feff}short".to_owned(), None),
        ] {
            std::fs::write(&path, text).expect("written");
            let documents = read(&path).expect("text");
            let [pieces] = &documents[..] else {
                panic!("one document")
            };
            assert_eq!(pieces.concat(), text.trim_start_matches('\u{feff}'));
            assert!(pieces.len() > text.len() / (PIECE + 1));
            let (_, cut) = pieces.split_last().expect("one");
            if let Some(good) = good {
                assert!(!cut.is_empty() && cut.iter().all(|piece| piece.ends_with(good)));
            }
        }
    }

    #[test]
    fn lines_of_json_are_documents() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("a.JSONL");
        let long = "a b\n".repeat(PIECE / 2);
        let lines = [
            r#"{"id": 1, "text": "one\nline"}"#,
            "",
            &format!("{{\"text\": {}}}", serde_json::Value::from(&*long)),
            r#"{"text": "", "more": [1, {"text": "no"}]}"#,
        ];
        std::fs::write(&path, lines.join("\r\n")).expect("written");
        let documents = read(&path).expect("documents");
        let joined: Vec<String> = documents.iter().map(|pieces| pieces.concat()).collect();
        assert_eq!(joined, ["one\nline", &*long, ""]);
        assert_eq!(documents[1].len(), 3);
        for (line, words) in [
            (r#"{"text": 3}"#, "a.JSONL, document 2 has no text \"text\""),
            (r#"{"txt": "x", "id": 1}"#, "it has id, txt"),
            (
                r#"{"text": "x" "#,
                "document 2: EOF while parsing an object at line ",
            ),
            (r#"{"text": "x" 3}"#, "at line 3 column 14"),
            (
                "[1]",
                "document 2: invalid type: sequence, expected a map at line 3",
            ),
        ] {
            std::fs::write(&path, format!("{}\n\n{line}\n", lines[0])).expect("written");
            let error = read(&path).expect_err(line);
            assert_eq!(error.kind(), ErrorKind::Data);
            assert!(error.render().contains(words), "{}", error.render());
        }
        std::fs::write(&path, b"{\"text\": \"\xff\"}").expect("written");
        let error = read(&path).expect_err("not UTF-8").to_string();
        assert!(
            error.contains("a.JSONL, document 1: invalid unicode"),
            "{error}"
        );
    }

    #[test]
    fn the_byte_that_does_not_fit_is_counted_over_pieces() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("a.txt");
        for at in [0, PIECE - 1, PIECE, 3 * PIECE + 5] {
            let mut bytes = "é\n".repeat(PIECE + 10).into_bytes();
            let at = at / 3 * 3;
            bytes[at] = 0xff;
            std::fs::write(&path, &bytes).expect("written");
            let error = read(&path).expect_err("not UTF-8").to_string();
            assert!(
                error.contains(&format!("byte {at} does not fit")),
                "{error}"
            );
            // A character that the end of the file cuts off.
            std::fs::write(&path, [&"é".repeat(at).into_bytes()[..], b"\xc3"].concat())
                .expect("written");
            let error = read(&path).expect_err("not UTF-8").to_string();
            assert!(
                error.contains(&format!("byte {} does not fit", 2 * at)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_that_changes_is_refused() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("a.txt");
        std::fs::write(&path, "some text").expect("written");
        let error = read_documents(&path, None, &mut |_, _| {
            std::fs::write(&path, "some other text").expect("written");
            Ok(())
        });
        let error = error.expect_err("changed");
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(
            error
                .to_string()
                .ends_with("a.txt has changed while it was read")
        );
    }

    #[test]
    fn files_of_a_folder_are_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("b")).expect("folder");
        let error = text_files(dir.path(), &["txt", "jsonl"]).expect_err("none");
        assert!(
            error.to_string().ends_with("has no .txt or .jsonl file"),
            "{error}"
        );
        for name in [
            "c.txt",
            "b/z.TXT",
            "b/a.jsonl",
            "a.txt",
            ".hidden.txt",
            "d.md",
            "b/no",
        ] {
            std::fs::write(at(name), "").expect("written");
        }
        let files = text_files(dir.path(), &["txt", "jsonl"]).expect("files");
        assert_eq!(files, ["a.txt", "b/a.jsonl", "b/z.TXT", "c.txt"].map(at));
        assert_eq!(
            text_files(&at("d.md"), &["txt"]).expect("itself"),
            [at("d.md")]
        );
    }
}
