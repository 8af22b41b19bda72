//! Passing descriptors over a connected Unix socket.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, socket_with,
};

use super::super::layout::MAX_LOCAL_RANKS;
use crate::limits;

const NONCE_BYTES: usize = 32;
const PID_BYTES: usize = 4;
/// Seat and pid of one member.
const MEMBER_BYTES: usize = 4 + PID_BYTES;
/// Members listed in one message; the kernel passes at most 253 descriptors with one.
const MEMBERS_PER_MESSAGE: usize = 128;
/// How long sending waits for others to receive descriptors in flight: the kernel limits how
/// many a user may have in flight.
const FULL_PATIENCE: Duration = Duration::from_secs(5);

/// What a member receives from its host.
pub(crate) struct Roster {
    pub(crate) nonce: [u8; NONCE_BYTES],
    pub(crate) memory: OwnedFd,
    /// The memory for buckets, if the host has it.
    pub(crate) arenas: Option<OwnedFd>,
    /// Seat, pid, pidfd of each member that came, the host and us included.
    pub(crate) members: Vec<(usize, u32, OwnedFd)>,
}

/// Connects to the abstract socket `name` and gives up at `until`.
///
/// Not `UnixStream::connect`: that sleeps without a limit while the backlog of
/// the other end is full, for example because it was stopped.
pub(crate) fn connect(name: &str, until: Instant) -> std::io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(e.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Step 2: the member sends its pid and pidfd.
pub(crate) fn greet(socket: &UnixStream) -> Result<(), String> {
    let own = rustix::process::getpid();
    let process =
        rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).map_err(|e| {
            let e = limits::explain(&e.into());
            format!("pidfd_open (needed to notice a peer's death): {e}")
        })?;
    let pid = own.as_raw_nonzero().get().unsigned_abs();
    send(socket, &pid.to_le_bytes(), &[process.as_fd()])
}

/// Step 2, on the host: the member's pid and pidfd.
pub(crate) fn receive_greeting(socket: &mut UnixStream) -> Result<(u32, OwnedFd), String> {
    let mut bytes = [0; PID_BYTES];
    let mut fds = receive_exact(socket, &mut bytes, 1)?;
    match (fds.pop(), fds.is_empty()) {
        (Some(process), true) => Ok((u32::from_le_bytes(bytes), process)),
        _ => Err("the member did not pass one descriptor of its process".to_owned()),
    }
}

/// Step 3: the host passes the segment to one member.
pub(crate) fn hand_over(
    socket: &UnixStream,
    nonce: &[u8; NONCE_BYTES],
    memory: BorrowedFd<'_>,
    arenas: Option<BorrowedFd<'_>>,
    members: &[(usize, u32, BorrowedFd<'_>)],
) -> Result<(), String> {
    let mut message = nonce.to_vec();
    message.extend_from_slice(&(members.len() as u32).to_le_bytes());
    message.extend_from_slice(&u32::from(arenas.is_some()).to_le_bytes());
    let mut fds = vec![memory];
    fds.extend(arenas);
    send(socket, &message, &fds)?;
    for members in members.chunks(MEMBERS_PER_MESSAGE) {
        let mut message = Vec::with_capacity(MEMBER_BYTES * members.len());
        for (seat, pid, _) in members {
            message.extend_from_slice(&(*seat as u32).to_le_bytes());
            message.extend_from_slice(&pid.to_le_bytes());
        }
        let fds: Vec<_> = members.iter().map(|(.., process)| *process).collect();
        send(socket, &message, &fds)?;
    }
    Ok(())
}

/// Step 3, on the member. The socket's read timeout is the deadline.
pub(crate) fn receive(socket: &mut UnixStream) -> Result<Roster, String> {
    let mut head = [0; NONCE_BYTES + 8];
    let mut fds = receive_exact(socket, &mut head, 2)?;
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&head[..NONCE_BYTES]);
    let (mut count, mut has_arenas) = ([0; 4], [0; 4]);
    count.copy_from_slice(&head[NONCE_BYTES..NONCE_BYTES + 4]);
    has_arenas.copy_from_slice(&head[NONCE_BYTES + 4..]);
    let count = u32::from_le_bytes(count) as usize;
    let memories = match u32::from_le_bytes(has_arenas) {
        0 => 1,
        1 => 2,
        other => return Err(format!("the list of members is garbled ({other})")),
    };
    if count > MAX_LOCAL_RANKS || fds.len() != memories {
        return Err(format!(
            "{} descriptors of memory came where {memories} were announced, for {count} members",
            fds.len()
        ));
    }
    let arenas = if memories == 2 { fds.pop() } else { None };
    let memory = fds.pop().ok_or("the segment did not come")?;
    let mut members = Vec::with_capacity(count);
    while members.len() < count {
        let next = (count - members.len()).min(MEMBERS_PER_MESSAGE);
        let mut bytes = [0; MEMBER_BYTES * MEMBERS_PER_MESSAGE];
        let bytes = &mut bytes[..MEMBER_BYTES * next];
        let processes = receive_exact(socket, bytes, next)
            .map_err(|e| format!("the list of members did not come: {e}"))?;
        if processes.len() != next {
            let came = processes.len();
            return Err(format!("{came} descriptors came for {next} members"));
        }
        let words = bytes.as_chunks::<4>().0.as_chunks::<2>().0;
        members.extend(words.iter().zip(processes).map(|([seat, pid], process)| {
            let seat = u32::from_le_bytes(*seat) as usize;
            (seat, u32::from_le_bytes(*pid), process)
        }));
    }
    Ok(Roster {
        nonce,
        memory,
        arenas,
        members,
    })
}

/// Sends all of `bytes` and, with the first of them, the descriptors.
pub(crate) fn send(
    socket: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), String> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(format!("{} descriptors do not fit one message", fds.len()));
    }
    let until = Instant::now() + FULL_PATIENCE;
    let sent = loop {
        let slices = [IoSlice::new(bytes)];
        match sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => break sent,
            Err(Errno::TOOMANYREFS) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(format!("passing descriptors: {e}")),
        }
    };
    // About a kilobyte at most into an empty socket buffer.
    if sent != bytes.len() {
        return Err(format!(
            "only {sent} of {} bytes could be sent",
            bytes.len()
        ));
    }
    Ok(())
}

/// Fills `bytes` and returns the descriptors that came along; more than
/// `most` are an error.
fn receive_exact(
    socket: &mut UnixStream,
    bytes: &mut [u8],
    most: usize,
) -> Result<Vec<OwnedFd>, String> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(most))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        &*socket,
        &mut [IoSliceMut::new(bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|e| format!("the other end sent nothing: {e}"))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.bytes == 0 {
        return Err("the other end closed the connection".to_owned());
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > most {
        return Err(format!(
            "more descriptors came than were agreed, or than can be taken: {}",
            limits::open_files()
        ));
    }
    socket
        .read_exact(&mut bytes[received.bytes..])
        .map_err(|e| format!("the message is incomplete: {e}"))?;
    Ok(fds)
}
