//! SGD, Adam and AdamW against PyTorch 2.15 (`fixtures/optim.json`, from the
//! project's parity fixtures, `optim_unused.json` and `one_cycle.json`): SGD in every bit, Adam within 2e-7.

use phalanx_nn::optim::schedule::{OneCycle, Schedule};
use phalanx_nn::optim::{Adam, Ema, Lamb, Lion, Optimizer, Rmsprop, Run, Sgd};
use phalanx_nn::{
    ErrorKind, GradView, Grads, Init, Layout, ParamId, Params, Scope, Seed, Tape, Threads,
};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/optim.json")).unwrap()
}

pub fn floats(tensor: &Value) -> Vec<f32> {
    let list = tensor["data"].as_array().unwrap();
    // Shortest decimals that round-trip: parse as f32, not through f64.
    list.iter()
        .map(|v| v.to_string().parse().unwrap())
        .collect()
}

pub fn params_of(sizes: &[usize]) -> Params {
    let mut scope = Scope::new(Seed(0));
    for (i, &n) in sizes.iter().enumerate() {
        scope.param(&format!("p{i}"), &[n], Layout::Same, Init::Constant(0.0));
    }
    scope.build().unwrap()
}

/// Puts `values` into consecutive parameters of `params`.
pub fn spread(params: &mut Params, values: &[f32]) {
    let mut rest = values;
    for id in params.ids() {
        let (now, later) = rest.split_at(params.get(id).len());
        params.get_mut(id).copy_from_slice(now);
        rest = later;
    }
}

pub fn gathered(params: &Params) -> Vec<f32> {
    params
        .ids()
        .flat_map(|id| params.get(id).to_vec())
        .collect()
}

pub fn gradients(params: &Params, values: &[f32]) -> Grads {
    let mut shaped = params.clone();
    spread(&mut shaped, values);
    let mut grads = Grads::like(params);
    grads.flat_mut().copy_from_slice(shaped.flat());
    grads
}

fn optimizer(case: &Value, params: &Params) -> Box<dyn Optimizer> {
    let o = &case["options"];
    let lr = o["lr"].as_f64().unwrap();
    let number = |name: &str, default: f64| o[name].as_f64().unwrap_or(default);
    if case["optimizer"] == "SGD" {
        let sgd = Sgd::new(params, lr)
            .momentum(number("momentum", 0.0))
            .dampening(number("dampening", 0.0))
            .weight_decay(number("weight_decay", 0.0))
            .nesterov(o["nesterov"] == true);
        return Box::new(sgd);
    }
    let mut adam = if case["optimizer"] == "AdamW" {
        Adam::adamw(params, lr)
    } else {
        Adam::new(params, lr)
    };
    if let Some(betas) = o["betas"].as_array() {
        adam = adam.betas(betas[0].as_f64().unwrap(), betas[1].as_f64().unwrap());
    }
    if let Some(decay) = o["weight_decay"].as_f64() {
        adam = adam.weight_decay(decay);
    }
    Box::new(adam.eps(number("eps", 1e-8)).amsgrad(o["amsgrad"] == true))
}

pub fn assert_same(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let equal = if tolerance == 0.0 {
            g.to_bits() == w.to_bits()
        } else {
            (g - w).abs() <= tolerance
        };
        assert!(equal, "{what}, element {i}: got {g}, want {w}");
    }
}

/// All 9 elements in one parameter, then the same cut into three with gaps
/// between them: elements must not notice.
#[test]
fn every_step_equals_pytorch() {
    let fixture = fixture();
    let (start, gradient_list) = (floats(&fixture["start"]), &fixture["gradients"]);
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 11);
    for case in cases {
        for sizes in [&[9][..], &[1, 5, 3]] {
            let mut params = params_of(sizes);
            spread(&mut params, &start);
            let mut opt = optimizer(case, &params);
            let tolerance = if case["optimizer"] == "SGD" {
                0.0
            } else {
                2e-7
            };
            let wanted = case["parameters_after_each_step"].as_array().unwrap();
            for (i, (gradient, want)) in gradient_list
                .as_array()
                .unwrap()
                .iter()
                .zip(wanted)
                .enumerate()
            {
                let grads = gradients(&params, &floats(gradient));
                opt.step(&mut params, &grads).unwrap();
                let what = format!("{} after step {}", case["name"], i + 1);
                assert_same(&gathered(&params), &floats(want), tolerance, &what);
            }
            assert_eq!(opt.steps(), 10);
            check_state(case, &params, opt.as_ref(), tolerance);
        }
    }
}

fn check_state(case: &Value, params: &Params, opt: &dyn Optimizer, tolerance: f32) {
    let mut compared = 0;
    for (name, want) in case["state_at_the_end"].as_object().unwrap() {
        if name == "step" || want.is_null() {
            continue;
        }
        let state = opt.state();
        let (_, flat) = state.iter().find(|(n, _)| n == name).unwrap();
        let mut shaped = params.clone();
        shaped.flat_mut().copy_from_slice(flat);
        let what = format!("{} state {name}", case["name"]);
        assert_same(&gathered(&shaped), &floats(want), tolerance, &what);
        compared += 1;
    }
    assert_eq!(compared, opt.state().len());
}

/// Gradients of some parameters only.
struct OfSome {
    grads: Grads,
    used: Vec<usize>,
}

impl GradView for OfSome {
    fn grad(&self, param: ParamId) -> &[f32] {
        match self.untouched(param) {
            true => &[],
            false => self.grads.grad(param),
        }
    }

    fn untouched(&self, param: ParamId) -> bool {
        !self.used.contains(&param.index())
    }
}

/// Each parameter counts its own steps: by whole steps, by steps in runs, and across a save
/// after any of them.
#[test]
fn parameters_without_gradients_in_some_steps_equal_pytorch() {
    let text = include_str!("../fixtures/optim_unused.json");
    let fixture: Value = serde_json::from_str(text).unwrap();
    let numbers = |list: &Value| floats(&serde_json::json!({ "data": list }));
    let places = |list: &Value| -> Vec<usize> { serde_json::from_value(list.clone()).unwrap() };
    let sizes = places(&fixture["sizes"]);
    let (used, gradient_list) = (&fixture["used"], &fixture["gradients"]);
    let steps = used.as_array().unwrap().len();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!((cases.len(), steps), (6, 10));
    for case in cases {
        let tolerance = if case["optimizer"] == "SGD" {
            0.0
        } else {
            2e-7
        };
        // 0 is no save.
        for (in_runs, saved_after) in (0..steps).flat_map(|at| [(false, at), (true, at)]) {
            let mut params = params_of(&sizes);
            spread(&mut params, &numbers(&fixture["start"]));
            let mut opt = optimizer(case, &params);
            for step in 0..steps {
                if step > 0 && step == saved_after {
                    let mut other = optimizer(case, &params);
                    let (all, updates) = (opt.steps(), opt.updates());
                    other.restore(all, updates, &opt.state()).unwrap();
                    opt = other;
                }
                let some = OfSome {
                    grads: gradients(&params, &numbers(&gradient_list[step])),
                    used: places(&used[step]),
                };
                if in_runs {
                    step_in_runs(opt.as_mut(), &mut params, &some);
                } else {
                    opt.step(&mut params, &some).unwrap();
                }
                let what = format!("{} after step {}", case["name"], step + 1);
                let want = numbers(&case["after"][step]);
                assert_same(&gathered(&params), &want, tolerance, &what);
            }
            assert_eq!(opt.steps(), steps as u64);
            for (count, want) in opt.updates().iter().zip(case["steps"].as_array().unwrap()) {
                // PyTorch's SGD does not count.
                assert!(want.is_null() || want.as_u64() == Some(*count), "{case}");
            }
            let state = opt.state();
            assert_eq!(state.len(), case["state"].as_object().unwrap().len());
            for (name, flat) in state {
                let mut shaped = params.clone();
                shaped.flat_mut().copy_from_slice(flat);
                let what = format!("{} state {name}", case["name"]);
                let want = numbers(&case["state"][name]);
                assert_same(&gathered(&shaped), &want, tolerance, &what);
            }
        }
    }
}

/// Rate and momentum of each step are those of PyTorch's `OneCycleLR`, also after a save.
#[test]
fn one_cycle_changes_the_momentum_as_pytorch_does() {
    let text = include_str!("../fixtures/one_cycle.json");
    let fixture: Value = serde_json::from_str(text).unwrap();
    let numbers = |list: &Value| floats(&serde_json::json!({ "data": list }));
    let gradient_list = fixture["gradients"].as_array().unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!((cases.len(), gradient_list.len()), (6, 20));
    for case in cases {
        let tolerance = if case["optimizer"] == "SGD" {
            0.0
        } else {
            1e-6
        };
        for saved_after in [0, 1, 10] {
            let mut params = params_of(&[4, 5]);
            spread(&mut params, &numbers(&fixture["start"]));
            let cycle = OneCycle::new(case["options"]["lr"].as_f64().unwrap(), 20);
            let mut schedule = Schedule::one_cycle(cycle).unwrap();
            let mut opt = optimizer(case, &params);
            for (step, gradient) in gradient_list.iter().enumerate() {
                schedule.apply(&mut opt).unwrap();
                if step > 0 && step == saved_after {
                    let mut other = optimizer(case, &params);
                    schedule.apply(&mut other).unwrap();
                    let (all, updates) = (opt.steps(), opt.updates());
                    other.restore(all, updates, &opt.state()).unwrap();
                    opt = other;
                }
                let grads = gradients(&params, &numbers(gradient));
                opt.step(&mut params, &grads).unwrap();
                schedule.advance();
                let what = format!("{} after step {}", case["name"], step + 1);
                let want = numbers(&case["after"][step]);
                assert_same(&gathered(&params), &want, tolerance, &what);
            }
        }
    }
}

/// An optimizer of a user's own, which has no momentum.
struct Plain(Sgd);

impl Optimizer for Plain {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> phalanx_nn::Result<()> {
        self.0.check_layout(params, grads)
    }

    fn begin_step(&mut self) -> phalanx_nn::Result<()> {
        self.0.begin_step()
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> phalanx_nn::Result<()> {
        self.0.step_run(run, factor)
    }

    fn set_thread_pool(&mut self, threads: phalanx_nn::ThreadPool) {
        self.0.set_thread_pool(threads);
    }

    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.0.set_lr(lr);
    }

    fn steps(&self) -> u64 {
        self.0.steps()
    }

    fn updates(&self) -> &[u64] {
        self.0.updates()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        self.0.state()
    }

    fn restore(
        &mut self,
        steps: u64,
        updates: &[u64],
        state: &[(&str, &[f32])],
    ) -> phalanx_nn::Result<()> {
        self.0.restore(steps, updates, state)
    }
}

/// As in PyTorch, an optimizer without momentum is refused, unless the schedule leaves it alone.
#[test]
fn one_cycle_refuses_an_optimizer_without_momentum() {
    let params = params_of(&[4]);
    let mut plain: Box<dyn Optimizer> = Box::new(Plain(Sgd::new(&params, 0.1)));
    let cycle = OneCycle::new(0.1, 20);
    let error = Schedule::one_cycle(cycle)
        .unwrap()
        .apply(&mut plain)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.to_string().starts_with("Plain has no momentum"),
        "{error}"
    );
    let without = OneCycle {
        momentum: None,
        ..cycle
    };
    Schedule::one_cycle(without)
        .unwrap()
        .apply(&mut plain)
        .unwrap();
    assert!((plain.lr() - 0.1 / 25.0).abs() < 1e-15);
}

#[test]
fn optimizers_are_called_by_their_names() {
    let params = params_of(&[4]);
    let all: [(Box<dyn Optimizer>, _); 8] = [
        (Box::new(Sgd::new(&params, 0.1)), "SGD"),
        (Box::new(Adam::new(&params, 0.1)), "Adam"),
        (Box::new(Adam::adamw(&params, 0.1)), "AdamW"),
        (Box::new(Plain(Sgd::new(&params, 0.1))), "Plain"),
        (Box::new(Rmsprop::new(&params, 0.1)), "RMSprop"),
        (Box::new(Lion::new(&params, 0.1)), "Lion"),
        (Box::new(Lamb::new(&params, 0.1)), "LAMB"),
        (
            Box::new(Ema::new(&params, Lion::new(&params, 0.1), 0.9)),
            "Lion",
        ),
    ];
    for (optimizer, name) in all {
        assert_eq!(optimizer.name(), name);
    }
}

/// A step in runs of two elements at most, the last first.
fn step_in_runs(optimizer: &mut dyn Optimizer, params: &mut Params, some: &OfSome) {
    optimizer.begin_step().unwrap();
    for id in params.ids().filter(|id| !some.untouched(*id)) {
        let info = params.infos()[id.index()].clone();
        for from in (0..info.len).step_by(2).rev() {
            let elems = from..info.len.min(from + 2);
            let run = Run {
                at: info.offset + from,
                values: &mut params.get_mut(id)[elems.clone()],
                grads: &some.grad(id)[elems],
            };
            optimizer.step_run(run, 1.0).unwrap();
        }
    }
}

/// Long parameters take the vector path with a scalar tail; the oracle is
/// plain scalar arithmetic.
#[test]
fn vector_path_equals_scalar_arithmetic() {
    let n = 1003;
    let mut params = params_of(&[n]);
    let value = |i: usize, k: usize| ((i * 37 + k * 101) % 211) as f32 / 97.0 - 1.0;
    let start: Vec<f32> = (0..n).map(|i| value(i, 0)).collect();
    spread(&mut params, &start);
    let mut sgd = Sgd::new(&params, 0.03)
        .momentum(0.9)
        .weight_decay(5e-4)
        .nesterov(true);
    let (mut p, mut buf) = (start, vec![0.0_f32; n]);
    let (lr, mu, wd) = (0.03_f64 as f32, 0.9_f64 as f32, 5e-4_f64 as f32);
    for step in 1..4 {
        let g: Vec<f32> = (0..n).map(|i| value(i, step)).collect();
        let grads = gradients(&params, &g);
        sgd.step(&mut params, &grads).unwrap();
        for i in 0..n {
            let d = p[i].mul_add(wd, g[i]);
            buf[i] = if step == 1 { d } else { d + buf[i] * mu };
            p[i] = buf[i].mul_add(mu, d).mul_add(-lr, p[i]);
        }
        assert_same(&gathered(&params), &p, 0.0, "vector path");
    }
}

#[test]
fn restored_state_goes_on_with_the_same_bits() {
    let fixture = fixture();
    for case in fixture["cases"].as_array().unwrap() {
        let mut params = params_of(&[4, 5]);
        spread(&mut params, &floats(&fixture["start"]));
        let mut first = optimizer(case, &params);
        let list = fixture["gradients"].as_array().unwrap();
        for gradient in &list[..5] {
            let grads = gradients(&params, &floats(gradient));
            first.step(&mut params, &grads).unwrap();
        }
        let mut second = optimizer(case, &params);
        second
            .restore(first.steps(), first.updates(), &first.state())
            .unwrap();
        let mut resumed = params.clone();
        for gradient in &list[5..] {
            let grads = gradients(&params, &floats(gradient));
            first.step(&mut params, &grads).unwrap();
            second.step(&mut resumed, &grads).unwrap();
        }
        assert_eq!(gathered(&params), gathered(&resumed), "{}", case["name"]);
        assert_eq!(first.state(), second.state(), "{}", case["name"]);
    }
}

#[test]
fn state_that_does_not_fit_is_refused() {
    let params = params_of(&[4]);
    let mut sgd = Sgd::new(&params, 0.1).momentum(0.9);
    let short = [0.0; 3];
    let refused = |result: phalanx_nn::Result<()>, word: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(sgd.restore(1, &[1], &[]), "momentum_buffer");
    refused(sgd.restore(1, &[1], &[("exp_avg", &short)]), "exp_avg");
    refused(
        sgd.restore(1, &[1], &[("momentum_buffer", &short)]),
        "3 elements",
    );
    let mut adam = Adam::new(&params, 0.1);
    refused(
        adam.restore(1, &[1], &[("exp_avg", params.flat())]),
        "exp_avg_sq",
    );
    refused(
        adam.restore(0, &[0], &[("exp_avg", params.flat())]),
        "exp_avg",
    );
    refused(adam.restore(1, &[1, 1], &[]), "updates of 2 parameters");
    refused(adam.restore(1, &[2], &[]), "updated 2 times in 1 steps");
}

#[test]
fn impossible_settings_and_foreign_parameters_are_refused() {
    let mut params = params_of(&[4]);
    let grads = Grads::like(&params);
    let before = params.flat().to_vec();
    let mut bad: Vec<Box<dyn Optimizer>> = vec![
        Box::new(Sgd::new(&params, -0.1)),
        Box::new(Sgd::new(&params, f64::NAN)),
        Box::new(Sgd::new(&params, 0.1).nesterov(true)),
        Box::new(
            Sgd::new(&params, 0.1)
                .momentum(0.9)
                .dampening(0.1)
                .nesterov(true),
        ),
        Box::new(Adam::new(&params, 0.1).betas(1.0, 0.999)),
        Box::new(Adam::new(&params, 0.1).eps(-1.0)),
        Box::new(Rmsprop::new(&params, 0.1).alpha(1.0)),
        Box::new(Rmsprop::new(&params, 0.1).momentum(-0.1)),
        Box::new(Lion::new(&params, 0.1).betas(0.9, f64::NAN)),
        Box::new(Lion::new(&params, 0.1).weight_decay(-0.1)),
        Box::new(Lamb::new(&params, 0.1).betas(-0.1, 0.9)),
        Box::new(Ema::new(&params, Sgd::new(&params, 0.1), 1.1)),
        Box::new(Ema::new(&params, Sgd::new(&params, -0.1), 0.9)),
        Box::new(Ema::new(&params_of(&[400]), Sgd::new(&params, 0.1), 0.9)),
        Box::new(Sgd::new(&params_of(&[400]), 0.1)),
    ];
    for opt in &mut bad {
        let error = opt.step(&mut params, &grads).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(opt.steps(), 0);
    }
    let mut cut = params_of(&[4, 4]);
    let uncut = Sgd::new(&params_of(&[20]), 0.1);
    let error = uncut.clone().step(&mut cut, &grads).unwrap_err();
    assert!(error.to_string().contains("other parameters"), "{error}");
    let foreign = Grads::like(&params_of(&[5]));
    let error = Sgd::new(&params, 0.1)
        .step(&mut params, &foreign)
        .unwrap_err();
    assert!(error.to_string().contains("p0"), "{error}");
    assert_eq!(params.flat(), before);
}

/// Two groups with rates and decays of their own, clipped together.
#[test]
fn clipped_groups_equal_pytorch() {
    use phalanx_nn::optim::{clip_factor, grad_norm};
    let fixture = fixture();
    let case = &fixture["clipped_two_groups"];
    let start = floats(&fixture["start"]);
    let mut groups = [(1.0, 0.1, 0.1), (2.0, 0.02, 0.0)].map(|(scale, lr, decay)| {
        let mut params = params_of(&[9]);
        let own: Vec<f32> = start.iter().map(|v| v / scale).collect();
        spread(&mut params, &own);
        let sgd = Sgd::new(&params, lr).momentum(0.9).weight_decay(decay);
        (scale, params, sgd)
    });
    let wanted = case["a_b_after_each_step"].as_array().unwrap();
    let list = fixture["gradients"].as_array().unwrap();
    assert_eq!(wanted.len(), list.len());
    for (i, (gradient, want)) in list.iter().zip(wanted).enumerate() {
        let all = groups.each_ref().map(|(scale, params, _)| {
            let own: Vec<f32> = floats(gradient).iter().map(|v| v * scale).collect();
            gradients(params, &own)
        });
        let squares = groups
            .iter()
            .zip(&all)
            .map(|(g, grads)| grad_norm(&g.1, grads, &g.2.thread_pool()).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let torch = f64::from(floats(&case["norm_before_clipping"][i])[0]);
        assert!((norm - torch).abs() <= 1e-6 * torch, "{norm} {torch}");
        for (k, ((_, params, sgd), grads)) in groups.iter_mut().zip(&all).enumerate() {
            sgd.step_scaled(params, grads, clip_factor(norm, 1.5))
                .unwrap();
            let what = format!("group {k} after step {}", i + 1);
            assert_same(&gathered(params), &floats(&want[k]), 1e-6, &what);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit_of_a_step() {
    // Over and under the piece that a thread takes.
    let start = params_of(&[100_000, 3, 20_000, 16_384]);
    let wave = |from: usize, len: usize| (from..from + len).map(|i| (i as f32 * 0.7).sin());
    type Make = fn(&Params) -> Box<dyn Optimizer>;
    let makes: [Make; 8] = [
        |p| Box::new(Sgd::new(p, 0.1)),
        |p| {
            Box::new(
                Sgd::new(p, 0.1)
                    .momentum(0.9)
                    .nesterov(true)
                    .weight_decay(1e-3),
            )
        },
        |p| Box::new(Adam::new(p, 0.1).amsgrad(true)),
        |p| Box::new(Adam::adamw(p, 0.1)),
        |p| Box::new(Rmsprop::new(p, 0.1).momentum(0.9)),
        |p| Box::new(Lion::new(p, 0.1).weight_decay(0.1)),
        |p| Box::new(Lamb::new(p, 0.1)),
        |p| Box::new(Ema::new(p, Adam::adamw(p, 0.1), 0.9)),
    ];
    for make in makes {
        let run = |threads: Option<usize>| {
            let mut params = start.clone();
            let values: Vec<f32> = wave(0, 136_387).collect();
            spread(&mut params, &values);
            let mut optimizer = make(&params);
            if let Some(threads) = threads {
                optimizer.set_thread_pool(Tape::new(Threads(threads)).thread_pool());
            }
            for step in 0..3 {
                let values: Vec<f32> = wave(step * 977, 136_387).collect();
                let grads = gradients(&params, &values);
                optimizer.step(&mut params, &grads).unwrap();
            }
            let mut all = gathered(&params);
            for (_, state) in optimizer.state() {
                all.extend_from_slice(state);
            }
            all
        };
        let alone = run(None);
        assert!(alone.iter().all(|v| v.is_finite()) && alone[..136_387] != gathered(&start));
        for threads in [1, 2, 3, 4] {
            assert!(run(Some(threads)) == alone, "{threads} threads");
        }
    }
}

/// Runs of any length in any order are one step.
#[test]
fn runs_of_elements_leave_the_bits_of_a_step() {
    let start = params_of(&[1000, 3, 77]);
    let wave = |from: usize| (from..from + 1080).map(|i| (i as f32 * 0.7).sin());
    type Make = fn(&Params) -> Box<dyn Optimizer>;
    let makes: [Make; 7] = [
        |p| Box::new(Sgd::new(p, 0.1).weight_decay(1e-3)),
        |p| Box::new(Sgd::new(p, 0.1).momentum(0.9).dampening(0.2)),
        |p| Box::new(Adam::adamw(p, 0.1).amsgrad(true)),
        |p| Box::new(Rmsprop::new(p, 0.1).centered(true)),
        |p| {
            let rmsprop = Rmsprop::new(p, 0.1).weight_decay(1e-3).momentum(0.9);
            Box::new(rmsprop.centered(true))
        },
        |p| Box::new(Lion::new(p, 0.1).weight_decay(0.1)),
        |p| Box::new(Ema::new(p, Rmsprop::new(p, 0.1).momentum(0.9), 0.9)),
    ];
    for make in makes {
        let run = |piece: Option<usize>| {
            let mut params = start.clone();
            spread(&mut params, &wave(0).collect::<Vec<f32>>());
            let mut optimizer = make(&params);
            for step in 0..3 {
                let grads = gradients(&params, &wave(step * 977).collect::<Vec<f32>>());
                let Some(piece) = piece else {
                    optimizer.step_scaled(&mut params, &grads, 0.7).unwrap();
                    continue;
                };
                optimizer.begin_step().unwrap();
                for info in params.infos().to_vec().iter().rev() {
                    for from in (0..info.len).step_by(piece).rev() {
                        let range = info.offset + from..info.offset + info.len.min(from + piece);
                        let run = Run {
                            at: range.start,
                            values: &mut params.flat_mut()[range.clone()],
                            grads: &grads.flat()[range],
                        };
                        optimizer.step_run(run, 0.7).unwrap();
                    }
                }
            }
            assert_eq!(optimizer.steps(), 3);
            let mut all = gathered(&params);
            for (_, state) in optimizer.state() {
                all.extend_from_slice(state);
            }
            all
        };
        let whole = run(None);
        for piece in [1, 16, 33, 5000] {
            assert!(run(Some(piece)) == whole, "runs of {piece}");
        }
    }
}

#[test]
fn runs_that_do_not_fit_are_refused() {
    let params = params_of(&[16, 16]);
    type Make = fn(&Params) -> Box<dyn Optimizer>;
    let makes: [Make; 3] = [
        |p| Box::new(Sgd::new(p, 0.1).momentum(0.9)),
        |p| Box::new(Adam::new(p, 0.1)),
        |p| Box::new(Ema::new(p, Sgd::new(p, 0.1), 0.9)),
    ];
    for make in makes {
        let mut optimizer = make(&params);
        let mut give = |begin: bool, at: usize, values: usize, grads: usize| {
            if begin {
                optimizer.begin_step().unwrap();
            }
            let (mut values, grads) = (vec![1.0; values], vec![1.0; grads]);
            let run = Run {
                at,
                values: &mut values,
                grads: &grads,
            };
            let error = optimizer.step_run(run, 1.0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(values.iter().all(|v| *v == 1.0));
            error.to_string()
        };
        assert!(give(false, 0, 4, 4).contains("begin_step"));
        assert!(give(true, 0, 4, 3).contains("4 elements from 0 with 3 gradients"));
        assert!(give(true, 30, 4, 4).contains("does not fit"));
        assert!(give(true, usize::MAX, 4, 4).contains("does not fit"));
        assert!(give(true, 0, 24, 24).contains("does not lie in one parameter"));
    }
}
