use std::io::Write as _;
use std::process::{Command, Stdio};

use super::*;

/// The JSON inside a page.
fn data(page: &str) -> serde_json::Value {
    let (_, after) = page.split_once("application/json\">").expect("the data");
    let (json, _) = after.split_once("</script>").expect("its end");
    serde_json::from_str(json).expect("JSON")
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("folder");
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("written");
    }
    dir
}

#[test]
fn a_long_curve_keeps_ends_and_extremes() {
    for count in [0, 1, 2, 1999, 2000, 2001, 4001, 1_000_000] {
        let mut curve = Curve::default();
        // One point stands out in each direction.
        let y = |i: usize| match i {
            _ if i == count / 3 => 1e6,
            _ if i == count / 2 => -1e6,
            _ => (i as f64 * 0.7).sin(),
        };
        for i in 0..count {
            curve.add(i as f64, y(i));
        }
        let points = curve.points();
        assert_eq!(points.total, count);
        assert!(points.x.len() <= 2002, "{count}: {}", points.x.len());
        assert!(
            points.x.len() >= count.min(1000),
            "{count}: {}",
            points.x.len()
        );
        assert!(points.x.is_sorted_by(|a, b| a < b), "{count}");
        for (x, value) in points.x.iter().zip(&points.y) {
            assert_eq!(*value, y(*x as usize));
        }
        if count > 0 {
            assert_eq!(
                (points.x[0], points.x.last()),
                (0.0, Some(&(count as f64 - 1.0)))
            );
            for extreme in [count / 3, count / 2] {
                assert!(points.x.contains(&(extreme as f64)), "{count}: {extreme}");
            }
        }
        if count <= 2000 {
            assert_eq!(points.x.len(), count, "short curves are complete");
        }
    }
}

/// In every field of every file.
#[test]
fn text_of_files_ends_no_element() {
    let evil = "</script><script>alert(1)</script><!-- {{js}} {{data}} \u{2028} &amp;";
    let record = format!(r#"{{"step":1,"{evil}":2.5,"message":"{evil}"}}"#) + "\n";
    let summary = format!(r#"{{"data":"{evil}","arguments":["train","{evil}"]}}"#);
    let about = format!(
        r#"{{"program":"{evil}","settings":{{"{evil}":"{evil}"}},"model":{{"title":"{evil}"}}}}"#
    );
    let histogram = r#"{"count":1,"min":0,"max":1,"sum":1,"sum_squares":1,"buckets":[1]}"#;
    let events = [
        format!(r#""kind":"notice","text":"{evil}""#),
        format!(r#""kind":"checkpoint","file":"{evil}""#),
        format!(r#""kind":"system","ranks":[{{"rank":0,"host":"{evil}"}}]"#),
        format!(r#""kind":"watch","parameters":{{"{evil}":{histogram}}}"#),
        format!(r#""kind":"text","name":"{evil}","text":"{evil}""#),
        format!(r#""kind":"image","name":"{evil}","file":"{evil}""#),
        r#""kind":"table","name":"t","file":"t.jsonl""#.to_owned(),
        format!(r#""kind":"{evil}""#),
        format!(r#""kind":"finish","status":"{evil}","error":"{evil}""#),
    ];
    let event = |event: &String| format!("{{\"step\":1,\"elapsed_s\":1,{event}}}\n");
    let events: String = events.iter().map(event).collect();
    let dir = folder(&[
        ("metrics.jsonl", &record),
        ("summary.json", &summary),
        ("run.json", &about),
        ("events.jsonl", &events),
        ("t.jsonl", &record),
        ("predictions.jsonl", &record),
    ]);
    let run = Run::read(dir.path()).expect("a run");
    let page = page(&[run]).expect("a page");
    assert_eq!(page.matches("</script>").count(), 2, "data and script");
    assert_eq!(page.matches("<!--").count(), 0);
    assert!(page.contains(JS) && page.contains(CSS) && page.ends_with("</html>\n"));
    let data = data(&page);
    let run = &data[0];
    assert_eq!(run["summary"]["data"], evil);
    assert_eq!(run["about"]["settings"][evil], evil);
    assert_eq!(run["curves"][evil]["y"][0], 2.5);
    let texts: Vec<_> = run["events"].as_array().expect("events").iter().collect();
    let texts: Vec<&str> = texts.iter().filter_map(|e| e["text"].as_str()).collect();
    let finish = format!("{evil}: {evil}");
    assert_eq!(texts, [evil, &format!("checkpoint {evil}"), &finish, evil]);
    assert_eq!(
        (&run["finish"]["status"], &run["finish"]["error"]),
        (&evil.into(), &evil.into())
    );
    assert_eq!(run["system"]["ranks"][0]["host"], evil);
    assert_eq!(run["watch"]["tensors"][0]["name"], evil);
    let logged = run["logged"].as_array().expect("logged");
    let kinds: Vec<_> = logged.iter().filter_map(|l| l["kind"].as_str()).collect();
    assert_eq!(kinds, ["image", "table", "text"]);
    assert!(
        logged[0]["why"]
            .as_str()
            .expect("a reason")
            .contains("is missing")
    );
    assert_eq!(logged[1]["rows"][0]["message"], evil);
    assert_eq!(
        (&logged[2]["name"], &logged[2]["text"]),
        (&evil.into(), &evil.into())
    );
    assert_eq!(run["predictions"][0]["message"], evil);
}

/// The JSON of a run with these files.
fn of(files: &[(&str, &str)]) -> serde_json::Value {
    let dir = folder(files);
    let run = Run::read(dir.path()).expect("a run");
    serde_json::to_value(&run).expect("JSON")
}

fn numbers(value: &serde_json::Value) -> Vec<Option<f64>> {
    let all = value.as_array().expect("a list");
    all.iter().map(serde_json::Value::as_f64).collect()
}

#[test]
fn a_run_ends_as_its_last_event_says() {
    let start = "{\"kind\":\"start\",\"attempt\":3,\"resumed_at\":40}\n";
    let finish = "{\"kind\":\"finish\",\"status\":\"failed\",\"error\":\"full disk\"}\n";
    let run = |events: &str| of(&[("run.json", "{}"), ("events.jsonl", events)]);
    let ended = run(&format!("{start}{finish}"));
    assert_eq!(ended["finish"]["status"], "failed");
    assert_eq!(ended["events"][0]["text"], "attempt 3 resumed at step 40");
    assert_eq!(ended["events"][0]["step"], 40.0);
    assert_eq!(ended["events"][1]["text"], "failed: full disk");
    assert!(run(&format!("{finish}{start}"))["finish"].is_null());
    assert!(run("")["finish"].is_null());
}

#[test]
fn a_change_of_ranks_is_no_new_attempt() {
    let change = |step: u64, before: u64, after: u64| {
        format!(
            "{{\"kind\":\"ranks\",\"step\":{step},\"before\":{before},\"after\":{after},\"state_s\":1.5}}\n"
        )
    };
    let system = |at: u64| {
        format!(
            "{{\"kind\":\"system\",\"elapsed_s\":{at},\"ranks\":[{{\"rank\":0,\"train_s\":{at}}}]}}\n"
        )
    };
    let start = |more: &str| format!("{{\"kind\":\"start\"{more}}}\n");
    let events = [
        start(",\"takes_over\":false"),
        system(5),
        change(3, 3, 2),
        start(",\"resumed_at\":7,\"takes_over\":true"),
        change(7, 2, 1),
        system(10),
        "{\"kind\":\"ranks\",\"step\":8}\n".to_owned(),
    ]
    .concat();
    let run = of(&[("run.json", "{}"), ("events.jsonl", &events)]);
    let changes = serde_json::json!([[3.0, 3.0, 2.0], [7.0, 2.0, 1.0]]);
    assert_eq!(run["rank_changes"], changes);
    assert_eq!(numbers(&run["system"]["attempt"]), [Some(1.0); 2]);
    let taken = "another rank takes the place of rank 0 at step 7";
    assert_eq!(run["events"][1]["text"], taken);
    // A resumed run takes the later steps again.
    let events = events + &start(",\"resumed_at\":5") + &system(2);
    let run = of(&[("run.json", "{}"), ("events.jsonl", &events)]);
    assert_eq!(run["rank_changes"], serde_json::json!([[3.0, 3.0, 2.0]]));
    assert_eq!(numbers(&run["system"]["attempt"])[2], Some(2.0));
}

#[test]
fn ranks_are_columns_and_the_last_record_of_an_attempt_stays() {
    let mut events = String::new();
    // A long attempt and a short one; rank 1 reports every second time.
    for (attempt, records) in [(1, 5000), (2, 3)] {
        events += "{\"kind\":\"start\"}\n";
        for i in 1..=records {
            let rank = |rank: usize| {
                let train = i * (rank + attempt);
                format!(r#"{{"rank":{rank},"host":"h","train_s":{train},"cpu_percent":99.5}}"#)
            };
            let ranks = if i % 2 == 1 {
                rank(0) + "," + &rank(1)
            } else {
                rank(0)
            };
            events += &format!("{{\"kind\":\"system\",\"elapsed_s\":{i},\"ranks\":[{ranks}]}}\n");
        }
    }
    let run = of(&[("run.json", "{}"), ("events.jsonl", &events)]);
    let system = &run["system"];
    assert_eq!(
        (&system["records_total"], &system["ranks_total"]),
        (&5003.into(), &2.into())
    );
    let (elapsed, attempts) = (numbers(&system["elapsed_s"]), numbers(&system["attempt"]));
    assert!((290..=302).contains(&elapsed.len()), "{}", elapsed.len());
    let last = attempts
        .iter()
        .position(|a| *a == Some(2.0))
        .expect("the second")
        - 1;
    assert_eq!(elapsed[last], Some(5000.0));
    assert_eq!(elapsed.last(), Some(&Some(3.0)));
    let train = numbers(&system["ranks"][0]["values"]["train_s"]);
    assert_eq!(
        (train[last], train.last()),
        (Some(5000.0), Some(&Some(6.0)))
    );
    for (i, value) in numbers(&system["ranks"][1]["values"]["train_s"])
        .iter()
        .enumerate()
    {
        let at = elapsed[i].expect("a time");
        let expected = (at % 2.0 == 1.0).then(|| at * (1.0 + attempts[i].expect("an attempt")));
        assert_eq!(*value, expected, "record {i}");
    }
    assert!(
        system["ranks"][0]["values"]["load"].is_null(),
        "the files have none"
    );
}

#[test]
fn weights_and_gradients_are_those_of_the_histograms() {
    // 1, 2, 3, 6: mean 3, standard deviation sqrt(14 / 4); 64 buckets.
    let buckets: Vec<String> = (0..64)
        .map(|i| if i < 2 { "2" } else { "0" }.into())
        .collect();
    let w = format!(
        r#"{{"count":4,"min":1,"max":6,"sum":12,"sum_squares":50,"buckets":[{}]}}"#,
        buckets.join(",")
    );
    let g = r#"{"count":2,"min":null,"max":null,"sum":null,"sum_squares":null,"buckets":[1,0,4]}"#;
    let line = |step: usize| {
        format!(
            "{{\"kind\":\"watch\",\"step\":{step},\"parameters\":{{\"w\":{w}}},\"gradients\":{{\"w\":{g}}}}}\n"
        )
    };
    let events: String = (0..=500).map(line).collect();
    // Steps 300 and on are taken again.
    let events = events + "{\"kind\":\"start\",\"resumed_at\":300}\n" + &line(300);
    let run = of(&[("run.json", "{}"), ("events.jsonl", &events)]);
    let watch = &run["watch"];
    assert_eq!(
        (&watch["steps_total"], &watch["tensors_total"]),
        (&301.into(), &1.into())
    );
    let steps = numbers(&watch["steps"]);
    assert_eq!(
        (steps.len(), steps[0], steps[99]),
        (100, Some(0.0), Some(300.0))
    );
    assert!(steps.windows(2).all(|two| two[0] < two[1]));
    let [gradients, weights] = [0, 1].map(|i| &watch["tensors"][i]);
    assert_eq!(
        (&gradients["kind"], &weights["kind"]),
        (&"gradients".into(), &"weights".into())
    );
    let first = |name: &str| weights[name][0].as_f64().expect("a number");
    assert_eq!((first("mean"), first("min"), first("max")), (3.0, 1.0, 6.0));
    assert!((first("deviation") - 3.5f64.sqrt()).abs() < 1e-6);
    assert_eq!(
        weights["levels"][0],
        "9".to_owned() + &"0".repeat(31),
        "two in one"
    );
    assert_eq!(
        (&gradients["mean"][0], &gradients["levels"][0]),
        (&().into(), &"509".into())
    );
    assert_eq!(weights["mean"].as_array().map(Vec::len), Some(100));
    let norm = numbers(&watch["norms"]["weights"]["y"]);
    assert_eq!((norm.len(), norm[0]), (301, Some(50f64.sqrt())));
    assert!(watch["norms"]["gradients"].is_null(), "no numbers");
}

#[test]
fn many_tensors_have_few_steps() {
    let tensor = |i: usize| {
        format!(
            "\"layer{i}\":{{\"count\":1,\"min\":0,\"max\":1,\"sum\":1,\"sum_squares\":1,\"buckets\":[1]}}"
        )
    };
    let tensors: Vec<String> = (0..700).map(tensor).collect();
    let line = |step: usize| {
        format!(
            "{{\"kind\":\"watch\",\"step\":{step},\"parameters\":{{{}}}}}\n",
            tensors.join(",")
        )
    };
    let events: String = (0..40).map(line).collect();
    let watch = &of(&[("run.json", "{}"), ("events.jsonl", &events)])["watch"];
    assert_eq!(watch["tensors_total"], 700);
    let (tensors, steps) = (watch["tensors"].as_array(), watch["steps"].as_array());
    assert_eq!(
        (tensors.map(Vec::len), steps.map(Vec::len)),
        (Some(600), Some(33))
    );
}

#[test]
fn logged_files_are_those_of_the_folder() {
    let line = |kind: &str, name: &str, step: usize, file: &str| {
        format!("{{\"kind\":\"{kind}\",\"name\":\"{name}\",\"step\":{step},\"file\":\"{file}\"}}\n")
    };
    let mut events = String::new();
    for step in 0..100 {
        events += &line("image", "all", step, "images/a.png");
    }
    for (i, file) in [
        "images/b.jpg",
        "images/no.png",
        "images/text.png",
        "images/../../secret",
        "/etc/passwd",
        "images/link.png",
        "linked/a.png",
        "images/big.png",
        "",
        "images",
    ]
    .iter()
    .enumerate()
    {
        events += &line("image", &format!("{i}"), 0, file);
    }
    events += &line("table", "rows", 0, "rows.jsonl");
    events += "{\"kind\":\"text\",\"name\":\"long\",\"step\":7}\n";
    let long = "ä".repeat(30_000);
    events += &format!("{{\"kind\":\"text\",\"name\":\"long\",\"step\":8,\"text\":\"{long}\"}}\n");
    let rows: String = (0..1500).map(|i| format!("{{\"i\":{i}}}\n")).collect();
    let parent = tempfile::tempdir().expect("folder");
    let dir = parent.path().join("run");
    std::fs::create_dir_all(dir.join("images")).expect("folder");
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).expect("written");
    write("run.json", b"{}");
    write("events.jsonl", events.as_bytes());
    write("rows.jsonl", rows.as_bytes());
    write("images/a.png", b"\x89PNG and more");
    write("images/b.jpg", b"\xff\xd8\xff");
    write("images/text.png", b"<svg onload=alert(1)>");
    let big = std::fs::File::create(dir.join("images/big.png")).expect("created");
    big.set_len(5 << 20).expect("sized");
    write("../secret", b"\x89PNG secret");
    std::os::unix::fs::symlink("../../secret", dir.join("images/link.png")).expect("linked");
    std::os::unix::fs::symlink("images", dir.join("linked")).expect("linked");
    let run = Run::read(&dir).expect("a run");
    let run = serde_json::to_value(&run).expect("JSON");
    assert_eq!(run["logged_total"], 113);
    let logged = run["logged"].as_array().expect("logged");
    let of = |kind: &str, name: &str| -> Vec<&serde_json::Value> {
        logged
            .iter()
            .filter(|l| l["kind"] == kind && l["name"] == name)
            .collect()
    };
    let all = of("image", "all");
    assert_eq!(
        (all.len(), &all[0]["of"], &all[0]["step"], &all[23]["step"]),
        (24, &100.into(), &0.0.into(), &99.0.into())
    );
    assert_eq!(
        all[0]["src"],
        format!(
            "data:image/png;base64,{}",
            BASE64_STANDARD.encode(b"\x89PNG and more")
        )
    );
    assert_eq!(of("image", "0")[0]["src"], "data:image/jpeg;base64,/9j/");
    for (name, why) in [
        ("1", "images/no.png is missing"),
        ("2", "not PNG"),
        ("3", "no file of this folder"),
        ("4", "no file of this folder"),
        ("5", "link"),
        ("6", "link"),
        ("7", "big.png"),
        ("8", "no file"),
        ("9", "images"),
    ] {
        let one = of("image", name);
        let said = one[0]["why"].as_str().unwrap_or_default();
        assert!(
            one[0]["src"].is_null() && said.contains(why),
            "{name}: {one:?}"
        );
    }
    let table = of("table", "rows")[0];
    assert_eq!(
        (table["rows"].as_array().map(Vec::len), &table["total"]),
        (Some(1000), &1500.into())
    );
    let texts = of("text", "long");
    assert_eq!(
        (&texts[0]["text"], &texts[0]["is_cut"]),
        (&"".into(), &false.into())
    );
    assert_eq!(
        (&texts[1]["text"], &texts[1]["is_cut"]),
        (&"ä".repeat(20_000).into(), &true.into())
    );
}

/// Cut at every byte, and with bytes that are not text.
#[test]
fn damaged_events_leave_the_rest() {
    let lines = [
        r#"{"kind":"start","attempt":1}"#,
        r#"{"kind":"system","elapsed_s":5,"ranks":[{"rank":0,"train_s":4}]}"#,
        r#"{"kind":"watch","step":1,"parameters":{"w":{"count":1,"min":0,"max":1,"sum":1,"sum_squares":1,"buckets":[1]}}}"#,
        r#"{"kind":"notice","text":"here","step":1}"#,
        r#"{"kind":"image","name":"i","file":"x"}"#,
        r#"{"kind":"finish","status":"finished"}"#,
    ];
    let whole = lines.join("\n") + "\n";
    for end in 0..whole.len() {
        let run = of(&[("run.json", "{}"), ("events.jsonl", &whole[..end])]);
        assert!(run["finish"].is_null());
        assert_eq!(
            run["system"].is_null(),
            end <= lines[0].len() + lines[1].len() + 1,
            "{end}"
        );
    }
    for bad in [
        "{\"kind\":\"system\",\"elapsed_s\":\"x\",\"ranks\":7}",
        "{\"kind\":\"watch\",\"step\":1e999}",
        "{\"kind\":\"watch\",\"step\":1,\"parameters\":{\"w\":7},\"gradients\":[]}",
        "{\"kind\":\"watch\",\"step\":-1,\"parameters\":{\"w\":{\"count\":-1,\"sum\":1e308,\"sum_squares\":-5,\"buckets\":[-1,1e308,1e308]}}}",
        "{\"kind\":\"start\",\"resumed_at\":-1}",
        "{\"kind\":7}",
        "[]",
        "\u{0}\u{1}",
        "{\"kind\":\"notice\"}",
        "{\"kind\":\"finish\",\"status\":null}\n{}",
    ] {
        let text = format!("{bad}\n{whole}");
        let run = of(&[("run.json", "{}"), ("events.jsonl", &text)]);
        assert_eq!(run["finish"]["status"], "finished", "{bad}");
        assert_eq!(
            run["system"]["ranks"][0]["values"]["train_s"][0], 4.0,
            "{bad}"
        );
    }
    let dir = folder(&[("run.json", "{}")]);
    std::fs::write(
        dir.path().join("events.jsonl"),
        [b"\xff\xfe{\"\n", whole.as_bytes()].concat(),
    )
    .expect("written");
    let run = Run::read(dir.path()).expect("a run");
    assert_eq!(run.events.len(), 3);
}

#[test]
fn what_is_left_out_is_counted() {
    let notices = "{\"kind\":\"notice\",\"text\":\"late\",\"step\":3}\n".repeat(1500);
    let values: Vec<String> = (0..250).map(|i| format!("\"v{i:03}\":1")).collect();
    let metrics = format!(
        "{{\"step\":1,{},\"event\":\"one more\"}}\n",
        values.join(",")
    );
    let run = of(&[("metrics.jsonl", &metrics), ("events.jsonl", &notices)]);
    assert_eq!(run["events"].as_array().map(Vec::len), Some(1000));
    assert_eq!(run["events_total"], 1501);
    assert_eq!(
        run["curves"].as_object().map(serde_json::Map::len),
        Some(200)
    );
    assert_eq!(run["curves_left_out"], 50);
}

#[test]
fn spread_places_have_both_ends() {
    for (count, most) in [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 7), (10, 1), (3, 2)] {
        let places = curve::spread(count, most);
        assert!(places.windows(2).all(|two| two[0] < two[1]), "{places:?}");
        assert_eq!(places.len(), count.min(most.max(2)), "{places:?}");
        if count > 0 {
            let ends = (places.first(), places.last());
            assert_eq!(ends, (Some(&0), Some(&(count - 1))));
        }
    }
}

/// Digits that serde_json's own parser would change stay.
#[test]
fn numbers_are_those_of_the_files() {
    let number = "0.28150677680969241";
    let parsed: f64 = number.parse().expect("a number");
    let lines = format!("{{\"step\":7,\"loss\":{number},\"b\":true,\"n\":null}}\nnonsense\n{{\"st");
    let summary = format!("{{\"test_loss\": {number}}}");
    let dir = folder(&[("metrics.jsonl", &lines), ("summary.json", &summary)]);
    let run = Run::read(dir.path()).expect("a run");
    assert_eq!(
        (run.curves["loss"].x[0], run.curves["loss"].y[0]),
        (7.0, parsed)
    );
    assert_eq!(run.curves.len(), 1, "{:?}", run.curves);
    assert_eq!(
        (run.events[0].step, &*run.events[0].text),
        (Some(7.0), "n is not a number")
    );
    assert!(page(&[run]).expect("a page").contains(number));
}

#[test]
fn files_may_be_missing() {
    let png = "\u{0}PNG";
    for (name, text) in [
        ("metrics.jsonl", "{\"loss\":1}\n{\"loss\":0.5}\n"),
        ("run.json", "{\"program\":\"x\"}"),
        ("summary.json", "{\"iterations\":5}"),
        ("summary.json", "[]"),
    ] {
        let dir = folder(&[(name, text), (PICTURES_FILE, png)]);
        let run = Run::read(dir.path()).expect("a run");
        assert!(run.pictures.is_none());
        let opened = Dir::open(dir.path()).expect("folder");
        write_in(&opened, &page(&[run]).expect("a page")).expect("written");
        let page = std::fs::read_to_string(dir.path().join(REPORT_FILE)).expect("a page");
        let data = data(&page);
        let named = dir.path().file_name().expect("a name").to_string_lossy();
        assert_eq!(data[0]["name"], *named);
        if name == "metrics.jsonl" {
            assert_eq!(
                data[0]["curves"]["loss"]["x"],
                serde_json::json!([0.0, 1.0])
            );
            assert!(data[0]["summary"].is_null());
        }
    }
    for (files, kind) in [
        (&[("notes.txt", "")][..], ErrorKind::Usage),
        (&[("events.jsonl", "{}\n")], ErrorKind::Usage),
        (&[("summary.json", "{")], ErrorKind::Data),
        (
            &[("run.json", "{\"a\":"), ("summary.json", "{}")],
            ErrorKind::Data,
        ),
    ] {
        let dir = folder(files);
        let error = Run::read(dir.path()).expect_err("no run");
        assert_eq!(error.kind(), kind, "{error}");
        assert!(
            error.to_string().contains(&*dir.path().to_string_lossy()),
            "{error}"
        );
    }
    let error = Run::read(Path::new("/nowhere/run")).expect_err("no folder");
    assert_eq!(
        (error.kind(), error.to_string()),
        (ErrorKind::Usage, "no folder /nowhere/run".into())
    );
}

/// `page_test.js` says what is wrong. Where there is no node, nothing is tested.
#[test]
fn the_page_counts_shortens_and_converts() {
    let node = Command::new("node")
        .args(["-e", include_str!("page_test.js")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut node) = node else { return };
    let mut script = node.stdin.take().expect("a pipe");
    script.write_all(JS.as_bytes()).expect("read");
    drop(script);
    let done = node.wait_with_output().expect("ended");
    let [said, errors] = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(done.status.success() && said.is_empty(), "{said}{errors}");
}
