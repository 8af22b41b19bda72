//! Publishing and sleeping, without rings.

use std::time::Duration;

use loom::thread;
use std::sync::Arc;

use crate::sync::Ordering::SeqCst;
use crate::sync::{AtomicU32, AtomicU64, Flaw, FutexKind, set_flaw};
use crate::wait::{Bell, Wake, sleep_unless};

/// What publishers and one waiter share.
struct Shared {
    bell: AtomicU32,
    conditions: [AtomicU64; 2],
}

impl Shared {
    fn new() -> Arc<Shared> {
        Arc::new(Shared {
            bell: AtomicU32::new(0),
            conditions: [AtomicU64::new(0), AtomicU64::new(0)],
        })
    }

    fn bell(&self) -> Bell<'_> {
        Bell::new(&self.bell, FutexKind::Shared)
    }

    /// README.md, "protocol to publish".
    fn publish(&self, which: usize, value: u64) {
        self.conditions[which].store(value, SeqCst);
        self.bell().ring();
    }

    fn reached(&self, which: usize, value: u64) -> bool {
        self.conditions[which].load(SeqCst) >= value
    }

    /// As the executor does: look, sleep, look again.
    fn wait(&self, mut ready: impl FnMut() -> bool) {
        while !ready() {
            let wake = sleep_unless(self.bell(), Duration::MAX, &mut ready);
            assert_ne!(wake, Wake::Elapsed);
        }
    }
}

fn one_publisher() {
    loom::model(|| {
        let shared = Shared::new();
        let publisher = {
            let shared = shared.clone();
            thread::spawn(move || shared.publish(0, 1))
        };
        shared.wait(|| shared.reached(0, 1));
        publisher.join().unwrap();
    });
}

#[test]
fn a_publication_is_never_slept_through() {
    one_publisher();
}

#[test]
fn a_waiter_sleeps_again_and_again() {
    loom::model(|| {
        let shared = Shared::new();
        let publisher = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.publish(0, 1);
                shared.publish(0, 2);
            })
        };
        shared.wait(|| shared.reached(0, 1));
        shared.wait(|| shared.reached(0, 2));
        publisher.join().unwrap();
    });
}

/// Each publisher may leave the wake-up to the other, but one must do it.
#[test]
fn two_publishers_do_not_rely_on_each_other() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let shared = Shared::new();
        let publishers: Vec<_> = (0..2)
            .map(|which| {
                let shared = shared.clone();
                thread::spawn(move || shared.publish(which, 1))
            })
            .collect();
        shared.wait(|| shared.reached(0, 1) && shared.reached(1, 1));
        for publisher in publishers {
            publisher.join().unwrap();
        }
    });
}

/// Two ranks that wait for each other in turn, each on a bell of its own.
#[test]
fn a_hand_over_and_back() {
    loom::model(|| {
        let (mine, theirs) = (Shared::new(), Shared::new());
        let other = {
            let (mine, theirs) = (mine.clone(), theirs.clone());
            thread::spawn(move || {
                theirs.wait(|| theirs.reached(0, 1));
                mine.publish(0, 1);
            })
        };
        theirs.publish(0, 1);
        mine.wait(|| mine.reached(0, 1));
        other.join().unwrap();
    });
}

// What follows breaks one thing each and must fail: a test that passes
// everything proves nothing.

#[test]
#[should_panic(expected = "deadlock")]
fn broken_without_total_order() {
    // Store and load may change places on both sides.
    set_flaw(Flaw::SeqCstIsAcqRel);
    one_publisher();
}

#[test]
#[should_panic(expected = "deadlock")]
fn broken_when_the_futex_does_not_compare() {
    set_flaw(Flaw::WaitsBlindly);
    one_publisher();
}

#[test]
#[should_panic(expected = "deadlock")]
fn broken_when_nobody_is_woken() {
    set_flaw(Flaw::WakesNobody);
    one_publisher();
}

#[test]
#[should_panic(expected = "deadlock")]
fn broken_when_the_waiter_looks_before_it_announces() {
    loom::model(|| {
        let shared = Shared::new();
        let publisher = {
            let shared = shared.clone();
            thread::spawn(move || shared.publish(0, 1))
        };
        // W2 before W1.
        while !shared.reached(0, 1) {
            shared.bell().announce().sleep(Duration::MAX);
        }
        publisher.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn broken_when_the_publisher_rings_first() {
    loom::model(|| {
        let shared = Shared::new();
        let publisher = {
            let shared = shared.clone();
            thread::spawn(move || {
                // P2 before P1.
                shared.bell().ring();
                shared.conditions[0].store(1, SeqCst);
            })
        };
        shared.wait(|| shared.reached(0, 1));
        publisher.join().unwrap();
    });
}
