//! Parameter groups and Muon against PyTorch 2.15 (`fixtures/groups.json`; Muon's iteration in double).

use phalanx_nn::optim::{Adam, Muon, Optimizer, ParamGroup, Parameter, Sgd};
use phalanx_nn::{Grads, Init, Layout, Params, Scope, Seed, Tape, Threads};
use serde_json::Value;

use crate::common::noise;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/groups.json")).unwrap()
}

fn floats(list: &Value) -> Vec<f32> {
    let list = list.as_array().unwrap().iter();
    list.map(|v| v.as_f64().unwrap() as f32).collect()
}

fn names(all: &Value) -> impl Iterator<Item = &String> {
    all["shapes"].as_object().unwrap().keys()
}

/// The fixture's parameters; with `convs`, matrices are weights of convolutions.
fn params(all: &Value, convs: bool) -> Params {
    let mut scope = Scope::new(Seed(0));
    for name in names(all) {
        let shape: Vec<usize> = serde_json::from_value(all["shapes"][name].clone()).unwrap();
        let (shape, layout) = match *shape {
            [outputs, inputs] if convs => (vec![outputs, 1, 1, inputs], Layout::Conv),
            _ => (shape, Layout::Same),
        };
        scope.param(name, &shape, layout, Init::Constant(0.0));
    }
    let mut params = scope.build().unwrap();
    fill(&mut params, &all["values"]);
    params
}

fn fill(params: &mut Params, values: &Value) {
    for id in params.ids() {
        let name = params.infos()[id.index()].name.clone();
        params.import(id, &floats(&values[&name])).unwrap();
    }
}

/// Step `step` with the fixture's gradients and rate.
fn step(all: &Value, optimizer: &mut dyn Optimizer, lr: f64, params: &mut Params, step: usize) {
    let mut shaped = params.clone();
    fill(&mut shaped, &all["grads"][step]);
    let mut grads = Grads::like(params);
    grads.flat_mut().copy_from_slice(shaped.flat());
    optimizer.set_lr(lr * all["rates"][step].as_f64().unwrap());
    optimizer.step(params, &grads).unwrap();
}

fn decay_of_matrices(p: &Parameter<'_>) -> ParamGroup {
    match (p.name, p.shape.len()) {
        ("head.weight", _) => ParamGroup::new().weight_decay(0.3).lr_scale(0.5),
        (_, 1) => ParamGroup::new().weight_decay(0.0),
        _ => ParamGroup::new(),
    }
}

fn head_by_itself(p: &Parameter<'_>) -> ParamGroup {
    match p.name {
        "head.weight" => ParamGroup::new().elementwise().weight_decay(0.2),
        _ if p.shape.len() == 1 => ParamGroup::new().weight_decay(0.2),
        _ => ParamGroup::new(),
    }
}

/// The optimizer of a case, and its learning rate.
fn optimizer(case: &str, params: &Params) -> (Box<dyn Optimizer>, f64) {
    let others = Adam::adamw(params, 0.01);
    match case {
        "adamw" => {
            let adam = Adam::adamw(params, 0.01).groups(decay_of_matrices);
            (Box::new(adam.weight_decay(0.1)), 0.01)
        }
        "sgd" => {
            let sgd = Sgd::new(params, 0.01).momentum(0.9).nesterov(true);
            (
                Box::new(sgd.weight_decay(0.1).groups(decay_of_matrices)),
                0.01,
            )
        }
        "muon" => {
            let muon = Muon::new(params, 0.02).others(others);
            (Box::new(muon.groups(head_by_itself)), 0.02)
        }
        "record" => {
            let sgd = Sgd::new(params, 0.05).momentum(0.85).nesterov(true);
            let muon = Muon::new(params, 0.24).others(sgd.weight_decay(0.2));
            let muon = muon.momentum(0.6).weight_decay(0.0).iterations(3);
            let muon = muon.normalised(true).groups(|p| match p.name {
                "head.weight" => ParamGroup::new().elementwise().lr_scale(2.0),
                _ => ParamGroup::new(),
            });
            (Box::new(muon), 0.24)
        }
        _ => {
            let muon = Muon::new(params, 0.02).groups(head_by_itself);
            let muon = muon.momentum(0.6).nesterov(false).weight_decay(0.3);
            let muon = muon.iterations(3).match_rms_adamw(true);
            (Box::new(muon.others(others)), 0.02)
        }
    }
}

#[test]
fn groups_and_muon_equal_pytorch() {
    let all = fixture();
    for (case, tolerance) in [
        ("adamw", 3e-7),
        ("sgd", 3e-7),
        ("muon", 2e-6),
        ("muon_rms", 2e-6),
        ("record", 2e-6),
    ] {
        for convs in [false, true] {
            let mut params = params(&all, convs);
            let (mut optimizer, lr) = optimizer(case, &params);
            for i in 0..4 {
                step(&all, optimizer.as_mut(), lr, &mut params, i);
            }
            for id in params.ids() {
                let name = &params.infos()[id.index()].name;
                let want = floats(&all["cases"][case][name]);
                for (got, want) in params.export(id).iter().zip(&want) {
                    let off = (got - want).abs() / want.abs().max(1.0);
                    assert!(off <= tolerance, "{case} {name}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn saved_states_go_on_with_the_same_bits() {
    let all = fixture();
    for case in ["adamw", "sgd", "muon"] {
        let mut params = params(&all, true);
        let (mut whole, lr) = optimizer(case, &params);
        for i in 0..2 {
            step(&all, whole.as_mut(), lr, &mut params, i);
        }
        let (mut resumed, mut again) = (optimizer(case, &params).0, params.clone());
        resumed
            .restore(whole.steps(), whole.updates(), &whole.state())
            .unwrap();
        for i in 2..4 {
            step(&all, whole.as_mut(), lr, &mut params, i);
            step(&all, resumed.as_mut(), lr, &mut again, i);
        }
        assert_eq!(params.flat(), again.flat(), "{case}");
    }
}

#[test]
fn a_shard_has_the_settings_of_the_whole() {
    let (values, grads) = (noise(24, 1), noise(24, 2));
    let mut scope = Scope::new(Seed(0));
    let whole = scope.param("a.weight", &[6, 4], Layout::Same, Init::Constant(0.0));
    let mut whole_params = scope.build().unwrap();
    whole_params.import(whole, &values).unwrap();
    let mut scope = Scope::new(Seed(0));
    let names = ["a.weight", "copy of a.weight"];
    for name in names {
        scope.shard(name, &[12], Layout::Same, ("a.weight", &[6, 4]));
    }
    let mut pieces = scope.build().unwrap();
    for (id, values) in pieces.ids().zip(values.chunks(12)) {
        pieces.import(id, values).unwrap();
    }
    let choose = |p: &Parameter<'_>| match (p.name, p.shape) {
        ("a.weight", [6, 4]) => ParamGroup::new().weight_decay(0.5).lr_scale(3.0),
        other => panic!("{other:?}"),
    };
    let run = |params: &mut Params| {
        let mut adam = Adam::adamw(params, 0.1).groups(choose);
        let mut of = Grads::like(params);
        let mut rest = &grads[..];
        for id in params.ids() {
            let info = &params.infos()[id.index()];
            let (now, later) = rest.split_at(info.len);
            of.flat_mut()[info.offset..][..info.len].copy_from_slice(now);
            rest = later;
        }
        adam.step(params, &of).unwrap();
        adam.lay_out(params).unwrap();
        adam.step(params, &of).unwrap();
    };
    run(&mut whole_params);
    run(&mut pieces);
    let halves: Vec<f32> = pieces.ids().flat_map(|id| pieces.export(id)).collect();
    assert_eq!(whole_params.export(whole), halves);

    let muon = Muon::new(&pieces, 0.1);
    assert!(!muon.is_elementwise());
    let error = { muon }.step(&mut pieces.clone(), &Grads::like(&pieces));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("needs whole matrices"), "{error}");
    assert!(
        Muon::new(&pieces, 0.1)
            .groups(|_| ParamGroup::new().elementwise())
            .is_elementwise()
    );
}

#[test]
fn invalid_groups_are_refused_by_name() {
    let all = fixture();
    let mut params = params(&all, false);
    let grads = Grads::like(&params);
    let before = params.flat().to_vec();
    for (group, word) in [
        (ParamGroup::new().lr_scale(-1.0), "lr_scale"),
        (ParamGroup::new().weight_decay(f64::NAN), "weight decay"),
    ] {
        let mut sgd = Sgd::new(&params, 0.1).groups(move |p| match p.name {
            "c.bias" => group,
            _ => ParamGroup::new(),
        });
        let error = sgd.step(&mut params, &grads).unwrap_err().to_string();
        assert!(error.contains("c.bias") && error.contains(word), "{error}");
    }
    let with = |lr, others| Muon::new(&params, lr).others(others);
    let adam = || Adam::new(&params, 0.1);
    let muons = [
        (with(0.1, adam().amsgrad(true)), "AMSGrad"),
        (
            with(0.1, adam().groups(|_| ParamGroup::new())),
            "give them to Muon",
        ),
        (with(0.0, adam()), "Muon's learning rate was 0"),
    ];
    for (mut muon, words) in muons {
        let error = muon.step(&mut params.clone(), &grads).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(params.flat(), before);
}

/// With a momentum of 0, an update's singular values are near 1 whatever the gradient's are; and bits do not depend on threads.
#[test]
fn updates_of_matrices_are_nearly_orthogonal() {
    // Threads divide the last two.
    for (outputs, inputs) in [(40, 300), (64, 64), (300, 600), (1200, 256)] {
        let mut scope = Scope::new(Seed(0));
        let id = scope.param(
            "weight",
            &[outputs, inputs],
            Layout::Same,
            Init::Constant(0.0),
        );
        let params = scope.build().unwrap();
        let run = |threads| {
            let mut params = params.clone();
            let mut grads = Grads::like(&params);
            // Columns of very different sizes.
            let values = noise(outputs * inputs, 7);
            let values = (0..).zip(values).map(|(i, v)| v * ((i % 7) + 1) as f32);
            let len = outputs * inputs;
            let to = &mut grads.flat_mut()[..len];
            to.iter_mut().zip(values).for_each(|(to, v)| *to = v);
            let mut muon = Muon::new(&params, 1.0).momentum(0.0).weight_decay(0.0);
            muon.set_thread_pool(Tape::new(Threads(threads)).thread_pool());
            muon.step(&mut params, &grads).unwrap();
            params.export(id)
        };
        let x = run(1);
        assert!([2, 4].iter().all(|&threads| run(threads) == x));
        let adjustment = (outputs as f64 / inputs as f64).max(1.0).sqrt();
        // Squares of singular values sum to the squared norm: about one each.
        let norm: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
        let mean = norm / adjustment.powi(2) / outputs.min(inputs) as f64;
        assert!((0.6..1.3).contains(&mean), "{outputs} x {inputs}: {mean}");
    }
}
