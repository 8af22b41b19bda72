//! Reads memory of a peer in place, without registration.
//!
//! `process_vm_readv` copies once, from the peer's buffer into ours, where a stage
//! takes two copies; the kernel handles each page. It needs no shared mapping, and an
//! invalid address is an error of the call, not a fault of this process.
//!
//! The kernel allows it between processes of one user, unless forbidden (Yama's
//! `ptrace_scope`, a container's seccomp filter, other user or PID namespaces). So each
//! rank *tries*: it reads a random number from all others and publishes whether it
//! found them. Only if all ranks could read all others is this path used. The number
//! also shows that a process id means the same process on both sides.

use std::io;

/// `0` stages everything, for comparison.
const VARIABLE: &str = "PHALANX_SINGLE_COPY";

/// A number, and its place, that the other ranks read to test whether they can.
pub(super) struct Mark(Box<u64>);

/// The address, process and value of a rank's [`Mark`].
#[derive(Clone, Copy, Default)]
pub(super) struct Sign {
    pub(super) process: u64,
    address: u64,
    value: u64,
}

impl Mark {
    /// `None` if the user turned it off, or if there is no random number.
    pub(super) fn new() -> Option<Mark> {
        if std::env::var_os(VARIABLE).is_some_and(|value| value == "0") {
            return None;
        }
        // Zero means that a rank does not take part.
        let value = getrandom::u64().ok()? | 1;
        Some(Mark(Box::new(value)))
    }

    pub(super) fn sign(&self) -> Sign {
        Sign {
            process: u64::from(std::process::id()),
            address: std::ptr::from_ref(&*self.0).addr() as u64,
            value: *self.0,
        }
    }
}

impl Sign {
    pub(super) fn of([process, address, value]: [u64; 3]) -> Sign {
        Sign {
            process,
            address,
            value,
        }
    }

    pub(super) fn words(self) -> [u64; 3] {
        [self.process, self.address, self.value]
    }

    /// Whether this process can read the number at its published place.
    pub(super) fn is_readable(self) -> bool {
        let mut found = [0_u8; 8];
        // SAFETY: `found` is ours and as long as said.
        let read = unsafe { read(self.process, self.address, found.as_mut_ptr(), found.len()) };
        self.value != 0 && read.is_ok() && u64::from_ne_bytes(found) == self.value
    }
}

/// Copies `bytes` at the address `from` of `process` to `into`.
///
/// # Errors
///
/// The kernel's; `UnexpectedEof` where only a part could be read.
///
/// # Safety
///
/// `bytes` at `into` are writable, and no other code touches them meanwhile.
pub(super) unsafe fn read(process: u64, from: u64, into: *mut u8, bytes: usize) -> io::Result<()> {
    let pid = libc::pid_t::try_from(process).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while done < bytes {
        let remote = (from as usize)
            .checked_add(done)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let local = libc::iovec {
            // SAFETY: inside what the caller says is writable.
            iov_base: unsafe { into.add(done) }.cast(),
            iov_len: bytes - done,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(remote),
            iov_len: bytes - done,
        };
        // SAFETY: the kernel writes only into `local`, and checks `remote`
        // against the other process's memory.
        let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
        match usize::try_from(got) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => done += got,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some containers forbid it; groups then stage everything.
    fn is_forbidden() -> bool {
        let mut byte = [0];
        let forbidden = own(&[1], &mut byte).is_err();
        if forbidden {
            eprintln!("skipped: this system forbids process_vm_readv");
        }
        forbidden
    }

    fn own(from: &[u8], into: &mut [u8]) -> io::Result<()> {
        let process = u64::from(std::process::id());
        // SAFETY: as long as the slice is.
        unsafe {
            read(
                process,
                from.as_ptr().addr() as u64,
                into.as_mut_ptr(),
                into.len(),
            )
        }
    }

    #[test]
    fn bytes_are_read_where_they_lie() {
        if is_forbidden() {
            return;
        }
        let from: Vec<u8> = (0..100_003_u32).map(|i| i as u8).collect();
        let mut into = vec![0; from.len()];
        own(&from, &mut into).unwrap();
        assert_eq!(from, into);
    }

    #[test]
    fn a_wrong_address_is_an_error() {
        let mut into = [0; 8];
        for (process, address) in [
            (u64::from(std::process::id()), 8),
            (u64::from(std::process::id()), u64::MAX - 3),
            (u64::MAX, 8),
            // No process has it: beyond the kernel's largest.
            (1 << 30, 8),
        ] {
            // SAFETY: as long as said.
            let read = unsafe { read(process, address, into.as_mut_ptr(), into.len()) };
            assert!(read.is_err(), "{process} {address:#x}");
        }
        assert_eq!(into, [0; 8]);
    }

    #[test]
    fn marks_are_found_and_strangers_are_not() {
        if is_forbidden() {
            return;
        }
        let mark = Mark::new().unwrap();
        let sign = mark.sign();
        assert!(sign.is_readable());
        let other = Sign {
            value: sign.value ^ 2,
            ..sign
        };
        assert!(!other.is_readable());
        assert!(!Sign::default().is_readable());
    }
}
