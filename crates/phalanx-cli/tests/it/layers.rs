//! Crates depend on each other in one direction only, modules of a crate as well; files import each other in few circles; and
//! the code does not grow.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Each crate, and those of ours that it may depend on.
const MAY: [(&str, &[&str]); 26] = [
    ("base", &[]),
    ("wire", &[]),
    ("mpi", &[]),
    ("fold", &[]),
    ("kernels", &[]),
    ("nn", &["base", "kernels"]),
    ("store", &["wire"]),
    ("comm", &["base", "fold", "wire", "store"]),
    ("member", &["base", "store", "comm"]),
    ("ddp", &["base", "comm", "nn"]),
    ("checkpoint", &["base", "nn"]),
    ("image", &["base"]),
    ("object", &["base"]),
    ("data", &["base", "nn", "checkpoint", "image", "object"]),
    ("global", &["base", "comm", "nn", "ddp", "checkpoint"]),
    ("report", &["base"]),
    ("http", &["base"]),
    ("track", &["base", "http", "object", "report"]),
    ("live", &["base", "report", "track"]),
    ("process", &["base"]),
    (
        "launch",
        &["base", "process", "wire", "store", "comm", "member", "mpi"],
    ),
    ("flow", &["base", "process"]),
    (
        "train",
        &[
            "base",
            "process",
            "store",
            "comm",
            "nn",
            "ddp",
            "global",
            "checkpoint",
            "data",
            "report",
            "track",
            "member",
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
            "track",
            "live",
            "member",
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
    let root = root();
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
const WITHOUT_ENGINE: [&str; 14] = [
    "base", "process", "fold", "wire", "store", "comm", "member", "report", "http", "object",
    "track", "live", "launch", "flow",
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
const LAYERS: [(&str, &[&[&str]]); 20] = [
    (
        "phalanx",
        &[
            &["watch"],
            &["training"],
            &["program"],
            &["spawn"],
            &["prelude"],
        ],
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
            &["job_files"],
            &["say"],
            &["stop"],
            &["address"],
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
            &["lora"],
        ],
    ),
    (
        "phalanx-cli",
        &[
            &["units"],
            &["bench"],
            &["doctor"],
            &["export"],
            &["index"],
            &["live"],
            &["new"],
            &["pack"],
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
            &["order"],
            &["dataset"],
            &["subset"],
            &["stored"],
            &["words"],
            &["listing"],
            &["folder"],
            &["augment"],
            &["sampler"],
            &["parquet"],
            &["stream"],
            &["gzip"],
            &["cifar10"],
            &["loader"],
            &["metrics"],
            &["digits"],
            &["synthetic"],
            &["mnist"],
            &["progress"],
            &["text_files"],
            &["packed"],
            &["text_dataset"],
            &["table"],
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
            &["messages"],
            &["vote"],
            &["hooks"],
            &["reducer"],
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
            &["secrets"],
            &["lock"],
            &["resources"],
            &["create"],
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
            &["aligned"],
            &["order"],
            &["par"],
            &["precision"],
            &["element"],
            &["vector"],
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
            &["elementwise"],
            &["bf16", "conv"],
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
            &["gpus"],
            &["flags"],
            &["numa"],
            &["contract"],
            &["place"],
            &["program"],
            &["streams"],
            &["torchrun"],
            &["args"],
            &["port"],
            &["token"],
            &["engine"],
            &["machine"],
            &["report"],
            &["tail"],
            &["job_files"],
            &["inspect"],
            &["threads"],
            &["plan"],
            &["ranks"],
            &["flight"],
            &["evict"],
            &["nodes"],
            &["ending"],
            &["job"],
            &["log"],
            &["rank_args"],
            &["words"],
            &["unknown"],
            &["config"],
            &["start"],
        ],
    ),
    (
        "phalanx-live",
        &[
            &["access"],
            &["hub"],
            &["run"],
            &["view"],
            &["runs"],
            &["follower"],
            &["server"],
        ],
    ),
    (
        "phalanx-member",
        &[
            &["state"],
            &["log"],
            &["group"],
            &["context"],
            &["requests"],
        ],
    ),
    (
        "phalanx-nn",
        &[
            &["error"],
            &["rng"],
            &["pool"],
            &["param"],
            &["profile"],
            &["ops", "tape", "tensor"],
            &["value"],
            &["losses"],
            &["layers"],
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
            &["refused"],
            &["handshakes"],
            &["table"],
            &["will"],
            &["store"],
            &["tcp"],
            &["mem"],
        ],
    ),
    (
        "phalanx-track",
        &[
            &["follow"],
            &["tracker"],
            &["delivery"],
            &["values"],
            &["tensorboard"],
            &["files"],
            &["store"],
            &["kubeflow", "mlflow"],
            &["wandb"],
            &["args"],
            &["ending"],
        ],
    ),
    (
        "phalanx-train",
        &[
            &["advice"],
            &["lr_finder"],
            &["args"],
            &["deliveries"],
            &["split"],
            &["log"],
            &["evaluation"],
            &["update"],
            &["best"],
            &["param_group"],
            &["timing"],
            &["profile"],
            &["sample_log"],
            &["reporter"],
            &["batch"],
            &["saving"],
            &["folder"],
            &["strategy"],
            &["trainer"],
            &["predictions"],
            &["run"],
            &["job"],
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

/// The number of circles of files, and of files in them, that is allowed.
const CIRCLES: usize = 3;
const FILES_IN_CIRCLES: usize = 46;

/// The number of lines of code in the whole repository that is allowed. It may only fall: a feature that needs lines frees as
/// many first.
const LINES: usize = 127_146;

/// When the code is more than this much shorter than `LINES`, `LINES` must be lowered.
const SLACK: usize = 150;

/// The folders whose code is counted.
const FOLDERS: [&str; 5] = ["crates", "recipes", "adapters", "python", "tools"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The source files in `FOLDERS`, as paths from the root. In a Git checkout, these are the files that Git tracks or does not
/// ignore; in an unpacked archive, all that are not in a `target` or hidden folder.
///
/// Counted are Rust, Python, shell, C, JavaScript, CSS and HTML. Not counted are tests, fuzz tests, examples, and `tools/runs`,
/// an archive of measurements.
fn files() -> Vec<String> {
    let git = std::process::Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .args(FOLDERS)
        .current_dir(root())
        .output();
    let listed = git.map(|git| String::from_utf8_lossy(&git.stdout).into_owned());
    let mut files: Vec<String> = listed
        .unwrap_or_default()
        .lines()
        .map(str::to_owned)
        .collect();
    let mut folders = match files.is_empty() {
        true => FOLDERS.map(str::to_owned).to_vec(),
        false => Vec::new(),
    };
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(root().join(&folder)).expect("a folder of sources");
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{folder}/{name}");
            match entry.path().is_dir() {
                true if name == "target" || name.starts_with('.') => {}
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    let is_left_out = |name: &str| {
        ["testing", "fuzz", "fuzzing", "examples"].contains(&name)
            || name.contains("tests")
            || name.ends_with("_test")
    };
    files.retain(|file| {
        let (stem, kind) = file.rsplit_once('.').unwrap_or_default();
        ["rs", "py", "sh", "c", "js", "css", "html"].contains(&kind)
            && !stem.split('/').any(is_left_out)
            && !stem.starts_with("tools/runs/")
    });
    files.sort();
    files.dedup();
    files
}

/// The lines of code of a file: without the unit tests at its end, blank lines, and lines that are a comment. A Python string in
/// triple quotes that begins a line is a comment.
fn code(file: &str) -> String {
    // Git also lists a file that was deleted and is not committed yet.
    let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
    let mut text = &*text;
    for tests in ["mod tests {", "pub(crate) mod tests {"] {
        let tests = format!("\n#[cfg(test)]\n{tests}");
        text = text.split(&tests).next().unwrap_or_default();
    }
    let (comment, open, close) = match file.rsplit('.').next() {
        Some("rs") => ("//", "/*", "*/"),
        Some("py") => ("#", "\"\"\"", "\"\"\""),
        Some("html") => ("<!--", "<!--", "-->"),
        Some("sh") => ("#", "#", ""),
        _ => ("//", "/*", "*/"),
    };
    let mut inside = false;
    let mut lines: Vec<&str> = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if inside {
            inside = !trimmed.contains(close);
        } else if let Some(rest) = trimmed.strip_prefix(open) {
            inside = !rest.contains(close);
        } else if !trimmed.is_empty() && !trimmed.starts_with(comment) {
            lines.push(line);
        }
    }
    lines.join("\n")
}

#[test]
fn the_code_does_not_grow() {
    let lines: usize = files().iter().map(|file| code(file).lines().count()).sum();
    assert!(
        lines <= LINES,
        "the repository has {lines} lines of code, {} more than LINES allows: remove as many, in any crate or script",
        lines - LINES
    );
    assert!(
        lines + SLACK >= LINES,
        "the repository has {lines} lines of code, {} less than LINES: set LINES to {lines}",
        LINES - lines
    );
}

/// A name's path, as `["super", "Thing"]`.
type Names = Vec<String>;

/// A file of a crate.
struct Source {
    /// Its path below `src`.
    file: String,
    /// The names that its `use` declarations import, re-exports included, and their paths.
    uses: Vec<(String, Names)>,
    /// The paths in the rest of its code.
    paths: Vec<Names>,
}

/// The files of a crate by their modules: `["plan", "grid"]` is `plan/grid.rs`, `["plan"]` is `plan/mod.rs`, and
/// `[]` is `lib.rs`.
type Sources = BTreeMap<Names, Source>;

fn path(text: &str) -> Names {
    let names = text.split("::").map(str::trim);
    let names = names.filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// The names that a `use` declaration imports, and their paths.
fn used(tree: &str) -> Vec<(String, Names)> {
    let Some((before, list)) = tree.split_once('{') else {
        let (from, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let from = path(from);
        let name = match name.trim() {
            "" => from.last().cloned().unwrap_or_default(),
            name => name.to_owned(),
        };
        return vec![(name, from)];
    };
    let before = path(before);
    let list = list.trim_end().trim_end_matches('}');
    let (mut found, mut depth) = (Vec::new(), 0);
    let parts = list.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    for part in parts.filter(|part| !part.trim().is_empty()) {
        for (name, mut from) in used(part) {
            let is_self = from == ["self"];
            if is_self {
                from.clear();
            }
            let from: Names = before.iter().cloned().chain(from).collect();
            let name = match is_self && name == "self" {
                true => from.last().cloned().unwrap_or_default(),
                false => name,
            };
            found.push((name, from));
        }
    }
    found
}

fn source(file: &str, code: &str) -> Source {
    let (mut uses, mut paths) = (Vec::new(), Vec::new());
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        let rest = match line.trim_start().strip_prefix("pub") {
            Some(rest) if rest.starts_with([' ', '(']) => {
                rest.split_once(' ').unwrap_or_default().1
            }
            _ => line.trim_start(),
        };
        let Some(rest) = rest.strip_prefix("use ") else {
            let words = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            paths.extend(words.filter(|word| word.contains("::")).map(path));
            continue;
        };
        let mut tree = rest.to_owned();
        while !tree.contains(';') {
            let Some(line) = lines.next() else { break };
            tree.push_str(line);
        }
        uses.extend(used(tree.split(';').next().unwrap_or_default()));
    }
    paths.retain(|path| !path.is_empty());
    let file = file.to_owned();
    Source { file, uses, paths }
}

/// The files of each crate, by its folder.
fn crates() -> BTreeMap<String, Sources> {
    let mut crates: BTreeMap<String, Sources> = BTreeMap::new();
    for path in files() {
        let Some((folder, file)) = path.split_once("/src/") else {
            continue;
        };
        let Some(stem) = file.strip_suffix(".rs") else {
            continue;
        };
        let mut module: Names = stem.split('/').map(str::to_owned).collect();
        if stem.ends_with("/mod") || ["lib", "main"].contains(&stem) {
            module.pop();
        }
        let sources = crates.entry(folder.to_owned()).or_default();
        // A `main.rs` beside `lib.rs` is another crate.
        sources
            .entry(module)
            .or_insert_with(|| source(file, &code(&path)));
    }
    crates
}

/// The module that defines the item `path` as written in the module `from`. Re-exports and imports are followed, those with `*`
/// are not. `None` for an item of another crate, and for a path to a module.
fn find(sources: &Sources, from: &[String], path: &[String], depth: usize) -> Option<Names> {
    let (mut at, mut names) = (from.to_vec(), path);
    match &**names.first()? {
        "crate" => (at, names) = (Vec::new(), &names[1..]),
        "self" => names = &names[1..],
        _ => {}
    }
    while names.first()? == "super" {
        at.pop();
        names = &names[1..];
    }
    for (i, name) in names.iter().enumerate() {
        at.push(name.clone());
        if sources.contains_key(&at) {
            continue;
        }
        at.pop();
        let mut uses = sources.get(&at)?.uses.iter();
        return match uses.find(|(imported, _)| imported == name) {
            Some((_, target)) if depth < 16 => {
                let target = [target, &names[i + 1..]].concat();
                find(sources, &at, &target, depth + 1)
            }
            // Neither imported nor a module, such as `Vec` in `Vec::new`.
            None if i > 0 || names.len() < path.len() => Some(at),
            _ => None,
        };
    }
    None
}

/// The imports between the files of a crate.
struct Imports {
    /// Module and path of each file.
    files: Vec<(Names, String)>,
    /// The files that each file imports from, with a path that it imports.
    from: Vec<BTreeMap<usize, String>>,
    /// The files that each file imports from, directly or through other files.
    reached: Vec<BTreeSet<usize>>,
}

/// A file imports from another when its code has a path to an item that the other defines, in a `use` or elsewhere. A path
/// through a re-export leads to the file that defines the item.
///
/// What a module imports from its own submodules, as a `mod.rs` from the files in its folder, is not counted.
fn imports(sources: &Sources) -> Imports {
    let modules: Vec<&Names> = sources.keys().collect();
    let mut imports = Imports {
        files: Vec::new(),
        from: Vec::new(),
        reached: Vec::new(),
    };
    for (module, source) in sources {
        let mut from = BTreeMap::new();
        let uses = source.uses.iter().map(|(_, path)| path);
        for path in uses.chain(&source.paths) {
            let Some(other) = find(sources, module, path, 0) else {
                continue;
            };
            if !other.starts_with(module) {
                let other = modules.binary_search(&&other).expect("a module");
                from.entry(other).or_insert_with(|| path.join("::"));
            }
        }
        imports.files.push((module.clone(), source.file.clone()));
        imports.from.push(from);
    }
    for file in 0..modules.len() {
        let mut reached = BTreeSet::new();
        let mut next = vec![file];
        while let Some(file) = next.pop() {
            let from = imports.from[file].keys();
            next.extend(from.filter(|other| reached.insert(**other)));
        }
        imports.reached.push(reached);
    }
    imports
}

impl Imports {
    fn in_one_circle(&self, a: usize, b: usize) -> bool {
        self.reached[a].contains(&b) && self.reached[b].contains(&a)
    }

    /// The circles of files, by the first file of each.
    fn circles(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut circles: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for file in 0..self.files.len() {
            let first = (0..self.files.len()).find(|other| self.in_one_circle(file, *other));
            if let Some(first) = first {
                circles.entry(first).or_default().push(file);
            }
        }
        circles
    }
}

/// A circle is a set of files of one crate in which each file imports from each other one, directly or through files of the set.
#[test]
fn files_import_each_other_in_few_circles() {
    let (mut count, mut files, mut list) = (0, 0, String::new());
    for (folder, sources) in crates() {
        let imports = imports(&sources);
        for circle in imports.circles().values() {
            count += 1;
            files += circle.len();
            list += &format!("\n{folder}/src: {} files", circle.len());
            for file in circle {
                let from = imports.from[*file].iter();
                for (other, path) in from.filter(|(other, _)| circle.contains(other)) {
                    let (file, other) = (&imports.files[*file].1, &imports.files[*other].1);
                    list += &format!("\n    {file} imports {path} of {other}");
                }
            }
        }
    }
    assert!(
        count <= CIRCLES && files <= FILES_IN_CIRCLES,
        "{count} circles of files with {files} files, {CIRCLES} with {FILES_IN_CIRCLES} are allowed: move the item that closes \
         a circle to a file that both can import from{list}"
    );
}

#[test]
fn no_module_imports_from_above() {
    let crates = crates();
    for (name, layers) in LAYERS {
        let imports = imports(&crates[&format!("crates/{name}")]);
        let layer = |module: &str| {
            let found = layers.iter().position(|layer| layer.contains(&module));
            found.unwrap_or_else(|| panic!("{name}: the module {module} has no layer"))
        };
        for ((module, file), from) in imports.files.iter().zip(&imports.from) {
            let Some(own) = module.first().map(|own| layer(own)) else {
                continue;
            };
            for (other, path) in from {
                let (module, other) = &imports.files[*other];
                assert!(
                    module.first().is_none_or(|module| layer(module) <= own),
                    "{name}: {file} imports {path} of {other}, which is above it"
                );
            }
        }
        for module in layers.iter().flat_map(|layer| *layer) {
            let mut files = imports.files.iter();
            assert!(
                files.any(|(found, _)| found.first().is_some_and(|found| found == module)),
                "{name}: the module {module} is gone"
            );
        }
    }
}

#[test]
fn imports_are_found() {
    let file = |file: &str, code: &str| {
        let module = file.trim_end_matches(".rs").trim_end_matches("mod");
        let module: Names = module.split('/').map(str::to_owned).collect();
        let module = module
            .into_iter()
            .filter(|name| !name.is_empty() && name != "lib");
        (module.collect::<Names>(), source(file, code))
    };
    let sources = Sources::from([
        file("lib.rs", "pub use a::deep::{One, Two as Three};"),
        file(
            "a/mod.rs",
            "pub(crate) use self::deep::One;\nuse deep::Two;\nfn f() {}",
        ),
        file("a/deep.rs", "use std::fmt;\nuse super::f;"),
        file(
            "b.rs",
            "use crate::{\n    a::{self, One},\n    Error,\n};\na::f(); fmt::x();",
        ),
        file("c.rs", "f(super::b::X)\nuse crate::Three;"),
    ]);
    let imports = imports(&sources);
    let name = |file: usize| &*imports.files[file].1;
    let mut found = Vec::new();
    for (file, from) in imports.from.iter().enumerate() {
        found.extend(from.keys().map(|other| (name(file), name(*other))));
    }
    let expected = [
        ("a/deep.rs", "a/mod.rs"),
        ("b.rs", "lib.rs"),
        ("b.rs", "a/mod.rs"),
        ("b.rs", "a/deep.rs"),
        ("c.rs", "a/deep.rs"),
        ("c.rs", "b.rs"),
    ];
    assert_eq!(found, expected);
    assert!(imports.circles().is_empty());
}
