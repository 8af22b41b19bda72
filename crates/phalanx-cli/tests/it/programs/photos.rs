//! The image programs on a folder of images, a subfolder for each class.

use super::*;

/// Images of several formats and colors, which the tests of `phalanx-data` compare with Pillow.
const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../phalanx-data/tests/images");

/// The classes `blue`, `gray` and `red` in `root`, of eight images each; one of `gray` is cut off.
pub fn classes(root: &Path) {
    let names = [
        "420.jpg",
        "422.jpg",
        "cmyk.jpg",
        "gray.jpg",
        "palette.png",
        "rgb.png",
        "rgba.png",
    ];
    for class in ["red", "gray", "blue"] {
        std::fs::create_dir_all(root.join(class)).expect("folder");
        for (number, name) in names.iter().enumerate() {
            let copy = root.join(class).join(format!("{number}-{name}"));
            std::fs::copy(format!("{IMAGES}/{name}"), copy).expect("copied");
        }
        let whole = std::fs::read(format!("{IMAGES}/444.jpg")).expect("image");
        let length = if class == "gray" {
            whole.len() / 2
        } else {
            whole.len()
        };
        std::fs::write(root.join(class).join("7-444.jpg"), &whole[..length]).expect("written");
    }
}

const TRAIN: &str = "train resnet18 --recipe standard --data photos --image-size 16 --epochs 1 --global-batch-size 8 \
                     --test-batch-size 4 --deterministic shards --threads 1 --lr 0.001";

fn program(more: &str) -> Vec<&str> {
    TRAIN
        .split_whitespace()
        .chain(more.split_whitespace())
        .collect()
}

#[test]
fn a_folder_gives_the_same_weights_on_one_and_two_ranks_and_after_a_resume() {
    let dir = tempfile::tempdir().expect("folder");
    classes(&dir.path().join("photos"));
    let weights = |folder: &str| {
        json(&dir.path().join(folder).join("summary.json"))["weights_sha256"].clone()
    };
    let (_, err) = succeed(&program("--skip-damaged --output-dir one"), dir.path());
    assert!(
        err.contains(
            "warning: 1 of 24 images are left out:\n  photos/gray/7-444.jpg: it is no whole JPEG"
        ),
        "{err}"
    );
    assert!(err.contains("3 classes of images in photos, 20 train / 3 test, 16 x 16 pixels, cropped at random, flipped"), "{err}");
    succeed(
        &program("--skip-damaged --output-dir two --nproc-per-node 2"),
        dir.path(),
    );
    assert_eq!(weights("two"), weights("one"));
    // Stopped within the first epoch by two ranks, continued by one.
    succeed(
        &program(
            "--skip-damaged --output-dir again --nproc-per-node 2 --max-steps 1 --save-every 1",
        ),
        dir.path(),
    );
    assert_ne!(weights("again"), weights("one"));
    succeed(
        &program("--skip-damaged --output-dir again --resume auto"),
        dir.path(),
    );
    assert_eq!(weights("again"), weights("one"));
    let report = std::fs::read_to_string(dir.path().join("one/report.html")).expect("a report");
    assert!(
        ["blue", "gray", "red"]
            .iter()
            .all(|class| report.contains(&format!("\"{class}\"")))
    );
    // Other images under the same name.
    std::fs::remove_file(dir.path().join("photos/red/0-420.jpg")).expect("removed");
    let (code, _, err) = run(
        &program("--skip-damaged --output-dir again --resume auto --epochs 2"),
        dir.path(),
    );
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("images of 3 classes"), "{err}");
}

#[test]
fn a_folder_with_cifar10_and_pictures_is_cifar10() {
    let dir = tempfile::tempdir().expect("folder");
    classes(&dir.path().join("photos"));
    fetch::archive(&dir.path().join("photos/cifar-10-python.tar.gz"));
    let more = "--output-dir out --max-steps 1 --train-samples 16 --test-samples 10";
    let (_, err) = succeed(&program(more), dir.path());
    assert!(
        err.contains("CIFAR-10 in photos, 16 train / 10 test"),
        "{err}"
    );
}

#[test]
fn a_damaged_image_ends_all_ranks_and_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    classes(&dir.path().join("photos"));
    let (code, _, err) = run(&program("--nproc-per-node 2 --output-dir out"), dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains("photos/gray/7-444.jpg: it is no whole JPEG"),
        "{err}"
    );
}

#[test]
fn predictions_name_the_classes() {
    let dir = tempfile::tempdir().expect("folder");
    // Divided by their owner.
    for part in ["train", "val"] {
        let folder = dir.path().join("photos").join(part);
        classes(&folder);
        std::fs::remove_file(folder.join("gray/7-444.jpg")).expect("removed");
    }
    let (_, err) = succeed(&program("--output-dir out"), dir.path());
    assert!(err.contains("23 train / 23 test"), "{err}");
    let picture = format!("{IMAGES}/photo.png");
    for (data, first, lines) in [("photos", "blue/0-420.jpg", 23), (&*picture, &*picture, 1)] {
        let (out, err) = succeed(&["predict", "out", "--data", data], dir.path());
        let rows: Vec<serde_json::Value> = out
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(rows.len(), lines, "{err}");
        assert_eq!(rows[0]["image"], first);
        let class = ["blue", "gray", "red"][rows[0]["guess"].as_u64().expect("a class") as usize];
        assert_eq!(rows[0]["class"], class);
    }
    classes(&dir.path().join("others"));
    std::fs::rename(
        dir.path().join("others/red"),
        dir.path().join("others/pink"),
    )
    .expect("renamed");
    let (code, _, err) = run(&["predict", "out", "--data", "others"], dir.path());
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("has the classes blue, gray, pink, the network knows blue, gray, red"),
        "{err}"
    );
    let (code, _, err) = run(
        &["train", "resnet9", "--data", "others", "--output-dir", "no"],
        dir.path(),
    );
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("resnet18, resnet50 and mobilenetv2 take folders of classes"),
        "{err}"
    );
}
