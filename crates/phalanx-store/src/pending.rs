//! Which connection that has not proven the token is closed for another one.
//!
//! Strangers may connect as often as they like, so such a connection keeps its
//! place only until another one needs it. The order in which they are closed:
//!
//! 1. those whose hello has no valid tag: they do not hold the token;
//! 2. those that have not said hello for 20 ms: a member's hello travels right
//!    behind its connection;
//! 3. those whose hello has a valid tag, after 250 ms: a member needs one round trip
//!    for its proof, but a hello can be recorded and sent again.
//!
//! Among equals the source with most connections gives up its oldest, so that one
//! host cannot keep the others out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Most connections that have not proven the token: as long as there is room,
/// strangers are better kept than closed, as they come again.
const MAX_PENDING: usize = 4096;

/// The part of the process's open files that they may take.
const FILES_PART: u64 = 4;

/// What a pending connection has shown so far; the first are closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Standing {
    /// It has said hello without a valid tag.
    Untagged,
    /// It has not said hello.
    Silent,
    /// It has said hello with a valid tag, which no other connection has.
    Tagged,
}

/// A connection that has not proven the token, which the caller calls `id`.
#[derive(Clone, Copy, Debug)]
pub struct Pending<I> {
    /// Rises from connection to connection.
    pub id: I,
    /// What it has shown.
    pub standing: Standing,
    /// Where it comes from.
    pub source: IpAddr,
    /// When it was accepted.
    pub since: Instant,
}

impl<I> Pending<I> {
    /// From when on it may be closed for another.
    fn closable_at(&self) -> Instant {
        let safe_for = match self.standing {
            Standing::Untagged => 0,
            Standing::Silent => 20,
            Standing::Tagged => 250,
        };
        self.since + Duration::from_millis(safe_for)
    }
}

/// How many connections of a process may be pending: 4096, and at most a quarter of
/// the files that it may open.
pub fn max_pending() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / FILES_PART).map_or(MAX_PENDING, |files| files.clamp(1, MAX_PENDING))
}

/// Whether the process, or the system, can open no more files.
pub fn is_out_of_files(error: &std::io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE]
        .map(|e| Some(e.raw_os_error()))
        .contains(&code)
}

/// When the first of them may be closed; `None`: nobody is pending.
pub fn next_closable<I>(pending: impl Iterator<Item = Pending<I>>) -> Option<Instant> {
    pending.map(|pending| pending.closable_at()).min()
}

/// Those that may be closed now; the first to go is last.
pub fn closable<I: Copy + Ord>(pending: impl Iterator<Item = Pending<I>>, now: Instant) -> Vec<I> {
    let mut pending: Vec<_> = pending.filter(|p| p.closable_at() <= now).collect();
    pending.sort_unstable_by_key(|pending| Reverse(pending.id));
    let mut newer: HashMap<(Standing, IpAddr), u32> = HashMap::new();
    let mut order: Vec<(Standing, u32, I)> = Vec::with_capacity(pending.len());
    for Pending {
        id,
        standing,
        source,
        ..
    } in pending
    {
        // How many of its source are newer: the larger the source, the sooner
        // its oldest goes.
        let newer = newer.entry((standing, network(source))).or_default();
        order.push((standing, *newer, id));
        *newer += 1;
    }
    order.sort_unstable_by_key(|(standing, newer, id)| (Reverse(*standing), *newer, Reverse(*id)));
    order.into_iter().map(|(.., id)| id).collect()
}

/// What counts as one source: an IPv4 address, or an IPv6 network, of which one
/// host may have all addresses.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => {
            let network = v6.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from_bits(network))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_go_first_and_of_the_largest_source_the_oldest() {
        use Standing::{Silent, Tagged, Untagged};
        let since = Instant::now();
        let pending = [
            (1, Tagged),
            (1, Silent),
            (2, Untagged),
            (1, Untagged),
            (1, Untagged),
            (2, Silent),
            (2, Silent),
            (1, Untagged),
        ];
        let pending = || {
            (1..).zip(pending).map(|(id, (source, standing))| Pending {
                id,
                standing,
                source: [10, 0, 0, source].into(),
                since,
            })
        };
        let order = |ms| {
            let mut ids = closable(pending(), since + Duration::from_millis(ms));
            ids.reverse();
            ids
        };
        // Those without a valid tag at any time: three of source 1, one of 2.
        assert_eq!(order(0), [4, 5, 3, 8]);
        assert_eq!(order(20), [4, 5, 3, 8, 6, 2, 7]);
        assert_eq!(order(250), [4, 5, 3, 8, 6, 2, 7, 1]);
        assert_eq!(next_closable(pending()), Some(since));
        let silent = pending().filter(|p| p.standing == Silent);
        assert_eq!(
            next_closable(silent),
            Some(since + Duration::from_millis(20))
        );
    }

    #[test]
    fn a_network_is_one_source() {
        let network = |text: &str| network(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:2"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }
}
