//! Which ranks share a host.

use std::ops::Range;

/// The ranks of a group, host by host. Ranks are numbered host by host, as launchers
/// do. Otherwise a group counts as one host, and plans for several hosts are not used.
///
/// ```
/// use phalanx_comm::plan::Hosts;
/// let hosts = Hosts::of_sizes(&[2, 1, 3]);
/// assert_eq!((hosts.count(), hosts.world()), (3, 6));
/// assert_eq!(hosts.ranks(2), 3..6);
/// assert_eq!(hosts.host_of(2), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hosts {
    /// The first rank of each host, then the number of ranks.
    firsts: Vec<usize>,
}

impl Hosts {
    /// One host with all ranks.
    pub fn one(world: usize) -> Hosts {
        Hosts::of_sizes(&[world])
    }

    /// Hosts with the given numbers of ranks; empty ones are left out.
    pub fn of_sizes(sizes: &[usize]) -> Hosts {
        let mut firsts = vec![0];
        for size in sizes.iter().filter(|size| **size > 0) {
            firsts.push(firsts[firsts.len() - 1] + size);
        }
        if firsts.len() == 1 {
            firsts.push(0);
        }
        Hosts { firsts }
    }

    /// From the name of every rank's host, in rank order. `None` when the ranks of a
    /// host are not numbered consecutively.
    pub fn of_names<T: PartialEq>(names: &[T]) -> Option<Hosts> {
        let mut sizes: Vec<usize> = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            match sizes.last_mut() {
                Some(size) if names[rank - 1] == *name => *size += 1,
                _ if names[..rank].contains(name) => return None,
                _ => sizes.push(1),
            }
        }
        Some(Hosts::of_sizes(&sizes))
    }

    /// Number of hosts.
    pub fn count(&self) -> usize {
        self.firsts.len() - 1
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.firsts[self.count()]
    }

    /// The ranks of a host.
    pub fn ranks(&self, host: usize) -> Range<usize> {
        self.firsts[host]..self.firsts[host + 1]
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: usize) -> usize {
        self.firsts.partition_point(|first| *first <= rank) - 1
    }

    /// Number of ranks of the largest host.
    pub fn most_ranks(&self) -> usize {
        (0..self.count())
            .map(|host| self.ranks(host).len())
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_hosts_if_neighbours_share_them() {
        assert_eq!(
            Hosts::of_names(&["a", "a", "b", "c", "c"]),
            Some(Hosts::of_sizes(&[2, 1, 2]))
        );
        assert_eq!(Hosts::of_names(&["a", "b", "a"]), None);
        assert_eq!(Hosts::of_names(&["a"; 4]), Some(Hosts::one(4)));
        assert_eq!(Hosts::of_names::<u8>(&[]).map(|h| h.world()), Some(0));
        assert_eq!(Hosts::one(4).most_ranks(), 4);
    }
}
