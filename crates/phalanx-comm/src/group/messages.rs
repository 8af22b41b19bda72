//! Sends and receives, typed.

use super::{Call, ProcessGroup, Work};
use crate::messages::{Direction, Request};
use crate::operation::Operation;
use crate::wait::Callers;
use crate::{Bucket, DType, Element, Result};

/// The other end of a message: a rank, or any rank to receive from; and the message's tag, by default 0.
///
/// ```
/// use phalanx_comm::Peer;
/// assert_eq!(Peer::from(3), Peer::rank(3).tag(0));
/// let _ = Peer::any().tag(7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    rank: Option<usize>,
    tag: u32,
}

impl Peer {
    /// Rank `rank` of the group.
    pub fn rank(rank: usize) -> Peer {
        Peer {
            rank: Some(rank),
            tag: 0,
        }
    }

    /// Any other rank of the group; to receive only. PyTorch: `src=None`.
    pub fn any() -> Peer {
        Peer { rank: None, tag: 0 }
    }

    /// With this tag: a receive takes messages with the same tag only.
    #[must_use]
    pub fn tag(self, tag: u32) -> Peer {
        Peer { tag, ..self }
    }
}

impl From<usize> for Peer {
    fn from(rank: usize) -> Peer {
        Peer::rank(rank)
    }
}

/// One send or receive of a batch; PyTorch's `P2POp`.
pub struct P2POp<'a> {
    peer: Peer,
    dtype: DType,
    data: Data<'a>,
}

/// Which way a message goes, and its bytes.
enum Data<'a> {
    Send(&'a [u8]),
    Recv(&'a mut [u8]),
}

impl<'a> P2POp<'a> {
    /// Sends `data` to rank `to`.
    pub fn send<T: Element>(data: &'a [T], to: impl Into<Peer>) -> Self {
        P2POp {
            peer: to.into(),
            dtype: T::DTYPE,
            data: Data::Send(as_bytes(data)),
        }
    }

    /// Receives what rank `from` sends.
    pub fn recv<T: Element>(data: &'a mut [T], from: impl Into<Peer>) -> Self {
        P2POp {
            peer: from.into(),
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
        write!(f, "P2POp({what} {:?}, {bytes} bytes)", self.peer)
    }
}

impl ProcessGroup {
    /// Sends `data` to rank `to`, which must [`recv`](ProcessGroup::recv) the same number of elements with the same
    /// tag. PyTorch: `send`.
    ///
    /// Messages do not wait for collectives, nor these for messages. Those from one rank to another with one tag arrive
    /// in the order in which they were sent.
    ///
    /// *Blocks until* the data is on its way: in a buffer between the ranks, which holds up to 1 MiB, or taken in by the
    /// other rank. That one takes messages in while it waits in any operation of this group, and keeps up to 1 GiB of
    /// them for which it has issued no receive. So ranks may send to each other first and
    /// receive later. (A rank that computes takes nothing in; [`send_async`](ProcessGroup::send_async) does not wait for
    /// it.)
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, Peer, ProcessGroup};
    ///
    /// let groups = ProcessGroup::threads(2, GroupOptions::default());
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let other = 1 - group.rank();
    ///             let mut into = [0f32; 3];
    ///             group.send(&[1f32, 2., 3.], Peer::rank(other).tag(5)).unwrap();
    ///             let from = group.recv(&mut into, Peer::any().tag(5)).unwrap();
    ///             assert_eq!((from, into), (other, [1., 2., 3.]));
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a rank that does not exist or is this one.
    pub fn send<T: Element>(&self, data: &[T], to: impl Into<Peer>) -> Result<()> {
        let (from, of) = (data.as_ptr().cast(), (T::DTYPE, data.len()));
        let request = self.request_send("send", from, of, to.into(), &Call::default())?;
        self.run_messages(vec![request]).map(drop)
    }

    /// [`ProcessGroup::send`] in the background. Several sends and receives may be in flight. PyTorch: `isend`.
    pub fn send_async<T: Element>(
        &self,
        data: Bucket<T>,
        to: impl Into<Peer>,
        call: Call,
    ) -> Work<Bucket<T>> {
        let (from, of) = (data.as_ptr().cast(), (T::DTYPE, data.len()));
        let request = self.request_send("send", from, of, to.into(), &call);
        self.spawn_message(request, data, |data, _| data)
    }

    /// Receives what rank `from` [`send`](ProcessGroup::send)s with the same tag; returns the sender's rank. PyTorch:
    /// `recv`.
    ///
    /// *Blocks until* the data has arrived.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Desync` when the message has another type or number of elements,
    /// and, after some seconds, when rank `from` waits for this rank, which has not sent. (Where several threads call the
    /// group's operations, only the deadline ends such a wait.)
    pub fn recv<T: Element>(&self, data: &mut [T], from: impl Into<Peer>) -> Result<usize> {
        let (into, of) = (data.as_mut_ptr().cast(), (T::DTYPE, data.len()));
        let request = self.request_recv("recv", into, of, from.into(), &Call::default())?;
        let peers = self.run_messages(vec![request])?;
        Ok(peers.first().copied().unwrap_or(self.core.rank))
    }

    /// [`ProcessGroup::recv`] in the background, with the sender's rank. Its deadline counts from now. A receive whose
    /// message has not come when the group is shut down ends with an error. PyTorch: `irecv`.
    pub fn recv_async<T: Element>(
        &self,
        mut data: Bucket<T>,
        from: impl Into<Peer>,
        call: Call,
    ) -> Work<(Bucket<T>, usize)> {
        let (into, of) = (data.as_mut_ptr().cast(), (T::DTYPE, data.len()));
        let request = self.request_recv("recv", into, of, from.into(), &call);
        self.spawn_message(request, data, |data, peer| (data, peer))
    }

    /// Runs sends and receives together. PyTorch: `batch_isend_irecv` and
    /// waiting for all of its requests.
    ///
    /// The list may have any order on both sides: its messages do not wait for each
    /// other. A message may match a single [`send`](ProcessGroup::send) or
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
    /// *Blocks until* all messages are done; each has the same deadline.
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` for a rank that
    /// does not exist or is this one, before anything is sent.
    pub fn batch_send_recv<'a>(&self, ops: impl IntoIterator<Item = P2POp<'a>>) -> Result<()> {
        const NAME: &str = "batch_send_recv";
        let label = match &self.defaults.label {
            Some(label) => format!("{NAME} of {label}").into(),
            None => NAME.into(),
        };
        let call = Call {
            label: Some(label),
            ..Call::default()
        };
        let mut requests = Vec::new();
        for op in ops {
            let bytes = match &op.data {
                Data::Send(bytes) => bytes.len(),
                Data::Recv(bytes) => bytes.len(),
            };
            let of = (op.dtype, bytes / op.dtype.size_bytes());
            requests.push(match op.data {
                Data::Send(bytes) => self.request_send(NAME, bytes.as_ptr(), of, op.peer, &call)?,
                Data::Recv(bytes) => {
                    self.request_recv(NAME, bytes.as_mut_ptr(), of, op.peer, &call)?
                }
            });
        }
        self.run_messages(requests).map(drop)
    }

    fn request_send(
        &self,
        name: &str,
        from: *const u8,
        (dtype, count): (DType, usize),
        peer: Peer,
        call: &Call,
    ) -> Result<Request> {
        let Some(to) = peer.rank else {
            return Err(self.usage(name, "a message is sent to one rank, not to any".into()));
        };
        self.check_other(name, to)?;
        let ends = (self.core.rank, to);
        let operation = self.message(dtype, count, ends, call);
        Ok(Request {
            operation,
            way: Direction::Send { to, from },
            tag: peer.tag,
            bytes: count * dtype.size_bytes(),
        })
    }

    fn request_recv(
        &self,
        name: &str,
        into: *mut u8,
        (dtype, count): (DType, usize),
        peer: Peer,
        call: &Call,
    ) -> Result<Request> {
        match peer.rank {
            Some(from) => self.check_other(name, from)?,
            None if self.core.world == 1 => {
                return Err(self.usage(name, "a group of one rank has no other rank".into()));
            }
            None => {}
        }
        let ends = (peer.rank.unwrap_or(self.core.rank), self.core.rank);
        let operation = self.message(dtype, count, ends, call);
        Ok(Request {
            operation,
            way: Direction::Receive {
                from: peer.rank,
                into,
            },
            tag: peer.tag,
            bytes: count * dtype.size_bytes(),
        })
    }

    fn message(&self, dtype: DType, count: usize, ends: (usize, usize), call: &Call) -> Operation {
        Operation {
            label: call.label.clone().or_else(|| self.defaults.label.clone()),
            timeout: call.timeout.or(self.defaults.timeout),
            ..Operation::message(dtype, count, ends)
        }
    }

    /// Runs messages in this thread; their memory is borrowed by the caller meanwhile.
    fn run_messages(&self, requests: Vec<Request>) -> Result<Vec<usize>> {
        self.core.queue.check_caller()?;
        // SAFETY: the callers borrow all memory until this returns, that of receives exclusively; elements have no
        // padding, and every bit pattern is one.
        unsafe { self.core.messages.run(requests) }
    }

    /// Starts a message whose memory belongs to `held`.
    fn spawn_message<H: Send + 'static, B: Send + 'static>(
        &self,
        request: Result<Request>,
        held: H,
        give: impl FnOnce(H, usize) -> B + Send + 'static,
    ) -> Work<B> {
        let request = match request {
            Ok(request) => request,
            Err(error) => return Work::failed(error),
        };
        let waiters = Callers::default();
        let (work, completer) = Work::new(waiters.clone());
        completer.start();
        let then = move |result: Result<usize>| {
            completer.finish(result.map(|peer| give(held, peer)));
        };
        // SAFETY: `then` owns the memory until it is called; after an error it drops it unread.
        let in_flight = unsafe { self.core.messages.spawn(request, Box::new(then), waiters) };
        work.in_flight(in_flight)
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
