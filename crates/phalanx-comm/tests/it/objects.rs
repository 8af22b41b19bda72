//! Objects of any length.

use std::collections::BTreeMap;

use phalanx_comm::{ErrorKind, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::common::{EVERYWHERE, Over, groups, on_each, values};

/// Rank r's bytes: some none, some more than a frame.
fn bytes(rank: usize) -> Vec<u8> {
    values::<u8>(rank, [5, 0, 3000, 1, 64, 999, 0, 12_345][rank % 8])
}

#[test]
fn objects_of_any_length_arrive() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                let rank = group.rank();
                let all: Vec<Vec<u8>> = (0..world).map(bytes).collect();
                assert_eq!(group.all_gather_object(&all[rank]).unwrap(), all);
                for root in [0, world - 1] {
                    let is_root = rank == root;
                    let mine = is_root.then_some(&all[rank]);
                    assert_eq!(group.broadcast_object(mine, root).unwrap(), all[root]);
                    let gathered = group.gather_object(&all[rank], root).unwrap();
                    assert_eq!(gathered, is_root.then(|| all.clone()));
                    let objects = is_root.then_some(&all[..]);
                    assert_eq!(group.scatter_object(objects, root).unwrap(), all[rank]);
                }
            });
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: usize,
    loss: f64,
    notes: BTreeMap<String, Vec<Option<String>>>,
}

fn report(rank: usize) -> Report {
    let notes = (0..rank).map(|i| (format!("note {i}"), vec![None, Some("ß".repeat(i))]));
    Report {
        rank,
        loss: 0.25 * rank as f64,
        notes: notes.collect(),
    }
}

#[test]
fn objects_arrive_as_they_were() {
    for world in 1..=8 {
        on_each(groups(Over::Thread, world), |group| {
            let rank = group.rank();
            let all: Vec<Report> = (0..world).map(report).collect();
            assert_eq!(group.all_gather_object(&all[rank]).unwrap(), all);
            for root in 0..world {
                let is_root = rank == root;
                let mine = is_root.then_some(&all[rank]);
                assert_eq!(group.broadcast_object(mine, root).unwrap(), all[root]);
                let gathered = group.gather_object(&all[rank], root).unwrap();
                assert_eq!(gathered, is_root.then(|| all.clone()));
                let objects = is_root.then_some(&all[..]);
                assert_eq!(group.scatter_object(objects, root).unwrap(), all[rank]);
            }
        });
    }
}

/// Every rank has what was read from the root's text, the root too.
#[test]
fn broadcast_floats_are_the_same_everywhere() {
    let got = on_each(groups(Over::Thread, 3), |group| {
        let mine: Vec<f64> = values(7, 500);
        let mine = (group.rank() == 0).then_some(mine);
        let got = group.broadcast_object(mine.as_ref(), 0).unwrap();
        got.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(got[0] == got[1] && got[1] == got[2]);
}

/// What cannot be written: a map whose keys are no text.
fn unwritable() -> BTreeMap<Vec<u8>, u8> {
    BTreeMap::from([(vec![1], 1)])
}

#[test]
fn who_has_nothing_to_send_is_named_and_nobody_waits() {
    on_each(groups(Over::Thread, 3), |group| {
        let rank = group.rank();
        let check = |culprit: usize, error: phalanx_comm::Error, own: &str| {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            let text = error.to_string();
            if rank == culprit {
                assert!(text.contains(own), "{text}");
            } else {
                let others = format!("rank {culprit} sent nothing; its own error has the reason");
                assert!(text.contains(&others), "{text}");
                assert_eq!(error.peer(), Some(culprit));
            }
        };
        let error = group.broadcast_object::<u8>(None, 0).unwrap_err();
        check(0, error, "broadcast_object: the root needs an object");
        let error = group.scatter_object(Some(&[1u8, 2]), 0).unwrap_err();
        check(0, error, "one object for each of 3 ranks, not 2");
        let object = if rank == 1 {
            unwritable()
        } else {
            BTreeMap::new()
        };
        let error = group.all_gather_object(&object).unwrap_err();
        check(1, error, "all_gather_object: the object cannot be written");
        let error = group.gather_object(&object, 0).unwrap_err();
        check(1, error, "gather_object: the object cannot be written");
        // Nothing of that has harmed the group.
        let mut data = [1f32];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3.0]);
    });
}

#[test]
fn an_object_of_another_type_names_its_sender() {
    on_each(groups(Over::Thread, 2), |group| {
        if group.rank() == 0 {
            let mine = "seven".to_owned();
            assert_eq!(group.broadcast_object(Some(&mine), 0).unwrap(), mine);
        } else {
            let error = group.broadcast_object::<u32>(None, 0).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Protocol, Some(0)));
            let text = error.to_string();
            assert!(text.contains("the object of rank 0 is not a u32"), "{text}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn an_unknown_root_is_a_mistake() {
    on_each(groups(Over::Thread, 2), |group| {
        let error = group.broadcast_object::<u8>(None, 5).unwrap_err();
        assert!(error.to_string().contains("root 5 does not exist"));
        let error = group.gather_object(&0u8, 2).unwrap_err();
        assert!(error.to_string().contains("root 2 does not exist"));
    });
}
