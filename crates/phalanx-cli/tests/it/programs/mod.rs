//! The documents' programs as a person runs them: whole processes, and their
//! standard output beside the documents' own `print` lines.

mod cifar;
mod compare;
mod fetch;
mod fine_tune;
mod gpt;
mod mesh;
mod mnist;
mod outputs;
mod pack;
mod photos;
mod quick_start;
mod start;
mod table;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{phalanx, run, succeed, text, wait};
use serde_json::Value;

/// The example of that name, which `cargo test` has built beside the program;
/// built here where only this test was asked for.
pub fn example(name: &str) -> PathBuf {
    example_of("phalanx", name)
}

/// The same of another crate.
pub fn example_of(package: &str, name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let folder = program.parent().expect("a folder");
    let path = folder.join("examples").join(name);
    if !path.is_file() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--package", package, "--example", name]);
        cargo.env("CARGO_TARGET_DIR", folder.parent().expect("a folder"));
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        let built = cargo.status().expect("cargo runs");
        assert!(built.success(), "example {name} cannot be built");
    }
    path
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

/// Each flag is in the help of `train RECIPE`, with these words beside it.
fn help_tells(recipe: &str, flags: &[(&str, &str)]) {
    let dir = tempfile::tempdir().expect("folder");
    let (out, _) = succeed(&["train", recipe, "--help"], dir.path());
    for (flag, words) in flags {
        let at = out
            .find(&format!("\n      {flag}"))
            .unwrap_or_else(|| panic!("no {flag} in {out}"));
        let rest = &out[at + 1 + flag.len()..];
        let own = &rest[..rest.find("\n      --").unwrap_or(rest.len())];
        let own = own.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(own.contains(words), "{flag}: no {words} in {own}");
    }
}

#[test]
fn shapes_keep_the_number_of_decimals() {
    assert_eq!(
        shape("loss: 0.1234 [ 5/10 (50%)] 12."),
        "loss: #.#### [ #/# (#%)] #."
    );
}
