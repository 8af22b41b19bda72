//! Which ranks of a host share its cores, according to their own descriptions.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Highest core number that is accepted; far beyond any machine.
const MAX_CORES: u32 = 1 << 16;

/// Most compute threads a rank may claim.
const MAX_THREADS: usize = 1 << 16;

/// One rank's description of the cores it computes on. Ranks exchange it when the group
/// forms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Share {
    /// Its compute threads, at least one.
    threads: usize,
    /// Its affinity mask.
    cores: BTreeSet<u32>,
    /// Cores that its cgroup quota allows, if fewer.
    quota: Option<usize>,
}

impl Share {
    /// The share of this process with the given number of compute threads.
    pub(crate) fn here(threads: usize) -> Share {
        let usable = super::usable_cores();
        let cores: BTreeSet<u32> = rustix::thread::sched_getaffinity(None)
            .map(|set| {
                (0..rustix::thread::CpuSet::MAX_CPU as u32)
                    .filter(|&core| set.is_set(core as usize))
                    .collect()
            })
            .ok()
            .filter(|cores: &BTreeSet<u32>| !cores.is_empty())
            // More cores than the mask can hold: then it is no limit.
            .unwrap_or_else(|| (0..usable as u32).collect());
        Share {
            threads: threads.clamp(1, MAX_THREADS),
            quota: (usable < cores.len()).then_some(usable),
            cores,
        }
    }

    /// One line of text: `2 threads on 0-3,8 quota 2`.
    pub(super) fn encode(&self) -> String {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &core in &self.cores {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == core => *last = core,
                _ => runs.push((core, core)),
            }
        }
        let cores: Vec<String> = runs
            .iter()
            .map(|(first, last)| {
                if first == last {
                    first.to_string()
                } else {
                    format!("{first}-{last}")
                }
            })
            .collect();
        let quota = self
            .quota
            .map(|quota| format!(" quota {quota}"))
            .unwrap_or_default();
        format!("{} threads on {}{quota}", self.threads, cores.join(","))
    }

    /// Inverse of [`Share::encode`]; the error quotes the wrong part.
    pub(super) fn decode(text: &str) -> Result<Share, String> {
        let wrong = || format!("{text:?} is not a list of cores");
        let (threads, rest) = text.split_once(" threads on ").ok_or_else(wrong)?;
        let (list, quota) = match rest.split_once(" quota ") {
            Some((list, quota)) => (list, Some(quota.parse().map_err(|_| wrong())?)),
            None => (rest, None),
        };
        let threads = threads.parse().map_err(|_| wrong())?;
        let mut cores = BTreeSet::new();
        for run in list.split(',') {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let first: u32 = first.parse().map_err(|_| wrong())?;
            let last: u32 = last.parse().map_err(|_| wrong())?;
            if first > last || last >= MAX_CORES {
                return Err(wrong());
            }
            cores.extend(first..=last);
        }
        let possible = 1..=MAX_CORES as usize;
        if !(1..=MAX_THREADS).contains(&threads) || quota.is_some_and(|q| !possible.contains(&q)) {
            return Err(wrong());
        }
        Ok(Share {
            threads,
            cores,
            quota,
        })
    }
}

impl From<Share> for String {
    fn from(share: Share) -> String {
        share.encode()
    }
}

impl TryFrom<String> for Share {
    type Error = String;

    fn try_from(text: String) -> Result<Share, String> {
        Share::decode(&text)
    }
}

/// Ranks and threads against the cores that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    ranks: usize,
    /// Compute threads of all these ranks together.
    threads: usize,
    cores: usize,
}

impl Topology {
    /// `ranks` threads of this process with `threads` compute threads each.
    pub(crate) fn of_threads(ranks: usize, threads: usize) -> Topology {
        Topology {
            ranks,
            threads: ranks * threads.clamp(1, MAX_THREADS),
            cores: super::usable_cores(),
        }
    }

    /// As rank `shares[mine]` sees it, `shares` being all ranks of its host.
    ///
    /// Ranks pinned to separate cores do not compete: only ranks whose mask overlaps
    /// ours count. A quota is assumed to belong to a container around all of them.
    pub(crate) fn of_host(mine: usize, shares: &[Share]) -> Topology {
        let total = |shares: &[&Share]| shares.iter().map(|share| share.threads).sum::<usize>();
        let rivals: Vec<&Share> = shares
            .iter()
            .filter(|share| !share.cores.is_disjoint(&shares[mine].cores))
            .collect();
        let union: BTreeSet<u32> = rivals.iter().flat_map(|r| &r.cores).copied().collect();
        let near = Topology {
            ranks: rivals.len(),
            threads: total(&rivals),
            cores: union.len(),
        };
        let all: Vec<&Share> = shares.iter().collect();
        match shares.iter().filter_map(|share| share.quota).min() {
            Some(quota) => near.tighter(Topology {
                ranks: all.len(),
                threads: total(&all),
                cores: quota,
            }),
            None => near,
        }
    }

    /// The one with more threads per core.
    pub(crate) fn tighter(self, other: Topology) -> Topology {
        if other.threads * self.cores > self.threads * other.cores {
            other
        } else {
            self
        }
    }

    /// Whether every thread has its own core; `beside` counts one more thread, for
    /// communication, for every rank.
    pub(crate) fn fits(&self, beside: bool) -> bool {
        self.threads + if beside { self.ranks } else { 0 } <= self.cores
    }
}

/// `2 ranks x 1 thread on 2 cores`
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn some(n: usize, what: &str) -> String {
            format!("{n} {what}{}", if n == 1 { "" } else { "s" })
        }
        let ranks = some(self.ranks, "rank");
        let cores = some(self.cores, "core");
        if self.threads.is_multiple_of(self.ranks.max(1)) {
            let each = some(self.threads / self.ranks.max(1), "thread");
            write!(f, "{ranks} x {each} on {cores}")
        } else {
            write!(f, "{ranks} with {} threads on {cores}", self.threads)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(threads: usize, cores: &[u32], quota: Option<usize>) -> Share {
        Share {
            threads,
            cores: cores.iter().copied().collect(),
            quota,
        }
    }

    fn seen(mine: usize, shares: &[Share]) -> String {
        Topology::of_host(mine, shares).to_string()
    }

    #[test]
    fn shares_round_trip() {
        for (given, text) in [
            (share(1, &[0], None), "1 threads on 0"),
            (
                share(4, &[0, 1, 2, 3, 8], Some(2)),
                "4 threads on 0-3,8 quota 2",
            ),
            (share(2, &[5, 7, 9, 10], None), "2 threads on 5,7,9-10"),
        ] {
            assert_eq!(given.encode(), text);
            assert_eq!(Share::decode(text), Ok(given));
        }
        let here = Share::here(3);
        assert_eq!(Share::decode(&here.encode()), Ok(here));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "1 threads on ",
            "0 threads on 0",
            "x threads on 0",
            "1 threads on 3-1",
            "1 threads on 0-4000000000",
            "1 threads on 0 quota 0",
            "1 threads on 0 quota x",
            "1 threads on 0 quota 18446744073709551615",
            "99999999 threads on 0",
        ] {
            assert!(Share::decode(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn threads_of_all_ranks_count() {
        let cores = [0, 1, 2, 3];
        let one = share(1, &cores, None);
        let three = share(3, &cores, None);
        let even = [one.clone(), one.clone()];
        assert_eq!(seen(0, &even), "2 ranks x 1 thread on 4 cores");
        assert!(Topology::of_host(0, &even).fits(false));
        assert!(Topology::of_host(0, &even).fits(true));
        let uneven = [one, three.clone(), three];
        assert_eq!(seen(0, &uneven), "3 ranks with 7 threads on 4 cores");
        assert!(!Topology::of_host(0, &uneven).fits(false));
    }

    #[test]
    fn communication_threads_need_cores_too() {
        let topology = Topology {
            ranks: 2,
            threads: 2,
            cores: 3,
        };
        assert!(topology.fits(false) && !topology.fits(true));
    }

    #[test]
    fn pinned_ranks_compete_only_where_they_overlap() {
        let pinned = [share(1, &[0], None), share(1, &[1], None)];
        assert_eq!(seen(1, &pinned), "1 rank x 1 thread on 1 core");
        assert!(Topology::of_host(1, &pinned).fits(false));
        let shared = [
            share(1, &[0], None),
            share(1, &[0], None),
            share(2, &[1, 2], None),
        ];
        assert!(!Topology::of_host(0, &shared).fits(false));
        assert!(Topology::of_host(2, &shared).fits(false));
    }

    #[test]
    fn a_quota_is_shared_by_all_ranks() {
        let cores: Vec<u32> = (0..8).collect();
        let ranks = vec![share(1, &cores, Some(2)); 4];
        assert_eq!(seen(0, &ranks), "4 ranks x 1 thread on 2 cores");
        assert!(!Topology::of_host(0, &ranks).fits(false));
        // Pinned to separate cores, with a quota of two cores for all.
        let pinned: Vec<Share> = (0..4)
            .map(|core| share(1, &[core, core + 10], Some(1)))
            .collect();
        assert!(!Topology::of_host(0, &pinned).fits(false));
    }
}
