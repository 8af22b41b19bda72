//! The examples that the guide quotes (`crates/phalanx/examples/`).

use std::fs;
use std::path::Path;

use crate::own_program::{program, run, succeed};

#[test]
fn the_guide_quotes_its_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path| fs::read_to_string(root.join(path)).expect(path);
    let lines = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    for (page, example) in [
        (
            "../../docs/guide/own-model.md",
            "../phalanx/examples/gan.rs",
        ),
        (
            "../../docs/guide/own-data.md",
            "../phalanx/examples/own_table.rs",
        ),
    ] {
        let (page, text) = (read(page), lines(&read(example)));
        let blocks = page.split("```rust,ignore\n").skip(1);
        let mut blocks = blocks.filter_map(|rest| rest.split("```").next());
        let quoted = lines(blocks.next().expect("a quotation"));
        assert!(text.contains(&quoted), "{example} has not:\n{quoted}");
        assert_eq!(blocks.next(), None, "a block that is not compiled");
    }
}

#[test]
fn a_gan_trains_both_networks() {
    let dir = tempfile::tempdir().expect("folder");
    let args = "--nproc-per-node 2 --stop-after 2 --log-interval 1 --output-dir out";
    let args: Vec<&str> = args.split(' ').collect();
    let text = succeed(program("gan", &args, dir.path()));
    assert!(text.contains("stopped as asked after 2 steps"), "{text}");
    let metrics = fs::read_to_string(dir.path().join("out/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("\"discriminator_loss\":"), "{metrics}");
}

#[test]
fn a_table_trains_and_its_mistakes_name_the_line() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--nproc-per-node", "2", "--output-dir", "out"];
    succeed(program("own_table", &args, dir.path()));
    let summary = fs::read_to_string(dir.path().join("out/summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(&summary).expect("JSON");
    assert!(
        summary["test_loss"].as_f64().expect("a loss") < 0.01,
        "{summary}"
    );
    for (text, why) in [
        (
            "a,b\n1,2\n3,x\n",
            "table.csv, line 3: \"x\" is not a number",
        ),
        ("a,b\n1,2,3\n", "table.csv, line 2: 3 of 2 columns"),
    ] {
        fs::write(dir.path().join("table.csv"), text).expect("a file");
        let args = ["--table", "table.csv"];
        let (code, _, err) = run(program("own_table", &args, dir.path()));
        assert!(code != 0 && err.contains(why), "{code}: {err}");
    }
}
