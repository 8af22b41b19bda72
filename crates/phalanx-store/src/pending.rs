//! Chooses the unauthenticated connection to close for a new one.
//!
//! Anyone can connect, so an unauthenticated connection keeps its slot only until
//! another one needs it. They are closed in this order:
//!
//! 1. a hello without a valid tag: the peer does not have the token;
//! 2. no hello for 20 ms: a member sends its hello right after connecting;
//! 3. a hello with a valid tag, after 250 ms: a member needs one round trip for its
//!    proof, but a hello can be replayed.
//!
//! Among equals, the source with the most connections loses its oldest one, so that
//! one host cannot keep the others out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Maximum number of unauthenticated connections.
const MAX_PENDING: usize = 4096;

/// They may use one part in this many of the process's open files.
const FILES_PART: u64 = 4;

/// What an unauthenticated connection has sent. The first kind is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum HelloState {
    /// A hello without a valid tag.
    Untagged,
    /// No hello yet.
    Silent,
    /// A hello with a valid tag that no other connection has.
    Tagged,
}

/// An unauthenticated connection, identified by `id`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    /// Identifier of the connection; later ones are larger.
    pub(crate) id: u64,
    /// What it has sent.
    pub(crate) hello: HelloState,
    /// Address of the peer.
    pub(crate) source: IpAddr,
    /// When it was accepted.
    pub(crate) since: Instant,
}

impl Pending {
    /// Time from which on it may be closed for another connection.
    fn closable_at(&self) -> Instant {
        let safe_for = match self.hello {
            HelloState::Untagged => 0,
            HelloState::Silent => 20,
            HelloState::Tagged => 250,
        };
        self.since + Duration::from_millis(safe_for)
    }
}

/// Maximum number of unauthenticated connections of a process: 4096, and at most a
/// quarter of its limit of open files.
pub(crate) fn max_pending() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / FILES_PART).map_or(MAX_PENDING, |files| files.clamp(1, MAX_PENDING))
}

/// Whether the error means that the process or the system has too many open files.
pub fn is_out_of_files(error: &std::io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE]
        .map(|e| Some(e.raw_os_error()))
        .contains(&code)
}

/// Time at which the first connection may be closed; `None` if there is none.
pub(crate) fn next_closable(pending: impl Iterator<Item = Pending>) -> Option<Instant> {
    pending.map(|pending| pending.closable_at()).min()
}

/// The connections that may be closed now. The one to close first is the last.
pub(crate) fn closable(pending: impl Iterator<Item = Pending>, now: Instant) -> Vec<u64> {
    let mut pending: Vec<_> = pending.filter(|p| p.closable_at() <= now).collect();
    pending.sort_unstable_by_key(|pending| Reverse(pending.id));
    let mut newer: HashMap<(HelloState, IpAddr), u32> = HashMap::new();
    let mut order: Vec<(HelloState, u32, u64)> = Vec::with_capacity(pending.len());
    for Pending {
        id, hello, source, ..
    } in pending
    {
        // Number of newer connections of the same source: the oldest of the
        // largest source is closed first.
        let newer = newer.entry((hello, network(source))).or_default();
        order.push((hello, *newer, id));
        *newer += 1;
    }
    order.sort_unstable_by_key(|(hello, newer, id)| (Reverse(*hello), *newer, Reverse(*id)));
    order.into_iter().map(|(.., id)| id).collect()
}

/// The source that an address belongs to: an IPv4 address, or an IPv6 network,
/// since one host may have all its addresses.
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
    fn untagged_go_first_and_of_the_largest_source_the_oldest() {
        use HelloState::{Silent, Tagged, Untagged};
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
            (1..).zip(pending).map(|(id, (source, hello))| Pending {
                id,
                hello,
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
        let silent = pending().filter(|p| p.hello == Silent);
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
