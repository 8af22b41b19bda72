//! Modules import from the modules below them only.

use std::path::Path;

/// The modules of the crate, from the bottom up.
const LAYERS: [&str; 24] = [
    "sync",
    "limits",
    "inherited",
    "dtype",
    "op",
    "error",
    "notice",
    "region",
    "wait",
    "kernel",
    "plan",
    "operation",
    "status",
    "transport",
    "memory",
    "select",
    "recorder",
    "stall",
    "deadline",
    "context",
    "shm",
    "exec",
    "backend",
    "group",
];

/// What the crate re-exports at its root, and the module it is from.
const AT_ROOT: [(&str, &str); 10] = [
    ("Bucket", "memory"),
    ("DType", "dtype"),
    ("Element", "dtype"),
    ("Error", "error"),
    ("ErrorKind", "error"),
    ("PortRange", "transport"),
    ("ReduceOp", "op"),
    ("Result", "error"),
    ("TransportKind", "transport"),
    ("CollectiveBytes", "shm"),
];

fn layer(module: &str, at: &Path) -> usize {
    let found = LAYERS.iter().position(|layer| *layer == module);
    found.unwrap_or_else(|| panic!("{}: {module} has no layer", at.display()))
}

/// Every `crate::` path in `text`, by the module it leads to.
fn imports(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in text.split("crate::").skip(1) {
        let names: Vec<&str> = match part.strip_prefix('{') {
            Some(list) => list
                .split('}')
                .next()
                .unwrap_or_default()
                .split(',')
                .collect(),
            None => vec![part],
        };
        for name in names {
            let end = |c: char| !c.is_alphanumeric() && c != '_';
            let name = name.trim().split(end).next().unwrap_or_default();
            if name.is_empty() {
                continue;
            }
            let module = AT_ROOT.iter().find(|(item, _)| *item == name);
            found.push(module.map_or(name, |(_, module)| module).to_owned());
        }
    }
    found
}

/// The file without its unit tests, its comments and what is left out of builds.
fn code(text: &str) -> String {
    let text = text
        .split("\n#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

fn check(folder: &Path, module: Option<&str>, files: &mut usize) {
    for entry in std::fs::read_dir(folder)
        .expect("a folder of sources")
        .flatten()
    {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy().into_owned();
        let stem = name.trim_end_matches(".rs");
        let own = module.unwrap_or(stem);
        if stem == "lib" || stem.contains("tests") || ["fuzzing", "testing"].contains(&stem) {
            continue;
        }
        if path.is_dir() {
            check(&path, Some(own), files);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            *files += 1;
            for import in imports(&code(&text)) {
                assert!(
                    layer(&import, &path) <= layer(own, &path),
                    "{} of layer {own} imports from {import}, which is above it",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn no_module_imports_from_above() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = 0;
    check(&sources, None, &mut files);
    assert!(files > 100, "only {files} files were found");
    assert_eq!(
        imports("use crate::{\n    exec::Executor,\n    Error};\ncrate::wait::f()"),
        ["exec", "error", "wait"]
    );
}
