//! Fuzzes what a rank reads from its peers while a group forms and ends, and the memory
//! that it shares with them.

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_store::{MemStore, Store, auth};
use phalanx_wire::Token;
use phalanx_wire::frame::{Header, Kind};
use phalanx_wire::handshake::{Hello, RejectReason, Role};

use super::first_cause;
use super::form::{MEMBER_TITLE, Member, Rendezvous};
use super::layout::{Channel, Layout};
use super::poison::MAX_CAUSE_BYTES;
use super::segment::Segment;
use super::shm;
use super::tcp::Control;
use crate::region::Region;

/// A rank's record in the store.
pub(crate) fn member(data: &[u8]) {
    if let Ok(member) = Member::decode(data) {
        assert_eq!(Member::decode(&member.encode()).as_ref(), Ok(&member));
    }
}

pub(crate) fn member_seeds() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"instance":7,"process":"process 7 on a","world":4,"prefer":"auto","host":{"machine":"b/1","hint":"b/1/0"},
            "share":"2 threads on 0-3 quota 2","address":"127.0.0.1:4000"}"#,
        r#"{"instance":1,"process":"process 1 on b","world":2,"prefer":"shm","host":{"machine":"","hint":""},
            "share":"1 threads on 0","address":null}"#,
        r#"{"instance":9,"process":"","world":2,"prefer":"tcp","host":{"machine":"m","hint":"h"},
            "share":"1 threads on 0","address":"[::1]:9"}"#,
    ];
    texts
        .map(|text| format!("{MEMBER_TITLE}\n{text}").into_bytes())
        .into()
}

/// The first cause of a failure, on which the hosts have agreed.
pub(crate) fn first_cause(data: &[u8]) {
    if let Some(poison) = first_cause::decode(data) {
        assert!(poison.cause.len() <= MAX_CAUSE_BYTES);
        assert_eq!(
            first_cause::decode(&first_cause::encode(&poison)),
            Some(poison)
        );
    }
}

pub(crate) fn first_cause_seeds() -> Vec<Vec<u8>> {
    let long = format!("3\n{}", "é".repeat(MAX_CAUSE_BYTES));
    ["0\nrank 0 panicked", "12\na cause\nof two lines", &long]
        .map(|text| text.as_bytes().to_vec())
        .into()
}

/// The mark of a rank that could not form the group.
pub(crate) fn failure_mark(data: &[u8]) {
    let store = MemStore::new();
    let timeout = Duration::from_secs(1);
    let meeting = Rendezvous {
        server: None,
        job: 0,
        store: &store,
        rank: 0,
        world: 2,
        generation: 0,
        group: 0,
        timeout,
        deadline: Instant::now() + timeout,
        lost: &super::none_lost,
        taken: Default::default(),
        misfit: Default::default(),
        waits: Default::default(),
    };
    if store.set("comm/0/0/2/failed", data).is_ok() {
        assert!(meeting.check().is_err());
    }
}

pub(crate) fn failure_mark_seeds() -> Vec<Vec<u8>> {
    vec![
        b"1\nno such file".to_vec(),
        b"18446744073709551615\n".to_vec(),
        b"lost 2\nrank 2 is gone".to_vec(),
    ]
}

/// Ranks and ring bytes of the segments here.
const SEATS: usize = 3;
const RING_BYTES: usize = 64;

fn layout() -> Option<Layout> {
    Layout::new(SEATS, RING_BYTES)
}

/// Untrusted memory that also changes: the first half of `data` is its header and rings
/// when it is opened, the second half their contents afterwards.
pub(crate) fn segment(data: &[u8]) {
    let Some(layout) = layout() else { return };
    let (before, after) = data.split_at(data.len() / 2);
    let Ok(region) = Region::anonymous(layout.total()) else {
        return;
    };
    let write = |write: &mut dyn FnMut(usize, u64), bytes: &[u8]| {
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            if 8 * i + 8 <= layout.total() {
                write(8 * i, u64::from_le_bytes(*word));
            }
        }
    };
    let store = std::sync::atomic::Ordering::SeqCst;
    write(&mut |at, word| region.u64_at(at).store(word, store), before);
    let mut nonce = [0; 32];
    for (i, bytes) in nonce.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *bytes = region
            .u64_at(Layout::NONCE + 8 * i)
            .load(store)
            .to_le_bytes();
    }
    let Ok(segment) = Segment::open(region, SEATS, &nonce) else {
        return;
    };
    assert_eq!(segment.seats(), SEATS);
    write(&mut |at, word| segment.scribble(at, word), after);
    for seat in 0..SEATS {
        let _ = segment.has_left(seat);
        let _ = segment.is_taken(seat);
    }
    let (mut producer, mut consumer) = segment.ends(Channel::Collectives, 0, 1);
    let mut bytes = [0; 3 * RING_BYTES];
    let _ = producer.writable();
    // A larger ring capacity is accepted if the total size does not change: every
    // access is still inside.
    if let Ok(count) = producer.write(&bytes, || ()) {
        assert!(count <= bytes.len());
    }
    if let Ok(count) = consumer.read(&mut bytes, || ()) {
        assert!(count <= bytes.len());
    }
    let _ = consumer.readable();
    // In any state other than set or clear a reader would wait for the writer; not in a
    // fuzz target.
    const SET: u8 = 2;
    let state = after.get(Layout::POISON_STATE..Layout::POISON_STATE + 4);
    if state.is_some_and(|state| state[0] & 3 == SET) && segment.is_poisoned() {
        // Each lossy character takes up to three bytes for one.
        let cause = segment.poisoned().map(|poison| poison.cause.len());
        assert!(cause.is_some_and(|bytes| bytes <= MAX_CAUSE_BYTES));
    }
    segment.ring_all();
}

pub(crate) fn segment_seeds() -> Vec<Vec<u8>> {
    let whole = || -> Option<Vec<u8>> {
        let layout = layout()?;
        let region = Region::anonymous(layout.total()).ok()?;
        let segment = Segment::create(region, layout, &[7; 32]);
        segment.sit(1);
        let mut bytes = segment.head();
        segment.poison(&super::Poison::new(2, "disk full"));
        bytes.extend(segment.head());
        Some(bytes)
    };
    whole().into_iter().collect()
}

/// The message by which the host passes a segment: bytes and one descriptor.
pub(crate) fn roster(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    let Ok((host, mut member)) = UnixStream::pair() else {
        return;
    };
    let _ = member.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = host.set_write_timeout(Some(Duration::from_millis(10)));
    let rest = &rest[..rest.len().min(4096)];
    let Some(layout) = layout() else { return };
    let Ok((memory, _)) = shm::create(layout, &[7; 32]) else {
        return;
    };
    // Several copies of one descriptor, as pidfds too.
    let fds = vec![memory.as_fd(); usize::from(first % 4)];
    if rest.is_empty() || shm::send(&host, rest, &fds).is_err() {
        return;
    }
    let _ = host.shutdown(Shutdown::Both);
    if first & 4 == 0 {
        let _ = shm::receive_greeting(&mut member);
    } else if let Ok(roster) = shm::receive(&mut member) {
        let memories = 1 + usize::from(roster.arenas.is_some());
        assert_eq!(memories + roster.members.len(), fds.len());
        if let Some(arenas) = &roster.arenas {
            let size = shm::sealed_size(arenas, layout.total());
            assert!(size.is_ok_and(|bytes| bytes <= layout.total()));
        }
        let _ = shm::open(&roster.memory, SEATS, &roster.nonce);
    }
}

pub(crate) fn roster_seeds() -> Vec<Vec<u8>> {
    // Three descriptors: of the segment, perhaps of the arenas, of members.
    let roster = |has_arenas: u32| {
        let mut roster = vec![4 + 3];
        roster.extend([7; 32]);
        let members = 2 - has_arenas;
        roster.extend(members.to_le_bytes());
        roster.extend(has_arenas.to_le_bytes());
        for seat in 0..members {
            roster.extend(seat.to_le_bytes());
            roster.extend(4711_u32.to_le_bytes());
        }
        roster
    };
    vec![roster(0), roster(1), vec![1, 103, 18, 0, 0]]
}

thread_local! {
    static DOOR: Option<TcpListener> = TcpListener::bind("127.0.0.1:0").ok();
}

/// A peer's control stream.
pub(crate) fn control(data: &[u8]) {
    let pair = DOOR.with(|door| {
        let door = door.as_ref()?;
        let peer = TcpStream::connect(door.local_addr().ok()?).ok()?;
        let stream = door.accept().ok()?.0;
        stream.set_nonblocking(true).ok()?;
        Some((peer, stream))
    });
    let Some((mut peer, stream)) = pair else {
        return;
    };
    // No port stays taken.
    let _ = rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO));
    let Some(alone) = Layout::new(1, RING_BYTES) else {
        return;
    };
    let Ok(segment) = Segment::private(alone) else {
        return;
    };
    let control = Control::new(1, (0, 0), stream, Arc::new(segment));
    if peer.write_all(&data[..data.len().min(4096)]).is_err() {
        return;
    }
    let _ = control.pump();
    drop(peer);
    // Whatever it sent, it is gone.
    let start = Instant::now();
    while control.pump().is_none() && start.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert!(!control.is_open());
}

pub(crate) fn control_seeds() -> Vec<Vec<u8>> {
    let frame = |kind, cause: &[u8]| {
        let mut header = Header::new(kind);
        header.root = 1;
        header.length = cause.len() as u32;
        [&header.encode()[..], cause].concat()
    };
    vec![
        frame(Kind::Abort, b"disk full"),
        frame(Kind::Goodbye, b""),
        frame(Kind::Data, b""),
    ]
}

/// The Unix socket over which a host passes its memory. The first byte selects the
/// peer: a stranger that sends the other bytes, or a member whose hello and then
/// greeting are made of them.
pub(crate) fn unix_hello(data: &[u8]) {
    let (Some((first, rest)), Ok((mut host, mut guest))) = (data.split_first(), UnixStream::pair())
    else {
        return;
    };
    let rest = &rest[..rest.len().min(4096)];
    let Ok(token) = Token::from_hex(&"07".repeat(32)) else {
        return;
    };
    let me = Hello::new(Role::SharedMemory, token.job_id())
        .rank(0)
        .world(3);
    let patience = Duration::from_secs(5);
    let decide = |peer: &Hello| {
        me.check_same_group(peer)?;
        match peer.role {
            Role::SharedMemory => Ok(me),
            _ => Err(RejectReason::WrongRole),
        }
    };
    if first & 1 == 0 {
        let _ = guest.write_all(rest);
        let _ = guest.shutdown(Shutdown::Write);
        // It has no token, so it proves nothing.
        assert!(auth::accept(&mut host, &token, patience, decide).is_err());
        return;
    }
    let mut field = rest.iter().copied();
    let mut next = || field.next().map_or(0, u32::from);
    let roles = [
        Role::SharedMemory,
        Role::Peer,
        Role::Control,
        Role::StoreClient,
    ];
    let role = roles[next() as usize % 4];
    let hello = Hello::new(role, token.job_id() ^ u64::from(next() & 1))
        .rank(next())
        .world(next())
        .generation(next())
        .group(next())
        .stream(next() as u16);
    let is_member = me.check_same_group(&hello).is_ok() && hello.role == Role::SharedMemory;
    std::thread::scope(|scope| {
        let token = &token;
        let comes = scope.spawn(move || {
            let met = auth::initiate(&mut guest, hello, token, patience);
            if met.is_ok() {
                let greeting = rest.get(7..).unwrap_or_default();
                let fds = vec![guest.as_fd(); usize::from(first >> 1) % 4];
                if !greeting.is_empty() {
                    let _ = shm::send(&guest, greeting, &fds);
                }
            }
            let _ = guest.shutdown(Shutdown::Both);
            met.is_ok()
        });
        let accepted = auth::accept(&mut host, token, patience, decide);
        assert_eq!(accepted.is_ok(), is_member);
        if accepted.is_ok() {
            let _ = host.set_read_timeout(Some(patience));
            if let Ok((pid, _)) = shm::receive_greeting(&mut host) {
                let sent = rest.get(7..11).and_then(|bytes| bytes.first_chunk());
                assert_eq!(sent.map(|bytes| u32::from_le_bytes(*bytes)), Some(pid));
            }
        }
        drop(host);
        assert_eq!(comes.join().ok(), Some(is_member));
    });
}

pub(crate) fn unix_hello_seeds() -> Vec<Vec<u8>> {
    // The world is 3, generation and group are 0; one descriptor and a pid.
    let member = |descriptors: u8| {
        let mut bytes = vec![1 + 2 * descriptors, 0, 0, 1, 3, 0, 0, 0];
        bytes.extend(4711_u32.to_le_bytes());
        bytes
    };
    let mut stranger = vec![0];
    stranger.extend(b"PHHS\x01\x01\x44\0");
    stranger.resize(77, 9);
    vec![
        member(1),
        member(0),
        member(3),
        stranger,
        b"\0GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![1, 1, 1, 9, 9, 9, 9, 9],
    ]
}
