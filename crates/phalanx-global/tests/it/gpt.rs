//! A small transformer under several meshes, against one rank.

use phalanx_global::{Parallel, Placement, Sbp};
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::Adam;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};

use crate::common::{Over, on_mesh};

const CONFIG: GptConfig = GptConfig {
    vocab: 11,
    context: 6,
    layers: 2,
    heads: 4,
    width: 16,
    dropout: 0.1,
};

/// Losses of some steps, the weights after them, and how many parameters were prefetched.
type Trained = (Vec<f32>, Vec<f32>, u64);

fn train(placement: &Placement, parallel: &Parallel, tokens: &[Sbp], prefetch: bool) -> Trained {
    let mut scope = Scope::new(Seed(1));
    let model = Gpt::new(&mut scope, &CONFIG);
    let params = scope.build().unwrap();
    let mut weights = parallel.build(placement, &params).unwrap();
    weights.set_prefetch(prefetch);
    let mut grads = weights.grads();
    let mut adam = Adam::new(weights.local(), 1e-2);
    let mut tape = Tape::new(Threads(1));
    let mut losses = Vec::new();
    for i in 0..5 {
        let step = weights.step(&mut tape, StepKey::new(0, i));
        let text: Vec<u32> = (0..8 * 7)
            .map(|k| ((k * k + i as usize) % 11) as u32)
            .collect();
        let from = |first: usize| -> Vec<u32> {
            text.chunks(7)
                .flat_map(|row| row[first..first + 6].to_vec())
                .collect()
        };
        let x = step.indices(&from(0), &[8, 6], tokens).unwrap();
        let y = step.indices(&from(1), &[8, 6], tokens).unwrap();
        let logits = model.forward(&step, &x, (8, 6)).unwrap();
        let loss = logits.cross_entropy(&y, Reduction::Mean).unwrap();
        losses.push(loss.item().unwrap());
        loss.backward(&mut grads).unwrap();
        drop(step);
        adam.step(weights.local_mut(), &grads).unwrap();
    }
    let ids: Vec<_> = weights.local().ids().collect();
    let all = ids
        .into_iter()
        .flat_map(|id| weights.full(id).unwrap())
        .collect();
    (losses, all, weights.prefetched())
}

fn close(name: &str, a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        let far = (a - b).abs() > tolerance * b.abs().max(1e-2);
        assert!(!far, "{name}: {a} instead of {b}");
    }
}

const B: Sbp = Sbp::Broadcast;

/// Column and row parallel over the mesh dimension.
fn tensor_parallel(dim: &str) -> Parallel {
    Parallel::new()
        .attention(dim, &["transformer.h.*.attn"])
        .column(dim, &["transformer.h.*.mlp.fc", "lm_head"])
        .row(dim, &["transformer.h.*.mlp.proj"])
        .vocabulary(dim, &["transformer.wte"])
}

#[test]
fn any_mesh_trains_as_one_rank() {
    let s0 = Sbp::split(0);
    let whole = Parallel::new();
    let serial = on_mesh(Over::Thread, &[1], |p| train(p, &whole, &[B], false));
    let (losses, weights, _) = &serial[0];
    assert!(losses[4] < losses[0]);
    let cases: [(&str, &[usize], Parallel, &[Sbp]); 9] = [
        ("data", &[2], whole.clone(), &[s0]),
        ("data, uneven", &[3], whole, &[s0]),
        ("tensor", &[2], tensor_parallel("data"), &[B]),
        ("tensor, uneven heads", &[3], tensor_parallel("data"), &[B]),
        (
            "sharded",
            &[2],
            Parallel::new().fully_sharded("data"),
            &[s0],
        ),
        (
            "sharded, uneven",
            &[3],
            Parallel::new().fully_sharded("data"),
            &[s0],
        ),
        (
            "data and tensor",
            &[2, 2],
            tensor_parallel("tensor"),
            &[s0, B],
        ),
        (
            "sharded and tensor",
            &[2, 2],
            tensor_parallel("tensor").fully_sharded("data"),
            &[s0, B],
        ),
        ("sequence", &[2], Parallel::new(), &[Sbp::split(1)]),
    ];
    for (name, mesh, parallel, tokens) in &cases {
        for over in [Over::Thread, Over::Shm, Over::Tcp] {
            for (l, w, _) in on_mesh(over, mesh, |p| train(p, parallel, tokens, false)) {
                close(name, &l, losses, 1e-5);
                // Where a gradient is near 0, Adam takes steps of either sign.
                close(name, &w, weights, 1e-2);
            }
        }
    }
}

#[test]
fn names_that_do_not_exist_are_errors() {
    let error = |parallel: Parallel| {
        on_mesh(Over::Thread, &[1], |placement| {
            let mut scope = Scope::new(Seed(1));
            Gpt::new(&mut scope, &CONFIG);
            let params = scope.build().unwrap();
            parallel.build(placement, &params).unwrap_err().to_string()
        })
        .remove(0)
    };
    assert_eq!(
        error(Parallel::new().column("model", &["lm_head"])),
        "the mesh data=1 has no dimension \"model\""
    );
    let unknown = error(Parallel::new().row("data", &["transformer.h.*.mlp.out"]));
    assert!(
        unknown.starts_with(
            "no parameter is called transformer.h.*.mlp.out.weight; the model has transformer.wte.weight, "
        ),
        "{unknown}"
    );
}

#[test]
fn prefetching_changes_no_bit() {
    let tokens = [Sbp::split(0)];
    let sharded = Parallel::new().fully_sharded("data");
    for over in [Over::Thread, Over::Shm, Over::Tcp] {
        let of = |prefetch| on_mesh(over, &[2], |p| train(p, &sharded, &tokens, prefetch));
        let (plain, ahead) = (of(false), of(true));
        for ((losses, weights, none), (same_losses, same_weights, some)) in plain.iter().zip(&ahead)
        {
            assert_eq!((losses, weights), (same_losses, same_weights));
            assert_eq!(*none, 0);
            // All but the first gather of each step, forward and backward, from the second step on.
            assert!(*some > 4 * 20, "{some}");
        }
    }
}
