//! Tensors that move between placements of some of the ranks, compared with the serial tensor and its gradient.

use phalanx_comm::ProcessGroup;
use phalanx_global::{Fold, Global, GlobalParams, Layout, Placement, Sbp};
use phalanx_nn::layers::Linear;
use phalanx_nn::{GradView, Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Threads, Value};

use crate::common::{NAMES, Over, groups, indices, number};

/// Every SBP of a tensor with two axes.
const ALL: [Sbp; 6] = [
    Sbp::Broadcast,
    Sbp::Split(0),
    Sbp::Split(1),
    Sbp::Partial(Fold::Sum),
    Sbp::Partial(Fold::Min),
    Sbp::Partial(Fold::Max),
];

/// Meshes, and the ranks on them, of a job of that many ranks.
fn placements(world: usize) -> Vec<(Vec<usize>, Vec<usize>)> {
    let all: Vec<usize> = (0..world).collect();
    let every = |from: usize| {
        all.iter()
            .copied()
            .skip(from)
            .step_by(2)
            .collect::<Vec<_>>()
    };
    let mut lines = vec![all.clone(), every(0), every(1), vec![world - 1]];
    lines.push(all[..world.div_ceil(2)].to_vec());
    lines.dedup();
    let mut meshes: Vec<_> = lines.into_iter().map(|r| (vec![r.len()], r)).collect();
    if world >= 5 {
        meshes.push((vec![2, 2], vec![0, 1, 3, 4]));
    }
    if world == 8 {
        meshes.push((vec![2, 2, 2], all));
    }
    meshes
}

/// All SBPs of a mesh; of one of several dimensions a sample.
fn sbps(mesh: &[usize]) -> Vec<Vec<Sbp>> {
    let all = mesh.iter().fold(vec![Vec::new()], |all, _| {
        let longer = |one: &Vec<Sbp>| ALL.map(|s| [&one[..], &[s]].concat());
        all.iter().flat_map(longer).collect::<Vec<_>>()
    });
    let every = [1, 1, 7, 41][mesh.len()];
    all.into_iter().step_by(every).collect()
}

fn place(group: &ProcessGroup, (mesh, ranks): &(Vec<usize>, Vec<usize>)) -> Placement {
    let dims: Vec<_> = NAMES.into_iter().zip(mesh.iter().copied()).collect();
    Placement::of_ranks(group, &dims, ranks).unwrap()
}

/// Runs `body` on each rank of a group of `world`.
fn on_ranks(over: Over, world: usize, body: impl Fn(&ProcessGroup) + Sync) {
    std::thread::scope(|scope| {
        for group in groups(over, world) {
            let body = &body;
            scope.spawn(move || body(&group));
        }
    });
}

fn nothing(mesh: &Placement) -> GlobalParams {
    let none = Scope::new(Seed(0)).build().unwrap();
    GlobalParams::new(mesh, &none, |_| vec![]).unwrap()
}

fn values(shape: [usize; 2], which: usize) -> Vec<f32> {
    let all = indices(&[0..shape[0], 0..shape[1]]);
    // Multiples of 1/32, whose sums and products are exact.
    let one = |i: &Vec<usize>| (number(&[&[which], &i[..]].concat()) * 32.0).round() / 32.0;
    all.iter().map(one).collect()
}

fn bits(all: &[f32]) -> Vec<u32> {
    // Zero has two signs.
    all.iter().map(|x| (x + 0.0).to_bits()).collect()
}

fn has_extremes(sbp: &[Sbp]) -> bool {
    sbp.iter()
        .any(|s| matches!(s, Sbp::Partial(Fold::Min | Fold::Max)))
}

/// Moves a tensor of each SBP of `from` to each SBP of `to` and back, with its gradient.
fn moves(group: &ProcessGroup, from: &Placement, to: &Placement, shape: [usize; 2]) -> usize {
    let params = nothing(&Placement::of(group));
    let mut grads = params.grads();
    let mut tape = Tape::new(Threads(1));
    let (x, w) = (values(shape, 0), values(shape, 1));
    let twice: Vec<f32> = x.iter().map(|x| x * 2.0).collect();
    let mut count = 0;
    for a in sbps(from.sizes()) {
        for b in sbps(to.sizes()) {
            let what = format!(
                "{world}: {a:?} on {from} to {b:?} on {to}",
                world = group.world_size()
            );
            let step = params.step(&mut tape, StepKey::new(0, count as u64));
            let (here, there) = (step.on(from), step.on(to));
            let before = here.variable(&x, &shape, &a).unwrap();
            let moved = before.share().to_placement(&there, &b).unwrap();
            assert_eq!(moved.layout().sbp(), b, "{what}");
            let own = if to.is_member() {
                Layout::even(to.sizes(), &shape, &b)
                    .unwrap()
                    .shape_of(to.group().rank())
            } else {
                vec![0]
            };
            assert_eq!(moved.share().to_local().shape(), own, "{what}");
            let got = moved.full().unwrap();
            let want = if to.is_member() { &x[..] } else { &[] };
            assert_eq!(bits(&got), bits(want), "{what}");
            // Twice the value on the other placement, and its sum with weights on all ranks.
            let whole = vec![Sbp::Broadcast; to.sizes().len()];
            let two = there.input(&[2.0], &[1], &whole).unwrap();
            let made = moved.to_global(&whole).unwrap().mul(two).unwrap();
            let back = made.to_placement(&step, &[Sbp::split(0)]).unwrap();
            assert_eq!(bits(&back.full().unwrap()), bits(&twice), "{what}");
            let w = step.input(&w, &shape, &[Sbp::Broadcast]).unwrap();
            let loss = back.mul(w).unwrap().sum(&[], false).unwrap();
            loss.backward(&mut grads).unwrap();
            if from.is_member() {
                let got = before.grad().unwrap().unwrap_or_default();
                let want: Vec<f32> = values(shape, 1).iter().map(|w| w * 2.0).collect();
                match (has_extremes(&a), has_extremes(&b)) {
                    (false, false) => assert_eq!(bits(&got), bits(&want), "gradient of {what}"),
                    // Ranks that have an equal minimum or maximum share its gradient, and the shares are rounded.
                    (false, true) => {
                        let is_near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
                        assert!(got.iter().zip(&want).all(is_near), "gradient of {what}");
                    }
                    (true, _) => {}
                }
            }
            count += 1;
        }
    }
    count
}

fn all_moves(over: Over, worlds: impl Iterator<Item = usize>, shape: [usize; 2]) {
    for world in worlds {
        on_ranks(over, world, |group| {
            let meshes: Vec<Placement> =
                placements(world).iter().map(|p| place(group, p)).collect();
            let mut count = 0;
            for from in &meshes {
                for to in &meshes {
                    count += moves(group, from, to, shape);
                }
            }
            assert!(count > 100, "{count}");
        });
    }
}

#[test]
fn every_pair_of_layouts_moves_between_placements_with_its_gradient() {
    all_moves(Over::Thread, 2..=8, [5, 3]);
    all_moves(Over::Thread, [3].into_iter(), [0, 2]);
}

#[test]
fn placements_exchange_over_shared_memory_and_tcp() {
    all_moves(Over::Shm, [3].into_iter(), [4, 3]);
    all_moves(Over::Tcp, [3].into_iter(), [4, 3]);
}

fn model() -> (Linear, Params) {
    let mut scope = Scope::new(Seed(3));
    let layer = Linear::new(scope.enter("layer"), 3, 4);
    (layer, scope.build().unwrap())
}

/// Operations without parameters, a loss at their end.
fn scores<'s, V: Value<'s>>(x: V) -> phalanx_nn::Result<V> {
    let half = x.share().slice(1, 0..2)?;
    let rest = x.share().slice(1, 2..4)?;
    let square = x.share().bmm_transposed(x.share())?.softmax(1)?;
    V::concat(vec![half.sub(rest)?, square, x.gelu()?], 1)
}

/// A model on all ranks, whose scores are computed, and compared with labels, on two of them.
#[test]
fn operations_on_some_ranks_have_the_serial_loss_and_gradients() {
    let (x, labels) = (values([6, 3], 5), [1, 0, 3, 2, 1, 5]);
    let (layer, params) = model();
    let mut want = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let loss = {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = layer.forward(step.input(&x, &[6, 3]).unwrap()).unwrap();
        let made = scores(x.reshape(&[1, 6, 4]).unwrap().reshape(&[6, 4]).unwrap());
        let made = made.unwrap();
        let loss = made
            .log_softmax()
            .unwrap()
            .nll_loss(&labels, Reduction::Mean)
            .unwrap();
        let value = loss.item().unwrap();
        loss.backward(&mut want).unwrap();
        value
    };
    let want: Vec<Vec<f32>> = params.ids().map(|id| want.grad(id).to_vec()).collect();
    for (ranks, sbp) in [
        (vec![0, 2], Sbp::split(0)),
        (vec![1, 2], Sbp::split(1)),
        (vec![2], Sbp::broadcast()),
        (vec![0, 1, 2], Sbp::split(0)),
        (vec![1], Sbp::partial_sum()),
    ] {
        on_ranks(Over::Thread, 3, |group| {
            let all = Placement::of(group);
            let mesh = place(group, &(vec![ranks.len()], ranks.clone()));
            let (layer, params) = model();
            let params = GlobalParams::new(&all, &params, |_| vec![Sbp::Broadcast]).unwrap();
            let mut grads = params.grads();
            let mut tape = Tape::new(Threads(1));
            let step = params.step(&mut tape, StepKey::new(0, 0));
            let there = step.on(&mesh);
            let x = layer
                .forward(step.input(&x, &[6, 3], &[Sbp::split(0)]).unwrap())
                .unwrap();
            let x = x.to_placement(&there, &[sbp]).unwrap();
            let made = scores(x).unwrap();
            let labels = there.indices(&labels, &[6], &[Sbp::Broadcast]).unwrap();
            let own = made.cross_entropy(&labels, Reduction::Mean).unwrap();
            // The loss of two ranks, on all.
            let on_all = own.share().to_placement(&step, &[Sbp::Broadcast]).unwrap();
            let got = on_all.item().unwrap();
            assert!((got - loss).abs() < 1e-6, "{ranks:?}: {got}, not {loss}");
            assert_eq!(own.item().is_ok(), mesh.is_member());
            own.to_global(&[Sbp::Broadcast])
                .unwrap()
                .backward(&mut grads)
                .unwrap();
            for (id, want) in params.local().ids().zip(&want) {
                let pairs = grads.grad(id).iter().zip(want);
                for (got, want) in pairs {
                    assert!((got - want).abs() < 1e-6, "{ranks:?}: {got}, not {want}");
                }
            }
        });
    }
}

/// Each rank of a placement has its own part, the others none.
#[test]
fn parts_of_some_ranks_make_a_tensor() {
    on_ranks(Over::Thread, 4, |group| {
        let mesh = place(group, &(vec![2], vec![1, 3]));
        let params = nothing(&Placement::of(group));
        let mut tape = Tape::new(Threads(1));
        let step = params.step(&mut tape, StepKey::new(0, 0));
        let there = step.on(&mesh);
        let own: &[f32] = [&[][..], &[1.0, 2.0, 3.0], &[], &[4.0]][group.rank()];
        let local = step.local().input(own, &[own.len()]).unwrap();
        let x = there.to_global(local, &[Sbp::split(0)]).unwrap();
        assert_eq!(x.layout().shape(), [4]);
        assert_eq!(x.layout().cuts(0), Some(&[0, 3, 4][..]));
        let whole = x.to_placement(&step, &[Sbp::split(0)]).unwrap();
        assert_eq!(whole.to_local().data(), [group.rank() as f32 + 1.0]);
    });
}

#[test]
fn wrong_placements_are_refused() {
    on_ranks(Over::Thread, 4, |group| {
        let says = |made: phalanx_global::Result<Placement>| made.unwrap_err().to_string();
        for (ranks, want) in [
            (&[2, 0][..], "must ascend"),
            (&[1, 1], "must ascend"),
            (&[0, 4], "below 4"),
            (&[0, 1, 2], "does not have 3 ranks"),
        ] {
            let text = says(Placement::of_ranks(group, &[("data", 2)], ranks));
            assert!(text.contains(want), "{text}");
        }
        let four = [("a", 1), ("b", 1), ("c", 1), ("d", 4)];
        assert!(says(Placement::new(group, &four)).contains("one to three"));
        let twice = [("a", 1), ("b", 1), ("a", 4)];
        assert!(says(Placement::new(group, &twice)).contains("different name"));
        let pair = place(group, &(vec![2], vec![0, 2]));
        assert_eq!(pair.to_string(), "data=2 on ranks [0, 2]");
        let (layer, params) = model();
        if !pair.is_member() {
            let refused = GlobalParams::new(&pair, &params, |_| vec![Sbp::Broadcast]);
            assert!(
                refused
                    .err()
                    .unwrap()
                    .to_string()
                    .contains("which it is not on")
            );
        }
        let all = Placement::of(group);
        let params = GlobalParams::new(&all, &params, |_| vec![Sbp::Broadcast]).unwrap();
        let mut tape = Tape::new(Threads(1));
        let step = params.step(&mut tape, StepKey::new(0, 0));
        let there = step.on(&pair);
        let x = there.input(&[0.5; 6], &[2, 3], &[Sbp::split(0)]).unwrap();
        let refused = |made: phalanx_nn::Result<Global<'_>>| made.unwrap_err().to_string();
        let text = refused(layer.forward(x.share()));
        assert!(
            text.contains("needs parameters, which are on data=4"),
            "{text}"
        );
        let y = step.input(&[0.5; 6], &[2, 3], &[Sbp::split(0)]).unwrap();
        let text = refused(x.share().add(y));
        assert!(text.contains("different steps"), "{text}");
        // A placement of another group.
        let half = group.split(Some(group.rank() as u32 % 2)).unwrap().unwrap();
        let other = step.on(&Placement::of(&half));
        let text = refused(x.to_placement(&other, &[Sbp::Broadcast]));
        assert!(text.contains("different groups"), "{text}");
    });
}
