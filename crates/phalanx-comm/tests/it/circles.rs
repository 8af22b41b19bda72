//! Ranks that wait for each other in a circle: found long before the deadline,
//! with the whole circle in the text; and waits that only are long.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx_comm::{
    Bucket, Call, Error, ErrorKind, InitOptions, P2POp, Peer, ProcessGroup, ReduceOp,
};

use crate::common::{self, Over, SOON, at_once, everywhere, on_each};

/// More than rings, or the system's buffers of a connection, ever hold.
fn large(over: Over) -> Vec<u8> {
    // The third number is what the system lets a buffer grow to.
    let most = |name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
        let word = text.split_whitespace().nth(2).unwrap();
        word.parse::<usize>().unwrap()
    };
    vec![
        7;
        if over == Over::Tcp {
            most("tcp_rmem") + most("tcp_wmem") + (4 << 20)
        } else {
            200_000
        }
    ]
}

/// In frames of the usual size: messages are large here.
fn groups(over: Over, world: usize) -> Vec<ProcessGroup> {
    if over == Over::Thread {
        return common::groups(over, world);
    }
    common::formed(over, world, |_, options| InitOptions {
        segment_bytes: 256 << 10,
        ..options
    })
}

/// What rank `rank` does; the text must name it as given, but in memory that all share
/// every rank of a collective waits for all others, which makes a shorter circle.
type Shape = (
    &'static str,
    usize,
    fn(&ProcessGroup, Over) -> Result<(), Error>,
    &'static [&'static str],
);

fn next(group: &ProcessGroup) -> usize {
    (group.rank() + 1) % group.world_size()
}

const SHAPES: [Shape; 4] = [
    (
        "three receives",
        3,
        |g, _| g.recv(&mut [0u8; 9], next(g)).map(drop),
        &[
            "rank 0 waits in recv from rank 1 (seq 0), rank 1 waits in recv from rank 2 (seq 0), \
             rank 2 waits in recv from rank 0 (seq 0)",
            "none sends",
        ],
    ),
    (
        "a receive in the background, one with another tag and a batch",
        3,
        |g, _| match g.rank() {
            0 => {
                let into = Bucket::<u8>::zeroed(9);
                g.recv_async(into, 1, Call::default()).wait().map(drop)
            }
            1 => {
                // It arrives, but is another one than the awaited.
                g.send(&[1u8; 9], Peer::rank(0).tag(3)).unwrap();
                g.recv(&mut [0u8; 9], Peer::rank(2).tag(3)).map(drop)
            }
            _ => g.batch_send_recv([P2POp::recv(&mut [0u8; 9], 0)]),
        },
        &[
            "rank 0 waits in recv from rank 1 (seq 1), rank 1 waits in recv from rank 2 (seq 0), \
             rank 2 waits in recv from rank 0 (seq 0)",
            "none sends",
        ],
    ),
    (
        "a receive from who is in a collective",
        2,
        |g, _| match g.rank() {
            0 => g.recv(&mut [0u8; 9], Peer::any()).map(drop),
            _ => g.all_reduce(&mut [1f32; 9], ReduceOp::Sum),
        },
        &["rank 0 called send/recv", "rank 1 called all_reduce"],
    ),
    (
        "a collective behind two receives",
        3,
        |g, _| match g.rank() {
            2 => g.broadcast(&mut [1f32; 9], 0),
            _ => g.recv(&mut [0u8; 9], next(g)).map(drop),
        },
        &[
            "rank 0 waits in recv from rank 1 (seq 0), rank 1 waits in recv from rank 2 (seq 0), \
             rank 2 waits in broadcast (seq 0) for rank 0",
            "none can continue",
        ],
    ),
];

#[test]
fn every_rank_of_a_circle_learns_the_whole_of_it() {
    // Mostly silence, so all at the same time.
    everywhere(|over| at_once(&SHAPES, |shape| learns(shape, over)));
}

fn learns((name, world, step, texts): &Shape, over: Over) {
    let gate = Barrier::new(*world);
    let errors = on_each(groups(over, *world), |group| {
        gate.wait();
        let started = Instant::now();
        let error = step(&group, over).unwrap_err();
        let took = started.elapsed();
        assert!(took < SOON, "{name} over {over:?}: {took:?}: {error}");
        // Who leaves is no second trouble.
        gate.wait();
        error
    });
    let is_shorter = over != Over::Tcp && name.starts_with("a collective");
    for error in &errors {
        let text = error.to_string();
        // Whichever is seen first, that operations differ or that ranks wait in a circle.
        if is_shorter && !text.contains("in a circle") {
            assert!(text.contains("rank 1 called send/recv"), "{over:?}: {text}");
            assert!(text.contains("rank 2 called broadcast"), "{over:?}: {text}");
            continue;
        }
        for part in *texts {
            assert!(text.contains(part), "{name} over {over:?}: {text}");
        }
        if !name.contains("who is in a collective") {
            // The mistake of all of them.
            assert_eq!(error.kind(), ErrorKind::Desync, "{over:?}: {error}");
        }
    }
    let kinds: Vec<_> = errors.iter().map(Error::kind).collect();
    assert!(kinds.contains(&ErrorKind::Desync), "{name}: {errors:?}");
}

/// Who waits for ranks in a circle hears of it, as of another's failure.
#[test]
fn who_waits_for_a_circle_hears_of_it() {
    everywhere(|over| {
        let gate = Barrier::new(3);
        let errors = on_each(groups(over, 3), |group| {
            // Messages of before have other numbers.
            if group.rank() == 1 {
                group.send(&[1u8; 9], 0).unwrap();
            } else if group.rank() == 0 {
                group.recv(&mut [0u8; 9], 1).unwrap();
            }
            gate.wait();
            let error = match group.rank() {
                2 => group.recv(&mut [0u8; 9], 0).unwrap_err(),
                rank => group.recv(&mut [0u8; 9], 1 - rank).unwrap_err(),
            };
            gate.wait();
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            let circle = "rank 0 waits in recv from rank 1 (seq 1), rank 1 waits in recv from rank 0 (seq 0)";
            assert!(text.contains(circle), "{over:?}: {text}");
            let expected = [ErrorKind::Desync, ErrorKind::Aborted][rank / 2];
            assert_eq!(error.kind(), expected, "{over:?}: {error}");
        }
    });
}

/// No circle is looked for in several groups; but the deadline's error names both operations.
#[test]
fn a_circle_through_two_groups_is_named_at_the_deadline() {
    everywhere(|over| {
        // The rank whose deadline comes first names the other, which is still waiting then.
        let first = if over == Over::Tcp { 2 } else { 1 };
        // Ranks say what they are doing after five seconds at the latest.
        let hasty = |group: &ProcessGroup, rank: usize| {
            let seconds = if rank == first { 8 } else { 11 };
            group.with_call(Call {
                timeout: Some(Duration::from_secs(seconds)),
                ..Call::default()
            })
        };
        let gate = Barrier::new(3);
        let texts = on_each(groups(over, 3), |group| {
            // Others than in the group of all.
            let pair = group.new_group(&[1, 2]).unwrap();
            gate.wait();
            let mut values = [1f32; 9];
            let text = match (&pair, group.rank()) {
                (Some(pair), 1) => hasty(pair, 1).all_reduce(&mut values, ReduceOp::Sum),
                (_, 2) => hasty(&group, 2).all_reduce(&mut values, ReduceOp::Sum),
                _ => Ok(()),
            };
            gate.wait();
            text.err().map_or(String::new(), |e| e.to_string())
        });
        let advice = "operations of several groups must come in one order on all ranks";
        let text = &texts[first];
        let others = match first {
            1 => vec![
                " is in all_reduce seq 1 of the group of all ranks, where it waits for ranks 0, 1;",
            ],
            // By the number that people know; in the pair it is number 1.
            _ => vec![
                " is in all_reduce seq 0 of group 0x",
                ", where it waits for rank 2",
            ],
        };
        let timed_out = format!("{advice}; timed out");
        for want in others.into_iter().chain([timed_out.as_str()]) {
            assert!(text.contains(want), "{over:?}: {text}");
        }
    });
}

/// Longer than a circle needs to be found.
pub const LONG: Duration = Duration::from_millis(4500);

/// Runs `body` on `world` ranks over every transport.
fn no_circle(world: usize, body: impl Fn(&ProcessGroup, Over) + Sync) {
    everywhere(|over| {
        on_each(groups(over, world), |group| {
            body(&group, over);
            group.shutdown().unwrap();
        });
    });
}

#[test]
fn a_long_wait_for_who_computes_is_no_circle() {
    no_circle(4, |group, over| {
        let data = large(over);
        let mut into = vec![0; data.len()];
        match group.rank() {
            // Everybody waits, in the end for rank 3.
            0 => group.send(&data, 1).unwrap(),
            1 => {
                group.recv(&mut [0u8; 3], 2).unwrap();
                group.recv(&mut into, 0).unwrap();
                assert_eq!(into, data);
            }
            2 => {
                group.recv(&mut [0u8; 5], 3).unwrap();
                group.send(&[1u8; 3], 1).unwrap();
            }
            _ => {
                std::thread::sleep(LONG);
                group.send(&[1u8; 5], 2).unwrap();
            }
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_large_message_to_who_computes_is_no_circle() {
    no_circle(2, |group, over| {
        let (data, other) = (large(over), 1 - group.rank());
        let mut into = vec![0; data.len()];
        for turn in 0..2 {
            if (group.rank() + turn).is_multiple_of(2) {
                // Full until the other one takes it.
                group.send(&data, other).unwrap();
            } else {
                std::thread::sleep(LONG);
                group.recv(&mut into, other).unwrap();
                assert_eq!(into, data);
            }
        }
    });
}

/// Each stalls again and again, and what it said before is still in the store
/// when the next ones ask.
#[test]
fn ranks_that_go_on_slowly_are_no_circle() {
    no_circle(3, |group, over| {
        let (me, world) = (group.rank(), group.world_size());
        let (to, from) = ((me + 1) % world, (me + world - 1) % world);
        let data = large(over);
        let mut into = vec![0; data.len()];
        // One token goes round, then every rank sends at once, in a batch.
        for turn in 0..9 {
            if turn % world == me {
                std::thread::sleep(Duration::from_millis(300));
                group.send(&data, to).unwrap();
            } else if turn % world == from {
                group.recv(&mut into, from).unwrap();
            }
            if turn % 4 == 3 {
                group
                    .batch_send_recv([P2POp::send(&data, to), P2POp::recv(&mut into, from)])
                    .unwrap();
            }
        }
        assert_eq!(into, data);
    });
}
