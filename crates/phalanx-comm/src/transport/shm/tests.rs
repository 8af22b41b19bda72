//! Shared memory: seals, passing of descriptors, and attacks by a hostile peer.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};

use super::super::layout::{Channel, Layout};
use super::super::poison::Poison;
use super::*;

const NONCE: [u8; 32] = [9; 32];

fn layout() -> Layout {
    Layout::new(2, 4096).unwrap()
}

fn process() -> OwnedFd {
    rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap()
}

/// A memfd of the right size and content, but with these seals.
fn forged(seals: SealFlags, bytes: usize) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("forged", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn two_mappings_are_one_segment() {
    let (fd, host) = create(layout(), &NONCE).unwrap();
    let guest = open(&fd, 2, &NONCE).unwrap();
    let (mut tx, _) = host.ends(Channel::Collectives, 0, 1);
    let (_, mut rx) = guest.ends(Channel::Collectives, 1, 0);
    let data: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let mut got = Vec::new();
    let mut sent = 0;
    while got.len() < data.len() {
        sent += tx.write(&data[sent..], || host.bell(1).ring()).unwrap();
        let mut piece = [0; 1000];
        let n = rx.read(&mut piece, || guest.bell(0).ring()).unwrap();
        got.extend_from_slice(&piece[..n]);
    }
    assert_eq!(got, data);
    assert!(guest.poison(&Poison::new(1, "cause")));
    assert_eq!(host.poisoned(), Some(Poison::new(1, "cause")));
}

#[test]
fn a_bell_rings_across_mappings() {
    use crate::wait::{Budget, Policy, Wake};
    let (fd, host) = create(layout(), &NONCE).unwrap();
    let guest = open(&fd, 2, &NONCE).unwrap();
    let budget = Budget::new(Policy::Block, 2, 1);
    let wake = std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            budget.wait(guest.bell(1), true, Duration::from_secs(60), || {
                host.has_left(0)
            })
        });
        std::thread::sleep(Duration::from_millis(30));
        host.leave(0);
        sleeper.join().unwrap()
    });
    assert_ne!(wake, Wake::Elapsed);
}

#[test]
fn the_segment_cannot_change_its_size() {
    let (fd, _segment) = create(layout(), &NONCE).unwrap();
    let size = layout().total() as u64;
    assert!(rustix::fs::ftruncate(&fd, size - 4096).is_err());
    assert!(rustix::fs::ftruncate(&fd, size + 4096).is_err());
    assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    assert!(
        rustix::io::fcntl_getfd(&fd)
            .unwrap()
            .contains(rustix::io::FdFlags::CLOEXEC)
    );
}

#[test]
fn an_unsealed_segment_is_refused_before_it_is_mapped() {
    for seals in [
        SealFlags::empty(),
        SealFlags::SHRINK,
        SealFlags::SHRINK | SealFlags::GROW,
        SealFlags::GROW | SealFlags::SEAL,
    ] {
        let e = open(&forged(seals, layout().total()), 2, &NONCE)
            .err()
            .unwrap();
        assert!(e.contains("not sealed"), "{seals:?}: {e}");
    }
}

#[test]
fn what_is_no_segment_is_refused() {
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert!(
        open(&forged(all, layout().total()), 2, &NONCE).is_err(),
        "zeroes"
    );
    assert!(open(&forged(all, 0), 2, &NONCE).is_err(), "empty");
    let pipe = rustix::pipe::pipe().unwrap().0;
    assert!(
        open(&pipe, 2, &NONCE)
            .err()
            .unwrap()
            .contains("not a memfd")
    );
    let (fd, _segment) = create(layout(), &NONCE).unwrap();
    assert!(open(&fd, 3, &NONCE).is_err(), "other number of seats");
    assert!(open(&fd, 2, &[8; 32]).err().unwrap().contains("nonce"));
}

#[test]
fn descriptors_travel() {
    let (host, mut member) = UnixStream::pair().unwrap();
    let (fd, _segment) = create(layout(), &NONCE).unwrap();
    let processes = [process(), process()];
    let list = [(0, 41, processes[0].as_fd()), (1, 42, processes[1].as_fd())];
    hand_over(&host, &NONCE, fd.as_fd(), None, &list).unwrap();
    let roster = receive(&mut member).unwrap();
    assert_eq!(roster.nonce, NONCE);
    let seats: Vec<_> = roster
        .members
        .iter()
        .map(|(seat, pid, _)| (*seat, *pid))
        .collect();
    assert_eq!(seats, [(0, 41), (1, 42)]);
    assert!(open(&roster.memory, 2, &NONCE).is_ok());
    for fd in roster
        .members
        .iter()
        .map(|(.., fd)| fd)
        .chain([&roster.memory])
    {
        assert!(
            rustix::io::fcntl_getfd(fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
    }
}

#[test]
fn a_full_host_is_listed_in_several_messages() {
    crate::limits::raise_open_files();
    let (host, mut member) = UnixStream::pair().unwrap();
    let (fd, _segment) = create(layout(), &NONCE).unwrap();
    let process = process();
    let list: Vec<_> = (0..super::super::layout::MAX_LOCAL_RANKS)
        .map(|seat| (seat, 1, process.as_fd()))
        .collect();
    hand_over(&host, &NONCE, fd.as_fd(), None, &list).unwrap();
    let roster = receive(&mut member).unwrap();
    let seats: Vec<_> = roster.members.iter().map(|(seat, ..)| *seat).collect();
    assert_eq!(seats, (0..list.len()).collect::<Vec<_>>());
}

/// `ftruncate` beyond the limit would end the process: so this test requests a size that no limit allows.
#[test]
fn a_segment_beyond_the_file_size_limit_is_refused() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Fsize);
    let most = before.maximum.unwrap_or(u64::MAX).min(1 << 40);
    let lowered = Rlimit {
        current: Some(most),
        maximum: before.maximum,
    };
    setrlimit(Resource::Fsize, lowered).unwrap();
    let refused = sealed_memfd("test", most as usize + 1);
    setrlimit(Resource::Fsize, before).unwrap();
    let error = refused.unwrap_err();
    assert!(error.contains("ulimit -f"), "{error}");
}

#[test]
fn greetings_carry_exactly_one_descriptor() {
    let (mut host, member) = UnixStream::pair().unwrap();
    greet(&member).unwrap();
    let (pid, _process) = receive_greeting(&mut host).unwrap();
    assert_eq!(pid, std::process::id());

    let (mut host, mut member) = UnixStream::pair().unwrap();
    member.write_all(&[1, 0, 0, 0]).unwrap();
    assert!(receive_greeting(&mut host).is_err(), "none");

    let (mut host, member) = UnixStream::pair().unwrap();
    drop(member);
    assert!(receive_greeting(&mut host).is_err(), "closed");
}

#[test]
fn a_list_that_does_not_fit_its_descriptors_is_refused() {
    let (fd, _segment) = create(layout(), &NONCE).unwrap();
    for count in [0_u32, 2, 129, u32::MAX] {
        let (host, mut member) = UnixStream::pair().unwrap();
        // `hand_over` with one member, then the count is overwritten.
        let mut message = NONCE.to_vec();
        message.extend_from_slice(&count.to_le_bytes());
        message.extend_from_slice(&[0; 8]);
        passing_send(&host, &message, &fd);
        host.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(receive(&mut member).is_err(), "{count}");
    }
}

fn passing_send(socket: &UnixStream, bytes: &[u8], fd: &OwnedFd) {
    super::passing::send(socket, bytes, &[fd.as_fd(), fd.as_fd()]).unwrap();
}

#[test]
fn our_own_socket_belongs_to_our_user() {
    let (a, _b) = UnixStream::pair().unwrap();
    check_same_user(&a).unwrap();
}

#[test]
fn a_host_that_does_not_accept_is_given_up() {
    use std::os::linux::net::SocketAddrExt;
    use std::time::Instant;
    let name = format!("phalanx-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let start = Instant::now();
    let mut waiting = Vec::new();
    let error = loop {
        match connect(&name, Instant::now() + Duration::from_millis(20)) {
            Ok(socket) => waiting.push(socket),
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
    assert!(!waiting.is_empty());
    assert!(start.elapsed() < Duration::from_secs(60));
    // There is room again as soon as a connection is accepted.
    let _taken = listener.accept().unwrap();
    let socket = connect(&name, Instant::now()).unwrap();
    assert!(
        !rustix::fs::fcntl_getfl(&socket)
            .unwrap()
            .contains(rustix::fs::OFlags::NONBLOCK)
    );
}
