//! The data sets: their files, sources and checksums. TensorFlow Datasets and Keras have the same checksums.

/// One file.
#[derive(Clone, Copy, Debug)]
pub(super) struct File {
    pub(super) name: &'static str,
    pub(super) bytes: u64,
    /// In lower-case hexadecimal.
    pub(super) sha256: &'static str,
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
                sha256: "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            },
            File {
                name: "train-labels-idx1-ubyte.gz",
                bytes: 28_881,
                sha256: "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            },
            File {
                name: "t10k-images-idx3-ubyte.gz",
                bytes: 1_648_877,
                sha256: "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            },
            File {
                name: "t10k-labels-idx1-ubyte.gz",
                bytes: 4_542,
                sha256: "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
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
                sha256: "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            },
            File {
                name: "train-labels-idx1-ubyte.gz",
                bytes: 29_515,
                sha256: "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            },
            File {
                name: "t10k-images-idx3-ubyte.gz",
                bytes: 4_422_102,
                sha256: "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            },
            File {
                name: "t10k-labels-idx1-ubyte.gz",
                bytes: 5_148,
                sha256: "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
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
            sha256: "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
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
                let text = file.sha256;
                assert_eq!(text.len(), 64, "{}", file.name);
                assert_eq!(text, text.to_lowercase());
                assert!(hex::decode(text).is_ok());
                assert!(sums.insert(text), "{} has another file's sum", file.name);
                assert!(!file.name.contains('/') && file.bytes > 0);
            }
        }
    }
}
