//! The command line, fed with garbage: the bodies of the fuzz targets in `tools/fuzz/`, which the
//! tests here run on garbled seeds.

/// Name, body, seeds.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All of them.
pub const TARGETS: &[Target] = &[("phalanx_words", words, words_seeds)];

/// A command line, word by word, and sizes as people write them.
fn words(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(size) = text.parse::<crate::units::ByteSize>() {
        assert!(size.0 <= 1 << 36);
    }
    crate::cli::parse_only(text.lines());
}

fn words_seeds() -> Vec<Vec<u8>> {
    [
        "launch\n--nnodes\n2\n--node_rank=1\nprog\n--x\n",
        "train\nmnist\n--nproc-per-node\n2\n--batch-size=64\n--lr\n0.1\n",
        "bench\nall-reduce\n--world\n2\n--bytes\n4,1KiB,25MiB\n",
        "44.7MB",
        "1e400",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 1000, run);
        }
    }
}
