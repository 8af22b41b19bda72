//! The data sets: their files, sources and published checksums.

/// A published checksum of a file, in lower-case hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sum {
    Sha256(&'static str),
    /// Where the authors publish no better one: it detects accidents, not attacks.
    Md5(&'static str),
}

/// One file.
#[derive(Clone, Copy, Debug)]
pub(super) struct File {
    pub(super) name: &'static str,
    pub(super) bytes: u64,
    pub(super) sum: Sum,
}

/// One data set.
#[derive(Debug)]
pub(super) struct DataSet {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Its full name.
    pub(super) title: &'static str,
    pub(super) files: &'static [File],
    /// URLs of folders with all files, tried in this order.
    pub(super) sources: &'static [&'static str],
    /// The command that trains on it.
    pub(super) next: &'static str,
}

impl DataSet {
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// All of them.
pub(super) const SETS: [DataSet; 3] = [
    DataSet {
        name: "mnist",
        title: "the MNIST database of handwritten digits (Y. LeCun, C. Cortes, C. J. C. Burges)",
        files: &[
            File {
                name: "train-images-idx3-ubyte.gz",
                bytes: 9_912_422,
                sum: Sum::Sha256(
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                ),
            },
            File {
                name: "train-labels-idx1-ubyte.gz",
                bytes: 28_881,
                sum: Sum::Sha256(
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                ),
            },
            File {
                name: "t10k-images-idx3-ubyte.gz",
                bytes: 1_648_877,
                sum: Sum::Sha256(
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                ),
            },
            File {
                name: "t10k-labels-idx1-ubyte.gz",
                bytes: 4_542,
                sum: Sum::Sha256(
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                ),
            },
        ],
        sources: &[
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ],
        next: "phalanx train mnist --data",
    },
    DataSet {
        name: "fashion-mnist",
        title: "Fashion-MNIST (Zalando Research)",
        files: &[
            File {
                name: "train-images-idx3-ubyte.gz",
                bytes: 26_421_880,
                sum: Sum::Md5("8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            },
            File {
                name: "train-labels-idx1-ubyte.gz",
                bytes: 29_515,
                sum: Sum::Md5("25c81989df183df01b3e8a0aad5dffbe"),
            },
            File {
                name: "t10k-images-idx3-ubyte.gz",
                bytes: 4_422_102,
                sum: Sum::Md5("bef4ecab320f06d8554ea6380940ec79"),
            },
            File {
                name: "t10k-labels-idx1-ubyte.gz",
                bytes: 5_148,
                sum: Sum::Md5("bb300cfdad3c16e7a12a480ee83cd310"),
            },
        ],
        // The authors' own bucket answers without TLS only.
        sources: &["http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"],
        next: "phalanx train mnist --data",
    },
    DataSet {
        name: "cifar10",
        title: "CIFAR-10 (A. Krizhevsky, \"Learning Multiple Layers of Features from Tiny Images\", 2009)",
        files: &[File {
            name: "cifar-10-python.tar.gz",
            bytes: 170_498_071,
            sum: Sum::Md5("c58f30108f718f92721af3b95e74349a"),
        }],
        sources: &["https://www.cs.toronto.edu/~kriz"],
        next: "phalanx train resnet18 --data",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn sums_are_sums_and_names_are_plain() {
        let mut sums = BTreeSet::new();
        for set in &SETS {
            assert!(!set.sources.is_empty() && !set.files.is_empty());
            for file in set.files {
                let (text, digits) = match file.sum {
                    Sum::Sha256(text) => (text, 64),
                    Sum::Md5(text) => (text, 32),
                };
                assert_eq!(text.len(), digits, "{}", file.name);
                assert_eq!(text, text.to_lowercase());
                assert!(hex::decode(text).is_ok());
                assert!(sums.insert(text), "{} has another file's sum", file.name);
                assert!(!file.name.contains('/') && file.bytes > 0);
            }
        }
    }
}
