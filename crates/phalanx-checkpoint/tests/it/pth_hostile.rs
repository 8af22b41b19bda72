//! Archives and pickles made to mislead a reader.

use std::fs;

use crate::pth_common::{with_pickle, zip, zip_with};
use phalanx_base::ErrorKind;
use phalanx_checkpoint::pth::PthFile;

fn read(bytes: &[u8]) -> Result<Vec<String>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pth");
    fs::write(&path, bytes).unwrap();
    match PthFile::read(&path) {
        Ok(file) => Ok(file.warnings().to_vec()),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Data, "{error}");
            let text = error.to_string();
            assert!(text.contains("x.pth"), "{text}");
            Err(text)
        }
    }
}

/// A pickle's refusal.
fn why(pickle: &[u8]) -> String {
    read(&with_pickle(pickle)).unwrap_err()
}

#[test]
fn pickles_that_do_something_else_are_refused() {
    for (pickle, reason) in [
        (&b"\x80\x02cposix\nsystem\n."[..], "names posix.system"),
        (b"\x80\x02ctorch\nload\n.", "names torch.load"),
        (b"\x80\x02ctorch\nFloat8_e4m3fnStorage\n.", "names torch.Float8_e4m3fnStorage"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n.", "_rebuild_tensor_v3"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "with 1 arguments"),
        (b"\x80\x02ccollections\nOrderedDict\n]R.", "expected a function and a tuple"),
        (b"\x80\x02K\x01)R.", "it calls an int"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "with 0 arguments"),
        (b"\x80\x02i", "opcode 'i' (0x69)"),
        (b"\x80\x02\x93", "opcode 0x93"),
        (b"\x80\x02U\x01a.", "opcode 'U' (0x55) is not one that torch.save writes"),
        (b"\x80\x01.", "protocol 1"),
        (b"\x80\x02N", "it ends early"),
        (b"\x80\x02N.N", "1 bytes follow its end"),
        (b"\x80\x02NN.", "1 objects are left on the stack"),
        (b"\x80\x02(.", "a mark as an object"),
        (b"\x80\x02.", "an empty stack"),
        (b"\x80\x02t.", "a mark that is not on the stack"),
        (b"\x80\x02q\x01.", "it needs an object on the stack"),
        (b"\x80\x02}K\x01a.", "appends to a dict"),
        (b"\x80\x02]K\x01K\x02s.", "sets items of a list"),
        (b"\x80\x02}(K\x01u.", "has no value"),
        (b"\x80\x02}NNs.", "a key of a dict is None"),
        (b"\x80\x02}(K\x01NK\x01Nu.", "the key \"1\" twice"),
        (b"\x80\x02}}b.", "expected an OrderedDict"),
        (b"\x80\x02X\x01\0\0\0\xff.", "not UTF-8"),
        (b"\x80\x02\x8a\x09123456789.", "an int of 9 bytes"),
        (b"\x80\x02cno end", "has no end"),
        (b"\x80\x02NQ.", "a persistent id is None"),
        (b"\x80\x02(NNNNNtQ.", "is not ('storage'"),
        (
            b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x04\0\0\0../0X\x03\0\0\0cpuK\x06tQ.",
            "\"../0\"",
        ),
        (
            b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuJ\xff\xff\xff\xfftQ.",
            "-1 elements",
        ),
        (
            b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tq\0Q\
              (X\x07\0\0\0storagectorch\nIntStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ.",
            "6 elements of int32 here, but 24 bytes of float32 before",
        ),
    ] {
        let text = why(pickle);
        assert!(text.contains(reason), "{reason}: {text}");
        assert!(text.contains("data.pkl at byte "), "{text}");
    }
}

#[test]
fn a_pickle_cannot_grow_beyond_its_length() {
    // Each list holds the one before a hundred times; printed, it were 100^100.
    let mut laughs = b"\x80\x02]".to_vec();
    for level in 0..100u8 {
        laughs.extend([b'q', level, b']', b'(']);
        for _ in 0..100 {
            laughs.extend([b'h', level]);
        }
        laughs.push(b'e');
        // The outer one stays, the inner one goes into a tuple that is dropped.
        laughs.extend([0x86]);
    }
    laughs.push(b'.');
    read(&with_pickle(&laughs)).unwrap();
    // A list in itself.
    read(&with_pickle(b"\x80\x02]q\x00h\x00a.")).unwrap();
    // More objects than are let through.
    let many = [&b"\x80\x02"[..], &vec![b')'; (1 << 21) + 1]].concat();
    assert!(why(&many).contains("more than 2097152 objects"));
    let marks = [&b"\x80\x02"[..], &vec![b'('; (1 << 21) + 1]].concat();
    assert!(why(&marks).contains("its stack has more than 2097152 objects"));
}

#[test]
fn a_file_without_tensors_says_what_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pth");
    let said = |pickle: &[u8]| {
        fs::write(&path, with_pickle(pickle)).unwrap();
        let file = PthFile::read(&path).unwrap();
        file.state_dict().unwrap_err().to_string()
    };
    assert!(said(b"\x80\x02N.").contains("it is None, expected a dict of tensors"));
    assert!(said(b"\x80\x02}.").contains("a dict without names"));
    let text = said(b"\x80\x02}X\x05\0\0\0epochK\x03s.");
    assert!(text.contains("\"epoch\" is an int"), "{text}");
}

/// An empty dict and its surroundings.
const GOOD: [(&str, &[u8]); 2] = [("a/data.pkl", b"\x80\x02}."), ("a/version", b"3\n")];

#[test]
fn archives_that_mislead_are_refused() {
    type Entry = (&'static str, &'static [u8]);
    let with = |more: &[Entry]| -> Vec<Entry> { [&GOOD[..], more].concat() };
    read(&zip(&GOOD)).unwrap();
    for (entries, reason) in [
        (
            with(&[("a/version", b"3\n")]),
            "entry a/version appears twice",
        ),
        (with(&[("b/x", b"")]), "entry \"b/x\" is outside of a/"),
        (with(&[("a/b/../c", b"")]), "is outside of a/"),
        (
            with(&[("b/data.pkl", b"\x80\x02}.")]),
            "exactly one <folder>/data.pkl",
        ),
        (
            vec![("data.pkl", &b"\x80\x02}."[..])],
            "exactly one <folder>/data.pkl",
        ),
        (vec![GOOD[0]], "no entry version"),
        (vec![GOOD[0], ("a/version", b"11")], "format version \"11\""),
        (vec![GOOD[0], ("a/version", b"x")], "format version \"x\""),
        (
            vec![GOOD[0], ("a/version", &[b'3'; 65])],
            "entry version has 65 bytes",
        ),
        (
            with(&[("a/byteorder", b"middle")]),
            "byte order is \"middle\"",
        ),
    ] {
        // The writer tidies such names up, so they are put in afterwards.
        let tidy: Vec<(String, &[u8])> = entries
            .iter()
            .map(|(name, bytes)| (name.replace("../", "xx/"), *bytes))
            .collect();
        let tidy: Vec<(&str, &[u8])> = tidy.iter().map(|(n, b)| (n.as_str(), *b)).collect();
        let mut bytes = zip(&tidy);
        for at in 0..bytes.len() - 4 {
            if &bytes[at..at + 4] == b"/xx/" {
                bytes[at + 1..at + 3].copy_from_slice(b"..");
            }
        }
        let text = read(&bytes).unwrap_err();
        assert!(text.contains(reason), "{reason}: {text}");
    }
}

/// Changes each entry's record in the central directory.
fn patched(mut bytes: Vec<u8>, patch: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut at = 0;
    while at + 46 <= bytes.len() {
        if bytes[at..].starts_with(b"PK\x01\x02") {
            patch(&mut bytes[at..at + 46]);
        }
        at += 1;
    }
    bytes
}

#[test]
fn directories_that_lie_are_refused() {
    let good = zip(&GOOD);
    let compressed = patched(good.clone(), |record| record[10] = 8);
    assert!(read(&compressed).unwrap_err().contains("is compressed"));
    let encrypted = patched(good.clone(), |record| record[8] |= 1);
    assert!(read(&encrypted).unwrap_err().contains("is encrypted"));
    let larger = patched(good.clone(), |record| record[24] += 1);
    assert!(read(&larger).unwrap_err().contains("takes 4 bytes for 5"));
    let huge = patched(good.clone(), |record| {
        record[20..24].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        record[24..28].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    });
    assert!(
        read(&huge)
            .unwrap_err()
            .contains("announces 2147483647 bytes")
    );
    // A directory that counts one entry more, or less, than it has.
    for count in [1u8, 3] {
        let mut bytes = good.clone();
        let end = bytes.len() - 22;
        bytes[end + 8] = count;
        bytes[end + 10] = count;
        assert!(read(&bytes).unwrap_err().contains("that it announces"));
    }
}

#[test]
fn a_missing_checksum_is_only_a_warning() {
    let zeros = zip_with(&GOOD, |_| Some(0));
    let warnings = read(&zeros).unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("without checksums"), "{warnings:?}");
    let wrong = zip_with(&GOOD, |_| Some(1));
    assert!(
        read(&wrong)
            .unwrap_err()
            .contains("the directory says 00000001")
    );
}
