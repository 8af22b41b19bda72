//! Checksums of the published files, to recognize a damaged download.

use std::path::Path;

use phalanx_base::files::{open_regular, read_pieces};
use sha2::{Digest, Sha256};

/// SHA-256 of MNIST's files as published (`.gz`) and unpacked, as `sha256sum` prints them.
const MNIST: &str = "\
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  t10k-labels-idx1-ubyte.gz
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte";

/// Number of hexadecimal digits in messages.
const SHOWN: usize = 12;

/// ` (SHA-256 …, expected …)` for a damaged file, if its checksum is known. Fashion-MNIST's
/// files have the same names, but not these checksums.
pub(super) fn checksum_note(path: &Path, fashion: bool) -> String {
    let Some(got) = sha256_of(path) else {
        return String::new();
    };
    let got = &got[..SHOWN];
    let name = path.file_name().map(|n| n.to_string_lossy());
    let mut known = MNIST.lines().filter_map(|line| line.split_once("  "));
    let known = known.find(|(_, file)| !fashion && name.as_deref() == Some(*file));
    match known {
        Some((want, _)) => format!(" (SHA-256 {got}…, expected {}…)", &want[..SHOWN]),
        None => format!(" (SHA-256 {got}…)"),
    }
}

fn sha256_of(path: &Path) -> Option<String> {
    let mut hash = Sha256::new();
    let hashed = read_pieces(open_regular(path).ok()?, |piece| {
        hash.update(piece);
        Ok(())
    });
    hashed.ok()?;
    Some(hex::encode(hash.finalize()))
}
