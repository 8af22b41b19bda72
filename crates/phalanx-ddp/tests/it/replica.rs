//! `Replica`, fed by hand, against folds in f64 and in the order of the ranks.

use crate::common::{ALL, Over, bits, ranks, value};
use phalanx_ddp::{
    Error, ErrorKind, HostTensor, HostTensors, Parameters as _, Replica, ReplicaOptions, Uneven,
};

const LENGTHS: [usize; 3] = [35, 7, 40];

/// Three parameters and a buffer; other values for each `seed`.
fn model(seed: usize) -> HostTensors {
    let tensor = |name: &str, len: usize| HostTensor {
        name: name.into(),
        shape: vec![len],
        values: (0..len).map(|i| value(1000 * seed + i)).collect(),
    };
    let names = ["fc1.weight", "fc1.bias", "fc2.weight"];
    let parameters = names.iter().zip(LENGTHS).map(|(n, len)| tensor(n, len));
    HostTensors::new(parameters.collect(), vec![tensor("running_mean", 7)])
}

/// Element `i` of the gradient of micro-batch `batch`.
fn gradient(batch: usize, param: usize, i: usize) -> f32 {
    value(977 * batch + 89 * param + i)
}

fn run(replica: &mut Replica, batch: usize) {
    let read = |param: usize, out: &mut [f32]| -> Result<bool, Error> {
        assert_eq!(out.len(), LENGTHS[param]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = gradient(batch, param, i);
        }
        // Nobody uses the second.
        Ok(param != 1)
    };
    replica.backward(read).expect("gradients");
}

#[test]
fn gradients_are_the_mean_over_samples_in_the_order_of_the_ranks() {
    // Samples of each micro-batch of each rank.
    let plans: [&[&[usize]]; 4] = [
        &[&[4], &[4], &[4]],
        &[&[5, 1], &[2], &[3]],
        &[&[3], &[], &[0, 8]],
        &[&[1], &[6]],
    ];
    for over in ALL {
        for plan in plans {
            let sizes: Vec<usize> = plan.iter().flat_map(|sizes| sizes.to_vec()).collect();
            let total: usize = sizes.iter().sum();
            let all = ranks(plan.len(), over, |group| {
                let rank = group.rank();
                let mut tensors = model(rank);
                let mut replica =
                    Replica::new(&group, &mut tensors, ReplicaOptions::default()).expect("made");
                assert_eq!(tensors, model(0), "rank 0's values");
                let first: usize = plan[..rank].iter().map(|sizes| sizes.len()).sum();
                let global = replica.begin(plan[rank]).expect("begun");
                assert_eq!(global.samples, total);
                for (i, _) in plan[rank].iter().enumerate().filter(|(_, n)| **n > 0) {
                    run(&mut replica, first + i);
                }
                assert!(replica.finish().expect("averaged").is_yes());
                assert!(replica.gradient(1).is_none(), "nobody used it");
                let got = [0, 2].map(|p| replica.gradient(p).expect("a mean").collect::<Vec<_>>());
                // The epoch is over: no gradient of before is applied again.
                assert_eq!(replica.begin(&[]).expect("begun").samples, 0);
                assert!(replica.finish().expect("over").is_yes());
                assert!(replica.gradient(0).is_none());
                got
            });
            for got in &all {
                for (param, got) in [0, 2].into_iter().zip(got) {
                    for (i, got) in got.iter().enumerate() {
                        let parts = sizes.iter().enumerate();
                        let want: f64 = parts
                            .map(|(batch, &n)| n as f64 * f64::from(gradient(batch, param, i)))
                            .sum();
                        assert!(
                            (f64::from(*got) - want / total as f64).abs() < 1e-6,
                            "{plan:?}"
                        );
                    }
                }
                assert_eq!(
                    got.each_ref().map(|g| bits(g)),
                    all[0].each_ref().map(|g| bits(g))
                );
            }
        }
    }
}

#[test]
fn micro_batches_have_the_bits_of_as_many_ranks() {
    let step = |world: usize, each: usize| {
        let all = ranks(world, Over::Thread, |group| {
            let mut replica =
                Replica::new(&group, &mut model(0), ReplicaOptions::default()).expect("made");
            replica.begin(&vec![5; each]).expect("begun");
            (0..each).for_each(|i| run(&mut replica, group.rank() * each + i));
            assert!(replica.finish().expect("averaged").is_yes());
            bits(&replica.gradient(0).expect("a mean").collect::<Vec<_>>())
        });
        all.into_iter().next().expect("rank 0")
    };
    assert_eq!(step(3, 1), step(1, 3));
    assert_eq!(step(4, 1), step(1, 4));
}

#[test]
fn an_engines_error_ends_the_other_ranks() {
    let all = ranks(2, Over::Thread, |group| {
        let made = Replica::new(&group, &mut model(0), ReplicaOptions::default());
        if group.rank() == 1 {
            let failed = made.expect("made").backward(|param, _| match param {
                2 => Ok(true),
                _ => Err(std::io::Error::other("no memory").into()),
            });
            let Failed(text) = failed.expect_err("the engine's");
            return text;
        }
        // It may hear of that before it is made itself.
        let ended = made.and_then(|mut replica| {
            run(&mut replica, 0);
            replica.finish()
        });
        let error = ended.expect_err("rank 1 ended");
        assert_eq!(error.kind(), ErrorKind::Comm);
        error.comm().expect("the collective's").to_string()
    });
    assert_eq!(all[1], "no memory");
    assert!(
        all[0].contains("rank 1") && all[0].contains("no memory"),
        "{}",
        all[0]
    );
}

/// The error of an engine.
struct Failed(String);

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed(error.to_string())
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed(error.to_string())
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[test]
fn steps_are_refused_that_do_not_fit() {
    let made =
        |group: &_| Replica::new(group, &mut model(0), ReplicaOptions::default()).expect("made");
    let refused = |result: Result<(), Error>, text: &str| {
        let error = result.expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains(text), "{error}");
    };
    ranks(1, Over::Thread, |group| {
        let mut replica = made(&group);
        assert_eq!(replica.begin(&[]).expect("begun").samples, 0);
        let late = replica.backward(|_, _| -> Result<bool, Error> { Ok(true) });
        refused(late, "no rank has samples");
        let next = replica.backward(|_, _| -> Result<bool, Error> { Ok(true) });
        refused(next, "no rank has samples");
    });
    ranks(1, Over::Thread, |group| {
        let mut replica = made(&group);
        // One that was left before its first micro-batch is forgotten.
        replica.begin(&[3, 4]).expect("begun");
        replica.cancel();
        run(&mut replica, 0);
        assert!(replica.finish().expect("averaged").is_yes());
        run(&mut replica, 0);
        let second = replica.backward(|_, _| -> Result<bool, Error> { Ok(true) });
        refused(second, "1 micro-batches and all of them have run");
        refused(replica.begin(&[2]).map(drop), "before the one in progress");
    });
    ranks(1, Over::Thread, |group| {
        let options = ReplicaOptions {
            max_norm: Some(f64::NAN),
            ..ReplicaOptions::default()
        };
        refused(
            Replica::new(&group, &mut model(0), options).map(drop),
            "must be above 0",
        );
    });
}

#[test]
fn ranks_without_data_are_refused_where_that_is_asked_for() {
    let all = ranks(2, Over::Thread, |group| {
        let options = ReplicaOptions {
            uneven: Uneven::Refuse,
            ..ReplicaOptions::default()
        };
        let mut replica = Replica::new(&group, &mut model(0), options).expect("made");
        let sizes: &[usize] = [&[3][..], &[]][group.rank()];
        replica.begin(sizes).expect_err("refused").to_string()
    });
    for text in all {
        assert!(text.contains("rank 1 has no data left"), "{text}");
    }
}

#[test]
fn values_of_all_ranks_are_compared() {
    let all = ranks(2, Over::Thread, |group| {
        let mut tensors = model(0);
        let replica = Replica::new(&group, &mut tensors, Default::default()).expect("made");
        replica.verify_equal(&tensors).expect("rank 0's values");
        tensors.values_mut(2)[3] += group.rank() as f32;
        replica
            .verify_equal(&tensors)
            .expect_err("other ones")
            .to_string()
    });
    assert!(
        all[0].contains("rank 1") && all[0].contains("fc2.weight"),
        "{}",
        all[0]
    );
}

#[test]
fn a_digest_is_of_the_parameters_and_not_of_the_buffers() {
    let group = phalanx_comm::ProcessGroup::threads(1, Default::default()).remove(0);
    let one = |values: Vec<f32>| {
        let shape = vec![values.len()];
        let name = "w".to_owned();
        HostTensor {
            name,
            shape,
            values,
        }
    };
    let model = |buffer: f32| HostTensors::new(vec![one(vec![1.0, 2.0])], vec![one(vec![buffer])]);
    let replica = Replica::new(&group, &mut model(0.0), ReplicaOptions::default()).expect("made");
    // `printf '\0\0\200\77\0\0\0\100' | sha256sum`
    let want = "b9c80b5adeca450753a16950c3cc655d271f7bef7a485bc83f112b72fef21d37";
    assert_eq!(replica.digest(model(0.0)), want);
    assert_eq!(replica.digest(model(5.0)), want);
}

#[test]
fn an_error_of_one_rank_aborts_the_group_and_is_passed_on() {
    let made = std::sync::Barrier::new(2);
    let all = ranks(2, Over::Thread, |group| {
        let mut replica =
            Replica::new(&group, &mut model(0), ReplicaOptions::default()).expect("made");
        // A rank may still be in the last collective when the other one has left it.
        made.wait();
        assert_eq!(replica.or_abort(Ok::<_, Error>(3)).expect("passed on"), 3);
        if group.rank() == 0 {
            let failed = replica.or_abort(Err::<(), _>("the engine failed"));
            assert_eq!(failed.expect_err("passed on"), "the engine failed");
            return String::new();
        }
        run(&mut replica, 0);
        let error = replica.finish().expect_err("aborted");
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", cause.unwrap_or_default())
    });
    assert!(all[1].contains("the engine failed"), "{}", all[1]);
}
