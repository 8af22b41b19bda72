//! Times by operation and layer.

use std::time::Instant;

use phalanx_nn::models::MnistCnn;
use phalanx_nn::{Grads, Scope, Seed, StepKey, Tape, Threads};

#[test]
fn every_operation_of_a_step_is_timed_once_each_way() {
    let mut scope = Scope::new(Seed(0));
    let net = MnistCnn::new(&mut scope);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let images = vec![0.5; 4 * 28 * 28];
    let mut step = |tape: &mut Tape| {
        let began = Instant::now();
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&images, &[4, 28, 28, 1]).unwrap();
        let loss = net
            .forward(x)
            .unwrap()
            .nll_loss(&[0, 1, 2, 3], 4.0)
            .unwrap();
        loss.backward(&mut grads).unwrap();
        began.elapsed()
    };
    step(&mut tape);
    assert!(tape.take_profile(&params).spans().is_empty());
    tape.profile(true);
    let whole = step(&mut tape);
    let profile = tape.take_profile(&params);
    let spans = profile.spans();
    let (forward, backward): (Vec<_>, Vec<_>) = spans.iter().partition(|s| !s.backward);
    assert!(forward.len() >= 8);
    // The walk back meets the same operations in reverse.
    let key = |s: &&phalanx_nn::profile::Span| (s.operation, s.layer.clone());
    assert!(forward.iter().map(key).eq(backward.iter().rev().map(key)));
    assert!(
        forward
            .iter()
            .any(|s| s.operation == "Conv2d" && s.layer == "conv1")
    );
    assert!(spans.is_sorted_by_key(|s| s.began));
    assert!(spans.iter().map(|s| s.time).sum::<std::time::Duration>() <= whole);
    let (whole, short) = (profile.table(1, usize::MAX), profile.table(1, 2));
    for part in ["Conv2d", "conv2", "share"] {
        assert!(whole.contains(part), "{whole}");
    }
    // Which two layers took longest, nobody knows.
    assert!(
        short.contains("others") && !whole.contains("others"),
        "{short}"
    );
    assert!(tape.take_profile(&params).spans().is_empty());
    tape.profile(false);
    step(&mut tape);
    assert!(tape.take_profile(&params).spans().is_empty());
}
