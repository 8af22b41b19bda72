//! Crates depend on each other in one direction only.

use std::path::Path;

/// Each crate, and those of ours that it may depend on.
const MAY: [(&str, &[&str]); 10] = [
    ("wire", &[]),
    ("store", &["wire"]),
    ("comm", &["wire", "store"]),
    ("nn", &[]),
    ("ddp", &["comm", "nn"]),
    ("data", &["nn"]),
    ("process", &["comm", "ddp", "nn", "data"]),
    ("launch", &["wire", "store", "comm", "data", "process"]),
    ("train", &["comm", "nn", "ddp", "data", "process"]),
    (
        "",
        &[
            "wire", "store", "comm", "nn", "ddp", "data", "process", "launch", "train",
        ],
    ),
];

#[test]
fn no_crate_depends_on_one_above_it() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seen = 0;
    for entry in std::fs::read_dir(&crates).expect("crates").flatten() {
        let folder = entry.file_name().to_string_lossy().into_owned();
        let name = folder.trim_start_matches("phalanx").trim_start_matches('-');
        let known = MAY.iter().find(|(known, _)| *known == name);
        let (_, may) = known.unwrap_or_else(|| panic!("{folder} has no place in the order"));
        seen += 1;
        let text = std::fs::read_to_string(entry.path().join("Cargo.toml")).expect("a manifest");
        let dependencies = text
            .split("\n[")
            .find(|part| part.starts_with("dependencies]"));
        for line in dependencies.unwrap_or_default().lines() {
            let Some(other) = line.strip_prefix("phalanx-") else {
                continue;
            };
            let other = other.split(['.', ' ']).next().unwrap_or_default();
            assert!(
                may.contains(&other),
                "{folder} must not depend on phalanx-{other}"
            );
            assert!(
                (name, other) != ("ddp", "nn") || line.contains("optional = true"),
                "{folder} may depend on phalanx-{other} as `optional = true` only"
            );
        }
    }
    assert_eq!(seen, MAY.len(), "a crate is gone");
}
