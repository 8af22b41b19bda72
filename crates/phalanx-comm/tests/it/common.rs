//! Groups to test with, values to test on.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use half::{bf16, f16};
use phalanx_comm::{Element, GroupOptions, InitOptions, ProcessGroup, ReduceOp, Transport};
use phalanx_store::{MemStore, Store};
use phalanx_wire::Token;

/// How the ranks of a test are linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    Thread,
    Shm,
    Tcp,
}

pub const EVERYWHERE: [Over; 3] = [Over::Thread, Over::Shm, Over::Tcp];

/// Small segments and rings, so that small data takes the many-segment path.
pub const SEGMENT_BYTES: usize = 1000;
pub const RING_BYTES: usize = 4096;

/// A limit that no healthy test reaches, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What happens at once is over by then, also on a busy machine; what does not
/// takes until [`PATIENCE`].
pub const SOON: Duration = Duration::from_secs(30);

pub fn init_options(over: Over, token: &Token) -> InitOptions {
    InitOptions {
        token: Some(token.clone()),
        timeout: PATIENCE,
        op_timeout: PATIENCE,
        first_op_timeout: PATIENCE,
        transport: if over == Over::Tcp {
            Transport::Tcp
        } else {
            Transport::Shm
        },
        segment_bytes: SEGMENT_BYTES,
        ring_bytes: Some(RING_BYTES),
        // Tests count operations; the probe has one of its own.
        probe: false,
        ..InitOptions::default()
    }
}

/// One handle per rank, in rank order.
pub fn groups(over: Over, world: usize) -> Vec<ProcessGroup> {
    if over == Over::Thread {
        return ProcessGroup::threads(
            world,
            GroupOptions {
                op_timeout: PATIENCE,
                first_op_timeout: PATIENCE,
                segment_bytes: SEGMENT_BYTES,
                ring_bytes: Some(RING_BYTES),
                ..GroupOptions::default()
            },
        );
    }
    formed(over, world, |_, options| options)
}

/// One handle per rank, in rank order, formed through a store as processes do,
/// each with its own `options`.
pub fn formed(
    over: Over,
    world: usize,
    own: impl Fn(usize, InitOptions) -> InitOptions,
) -> Vec<ProcessGroup> {
    let store = Arc::new(MemStore::new());
    let token = Token::generate().unwrap();
    let members: Vec<_> = (0..world)
        .map(|rank| {
            let (store, options) = (store.clone(), own(rank, init_options(over, &token)));
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, world, options))
        })
        .collect();
    members
        .into_iter()
        .map(|member| member.join().unwrap().unwrap())
        .collect()
}

/// Runs `body` on every rank at once and returns what each returned, in rank
/// order. A panic on one rank is a panic here.
pub fn on_each<R: Send>(
    groups: Vec<ProcessGroup>,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let body = &body;
                scope.spawn(move || body(group))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

/// Runs `test` over all transports at the same time: most of its time is spent waiting.
pub fn everywhere(test: impl Fn(Over) + Sync) {
    at_once(&EVERYWHERE, |over| test(*over));
}

/// Runs `test` on all `cases` at the same time. A panic in one is a panic here.
pub fn at_once<C: Sync>(cases: &[C], test: impl Fn(&C) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}

/// An element type with the serial arithmetic that results are compared with,
/// written as naively as possible.
pub trait Value: Element {
    /// Accumulator type.
    type Wide: Copy;
    fn make(x: f64) -> Self;
    fn from_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn widen(self) -> Self::Wide;
    /// Rounds; a NaN becomes the one that reductions yield.
    fn narrow(x: Self::Wide) -> Self;
    fn combine(op: ReduceOp, a: Self::Wide, x: Self::Wide) -> Self::Wide;
    fn scale(x: Self::Wide, world: usize) -> Self::Wide;
}

macro_rules! float_value {
    ($t:ty, $bits:ty, $wide:ty, $make:expr, $widen:expr, $narrow:expr, $nan:expr) => {
        impl Value for $t {
            type Wide = $wide;
            fn make(x: f64) -> Self {
                $make(x)
            }
            fn from_bits(bits: u64) -> Self {
                <$t>::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
            fn widen(self) -> $wide {
                $widen(self)
            }
            fn narrow(x: $wide) -> Self {
                if x.is_nan() {
                    return <$t>::from_bits($nan);
                }
                $narrow(x)
            }
            fn combine(op: ReduceOp, a: $wide, x: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => a + x,
                    ReduceOp::Product => a * x,
                    ReduceOp::Min if a.is_nan() || a <= x => a,
                    ReduceOp::Max if a.is_nan() || a >= x => a,
                    _ => x,
                }
            }
            fn scale(x: $wide, world: usize) -> $wide {
                x * (1.0 / world as $wide)
            }
        }
    };
}
float_value!(f32, u32, f32, |x| x as f32, |x| x, |x| x, 0x7fc0_0000);
float_value!(f64, u64, f64, |x| x, |x| x, |x| x, 0x7ff8_0000_0000_0000);
float_value!(
    f16,
    u16,
    f32,
    f16::from_f64,
    f16::to_f32,
    f16::from_f32,
    0x7e00
);
float_value!(
    bf16,
    u16,
    f32,
    bf16::from_f64,
    bf16::to_f32,
    bf16::from_f32,
    0x7fc0
);

macro_rules! integer_value {
    ($($t:ty),*) => {$(
        impl Value for $t {
            type Wide = $t;
            fn make(x: f64) -> Self {
                (x * 1e6) as i64 as $t
            }
            fn from_bits(bits: u64) -> Self {
                bits as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
            fn widen(self) -> $t {
                self
            }
            fn narrow(x: $t) -> Self {
                x
            }
            fn combine(op: ReduceOp, a: $t, x: $t) -> $t {
                match op {
                    ReduceOp::Product => a.wrapping_mul(x),
                    ReduceOp::Min => a.min(x),
                    ReduceOp::Max => a.max(x),
                    ReduceOp::BitAnd => a & x,
                    ReduceOp::BitOr => a | x,
                    ReduceOp::BitXor => a ^ x,
                    _ => a.wrapping_add(x),
                }
            }
            fn scale(x: $t, _: usize) -> $t {
                x
            }
        }
    )*};
}
integer_value!(i8, u8, i16, u16, i32, u32, i64, u64);

/// `count` values of rank `rank`, of mixed sign and size, so that sums depend
/// on their order.
pub fn values<T: Value>(rank: usize, count: usize) -> Vec<T> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
            T::make(unit * f64::from(1u32 << (state % 9) as u32))
        })
        .collect()
}

/// Like [`values`], but one in eight of any bits at all: NaNs of all kinds,
/// infinities, denormal numbers, the greatest integers.
pub fn wild_values<T: Value>(rank: usize, count: usize) -> Vec<T> {
    let mut state = rank as u64 + 77;
    let mut values = values::<T>(rank, count);
    for value in &mut values {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        if state >> 61 == 0 {
            // All ones and all zeros in the exponent are frequent.
            let bits = T::from_bits(state >> 9).bits();
            *value = T::from_bits(match state >> 59 & 3 {
                0 => bits,
                1 => !0,
                2 => bits | 0x7ff0_7c00_7f80_7c00 | 0x7f80_0000,
                _ => bits & 0x0003,
            });
        }
    }
    values
}

/// The left fold in ascending rank order, rounded once. A rank alone keeps its
/// data as it is.
pub fn serial_fold<T: Value>(op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    if let [alone] = inputs {
        return alone.clone();
    }
    (0..inputs[0].len())
        .map(|i| {
            let mut a = inputs[0][i].widen();
            for input in &inputs[1..] {
                a = T::combine(op, a, input[i].widen());
            }
            if op == ReduceOp::Mean {
                a = T::scale(a, inputs.len());
            }
            T::narrow(a)
        })
        .collect()
}

#[track_caller]
pub fn assert_same_bits<T: Value>(got: &[T], want: &[T], what: impl Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        if g.bits() != w.bits() {
            panic!("element {i} is {g:?}, not {w:?}: {}", what());
        }
    }
}

/// Returns when *all* ranks are through a barrier: after one of the group
/// alone a rank may still be in it when the next one leaves.
pub fn all_ready(group: &ProcessGroup, gate: &Barrier) {
    group.barrier().unwrap();
    gate.wait();
}

/// The sum of first ranks over the group, by which its members are checked.
pub fn sum_of_members(group: &ProcessGroup) -> i64 {
    let mut data = [group.global_rank() as i64];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    data[0]
}

/// A store of its own, a token, and two ranks that have formed a group there.
pub fn two_with_store(over: Over) -> (Arc<dyn Store>, Token, Vec<ProcessGroup>) {
    let token = Token::generate().unwrap();
    let store: Arc<dyn Store> = Arc::new(MemStore::new());
    let groups = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let (store, options) = (Arc::clone(&store), init_options(over, &token));
                scope.spawn(move || ProcessGroup::from_store(store, rank, 2, options).unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (store, token, groups)
}
