//! Learning-rate schedules against PyTorch 2.15 (`fixtures/schedules.json`, from the
//! project's parity fixtures).

use phalanx_nn::ErrorKind;
use phalanx_nn::optim::schedule::{OneCycle, Schedule};
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
    ];
    for s in all {
        assert_eq!(s.unwrap_err().kind(), ErrorKind::Usage);
    }
}
