//! The memory from which the ranks of one host take their buckets: one arena
//! per rank, all in one object that all of them map.
//!
//! It is sparse: pages exist once they are touched. So it can be far larger
//! than what any model needs, and never has to grow (a mapping that grows
//! would have to be announced to all peers).
//!
//! Each is an odd number of huge pages long. Ranks work on the same offset of all arenas at a
//! time, and the first-level cache of AMD's processors cannot hold two lines whose addresses
//! agree in a hash of bits 12 to 27 and in the bits below (Lipp et al., "Take A Way", 2020):
//! with arenas 16 GiB apart each access displaced the line of the other rank.
//! An odd number of 2 MiB apart the hashes of up to 128 ranks differ.

use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Resource, getrlimit};

use super::shm;
use crate::region::{HUGE_BYTES, Region};

/// Address space of one rank's arena. Gradients of four billion parameters.
const ARENA_MAX_BYTES: usize = 16 << 30;
/// Address space of all arenas of a host: 1/128 of what x86-64 has.
const TOTAL_MAX_BYTES: usize = 1 << 40;
/// With less address space than this there is no arena.
const ARENA_MIN_BYTES: usize = 64 << 20;

/// All arenas of a host, as one rank maps them.
pub(crate) struct Arenas {
    region: Region,
    each_bytes: usize,
    /// Whether pages belong to an object that other processes map.
    shared: bool,
}

impl Arenas {
    /// Maps arenas of this size: those of `fd`, or else memory of this process alone.
    fn map(each_bytes: usize, seats: usize, fd: Option<&OwnedFd>) -> std::io::Result<Arenas> {
        Ok(Arenas {
            region: Region::sparse(each_bytes * seats, fd.map(AsFd::as_fd))?,
            each_bytes,
            shared: fd.is_some(),
        })
    }

    /// Arenas of threads of this process; `None` if the system refuses.
    pub(super) fn private(seats: usize, requested: Option<usize>) -> Option<Arenas> {
        sizes(seats, requested).find_map(|each_bytes| Arenas::map(each_bytes, seats, None).ok())
    }

    /// Arenas that other processes will map, and the descriptor to pass to them.
    pub(super) fn create(seats: usize, requested: Option<usize>) -> Option<(OwnedFd, Arenas)> {
        sizes(seats, requested).find_map(|each_bytes| {
            let fd = shm::sealed_memfd("phalanx-buckets", each_bytes * seats).ok()?;
            let arenas = Arenas::map(each_bytes, seats, Some(&fd)).ok()?;
            Some((fd, arenas))
        })
    }

    /// The arenas that another process made. The error describes what is wrong.
    pub(super) fn open(fd: &OwnedFd, seats: usize) -> Result<Arenas, String> {
        let bytes = shm::sealed_size(fd, TOTAL_MAX_BYTES)?;
        let each_bytes = bytes / seats.max(1);
        if each_bytes * seats != bytes || each_bytes == 0 || !each_bytes.is_multiple_of(HUGE_BYTES)
        {
            return Err(format!(
                "{bytes} bytes cannot be the arenas of {seats} ranks"
            ));
        }
        Arenas::map(each_bytes, seats, Some(fd))
            .map_err(|e| format!("mmap of {bytes} bytes for buckets: {e}"))
    }

    /// Size of each arena.
    pub(crate) fn each_bytes(&self) -> usize {
        self.each_bytes
    }

    /// Whether pages belong to an object that other processes map.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// The mapping, and where the arena of `seat` begins in it.
    pub(crate) fn of(&self, seat: usize) -> (&Region, usize) {
        (&self.region, seat * self.each_bytes)
    }

    /// Address of `bytes` bytes at `offset` of the arena of `seat`; `None` when they
    /// are not inside. The arguments may come from a peer.
    pub(crate) fn at(&self, seat: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(bytes)?;
        (end <= self.each_bytes)
            .then(|| self.region.bytes_at(seat * self.each_bytes + offset, bytes))
    }
}

/// The sizes to try, each when that before it was refused; none when no arena is wanted.
fn sizes(seats: usize, requested: Option<usize>) -> impl Iterator<Item = usize> {
    let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
    std::iter::successors(size_within(limit, seats, requested), |bytes| {
        let half = (bytes / 2) & !(HUGE_BYTES - 1) | HUGE_BYTES;
        (half >= ARENA_MIN_BYTES).then_some(half)
    })
}

/// The first of them in a process with a limit of `limit` bytes of address space (`ulimit -v`):
/// arenas take at most a quarter.
fn size_within(limit: u64, seats: usize, requested: Option<usize>) -> Option<usize> {
    let share = usize::try_from(limit / 4).unwrap_or(usize::MAX);
    let most = ARENA_MAX_BYTES.min(TOTAL_MAX_BYTES.min(share) / seats.max(1));
    let most = most.saturating_sub(HUGE_BYTES);
    // Nothing was asked for, or there is too little.
    if requested.unwrap_or(most / ARENA_MIN_BYTES) == 0 {
        return None;
    }
    let bytes = requested.unwrap_or(most).min(most).max(1);
    Some(bytes.next_multiple_of(HUGE_BYTES) | HUGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_leave_address_space_for_all_else() {
        let largest = ARENA_MAX_BYTES - HUGE_BYTES;
        assert_eq!(size_within(u64::MAX, 2, None), Some(largest));
        assert_eq!(size_within(u64::MAX, 64, None), Some(largest));
        assert_eq!(size_within(2 << 30, 2, None), Some(254 << 20));
        assert_eq!(size_within(2 << 30, 2, Some(1 << 30)), Some(254 << 20));
        assert_eq!(size_within(256 << 20, 2, None), None);
    }

    #[test]
    fn ranges_outside_an_arena_have_no_address() {
        let arenas = Arenas::private(3, Some(1)).unwrap();
        let each = arenas.each_bytes();
        assert_eq!(each, HUGE_BYTES);
        for (offset, bytes, inside) in [
            (0, each, true),
            (each as u64, 0, true),
            (0, each + 1, false),
            (1, each, false),
            (each as u64 + 1, 0, false),
            (u64::MAX, 0, false),
            (u64::MAX, usize::MAX, false),
            (8, usize::MAX - 4, false),
        ] {
            let found = arenas.at(1, offset, bytes);
            assert_eq!(found.is_some(), inside, "{offset} {bytes}");
        }
    }

    #[test]
    fn what_is_no_arena_is_refused() {
        let (fd, _) = Arenas::create(2, Some(4 << 20)).unwrap();
        let each = Arenas::open(&fd, 2).unwrap().each_bytes();
        assert_eq!(each, 6 << 20, "an odd number of huge pages");
        assert!(Arenas::open(&fd, 5).is_err(), "no multiple");
        let small = shm::sealed_memfd("small", 4096).unwrap();
        assert!(Arenas::open(&small, 1).is_err(), "too small");
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert!(Arenas::open(&pipe, 1).is_err(), "no memfd");
        let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&open, 4 << 20).unwrap();
        let error = Arenas::open(&open, 2).err().unwrap();
        assert!(error.contains("not sealed"), "{error}");
    }

    #[test]
    fn no_arena_where_none_is_wanted() {
        assert!(Arenas::private(2, Some(0)).is_none());
        assert!(Arenas::create(2, Some(0)).is_none());
    }
}
