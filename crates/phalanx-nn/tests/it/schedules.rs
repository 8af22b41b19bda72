//! Learning-rate schedules against PyTorch 2.15 (`fixtures/schedules.json`, from the
//! project's parity fixtures, and `more_optim.json`).

use phalanx_nn::ErrorKind;
use phalanx_nn::optim::schedule::{OneCycle, Plateau, Schedule};
use serde_json::Value;

fn schedule(name: &str) -> Schedule {
    let third = 1.0 / 3.0;
    match name {
        "cosine T=20" => Schedule::cosine(0.1, 20, 0.0).unwrap(),
        "cosine T=8 past the end, floor 0.01" => Schedule::cosine(0.1, 8, 0.01).unwrap(),
        "one-cycle 40" => Schedule::one_cycle(OneCycle::new(0.4, 40)).unwrap(),
        "one-cycle 37 linear, pct 0.2" => Schedule::one_cycle(OneCycle {
            rising: 0.2,
            divisor: 10.0,
            final_divisor: 100.0,
            cosine: false,
            ..OneCycle::new(0.4, 37)
        })
        .unwrap(),
        "one-cycle 50 three phases" => Schedule::one_cycle(OneCycle {
            three_phase: true,
            ..OneCycle::new(0.4, 50)
        })
        .unwrap(),
        "step 3 x0.1" => Schedule::step(0.1, 3, 0.1),
        "multi-step" => Schedule::multi_step(0.1, &[3, 7, 7], 0.5),
        "exponential" => Schedule::exponential(0.1, 0.7),
        "linear warm-up" => Schedule::linear(0.1, third, 1.0, 5).unwrap(),
        other => panic!("no such schedule: {other}"),
    }
}

fn close(got: f64, want: f64, what: &str) {
    assert!(
        (got - want).abs() <= 1e-15 * want.abs().max(1e-3),
        "{what}: {got} {want}"
    );
}

#[test]
fn rates_and_momenta_are_pytorchs() {
    let cases: Vec<Value> =
        serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    assert_eq!(cases.len(), 9);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let mut s = schedule(name);
        for (i, want) in case["lr"].as_array().unwrap().iter().enumerate() {
            if i > 0 {
                s.advance();
            }
            let what = format!("{name} after {i} steps");
            close(s.lr(), want.as_f64().unwrap(), &what);
            match case["momentum"].as_array() {
                Some(m) => close(s.momentum().unwrap(), m[i].as_f64().unwrap(), &what),
                None => assert_eq!(s.momentum(), None),
            }
        }
    }
}

#[test]
fn one_schedule_follows_another() {
    // torch.optim.lr_scheduler.SequentialLR(opt, [LinearLR(opt, 0.1, 1.0, 3), ExponentialLR(opt, 0.5)], [3]), lr 1.
    let warm = Schedule::linear(1.0, 0.1, 1.0, 3).unwrap();
    let mut s = Schedule::sequential(vec![warm, Schedule::exponential(1.0, 0.5)], &[3]).unwrap();
    for want in [0.1, 0.4, 0.7, 1.0, 0.5, 0.25] {
        assert!((s.lr() - want).abs() < 1e-15, "{} {want}", s.lr());
        s.advance();
    }
    assert_eq!(s.steps(), 6);
}

#[test]
fn a_milestone_at_the_start_counts() {
    // torch.optim.lr_scheduler.MultiStepLR(opt, [0, 2], 0.5), lr 0.1.
    let mut s = Schedule::multi_step(0.1, &[0, 2], 0.5);
    for want in [0.05, 0.05, 0.025, 0.025] {
        assert!((s.lr() - want).abs() < 1e-15, "{} {want}", s.lr());
        s.advance();
    }
}

fn more() -> Value {
    serde_json::from_str(include_str!("../fixtures/more_optim.json")).unwrap()
}

fn double(text: &Value) -> f64 {
    text.as_str().unwrap().parse().unwrap()
}

fn more_schedule(name: &str) -> Schedule {
    let made = match name {
        "restarts 10 x1" => Schedule::warm_restarts(0.1, 10, 1, 0.0),
        "restarts 3 x2, floor 0.01" => Schedule::warm_restarts(0.1, 3, 2, 0.01),
        "restarts 1 x3" => Schedule::warm_restarts(0.1, 1, 3, 0.0),
        "polynomial 5 ^1" => Schedule::polynomial(0.1, 5, 1.0),
        "polynomial 30 ^2" => Schedule::polynomial(0.1, 30, 2.0),
        "polynomial 17 ^0.9" => Schedule::polynomial(0.1, 17, 0.9),
        "by" => Ok(Schedule::by(0.1, |t| {
            0.95f64.powf(t as f64) / (1 + t) as f64
        })),
        "warm-up 7, cosine" => {
            Schedule::cosine(0.1, 50, 0.001).and_then(|then| Schedule::warm_up(7, then))
        }
        "warm-up 1, polynomial" => {
            Schedule::polynomial(0.1, 10, 2.0).and_then(|then| Schedule::warm_up(1, then))
        }
        "wsd 40 7 11" => Schedule::wsd(0.1, 40, 7, 11),
        other => panic!("no such schedule: {other}"),
    };
    made.unwrap()
}

#[test]
fn more_rates_have_pytorchs_bits() {
    let all = more();
    let all = all["schedules"].as_object().unwrap();
    assert_eq!(all.len(), 10);
    for (name, rates) in all {
        let mut s = more_schedule(name);
        for (i, want) in rates.as_array().unwrap().iter().enumerate() {
            assert_eq!(s.lr(), double(want), "{name} after {i} steps");
            s.observe(1.0, false);
            s.advance();
        }
    }
}

fn plateau(factor: f64) -> phalanx_nn::Result<Schedule> {
    let settings = Plateau {
        factor,
        ..Plateau::default()
    };
    Schedule::reduce_on_plateau(0.1, settings)
}

/// Alone, and after a warm-up, in which values do not count.
#[test]
fn plateaus_have_pytorchs_bits() {
    let all = more();
    let cases = all["plateaus"].as_array().unwrap();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let o = &case["options"];
        let default = Plateau::default();
        let number = |name: &str, default: f64| o[name].as_f64().unwrap_or(default);
        let count = |name: &str, default: u64| o[name].as_u64().unwrap_or(default);
        let settings = Plateau {
            factor: number("factor", default.factor),
            patience: count("patience", default.patience),
            threshold: number("threshold", default.threshold),
            relative: o["threshold_mode"] != "abs",
            cooldown: count("cooldown", default.cooldown),
            min_lr: number("min_lr", default.min_lr),
            eps: number("eps", default.eps),
        };
        let greatest = o["mode"] == "max";
        let mut alone = Schedule::reduce_on_plateau(0.1, settings).unwrap();
        let mut warmed = Schedule::warm_up(3, alone.clone()).unwrap();
        for _ in 0..3 {
            warmed.observe(if greatest { 1000.0 } else { -1000.0 }, greatest);
            warmed.advance();
        }
        let values = case["values"].as_array().unwrap().iter();
        for (value, lr) in values.zip(case["lr"].as_array().unwrap()) {
            for s in [&mut alone, &mut warmed] {
                s.observe(double(value), greatest);
                assert_eq!(s.lr(), double(lr), "{o}");
                // Steps change nothing.
                s.advance();
                assert_eq!(s.lr(), double(lr), "{o}");
            }
        }
    }
}

#[test]
fn warm_ups_and_decays_may_be_left_out() {
    let rates = |mut s: Schedule| {
        let next = |_| {
            let lr = s.lr();
            s.advance();
            lr
        };
        (0..6).map(next).collect::<Vec<f64>>()
    };
    let wsd = |warm, decay| rates(Schedule::wsd(1.0, 4, warm, decay).unwrap());
    assert_eq!(wsd(0, 0)[..4], [1.0; 4]);
    assert_eq!(wsd(2, 0)[..4], [0.5, 0.75, 1.0, 1.0]);
    assert_eq!(wsd(0, 2), [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]);
    assert_eq!(wsd(2, 2), [0.5, 0.75, 1.0, 0.5, 0.0, 0.0]);
}

#[test]
fn impossible_schedules_are_refused() {
    let all = [
        Schedule::cosine(0.1, 0, 0.0),
        Schedule::linear(0.1, 0.0, 1.0, 5),
        Schedule::linear(0.1, 0.5, 1.0, 0),
        Schedule::one_cycle(OneCycle::new(0.1, 3)),
        Schedule::one_cycle(OneCycle::new(0.1, 0)),
        Schedule::sequential(vec![Schedule::constant(0.1)], &[3]),
        Schedule::sequential(vec![], &[]),
        Schedule::warm_restarts(0.1, 0, 1, 0.0),
        Schedule::warm_restarts(0.1, 1, 0, 0.0),
        Schedule::polynomial(0.1, 0, 1.0),
        Schedule::warm_up(0, Schedule::constant(0.1)),
        Schedule::wsd(0.1, 10, 6, 5),
        Schedule::wsd(0.1, 10, u64::MAX, 5),
        plateau(1.0),
        plateau(f64::NAN),
        plateau(-0.1),
    ];
    for s in all {
        assert_eq!(s.unwrap_err().kind(), ErrorKind::Usage);
    }
}
