//! Inputs and flags that do not fit: what is said of them, and that nothing is lost.

use std::path::Path;

use crate::support::{run, succeed};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Runs and requires this exit code; standard error.
#[track_caller]
fn fails(args: &str, dir: &Path, code: i32) -> String {
    let words: Vec<&str> = args.split_whitespace().collect();
    let (ended, out, err) = run(&words, dir);
    assert_eq!(ended, code, "{args}\n{out}\n{err}");
    err
}

/// Trains `args` and requires success; standard error.
#[track_caller]
fn trains(args: &str, dir: &Path) -> String {
    let words: Vec<&str> = args.split_whitespace().collect();
    succeed(&words, dir).1
}

/// A folder `name` with MNIST files: 12 training images with `sides[0]` pixels a side, 6 test images with `sides[1]`.
fn write_mnist(dir: &Path, name: &str, sides: [u32; 2]) {
    let set = dir.join(name);
    std::fs::create_dir(&set).expect("folder");
    for (prefix, count, side) in [("train", 12, sides[0]), ("t10k", 6, sides[1])] {
        let header = [0x803, count, side, side].map(u32::to_be_bytes).concat();
        let pixels = (0..count * side * side).map(|i| (i % 251) as u8);
        let images = header.into_iter().chain(pixels).collect::<Vec<u8>>();
        std::fs::write(set.join(format!("{prefix}-images-idx3-ubyte")), images).expect("written");
        let header = [0x801, count].map(u32::to_be_bytes).concat();
        let labels = header.into_iter().chain((0..count).map(|i| (i % 10) as u8));
        let labels = labels.collect::<Vec<u8>>();
        std::fs::write(set.join(format!("{prefix}-labels-idx1-ubyte")), labels).expect("written");
    }
}

#[test]
fn images_of_another_size_are_refused_before_the_first_step() {
    let dir = folder();
    for (name, sides, words) in [
        ("tests", [28, 32], "MNIST has test images of 32 x 32 x 1"),
        ("both", [1, 1], "MNIST has training images of 1 x 1 x 1"),
    ] {
        write_mnist(dir.path(), name, sides);
        let args = format!("train mnist --data {name} --epochs 1 --batch-size 4 --output-dir out");
        let err = fails(&args, dir.path(), 2);
        let rest = ", the network mnist_cnn takes 28 x 28 x 1 (height, width, channels)";
        assert!(err.contains(&format!("{words}{rest}")), "{err}");
        assert!(!dir.path().join("out/metrics.jsonl").exists(), "{err}");
    }
}

#[test]
fn files_of_tools_that_cannot_be_written_do_not_end_a_training() {
    let dir = folder();
    let small = "train mnist --data synthetic:48 --epochs 1 --batch-size 8 --output-dir out";
    let err = fails(&format!("{small} --profile none/p"), dir.path(), 2);
    assert!(
        err.contains("--profile none/p: there is no folder none"),
        "{err}"
    );
    assert!(!dir.path().join("out").exists());

    std::fs::create_dir(dir.path().join("p.0.json")).expect("folder");
    std::os::unix::fs::symlink("/proc/self/oom_score_adj", dir.path().join("seen.0.jsonl"))
        .expect("link");
    let err = trains(
        &format!("{small} --profile p --log-samples seen"),
        dir.path(),
    );
    assert!(
        err.contains("warning: --profile: cannot write ./p.0.json"),
        "{err}"
    );
    let warning = "warning: --log-samples writes no further lines: ";
    assert_eq!(err.matches(warning).count(), 1, "{err}");
    assert!(err.contains("seen.0.jsonl"), "{err}");
    assert!(dir.path().join("out/summary.json").exists(), "{err}");
}

#[test]
fn a_last_batch_of_one_sample_with_batch_norm_is_refused_before_the_first_update() {
    let dir = folder();
    let train = "train mobilenetv2 --nproc-per-node 2 --batch-size 2 --epochs 1 --threads 1";
    let err = fails(
        &format!("{train} --data synthetic:11 --output-dir out"),
        dir.path(),
        2,
    );
    let words = "batch norm cannot train on a single sample, and a rank has only one in the last step of each epoch: 11 samples in \
                 steps of 4 leave 3 for 2 ranks";
    assert!(err.contains(words), "{err}");
    assert!(err.contains("--drop-last"), "{err}");
    assert!(!dir.path().join("out/summary.json").exists());
    // The last step of an epoch is not reached, or not there.
    trains(
        &format!("{train} --data synthetic:11 --max-steps 2 --output-dir cut"),
        dir.path(),
    );
    let err = trains(
        &format!("{train} --data synthetic:11 --drop-last --output-dir dropped"),
        dir.path(),
    );
    assert!(err.contains("1 epoch of 2 steps"), "{err}");
    let err = fails(
        &format!("{train} --data synthetic:3 --drop-last"),
        dir.path(),
        2,
    );
    assert!(err.contains("no step is left"), "{err}");
}

/// The weights are the same as without a stop.
#[test]
fn an_epoch_without_its_short_last_batch_is_resumed_in_its_middle() {
    let dir = folder();
    let train = "train mnist --data synthetic:60 --nproc-per-node 2 --batch-size 4 --threads 1 --epochs 2 --drop-last";
    let whole = trains(&format!("{train} --output-dir whole"), dir.path());
    assert!(whole.contains("2 epochs of 7 steps"), "{whole}");
    trains(
        &format!("{train} --output-dir parts --save-every 3 --stop-after 10"),
        dir.path(),
    );
    trains(
        &format!("{train} --output-dir parts --resume auto"),
        dir.path(),
    );
    trains(
        &format!("{train} --output-dir elastic --elastic"),
        dir.path(),
    );
    let read = |name: &str| {
        std::fs::read(dir.path().join(name).join("mnist_cnn.safetensors")).expect("weights")
    };
    assert!(read("whole") == read("parts") && read("whole") == read("elastic"));
}

#[test]
fn a_loss_that_is_not_finite_before_the_first_update_is_not_blamed_on_the_learning_rate() {
    let dir = folder();
    let small = "train mnist --data synthetic:48 --epochs 1 --batch-size 8";
    trains(&format!("{small} --output-dir out"), dir.path());
    let path = dir.path().join("out/mnist_cnn.safetensors");
    let mut bytes = std::fs::read(&path).expect("weights");
    // Large enough to overflow in the first layers.
    let values = bytes.len() - 4 * 1_199_882;
    for value in bytes[values..].as_chunks_mut::<4>().0 {
        *value = 1e38f32.to_le_bytes();
    }
    std::fs::write(dir.path().join("large.safetensors"), bytes).expect("written");
    let err = fails(&format!("{small} --init large.safetensors"), dir.path(), 1);
    assert!(err.contains("no update was made before it"), "{err}");
    assert!(!err.contains("--lr"), "{err}");
}

/// As of images: the file that the command line names is wrong.
#[test]
fn a_text_that_cannot_be_used_is_a_mistake_of_the_command_line() {
    let dir = folder();
    for (text, words) in [
        ("short", "short.txt has 5 characters"),
        ("", "has 0 characters"),
    ] {
        std::fs::write(dir.path().join("short.txt"), text).expect("written");
        for ranks in [1, 2] {
            let args = format!("train gpt --data short.txt --nproc-per-node {ranks}");
            let err = fails(&args, dir.path(), 2);
            assert_eq!(err.matches(words).count(), 1, "{err}");
        }
    }
}
