//! `phalanx pack`, and `train gpt` on what it writes.

use phalanx_data::{Dataset, TextBatch, TextDataset};
use sha2::{Digest, Sha256};

use super::gpt::{SHARDS, TINY, digests};
use super::*;
use crate::support::ended;

/// What Hugging Face's tokenizers make of texts (`fixtures/make_text.py`).
fn fixture() -> Value {
    serde_json::from_str(include_str!("../../fixtures/text.json")).expect("JSON")
}

/// A folder with the tokenizer.json of these vocabularies.
fn folder(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("folder");
    for name in names {
        let text = fixture()[name]["tokenizer"].to_string();
        std::fs::write(dir.path().join(name).with_extension("json"), text).expect("written");
    }
    dir
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// All tokens of a packed file, read as one sequence.
fn tokens(path: &Path) -> (TextDataset, Vec<u32>) {
    let length = TextDataset::open(path, 1).expect("packed").tokens();
    let set = TextDataset::open(path, length - 1).expect("packed");
    let mut batch = TextBatch::default();
    set.read_batch(0, &[0], &mut batch).expect("tokens");
    let last = batch.targets.last().copied();
    let tokens = batch.tokens.into_iter().chain(last).collect();
    (set, tokens)
}

#[test]
fn tokens_are_those_of_hugging_faces_tokenizers() {
    let dir = folder(&["gpt2", "llama2", "bert"]);
    let whole = fixture();
    for (name, end) in [("gpt2", Some(0)), ("llama2", Some(2)), ("bert", None)] {
        let cases = whole[name]["cases"].as_array().expect("cases");
        let (mut lines, mut expected, mut text) = (String::new(), Vec::new(), String::new());
        for case in cases {
            lines += &format!("{}\n", serde_json::json!({"body": case["text"]}));
            text += case["text"].as_str().expect("text");
            let ids = ids(&case["ids"]);
            if !ids.is_empty() {
                expected.extend(ids);
                expected.extend(end);
            }
        }
        std::fs::write(dir.path().join("cases.jsonl"), lines).expect("written");
        let (tokenizer, output) = (format!("{name}.json"), format!("{name}.tokens"));
        let args = [
            "pack",
            "cases.jsonl",
            "--field",
            "body",
            "--tokenizer",
            &tokenizer,
        ];
        let (_, err) = succeed(&[&args[..], &["--output", &output]].concat(), dir.path());
        assert_eq!(
            err.contains("no token that ends a document"),
            end.is_none(),
            "{err}"
        );
        let (set, got) = tokens(&dir.path().join(&output));
        assert_eq!(got, expected, "{name}");
        // What is decoded is the text, where the tokenizer keeps it.
        let plain: Vec<u32> = got.into_iter().filter(|id| Some(*id) != end).collect();
        let first = set.decode(&ids(&cases[0]["ids"]));
        match name {
            "gpt2" => assert_eq!(set.decode(&plain), text.replace("<|endoftext|>", "")),
            "llama2" => {
                for case in cases.iter().filter(|case| case["text"] != "") {
                    let text = format!(" {}", case["text"].as_str().expect("text"));
                    assert_eq!(set.decode(&ids(&case["ids"])), text);
                }
            }
            _ => assert!(
                first.starts_with(" first citizen : before we proceed"),
                "{first}"
            ),
        }
    }
}

/// Longer than the pieces that are encoded one by one.
#[test]
fn a_long_document_has_the_tokens_of_the_whole() {
    let dir = folder(&["gpt2", "bert"]);
    let line = |i: u32| format!("line {i}: to be or not to be, that is {}.\n", i * i % 977);
    let text: String = (0..25_000).map(line).collect();
    std::fs::write(dir.path().join("long.txt"), &text).expect("written");
    for name in ["gpt2", "bert"] {
        let tokenizer = format!("{name}.json");
        let args = [
            "pack",
            "long.txt",
            "--tokenizer",
            &tokenizer,
            "--output",
            name,
        ];
        succeed(&args, dir.path());
        let (_, mut got) = tokens(&dir.path().join(name));
        if name == "gpt2" {
            assert_eq!(got.pop(), Some(0));
        }
        let bytes = got.iter().flat_map(|id| (*id as u16).to_le_bytes());
        let long = &fixture()[name]["long"];
        assert_eq!(long["tokens"], got.len());
        let sha256 = Sha256::digest(bytes.collect::<Vec<u8>>());
        assert_eq!(long["sha256"], hex::encode(sha256), "{name}");
    }
}

/// A training's flags, on other data.
fn on_packed(data: &'static str) -> Vec<&'static str> {
    let mut args = TINY.to_vec();
    args[3] = data;
    args
}

fn write_text(path: &Path) {
    let line = |i: usize| format!("{} is {} times {}.\n", i * i % 97, i % 7, i * 31 % 13);
    let text: String = (0..1200).map(line).collect();
    std::fs::write(path, text).expect("written");
}

#[test]
fn a_training_on_tokens_does_not_depend_on_the_ranks_and_resumes() {
    let dirs = [(); 4].map(|()| folder(&["gpt2"]));
    let args = [&on_packed("t.tokens")[..], &SHARDS].concat();
    for dir in &dirs {
        write_text(&dir.path().join("t.txt"));
        let (_, err) = succeed(&["pack", "--tokenizer", "gpt2.json", "t.txt"], dir.path());
        assert!(
            err.contains("t.tokens: ") && err.contains(" in 1 document, "),
            "{err}"
        );
        assert!(err.contains("phalanx train gpt --data t.tokens"), "{err}");
    }
    let runs = [0, 1, 2].map(|i| {
        let ranks = ["--nproc-per-node", ["1", "2", "4"][i]];
        let (out, _) = succeed(&[&args[..], &ranks].concat(), dirs[i].path());
        (out, digests(dirs[i].path()))
    });
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
    let (losses, sample) = runs[0].0.split_once("sample:\n").expect("a sample");
    let lines = "epoch #: train loss #.####\n\
                 epoch #: test loss #.####, bits_per_byte #.####\n";
    assert_eq!(shape(losses), lines.repeat(2));
    // 40 tokens, some of which have several characters.
    assert!(sample.chars().count() > 40, "{sample}");
    let summary = json(&dirs[0].path().join("out/summary.json"));
    assert_eq!(summary["classes"], Value::Null);
    let (loss, bits) = (
        summary["test_loss"].as_f64(),
        summary["test_bits_per_byte"].as_f64(),
    );
    let set = TextDataset::open(&dirs[0].path().join("t.tokens"), 1).expect("packed");
    let text = std::fs::metadata(dirs[0].path().join("t.txt")).expect("there");
    let bytes = text.len() as f64 / set.tokens() as f64;
    let expected = loss.expect("a loss") / std::f64::consts::LN_2 / bytes;
    assert!(
        (bits.expect("bits") - expected).abs() < 1e-5,
        "{bits:?} {expected}"
    );

    let parts = dirs[3].path();
    succeed(&[&args[..], &["--stop-after", "12"]].concat(), parts);
    let more = ["--resume", "auto", "--nproc-per-node", "2"];
    let (resumed, _) = succeed(&[&args[..], &more].concat(), parts);
    assert_eq!(digests(parts), runs[0].1);
    assert!(resumed.ends_with(sample), "{resumed}");
    // Of other data it is not resumed.
    std::fs::remove_file(parts.join("t.tokens")).expect("removed");
    succeed(&["pack", "--tokenizer", "bytes", "t.txt"], parts);
    let (code, _, err) = run(&[&args[..], &more].concat(), parts);
    assert_ne!(code, 0, "{err}");
}

#[test]
fn bytes_are_packed_and_trained_on() {
    let dir = tempfile::tempdir().expect("folder");
    let at = |name: &str| dir.path().join("texts").join(name);
    std::fs::create_dir(at("")).expect("folder");
    write_text(&at("a.txt"));
    std::fs::write(at("b.txt"), "é\0\r\n").expect("written");
    std::fs::write(at("empty.txt"), "").expect("written");
    let (_, err) = succeed(&["pack", "--tokenizer", "bytes", "texts"], dir.path());
    assert!(
        err.contains("texts.tokens: ") && err.contains("2 documents, 1.00 bytes"),
        "{err}"
    );
    let (set, got) = tokens(&dir.path().join("texts.tokens"));
    let text = std::fs::read(at("a.txt")).expect("text");
    let text = [&text[..], b"\xff", "é\0\r\n".as_bytes(), b"\xff"].concat();
    // 0xff is in no text, and stands for the end of a document here.
    let expected = text
        .iter()
        .map(|b| if *b == 0xff { 256 } else { u32::from(*b) });
    assert_eq!(got, expected.collect::<Vec<_>>());
    assert_eq!((set.vocabulary().len(), set.first_token()), (257, 256));
    let mesh = ["--mesh", "data=2", "--max-steps", "3", "--nproc-per-node"];
    let args = [&on_packed("texts.tokens")[..], &mesh, &["2"]].concat();
    let (out, _) = succeed(&args, dir.path());
    assert!(
        out.contains("bits_per_byte") && out.contains("sample:\n"),
        "{out}"
    );
}

#[test]
fn what_cannot_be_packed_is_one_error_and_no_file() {
    let dir = folder(&["gpt2"]);
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(dir.path().join(name), bytes).expect("written");
    };
    write("good.txt", b"good text");
    write("latin.txt", b"caf\xe9");
    write("empty.txt", b"");
    write("lines.jsonl", b"{\"text\": \"a\"}\n{\"txt\": \"b\"}\n");
    write("no.json", b"{\"vocab\": {}}");
    write("list.txt", b"[UNK]\n[CLS]\nthe\n");
    let random = fixture()["gpt2"]["tokenizer"].to_string();
    let random = random.replace("\"dropout\":null", "\"dropout\":0.1");
    write("random.json", random.as_bytes());
    let names = || std::fs::read_dir(dir.path()).expect("folder").count();
    let before = names();
    for (line, expected, words) in [
        ("good.txt", 2, "--tokenizer"),
        ("--tokenizer bytes", 2, "INPUT"),
        (
            "--tokenizer none.json good.txt",
            2,
            "no tokenizer none.json",
        ),
        (
            "--tokenizer no.json good.txt",
            1,
            "no.json is no tokenizer.json of Hugging Face's",
        ),
        (
            "--tokenizer list.txt good.txt",
            1,
            "list.txt is no tokenizer.json of Hugging Face's",
        ),
        (
            "--tokenizer random.json good.txt",
            1,
            "random.json: its model leaves out merges at random",
        ),
        ("--tokenizer bytes none.txt", 2, "no text file none.txt"),
        (
            "--tokenizer bytes good.txt latin.txt",
            1,
            "latin.txt is not UTF-8 text: byte 3 does not fit",
        ),
        ("--tokenizer bytes empty.txt", 1, "empty.txt has no text"),
        (
            "--tokenizer bytes lines.jsonl",
            1,
            "lines.jsonl, document 2 has no text \"text\"",
        ),
        (
            "--tokenizer bytes good.txt --output good.txt",
            2,
            "good.txt exists",
        ),
        (
            "--tokenizer bytes good.txt --output no/x",
            2,
            "there is no folder no",
        ),
        (
            "--tokenizer bytes good.txt --output /dev/full",
            1,
            "the disk is full",
        ),
        (
            "--tokenizer gpt2.json good.txt --end-of-text </s>",
            2,
            "--end-of-text </s> is no token",
        ),
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        let (code, _, err) = run(&[&["pack"], &args[..]].concat(), dir.path());
        assert_eq!(code, expected, "{line}: {err}");
        assert_eq!(err.matches("error:").count(), 1, "{err}");
        assert!(err.contains(words), "{line}: {err}");
        assert_eq!(names(), before, "{line} has left a file");
    }
    write("large.txt", &b"text ".repeat(40_000));
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 64 && exec \"$0\" \"$@\""]);
    limited.arg(env!("CARGO_BIN_EXE_phalanx"));
    limited.args(["pack", "--tokenizer", "bytes", "large.txt"]);
    let output = limited.current_dir(dir.path()).output().expect("sh");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    let words = "large.tokens: the file would exceed the size limit";
    assert!(err.contains(words), "{err}");
    assert_eq!(names(), before + 1);
}

#[test]
fn several_that_write_the_same_file_leave_a_whole_one() {
    let dir = tempfile::tempdir().expect("folder");
    write_text(&dir.path().join("t.txt"));
    let args = ["pack", "--tokenizer", "bytes", "t.txt"];
    let children = [(); 4].map(|()| phalanx(&args, dir.path()).spawn().expect("starts"));
    let codes = children.map(|child| {
        let (code, _, err) = ended(child);
        // One that starts after another has ended finds its file.
        assert!(
            code == 0 || code == 2 && err.contains("t.tokens exists"),
            "{err}"
        );
        code
    });
    assert!(codes.contains(&0));
    let (_, got) = tokens(&dir.path().join("t.tokens"));
    let text = std::fs::read(dir.path().join("t.txt")).expect("text");
    assert_eq!(got.len(), text.len() + 1);
    assert_eq!(std::fs::read_dir(dir.path()).expect("folder").count(), 2);
}

#[test]
fn a_changed_file_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    write_text(&dir.path().join("t.txt"));
    succeed(&["pack", "--tokenizer", "bytes", "t.txt"], dir.path());
    let path = dir.path().join("t.tokens");
    let good = std::fs::read(&path).expect("packed");
    std::fs::write(&path, &good[..good.len() - 1]).expect("written");
    let args = [&on_packed("t.tokens")[..], &["--nproc-per-node", "2"]].concat();
    let (code, _, err) = run(&args, dir.path());
    // Before any rank starts.
    assert_eq!((code, err.matches("error:").count()), (2, 1), "{err}");
    assert!(
        err.contains("t.tokens is truncated, or was changed"),
        "{err}"
    );
    // A token: when it is read.
    let mut other = good.clone();
    other[17] ^= 1;
    std::fs::write(&path, &other).expect("written");
    let (code, _, err) = run(&args, dir.path());
    assert_eq!(code, 1, "{err}");
    let words = "t.tokens was changed after it was packed: the 16 KiB from byte 8 on";
    assert!(err.contains(words), "{err}");
}
