//! Where the ranks' output goes: which streams of which local ranks (`3`, `0:1,1:2`: torchrun's notation for
//! `--redirects` and `--tee`), and whose lines get a prefix.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

/// A choice of stdout and/or stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// stdout is chosen.
    pub out: bool,
    /// stderr is chosen.
    pub err: bool,
}

impl Streams {
    /// Both.
    pub const ALL: Streams = Streams {
        out: true,
        err: true,
    };

    fn parse(text: &str) -> Option<Self> {
        let bits: u8 = text.trim().parse().ok().filter(|bits| *bits <= 3)?;
        Some(Streams {
            out: bits & 1 != 0,
            err: bits & 2 != 0,
        })
    }
}

/// The choice for each local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamChoice {
    otherwise: Streams,
    ranks: BTreeMap<usize, Streams>,
}

impl StreamChoice {
    /// The same for every rank.
    pub fn all(streams: Streams) -> Self {
        StreamChoice {
            otherwise: streams,
            ranks: BTreeMap::new(),
        }
    }

    /// What was chosen for `local_rank`.
    pub fn of(&self, local_rank: usize) -> Streams {
        self.ranks
            .get(&local_rank)
            .copied()
            .unwrap_or(self.otherwise)
    }

    /// The first rank that something was chosen for and that is not among the `local_ranks` first.
    pub fn beyond(&self, local_ranks: usize) -> Option<usize> {
        self.ranks
            .range(local_ranks..)
            .next()
            .map(|(rank, _)| *rank)
    }

    /// Whether anything at all was chosen.
    pub fn any(&self) -> bool {
        let some = |s: &Streams| s.out || s.err;
        some(&self.otherwise) || self.ranks.values().any(some)
    }
}

impl FromStr for StreamChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{text}\" is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor a list as 0:1,1:2"
            )
        };
        if !text.contains(':') {
            return Streams::parse(text)
                .map(StreamChoice::all)
                .ok_or_else(wrong);
        }
        let mut choice = StreamChoice::default();
        for item in text.split(',') {
            let (rank, streams) = item.split_once(':').ok_or_else(wrong)?;
            let rank = rank.trim().parse().map_err(|_| wrong())?;
            let streams = Streams::parse(streams).ok_or_else(wrong)?;
            choice.ranks.insert(rank, streams);
        }
        Ok(choice)
    }
}

/// Files for the ranks' output.
#[derive(Clone, Debug)]
pub struct Logs {
    /// `LOG_DIR/RUN_ID_xxxxxxxx`, which this run makes.
    pub dir: PathBuf,
    /// Streams that go to files only.
    pub redirects: StreamChoice,
    /// Streams that go to files and on.
    pub tee: StreamChoice,
}

/// Which ranks' lines get a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// None: bytes pass as they come.
    None,
    /// Every rank's.
    All,
    /// All but those of rank 0, which speaks for the job.
    AllButRank0,
}

impl Prefix {
    /// Whether they are those of `rank`, too.
    pub fn is_for(self, rank: usize) -> bool {
        match self {
            Prefix::None => false,
            Prefix::All => true,
            Prefix::AllButRank0 => rank > 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_notation() {
        let both: StreamChoice = "3".parse().unwrap();
        assert_eq!(both.of(7), Streams::ALL);
        let mixed: StreamChoice = "0:1,1:2".parse().unwrap();
        assert_eq!(
            mixed.of(0),
            Streams {
                out: true,
                err: false
            }
        );
        assert_eq!(
            mixed.of(1),
            Streams {
                out: false,
                err: true
            }
        );
        assert_eq!(mixed.of(2), Streams::default());
        assert!(mixed.any());
        assert!(!"0".parse::<StreamChoice>().unwrap().any());
        for wrong in ["", "4", "x", "0:", "0:1,", ":1", "0:9"] {
            assert!(wrong.parse::<StreamChoice>().is_err(), "{wrong}");
        }
    }
}
