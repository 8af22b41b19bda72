//! The data connection of a pair.

use std::cell::Cell;
use std::io::{ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::{Link, TransportKind};
use super::control::Control;
use super::options::set_recv_low_water;
use crate::{Error, Result};

/// Most bytes that arrive before the waiter is woken: a frame of usual size, which is handled as a whole anyway. Of 128
/// KiB, 512 KiB and no limit, this one left most of the core to computation (tools/runs/2026-11-21-overlap-why).
const BATCH_BYTES: usize = 512 << 10;

/// A peer behind a socket.
pub(crate) struct TcpLink {
    rank: usize,
    stream: TcpStream,
    control: Arc<Control>,
    /// The number of bytes at which the kernel wakes us.
    wakes_at: Cell<usize>,
}

impl TcpLink {
    /// `stream` is connected, authenticated and non-blocking.
    pub(crate) fn new(rank: usize, stream: TcpStream, control: Arc<Control>) -> TcpLink {
        TcpLink {
            rank,
            stream,
            control,
            wakes_at: Cell::new(1),
        }
    }

    pub(crate) fn peer(&self) -> usize {
        self.control.peer()
    }

    pub(crate) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Lets the kernel report the socket readable only when [`BATCH_BYTES`] of `coming_bytes` have arrived, or all of
    /// them if they are fewer; 0 means at the first byte. Those bytes must be certain to come.
    pub(crate) fn wake_at(&self, coming_bytes: usize) {
        let bytes = coming_bytes.clamp(1, BATCH_BYTES);
        if self.wakes_at.get() != bytes && set_recv_low_water(&self.stream, bytes).is_ok() {
            self.wakes_at.set(bytes);
        }
    }

    /// `slices` are not all empty.
    fn send_slices(&mut self, slices: &[IoSlice<'_>]) -> Result<usize> {
        loop {
            match self.stream.write_vectored(slices) {
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(0),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(self.ended(&e.to_string())),
            }
        }
    }

    /// `slices` are not all empty.
    fn recv_slices(&mut self, slices: &mut [IoSliceMut<'_>]) -> Result<usize> {
        loop {
            match self.stream.read_vectored(slices) {
                Ok(0) => return Err(self.ended("its connection was closed")),
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(0),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(self.ended(&e.to_string())),
            }
        }
    }

    #[cold]
    fn ended(&self, how: &str) -> Error {
        self.control
            .reason(how)
            .into_error(self.peer())
            .with_rank(self.rank)
    }
}

impl Link for TcpLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.send_slices(&[IoSlice::new(bytes)])
    }

    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        self.recv_slices(&mut [IoSliceMut::new(into)])
    }

    fn try_send_both(&mut self, first: &[u8], then: &[u8]) -> Result<usize> {
        if first.is_empty() {
            return self.try_send(then);
        }
        self.send_slices(&[IoSlice::new(first), IoSlice::new(then)])
    }

    fn try_recv_both(&mut self, first: &mut [u8], then: &mut [u8]) -> Result<usize> {
        self.recv_slices(&mut [IoSliceMut::new(first), IoSliceMut::new(then)])
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        // The peer sees the end even if a forked child still holds the socket.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::Layout;
    use super::super::super::segment::Segment;
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::TcpListener;

    fn is_readable(link: &TcpLink, within_s: i64) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(link.socket(), PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: within_s,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&timeout)).unwrap();
        !fds[0].revents().is_empty()
    }

    fn pair() -> (TcpStream, TcpLink) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || {
            let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let here = listener.accept().unwrap().0;
            here.set_nonblocking(true).unwrap();
            (there, here)
        };
        let ((peer, data), (_, control)) = (connect(), connect());
        let segment = Arc::new(Segment::private(Layout::new(1, 64).unwrap()).unwrap());
        let control = Arc::new(Control::new(1, (0, 0), control, segment));
        (peer, TcpLink::new(0, data, control))
    }

    #[test]
    fn wakes_for_a_batch_for_the_rest_and_for_the_end() {
        let (mut peer, mut link) = pair();
        link.wake_at(1000);
        peer.write_all(&[7; 999]).unwrap();
        // However late the check is.
        assert!(!is_readable(&link, 0));
        peer.write_all(&[7]).unwrap();
        assert!(is_readable(&link, 60));
        let mut got = [0; 2000];
        assert_eq!(link.try_recv(&mut got).unwrap(), 1000);
        // Available bytes are read, whatever was requested.
        link.wake_at(1000);
        peer.write_all(&[8; 3]).unwrap();
        link.wake_at(0);
        assert!(is_readable(&link, 60));
        link.wake_at(1000);
        assert_eq!(link.try_recv(&mut got).unwrap(), 3);
        peer.write_all(&[9; 5]).unwrap();
        drop(peer);
        assert!(is_readable(&link, 60));
        assert_eq!(link.try_recv(&mut got).unwrap(), 5);
    }

    #[test]
    fn a_batch_has_a_limit() {
        let (_peer, link) = pair();
        link.wake_at(usize::MAX);
        assert_eq!(link.wakes_at.get(), BATCH_BYTES);
    }
}
