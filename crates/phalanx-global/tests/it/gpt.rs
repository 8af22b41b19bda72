//! A small transformer under several meshes, against one rank.

use phalanx_global::{GlobalParams, Placement, Sbp};
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::Adam;
use phalanx_nn::{ParamInfo, Reduction, Scope, Seed, StepKey, Tape, Threads};

use crate::common::{Over, on_mesh};

const CONFIG: GptConfig = GptConfig {
    vocab: 11,
    context: 6,
    layers: 2,
    heads: 4,
    width: 16,
    dropout: 0.1,
};

/// Losses of some steps, and the weights after them.
fn train(
    placement: &Placement,
    sbp: impl FnMut(&ParamInfo) -> Vec<Sbp>,
    gather: Option<&str>,
    tokens: &[Sbp],
) -> (Vec<f32>, Vec<f32>) {
    let mut scope = Scope::new(Seed(1));
    let model = Gpt::new(&mut scope, &CONFIG);
    let params = scope.build().unwrap();
    let mut weights = GlobalParams::new(placement, &params, sbp).unwrap();
    if let Some(dim) = gather {
        weights = weights.gather_over(dim).unwrap();
    }
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
    (losses, all)
}

fn close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1e-2), "{a} {b}");
    }
}

const B: Sbp = Sbp::Broadcast;

/// Column and row parallel.
fn tensor_parallel(info: &ParamInfo) -> Sbp {
    let is = |parts: &[&str]| parts.iter().any(|p| info.name.contains(p));
    if is(&["attn.q", "attn.k", "attn.v", "mlp.fc", "lm_head"]) {
        Sbp::split(0)
    } else if is(&["attn.proj.weight", "mlp.proj.weight"]) {
        Sbp::split(1)
    } else if is(&["wte"]) {
        Sbp::split(0)
    } else {
        B
    }
}

#[test]
fn any_mesh_trains_as_one_rank() {
    let serial = on_mesh(Over::Thread, &[1], |p| train(p, |_| vec![B], None, &[B]));
    let (losses, weights) = &serial[0];
    assert!(losses[4] < losses[0]);
    let same = |name: &str, made: Vec<(Vec<f32>, Vec<f32>)>| {
        for (l, w) in &made {
            println!("{name}: {l:?}");
            close(l, losses, 1e-5);
            close(w, weights, 1e-2);
        }
    };
    let s0 = Sbp::split(0);
    same(
        "data",
        on_mesh(Over::Thread, &[2], |p| train(p, |_| vec![B], None, &[s0])),
    );
    same(
        "data 3",
        on_mesh(Over::Thread, &[3], |p| train(p, |_| vec![B], None, &[s0])),
    );
    same(
        "tensor",
        on_mesh(Over::Thread, &[2], |p| {
            train(p, |info| vec![tensor_parallel(info)], None, &[B])
        }),
    );
    same(
        "tensor 3",
        on_mesh(Over::Thread, &[3], |p| {
            train(p, |info| vec![tensor_parallel(info)], None, &[B])
        }),
    );
    same(
        "sharded",
        on_mesh(Over::Thread, &[2], |p| {
            train(p, |_| vec![s0], Some("data"), &[s0])
        }),
    );
    same(
        "both",
        on_mesh(Over::Thread, &[2, 2], |p| {
            train(
                p,
                |info| vec![s0, tensor_parallel(info)],
                Some("data"),
                &[s0, B],
            )
        }),
    );
}
