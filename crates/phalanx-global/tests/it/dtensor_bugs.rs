//! What PyTorch's DTensor got wrong, and what else the oracle does not run:
//! comparisons of the ranks, ways of gradients, ties, running statistics, other transports.

use phalanx_global::{ErrorKind, Fold, Global, GlobalParams, Indices, Layout, Placement, Sbp};
use phalanx_nn::layers::{Act, BatchNorm2d, Dropout};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Grads, Params, Scope, Seed, StepKey, Tape, Threads, Value};

use crate::common::{Over, number, on_mesh};

const B: Sbp = Sbp::broadcast();
const P: Sbp = Sbp::partial_sum();
const S0: Sbp = Sbp::split(0);
const S1: Sbp = Sbp::split(1);

fn nothing(placement: &Placement) -> GlobalParams {
    let params = Scope::new(Seed(0)).build().unwrap();
    GlobalParams::new(placement, &params, |_| Vec::new()).unwrap()
}

fn tape() -> Tape {
    Tape::new(Threads(1))
}

fn key() -> StepKey<'static> {
    StepKey::new(1, 2)
}

/// `n` different numbers.
fn some(n: usize) -> Vec<f32> {
    (0..n).map(|i| number(&[i])).collect()
}

#[test]
fn five_rows_over_four_ranks_come_back_as_five() {
    on_mesh(Over::Thread, &[4], |placement| {
        let (params, mut tape) = (nothing(placement), tape());
        let step = params.inference(&mut tape);
        let all = some(15);
        let x = step.input(&all, &[5, 3], &[S0]).unwrap();
        assert_eq!(x.full().unwrap(), all);
        let rank = placement.group().rank();
        let rows = x.share().to_local().shape()[0];
        assert_eq!(rows, if rank == 0 { 2 } else { 1 });
        // What the ranks have of it makes the same tensor again.
        let again = step.to_global(x.to_local(), &[S0]).unwrap();
        assert_eq!(again.layout().shape(), [5, 3]);
        let whole = again.to_global(&[B]).unwrap().to_local();
        assert_eq!((whole.shape(), whole.data()), (vec![5, 3], &all[..]));
    });
}

#[test]
fn nested_uneven_gathers_keep_every_row() {
    for (mesh, rows) in [([2, 2], 5), ([2, 3], 7), ([3, 2], 4), ([2, 3], 1)] {
        on_mesh(Over::Thread, &mesh, |placement| {
            let (params, mut tape) = (nothing(placement), tape());
            let step = params.inference(&mut tape);
            let all = some(rows * 2);
            for order in [[[S0, B], [B, B]], [[B, S0], [B, B]], [[S0, S1], [S1, B]]] {
                let mut x = step.input(&all, &[rows, 2], &[S0, S0]).unwrap();
                for sbp in order {
                    x = x.to_global(&sbp).unwrap();
                    assert_eq!(x.full().unwrap(), all, "{mesh:?}, {rows} rows, {order:?}");
                }
            }
        });
    }
}

#[test]
fn mean_over_uneven_and_empty_parts_is_the_mean() {
    for rows in [2, 5, 7] {
        on_mesh(Over::Thread, &[4], |placement| {
            let (params, mut tape) = (nothing(placement), tape());
            let mut grads = params.grads();
            let step = params.step(&mut tape, key());
            // Whole numbers: sums have no error.
            let all: Vec<f32> = (0..rows * 2).map(|i| (i * i) as f32).collect();
            let x = step.variable(&all, &[rows, 2], &[S0]).unwrap();
            let mean = x.share().mean(&[], false).unwrap();
            let want = all.iter().sum::<f32>() / all.len() as f32;
            assert!((mean.item().unwrap() - want).abs() <= want * 1e-6);
            mean.backward(&mut grads).unwrap();
            let share = 1.0 / all.len() as f32;
            assert_eq!(x.grad().unwrap().unwrap(), vec![share; all.len()]);
        });
    }
}

#[test]
fn reshape_across_a_split_dimension_keeps_the_order() {
    for ranks in [2, 3, 4] {
        on_mesh(Over::Thread, &[ranks], |placement| {
            let (params, mut tape) = (nothing(placement), tape());
            let step = params.inference(&mut tape);
            let all = some(24);
            for (from, to) in [
                (&[24][..], &[4, 6][..]),
                (&[4, 6], &[24]),
                (&[4, 6], &[6, 4]),
                (&[2, 3, 4], &[6, 4]),
                (&[6, 4], &[3, 8]),
                (&[2, 12], &[4, 2, 3]),
            ] {
                for axis in 0..from.len() {
                    let x = step.input(&all, from, &[Sbp::split(axis)]).unwrap();
                    let y = x.reshape(to).unwrap();
                    assert_eq!(y.layout().shape(), to);
                    assert_eq!(y.full().unwrap(), all, "{from:?} S({axis}) to {to:?}");
                }
            }
        });
    }
}

#[test]
fn reshape_of_axes_that_two_mesh_dimensions_split_keeps_the_order() {
    let ways = [B, P, S0, S1, Sbp::split(2)];
    for mesh in [[2, 2], [3, 2]] {
        on_mesh(Over::Thread, &mesh, |placement| {
            let (params, mut tape) = (nothing(placement), tape());
            let step = params.inference(&mut tape);
            for (from, to) in [
                // So large that bytes count for more than messages.
                ([8, 2, 12_000], &[2, 4, 24_000][..]),
                ([8, 2, 3], &[2, 4, 6]),
                ([2, 4, 6], &[8, 6]),
                ([8, 3, 2], &[4, 2, 6]),
                ([12, 2, 2], &[3, 4, 4]),
                ([2, 3, 8], &[6, 2, 4]),
            ] {
                let all = some(from.iter().product());
                for a in ways {
                    for b in ways {
                        let x = step.input(&all, &from, &[a, b]).unwrap();
                        let y = x.reshape(to).unwrap().full().unwrap();
                        assert!(y == all, "{from:?} ({a}, {b}) to {to:?} on {mesh:?}");
                    }
                }
            }
        });
    }
}

#[test]
fn a_number_added_to_a_partial_tensor_counts_once() {
    on_mesh(Over::Thread, &[3], |placement| {
        let (params, mut tape) = (nothing(placement), tape());
        let step = params.inference(&mut tape);
        let part = [placement.group().rank() as f32 - 5.0, 2.0];
        let local = step.local().input(&part, &[2]).unwrap();
        let x = step.to_global(local, &[P]).unwrap();
        let one = x.constant(&[1.0], &[1]).unwrap();
        assert_eq!(
            x.share().add(one.share()).unwrap().full().unwrap(),
            [-11.0, 7.0]
        );
        assert_eq!(
            x.share().sub(one.share()).unwrap().full().unwrap(),
            [-13.0, 5.0]
        );
        assert_eq!(one.sub(x).unwrap().full().unwrap(), [13.0, -5.0]);
    });
}

#[test]
fn dropout_masks_are_those_of_the_whole_tensor() {
    let shape = [6, 4];
    let ones = vec![1.0; 24];
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut serial = tape();
    let step = serial.step(&params, key());
    let x = step.input(&ones, &shape).unwrap();
    let want = Dropout::new(0.5).forward(x).unwrap().to_vec();
    for sbp in [B, S0, S1, P] {
        let parts = on_mesh(Over::Thread, &[3], |placement| {
            let (params, mut tape) = (nothing(placement), tape());
            let step = params.step(&mut tape, key());
            let x = step.input(&ones, &shape, &[sbp]).unwrap();
            let y = Dropout::new(0.5).forward(x).unwrap();
            assert_eq!(y.full().unwrap(), want, "{sbp}");
            y.to_local().to_vec()
        });
        if sbp == S0 {
            // Not the same mask on each rank.
            assert!(parts[0] != parts[1] && parts[1] != parts[2] && parts[0] != parts[2]);
        }
    }
}

#[test]
fn what_the_ranks_disagree_about_is_named() {
    on_mesh(Over::Thread, &[3], |placement| {
        let (params, mut tape) = (nothing(placement), tape());
        let step = params.inference(&mut tape);
        let rank = placement.group().rank();
        let says = |shape: &[usize], sbp: Sbp| {
            let local = step
                .local()
                .input(&vec![0.0; shape.iter().product()], shape);
            step.to_global(local.unwrap(), &[sbp])
                .unwrap_err()
                .to_string()
        };
        let sbp = if rank == 1 { S1 } else { S0 };
        let message = says(&[2, 2], sbp);
        assert!(
            message.contains("SBP of rank 0 is (S(0)), and of rank 1 (S(1))"),
            "{message}"
        );
        let shape: &[usize] = if rank == 2 { &[2, 2, 1] } else { &[2, 2] };
        let message = says(shape, S0);
        assert!(
            message.contains("shape of rank 0 is [2, 2], and of rank 2 [2, 2, 1]"),
            "{message}"
        );
        // Rows may differ, columns may not.
        let message = says(&[rank, if rank == 1 { 5 } else { 4 }], S0);
        assert!(
            message.contains("ranks 0 and 1 must have equal sizes of axis 1"),
            "{message}"
        );
        assert!(message.contains("4 and 5"), "{message}");
        let message = says(&[2, 2 + rank], B);
        assert!(
            message.contains("ranks 0 and 1 must have equal sizes of axis 1"),
            "{message}"
        );
        let wide = 1 + usize::from(rank == 2);
        let error = Indices::from_local(placement, &vec![0; wide], &[1, wide], &[S0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("ranks 0 and 2"), "{error}");
        // The group is still of use.
        let local = step.local().input(&[rank as f32], &[1]).unwrap();
        let all = step.to_global(local, &[S0]).unwrap().full().unwrap();
        assert_eq!(all, [0.0, 1.0, 2.0]);
    });
}

#[test]
fn ranges_that_differ_need_a_conversion() {
    on_mesh(Over::Thread, &[2], |placement| {
        let (params, mut tape) = (nothing(placement), tape());
        let mut grads = params.grads();
        let step = params.step(&mut tape, key());
        let all = some(10);
        let even = step.variable(&all, &[5, 2], &[S0]).unwrap();
        let own = [&all[..2], &all[2..]][placement.group().rank()];
        let local = step.local().variable(own, &[own.len() / 2, 2]).unwrap();
        let uneven = step.to_global(local, &[S0]).unwrap();
        step.set_automatic(false);
        let refused = even.share().add(uneven.share()).unwrap_err();
        let shown = "[5, 2] (S(0)) and [5, 2] (S(0)) with axis 0 cut at [0, 1, 5]: a conversion";
        assert!(refused.to_string().contains(shown), "{refused}");
        step.set_automatic(true);
        let sum = even.share().add(uneven.share()).unwrap();
        let twice: Vec<f32> = all.iter().map(|v| v + v).collect();
        assert_eq!(sum.full().unwrap(), twice);
        sum.sum(&[], false).unwrap().backward(&mut grads).unwrap();
        assert_eq!(even.grad().unwrap().unwrap(), [1.0; 10]);
        assert_eq!(uneven.grad().unwrap().unwrap(), [1.0; 10]);
    });
}

#[test]
fn gradients_arrive_by_any_way() {
    let all = some(15);
    let factors: Vec<f32> = (0..15).map(|i| i as f32 - 7.0).collect();
    on_mesh(Over::Thread, &[3], |placement| {
        let (params, mut tape) = (nothing(placement), tape());
        for from in [B, S0, S1, P] {
            for to in [B, S0, S1, P] {
                for way in [B, S0, S1, P] {
                    let mut grads = params.grads();
                    let step = params.step(&mut tape, key());
                    let x = step.variable(&all, &[5, 3], &[from]).unwrap();
                    let y = x.share().to_global_with(&[to], &[way]).unwrap();
                    assert_eq!(y.layout().sbp(), [to]);
                    assert_eq!(y.full().unwrap(), all);
                    let w = step.input(&factors, &[5, 3], &[B]).unwrap();
                    let loss = y.mul(w).unwrap().sum(&[], false).unwrap();
                    loss.backward(&mut grads).unwrap();
                    let got = x.grad().unwrap().unwrap();
                    assert_eq!(got, factors, "{from} to {to} by {way}");
                }
            }
        }
        let step = params.step(&mut tape, key());
        let x = step.variable(&all, &[5, 3], &[B]).unwrap();
        assert!(x.share().to_global_with(&[S0], &[Sbp::split(2)]).is_err());
        assert!(x.to_global_with(&[S0], &[B, B]).is_err());
    });
}

#[test]
fn ranks_that_tie_share_the_gradient_of_a_minimum_or_maximum() {
    for (fold, sign) in [(Fold::Max, 1.0), (Fold::Min, -1.0)] {
        on_mesh(Over::Thread, &[4], |placement| {
            let rank = placement.group().rank();
            let (params, mut tape) = (nothing(placement), tape());
            let mut grads = params.grads();
            let step = params.step(&mut tape, key());
            // All tie; two tie; rank 3 alone.
            let own = [1.0, (rank % 2) as f32, rank as f32].map(|v| sign * v);
            let local = step.local().variable(&own, &[3]).unwrap();
            let x = step
                .to_global(local.share(), &[Sbp::Partial(fold)])
                .unwrap();
            let y = x.to_global(&[B]).unwrap();
            assert_eq!(y.full().unwrap(), [1.0, 1.0, 3.0].map(|v| sign * v));
            let w = step.input(&[8.0, -6.0, 5.0], &[3], &[B]).unwrap();
            let loss = y.mul(w).unwrap().sum(&[], false).unwrap();
            loss.backward(&mut grads).unwrap();
            let (two, one) = (rank % 2 == 1, rank == 3);
            let want = [
                2.0,
                if two { -3.0 } else { 0.0 },
                if one { 5.0 } else { 0.0 },
            ];
            assert_eq!(local.grad().unwrap(), want, "{fold:?}, rank {rank}");
        });
    }
}

/// Some steps of a batch normalisation; the losses, the parameters and the running statistics.
fn normalised(
    params: &Params,
    layer: &BatchNorm2d,
    lay: Option<(&Placement, &[Sbp])>,
) -> (Vec<f32>, Vec<f32>) {
    let shape = [7, 2, 2, 3];
    let input = |i: u64| -> Vec<f32> {
        let one = |k: usize| number(&[i as usize, k]) * 3.0 + (k % 3) as f32;
        (0..84).map(one).collect()
    };
    let factors = some(84);
    let (mut tape, mut losses) = (tape(), Vec::new());
    let Some((placement, sbp)) = lay else {
        let mut params = params
            .map(|info, values| Ok((info.shape.clone(), values)))
            .unwrap();
        let mut grads = Grads::like(&params);
        let mut sgd = Sgd::new(&params, 0.1);
        for i in 0..3 {
            let step = tape.step(&params, StepKey::new(0, i));
            let x = step.input(&input(i), &shape).unwrap();
            let y = layer.forward_act(x, Act::Relu).unwrap();
            let loss = y.mul(step.input(&factors, &shape).unwrap()).unwrap();
            let loss = loss.sum(&[], false).unwrap();
            losses.push(loss.item().unwrap());
            loss.backward(&mut grads).unwrap();
            drop(step);
            sgd.step(&mut params, &grads).unwrap();
            tape.update_buffers(&mut params).unwrap();
        }
        let all = [params.flat(), params.buffers_flat()].concat();
        return (losses, all);
    };
    let whole = vec![B; placement.sizes().len()];
    let mut weights = GlobalParams::new(placement, params, |_| whole.clone()).unwrap();
    let mut grads = weights.grads();
    let mut sgd = Sgd::new(weights.local(), 0.1);
    for i in 0..3 {
        let step = weights.step(&mut tape, StepKey::new(0, i));
        let x = step.input(&input(i), &shape, sbp).unwrap();
        let y = layer.forward_act(x, Act::Relu).unwrap();
        let w = step.input(&factors, &shape, &whole).unwrap();
        let loss = y.mul(w).unwrap().sum(&[], false).unwrap();
        losses.push(loss.item().unwrap());
        loss.backward(&mut grads).unwrap();
        drop(step);
        sgd.step(weights.local_mut(), &grads).unwrap();
        tape.update_buffers(weights.local_mut()).unwrap();
    }
    let all = [weights.local().flat(), weights.local().buffers_flat()].concat();
    (losses, all)
}

#[test]
fn batch_norm_of_a_split_batch_is_that_of_the_whole() {
    let mut scope = Scope::new(Seed(0));
    let layer = BatchNorm2d::new(scope.enter("bn"), 3);
    let params = scope.build().unwrap();
    let want = normalised(&params, &layer, None);
    let cases: [(&[usize], &[Sbp]); 12] = [
        (&[1], &[S0]),
        (&[3], &[S0]),
        (&[3], &[S1]),
        (&[3], &[B]),
        (&[9], &[S0]),
        (&[2, 2], &[S0, B]),
        (&[2, 2], &[B, S0]),
        (&[2, 2], &[S0, S0]),
        (&[2, 2], &[S0, S1]),
        (&[2, 2, 2], &[S0, B, S0]),
        (&[2, 1, 3], &[S1, B, S0]),
        (&[2, 1, 2], &[B, B, S0]),
    ];
    for (mesh, sbp) in cases {
        let made = on_mesh(Over::Thread, mesh, |p| {
            normalised(&params, &layer, Some((p, sbp)))
        });
        for (losses, all) in made {
            let close = |a: &[f32], b: &[f32]| {
                let mut pairs = a.iter().zip(b);
                a.len() == b.len() && pairs.all(|(a, b)| (a - b).abs() <= 2e-5 * b.abs().max(1.0))
            };
            assert!(
                close(&losses, &want.0),
                "{sbp:?}: {losses:?}, not {:?}",
                want.0
            );
            assert!(close(&all, &want.1), "{sbp:?}: {all:?}, not {:?}", want.1);
        }
    }
}

/// Each of them, to each, to whole: values and gradients.
fn boxed(placement: &Placement, sbps: &[Vec<Sbp>], shape: &[usize]) -> usize {
    let n = shape.iter().product();
    let all: Vec<f32> = (0..n).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
    let factors: Vec<f32> = (0..n).map(|i| (i * 5 % 13) as f32 - 6.0).collect();
    let whole = vec![B; placement.sizes().len()];
    let (params, mut tape) = (nothing(placement), tape());
    for from in sbps {
        for to in sbps {
            let mut grads = params.grads();
            let step = params.step(&mut tape, key());
            let x = step.variable(&all, shape, from).unwrap();
            let layout = Layout::even(placement.sizes(), shape, to).unwrap();
            let y: Global<'_> = x.share().to_layout(&layout).unwrap();
            assert_eq!(y.full().unwrap(), all, "{from:?} to {to:?}");
            let y = y.to_global(&whole).unwrap();
            let w = step.input(&factors, shape, &whole).unwrap();
            let loss = y.mul(w).unwrap().sum(&[], false).unwrap();
            loss.backward(&mut grads).unwrap();
            assert_eq!(x.grad().unwrap().unwrap(), factors, "{from:?} to {to:?}");
        }
    }
    sbps.len() * sbps.len()
}

#[test]
fn global_tensors_convert_with_their_gradients_over_every_transport() {
    let ways = [
        B,
        S0,
        S1,
        P,
        Sbp::Partial(Fold::Min),
        Sbp::Partial(Fold::Max),
    ];
    let one: Vec<Vec<Sbp>> = ways.iter().map(|s| vec![*s]).collect();
    let pairs = ways.iter().flat_map(|a| ways.iter().map(|b| vec![*a, *b]));
    let two: Vec<Vec<Sbp>> = pairs.step_by(2).collect();
    for over in [Over::Thread, Over::Shm, Over::Tcp] {
        for shape in [[5, 3], [1, 4], [0, 2]] {
            on_mesh(over, &[3], |placement| boxed(placement, &one, &shape));
        }
        on_mesh(over, &[2, 2], |placement| boxed(placement, &two, &[5, 3]));
    }
}
