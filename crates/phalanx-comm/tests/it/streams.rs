//! Several connections per pair of ranks: frames of one transfer travel on all
//! of them, and results are the same to the last bit.

use std::sync::Arc;

use phalanx_comm::{ErrorKind, InitOptions, ProcessGroup, ReduceOp};
use phalanx_store::MemStore;
use phalanx_wire::Token;

use crate::common::{Over, assert_same_bits, formed, init_options, on_each, serial_fold, values};

/// Groups over TCP, of which rank r wants `streams[r]` connections.
fn groups(streams: &[usize]) -> Vec<ProcessGroup> {
    formed(Over::Tcp, streams.len(), |rank, options| InitOptions {
        streams: Some(streams[rank]),
        ..options
    })
}

#[test]
fn striped_transfers_give_the_same_bits() {
    // Alike, and not: of two ranks the smaller number counts.
    for streams in [vec![2; 2], vec![4; 3], vec![1, 4, 2, 3]] {
        let world = streams.len();
        on_each(groups(&streams), |group| {
            let rank = group.rank();
            let what = |name: &'static str, count: usize| {
                let streams = &streams;
                move || format!("{name} of {count} on rank {rank} with {streams:?} streams")
            };
            // A frame has 1000 bytes here.
            for count in [0, 1, 249, 251, 1000, 70_001] {
                let inputs: Vec<Vec<f32>> = (0..world).map(|r| values(r, count)).collect();
                for op in [ReduceOp::Sum, ReduceOp::Mean] {
                    let mut data = inputs[rank].clone();
                    group.all_reduce(&mut data, op).unwrap();
                    assert_same_bits(&data, &serial_fold(op, &inputs), what("all_reduce", count));
                }
                let mut data = inputs[rank].clone();
                group.broadcast(&mut data, world - 1).unwrap();
                assert_same_bits(&data, &inputs[world - 1], what("broadcast", count));
                let mut all = vec![0f32; count * world];
                group.all_gather(&inputs[rank], &mut all).unwrap();
                assert_same_bits(&all, &inputs.concat(), what("all_gather", count));
                // Between two of them, and nobody else takes part.
                match rank {
                    0 => group.send(&inputs[0], 1).unwrap(),
                    1 => {
                        let mut data = vec![0f32; count];
                        group.recv(&mut data, 0).unwrap();
                        assert_same_bits(&data, &inputs[0], what("recv", count));
                    }
                    _ => {}
                }
            }
            group.shutdown().unwrap();
        });
    }
}

/// Ranks in different operations find out on the first stream, also while the
/// others stay silent.
#[test]
fn other_operations_are_noticed() {
    on_each(groups(&[4, 4]), |group| {
        let mut data = vec![1f32; 50_000];
        let error = match group.rank() {
            0 => group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err(),
            _ => group.broadcast(&mut data, 0).unwrap_err(),
        };
        assert!(
            matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
            "{error}"
        );
        assert!(error.to_string().contains("broadcast"), "{error}");
    });
}

#[test]
fn an_impossible_number_is_refused() {
    for streams in [0, 5] {
        let options = InitOptions {
            streams: Some(streams),
            ..init_options(Over::Tcp, &Token::generate().unwrap())
        };
        let error = ProcessGroup::from_store(Arc::new(MemStore::new()), 0, 2, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("choose 1 to 4"), "{error}");
    }
}
