//! Helpers of the transport tests.

use std::time::{Duration, Instant};

use super::{Interest, Mesh};
use crate::Result;

/// Longest wait of a test; reaching it is a failure.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Limit for events that happen at once, also on a busy machine.
pub(super) const SOON: Duration = Duration::from_secs(30);

/// Byte `i` of the data that `from` sends to `to`.
pub(super) fn pattern(from: usize, to: usize, i: usize) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 8) ^ (from * 7 + to * 13)) as u8
}

/// Every rank sends `bytes` to every peer and receives as many from each;
/// checks every byte.
pub(super) fn exchange(mesh: &mut Mesh, bytes: usize) -> Result<()> {
    let (me, world) = (mesh.rank(), mesh.world());
    let out: Vec<Vec<u8>> = (0..world)
        .map(|to| (0..bytes).map(|i| pattern(me, to, i)).collect())
        .collect();
    let mut into: Vec<Vec<u8>> = vec![vec![0; bytes]; world];
    let (mut sent, mut got) = (vec![0; world], vec![0; world]);
    (sent[me], got[me]) = (bytes, bytes);
    let until = Instant::now() + PATIENCE;
    let mut spins = 0;
    loop {
        let mut progress = 0;
        let mut want = vec![Interest::default(); world];
        for peer in (0..world).filter(|&p| p != me) {
            if sent[peer] < bytes {
                let n = mesh.link(peer).try_send(&out[peer][sent[peer]..])?;
                sent[peer] += n;
                progress += n;
            }
            if got[peer] < bytes {
                let n = mesh.link(peer).try_recv(&mut into[peer][got[peer]..])?;
                got[peer] += n;
                progress += n;
            }
            want[peer] = Interest {
                send: sent[peer] < bytes,
                recv: got[peer] < bytes,
                ..Interest::default()
            };
        }
        if !want.iter().any(|w| w.any()) {
            break;
        }
        if progress > 0 {
            spins = 0;
            continue;
        }
        assert!(
            Instant::now() < until,
            "rank {me} stuck: sent {sent:?} got {got:?} of {bytes}"
        );
        mesh.idle(&want, spins, until)?;
        spins += 1;
    }
    for from in (0..world).filter(|&p| p != me) {
        for (i, byte) in into[from].iter().enumerate() {
            assert_eq!(*byte, pattern(from, me, i), "byte {i} from {from} to {me}");
        }
    }
    Ok(())
}

/// Runs `body` for every mesh in its own thread and returns the results in rank order.
pub(super) fn on_all<T: Send>(meshes: Vec<Mesh>, body: impl Fn(Mesh) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = meshes
            .into_iter()
            .map(|mesh| scope.spawn(move || body(mesh)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Waits for a byte of `peer` until it comes or the wait fails.
pub(super) fn recv_byte(mesh: &mut Mesh, peer: usize) -> Result<u8> {
    let mut want = vec![Interest::default(); mesh.world()];
    want[peer].recv = true;
    let until = Instant::now() + PATIENCE;
    let mut byte = [0];
    for spins in 0.. {
        if mesh.link(peer).try_recv(&mut byte)? == 1 {
            break;
        }
        assert!(Instant::now() < until, "no byte from rank {peer}");
        mesh.idle(&want, spins, until)?;
    }
    Ok(byte[0])
}

/// Waits for `duration` without awaiting any peer.
pub(super) fn loiter(mesh: &mut Mesh, duration: Duration) -> Result<()> {
    let want = vec![Interest::default(); mesh.world()];
    let until = Instant::now() + duration;
    while Instant::now() < until {
        mesh.idle(&want, 1, until)?;
    }
    Ok(())
}
