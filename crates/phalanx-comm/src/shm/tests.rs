//! What a hostile or broken peer may write into its cell.

use std::sync::Arc;
use std::time::Duration;

use super::Buffers;
use super::cell::{self, Cell};
use crate::backend::{Native, Runner};
use crate::operation::{Limits, Operation, Signature};
use crate::plan::{Collective, Method};
use crate::recorder::{Flight, Place, Recorder, Watched};
use crate::stall::{Counts, Users};
use crate::transport::thread_mesh_with;
use crate::wait::Callers;
use crate::{DType, ErrorKind, ReduceOp};

const COUNT: usize = 100_000;
const ARENA_BYTES: usize = 2 << 20;

/// Rank 0 of two does an all-reduce while rank 1 claims in its cell that its data is at
/// `offset` and stages are `wish` bytes.
fn meet(offset: u64, wish: usize) -> crate::Error {
    let mut meshes = thread_mesh_with(2, 64, Some(ARENA_BYTES));
    // The other one stays: a peer that has left is another case.
    let mesh = meshes.remove(0);
    let segment = mesh.memory().unwrap().segment;
    let recorder = Arc::new(Recorder::new(0, 2, &Place::Private).unwrap());
    let watched = Watched::new(recorder, (0, 0), 0, mesh.cells(), None);
    let limit = Duration::from_millis(300);
    let limits = Limits {
        first_op_timeout: limit,
        op_timeout: limit,
        segment_bytes: 1 << 20,
        single_copy_min_bytes: None,
    };
    let flight = Flight::new(watched, 1, &[0, 1].into());
    let native = Native::new(mesh, 0, 0, &limits);
    let beside = (
        Arc::new(Counts::new(2)),
        Arc::new(Users::new(Callers::default())),
    );
    let mut runner = Runner::new(native, flight, 0, limits, None, beside);
    let operation = Operation {
        collective: Collective::AllReduce,
        method: Some(Method::AllReduceDirect),
        short_segments: false,
        automatic: true,
        dtype: Some(DType::F32),
        op: Some(ReduceOp::Sum),
        root: 0,
        target: 0,
        count: COUNT,
        tail_padding: 0,
        lengths: 0,
        plan: None,
        label: None,
        timeout: None,
    };
    let signature = Signature {
        collective: operation.collective,
        method: None,
        dtype: operation.dtype,
        op: operation.op,
        root: 0,
        count: COUNT,
        lengths: 0,
        seq: 0,
    };
    let cell = Cell::new(&segment, 1, 0);
    let place = cell::Place::Arena(offset);
    cell.describe(signature.words(), place, (wish, 0, false));
    // It agrees on the stage (two steps) and enters, and then does nothing more. (Where
    // ranks share cores one more step could already be the last.)
    cell.publish(3);
    let mut data = vec![1f32; COUNT];
    let buffers = Buffers {
        input: std::ptr::null(),
        output: data.as_mut_ptr().cast(),
        exposed: false,
    };
    // SAFETY: `data` is as long as the operation says and ours until the end.
    unsafe { runner.run(&operation, buffers, None) }.unwrap_err()
}

#[test]
fn data_outside_the_arena_is_refused() {
    let bytes = (4 * COUNT) as u64;
    let end = ARENA_BYTES as u64;
    for offset in [
        end,
        end - bytes + 64,
        u64::MAX - 1,
        u64::MAX - bytes,
        1 << 63,
        // Not on a cache line.
        32,
    ] {
        let error = meet(offset, 4096);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{offset}: {error}");
        assert_eq!(error.peer(), Some(1));
        assert!(error.to_string().contains("rank 1 cannot be trusted"));
    }
}

#[test]
fn any_stage_size_is_survived() {
    // The last possible place is accepted; then the peer does nothing more.
    let last = (ARENA_BYTES - (4 * COUNT).next_multiple_of(64)) as u64;
    for wish in [0, 1, 63, 4096, usize::MAX] {
        let error = meet(last, wish);
        assert_eq!(error.kind(), ErrorKind::Timeout, "{wish}: {error}");
        assert!(error.to_string().contains("rank 1 to send data"), "{error}");
    }
}
