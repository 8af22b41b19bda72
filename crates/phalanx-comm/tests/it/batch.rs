//! Sends and receives that run together.

use std::time::{Duration, Instant};

use phalanx_comm::{Call, ErrorKind, P2POp};

use crate::common::{EVERYWHERE, Over, SOON, groups, on_each, values};

/// Message k from one rank to another: its seed and its length.
fn message(from: usize, to: usize, k: usize) -> Vec<f32> {
    let len = [0, 1, 700, 5000][(from + 2 * to + k) % 4];
    values(from * 64 + to * 8 + k, len)
}

/// Everybody sends three messages to everybody, each rank in an order of its
/// own, sends and receives mixed; most are longer than a ring.
#[test]
fn any_order_on_both_sides_arrives() {
    const MESSAGES: usize = 3;
    for over in EVERYWHERE {
        for world in 2..=8 {
            on_each(groups(over, world), |group| {
                let me = group.rank();
                let peers: Vec<usize> = (1..world).map(|k| (me + k) % world).collect();
                let mut outgoing = Vec::new();
                let mut incoming = Vec::new();
                for k in 0..MESSAGES {
                    for &peer in &peers {
                        outgoing.push((peer, message(me, peer, k)));
                        incoming.push((peer, k, vec![0f32; message(peer, me, k).len()]));
                    }
                }
                let sends = outgoing.iter().map(|(to, data)| P2POp::send(data, *to));
                let recvs = incoming
                    .iter_mut()
                    .map(|(from, _, place)| P2POp::recv(place, *from));
                let mut ops: Vec<P2POp<'_>> = if me % 2 == 0 {
                    sends.chain(recvs).collect()
                } else {
                    recvs.chain(sends).collect()
                };
                if me % 3 == 0 {
                    // Interleaved, with order to and from each peer kept.
                    let half = ops.split_off(ops.len() / 2);
                    ops = ops
                        .into_iter()
                        .zip(half)
                        .flat_map(|(a, b)| [b, a])
                        .collect();
                }
                group.batch_send_recv(ops).unwrap();
                for (from, k, got) in &incoming {
                    assert_eq!(*got, message(*from, me, *k), "{over:?} {from} to {me}, {k}");
                }
            });
        }
    }
}

#[test]
fn a_batch_meets_lone_sends_and_receives() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            let (a, b) = (values::<f32>(1, 3000), values::<i64>(2, 10));
            let (mut x, mut y) = (vec![0f32; 3000], vec![0i64; 10]);
            if group.rank() == 0 {
                let ops = [
                    P2POp::send(&a, 1),
                    P2POp::recv(&mut y, 1),
                    P2POp::send(&b, 1),
                ];
                group.batch_send_recv(ops).unwrap();
            } else {
                group.recv(&mut x, 0).unwrap();
                group.send(&b, 0).unwrap();
                group.recv(&mut y, 0).unwrap();
                assert_eq!(x, a);
            }
            assert_eq!(y, b);
            group.batch_send_recv([]).unwrap();
            group.barrier().unwrap();
        });
    }
}

#[test]
fn another_type_is_a_desync_that_names_both_sides() {
    let errors = on_each(groups(Over::Thread, 2), |group| {
        if group.rank() == 0 {
            group.batch_send_recv([P2POp::send(&[1f32; 4], 1)])?;
            group.barrier()
        } else {
            group.batch_send_recv([P2POp::recv(&mut [0i32; 4], 0)])
        }
    });
    let error = errors[1].as_ref().unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Desync, Some(0)));
    let text = error.to_string();
    assert!(text.contains("batch_send_recv"), "{text}");
    assert!(
        text.contains("send/recv i32 of 4 elements from rank 0"),
        "{text}"
    );
    assert!(
        text.contains("send/recv f32 of 4 elements from rank 0"),
        "{text}"
    );
    assert_eq!(errors[0].as_ref().unwrap_err().kind(), ErrorKind::Aborted);
}

#[test]
fn who_does_not_send_is_named_at_the_deadline() {
    let start = Instant::now();
    let errors = on_each(groups(Over::Thread, 3), |group| {
        if group.rank() == 1 {
            return Ok(());
        }
        let group = group.with_call(Call {
            timeout: Some(Duration::from_millis(300)),
            label: Some("pipeline stage 2".into()),
            ..Call::default()
        });
        if group.rank() == 0 {
            let (mut a, mut b) = ([0u8; 3], [0u8; 3]);
            group.batch_send_recv([P2POp::recv(&mut a, 2), P2POp::recv(&mut b, 1)])
        } else {
            group.batch_send_recv([P2POp::send(&[7u8; 3], 0)])
        }
    });
    let error = errors[0].as_ref().unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout | ErrorKind::PeerLost),
        "{text}"
    );
    assert_eq!(error.peer(), Some(1), "{text}");
    assert!(
        text.contains("batch_send_recv of pipeline stage 2"),
        "{text}"
    );
    assert!(start.elapsed() < SOON);
}

#[test]
fn mistakes_are_named_before_anything_is_sent() {
    on_each(groups(Over::Thread, 2), |group| {
        let rank = group.rank();
        for (peer, name) in [
            (rank, "batch_send_recv: a rank does not talk to itself"),
            (9, "batch_send_recv: rank 9 does not exist"),
        ] {
            let ops = [P2POp::send(&[1u8], 1 - rank), P2POp::send(&[1u8], peer)];
            let error = group.batch_send_recv(ops).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(name), "{error}");
        }
        group.barrier().unwrap();
    });
}
