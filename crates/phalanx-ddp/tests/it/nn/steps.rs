//! Steps of several micro-batches, uneven ranks and joins, against one
//! process that has all samples.

use crate::common::{Over, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    Average, BucketCaps, DdpOptions, Deterministic, DistributedDataParallel, ErrorKind,
    GlobalBatch, ShardTree, Uneven,
};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{
    GradSink, GradView, Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Threads,
};

const IN: usize = 5;
const OUT: usize = 3;

struct Net {
    first: Linear,
    last: Linear,
}

fn model() -> (Net, Params) {
    let mut scope = Scope::new(Seed(3));
    let net = Net {
        first: Linear::new(scope.enter("first"), IN, 7),
        last: Linear::new(scope.enter("last"), 7, OUT),
    };
    (net, scope.build().expect("model builds"))
}

/// Inputs and targets of samples `from..from + n`.
fn data(from: usize, n: usize) -> (Vec<f32>, Vec<f32>) {
    let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    (
        (from * IN..(from + n) * IN).map(value).collect(),
        (from * OUT..(from + n) * OUT)
            .map(|i| value(i + 5))
            .collect(),
    )
}

/// [`weighed`] by 1.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    from: usize,
    n: usize,
    sink: &mut dyn GradSink,
) {
    weighed(net, params, tape, (from, n), [1.0], sink);
}

/// Backward, starting from `weight`, of the mean loss over samples `from..from + n`.
fn weighed(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    (from, n): (usize, usize),
    weight: [f32; 1],
    sink: &mut dyn GradSink,
) {
    let (x, y) = data(from, n);
    let step = tape.step(params, StepKey::new(0, 0));
    let x = step.input(&x, &[n, IN]).expect("input");
    let hidden = net
        .first
        .forward(x)
        .and_then(phalanx_nn::Tensor::relu)
        .expect("first");
    let loss = net.last.forward(hidden).expect("last");
    let loss = loss.mse_loss(&y, Reduction::Mean).expect("loss");
    loss.backward_with(&weight, sink).expect("backward");
}

fn close(ddp: &dyn GradView, want: &dyn GradView, params: &Params, what: &str) {
    for id in params.ids() {
        for (i, (g, w)) in ddp.grad(id).iter().zip(want.grad(id)).enumerate() {
            let name = &params.infos()[id.index()].name;
            assert!(
                (g - w).abs() < 1e-6,
                "{what}: {name}[{i}] is {g}, joined {w}"
            );
        }
        assert_eq!(ddp.grad(id).len(), want.grad(id).len());
    }
}

/// Sizes of the micro-batches of `rank`: all different, some empty, and the
/// last of several ranks without any.
fn uneven_sizes(rank: usize, world: usize) -> Vec<usize> {
    match rank {
        0 => vec![4, 1],
        r if r > 1 && r + 1 == world => vec![],
        r if r % 2 == 1 => vec![r + 2],
        r => vec![2, 0, r],
    }
}

#[test]
fn any_cut_gives_the_gradient_of_the_joined_batch() {
    for world in 1..=8 {
        let total: usize = (0..world)
            .map(|r| uneven_sizes(r, world).iter().sum::<usize>())
            .sum();
        let (net, params) = model();
        let mut joined = Grads::like(&params);
        backward(
            &net,
            &params,
            &mut Tape::new(Threads(1)),
            0,
            total,
            &mut joined,
        );
        let joined = &joined;
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let mut from: usize = (0..rank)
                .map(|r| uneven_sizes(r, world).iter().sum::<usize>())
                .sum();
            let (net, mut params) = model();
            let mut tape = Tape::new(Threads(1));
            let mut ddp = DistributedDataParallel::new(group, &mut params, one_tensor_a_bucket())
                .expect("ddp");
            // The second step runs in rebuilt buckets, and weighs its losses.
            for at_loss in [false, true] {
                let sizes = uneven_sizes(rank, world);
                let first = from;
                let mut step = ddp.begin(&sizes).expect("begin");
                assert_eq!(step.global().samples, total);
                for n in sizes {
                    if at_loss {
                        let (weight, sink) = step.weighed_micro_batch().expect("declared");
                        weighed(&net, &params, &mut tape, (from, n), weight, sink);
                    } else {
                        let sink = step.micro_batch().expect("declared");
                        backward(&net, &params, &mut tape, from, n, sink);
                    }
                    from += n;
                }
                assert!(step.finish().expect("finish").is_yes());
                close(&ddp, joined, &params, &format!("rank {rank} of {world}"));
                from = first;
            }
        });
    }
}

fn one_tensor_a_bucket() -> DdpOptions {
    DdpOptions {
        caps: Some(BucketCaps::uniform(1)),
        ..DdpOptions::default()
    }
}

/// Weights after five steps of `world` ranks with `each` micro-batches.
fn train(group: ProcessGroup, each: usize) -> Vec<u32> {
    let (rank, world) = (group.rank(), group.world_size());
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let mut ddp =
        DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
    let mut optimizer = Sgd::new(&params, 0.05).momentum(0.9);
    for i in 0..5 {
        let mut step = ddp.begin(&vec![4; each]).expect("begin");
        for micro in 0..each {
            let from = 4 * ((i * world + rank) * each + micro);
            backward(
                &net,
                &params,
                &mut tape,
                from,
                4,
                step.micro_batch().expect("declared"),
            );
        }
        assert!(step.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("step");
    }
    params.flat().iter().map(|v| v.to_bits()).collect()
}

#[test]
fn ranks_equal_one_rank_with_as_many_micro_batches_bit_for_bit() {
    for world in 2..=8 {
        let want = ranks(1, Over::Thread, |group| train(group, world)).remove(0);
        for (rank, got) in ranks(world, Over::Thread, |group| train(group, 1))
            .iter()
            .enumerate()
        {
            assert_eq!(*got, want, "rank {rank} of {world}");
        }
    }
}

#[test]
fn ranks_that_run_out_of_data_join_until_the_last_has_done() {
    for world in [2, 3, 5, 8] {
        let steps = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model();
            let mut tape = Tape::new(Threads(1));
            let mut ddp =
                DistributedDataParallel::new(group.clone(), &mut params, DdpOptions::default())
                    .expect("ddp");
            let mut optimizer = Sgd::new(&params, 0.05);
            let mut steps = 0;
            loop {
                // Rank r has r + 1 batches.
                let sizes: &[usize] = if steps <= rank { &[3] } else { &[] };
                let mut step = ddp.begin(sizes).expect("begin");
                if step.is_over() {
                    break;
                }
                for _ in sizes {
                    backward(
                        &net,
                        &params,
                        &mut tape,
                        3 * steps,
                        3,
                        step.micro_batch().expect("declared"),
                    );
                }
                assert!(step.finish().expect("finish").is_yes());
                // All ranks that are left have the same samples here, so the
                // mean is theirs, however many are left.
                let mut alone = Grads::like(&params);
                backward(&net, &params, &mut tape, 3 * steps, 3, &mut alone);
                close(&ddp, &alone, &params, "the mean over samples");
                optimizer.step(&mut params, &ddp).expect("step");
                steps += 1;
            }
            (steps, params.flat().to_vec())
        });
        for (rank, ended) in steps.iter().enumerate() {
            assert_eq!(ended.0, world, "steps of rank {rank}");
            assert!(ended.1 == steps[0].1, "weights of rank {rank}");
        }
    }
}

#[test]
fn the_plain_mean_divides_by_all_ranks_or_by_those_with_data() {
    for (average, divisor) in [(Average::Ranks, 4.0), (Average::ActiveRanks, 3.0)] {
        ranks(4, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model();
            let mut tape = Tape::new(Threads(1));
            let options = DdpOptions {
                average,
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let sizes: &[usize] = if rank == 2 { &[] } else { &[2] };
            let mut step = ddp.begin(sizes).expect("begin");
            for &n in sizes {
                backward(
                    &net,
                    &params,
                    &mut tape,
                    0,
                    n,
                    step.micro_batch().expect("declared"),
                );
            }
            assert!(step.finish().expect("finish").is_yes());
            let mut one = Grads::like(&params);
            backward(&net, &params, &mut tape, 0, 2, &mut one);
            one.flat_mut().iter_mut().for_each(|g| *g *= 3.0 / divisor);
            close(&ddp, &one, &params, "plain mean");
        });
    }
}

#[test]
fn a_rank_without_data_is_named_where_that_is_refused() {
    let errors = ranks(3, Over::Thread, |group| {
        let rank = group.rank();
        let (_, mut params) = model();
        let options = DdpOptions {
            uneven: Uneven::Refuse,
            ..DdpOptions::default()
        };
        let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
        let sizes: &[usize] = if rank == 1 { &[] } else { &[2] };
        ddp.begin(sizes).err().expect("refused")
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(
            text.contains("rank 1 has no data left while rank 0"),
            "{text}"
        );
    }
}

#[test]
fn micro_batches_other_than_declared_are_refused() {
    let alone = || ProcessGroup::threads(1, Default::default()).remove(0);
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let new = |params: &mut Params| {
        DistributedDataParallel::new(alone(), params, DdpOptions::default()).expect("ddp")
    };

    let mut ddp = new(&mut params);
    let mut step = ddp.begin(&[2, 2, 2]).expect("begin");
    for _ in 0..2 {
        backward(
            &net,
            &params,
            &mut tape,
            0,
            2,
            step.micro_batch().expect("declared"),
        );
    }
    let text = step.finish().expect_err("one is missing").to_string();
    assert!(
        text.contains("declared with 3 micro-batches, but on rank 0 it ended after 2"),
        "{text}"
    );

    let mut ddp = new(&mut params);
    let mut step = ddp.begin(&[2]).expect("begin");
    backward(
        &net,
        &params,
        &mut tape,
        0,
        2,
        step.micro_batch().expect("declared"),
    );
    let text = step.micro_batch().err().expect("one too many").to_string();
    assert!(
        text.contains("declared with 1 micro-batches and all of them have run"),
        "{text}"
    );

    let mut ddp = new(&mut params);
    backward(&net, &params, &mut tape, 0, 2, &mut ddp);
    let text = ddp.begin(&[2, 2]).err().expect("too late").to_string();
    assert!(
        text.contains("declared before the first backward"),
        "{text}"
    );

    let mut ddp = new(&mut params);
    let mut step = ddp.begin(&[2, 2]).expect("begin");
    step.micro_batch().expect("declared");
    let text = step.micro_batch().err().expect("nothing came").to_string();
    assert!(
        text.contains("no gradient for 4 of 4 parameters on rank 0: first.weight"),
        "{text}"
    );
}

#[test]
fn an_infinite_gradient_in_any_micro_batch_votes_the_step_down() {
    let commits = ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let (_, mut params) = model();
        let mut ddp =
            DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
        let mut step = ddp.begin(&[1, 1, 1]).expect("begin");
        for micro in 0..3 {
            let sink = step.micro_batch().expect("declared");
            for id in params.ids() {
                let bad = rank == 1 && micro == 1 && id.index() == 2;
                sink.slot(id).fill(if bad { f32::INFINITY } else { 1.0 });
                sink.ready(id).expect("ready");
            }
        }
        step.finish().expect("finish").to_string()
    });
    for commit in commits {
        assert_eq!(commit, "rank 1: the gradient of last.weight is not finite");
    }
}

/// Shards are added over ranks as well, where the sum may overflow after the vote: every rank sees it.
#[test]
fn a_sum_of_shards_that_overflows_votes_the_step_down_at_any_number_of_ranks() {
    for world in [1, 2, 3, 4] {
        let commits = ranks(world, Over::Thread, |group| {
            let (_, mut params) = model();
            let tree = ShardTree::new(4).expect("fits");
            let mine = tree.range(world, group.rank()).len();
            let options = DdpOptions {
                deterministic: Deterministic::Shards(tree),
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let mut commits = Vec::new();
            for value in [1.0, 0.75 * f32::MAX, 1.0] {
                let mut step = ddp.begin(&vec![1; mine]).expect("begin");
                for _ in 0..mine {
                    let sink = step.micro_batch().expect("declared");
                    for id in params.ids() {
                        sink.slot(id)
                            .fill(if id.index() == 2 { value } else { 1.0 });
                        sink.ready(id).expect("ready");
                    }
                }
                commits.push(step.finish().expect("finish").to_string());
                let is_there = !ddp
                    .grad(params.find("last.weight").expect("there"))
                    .is_empty();
                assert_eq!(is_there, value == 1.0);
            }
            assert_eq!(ddp.skipped_steps(), 1);
            commits
        });
        let all: Vec<String> = (0..world)
            .map(|r| format!("rank {r}: the gradient of last.weight is not finite"))
            .collect();
        for commit in commits {
            assert_eq!(commit, ["", &all.join("; "), ""], "{world} ranks");
        }
    }
}

/// Nothing of the step before is left to be applied again, and no micro-batch runs that nobody declared.
#[test]
fn a_step_without_data_has_no_gradients_and_no_micro_batches() {
    for world in [1, 2, 3, 8] {
        for shards in [None, Some(ShardTree::new(8).expect("fits"))] {
            ranks(world, Over::Thread, |group| {
                let (rank, sizes) = (group.rank(), [&[][..], &[0]]);
                let (_, mut params) = model();
                let options = DdpOptions {
                    deterministic: shards.map_or(Deterministic::Ranks, Deterministic::Shards),
                    ignored: vec!["last.bias".to_owned()],
                    ..DdpOptions::default()
                };
                let mine = shards.map_or(1, |tree| tree.range(world, rank).len());
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                let mut optimizer = Sgd::new(&params, 0.1);
                for sizes in sizes {
                    let mut step = ddp.begin(&vec![1; mine]).expect("begin");
                    for _ in 0..mine {
                        let sink = step.micro_batch().expect("declared");
                        for id in params.ids() {
                            sink.slot(id).fill(1.0);
                            sink.ready(id).expect("ready");
                        }
                    }
                    assert!(step.finish().expect("finish").is_yes());
                    optimizer.step(&mut params, &ddp).expect("step");
                    let mut step = ddp.begin(sizes).expect("begin");
                    assert!(step.is_over());
                    let refused = step.micro_batch().err().expect("nobody has data");
                    assert_eq!(refused.kind(), ErrorKind::Usage);
                    assert_eq!(
                        refused.to_string(),
                        "no rank has samples in this step, so it has no micro-batches; stop where GlobalStep::is_over says so"
                    );
                    assert!(step.weighed_micro_batch().is_err());
                    assert!(step.finish().expect("finish").is_yes());
                    let before = params.flat().to_vec();
                    for (id, info) in params.ids().zip(params.infos()) {
                        let own = info.name == "last.bias";
                        assert!(
                            if own {
                                ddp.untouched(id)
                            } else {
                                ddp.grad(id).is_empty()
                            },
                            "{}",
                            info.name
                        );
                    }
                    let text = optimizer
                        .step(&mut params, &ddp)
                        .expect_err("no gradients")
                        .to_string();
                    assert!(
                        text.contains("gradient of first.weight has 0 elements"),
                        "{text}"
                    );
                    assert_eq!(params.flat(), before);
                }
            });
        }
    }
}

/// Who knows the sizes of all ranks is held to the rule as well.
#[test]
fn ranks_without_data_are_refused_where_sizes_are_known() {
    for world in [2, 3, 8] {
        ranks(world, Over::Thread, |group| {
            let (_, mut params) = model();
            let options = DdpOptions {
                uneven: Uneven::Refuse,
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let global = |active_ranks| GlobalBatch {
                samples: 2 * active_ranks,
                micro_batches: active_ranks,
                active_ranks,
            };
            let error = ddp
                .begin_known(&[2], global(world - 1))
                .err()
                .expect("refused");
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            let words = format!(
                "1 of {world} ranks have no data left while others still have some; cut the data evenly"
            );
            assert!(error.to_string().contains(&words), "{error}");
            assert!(
                ddp.begin_known(&[], global(0))
                    .expect("over for all")
                    .is_over()
            );
            assert!(
                !ddp.begin_known(&[2], global(world))
                    .expect("even")
                    .is_over()
            );
        });
    }
}

/// A rank's own mean is over its shards with samples, whichever average is asked for.
#[test]
fn empty_shards_weigh_nothing() {
    for average in [Average::Samples, Average::Ranks, Average::ActiveRanks] {
        for world in [1, 2, 4] {
            ranks(world, Over::Thread, |group| {
                let (_, mut params) = model();
                let tree = ShardTree::new(4).expect("fits");
                let mine = tree.range(world, group.rank());
                let options = DdpOptions {
                    deterministic: Deterministic::Shards(tree),
                    ignored: vec!["last.bias".to_owned()],
                    average,
                    ..DdpOptions::default()
                };
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                // Three samples: the last shard has none.
                let sizes: Vec<usize> = mine.clone().map(|s| tree.size(3, s)).collect();
                let mut step = ddp.begin(&sizes).expect("begin");
                for shard in mine.clone().filter(|s| *s < 3) {
                    let sink = step.micro_batch().expect("declared");
                    for id in params.ids() {
                        sink.slot(id).fill(1.0 + shard as f32);
                        sink.ready(id).expect("ready");
                    }
                }
                assert!(step.finish().expect("finish").is_yes());
                let own: Vec<f32> = mine.filter(|s| *s < 3).map(|s| 1.0 + s as f32).collect();
                let value = |name: &str| ddp.grad(params.find(name).expect("there"))[0];
                assert!((value("last.weight") - 2.0).abs() < 1e-6, "{average:?}");
                if !own.is_empty() {
                    let want = own.iter().sum::<f32>() / own.len() as f32;
                    assert!(
                        (value("last.bias") - want).abs() < 1e-6,
                        "{average:?}, {world} ranks"
                    );
                }
            });
        }
    }
}

/// Gradients are made up, so that the weighed mean can be taken in f64 by the definition of each kind.
#[test]
fn every_average_of_uneven_micro_batches_is_that_of_its_definition() {
    let made = |rank: usize, micro: usize, param: usize| {
        ((rank * 97 + micro * 31 + param * 7) % 41) as f32 / 20.0 - 1.0
    };
    for average in [Average::Samples, Average::Ranks, Average::ActiveRanks] {
        for world in 1..=8 {
            let sizes: Vec<Vec<usize>> = (0..world).map(|r| uneven_sizes(r, world)).collect();
            let total: usize = sizes.iter().flatten().sum();
            let active = sizes.iter().filter(|s| s.iter().any(|n| *n > 0)).count();
            let share = |rank: usize, n: usize| {
                let own = sizes[rank].iter().filter(|n| **n > 0).count();
                match average {
                    Average::Samples => n as f64 / total as f64,
                    _ if n == 0 => 0.0,
                    Average::Ranks => 1.0 / (own * world) as f64,
                    Average::ActiveRanks => 1.0 / (own * active) as f64,
                }
            };
            ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let (_, mut params) = model();
                let options = DdpOptions {
                    average,
                    ..one_tensor_a_bucket()
                };
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                for _ in 0..2 {
                    let mut step = ddp.begin(&sizes[rank]).expect("begin");
                    for micro in 0..sizes[rank].len() {
                        let sink = step.micro_batch().expect("declared");
                        for id in params.ids() {
                            sink.slot(id).fill(made(rank, micro, id.index()));
                            sink.ready(id).expect("ready");
                        }
                    }
                    assert!(step.finish().expect("finish").is_yes());
                    for id in params.ids() {
                        let each = sizes.iter().enumerate().flat_map(|(r, sizes)| {
                            sizes
                                .iter()
                                .enumerate()
                                .map(move |(micro, n)| (r, micro, *n))
                        });
                        let want: f64 = each
                            .map(|(r, micro, n)| {
                                share(r, n) * f64::from(made(r, micro, id.index()))
                            })
                            .sum();
                        for g in ddp.grad(id) {
                            assert!(
                                (f64::from(*g) - want).abs() < 1e-6,
                                "{average:?}, {world} ranks: {g} for {want}"
                            );
                        }
                    }
                }
            });
        }
    }
}
