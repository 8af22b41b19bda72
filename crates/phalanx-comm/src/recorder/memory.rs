//! The words of one recorder: private, or shared with the launcher.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;

use super::layout::{BUSY, ENTRIES, MAGIC, VERSION, WORDS, entry, entry_at, head, label_at};
use crate::region::Region;
use crate::{inherited, limits};

/// Bytes of a recorder's memory.
pub(crate) const BYTES: usize = 8 * WORDS;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

pub(crate) struct Memory {
    region: Region,
}

impl Memory {
    pub(crate) fn private() -> std::io::Result<Memory> {
        Region::anonymous(BYTES).map(|region| Memory { region })
    }

    /// The memory file at `path`, unless another process already writes it.
    pub(crate) fn shared(path: &str) -> std::io::Result<Memory> {
        let wrong = |what: &str| Err(std::io::Error::other(what.to_owned()));
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        let open = |path: &Path| rustix::fs::open(path, flags, rustix::fs::Mode::empty());
        let file = inherited::open(Path::new(path), open)?;
        // Checked before it is mapped: touching a page behind the end of a
        // file that shrank would kill us.
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SEALS) || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return wrong("it is not sealed against a change of its size");
        }
        if usize::try_from(rustix::fs::fstat(&file)?.st_size) != Ok(BYTES) {
            return wrong("it has another size");
        }
        let region = Region::shared(file.as_fd(), BYTES)?;
        let memory = Memory { region };
        let own = u64::from(std::process::id());
        match memory
            .word(head::OWNER)
            .compare_exchange(0, own, SeqCst, SeqCst)
        {
            Ok(_) => Ok(memory),
            Err(_) => wrong("another process or group writes it"),
        }
    }

    /// The word at `index`.
    ///
    /// # Panics
    ///
    /// Outside the memory: indices are ours, so that is a bug.
    #[inline]
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        self.region.u64_at(8 * index)
    }

    /// The words of the entry that `ticket` has.
    #[inline]
    pub(crate) fn entry(&self, ticket: u64) -> &[AtomicU64; entry::WORDS] {
        let bytes = self
            .region
            .bytes_at(8 * entry_at(ticket), 8 * entry::WORDS)
            .cast::<[AtomicU64; entry::WORDS]>();
        // SAFETY: inside the mapping, says `bytes_at`, which outlives `&self`;
        // aligned, because mappings start on a page and entries are 128 bytes;
        // atomics may be written by others while the reference exists.
        unsafe { &*bytes }
    }

    /// Fetches the entry that `ticket` will have: its stores would otherwise
    /// hold up the first publication of the operation by two cache misses.
    #[inline]
    pub(crate) fn prefetch(&self, ticket: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            let words = self.entry(ticket);
            // SAFETY: a hint about our own memory; it changes nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_ET0>((&raw const words[0]).cast());
                _mm_prefetch::<_MM_HINT_ET0>((&raw const words[8]).cast());
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = ticket;
    }

    /// A copy of the entry, if it is still (or again) that of `ticket` and was not
    /// written meanwhile.
    pub(crate) fn read_entry(&self, ticket: u64) -> Option<[u64; entry::WORDS]> {
        let words = self.entry(ticket);
        let before = words[entry::STAMP].load(Acquire);
        if ticket >= BUSY - 1 || before != ticket + 1 {
            return None;
        }
        let copy = std::array::from_fn(|i| words[i].load(Relaxed));
        std::sync::atomic::fence(Acquire);
        (words[entry::STAMP].load(Relaxed) == before).then_some(copy)
    }

    /// A copy of everything, in which entries that were being written are empty.
    pub(crate) fn copy(&self) -> Vec<u64> {
        let mut copy = vec![0; WORDS];
        for slot in 0..ENTRIES as u64 {
            let at = entry_at(slot);
            let stamp = self.word(at).load(Relaxed);
            if let Some(words) = stamp.checked_sub(1).and_then(|n| self.read_entry(n)) {
                copy[at..at + entry::WORDS].copy_from_slice(&words);
            }
        }
        // After the entries, which refer to labels that may be new.
        for i in (0..head::WORDS).chain(label_at(0)..WORDS) {
            copy[i] = self.word(i).load(Acquire);
        }
        copy
    }
}

/// A fresh memory file for one rank's recorder. Hand it to the rank as the
/// path in the variable [`FILE_VARIABLE`](super::FILE_VARIABLE), and read it
/// with [`Dump::from_memory`](super::Dump::from_memory).
///
/// # Errors
///
/// When the system has no memory. If it forbids memory files (a container's seccomp filter)
/// there is no error: the rank's recorder is private, and the rank writes dumps itself.
pub fn create_memory() -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create("phalanx-flight", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("phalanx-flight", flags))
    {
        Ok(file) => file,
        // A file that no rank accepts as a recorder, and no launcher as one that was written.
        Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => {
            let none = rustix::fs::open("/dev/null", OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
            return Ok(none);
        }
        Err(error) => return Err(error.into()),
    };
    limits::check_file_size(BYTES)?;
    rustix::fs::ftruncate(&file, BYTES as u64)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// All words of a memory file; the error describes what is wrong with it.
pub(crate) fn read_words(file: &OwnedFd) -> Result<Vec<u64>, String> {
    let failed = |e: std::io::Error| format!("the recorder's memory cannot be read: {e}");
    let file = File::from(file.try_clone().map_err(failed)?);
    let mut bytes = vec![0; BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    let words: Vec<u64> = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_ne_bytes(*word))
        .collect();
    if (words[head::MAGIC], words[head::VERSION]) != (MAGIC, VERSION) {
        return Err("the rank never wrote into its recorder".to_owned());
    }
    Ok(words)
}
