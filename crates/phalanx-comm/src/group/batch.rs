//! Sends and receives that run together.

use std::sync::Arc;

use super::ProcessGroup;
use crate::exec::{Data, Message};
use crate::{DType, Element, Result};

/// One send or receive of a batch; PyTorch's `P2POp`.
pub struct P2POp<'a> {
    peer: usize,
    dtype: DType,
    data: Data<'a>,
}

impl<'a> P2POp<'a> {
    /// Sends `data` to rank `to`.
    pub fn send<T: Element>(data: &'a [T], to: usize) -> Self {
        P2POp {
            peer: to,
            dtype: T::DTYPE,
            data: Data::Send(as_bytes(data)),
        }
    }

    /// Receives what rank `from` sends.
    pub fn recv<T: Element>(data: &'a mut [T], from: usize) -> Self {
        P2POp {
            peer: from,
            dtype: T::DTYPE,
            data: Data::Recv(as_bytes_mut(data)),
        }
    }
}

impl std::fmt::Debug for P2POp<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, bytes) = match &self.data {
            Data::Send(bytes) => ("send to", bytes.len()),
            Data::Recv(bytes) => ("recv from", bytes.len()),
        };
        write!(f, "P2POp({what} {}, {bytes} bytes)", self.peer)
    }
}

impl ProcessGroup {
    /// Runs sends and receives together. PyTorch: `batch_isend_irecv` and
    /// waiting for all of its requests.
    ///
    /// The list may have any order on both sides: its messages do not wait for each
    /// other, except that messages *to* one rank are sent, and those *from* one rank
    /// are received, in the order of the list. (There are no tags: messages are matched
    /// by order.) A message may match a single [`send`](ProcessGroup::send) or
    /// [`recv`](ProcessGroup::recv) on the other side.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, P2POp, ProcessGroup};
    ///
    /// // Each rank passes its data on to the next one.
    /// let groups = ProcessGroup::threads(3, GroupOptions::default());
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let (rank, world) = (group.rank(), group.world_size());
    ///             let (out, mut into) = ([rank as f32; 1000], [0f32; 1000]);
    ///             group
    ///                 .batch_send_recv([
    ///                     P2POp::send(&out, (rank + 1) % world),
    ///                     P2POp::recv(&mut into, (rank + world - 1) % world),
    ///                 ])
    ///                 .unwrap();
    ///             assert_eq!(into, [((rank + 2) % 3) as f32; 1000]);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// *Blocks until* all messages are done, with one deadline for all.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a rank that
    /// does not exist or is this one, before anything is sent.
    pub fn batch_send_recv<'a>(&self, ops: impl IntoIterator<Item = P2POp<'a>>) -> Result<()> {
        const NAME: &str = "batch_send_recv";
        let mut messages = Vec::new();
        for op in ops {
            self.check_other(NAME, op.peer)?;
            messages.push(Message {
                peer: op.peer,
                dtype: op.dtype,
                data: op.data,
            });
        }
        let label: Arc<str> = match &self.defaults.label {
            Some(label) => format!("{NAME} of {label}").into(),
            None => NAME.into(),
        };
        let timeout = self.defaults.timeout;
        self.core
            .queue
            .run(|runner| runner.exchange(&label, &mut messages, timeout))
    }
}

fn as_bytes<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements have no padding, so all their bytes are initialised.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

fn as_bytes_mut<T: Element>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a valid element.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}
