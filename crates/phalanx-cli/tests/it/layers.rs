//! Crates depend on each other in one direction only, modules of a crate as well, and no crate grows unnoticed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Each crate, and those of ours that it may depend on.
const MAY: [(&str, &[&str]); 23] = [
    ("base", &[]),
    ("wire", &[]),
    ("mpi", &[]),
    ("fold", &[]),
    ("kernels", &[]),
    ("nn", &["base", "kernels"]),
    ("store", &["wire"]),
    ("comm", &["base", "fold", "wire", "store"]),
    ("ddp", &["base", "comm", "nn"]),
    ("checkpoint", &["base", "nn"]),
    ("data", &["base", "nn", "checkpoint"]),
    ("global", &["base", "comm", "nn", "ddp", "checkpoint"]),
    ("report", &["base"]),
    ("http", &["base"]),
    ("track", &["base", "http", "report"]),
    ("live", &["base", "report", "track"]),
    ("process", &["base"]),
    (
        "launch",
        &[
            "base", "process", "wire", "store", "comm", "report", "track", "live", "mpi",
        ],
    ),
    ("flow", &["base", "process"]),
    (
        "train",
        &[
            "base",
            "store",
            "comm",
            "nn",
            "ddp",
            "global",
            "checkpoint",
            "data",
            "report",
            "track",
            "launch",
        ],
    ),
    (
        "",
        &[
            "base",
            "wire",
            "store",
            "comm",
            "nn",
            "ddp",
            "global",
            "checkpoint",
            "data",
            "report",
            "launch",
            "flow",
            "train",
        ],
    ),
    ("recipes", &["", "base", "http"]),
    (
        "cli",
        &[
            "",
            "base",
            "store",
            "comm",
            "nn",
            "ddp",
            "checkpoint",
            "data",
            "report",
            "live",
            "launch",
            "process",
            "flow",
            "track",
            "train",
            "recipes",
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
            let Some(other) = line.strip_prefix("phalanx") else {
                continue;
            };
            let other = other.split(['.', ' ']).next().unwrap_or_default();
            let other = other.trim_start_matches('-');
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

/// Crates that are built without the engine: no dependency of theirs needs it, by whatever way.
const WITHOUT_ENGINE: [&str; 12] = [
    "base", "process", "fold", "wire", "store", "comm", "report", "http", "track", "live",
    "launch", "flow",
];

#[test]
fn launcher_pages_and_trackers_are_built_without_the_engine() {
    for name in WITHOUT_ENGINE {
        let tree = std::process::Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--locked", "--edges", "normal,build"])
            .args(["--prefix", "none", "--all-features", "--package"])
            .arg(format!("phalanx-{name}"))
            .output()
            .expect("cargo tree");
        let tree = String::from_utf8(tree.stdout).expect("a tree");
        assert!(tree.starts_with(&format!("phalanx-{name} ")), "{tree}");
        let engine = tree.lines().find(|line| line.starts_with("phalanx-nn "));
        assert_eq!(engine, None, "phalanx-{name} needs the engine");
    }
}

/// The modules of each crate, from the bottom up: a module imports from those before it. Modules in the same brackets import
/// each other; no further ones join them.
const LAYERS: [(&str, &[&[&str]]); 19] = [
    (
        "phalanx",
        &[&["training"], &["program"], &["spawn"], &["prelude"]],
    ),
    (
        "phalanx-base",
        &[
            &["text"],
            &["format"],
            &["error"],
            &["env"],
            &["files"],
            &["process"],
            &["say"],
            &["stop"],
        ],
    ),
    (
        "phalanx-checkpoint",
        &[
            &["pickle"],
            &["pth"],
            &["weights"],
            &["state"],
            &["digest"],
            &["load"],
        ],
    ),
    (
        "phalanx-cli",
        &[
            &["units"],
            &["bench"],
            &["doctor"],
            &["export"],
            &["live"],
            &["new"],
            &["plan"],
            &["predict"],
            &["report"],
            &["training"],
            &["compare"],
            &["cli"],
        ],
    ),
    (
        "phalanx-comm",
        &[
            &["sync"],
            &["limits"],
            &["inherited"],
            &["dtype"],
            &["error"],
            &["notice"],
            &["region"],
            &["wait"],
            &["plan"],
            &["operation"],
            &["status"],
            &["transport"],
            &["memory"],
            &["select"],
            &["recorder"],
            &["lost"],
            &["stall"],
            &["deadline"],
            &["context"],
            &["shm"],
            &["exec"],
            &["messages"],
            &["backend"],
            &["group"],
        ],
    ),
    (
        "phalanx-data",
        &[
            &["dataset"],
            &["augment"],
            &["sampler"],
            &["gzip"],
            &["cifar10"],
            &["loader"],
            &["metrics"],
            &["mnist", "synthetic"],
            &["progress"],
            &["text_dataset"],
        ],
    ),
    (
        "phalanx-ddp",
        &[
            &["error"],
            &["bucket"],
            &["parameters"],
            &["equal"],
            &["fingerprint"],
            &["trace"],
            &["average"],
            &["hooks", "messages", "reducer", "vote"],
            &["replica"],
            &["nn"],
        ],
    ),
    (
        "phalanx-flow",
        &[
            &["spec"],
            &["objects"],
            &["store"],
            &["call"],
            &["check"],
            &["child"],
            &["lock"],
            &["resources"],
            &["engine"],
            &["export"],
            &["file"],
            &["probe"],
            &["prune"],
            &["flow"],
            &["page"],
            &["cli"],
        ],
    ),
    (
        "phalanx-global",
        &[
            &["error"],
            &["placement"],
            &["sbp"],
            &["layout"],
            &["boxing"],
            &["rules"],
            &["indices", "params", "prefetch", "step", "tensor"],
            &["checkpoint"],
            &["loss"],
            &["ops"],
            &["parallel"],
        ],
    ),
    (
        "phalanx-kernels",
        &[
            &["isa"],
            &["vector"],
            &["aligned"],
            &["order"],
            &["par"],
            &["rng"],
            &["math"],
            &["scalar"],
            &["update"],
            &["squares"],
            &["rotary"],
            &["panel"],
            &["transpose"],
            &["product"],
            &["bias"],
            &["reduce"],
            &["broadcast"],
            &["dropout"],
            &["softmax_dim"],
            &["attention"],
            &["avg_pool"],
            &["adaptive_max"],
            &["bf16", "conv", "element", "elementwise", "precision"],
            &["activation"],
            &["batch_norm"],
            &["layer_norm"],
            &["max_pool"],
            &["peak"],
        ],
    ),
    (
        "phalanx-launch",
        &[
            &["flags"],
            &["numa"],
            &["contract"],
            &["place"],
            &["program"],
            &["streams"],
            &["torchrun"],
            &["args"],
            &["context"],
            &["port"],
            &["token"],
            &["engine"],
            &["machine"],
            &["report"],
            &["ending"],
            &["inspect"],
            &["same_host"],
            &["threads"],
            &["plan"],
            &["ranks"],
            &["flight"],
            &["evict"],
            &["nodes"],
            &["job"],
            &["log"],
            &["rank_args"],
            &["words"],
            &["config"],
            &["start"],
        ],
    ),
    (
        "phalanx-live",
        &[&["address"], &["tail"], &["no_page", "page"]],
    ),
    (
        "phalanx-nn",
        &[
            &["error"],
            &["rng"],
            &["pool"],
            &["param"],
            &["profile"],
            &["losses", "ops", "tape", "tensor"],
            &["layers", "value"],
            &["models"],
            &["optim"],
        ],
    ),
    (
        "phalanx-process",
        &[
            &["error_file"],
            &["oom"],
            &["proc_stat"],
            &["pump"],
            &["reap"],
            &["guard"],
            &["folder"],
            &["shim"],
            &["signals"],
        ],
    ),
    (
        "phalanx-report",
        &[
            &["curve"],
            &["resumption"],
            &["system"],
            &["watch"],
            &["image"],
            &["line"],
            &["logged"],
            &["events"],
        ],
    ),
    (
        "phalanx-store",
        &[
            &["error"],
            &["pending"],
            &["auth"],
            &["table"],
            &["store", "tcp"],
            &["file"],
            &["mem"],
        ],
    ),
    (
        "phalanx-track",
        &[
            &["follow"],
            &["tracker"],
            &["values"],
            &["tensorboard"],
            &["mlflow"],
            &["wandb"],
            &["args"],
            &["delivery"],
            &["ending"],
        ],
    ),
    (
        "phalanx-train",
        &[
            &["advice"],
            &["attempt"],
            &["deliveries"],
            &["gradient"],
            &["split"],
            &["labels"],
            &["log"],
            &["lr_finder"],
            &["precision"],
            &["update"],
            &["lock"],
            &["profile"],
            &["sample_log"],
            &["timing"],
            &[
                "best",
                "exchange",
                "job",
                "output",
                "param_group",
                "reporter",
                "run_dir",
                "saving",
                "settings",
                "start",
                "strategy",
                "trainer",
                "weights",
            ],
            &["prepare"],
        ],
    ),
    (
        "phalanx-wire",
        &[
            &["error"],
            &["bytes"],
            &["frame"],
            &["token"],
            &["handshake"],
            &["store_msg"],
        ],
    ),
];

/// Code lines of each crate at most, without tests, comments and blank lines. A commit that raises one says why; one that
/// has made a crate smaller lowers it.
const LINES: [(&str, usize); 23] = [
    ("phalanx", 539),
    ("phalanx-base", 1321),
    ("phalanx-checkpoint", 3697),
    ("phalanx-cli", 3898),
    ("phalanx-comm", 21444),
    ("phalanx-data", 3851),
    ("phalanx-ddp", 5135),
    ("phalanx-flow", 6830),
    ("phalanx-fold", 1421),
    ("phalanx-global", 4877),
    ("phalanx-http", 75),
    ("phalanx-kernels", 9060),
    ("phalanx-launch", 12213),
    ("phalanx-live", 1817),
    ("phalanx-mpi", 65),
    ("phalanx-nn", 10442),
    ("phalanx-process", 1213),
    ("phalanx-report", 1199),
    ("phalanx-store", 4510),
    ("phalanx-track", 3374),
    ("phalanx-train", 10908),
    ("phalanx-wire", 1832),
    ("recipes", 2803),
];

/// How far a crate may be below its line.
const SLACK: usize = 150;

/// The file without its unit tests and comments.
fn code(text: &str) -> String {
    let mut text = text;
    for tests in ["mod tests {", "pub(crate) mod tests {"] {
        let tests = format!("\n#[cfg(test)]\n{tests}");
        text = text.split(&tests).next().unwrap_or_default();
    }
    let lines = text.lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The source files below `folder`, by their path in it without `.rs` and `/mod`; no tests.
fn sources(folder: &Path) -> BTreeMap<Vec<String>, String> {
    let mut found = BTreeMap::new();
    let mut folders: Vec<(PathBuf, Vec<String>)> = vec![(folder.to_owned(), Vec::new())];
    while let Some((folder, above)) = folders.pop() {
        for entry in std::fs::read_dir(&folder)
            .expect("a folder of sources")
            .flatten()
        {
            let (path, name) = (
                entry.path(),
                entry.file_name().to_string_lossy().into_owned(),
            );
            let stem = name.trim_end_matches(".rs");
            if stem.contains("tests") || stem == "testing" {
                continue;
            }
            let mut parts = above.clone();
            if stem != "mod" {
                parts.push(stem.to_owned());
            }
            if path.is_dir() {
                folders.push((path, parts));
            } else if name.ends_with(".rs") {
                found.insert(
                    parts,
                    code(&std::fs::read_to_string(&path).expect("a source file")),
                );
            }
        }
    }
    found
}

/// The first names of what follows `crate::`, `super::` or `use `: one, or those of a list in braces.
fn names(path: &str) -> Vec<String> {
    let first = |path: &str| {
        let end = |c: char| !c.is_alphanumeric() && c != '_';
        path.trim().split(end).next().unwrap_or_default().to_owned()
    };
    let Some(list) = path.strip_prefix('{') else {
        return vec![first(path)];
    };
    let (mut names, mut depth, mut begin) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(first(&list[begin..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(first(&list[begin..at]));
                begin = at + 1;
            }
            _ => {}
        }
    }
    names
}

/// What a crate's root re-exports, and the module that it is from.
fn at_root(root: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for part in root.split("use ").skip(1) {
        let part = part.split(';').next().unwrap_or_default();
        let part = part
            .trim_start_matches("self::")
            .trim_start_matches("crate::");
        let Some((module, items)) = part.split_once("::") else {
            continue;
        };
        for item in items.trim_matches(['{', '}']).split(',') {
            let name = item.rsplit([' ', ':']).next().unwrap_or_default().trim();
            if !name.is_empty() {
                found.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    found
}

/// The modules that each module of the crate in `folder` imports from.
fn imports(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let sources = sources(folder);
    let root = sources.get(&vec!["lib".to_owned()]).expect("lib.rs");
    let at_root = at_root(root);
    let is_module = |name: &str| sources.keys().any(|parts| parts[0] == name);
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (parts, text) in &sources {
        let own = &parts[0];
        if ["lib", "main", "fuzzing"].contains(&&**own)
            || parts.iter().any(|part| part == "fuzzing")
        {
            continue;
        }
        let up = "super::".repeat(parts.len());
        let from_root = text.split("crate::").skip(1);
        let from_super = text.split(&up).skip(1);
        let found = imports.entry(own.clone()).or_default();
        for name in from_root.chain(from_super).flat_map(names) {
            let module = match is_module(&name) {
                true => Some(&name),
                false => at_root.get(&name),
            };
            found.extend(
                module
                    .filter(|module| *module != own && is_module(module))
                    .cloned(),
            );
        }
    }
    imports
}

fn crate_folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match name {
        "recipes" => root.join("recipes"),
        name => root.join("crates").join(name).join("src"),
    }
}

#[test]
fn no_module_imports_from_above() {
    for (name, layers) in LAYERS {
        let layer = |module: &str| {
            let found = layers.iter().position(|layer| layer.contains(&module));
            found.unwrap_or_else(|| panic!("{name}: the module {module} has no layer"))
        };
        let imports = imports(&crate_folder(name));
        for (own, imports) in &imports {
            for import in imports {
                assert!(
                    layer(import) <= layer(own),
                    "{name}: {own} imports from {import}, which is above it"
                );
            }
        }
        for module in layers.iter().flat_map(|layer| *layer) {
            assert!(
                imports.contains_key(*module),
                "{name}: the module {module} is gone"
            );
        }
    }
    // What is found.
    assert_eq!(
        names("{\n    exec::{A, B},\n    Error}; x"),
        ["exec", "Error"]
    );
    assert_eq!(names("wait::f()"), ["wait"]);
    let root = at_root("pub use error::{Error, Result};\npub use self::a::b::C as D;");
    assert_eq!(root["Result"], "error");
    assert_eq!(root["D"], "a");
    let comm = imports(&crate_folder("phalanx-comm"));
    assert!(comm["group"].contains("backend") && comm["exec"].contains("error"));
}

#[test]
fn no_crate_grows_unnoticed() {
    let mut wrong = Vec::new();
    for (name, most) in LINES {
        let sources = sources(&crate_folder(name));
        let lines = sources.values().flat_map(|text| text.lines());
        let lines = lines.filter(|line| !line.trim().is_empty()).count();
        if lines > most || lines + SLACK < most {
            wrong.push(format!(
                "{name} has {lines} code lines, {most} in the table"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("; "));
}
