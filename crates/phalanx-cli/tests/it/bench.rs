//! `phalanx bench` and `phalanx plan` print what the design's stable contract says.

use std::process::Command;

use serde_json::Value;

fn lines(args: &[&str]) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .args(args)
        .env_remove("RANK")
        .output()
        .expect("phalanx starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{err}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

#[test]
fn every_collective_reports_every_size() {
    for op in [
        "all-reduce",
        "broadcast",
        "reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "barrier",
    ] {
        for transport in ["thread", "shm", "tcp"] {
            let got = lines(&[
                "bench",
                op,
                "--world",
                "2",
                "--transport",
                transport,
                "--bytes",
                "4,1KiB",
                "--iters",
                "5",
                "--json",
            ]);
            let sizes = if op == "barrier" { 1 } else { 2 };
            assert_eq!(got.len(), sizes, "{op} over {transport}");
            for line in &got {
                assert_eq!(line["op"], op);
                assert_eq!(line["transport"], transport);
                assert_eq!(line["world"], 2);
                assert_eq!(line["iters"], 5);
                for key in [
                    "bytes",
                    "median_us",
                    "p10_us",
                    "p90_us",
                    "alg_gb_s",
                    "bus_gb_s",
                ] {
                    assert!(line[key].is_number(), "{op}: {key} in {line}");
                }
            }
        }
    }
}

#[test]
fn training_bench_reports_the_contracts_keys() {
    for (model, unit) in [
        ("mnist", "images_per_s"),
        ("resnet18", "images_per_s"),
        ("gpt", "tokens_per_s"),
    ] {
        training_bench(model, unit);
    }
}

fn training_bench(model: &str, unit: &str) {
    let command =
        format!("bench train {model} --world 2 --threads 1 --batch 4 --steps 3 --warmup 1 --json");
    let got = lines(&command.split(' ').collect::<Vec<_>>());
    assert_eq!(got.len(), 1);
    let line = &got[0];
    assert_eq!(line["model"], model);
    assert_eq!(
        (&line["world"], &line["threads"], &line["batch"]),
        (&2.into(), &1.into(), &4.into())
    );
    for key in [
        "step_ms_median",
        unit,
        "exposed_comm_ms",
        "peak_rss_mib",
        "first_step_s",
    ] {
        assert!(
            line[key].as_f64().is_some_and(|v| v >= 0.0),
            "{key} in {line}"
        );
    }
}

#[test]
fn plan_shows_given_hosts_and_those_of_a_launcher() {
    let given = lines(&["plan", "--nnodes", "3", "--nproc-per-node", "4", "--json"]);
    assert_eq!(given.len(), 1);
    assert_eq!(given[0]["ranks_per_host"], serde_json::json!([4, 4, 4]));
    assert_eq!(given[0]["measured"], false);
    let plans = |line: &Value| {
        let rows = line["selection"].as_array().cloned().unwrap_or_default();
        let large = rows.iter().filter(|row| row["bytes"] == 25 << 20);
        large
            .map(|row| row["plan"].as_str().unwrap_or_default().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(plans(&given[0])[0], "chain", "{:?}", given[0]);
    let program = env!("CARGO_BIN_EXE_phalanx");
    // The launcher leads each line with the rank.
    let launched = Command::new(program)
        .args([
            "launch",
            "--nproc-per-node",
            "2",
            "--",
            program,
            "plan",
            "--json",
        ])
        .env_remove("RANK")
        .output()
        .expect("phalanx starts");
    let out = String::from_utf8_lossy(&launched.stdout);
    assert!(launched.status.success(), "{launched:?}");
    let json = &out[out.find('{').unwrap_or_else(|| panic!("no JSON in {out}"))..];
    let line: Value = serde_json::from_str(json.trim()).expect("JSON");
    assert_eq!(line["world"], 2);
    assert_eq!(line["in_shared_memory"], true);
    assert_eq!(out.matches('{').count(), json.matches('{').count());
}

/// Every exchange trains, and says which it is.
#[test]
fn steps_of_every_exchange_are_timed() {
    let train = |more: &[&str]| {
        let common = [
            "bench",
            "train",
            "mnist",
            "--world",
            "2",
            "--threads",
            "1",
            "--batch",
            "2",
            "--steps",
            "8",
            "--warmup",
            "1",
            "--json",
        ];
        lines(&[&common[..], more].concat()).remove(0)
    };
    for exchange in ["all-reduce", "reduce-scatter", "at-step"] {
        let told = train(&["--exchange", exchange]);
        assert_eq!(told["exchange"], exchange);
        assert!(told["step_ms_median"].is_f64(), "{told}");
    }
}

#[test]
fn what_is_too_large_for_the_host_is_refused_before_it_is_tried() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    // 4 TiB.
    let args = ["bench", "all-reduce", "--world", "64", "--bytes", "4,64GiB"];
    let (code, _, err) = crate::support::run(&args, dir.path());
    assert_eq!(code, 2, "{err}");
    let told = "all-reduce of 64 GiB on 64 ranks is too large for this host: it needs 4096 GiB";
    assert!(err.contains(told), "{err}");
}
