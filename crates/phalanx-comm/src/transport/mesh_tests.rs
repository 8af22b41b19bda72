//! Properties of a mesh of threads.

use super::super::testing::{PATIENCE, SOON, exchange, loiter, on_all, recv_byte};

/// How often a wake-up is tried: a missed wake-up costs 100 ms every time, a busy
/// machine only now and then.
const TRIES: usize = 200;
use super::*;
use crate::ErrorKind;

#[test]
fn every_pair_exchanges_bytes() {
    for world in [1, 2, 3, 5, 8] {
        for (ring, bytes) in [(64, 3_000), (4096, 50_000), (0, 300_000)] {
            on_all(thread_mesh(world, ring), |mut mesh| {
                assert_eq!(mesh.world(), world);
                for (_, kind) in mesh.describe() {
                    assert_eq!(kind, TransportKind::Thread);
                }
                assert_eq!(mesh.describe().len(), world - 1);
                exchange(&mut mesh, bytes).unwrap();
                exchange(&mut mesh, 1).unwrap();
            });
        }
    }
}

#[test]
fn an_empty_world_has_no_ranks() {
    assert!(thread_mesh(0, 0).is_empty());
}

#[test]
fn idle_keeps_its_deadline() {
    let mut meshes = thread_mesh(2, 0);
    let start = Instant::now();
    let until = start + Duration::from_millis(30);
    let want = [
        Interest::default(),
        Interest {
            send: false,
            recv: true,
            ..Interest::default()
        },
    ];
    let mut spins = 0;
    while Instant::now() < until {
        meshes[0].idle(&want, spins, until).unwrap();
        spins += 1;
    }
    assert!(start.elapsed() < SOON);
    // Sleeping, not spinning: about two rounds, not thousands.
    assert!(spins < 50, "{spins} rounds");
}

#[test]
fn idle_returns_at_once_when_there_is_something() {
    let mut meshes = thread_mesh(2, 64);
    assert_eq!(meshes[1].link(0).try_send(b"x").unwrap(), 1);
    let start = Instant::now();
    let want = [
        Interest::default(),
        Interest {
            send: false,
            recv: true,
            ..Interest::default()
        },
    ];
    // Sleeping would take a slice of 100 ms each time.
    for _ in 0..1000 {
        meshes[0].idle(&want, 7, start + PATIENCE).unwrap();
    }
    assert!(start.elapsed() < SOON);
}

#[test]
fn abort_from_another_thread_wakes_all_sleepers() {
    let at_once = (0..TRIES)
        .map(|_| {
            let meshes = thread_mesh(4, 0);
            let handle = meshes[2].abort_handle();
            let poison = Poison::new(2, "out of memory");
            let start = std::thread::scope(|scope| {
                let aborter = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    let start = Instant::now();
                    handle.poison(&poison);
                    start
                });
                let ends = on_all(meshes, |mut mesh| {
                    let peer = (mesh.rank() + 1) % 4;
                    let e = recv_byte(&mut mesh, peer).unwrap_err();
                    let end = Instant::now();
                    assert_eq!(e.kind(), ErrorKind::Aborted);
                    assert_eq!(e.origin_rank(), Some(2));
                    assert!(e.to_string().contains("out of memory"), "{e}");
                    end
                });
                let start = aborter.join().unwrap();
                ends.into_iter().map(|end| end.duration_since(start)).max()
            });
            assert_eq!(handle.poisoned().unwrap().cause, "out of memory");
            start.unwrap()
        })
        .any(|took| took < Duration::from_millis(60));
    assert!(at_once, "a slice was waited for in each of {TRIES} tries");
}

#[test]
fn first_cause_is_what_everybody_hears() {
    let meshes = thread_mesh(2, 0);
    meshes[0].abort_handle().poison(&Poison::new(0, "first"));
    meshes[1].abort_handle().poison(&Poison::new(1, "second"));
    on_all(meshes, |mut mesh| {
        let e = loiter(&mut mesh, PATIENCE).unwrap_err();
        assert_eq!(e.origin_rank(), Some(0));
        assert!(e.to_string().contains("first"));
    });
}

#[test]
fn leaving_is_a_loss_only_for_those_who_expect_something() {
    let mut meshes = thread_mesh(3, 64);
    let mut leaver = meshes.pop().unwrap();
    assert_eq!(leaver.link(0).try_send(b"a").unwrap(), 1);
    drop(leaver);
    on_all(meshes, |mut mesh| {
        if mesh.rank() == 0 {
            // What was written before leaving is still there.
            assert_eq!(recv_byte(&mut mesh, 2).unwrap(), b'a');
            let e = recv_byte(&mut mesh, 2).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::PeerLost);
            assert_eq!(e.peer(), Some(2));
            // So is room to send, until it is full.
            assert_eq!(mesh.link(2).try_send(&[0; 100]).unwrap(), 64);
            let mut want = vec![Interest::default(); 3];
            want[2].send = true;
            let e = mesh.idle(&want, 0, Instant::now() + PATIENCE).unwrap_err();
            assert_eq!(e.peer(), Some(2));
        } else {
            loiter(&mut mesh, Duration::from_millis(150)).unwrap();
        }
    });
}

#[test]
fn a_sleeper_is_woken_when_its_peer_leaves() {
    let mut meshes = thread_mesh(2, 64);
    let mut waiter = meshes.remove(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || recv_byte(&mut waiter, 1).unwrap_err());
        std::thread::sleep(Duration::from_millis(20));
        drop(meshes);
        assert_eq!(waiting.join().unwrap().kind(), ErrorKind::PeerLost);
    });
}

#[test]
fn a_panicking_rank_poisons_the_group() {
    let mut meshes = thread_mesh(2, 64);
    let victim = meshes.pop().unwrap();
    let panicked = std::thread::spawn(move || {
        let _mesh = victim;
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(panicked.join().is_err());
    let e = loiter(&mut meshes[0], PATIENCE).unwrap_err();
    assert_eq!(e.origin_rank(), Some(1));
    assert!(e.to_string().contains("panicked"), "{e}");
}

#[test]
fn a_lying_peer_is_a_protocol_error_that_names_it() {
    let meshes = thread_mesh(2, 64);
    // Rank 1 claims to have written more than the ring holds.
    let layout = Layout::new(2, 64).unwrap();
    meshes[0]
        .shared
        .segment
        .scribble(layout.ring(Channel::Collectives, 1, 0), 1000);
    let mut mesh = meshes.into_iter().next().unwrap();
    let e = recv_byte(&mut mesh, 1).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol);
    assert_eq!(e.peer(), Some(1));
}

#[test]
fn a_link_to_oneself_is_an_error_not_a_panic() {
    let mut meshes = thread_mesh(1, 0);
    assert_eq!(
        meshes[0].link(0).try_send(b"x").unwrap_err().kind(),
        ErrorKind::Internal
    );
    assert_eq!(
        meshes[0].link(0).try_recv(&mut [0]).unwrap_err().kind(),
        ErrorKind::Internal
    );
}

/// One wait at least of rank 0 ends at once when `act` of rank 1 ends it after
/// 30 ms.
fn woken_after(want: Interest, prepare: impl Fn(&mut Mesh), act: impl Fn(&mut Mesh) + Sync) {
    let mut tries = (0..TRIES).map(|_| {
        let mut meshes = thread_mesh(2, 64);
        let mut other = meshes.remove(1);
        let mut mesh = meshes.remove(0);
        prepare(&mut mesh);
        std::thread::scope(|scope| {
            let acting = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                let start = Instant::now();
                act(&mut other);
                start
            });
            // One call, asleep from the start: spins > 0.
            let until = Instant::now() + PATIENCE;
            mesh.idle(&[Interest::default(), want], 1, until).unwrap();
            Instant::now().saturating_duration_since(acting.join().unwrap())
        })
    });
    let at_once = tries.any(|took| took < Duration::from_millis(60));
    assert!(at_once, "a slice was waited for in each of {TRIES} tries");
}

#[test]
fn bytes_wake_a_sleeper() {
    let want = Interest {
        send: false,
        recv: true,
        ..Interest::default()
    };
    woken_after(
        want,
        |_| (),
        |other| assert_eq!(other.link(0).try_send(b"x").unwrap(), 1),
    );
}

#[test]
fn freed_space_wakes_a_sleeper() {
    let want = Interest {
        send: true,
        recv: false,
        ..Interest::default()
    };
    woken_after(
        want,
        |mesh| assert_eq!(mesh.link(1).try_send(&[0; 64]).unwrap(), 64),
        |other| assert_eq!(other.link(0).try_recv(&mut [0; 8]).unwrap(), 8),
    );
}
