//! A data connection of a pair.

use std::io::{ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::{Link, TransportKind};
use super::control::Control;
use crate::{Error, Result};

/// A peer behind a socket.
pub(crate) struct TcpLink {
    rank: usize,
    /// Which of the pair's data connections.
    index: usize,
    stream: TcpStream,
    control: Arc<Control>,
}

impl TcpLink {
    /// `stream` is connected, authenticated and non-blocking.
    pub(crate) fn new(
        rank: usize,
        index: usize,
        stream: TcpStream,
        control: Arc<Control>,
    ) -> TcpLink {
        TcpLink {
            rank,
            index,
            stream,
            control,
        }
    }

    pub(crate) fn peer(&self) -> usize {
        self.control.peer()
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
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
        // The peer sees the end even where a forked child still holds the socket.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}
