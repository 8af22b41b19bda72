//! Crates depend on each other in one direction only.

use std::path::Path;

/// Each crate, and those of ours that it may depend on.
const MAY: [(&str, &[&str]); 18] = [
    ("wire", &[]),
    ("store", &["wire"]),
    ("comm", &["wire", "store"]),
    ("nn", &[]),
    ("ddp", &["comm", "nn"]),
    ("global", &["comm", "nn", "ddp", "data"]),
    ("data", &["nn"]),
    ("report", &["data"]),
    ("process", &["comm", "ddp", "global", "nn", "data"]),
    ("http", &["data", "process"]),
    ("track", &["data", "process", "http"]),
    ("live", &["data", "process", "report", "track"]),
    ("mpi", &[]),
    (
        "launch",
        &[
            "wire", "store", "comm", "data", "report", "process", "track", "live", "mpi",
        ],
    ),
    ("flow", &["data", "process", "launch"]),
    (
        "train",
        &[
            "store", "comm", "nn", "ddp", "data", "report", "process", "track",
        ],
    ),
    (
        "recipes",
        &[
            "comm", "nn", "ddp", "global", "data", "process", "http", "launch", "train",
        ],
    ),
    (
        "",
        &[
            "wire", "store", "comm", "nn", "ddp", "global", "data", "report", "process", "live",
            "launch", "flow", "track", "train", "recipes",
        ],
    ),
];

#[test]
fn no_crate_depends_on_one_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let entries = std::fs::read_dir(root.join("crates")).expect("crates");
    let mut folders: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    folders.push(root.join("recipes"));
    let mut seen = 0;
    for path in folders {
        let folder = path.file_name().expect("a name").to_string_lossy();
        let name = folder.trim_start_matches("phalanx").trim_start_matches('-');
        let known = MAY.iter().find(|(known, _)| *known == name);
        let (_, may) = known.unwrap_or_else(|| panic!("{folder} has no place in the order"));
        seen += 1;
        let text = std::fs::read_to_string(path.join("Cargo.toml")).expect("a manifest");
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
