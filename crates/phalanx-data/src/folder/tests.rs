use std::fs;
use std::os::unix::fs::symlink;

use phalanx_image::decode;

use super::*;

/// Files that `make.py` there made, with what Pillow and torchvision make of them.
const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/images");

fn file(name: &str) -> Vec<u8> {
    fs::read(format!("{IMAGES}/{name}")).expect(name)
}

fn far(ours: &[u8], theirs: &[u8]) -> Vec<u8> {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().zip(theirs);
    pairs.map(|(a, b)| a.abs_diff(*b)).collect()
}

#[test]
fn images_have_the_pixels_that_pillow_reads() {
    let mut seen = 0;
    for (name, _) in names(IMAGES.as_ref()).unwrap() {
        let name = name.into_string().unwrap();
        let is_png = name.ends_with(".png");
        if !(is_png || name.ends_with(".jpg")) || name == "photo.png" {
            continue;
        }
        let image = decode(&file(&name)).expect(&name);
        assert_eq!((image.width, image.height), (29, 21), "{name}");
        let far = far(&image.pixels, &file(&format!("{name}.rgb")));
        let most = *far.iter().max().unwrap();
        let beyond = far.iter().filter(|far| **far > 2).count();
        match is_png {
            true => assert_eq!(most, 0, "{name}"),
            false => assert!(most <= 4 && beyond <= 4, "{name}: {most}, {beyond} above 2"),
        }
        seen += 1;
    }
    assert_eq!(seen, 14);
}

#[test]
fn the_upper_byte_of_16_bit_gray_is_taken() {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 2, 1);
    encoder.set_depth(png::BitDepth::Sixteen);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&[0x12, 0x34, 0xfe, 0xdc]).unwrap();
    drop(writer);
    let expected = [0x12, 0x12, 0x12, 0xfe, 0xfe, 0xfe];
    assert_eq!(decode(&bytes).unwrap().pixels, expected);
}

#[test]
fn what_is_no_image_says_what_it_is() {
    let jpeg = file("420.jpg");
    let png = file("rgb.png");
    let huge = [&png[..16], &[0, 1, 0, 0, 0, 1, 0, 0], &png[24..]].concat();
    for (bytes, what) in [
        (&b""[..], "empty"),
        (b"GIF89a....", "it is GIF; only JPEG and PNG"),
        (b"RIFF....WEBPVP8 ", "it is WebP"),
        (b"BM......", "it is BMP"),
        (b"II*\0....", "it is TIFF"),
        (b"P6 1 1 255 abc", "it is no image"),
        (b"\0\0\0\x1cftypavif", "it is AVIF or HEIC"),
        (b"<html>", "it is no image"),
        (&jpeg[..jpeg.len() / 2], "no whole JPEG"),
        (&jpeg[..40], "no whole JPEG"),
        (&png[..png.len() / 2], "no whole PNG"),
        (&huge, "no whole PNG"),
    ] {
        let Err(why) = decode(bytes) else {
            panic!("{what}: it was read");
        };
        assert!(why.contains(what), "{why}, not {what}");
    }
    for end in 0..jpeg.len() {
        assert!(decode(&jpeg[..end]).is_err(), "JPEG cut off at {end}");
    }
    for end in 0..png.len() - 12 {
        assert!(decode(&png[..end]).is_err(), "PNG cut off at {end}");
    }
}

fn pixels(image: &Rgb, transforms: &Transforms) -> Vec<u8> {
    let [height, width] = transforms.size(Some([image.height, image.width])).unwrap();
    let mut out = vec![0.0; height * width * 3];
    let applied = transforms.apply(image.clone(), 1, [0, 0], &mut out);
    applied.unwrap();
    out.iter().map(|v| (v * 255.0).round() as u8).collect()
}

#[test]
fn transforms_are_those_of_torchvision() {
    let photo = decode(&file("photo.png")).unwrap();
    let new = Transforms::new;
    for (name, transforms) in [
        ("resize", new().resize(26)),
        ("resize_to", new().resize_to(32, 20)),
        ("center", new().center_crop(28)),
        ("center_padded", new().center_crop(53)),
        ("flip", new().random_horizontal_flip(1.0)),
    ] {
        let far = far(
            &pixels(&photo, &transforms),
            &file(&format!("t_{name}.rgb")),
        );
        assert!(far.iter().all(|far| *far <= 1), "{name}");
    }
    let part = transforms::resized(photo.clone(), [5, 9, 31, 23], [20, 20]).unwrap();
    assert!(
        far(&part.pixels, &file("t_part.rgb"))
            .iter()
            .all(|far| *far <= 1)
    );
    for (name, which, factor) in [
        ("bright", 0, 1.3),
        ("dark", 0, 0.6),
        ("contrast", 1, 1.4),
        ("saturation", 2, 0.3),
    ] {
        let mut ours = photo.pixels.clone();
        transforms::adjust(&mut ours, which, factor);
        assert!(
            far(&ours, &file(&format!("t_{name}.rgb")))
                .iter()
                .all(|far| *far <= 1),
            "{name}"
        );
    }
    for (name, turn) in [("hue", 0.2), ("hue_back", -0.35)] {
        let mut ours = photo.pixels.clone();
        transforms::turn_hue(&mut ours, turn);
        let far = far(&ours, &file(&format!("t_{name}.rgb")));
        assert_eq!(far.iter().max(), Some(&0), "{name}");
    }
    for degrees in [20, -133] {
        let ours = transforms::turned(&photo, f64::from(degrees)).pixels;
        assert_eq!(ours, file(&format!("t_turn_{degrees}.rgb")), "{degrees}");
    }
    let drawn = new().random_rotation(30.0).center_crop(20);
    assert_ne!(
        pixels(&photo, &drawn),
        pixels(&photo, &new().center_crop(20))
    );
}

#[test]
fn normalized_values_are_those_of_the_formula() {
    let image = Rgb {
        width: 1,
        height: 1,
        pixels: vec![0, 51, 255],
    };
    let transforms = Transforms::new().normalize([0.5, 0.1, 0.0], [0.5, 2.0, 4.0]);
    let mut out = [9.0; 3];
    transforms.apply(image, 0, [0, 0], &mut out).unwrap();
    assert_eq!(out, [-1.0, 0.05, 0.25]);
}

/// Random crops keep their bounds and their distribution: area uniform in `scale`, logarithm of the ratio uniform.
#[test]
fn random_parts_are_drawn_as_torchvision_does() {
    let (mut areas, mut ratios, mut whole) = (0.0, 0.0, 0);
    for sample in 0..4000 {
        let mut words = Words::new(3, sample);
        let [top, left, h, w] =
            transforms::part([300, 400], &(0.08..1.0), &(0.75..4.0 / 3.0), &mut words);
        assert!(top + h <= 300 && left + w <= 400 && h > 0 && w > 0);
        areas += (h * w) as f64 / 120_000.0;
        ratios += (w as f64 / h as f64).ln();
        whole += usize::from([top, left] == [0, 0]);
    }
    // Large parts of unfit shapes are drawn again. The means are those of 20,000 draws by torchvision.
    assert!(
        (areas / 4000.0 - 0.4316).abs() < 0.015,
        "{}",
        areas / 4000.0
    );
    assert!(
        (ratios / 4000.0 - 0.0282).abs() < 0.02,
        "{}",
        ratios / 4000.0
    );
    assert!(whole < 200);
    // Nothing fits: the largest part of a permitted shape, in the middle.
    let narrow = transforms::part(
        [400, 20],
        &(0.9..1.0),
        &(0.75..4.0 / 3.0),
        &mut Words::new(1, 1),
    );
    assert_eq!(narrow, [186, 0, 27, 20]);
}

/// A folder with `count` copies of `rgb.png` in each class.
fn folder(classes: &[(&str, usize)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (class, count) in classes {
        fs::create_dir(root.path().join(class)).unwrap();
        for number in 0..*count {
            fs::write(
                root.path().join(format!("{class}/{number:03}.png")),
                file("rgb.png"),
            )
            .unwrap();
        }
    }
    root
}

#[test]
fn classes_and_images_are_sorted_as_torchvision_sorts_them() {
    let root = folder(&[("zebra", 1), ("Ant", 1), ("bee", 2)]);
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("bee/more/deep")).unwrap();
    fs::write(at("bee/more/deep/x.JPG"), file("420.jpg")).unwrap();
    for other in [
        ".hidden",
        "readme.txt",
        "bee/.DS_Store",
        "bee/notes.csv",
        "top.png",
    ] {
        fs::write(at(other), "no image").unwrap();
    }
    fs::create_dir(at(".git")).unwrap();
    symlink(at("Ant/000.png"), at("zebra/link.png")).unwrap();
    let set = ImageFolder::open(root.path()).unwrap();
    assert_eq!(set.class_names(), ["Ant", "bee", "zebra"]);
    let all: Vec<(&str, u32)> = set
        .files
        .iter()
        .map(|(path, label)| (path.to_str().unwrap(), *label))
        .collect();
    let expected = [
        ("Ant/000.png", 0),
        ("bee/000.png", 1),
        ("bee/001.png", 1),
        ("bee/more/deep/x.JPG", 1),
        ("zebra/000.png", 2),
        ("zebra/link.png", 2),
    ];
    assert_eq!(all, expected);
    let set = set.transform(Transforms::evaluation(16), 1).unwrap();
    assert_eq!(set.image_shape(), [16, 16, 3]);
    let mut out = vec![0.0; 16 * 16 * 3];
    assert_eq!(set.read(3, &mut out).unwrap(), 1);
    let elsewhere = fs::canonicalize(root.path()).unwrap();
    let again = ImageFolder::open(&elsewhere)
        .unwrap()
        .transform(Transforms::evaluation(16), 1)
        .unwrap();
    assert_eq!(again.content(), set.content(), "not of the place");
    let other = again
        .clone()
        .transform(Transforms::evaluation(17), 1)
        .unwrap();
    assert_ne!(other.content(), set.content());
}

#[test]
fn folders_that_are_no_classes_are_refused_by_name() {
    let empty = tempfile::tempdir().unwrap();
    let refused = |path: &Path| ImageFolder::open(path).expect_err("refused").to_string();
    assert!(refused(&empty.path().join("gone")).contains("no folder"));
    assert!(refused(empty.path()).contains("has no subfolders"));
    let root = folder(&[("a", 1), ("b", 0)]);
    assert!(refused(root.path()).contains("b has no images"));
    fs::write(root.path().join("b/one.gif"), "GIF89a").unwrap();
    fs::write(root.path().join("b/two.webp"), "RIFF").unwrap();
    let text = refused(root.path());
    assert!(
        text.contains("2 of 3 images") && text.contains("b/one.gif"),
        "{text}"
    );
    assert_eq!(ImageFolder::open_all(root.path()).unwrap().len(), 3);
    symlink(root.path(), root.path().join("b/circle")).unwrap();
    assert!(refused(root.path()).contains("lead to itself"));
    let sizes = folder(&[("a", 1)]);
    let set = || ImageFolder::open(sizes.path()).unwrap();
    assert_eq!(
        set().transform(Transforms::new(), 1).unwrap().image_shape(),
        [21, 29, 3]
    );
    for impossible in [
        Transforms::new().center_crop(0),
        Transforms::new().random_horizontal_flip(1.5),
        Transforms::new().color_jitter(0.0, 0.0, 0.0, 0.6),
        Transforms::new().random_resized_crop_of(8, 0.0..2.0, 1.0..1.0),
        Transforms::new().normalize([0.0; 3], [0.0; 3]),
    ] {
        set().transform(impossible, 1).expect_err("impossible");
    }
}

#[test]
fn a_damaged_image_is_named_or_left_out() {
    let root = folder(&[("a", 3), ("b", 4)]);
    let jpeg = file("420.jpg");
    fs::write(root.path().join("a/001.png"), "<html>not found</html>").unwrap();
    fs::write(root.path().join("b/000.jpg"), &jpeg[..jpeg.len() / 2]).unwrap();
    fs::write(root.path().join("b/zero.png"), "").unwrap();
    let set = ImageFolder::open(root.path()).unwrap();
    let set = set.transform(Transforms::evaluation(8), 1).unwrap();
    let mut out = vec![0.0; 8 * 8 * 3];
    let error = set.read(1, &mut out).unwrap_err();
    assert_eq!(error.kind(), phalanx_base::ErrorKind::Data);
    assert!(
        error.to_string().contains("a/001.png: it is no image"),
        "{error}"
    );
    let mut found: Vec<DamagedImage> = (0..3).flat_map(|part| set.damaged(part, 3)).collect();
    found.sort_by_key(|image| image.index);
    assert_eq!(found, set.damaged(0, 1));
    let at: Vec<usize> = found.iter().map(|image| image.index).collect();
    assert_eq!(at, [1, 3, 8]);
    let sound = set.without(&found);
    assert_eq!(sound.len(), 6);
    for index in 0..6 {
        sound.read(index, &mut out).unwrap();
    }
}

#[test]
fn a_part_of_each_class_is_held_out() {
    let root = folder(&[("a", 20), ("b", 10), ("c", 2), ("d", 1)]);
    let set = ImageFolder::open(root.path()).unwrap();
    let [train, test] = set.clone().split(0.2, 7);
    let count = |set: &ImageFolder| {
        [0, 1, 2, 3].map(|class| set.files.iter().filter(|file| file.1 == class).count())
    };
    assert_eq!((count(&train), count(&test)), ([16, 8, 1, 1], [4, 2, 1, 0]));
    let mut both: Vec<_> = train.files.iter().chain(&test.files).cloned().collect();
    both.sort();
    assert_eq!(both, set.files, "each image is on one side");
    let [again, other] = [7, 8].map(|seed| set.clone().split(0.2, seed)[1].files.clone());
    assert_eq!(again, test.files);
    assert_ne!(other, test.files);
}

#[test]
fn a_sample_changes_with_epoch_and_seed_and_nothing_else() {
    let root = folder(&[("a", 4)]);
    let open = |seed| {
        let set = ImageFolder::open(root.path()).unwrap();
        let jitter = Transforms::training(16).color_jitter(0.4, 0.4, 0.4, 0.1);
        set.transform(jitter, seed).unwrap()
    };
    let read = |set: &ImageFolder, index, epoch| {
        let mut out = vec![0.0; 16 * 16 * 3];
        set.read_in_epoch(index, epoch, &mut out).unwrap();
        out
    };
    let (set, other) = (open(1), open(2));
    let first = read(&set, 2, 5);
    assert_eq!(read(&open(1), 2, 5), first);
    assert_ne!(read(&set, 2, 6), first);
    assert_ne!(read(&other, 2, 5), first);
    assert_ne!(
        read(&set, 3, 5),
        first,
        "the same file under another number"
    );
}
