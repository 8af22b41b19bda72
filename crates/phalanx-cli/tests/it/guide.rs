//! The examples that the guide quotes (`crates/phalanx/examples/`).

use std::fs;
use std::path::Path;

use crate::own_program::{as_phalanx, program, run, succeed};
use crate::programs::example_of;

#[test]
fn the_guide_quotes_its_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path| fs::read_to_string(root.join(path)).expect(path);
    let lines = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    {
        let (page, example) = (
            "../../docs/guide/own-model.md",
            "../phalanx/examples/gan.rs",
        );
        let (page, text) = (read(page), lines(&read(example)));
        let blocks = page.split("```rust,ignore\n").skip(1);
        let mut blocks = blocks.filter_map(|rest| rest.split("```").next());
        let quoted = lines(blocks.next().expect("a quotation"));
        assert!(text.contains(&quoted), "{example} has not:\n{quoted}");
        assert_eq!(blocks.next(), None, "a block that is not compiled");
    }
}

/// A line without what differs between runs: the width of columns, and in a line with times, speeds, shares or process ids
/// these, the host, and the step.
fn stable(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let units = [" ms", " µs", "/s", "%", "(pid "];
    if !units.iter().any(|unit| line.contains(unit)) {
        return words.join(" ");
    }
    let word = |(i, word): (usize, &&str)| {
        let before = i.checked_sub(1).map_or("", |i| words[i]);
        let after = words.get(i + 1).copied().unwrap_or_default();
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        let varies = word.contains('.')
            || ["(pid", "epoch", "step"].contains(&before)
            || ["ms", "µs"].iter().any(|unit| after.starts_with(unit));
        match before == "host" || (is_number && varies) {
            true => "#".to_owned(),
            false => (*word).to_owned(),
        }
    };
    words
        .iter()
        .enumerate()
        .map(word)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The commands of a page, each with the text that the page shows of its output.
fn commands(page: &str) -> Vec<(&str, &str)> {
    let blocks = page.split("```sh\n").skip(1);
    let shown = |block| {
        let (command, rest): (&str, &str) = str::split_once(block, "```\n").expect("an end");
        let shown = rest.trim_start().strip_prefix("```text\n");
        let shown = shown.unwrap_or_else(|| panic!("no output of {command}"));
        (command, shown.split("```").next().unwrap_or_default())
    };
    blocks.map(shown).collect()
}

#[test]
fn the_commands_of_how_it_works_print_what_it_shows() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/how-it-works.md");
    let page = fs::read_to_string(page).expect("the page");
    let dir = tempfile::tempdir().expect("folder");
    let phalanx = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let path = std::env::var("PATH").expect("PATH");
    let path = format!("{}:{path}", phalanx.parent().expect("a folder").display());
    let commands = commands(&page);
    assert!(commands.len() >= 8, "{} commands", commands.len());
    for (command, shown) in commands {
        // An example is built already; what cargo prints is not shown.
        let mut words = command.split("cargo run --release -p ");
        let mut line = words.next().unwrap_or_default().to_owned();
        for rest in words {
            let (package, rest) = rest.split_once(" --example ").expect("an example");
            let end = rest.find(char::is_whitespace).expect("a line's end");
            let example = example_of(package, &rest[..end]);
            line += &format!(
                "{}{}",
                example.display(),
                rest[end..].replacen(" --", "", 1)
            );
        }
        let mut shell = as_phalanx("sh", dir.path());
        let text = succeed({
            shell.args(["-euc", &line]).env("PATH", &path);
            shell
        });
        let printed: Vec<String> = text.lines().map(stable).collect();
        for line in shown.lines().filter(|line| *line != "…") {
            assert!(
                printed.contains(&stable(line)),
                "{command}does not print\n{line}\nbut\n{text}"
            );
        }
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
fn a_text_trains_with_steps_and_is_written_on() {
    let dir = tempfile::tempdir().expect("folder");
    let args = "--nproc-per-node 2 --max-steps 4 --eval-every 2 --limit-test 8 --output-dir out";
    let args: Vec<&str> = args.split(' ').collect();
    let (code, out, err) = run(program("nanogpt", &args, dir.path()));
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("training 4 steps, in epochs of "), "{err}");
    for line in ["step 2: test loss ", "epoch 1: test loss "] {
        assert!(out.contains(line), "{out}");
    }
    let help = run(program("nanogpt", &["--help"], dir.path())).1;
    assert!(help.contains("[default: 2000]"), "{help}");
    // Three lines of results, and 300 characters after a first one.
    let lines: usize = out.split_inclusive('\n').take(3).map(str::len).sum();
    assert_eq!(out.len() - lines, 302, "{out}");
}

#[test]
fn a_table_trains_and_its_mistakes_name_the_line() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--nproc-per-node", "2", "--output-dir", "out"];
    succeed(program("own_table", &args, dir.path()));
    let args = "--nproc-per-node 2 --init out/best.safetensors --predict rows.csv";
    let args: Vec<&str> = args.split(' ').collect();
    succeed(program("own_table", &args, dir.path()));
    let rows = fs::read_to_string(dir.path().join("rows.csv")).expect("predictions");
    let rows: Vec<(usize, f64)> = (rows.lines().skip(1))
        .filter_map(|line| line.split_once(','))
        .map(|(row, y)| (row.parse().expect("a row"), y.parse().expect("a number")))
        .collect();
    assert_eq!(rows.len(), 4096);
    for (i, (row, predicted)) in rows.iter().enumerate() {
        let (a, b) = ((i % 64) as f64 / 64.0, (i / 64) as f64 / 64.0);
        let wanted = 3.0 * a - 2.0 * b + 1.0;
        assert_eq!(*row, i + 1);
        assert!(
            (wanted - predicted).abs() < 0.5,
            "{i}: {wanted} {predicted}"
        );
    }
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

#[test]
fn a_stream_trains_the_same_on_any_number_of_ranks_and_continues_in_an_epoch() {
    let dir = tempfile::tempdir().expect("folder");
    let train = |folder: &str, args: &str| {
        let all = format!(
            "--epochs 2 --global-batch-size 64 --deterministic shards --threads 1 --output-dir {folder} {args}"
        );
        let args: Vec<&str> = all.split(' ').collect();
        let mut command = program("stream", &args, dir.path());
        command.env("XDG_CACHE_HOME", dir.path().join("cache"));
        run(command)
    };
    let hashes = |folder: &str| {
        let text = fs::read_to_string(dir.path().join(folder).join("summary.json"));
        let summary: serde_json::Value =
            serde_json::from_str(&text.expect("a summary")).expect("JSON");
        ["weights_sha256", "metrics_sha256"].map(|name| summary[name].clone())
    };
    let (code, _, err) = train("whole", "--nproc-per-node 2");
    assert_eq!(code, 0, "{err}");
    let line = "stream-shards: 8 shards of JSON lines, 4,096 samples, ";
    assert!(
        err.contains(line) && err.contains("shuffle buffer of 1,000"),
        "{err}"
    );
    let (_, made) = crate::support::succeed(&["index", "stream-shards"], dir.path());
    assert!(
        made.contains("stream-shards/phalanx.index: 8 shards of JSON lines, 4,096 samples"),
        "{made}"
    );
    // Within an epoch, at an epoch's last step, and its end: 64 steps are an epoch.
    for args in [
        "--nproc-per-node 4 --stop-after 10",
        "--nproc-per-node 3 --resume auto --stop-after 53",
        "--nproc-per-node 4 --resume auto --stop-after 1",
        "--nproc-per-node 1 --resume auto",
    ] {
        let (code, _, err) = train("parts", args);
        assert_eq!(code, 0, "{args}: {err}");
    }
    assert_eq!(hashes("parts"), hashes("whole"));
    // Another shard, or another buffer, is other data.
    let shard = dir.path().join("stream-shards/points-3.jsonl");
    let text = fs::read_to_string(&shard)
        .expect("a shard")
        .replace("\"class\": 1", "\"class\": 0");
    fs::write(dir.path().join("stream-shards/points-9.jsonl"), text).expect("a shard");
    let (code, _, err) = train("parts", "--nproc-per-node 1 --resume auto --epochs 3");
    assert!(code == 2 && err.contains("data"), "{code}: {err}");
}

#[test]
fn a_program_trains_on_a_mesh_and_resumes_on_another() {
    let dir = tempfile::tempdir().expect("folder");
    let train = |folder: &str, args: &str| {
        let all = format!(
            "--nproc-per-node 2 --epochs 1 --global-batch-size 512 --lr 0.2 --output-dir {folder} {args}"
        );
        let args: Vec<&str> = all.split(' ').collect();
        succeed(program("mesh", &args, dir.path()))
    };
    let accuracy = |folder: &str| {
        let text = fs::read_to_string(dir.path().join(folder).join("summary.json"));
        let summary: serde_json::Value =
            serde_json::from_str(&text.expect("a summary")).expect("JSON");
        summary["accuracy"].as_f64().expect("an accuracy")
    };
    let text = train("whole", "--mesh data=2");
    assert!(
        text.contains("mesh     data=2: batches over data"),
        "{text}"
    );
    let text = train(
        "resumed",
        "--mesh data=2 --fully-sharded --stop-after 40 --save-every 20",
    );
    assert!(text.contains("stopped as asked after 40 steps"), "{text}");
    let text = train("resumed", "--mesh tensor=2 --accumulate 2 --resume auto");
    assert!(text.contains("resumed  after 40 of 118 steps"), "{text}");
    assert!(text.contains("--mesh data=2,tensor=1"), "{text}");
    let (whole, resumed) = (accuracy("whole"), accuracy("resumed"));
    assert!(
        whole > 0.7 && (whole - resumed).abs() < 0.005,
        "{whole} {resumed}"
    );
}
