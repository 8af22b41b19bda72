//! `phalanx predict` and `phalanx export` on what a training left.

use std::path::Path;

use crate::support::{ended, phalanx, run, succeed};
use serde_json::Value;

fn refused(dir: &Path, args: &[&str], reason: &str) {
    let (code, _, err) = run(args, dir);
    assert_ne!(code, 0, "{args:?}");
    assert!(err.contains(reason), "{err}");
}

/// A short training in `dir/run`.
fn trained() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let args =
        "train mnist --data synthetic:1200 --epochs 1 --threads 1 --output-dir run --save-every 10";
    succeed(&args.split(' ').collect::<Vec<_>>(), dir.path());
    dir
}

fn rows(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[test]
fn every_form_of_a_checkpoint_predicts_the_same() {
    let dir = trained();
    let dir = dir.path();
    let predict = |checkpoint: &str| {
        let args = [
            "predict",
            checkpoint,
            "--data",
            "synthetic",
            "--limit",
            "300",
        ];
        succeed(&args, dir)
    };
    let (expected, said) = predict("run/mnist_cnn.safetensors");
    assert!(said.contains("300 images with mnist_cnn, "), "{said}");
    let all = rows(&expected);
    assert_eq!(all.len(), 300);
    let right = all
        .iter()
        .filter(|row| row["guess"] == row["truth"])
        .count();
    assert!(said.contains(&format!("{right} of 300 right")), "{said}");
    for row in &all {
        let scores: Vec<f64> = row["scores"]
            .as_array()
            .expect("scores")
            .iter()
            .filter_map(Value::as_f64)
            .collect();
        assert_eq!(scores.len(), 10);
        // Log-probabilities.
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    }
    // The checkpoint after the last step has the same weights.
    let manifest = "run/checkpoints/step-000000019.json";
    assert_eq!(predict("run/mnist_cnn.pt").0, expected);
    assert_eq!(predict(manifest).0, expected);
    for to in ["a.pth", "b.safetensors", "c.pt"] {
        for from in ["run/mnist_cnn.pt", "run/mnist_cnn.safetensors", manifest] {
            let (_, said) = succeed(&["export", from, "--to", to], dir);
            assert!(said.contains("8 tensors"), "{said}");
            assert_eq!(predict(to).0, expected, "{from} {to}");
        }
    }
    // What safetensors said about itself is not lost on the way.
    succeed(
        &[
            "export",
            "run/mnist_cnn.safetensors",
            "--to",
            "d.safetensors",
        ],
        dir,
    );
    let read = |name: &str| std::fs::read(dir.join(name)).expect("file");
    assert_eq!(read("d.safetensors"), read("run/mnist_cnn.safetensors"));
    let args = "predict a.pth --data synthetic --limit 300 --batch-size 7 --output p.jsonl";
    let (out, _) = succeed(&args.split(' ').collect::<Vec<_>>(), dir);
    assert!(out.is_empty(), "{out}");
    assert_eq!(
        rows(&String::from_utf8(read("p.jsonl")).expect("text")).len(),
        300
    );
}

/// As `--resume` takes one.
#[test]
fn a_runs_folder_stands_for_its_weights() {
    let dir = trained();
    let dir = dir.path();
    let predict = |checkpoint: &str| {
        let args = [
            "predict",
            checkpoint,
            "--data",
            "synthetic",
            "--limit",
            "20",
        ];
        succeed(&args, dir)
    };
    let expected = predict("run/mnist_cnn.safetensors").0;
    let (out, said) = predict("run");
    assert_eq!(out, expected);
    assert!(
        said.starts_with("weights  run/mnist_cnn.safetensors\n"),
        "{said}"
    );
    let (_, said) = succeed(&["export", "run", "--to", "a.pth"], dir);
    assert!(
        said.starts_with("weights  run/mnist_cnn.safetensors\n"),
        "{said}"
    );
    assert_eq!(predict("a.pth").0, expected);
    // And a training may start where another has ended.
    let train =
        "train mnist --init run --data synthetic:64 --epochs 1 --threads 1 --output-dir next";
    let (_, said) = succeed(&train.split(' ').collect::<Vec<_>>(), dir);
    assert!(said.contains("weights  from run ("), "{said}");
    // Without the summary the run has not ended: what it goes on from counts.
    std::fs::remove_file(dir.join("run/summary.json")).expect("removed");
    for folder in ["run", "run/checkpoints"] {
        let (out, said) = predict(folder);
        assert_eq!(out, expected);
        let newest = "weights  run/checkpoints/step-000000019.json\n";
        assert!(said.starts_with(newest), "{said}");
    }
    std::fs::create_dir(dir.join("empty")).expect("folder");
    for command in [
        &["predict", "empty", "--data", "synthetic"][..],
        &["export", "empty", "--to", "b.pth"],
    ] {
        let (code, _, said) = run(command, dir);
        assert_eq!(code, 2, "{said}");
        assert!(
            said.contains("neither weights nor checkpoints in the folder empty"),
            "{said}"
        );
    }
}

#[test]
fn images_are_read_and_wrong_ones_named() {
    let dir = trained();
    let dir = dir.path();
    let digit = |name: &str, width: usize| {
        let mut bytes = format!("P5\n{width} 28\n255\n").into_bytes();
        // A thick vertical line.
        bytes.extend((0..28 * width).map(|i| {
            if (12..16).contains(&(i % width)) {
                255
            } else {
                0
            }
        }));
        std::fs::write(dir.join(name), bytes).expect("written");
    };
    digit("one.pgm", 28);
    digit("wide.pgm", 30);
    let weights = "run/mnist_cnn.pt";
    let (out, said) = succeed(&["predict", weights, "--data", "one.pgm", "one.pgm"], dir);
    let all = rows(&out);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0]["image"], "one.pgm");
    assert!(all[0]["truth"].is_null());
    assert_eq!(said.trim(), "2 images with mnist_cnn");
    refused(
        dir,
        &["predict", weights, "--data", "wide.pgm"],
        "wide.pgm: it has 30 x 28 pixels",
    );
    refused(
        dir,
        &["predict", weights, "--data", "none.png"],
        "no image none.png",
    );
    refused(
        dir,
        &["predict", weights, "--data", weights],
        "neither PNG nor binary",
    );
    refused(
        dir,
        &["predict", "none.pth", "--data", "one.pgm"],
        "no checkpoint none.pth",
    );
    refused(
        dir,
        &["predict", "one.pgm", "--data", "one.pgm"],
        "not a complete safetensors file",
    );
    refused(
        dir,
        &["predict", weights, "--data", "one.pgm", "--model", "x"],
        "mnist_cnn",
    );
    refused(
        dir,
        &["export", weights, "--to", "x.onnx"],
        "must end in .pth, .pt or .safetensors",
    );
    refused(
        dir,
        &["export", "run/summary.json", "--to", "x.pth"],
        "not a checkpoint manifest",
    );
}

#[test]
fn cifar_networks_see_images_as_they_were_trained() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let all = |checkpoint: &str, more: &[&str]| {
        let data = ["--data", "synthetic", "--limit", "6"];
        let args = [&["predict", checkpoint][..], &data, more].concat();
        let (out, said) = succeed(&args, dir);
        let all = rows(&out);
        assert_eq!(all.len(), 6);
        assert!(said.contains("6 images with "), "{said}");
        (out, said)
    };
    for (program, flags, plain, as_trained) in [
        (
            "resnet9",
            &["--epochs", "1", "--batch-size", "2"][..],
            &[][..],
            &[][..],
        ),
        (
            "resnet18",
            &["--epochs", "1", "--batch-size", "2", "--recipe", "standard"],
            &["--pixels", "unit"],
            &["--pixels", "normalised"],
        ),
        // Over two samples, the norms of its last layers (one pixel wide) blow gradients up.
        (
            "mobilenetv2",
            &["--epochs", "1", "--batch-size", "16"],
            &[],
            &[],
        ),
    ] {
        let train = ["train", program, "--output-dir"];
        let small = "--data synthetic:32 --test-batch-size 2 --threads 1 --save-every 1000";
        let small: Vec<&str> = small.split(' ').collect();
        succeed(&[&train[..], &[program], &small, flags].concat(), dir);
        let named = match program {
            "resnet18" => format!("{program}/epoch_1"),
            _ => format!("{program}/{program}"),
        };
        let torch = match program {
            "resnet18" => format!("{named}.pth"),
            _ => format!("{named}.pt"),
        };
        // A safetensors file says how; for PyTorch's, one has to, unless it is the default.
        let (expected, said) = all(&format!("{named}.safetensors"), &[]);
        assert!(said.contains(&format!("with {program}")), "{said}");
        assert_eq!(all(&torch, as_trained).0, expected, "{program}");
        // So does a checkpoint that a training goes on from.
        let step = match program {
            "mobilenetv2" => 2,
            _ => 16,
        };
        let manifest = format!("{program}/checkpoints/step-{step:09}.json");
        let (guesses, said) = all(&manifest, &[]);
        assert_eq!(guesses, expected, "{program}");
        assert!(!said.contains("warning"), "{said}");
        let unsure = all(&torch, &[])
            .1
            .contains("warning: resnet18/epoch_1.pth does not say");
        assert_eq!(unsure, program == "resnet18");
        if !plain.is_empty() {
            assert_ne!(all(&torch, plain).0, expected, "{program}");
        }
        let [one, mirrored, shifted] =
            ["one", "mirrored", "shifted"].map(|views| all(&torch, &["--views", views]).0);
        assert!(one != mirrored && mirrored != shifted, "{program}");
    }
    // Colour images, by name.
    let mut picture = b"P6\n32 32\n255\n".to_vec();
    picture.extend((0..32 * 32 * 3).map(|i| (i * 7 % 256) as u8));
    std::fs::write(dir.join("picture.ppm"), picture).expect("written");
    let args = ["predict", "resnet9/resnet9.pt", "--data", "picture.ppm"];
    let (out, said) = succeed(&args, dir);
    assert_eq!(rows(&out).len(), 1);
    assert_eq!(said.trim(), "1 image with resnet9");
    refused(
        dir,
        &[
            "predict",
            "resnet9/resnet9.pt",
            "--data",
            "picture.ppm",
            "--model",
            "resnet18",
        ],
        "another model",
    );
}

#[test]
fn drawn_images_are_none_that_a_training_sees() {
    use phalanx_data::ImageDataset;
    let dir = trained();
    let args = "predict run/mnist_cnn.pt --data synthetic --limit 200";
    let (out, _) = succeed(&args.split(' ').collect::<Vec<_>>(), dir.path());
    let truths: Vec<u64> = rows(&out)
        .iter()
        .map(|row| row["truth"].as_u64().expect("truth"))
        .collect();
    let trained = phalanx_data::synthetic::digits(200, 1);
    let mut image = vec![0.0; phalanx_data::synthetic::PIXELS];
    let seen: Vec<u64> = (0..200)
        .map(|i| trained.read(i, &mut image).expect("drawn").into())
        .collect();
    assert_ne!(truths, seen);
    let args = "predict run/mnist_cnn.pt --data synthetic --limit 1000000000000";
    refused(
        dir.path(),
        &args.split(' ').collect::<Vec<_>>(),
        "--limit can be at most 100000000",
    );
}

#[test]
fn rows_come_batch_by_batch_and_nobody_who_reads_on_ends_it() {
    use std::io::BufRead;
    let dir = trained();
    // Days, if it went on to the end.
    let args = "predict run/mnist_cnn.pt --data synthetic --limit 100000000 --batch-size 4";
    let args: Vec<&str> = args.split(' ').collect();
    let mut child = phalanx(&args, dir.path()).spawn().expect("phalanx starts");
    let mut first = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut first).expect("a line");
    assert_eq!(rows(&first)[0]["image"], 0);
    drop(out);
    let (code, _, said) = ended(child);
    assert_eq!(code, 0, "{said}");
}

#[test]
fn a_checkpoint_behind_data_is_asked_for_in_front() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let args = ["predict", "--data", "synthetic", "run/mnist_cnn.pt"];
    let (code, _, said) = run(&args, dir.path());
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("missing CHECKPOINT"), "{said}");
    assert!(said.contains("put it first"), "{said}");
    let (help, _) = succeed(&["predict", "--help"], dir.path());
    assert!(
        help.contains("phalanx predict CHECKPOINT [OPTIONS] --data"),
        "{help}"
    );
}

/// The same scores as the training's own test, on the real set where there is one.
#[test]
fn a_data_sets_predictions_are_those_of_the_training() {
    let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/cifar-10");
    let set = std::env::var_os("PHALANX_DATA").map(|d| Path::new(&d).join("cifar-10"));
    let found = [set, Some(near), Some("/work/shared/data/cifar-10".into())]
        .into_iter()
        .flatten()
        .find(|folder| folder.join("cifar-10-batches-py/test_batch").is_file());
    let Some(data) = found else {
        eprintln!("skipped: no CIFAR-10 here; set PHALANX_DATA to the folder above cifar-10");
        return;
    };
    let data = data.display().to_string();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let train = "train resnet9 --epochs 1 --train-samples 64 --test-samples 20 --batch-size 4 \
                 --test-batch-size 10 --threads 1 --output-dir run --data";
    let train: Vec<&str> = train.split_whitespace().chain([&data[..]]).collect();
    succeed(&train, dir);
    let tested = std::fs::read_to_string(dir.join("run/predictions.jsonl")).expect("predictions");
    let args = [
        "predict",
        "run/resnet9.safetensors",
        "--limit",
        "20",
        "--views",
        "one",
        "--data",
    ];
    let (out, _) = succeed(&[&args[..], &[&data]].concat(), dir);
    let (tested, ours) = (rows(&tested), rows(&out));
    assert_eq!((tested.len(), ours.len()), (20, 20));
    for (theirs, ours) in tested.iter().zip(&ours) {
        assert_eq!(theirs["truth"], ours["truth"]);
        let scores = |row: &Value| -> Vec<f64> {
            let scores = row["scores"].as_array().expect("scores");
            scores.iter().filter_map(Value::as_f64).collect()
        };
        for (a, b) in scores(theirs).into_iter().zip(scores(ours)) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }
}

/// Files that have no end, or nobody who writes them, are refused at once by every command that reads some.
#[test]
fn what_is_no_regular_file_is_never_waited_for() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| dir.path().join(name);
    for name in ["w.pth", "w.safetensors", "w.json", "a.png"] {
        let made = std::process::Command::new("mkfifo").arg(at(name)).status();
        assert!(made.expect("mkfifo").success());
    }
    std::os::unix::fs::symlink("/dev/zero", at("zero.safetensors")).expect("link");
    std::fs::create_dir(at("flight")).expect("folder");
    let made = std::process::Command::new("mkfifo")
        .arg(at("flight/rank-0.json"))
        .status();
    assert!(made.expect("mkfifo").success());
    for name in ["w.pth", "w.safetensors", "w.json"] {
        let why = format!("{name}: it is a named pipe, expected a regular file");
        refused(dir.path(), &["predict", name, "--data", "synthetic"], &why);
        refused(dir.path(), &["export", name, "--to", "x.pth"], &why);
        let train = "train mnist --data synthetic:64 --epochs 1 --output-dir out --init";
        let train: Vec<&str> = train.split(' ').chain([name]).collect();
        refused(dir.path(), &train, &why);
    }
    refused(
        dir.path(),
        &["export", "zero.safetensors", "--to", "x.pth"],
        "it is a device, expected a regular file",
    );
    refused(
        dir.path(),
        &["inspect", "."],
        "flight/rank-0.json: it is not a regular file",
    );
}

/// What names in files say to a terminal is shown, not sent; JSON keeps its meaning.
#[test]
fn names_in_files_do_not_steer_the_terminal() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let names = [r"a\u001b[2J\u0007\u202eb\u009b1m", r"Gr\u00f6\u00dfe"];
    let entry = |(i, name): (usize, &&str)| {
        let (from, to) = (4 * i, 4 * i + 4);
        format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{from},{to}]}}"#)
    };
    let entries: Vec<String> = names.iter().enumerate().map(entry).collect();
    let header = format!(
        r#"{{"__metadata__":{{"model":"mnist_cnn"}},{}}}"#,
        entries.join(",")
    );
    let start = (header.len() as u64).to_le_bytes();
    let bytes = [&start[..], header.as_bytes(), &[0; 8]].concat();
    let file = "x\u{1b}]0;y\u{7}\u{202e}\u{e9}.safetensors";
    std::fs::write(dir.path().join(file), bytes).expect("written");
    let (code, out, err) = run(&["predict", file, "--data", "synthetic"], dir.path());
    assert_ne!(code, 0, "{err}");
    for shown in [
        r"a\u{1b}[2J\u{7}\u{202e}b\u{9b}1m",
        "Größe",
        r"x\u{1b}]0;y\u{7}\u{202e}é.safetensors",
    ] {
        assert!(err.contains(shown), "no {shown} in {err}");
    }
    let steers = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!(err + &out).contains(steers));
    // An image of such a name.
    let image = "b\u{202e}\u{9b}.pgm";
    let pixels = [b"P5\n28 28\n255\n".to_vec(), vec![7; 784]].concat();
    std::fs::write(dir.path().join(image), pixels).expect("written");
    let train = "train mnist --data synthetic:64 --epochs 1 --threads 1 --output-dir run";
    succeed(&train.split(' ').collect::<Vec<_>>(), dir.path());
    let (out, _) = succeed(&["predict", "run", "--data", image], dir.path());
    assert!(!out.contains(steers), "{out:?}");
    assert_eq!(rows(&out)[0]["image"], image);
}
