//! `phalanx flow rm` and `prune`, and what can be run afterwards.

use std::fs;
use std::path::Path;

use crate::support::{run, succeed};

const FLOW: &str = r#"name = "w"
[inputs]
data = { type = "file", default = "data" }
[tasks.make]
shell = '''echo make >> "$FLOW_FOLDER/journal"; cat "$INPUT_DATA" > "$OUTPUT_DATA"; echo made >> "$OUTPUT_DATA"'''
cache = "1"
inputs = { data = "{inputs.data}" }
outputs = { data = "file" }
[tasks.use]
shell = '''echo use >> "$FLOW_FOLDER/journal"; echo left > junk; [ -e "$FLOW_FOLDER/go" ] || exit 2; cat "$INPUT_DATA" > "$OUTPUT_ALL"'''
inputs = { data = "{make.data}" }
outputs = { all = "file" }
[outputs]
all = "{use.all}"
"#;

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn journal(dir: &Path) -> String {
    fs::read_to_string(dir.join("journal"))
        .unwrap_or_default()
        .replace('\n', " ")
}

/// The content of the output that `flow run` has printed.
fn output(out: &str) -> String {
    let path = out.trim().strip_prefix("all = ").expect("the output");
    fs::read_to_string(path).expect("it is there")
}

#[test]
fn what_is_kept_can_be_resumed_and_what_is_removed_runs_again() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    fs::write(dir.join("flow.toml"), FLOW).expect("flow.toml");
    fs::write(dir.join("data"), "data\n").expect("data");
    let (code, _, err) = run(&["flow", "run"], dir);
    assert_eq!(code, 1, "{err}");
    // The work folder of the failed attempt goes; all that the run needs stays, the input too.
    let attempt = dir.join(".phalanx/flow/runs/w-1/use/1");
    assert!(attempt.join("work/junk").exists());
    let (dry, _) = succeed(&words("flow prune --dry-run"), dir);
    assert!(attempt.join("work/junk").exists());
    let (out, _) = succeed(&words("flow prune"), dir);
    assert!(
        out.contains("\nremoved: 0 runs, 0 cached results, 5 B in "),
        "{out}"
    );
    assert_eq!(dry.replace("would remove", "removed"), out);
    assert!(!attempt.join("work").exists() && attempt.join("log.txt").exists());
    fs::write(dir.join("go"), "").expect("go");
    fs::remove_file(dir.join("data")).expect("removed");
    let (out, err) = succeed(&words("flow run --resume last"), dir);
    assert!(err.contains("Kept make"), "{err}");
    assert_eq!(output(&out), "data\nmade\n");
    assert_eq!(journal(dir), "make use use ");
    // A removed run leaves its cached results.
    succeed(&words("flow rm w-1"), dir);
    let (code, _, err) = run(&words("flow show w-1"), dir);
    assert_eq!(code, 2, "{err}");
    fs::write(dir.join("data"), "data\n").expect("data");
    let (out, err) = succeed(&["flow", "run"], dir);
    assert!(err.contains("Cached make (from w-1)"), "{err}");
    assert!(err.contains("Run w-2 "), "no number is used twice: {err}");
    assert_eq!(output(&out), "data\nmade\n");
    assert_eq!(journal(dir), "make use use use ");
    // What is new is kept, and served from the cache.
    let (out, _) = succeed(&words("flow prune --older-than 1h --keep-size 1GiB"), dir);
    assert_eq!(out, "removed: 0 runs, 0 cached results, 0 B in 0 paths\n");
    let (_, err) = succeed(&["flow", "run"], dir);
    assert!(err.contains("Cached make"), "{err}");
    // Nothing is kept, and all runs again.
    let (out, _) = succeed(&words("flow prune --keep-size 0"), dir);
    for line in [
        "run w-2 (done)",
        "run w-3 (done)",
        "cached result of make (from w-1)",
    ] {
        assert!(out.lines().any(|said| said == line), "{line}: {out}");
    }
    let (out, _) = succeed(&["flow", "run"], dir);
    assert_eq!(output(&out), "data\nmade\n");
    assert_eq!(journal(dir), "make use use use use make use ");
    let (out, _) = succeed(&["flow", "list"], dir);
    assert!(out.contains("w-4") && out.lines().count() == 2, "{out}");
    succeed(&words("flow cache verify"), dir);
}
