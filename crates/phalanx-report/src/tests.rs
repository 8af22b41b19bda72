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

#[test]
fn text_of_files_ends_no_element() {
    let evil = "</script><script>alert(1)</script><!-- {{js}} {{data}} &amp;";
    let record = format!(r#"{{"step":1,"{evil}":2.5,"message":"{evil}"}}"#) + "\n";
    let summary = format!(r#"{{"data":"{evil}","arguments":["train","{evil}"]}}"#);
    let dir = folder(&[
        ("metrics.jsonl", &record),
        ("summary.json", &summary),
        ("predictions.jsonl", &record),
    ]);
    let run = Run::read(dir.path()).expect("a run");
    let page = page(&[run]).expect("a page");
    assert_eq!(page.matches("</script>").count(), 2, "data and script");
    assert_eq!(page.matches("<!--").count(), 0);
    assert!(page.contains(JS) && page.contains(CSS) && page.ends_with("</html>\n"));
    let data = data(&page);
    assert_eq!(data[0]["summary"]["data"], evil);
    assert_eq!(data[0]["curves"][evil]["y"][0], 2.5);
    assert_eq!(data[0]["events"][0]["text"], evil);
    assert_eq!(data[0]["predictions"][0]["message"], evil);
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
        (7.0, "n is not a number")
    );
    assert!(page(&[run]).expect("a page").contains(number));
}

#[test]
fn files_may_be_missing() {
    let png = "\u{0}PNG";
    for (name, text) in [
        ("metrics.jsonl", "{\"loss\":1}\n{\"loss\":0.5}\n"),
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
        (&[("summary.json", "{")], ErrorKind::Data),
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

#[test]
fn base64_is_that_of_the_rfc() {
    for (bytes, text) in [
        ("", ""),
        ("f", "Zg=="),
        ("fo", "Zm8="),
        ("foo", "Zm9v"),
        ("foobar", "Zm9vYmFy"),
    ] {
        assert_eq!(base64(bytes.as_bytes()), text);
    }
}
