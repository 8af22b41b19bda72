//! The documents' programs as a person runs them: whole processes, and their
//! standard output beside the documents' own `print` lines.

mod cifar;
mod compare;
mod fetch;
mod mnist;
mod start;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::free_port;

/// A command that no variable of the test's own environment reaches. No test
/// here waits for anything but the program's end: every wait inside it has a
/// deadline of its own.
fn phalanx(args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.args(args).current_dir(dir).env("TMPDIR", dir);
    for name in [
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PHALANX_TOKEN",
    ] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Exit code, standard output and standard error.
fn run(args: &[&str], dir: &Path) -> (i32, String, String) {
    let output = phalanx(args, dir).output().expect("phalanx runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().unwrap_or(-1),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// Runs and requires success; standard output and error.
fn succeed(args: &[&str], dir: &Path) -> (String, String) {
    let (code, out, err) = run(args, dir);
    assert_eq!(code, 0, "{args:?} failed\n{out}\n{err}");
    (out, err)
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// Equal up to how the JSON reader rounds the last bit.
fn near(value: &Value, expected: f64) {
    let value = value.as_f64().expect("a number");
    assert!(
        (value - expected).abs() < 1e-12,
        "{value} is not {expected}"
    );
}

/// `out` in the document's form: each number becomes `#` with as many `#`
/// behind the point as digits, each percentage `#%`, so that two runs of the
/// same program give the same text.
fn shape(out: &str) -> String {
    let mut shape = String::new();
    let mut rest = out.chars().peekable();
    while let Some(c) = rest.next() {
        if !c.is_ascii_digit() {
            shape.push(c);
            continue;
        }
        shape.push('#');
        while rest.next_if(char::is_ascii_digit).is_some() {}
        if rest.next_if_eq(&'.').is_some() {
            shape.push('.');
            while rest.next_if(char::is_ascii_digit).is_some() {
                shape.push('#');
            }
        }
    }
    shape
}

#[test]
fn shapes_keep_the_number_of_decimals() {
    assert_eq!(
        shape("loss: 0.1234 [ 5/10 (50%)] 12."),
        "loss: #.#### [ #/# (#%)] #."
    );
}
