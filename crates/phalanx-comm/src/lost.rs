//! Which ranks the launchers have reported lost.
//!
//! | key                            | value            | written by       |
//! |--------------------------------|------------------|------------------|
//! | `reform/lost/F`, `reform/lost` | why, and a count | [`report_lost`]  |
//!
//! `F` is a rank's number among all that the job has started. A host that vanishes, or is stopped with all its processes,
//! closes no connection: its ranks' peers learn of it here.

use phalanx_store::Store;

/// How many times a rank was reported lost.
const LOST: &str = "reform/lost";

pub(crate) fn lost_key(number: usize) -> String {
    format!("{LOST}/{number}")
}

/// Writes into `store`, which the ranks of a job use, that the process with the number `rank` has ended, and `why`. Ranks of
/// other hosts that wait for it in an operation leave it with `PeerLost` within half a second, and those that
/// [form a group](crate::Detached::form) do not wait for it. `Log::lose` of `phalanx-member` calls this.
///
/// # Errors
///
/// Those of the store.
pub fn report_lost(store: &dyn Store, rank: usize, why: &str) -> phalanx_store::Result<()> {
    store.set(&lost_key(rank), why.as_bytes())?;
    store.add(LOST, 1).map(drop)
}

/// A rank that was reported lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LostRank {
    pub(crate) rank: usize,
    /// The process, among all that the job has started.
    pub(crate) number: usize,
    pub(crate) why: String,
}

/// Those of a group's ranks that were reported lost.
pub(crate) struct LostRanks {
    /// The ranks' processes.
    numbers: Vec<usize>,
    /// The count when the store was asked last.
    looked: Vec<u8>,
    found: Vec<LostRank>,
}

impl LostRanks {
    /// Those of the ranks whose processes have these `numbers`.
    pub(crate) fn of(numbers: &[usize]) -> LostRanks {
        LostRanks {
            numbers: numbers.to_vec(),
            looked: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Those that have been reported by now, by rank. *Costs* one request where none was reported since the last read.
    pub(crate) fn read(&mut self, store: &dyn Store) -> phalanx_store::Result<&[LostRank]> {
        let count = store.try_get(LOST)?.unwrap_or_default();
        if count != self.looked {
            let mut found = Vec::new();
            for (rank, number) in self.numbers.iter().copied().enumerate() {
                if let Some(why) = store.try_get(&lost_key(number))? {
                    let why = String::from_utf8_lossy(&why).into_owned();
                    found.push(LostRank { rank, number, why });
                }
            }
            (self.looked, self.found) = (count, found);
        }
        Ok(&self.found)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_store::MemStore;

    use super::*;

    #[test]
    fn lost_ranks_are_found_once_they_are_reported() {
        let store = MemStore::new();
        let mut ranks = LostRanks::of(&[2, 5, 7]);
        assert_eq!(ranks.read(&store).unwrap(), []);
        report_lost(&store, 3, "of another group").unwrap();
        assert_eq!(ranks.read(&store).unwrap(), []);
        report_lost(&store, 7, "its host is down").unwrap();
        let lost = LostRank {
            rank: 2,
            number: 7,
            why: "its host is down".to_owned(),
        };
        for _ in 0..2 {
            assert_eq!(ranks.read(&store).unwrap(), std::slice::from_ref(&lost));
        }
    }
}
