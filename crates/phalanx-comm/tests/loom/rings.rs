//! A ring between two ranks that both sleep, over the real positions, bells
//! and bytes.

use std::time::Duration;

use loom::thread;
use std::sync::Arc;

use crate::region::{CELL_BYTES, Region};
use crate::sync::{AtomicU32, Flaw, FutexKind, set_flaw};
use crate::transport::ring::{Consumer, MIN_CAPACITY_BYTES, Producer};
use crate::wait::{Bell, Wake, sleep_unless};

const CAPACITY: usize = MIN_CAPACITY_BYTES;

struct Shared {
    region: Arc<Region>,
    producer: AtomicU32,
    consumer: AtomicU32,
}

fn bell(word: &AtomicU32) -> Bell<'_> {
    Bell::new(word, FutexKind::Shared)
}

fn sleep(word: &AtomicU32, ready: &mut dyn FnMut() -> bool) {
    let wake = sleep_unless(bell(word), Duration::MAX, ready);
    assert_ne!(wake, Wake::Elapsed);
}

fn poll(_: &AtomicU32, ready: &mut dyn FnMut() -> bool) {
    while !ready() {
        thread::yield_now();
    }
}

/// Cell `i` of the message.
fn cell(i: usize) -> u8 {
    i as u8 + 1
}

/// Sends `cells` cells, `at_once` in a call; the ring holds two. Both sides
/// wait by `wait`.
fn transfer(
    cells: usize,
    at_once: usize,
    preemptions: usize,
    wait: fn(&AtomicU32, &mut dyn FnMut() -> bool),
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let shared = Arc::new(Shared {
            region: Arc::new(Region::with_ring(CAPACITY)),
            producer: AtomicU32::new(0),
            consumer: AtomicU32::new(0),
        });
        let sender = {
            let shared = shared.clone();
            thread::spawn(move || {
                let message: Vec<u8> = (0..cells * CELL_BYTES)
                    .map(|i| cell(i / CELL_BYTES))
                    .collect();
                let mut tx = Producer::new(shared.region.clone(), 0, CAPACITY);
                let mut sent = 0;
                while sent < message.len() {
                    let end = message.len().min(sent + at_once * CELL_BYTES);
                    let ring = || bell(&shared.consumer).ring();
                    match tx.write(&message[sent..end], ring).unwrap() {
                        0 => wait(&shared.producer, &mut || tx.writable().unwrap()),
                        n => sent += n,
                    }
                }
            })
        };
        let mut rx = Consumer::new(shared.region.clone(), 0, CAPACITY);
        let mut got = vec![0; cells * CELL_BYTES];
        let mut received = 0;
        while received < got.len() {
            let end = got.len().min(received + at_once * CELL_BYTES);
            let ring = || bell(&shared.producer).ring();
            match rx.read(&mut got[received..end], ring).unwrap() {
                0 => wait(&shared.consumer, &mut || rx.readable().unwrap()),
                n => received += n,
            }
        }
        for (i, run) in got.chunks(CELL_BYTES).enumerate() {
            assert!(
                run.iter().all(|&byte| byte == cell(i)),
                "cell {i} is {run:?}"
            );
        }
        sender.join().unwrap();
    });
}

#[test]
fn bytes_cross_once_and_in_order() {
    transfer(2, 1, 3, sleep);
}

/// The producer must wait for room, and positions wrap.
#[test]
fn a_full_ring_holds_the_producer_back() {
    transfer(4, 2, 2, sleep);
}

/// Who only polls needs no more than release and acquire.
#[test]
fn polling_needs_no_total_order() {
    set_flaw(Flaw::SeqCstIsAcqRel);
    transfer(2, 1, 2, poll);
}

#[test]
#[should_panic(expected = "deadlock")]
fn broken_when_sleeping_without_total_order() {
    set_flaw(Flaw::SeqCstIsAcqRel);
    transfer(2, 1, 3, sleep);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_when_positions_order_nothing() {
    // The bytes may come after the position that announces them.
    set_flaw(Flaw::SeqCstIsRelaxed);
    transfer(2, 1, 2, poll);
}
