//! The wrapper's options: unused, frozen and ignored parameters, buffers.

use crate::common::{Over, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    Buffers, DdpOptions, Deterministic, DistributedDataParallel, ErrorKind, Every, ShardTree,
    Unused, verify_equal,
};
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::{Adam, Sgd, step_clipped};
use phalanx_nn::{GradView, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};

/// A trunk used twice (a shared parameter), and heads of which a step uses one.
struct Net {
    trunk: Linear,
    heads: Vec<Linear>,
}

fn model(heads: usize) -> (Net, Params) {
    let mut scope = Scope::new(Seed(3));
    let trunk = Linear::new(scope.enter("trunk"), 2, 2);
    let heads = (0..heads)
        .map(|h| Linear::new(scope.enter(&format!("head{h}")), 2, 1))
        .collect();
    (Net { trunk, heads }, scope.build().expect("model builds"))
}

fn backward(
    net: &Net,
    params: &Params,
    head: usize,
    sink: &mut dyn phalanx_nn::GradSink,
) -> Result<(), phalanx_nn::Error> {
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(params, StepKey::new(0, 0));
    let x = step.input(&[1.0, -2.0], &[1, 2])?;
    let x = net.trunk.forward(net.trunk.forward(x)?)?;
    let loss = net.heads[head]
        .forward(x)?
        .mse_loss(&[1.0], Reduction::Sum)?;
    loss.backward(sink)
}

fn grads_of(net: &Net, params: &Params, head: usize) -> phalanx_nn::Grads {
    let mut grads = phalanx_nn::Grads::like(params);
    backward(net, params, head, &mut grads).expect("backward");
    grads
}

#[test]
fn branches_may_differ_by_rank_and_unused_parameters_stay_untouched() {
    for world in 1..=8 {
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            // The last head is used by nobody; the others by a rank each.
            let (net, mut params) = model(world + 1);
            let before = params.clone();
            let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default())
                .expect("ddp");
            let mut optimizer = Adam::new(&params, 0.1);
            let mut sum = vec![0.0f64; params.flat().len()];
            for head in 0..world {
                let one = grads_of(&net, &params, head);
                sum.iter_mut()
                    .zip(one.flat())
                    .for_each(|(s, g)| *s += f64::from(*g) / world as f64);
            }
            backward(&net, &params, rank, &mut ddp).expect("backward");
            assert!(ddp.finish().expect("finish").is_yes());
            for (id, info) in params.ids().zip(params.infos()) {
                let unused = info.name.starts_with(&format!("head{world}"));
                assert_eq!(ddp.untouched(id), unused, "{}", info.name);
                for (g, w) in ddp.grad(id).iter().zip(&sum[info.offset..]) {
                    assert!(
                        (f64::from(*g) - w).abs() < 1e-5,
                        "{}: {g} for {w}",
                        info.name
                    );
                }
            }
            optimizer.step(&mut params, &ddp).expect("step");
            for (id, info) in params.ids().zip(params.infos()) {
                let changed = params.get(id) != before.get(id);
                assert_eq!(
                    changed,
                    !info.name.starts_with(&format!("head{world}")),
                    "{}",
                    info.name
                );
            }
        });
    }
}

#[test]
fn unused_parameters_are_named_where_they_are_refused() {
    for world in [2, 5, 8] {
        let errors = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model(world);
            let options = DdpOptions {
                unused: Unused::Refuse,
                ..DdpOptions::default()
            };
            // Each of these may meet the abort of a peer that was faster.
            let lost = (ErrorKind::Comm, String::new());
            let Ok(mut ddp) = DistributedDataParallel::new(group, &mut params, options) else {
                return lost;
            };
            if backward(&net, &params, rank, &mut ddp).is_err() {
                return lost;
            }
            let error = ddp.finish().expect_err("heads are unused");
            (error.kind(), error.to_string())
        });
        // A rank may learn of another's error before it finds its own.
        assert!(errors.iter().any(|(kind, _)| *kind == ErrorKind::Usage));
        for (rank, (kind, text)) in errors.iter().enumerate() {
            let first = usize::from(rank == 0);
            let (unused, all) = (2 * (world - 1), 2 * world + 2);
            assert!(
                *kind != ErrorKind::Usage
                    || text.contains(&format!(
                        "rank {rank} does not depend on {unused} of {all} parameters: \
                         head{first}.weight, head{first}.bias"
                    )),
                "{text}"
            );
        }
    }
}

/// Each rank uses a head of its own, the same every step, until all use another.
#[test]
fn a_static_graph_that_changes_names_the_parameter() {
    for world in [1, 2, 3, 8] {
        let errors = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model(world + 1);
            let options = DdpOptions {
                unused: Unused::SameEveryStep,
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            // A rank may meet the abort of a peer that was faster, in any step.
            for head in [rank, rank, world] {
                let step = backward(&net, &params, head, &mut ddp).map_err(|e| e.to_string());
                if let Err(e) = step.and_then(|()| ddp.finish().map_err(|e| e.to_string())) {
                    return (head, e);
                }
            }
            panic!("another head is another graph");
        });
        let mut named = errors.iter().enumerate().map(|(rank, (head, text))| {
            let what = "was used in the first and is not used in this one";
            *head == world && text.contains(&format!("on rank {rank} head{rank}.weight {what}"))
        });
        assert!(named.any(|named| named), "{errors:?}");
    }
}

#[test]
fn frozen_parameters_stay_and_ignored_ones_are_each_ranks_own() {
    for world in [1, 3, 8] {
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model(1);
            let head = params.find("head0.weight").expect("head");
            params.get_mut(head).fill(1.0 + rank as f32);
            let options = DdpOptions {
                frozen: vec!["trunk.bias".to_owned()],
                ignored: vec!["head0.weight".to_owned()],
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            assert_eq!(
                params.get(head),
                [1.0 + rank as f32; 2],
                "an ignored parameter was broadcast"
            );
            let before = params.clone();
            let own = grads_of(&net, &params, 0);
            let mut step = ddp.begin(&[1, 1]).expect("begin");
            for _ in 0..2 {
                backward(&net, &params, 0, step.micro_batch().expect("declared"))
                    .expect("backward");
            }
            assert!(step.finish().expect("finish").is_yes());
            for (g, w) in ddp.grad(head).iter().zip(own.grad(head)) {
                assert!((g - w).abs() < 1e-5, "{g} for {w}");
            }
            Sgd::new(&params, 0.1)
                .weight_decay(0.1)
                .step(&mut params, &ddp)
                .expect("step");
            let frozen = params.find("trunk.bias").expect("bias");
            assert_eq!(params.get(frozen), before.get(frozen));
            assert_ne!(params.get(head), before.get(head));

            // A rank that sits a step out has no gradient of its own for it.
            let before = params.clone();
            let sits_out = rank > 0;
            let mut step = ddp.begin(if sits_out { &[] } else { &[1] }).expect("begin");
            if !sits_out {
                let sink = step.micro_batch().expect("declared");
                backward(&net, &params, 0, sink).expect("backward");
            }
            assert!(step.finish().expect("finish").is_yes());
            Sgd::new(&params, 0.1)
                .weight_decay(0.1)
                .step(&mut params, &ddp)
                .expect("step");
            assert_eq!(params.get(head) == before.get(head), sits_out);
        });
    }
}

#[test]
fn frozen_and_ignored_names_must_exist() {
    let (_, mut params) = model(1);
    for (frozen, ignored) in [
        (vec!["nope".to_owned()], vec![]),
        (vec![], vec!["nope".to_owned()]),
    ] {
        let options = DdpOptions {
            frozen,
            ignored,
            ..DdpOptions::default()
        };
        let group = ProcessGroup::threads(1, Default::default()).remove(0);
        let error = DistributedDataParallel::new(group, &mut params, options)
            .err()
            .expect("no such parameter");
        assert!(error.to_string().contains("nope was to be "), "{error}");
    }
}

#[test]
fn parameters_of_a_changed_model_are_refused_by_name() {
    let group = ProcessGroup::threads(1, Default::default()).remove(0);
    let (_, mut params) = model(1);
    let mut ddp =
        DistributedDataParallel::new(group, &mut params, DdpOptions::default()).expect("ddp");
    let (net, larger) = model(2);
    let error = backward(&net, &larger, 1, &mut ddp).expect_err("head1 is new");
    assert!(
        error.to_string().contains("head1.bias, which has 1"),
        "{error}"
    );
}

#[test]
fn buffers_follow_their_policy() {
    // What a rank has afterwards: its own, rank 0's, or the mean of all.
    let own = |rank: usize, _: usize| 10.0 * (rank + 1) as f32;
    let first = |_: usize, _: usize| 10.0;
    let mean = |_: usize, world: usize| 5.0 * (world + 1) as f32;
    type After = fn(usize, usize) -> f32;
    let policies: [(Buffers, After, After); 5] = [
        (Buffers::Never, own, own),
        (Buffers::RankZero(Every::Step), first, first),
        (Buffers::RankZero(Every::Epoch), own, first),
        (Buffers::Mean(Every::Step), mean, mean),
        (Buffers::Mean(Every::Epoch), own, mean),
    ];
    for world in [1, 2, 3, 8] {
        for (buffers, after_step, after_epoch) in policies {
            ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let mut scope = Scope::new(Seed(3));
                BatchNorm::new(scope.enter("bn"), 4);
                let mut params = scope.build().expect("model builds");
                let options = DdpOptions {
                    buffers,
                    ..DdpOptions::default()
                };
                let ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                let id = params.find_buffer("bn.running_mean").expect("buffer");
                params.buffer_mut(id).fill(own(rank, world));
                ddp.sync_buffers(&mut params).expect("step");
                let want = after_step(rank, world);
                assert_eq!(params.buffer(id), [want; 4], "{buffers:?}");
                ddp.end_epoch(&mut params).expect("epoch");
                let want = after_epoch(rank, world);
                assert_eq!(params.buffer(id), [want; 4], "{buffers:?}");
            });
        }
    }
}

/// Three steps of a model with batch normalisation, as the wrapper's documentation has them, each rank with its own
/// data; then the closing check.
fn with_norm(group: ProcessGroup, buffers: Option<Buffers>, synced: bool) -> Result<(), String> {
    let mut scope = Scope::new(Seed(3));
    let norm = BatchNorm::new(scope.enter("bn"), 2);
    let head = Linear::new(scope.enter("head"), 2, 1);
    let mut params = scope.build().expect("model builds");
    let mut options = DdpOptions::default();
    if let Some(buffers) = buffers {
        options.buffers = buffers;
    }
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
    let mut optimizer = Sgd::new(&params, 0.1);
    let mut tape = Tape::new(Threads(1));
    // PyTorch's rule for rank 0's mean: 0.9 of the last and 0.1 of the batch's.
    let mut mean = 0.0f64;
    for index in 0..3 {
        let far = |rank: usize| (10 * rank + index) as f32;
        let x = [far(group.rank()), 1.0, far(group.rank()) + 2.0, -1.0];
        let step = tape.step(&params, StepKey::new(0, index as u64));
        let x = norm.forward(step.input(&x, &[2, 2]).expect("input"));
        let loss = x.and_then(|x| head.forward(x)?.mse_loss(&[1.0; 2], Reduction::Mean));
        loss.and_then(|loss| loss.backward(&mut ddp)).expect("step");
        drop(step);
        assert!(ddp.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("update");
        ddp.update_buffers(&mut tape, &mut params).expect("buffers");
        if synced {
            ddp.sync_buffers(&mut params).expect("buffers");
        }
        mean = 0.9 * mean + 0.1 * (f64::from(far(0)) + 1.0);
    }
    let id = params.find_buffer("bn.running_mean").expect("buffer");
    if group.rank() == 0 || (synced && buffers.is_none()) {
        assert!((f64::from(params.buffer(id)[0]) - mean).abs() < 1e-6);
    }
    let mut digest = [0u8; 32];
    let all = params.flat().iter().chain(params.buffers_flat());
    for (i, byte) in all.flat_map(|v| v.to_le_bytes()).enumerate() {
        digest[i % 32] = digest[i % 32].rotate_left(3) ^ byte;
    }
    verify_equal(&group, &params, digest).map_err(|e| e.to_string())
}

/// As under PyTorch, whose default is `broadcast_buffers=True`.
#[test]
fn by_default_a_model_with_batch_normalisation_ends_equal_on_all_ranks() {
    for outcome in ranks(3, Over::Thread, |group| with_norm(group, None, true)) {
        outcome.expect("equal");
    }
    for (buffers, synced) in [(None, false), (Some(Buffers::Never), true)] {
        for outcome in ranks(3, Over::Thread, |group| with_norm(group, buffers, synced)) {
            let error = outcome.expect_err("each rank has statistics of its own");
            for word in [
                "the buffers of ranks 1, 2",
                "bn.running_mean",
                "sync_buffers",
            ] {
                assert!(error.contains(word), "{error}");
            }
        }
    }
}

/// PyTorch finds unused parameters by one more walk over the graph and one more all-reduce. Here whatever is allowed sends
/// the same: the count of the ranks that used a parameter rides with its gradient.
#[test]
fn finding_unused_parameters_sends_nothing_of_its_own() {
    let sent = |unused: Unused, all_used: bool| -> u64 {
        let each = ranks(2, Over::Tcp, |group| {
            let (net, mut params) = model(2 - usize::from(all_used));
            let options = DdpOptions {
                unused,
                ..DdpOptions::default()
            };
            let mut ddp =
                DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
            // The first lays the buckets out anew.
            backward(&net, &params, 0, &mut ddp).expect("backward");
            assert!(ddp.finish().expect("finish").is_yes());
            let before: u64 = group.bytes_sent_to().iter().sum();
            for _ in 0..3 {
                backward(&net, &params, 0, &mut ddp).expect("backward");
                assert!(ddp.finish().expect("finish").is_yes());
            }
            group.bytes_sent_to().iter().sum::<u64>() - before
        });
        each.iter().sum()
    };
    let refused = sent(Unused::Refuse, true);
    assert!(refused > 0);
    assert_eq!(sent(Unused::Allow, true), refused);
    assert_eq!(sent(Unused::SameEveryStep, true), refused);
    assert_eq!(
        sent(Unused::Allow, false),
        sent(Unused::SameEveryStep, false)
    );
}

/// A parameter of each rank's own counts in no norm, and is not clipped: else every rank would scale what they share by
/// another factor. What a rank that sat out has left of an earlier step counts nowhere either.
#[test]
fn clipping_leaves_out_what_is_each_ranks_own() {
    const LIMIT: f64 = 0.5;
    for world in [1, 2, 3, 8] {
        let shared = ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (net, mut params) = model(1);
            let head = params.find("head0.weight").expect("head");
            params.get_mut(head).fill(1.0 + rank as f32);
            let options = DdpOptions {
                ignored: vec!["head0.weight".to_owned()],
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let mut optimizer = Sgd::new(&params, 0.01);
            let mut norms = Vec::new();
            for i in 0..3 {
                let before = params.clone();
                let sits_out = i == 1 && rank > 0;
                let mut step = ddp.begin(if sits_out { &[] } else { &[1] }).expect("begin");
                if !sits_out {
                    let sink = step.micro_batch().expect("declared");
                    backward(&net, &params, 0, sink).expect("backward");
                }
                assert!(step.finish().expect("finish").is_yes());
                let norm = step_clipped(&mut optimizer, &mut params, &ddp, LIMIT).expect("step");
                let shared = params.ids().filter(|id| *id != head);
                let squares: f64 = shared
                    .flat_map(|id| ddp.grad(id))
                    .map(|g| f64::from(*g).powi(2))
                    .sum();
                assert!((norm - squares.sqrt()).abs() < 1e-9 * norm, "{norm}");
                assert!(norm > LIMIT, "nothing is clipped at {norm}");
                norms.push(norm.to_bits());
                for ((new, old), g) in params
                    .get(head)
                    .iter()
                    .zip(before.get(head))
                    .zip(ddp.grad(head))
                {
                    let want = if sits_out {
                        *old
                    } else {
                        g.mul_add(-0.01, *old)
                    };
                    assert_eq!(new.to_bits(), want.to_bits(), "rank {rank}, step {i}");
                }
            }
            let shared = params.ids().filter(|id| *id != head);
            let weights: Vec<u32> = shared
                .flat_map(|id| params.get(id))
                .map(|w| w.to_bits())
                .collect();
            (weights, norms)
        });
        for (rank, own) in shared.iter().enumerate() {
            assert_eq!(*own, shared[0], "rank {rank} of {world}");
        }
    }
}

/// Reports all gradients as `value` says, the last parameter's first; `None` says that the loss does not depend on it.
fn report(
    sink: &mut dyn phalanx_nn::GradSink,
    params: &Params,
    value: impl Fn(&str) -> Option<f32>,
) {
    for (id, info) in params.ids().zip(params.infos()).rev() {
        match value(&info.name) {
            Some(value) => {
                sink.slot(id).fill(value);
                sink.ready(id).expect("ready");
            }
            None => sink.unused(id).expect("unused"),
        }
    }
}

fn shards_or_ranks() -> [Deterministic; 2] {
    [
        Deterministic::Ranks,
        Deterministic::Shards(ShardTree::new(8).expect("fits")),
    ]
}

/// As many micro-batches of one sample as a rank has to give.
fn one_each(deterministic: Deterministic, group: &ProcessGroup) -> Vec<usize> {
    match deterministic {
        Deterministic::Shards(tree) => vec![1; tree.range(group.world_size(), group.rank()).len()],
        _ => vec![1],
    }
}

/// Also where the ignored one is reported last of all, after all others have gone out.
#[test]
fn a_gradient_of_each_ranks_own_that_is_not_finite_votes_the_step_down() {
    for world in [1, 2, 3, 8] {
        for deterministic in shards_or_ranks() {
            for name in ["trunk.weight", "head0.bias"] {
                let commits = ranks(world, Over::Thread, |group| {
                    let rank = group.rank();
                    let (_, mut params) = model(1);
                    let options = DdpOptions {
                        ignored: vec!["trunk.bias".to_owned(), name.to_owned()],
                        deterministic,
                        ..DdpOptions::default()
                    };
                    let sizes = one_each(deterministic, &group);
                    let mut ddp =
                        DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                    let mut commits = Vec::new();
                    for bad in [false, true, false] {
                        let mut step = ddp.begin(&sizes).expect("begin");
                        for _ in &sizes {
                            let sink = step.micro_batch().expect("declared");
                            report(sink, &params, |n| {
                                let bad = bad && rank + 1 == world && n == name;
                                Some(if bad { f32::NAN } else { 1.0 })
                            });
                        }
                        commits.push(step.finish().expect("finish").to_string());
                    }
                    assert_eq!(ddp.skipped_steps(), 1);
                    commits
                });
                let no = format!("rank {}: the gradient of {name} is not finite", world - 1);
                for commit in commits {
                    assert_eq!(commit, ["", &no, ""], "{deterministic:?}, {world} ranks");
                }
            }
        }
    }
}

/// What a batch of no samples reports is no use of a parameter.
#[test]
fn a_micro_batch_without_samples_uses_nothing() {
    for world in [2, 3, 8] {
        for unused in [Unused::Allow, Unused::SameEveryStep] {
            ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let (_, mut params) = model(2);
                let options = DdpOptions {
                    ignored: vec!["trunk.bias".to_owned()],
                    unused,
                    ..DdpOptions::default()
                };
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                let sizes: &[usize] = if rank == 0 { &[2, 1] } else { &[0] };
                for _ in 0..2 {
                    let mut step = ddp.begin(sizes).expect("begin");
                    for &n in sizes {
                        let sink = step.micro_batch().expect("declared");
                        report(sink, &params, |name| {
                            (n == 0 || !name.starts_with("head1")).then_some(1.0)
                        });
                    }
                    assert!(step.finish().expect("finish").is_yes());
                    for (id, info) in params.ids().zip(params.infos()) {
                        let nobodys = info.name.starts_with("head1");
                        let others = info.name == "trunk.bias" && rank > 0;
                        assert_eq!(
                            ddp.untouched(id),
                            nobodys || others,
                            "{} on rank {rank}",
                            info.name
                        );
                    }
                }
            });
        }
        // Nor does such a rank leave anything out.
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let (_, mut params) = model(1);
            let options = DdpOptions {
                unused: Unused::Refuse,
                ..DdpOptions::default()
            };
            let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
            let mut step = ddp.begin(&[usize::from(rank == 0)]).expect("begin");
            let sink = step.micro_batch().expect("declared");
            report(sink, &params, |name| {
                (rank == 0 || name != "trunk.bias").then_some(1.0)
            });
            assert!(step.finish().expect("finish").is_yes());
        });
    }
}

#[test]
fn a_parameter_is_ignored_or_frozen_but_not_both() {
    let (_, mut params) = model(1);
    let options = DdpOptions {
        frozen: vec!["trunk.bias".to_owned()],
        ignored: vec!["trunk.weight".to_owned(), "trunk.bias".to_owned()],
        ..DdpOptions::default()
    };
    let group = ProcessGroup::threads(1, Default::default()).remove(0);
    let error = DistributedDataParallel::new(group, &mut params, options)
        .err()
        .expect("both");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "trunk.bias is both ignored, so trained by each rank for itself, and frozen, so not trained; leave out one of both"
    );
}

/// Between steps it is for the one that follows; the gradients of the last one stay.
#[test]
fn a_veto_between_steps_is_for_the_next_one() {
    for world in [1, 2, 3, 8] {
        for deterministic in shards_or_ranks() {
            ranks(world, Over::Thread, |group| {
                let rank = group.rank();
                let (_, mut params) = model(1);
                let options = DdpOptions {
                    deterministic,
                    ..DdpOptions::default()
                };
                let sizes = one_each(deterministic, &group);
                let mut ddp =
                    DistributedDataParallel::new(group, &mut params, options).expect("ddp");
                let head = params.find("head0.weight").expect("head");
                // Before, between and within steps; none before the last.
                for veto in [Some(false), Some(false), Some(true), None] {
                    let vetoes = rank + 1 == world;
                    let gradients = ddp.grad(head).len();
                    if veto == Some(false) && vetoes {
                        ddp.veto();
                    }
                    assert_eq!(
                        ddp.grad(head).len(),
                        gradients,
                        "a veto took the last gradients away"
                    );
                    let mut step = ddp.begin(&sizes).expect("begin");
                    for _ in &sizes {
                        let sink = step.micro_batch().expect("declared");
                        if veto == Some(true) && vetoes {
                            sink.veto();
                        }
                        report(sink, &params, |_| Some(1.0));
                    }
                    let want = match veto {
                        Some(_) => format!("rank {} asked for it", world - 1),
                        None => String::new(),
                    };
                    assert_eq!(step.finish().expect("finish").to_string(), want, "{veto:?}");
                    assert_eq!(ddp.grad(head).is_empty(), veto.is_some());
                }
                let gradients = ddp.grad(head).to_vec();
                ddp.veto();
                assert_eq!(ddp.grad(head), gradients);
            });
        }
    }
}
