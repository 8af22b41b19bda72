//! Vocabularies of Hugging Face's `tokenizers`.

use std::collections::HashMap;
use std::path::Path;

use phalanx_base::files::{open_regular, read_open};
use phalanx_data::Vocabulary;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Tokenizer;
use crate::error::{Error, Result};

/// Most bytes of a tokenizer.json.
const MAX_BYTES: u64 = 256 << 20;
/// Most tokens.
const MAX_TOKENS: usize = 1 << 24;

/// The tokenizer of the tokenizer.json at `path`. It neither truncates nor pads, whatever the file says.
pub(super) fn of_file(path: &Path) -> Result<Tokenizer> {
    let file = open_regular(path).map_err(|e| Error::not_opened("tokenizer", path, e))?;
    let bytes = read_open(path, file, MAX_BYTES)?;
    let shown = path.display().to_string();
    let wrong = |what: &dyn std::fmt::Display| {
        let what = format!("{shown} is no tokenizer.json of Hugging Face's tokenizers: {what}");
        Error::data(what)
    };
    let json: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(&e))?;
    let tokenizer = tokenizers::Tokenizer::from_bytes(&bytes);
    let mut tokenizer = tokenizer.map_err(|e| wrong(&e))?;
    if json["model"]["dropout"].as_f64().is_some_and(|p| p > 0.0) {
        let what = format!("{shown}: its model leaves out merges at random");
        return Err(Error::data(what).note("fix", "set its \"dropout\" to null"));
    }
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| wrong(&e))?;
    let vocabulary = vocabulary(&tokenizer, &json);
    let vocabulary = vocabulary.ok_or_else(|| wrong(&"it has no tokens, or too many"))?;
    let encode = move |texts: &[String]| {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let all = tokenizer.encode_batch_fast(texts, false);
        let all = all.map_err(|e| Error::data(format!("{shown} cannot encode the text: {e}")))?;
        Ok(all.iter().map(|text| text.get_ids().to_vec()).collect())
    };
    let sha256 = hex::encode(Sha256::digest(&bytes));
    Ok((vocabulary, sha256, Box::new(encode)))
}

/// The bytes of each token.
fn vocabulary(tokenizer: &tokenizers::Tokenizer, json: &Value) -> Option<Vocabulary> {
    let names = tokenizer.get_vocab(true);
    let added = tokenizer.get_added_tokens_decoder();
    let size = *names.values().max()? as usize + 1;
    let mut vocabulary = vec![Box::default(); Some(size).filter(|size| *size <= MAX_TOKENS)?];
    let decoder = json["decoder"].to_string();
    let (by_byte, words) = (
        decoder.contains("\"ByteLevel\""),
        decoder.contains("\"WordPiece\""),
    );
    let alphabet = alphabet();
    let names: std::collections::BTreeMap<_, _> = names.into_iter().collect();
    for (name, id) in names {
        let byte = name
            .strip_prefix("<0x")
            .and_then(|hex| hex.strip_suffix('>'));
        let byte = byte.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let bytes = name.chars().map(|c| alphabet.get(&c).copied()).collect();
        vocabulary[id as usize] = match (byte, bytes, name.strip_prefix("##")) {
            _ if added.contains_key(&id) => name.into_bytes().into(),
            (_, Some::<Vec<u8>>(bytes), _) if by_byte => bytes.into(),
            (Some(byte), ..) => [byte].into(),
            (.., Some(rest)) if words => rest.as_bytes().into(),
            _ if words => format!(" {name}").into_bytes().into(),
            _ => name.replace('▁', " ").into_bytes().into(),
        };
    }
    Some(vocabulary)
}

/// The byte of each character with which GPT-2's vocabulary writes it (`bytes_to_unicode` of its `encoder.py`).
fn alphabet() -> HashMap<char, u8> {
    let mut others = '\u{100}'..;
    let of = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => (char::from(byte), byte),
        _ => (others.next().unwrap_or_default(), byte),
    };
    (0..=u8::MAX).map(of).collect()
}
