//! RMSprop and averages of weights against PyTorch 2.15, Lion and LAMB against their papers' formulas in double
//! (`fixtures/more_optim.json`).

use phalanx_nn::optim::{
    Adam, Ema, Lamb, Lion, Optimizer, ParamGroup, Parameter, Rmsprop, Run, Sgd,
};
use phalanx_nn::{ErrorKind, GradView, Grads, Init, Layout, ParamId, Params, Scope, Seed};
use serde_json::{Value, json};

use crate::common::noise;
use crate::optim_torch::{assert_same, floats, gathered, gradients, params_of, spread};

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/more_optim.json")).unwrap()
}

fn numbers(list: &Value) -> Vec<f32> {
    floats(&json!({ "data": list }))
}

/// The fixture's parameters.
fn params(all: &Value) -> Params {
    let mut scope = Scope::new(Seed(0));
    for name in ["a.weight", "a.bias", "b.weight"] {
        let shape: Vec<usize> = serde_json::from_value(all["shapes"][name].clone()).unwrap();
        scope.param(name, &shape, Layout::Same, Init::Constant(0.0));
    }
    let mut params = scope.build().unwrap();
    spread(&mut params, &numbers(&all["start"]));
    params
}

/// Steps with the fixture's gradients from `from` to `to`; `each` gets the parameters after each.
fn steps(
    all: &Value,
    optimizer: &mut dyn Optimizer,
    params: &mut Params,
    range: std::ops::Range<usize>,
    mut each: impl FnMut(usize, &dyn Optimizer, &Params),
) {
    for i in range {
        let grads = gradients(params, &numbers(&all["gradients"][i]));
        optimizer.step(params, &grads).unwrap();
        each(i, optimizer, params);
    }
}

/// As the parameters lie one after another.
fn laid_out(params: &Params, flat: &[f32]) -> Vec<f32> {
    let mut shaped = params.clone();
    shaped.flat_mut().copy_from_slice(flat);
    gathered(&shaped)
}

fn rmsprop(case: &Value, params: &Params) -> Rmsprop {
    let o = &case["options"];
    let number = |name: &str, default: f64| o[name].as_f64().unwrap_or(default);
    Rmsprop::new(params, number("lr", 0.0))
        .alpha(number("alpha", 0.99))
        .eps(number("eps", 1e-8))
        .weight_decay(number("weight_decay", 0.0))
        .momentum(number("momentum", 0.0))
        .centered(o["centered"] == true)
}

#[test]
fn rmsprop_equals_pytorch() {
    let all = fixture();
    let cases = all["rmsprop"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let mut params = params(&all);
        let mut optimizer = rmsprop(case, &params);
        let what = case["options"].to_string();
        steps(&all, &mut optimizer, &mut params, 0..8, |i, _, params| {
            let want = numbers(&case["after"][i]);
            let what = format!("{what} after step {}", i + 1);
            assert_same(&gathered(params), &want, 2e-7, &what);
        });
        let state = optimizer.state();
        assert_eq!(state.len(), case["state"].as_object().unwrap().len());
        for (name, flat) in state {
            let want = numbers(&case["state"][name]);
            let got = laid_out(&params, flat);
            let largest = want.iter().fold(1.0f32, |most, v| most.max(v.abs()));
            assert_same(&got, &want, 2e-7 * largest, &format!("{what} {name}"));
        }
    }
}

/// The mean of gradients keeps its place when a schedule turns the momentum on.
#[test]
fn rmsprops_momentum_may_begin_later() {
    let all = fixture();
    let mut params = params(&all);
    let mut late = Rmsprop::new(&params, 0.01).centered(true);
    steps(&all, &mut late, &mut params, 0..4, |_, _, _| {});
    let mean = late.state()[1].1.to_vec();
    let (mut plain, mut same) = (late.clone(), params.clone());
    late.set_momentum(0.9).unwrap();
    steps(&all, &mut late, &mut params, 4..5, |_, _, _| {});
    steps(&all, &mut plain, &mut same, 4..5, |_, _, _| {});
    // The first step with momentum is the plain one, but for roundings.
    assert_same(&gathered(&params), &gathered(&same), 1e-6, "step 5");
    let names: Vec<&str> = late.state().iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["square_avg", "grad_avg", "momentum_buffer"]);
    assert_eq!(late.state()[1], plain.state()[1]);
    assert_ne!(late.state()[1].1, mean);
}

#[test]
fn averages_equal_pytorch() {
    let all = fixture();
    let cases = all["ema"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let mut params = params(&all);
        let o = &case["options"];
        let lr = o["lr"].as_f64().unwrap();
        let (inner, tolerance): (Box<dyn Optimizer>, _) = match case["optimizer"] == "SGD" {
            true => {
                let momentum = o["momentum"].as_f64().unwrap_or(0.0);
                (Box::new(Sgd::new(&params, lr).momentum(momentum)), 0.0)
            }
            false => (Box::new(Adam::new(&params, lr)), 2e-7),
        };
        let decay = case["decay"].as_f64().unwrap();
        let mut optimizer: Box<dyn Optimizer> = Box::new(Ema::new(&params, inner, decay));
        assert_eq!(optimizer.averages(), Some(&[][..]));
        steps(&all, &mut optimizer, &mut params, 0..8, |i, o, params| {
            let got = laid_out(params, o.averages().unwrap());
            let want = numbers(&case["averages"][i]);
            assert_same(&got, &want, tolerance, &format!("step {}", i + 1));
        });
    }
}

/// A doubled rate for `a.bias`, a decay of 0.3 for `b.weight`.
fn groups(p: &Parameter<'_>) -> ParamGroup {
    match p.name {
        "a.bias" => ParamGroup::new().lr_scale(2.0),
        "b.weight" => ParamGroup::new().weight_decay(0.3),
        _ => ParamGroup::new(),
    }
}

fn lion(case: usize, params: &Params) -> Lion {
    let lion = Lion::new(params, 0.01);
    match case {
        0 => lion,
        1 => lion.betas(0.8, 0.95).weight_decay(0.1),
        _ => lion.weight_decay(0.1).groups(groups),
    }
}

fn lamb(case: usize, params: &Params) -> Lamb {
    match case {
        0 => Lamb::new(params, 0.01),
        1 => {
            let lamb = Lamb::new(params, 0.05).betas(0.8, 0.95);
            lamb.eps(1e-3).weight_decay(0.0)
        }
        _ => Lamb::new(params, 0.01).weight_decay(0.1).groups(groups),
    }
}

#[test]
fn lion_and_lamb_follow_their_papers() {
    let all = fixture();
    type Make = fn(usize, &Params) -> Box<dyn Optimizer>;
    let makes: [(&str, Make); 2] = [
        ("lion", |case, p| Box::new(lion(case, p))),
        ("lamb", |case, p| Box::new(lamb(case, p))),
    ];
    for (name, make) in makes {
        let cases = all[name].as_array().unwrap();
        assert_eq!(cases.len(), 3);
        let mut largest = 0.0f32;
        for (case, want) in cases.iter().enumerate() {
            let mut params = params(&all);
            let mut optimizer = make(case, &params);
            steps(&all, &mut optimizer, &mut params, 0..8, |i, _, params| {
                let want: Vec<f64> = serde_json::from_value(want["after"][i].clone()).unwrap();
                for (got, want) in gathered(params).iter().zip(want) {
                    largest = largest.max((f64::from(*got) - want).abs() as f32);
                }
            });
        }
        assert!(largest <= 1e-6, "{name}: {largest}");
    }
}

#[test]
fn lions_signs_are_zero_and_nan_where_the_average_is() {
    let mut params = params_of(&[4]);
    let mut lion = Lion::new(&params, 0.5);
    let grads = gradients(&params, &[0.0, -0.0, f32::NAN, f32::NEG_INFINITY]);
    lion.step(&mut params, &grads).unwrap();
    let got = gathered(&params);
    assert_eq!((got[0], got[1], got[3]), (0.0, 0.0, 0.5));
    assert!(got[2].is_nan());
}

type Make = Box<dyn Fn(&Params) -> Box<dyn Optimizer>>;

#[test]
fn saved_states_go_on_with_the_same_bits() {
    let all = fixture();
    let mut makes: Vec<Make> = Vec::new();
    for case in all["rmsprop"].as_array().unwrap().clone() {
        makes.push(Box::new(move |p| {
            Box::new(rmsprop(&case, p).groups(groups))
        }));
    }
    makes.push(Box::new(|p| Box::new(lion(2, p))));
    makes.push(Box::new(|p| Box::new(lamb(2, p))));
    makes.push(Box::new(|p| Box::new(Ema::new(p, Sgd::new(p, 0.1), 0.9))));
    makes.push(Box::new(|p| Box::new(Ema::new(p, lamb(2, p), 0.9))));
    for make in makes {
        let mut params = params(&all);
        let mut whole = make(&params);
        steps(&all, &mut whole, &mut params, 0..4, |_, _, _| {});
        let (mut resumed, mut again) = (make(&params), params.clone());
        let state = whole.state();
        let refused = resumed.restore(4, whole.updates(), &state[..state.len() - 1]);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Usage);
        assert_eq!(resumed.steps(), 0);
        resumed.restore(4, whole.updates(), &state).unwrap();
        steps(&all, &mut whole, &mut params, 4..8, |_, _, _| {});
        steps(&all, &mut resumed, &mut again, 4..8, |_, _, _| {});
        assert_eq!(params.flat(), again.flat());
        assert_eq!(whole.state(), resumed.state());
        // As new, for other parameters.
        let other = params_of(&[5]);
        resumed.lay_out(&other).unwrap();
        assert_eq!((resumed.steps(), resumed.state().len()), (0, 0));
        assert!(resumed.averages().unwrap_or_default().is_empty());
        resumed
            .step(&mut other.clone(), &Grads::like(&other))
            .unwrap();
    }
}

#[test]
fn groups_of_rmsprop_are_settings() {
    let all = fixture();
    let run = |choose: fn(&Parameter<'_>) -> ParamGroup, lr, decay| {
        let mut params = params(&all);
        let rmsprop = Rmsprop::new(&params, lr).weight_decay(decay);
        let mut rmsprop = rmsprop.groups(choose);
        steps(&all, &mut rmsprop, &mut params, 0..3, |_, _, _| {});
        params.flat().to_vec()
    };
    let grouped = run(
        |_| ParamGroup::new().weight_decay(0.1).lr_scale(2.0),
        0.01,
        0.0,
    );
    assert_eq!(grouped, run(|_| ParamGroup::new(), 0.02, 0.1));
}

#[test]
fn lamb_needs_whole_parameters() {
    let params = params_of(&[6, 4]);
    let grads = Grads::like(&params);
    let mut lamb = Lamb::new(&params, 0.1);
    assert!(!lamb.is_elementwise());
    lamb.begin_step().unwrap();
    let mut values = [1.0; 3];
    let run = Run {
        at: 0,
        values: &mut values,
        grads: &[1.0; 3],
    };
    let error = lamb.step_run(run, 1.0).unwrap_err().to_string();
    assert!(
        error.contains("LAMB needs p0 as a whole, not 3 of its 6"),
        "{error}"
    );
    assert_eq!(values, [1.0; 3]);
    lamb.step(&mut params.clone(), &grads).unwrap();

    let mut scope = Scope::new(Seed(0));
    scope.shard("a", &[3], Layout::Same, ("a.whole", &[2, 3]));
    let piece = scope.build().unwrap();
    let step = Lamb::new(&piece, 0.1).step(&mut piece.clone(), &Grads::like(&piece));
    let error = step.unwrap_err().to_string();
    assert!(error.contains("LAMB needs whole parameters"), "{error}");
}

/// Without a norm of the parameter, it steps as AdamW does; without one of the update, it stays.
#[test]
fn lambs_scale_is_one_without_a_norm() {
    let start = params_of(&[20, 9]);
    let grads = gradients(&start, &noise(29, 2));
    let after = |optimizer: &mut dyn Optimizer| {
        let mut params = start.clone();
        optimizer.step(&mut params, &grads).unwrap();
        gathered(&params)
    };
    let adam = after(&mut Adam::adamw(&start, 0.1));
    let lamb = after(&mut Lamb::new(&start, 0.1).eps(1e-8));
    assert_same(&lamb, &adam, 1e-7, "as AdamW");
    let mut params = start.clone();
    spread(&mut params, &noise(29, 1));
    let mut lamb = Lamb::new(&params, 0.1).weight_decay(0.0);
    lamb.step(&mut params, &Grads::like(&start)).unwrap();
    assert_eq!(gathered(&params), noise(29, 1));
}

/// Gradients of the first parameter only.
struct OfFirst(Grads);

impl GradView for OfFirst {
    fn grad(&self, param: ParamId) -> &[f32] {
        match self.untouched(param) {
            true => &[],
            false => self.0.grad(param),
        }
    }

    fn untouched(&self, param: ParamId) -> bool {
        param.index() > 0
    }
}

/// A parameter's average begins with its first update, also after a save, and stays in steps without a gradient.
#[test]
fn averages_of_parameters_without_gradients_stay() {
    for saved in [false, true] {
        let mut params = params_of(&[3, 4]);
        spread(&mut params, &noise(7, 1));
        let grads = gradients(&params, &noise(7, 2));
        let first = OfFirst(gradients(&params, &noise(7, 2)));
        let mut ema = Ema::new(&params, Sgd::new(&params, 0.1), 0.5);
        let average = |ema: &Ema<Sgd>| laid_out(&params_of(&[3, 4]), ema.averages().unwrap());
        ema.step(&mut params, &first).unwrap();
        assert_eq!(ema.updates(), [1, 0]);
        assert_eq!(average(&ema)[..3], gathered(&params)[..3]);
        assert_eq!(average(&ema)[3..], [0.0; 4]);
        if saved {
            let mut other = Ema::new(&params, Sgd::new(&params, 0.1), 0.5);
            other.restore(1, ema.updates(), &ema.state()).unwrap();
            ema = other;
        }
        let before = average(&ema);
        ema.step(&mut params, &grads).unwrap();
        let (now, weights) = (average(&ema), gathered(&params));
        assert_eq!(now[3..], weights[3..]);
        for i in 0..3 {
            assert!((now[i] - (before[i] + weights[i]) / 2.0).abs() < 1e-7);
        }
        ema.step(&mut params, &first).unwrap();
        assert_eq!(average(&ema)[3..], now[3..]);
    }
}
