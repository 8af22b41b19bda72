//! Other kinds of parallelism are examples; what they print says whether they train as they should.

use std::path::Path;
use std::process::Command;

/// What the example prints; `cargo test` has built it, and it is built here where only this test was asked for.
fn output_of(name: &str) -> String {
    let test = std::env::current_exe().expect("a path");
    let folder = test.ancestors().nth(2).expect("target/debug");
    let path = folder.join("examples").join(name);
    if !path.is_file() {
        build(name, folder);
    }
    let output = Command::new(path).output().expect("it starts");
    let (out, err) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}");
    String::from_utf8(out.clone()).expect("text")
}

fn build(name: &str, folder: &Path) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--package", "phalanx-ddp", "--example", name]);
    cargo.env("CARGO_TARGET_DIR", folder.parent().expect("target"));
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.status().expect("cargo runs");
    assert!(built.success(), "example {name} cannot be built");
}

/// The number behind the last of `words` in a line.
fn number(line: &str, words: &str) -> f64 {
    let rest = line.rsplit(words).next().unwrap_or_default();
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
    let digits = &rest[..end.unwrap_or(rest.len())];
    digits.parse().unwrap_or_else(|_| panic!("{words}: {line}"))
}

const SAME: &str = "weights and running statistics have the same bits: true";

/// Both columns of five lines of losses are the same, and losses sink.
fn check_losses(lines: &[&str], before_second: &str) {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (step, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("step {step}  loss ")), "{line}");
        first.push(number(line, "loss "));
        second.push(number(line, before_second));
    }
    assert_eq!(first, second);
    assert!(first.len() == 5 && first[4] < first[0] / 2.0, "{first:?}");
}

#[test]
fn layers_on_three_ranks_train_as_in_one_process() {
    let out = output_of("model_parallel");
    let lines: Vec<&str> = out.lines().collect();
    check_losses(&lines[..5], "on 3 ranks, ");
    assert_eq!(lines[5..], [SAME], "{out}");
}

#[test]
fn replicas_of_one_process_train_as_ranks_do() {
    let out = output_of("data_parallel");
    let lines: Vec<&str> = out.lines().collect();
    check_losses(&lines[..5], "with DataParallel, ");
    assert_eq!(lines[5], SAME);
    // All through the master: three replicas get a model with statistics and give gradients.
    let (moved, model) = (number(lines[6], "moved "), number(lines[6], "model has "));
    assert!(lines.len() == 7 && moved > 6.0 * model, "{out}");
}

#[test]
fn local_sgd_averages_weights_every_five_steps() {
    let out = output_of("local_sgd");
    let lines: Vec<&str> = out.lines().collect();
    // One learns the function while the ranks drift apart between means; that weights are equal after each is checked there.
    let apart = |line: &&str| number(line, "weights apart by ");
    assert!(lines.iter().map(apart).all(|apart| apart > 0.0), "{out}");
    let averaged = |line: &&str| line.ends_with(", averaged");
    let steps: Vec<usize> = (0..lines.len()).filter(|i| averaged(&lines[*i])).collect();
    assert_eq!(steps, [4, 9, 10, 11, 12, 13], "{out}");
    let loss = |line: &str| number(line, "largest loss ");
    assert!(loss(lines[13]) < 1e-4 * loss(lines[0]), "{out}");
}

#[test]
fn power_sgd_learns_the_function_that_float32_learns() {
    let out = output_of("power_sgd");
    let lines: Vec<&str> = out.lines().collect();
    let loss = |line: &str| number(line, "loss ");
    assert!(lines.len() == 12, "{out}");
    for (how, lines) in ["float32", "PowerSGD"].into_iter().zip(lines.chunks(6)) {
        assert!(lines.iter().all(|line| line.starts_with(how)), "{out}");
        assert!(loss(lines[5]) < 0.1 * loss(lines[0]), "{out}");
    }
}
