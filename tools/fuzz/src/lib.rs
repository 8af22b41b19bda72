//! What the fuzz targets share: one binary a crate, one target of it chosen
//! by the variable `PHALANX_FUZZ`.
//!
//! | `PHALANX_FUZZ` | does |
//! |---|---|
//! | `list` | prints the names of this binary's targets and ends |
//! | `seeds:DIR` | writes the seeds of each target into `DIR/NAME/` and ends |
//! | a name | fuzzes that target |
//! | not set | gives every input to every target |
//!
//! The bodies and their seeds are in the crates themselves (`fuzzing.rs`), so
//! that plain `cargo test` runs them on garbled seeds, without nightly.

use std::sync::OnceLock;

/// Name, body, seeds, as each crate's `fuzzing::TARGETS` has them.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

static CHOSEN: OnceLock<Vec<fn(&[u8])>> = OnceLock::new();

/// Reads the variable.
pub fn choose(targets: &[Target]) {
    let wanted = std::env::var("PHALANX_FUZZ").unwrap_or_default();
    if wanted == "list" {
        for (name, ..) in targets {
            println!("{name}");
        }
        std::process::exit(0);
    }
    if let Some(folder) = wanted.strip_prefix("seeds:") {
        for (name, _, seeds) in targets {
            let folder = format!("{folder}/{name}");
            std::fs::create_dir_all(&folder).expect("a folder for seeds");
            for (i, seed) in seeds().iter().enumerate() {
                std::fs::write(format!("{folder}/seed-{i}"), seed).expect("a seed");
            }
        }
        std::process::exit(0);
    }
    let chosen: Vec<fn(&[u8])> = targets
        .iter()
        .filter(|(name, ..)| wanted.is_empty() || wanted == *name)
        .map(|(_, run, _)| *run)
        .collect();
    assert!(!chosen.is_empty(), "no target is called {wanted:?}");
    let _ = CHOSEN.set(chosen);
}

/// One input.
pub fn run(data: &[u8]) {
    for target in CHOSEN.get().into_iter().flatten() {
        target(data);
    }
}

/// The binary for one crate.
#[macro_export]
macro_rules! fuzz {
    ($targets:path) => {
        libfuzzer_sys::fuzz_target!(init: $crate::choose($targets), |data: &[u8]| $crate::run(data));
    };
}
