//! Drawn digits: a function of (seed, number), learnable, not trivial.

use phalanx_base::ErrorKind;
use phalanx_data::ImageDataset;
use phalanx_data::mnist;
use phalanx_data::synthetic::{self, GeneratedImages, PIXELS};
use sha2::{Digest, Sha256};

fn drawn(set: &GeneratedImages, index: usize) -> (u32, [u8; PIXELS]) {
    let mut pixels = [0; PIXELS];
    let label = set.draw(index, &mut pixels);
    (label, pixels)
}

#[test]
fn a_sample_depends_on_seed_and_number_alone() {
    let set = synthetic::digits(1000, 7);
    let backwards: Vec<_> = (0..50).rev().map(|i| drawn(&set, i)).collect();
    for (i, want) in backwards.into_iter().rev().enumerate() {
        assert_eq!(drawn(&synthetic::digits(50, 7), i), want);
        assert_eq!(drawn(&synthetic::range(i as u64, 1, 7), 0), want);
        assert_ne!(drawn(&synthetic::digits(50, 8), i).1, want.1);
    }
}

/// The same bytes on every machine and for ever: results of runs are compared
/// over versions.
#[test]
fn the_drawing_never_changes() {
    let set = synthetic::digits(100, 1);
    let mut hash = Sha256::new();
    for i in 0..100 {
        let (label, pixels) = drawn(&set, i);
        hash.update([label as u8]);
        hash.update(pixels);
    }
    assert_eq!(
        hex::encode(hash.finalize()),
        "fbc1399e89d251fad39394288120ed94c2500d0858ad78d6a586c5c8d65f1b80"
    );
}

#[test]
fn the_splits_have_mnists_sizes_and_no_common_sample() {
    let (train, test) = synthetic::train_and_test(60_000, 1);
    assert_eq!((train.len(), test.len()), (60_000, 10_000));
    assert_eq!(drawn(&train, 60_000), drawn(&test, 0));
    assert_eq!(test.image_shape(), [28, 28, 1]);
    assert_eq!(test.classes(), 10);
}

#[test]
fn a_set_has_the_number_of_samples_that_its_name_says() {
    for (data, sizes) in [
        ("synthetic", (60_000, 10_000)),
        ("synthetic:600", (600, 100)),
        ("synthetic:1", (1, 1)),
    ] {
        let (train, test) = mnist::open(data, 1).expect(data);
        assert_eq!((train.len(), test.len()), sizes, "{data}");
    }
    for data in [
        "synthetic:0",
        "synthetic:x",
        "synthetic:",
        "synthetic:100000001",
    ] {
        let error = mnist::open(data, 1).err().expect(data).to_string();
        assert!(error.starts_with(&format!("--data {data}: ")), "{error}");
    }
    // A folder.
    assert_eq!(
        synthetic::samples("synthetic-2", 1).expect("no number"),
        None
    );
}

#[test]
fn every_image_is_a_digit_with_a_background() {
    let set = synthetic::digits(2000, 3);
    let mut counts = [0; 10];
    for i in 0..set.len() {
        let (label, pixels) = drawn(&set, i);
        counts[label as usize] += 1;
        let ink = pixels.iter().filter(|&&p| p > 100).count();
        assert!((8..400).contains(&ink), "sample {i}: {ink} dark pixels");
    }
    // 200 expected, standard deviation 13.
    assert!(counts.iter().all(|c| (140..260).contains(c)), "{counts:?}");
}

#[test]
fn reading_normalises_like_mnist_and_checks_bounds() {
    let set = synthetic::digits(10, 3);
    let (label, pixels) = drawn(&set, 9);
    let mut image = vec![0.0; PIXELS];
    assert_eq!(set.read(9, &mut image).unwrap(), label);
    for (value, pixel) in image.iter().zip(pixels) {
        assert_eq!(*value, (f32::from(pixel) / 255.0 - 0.1307) / 0.3081);
    }
    let error = set.read(10, &mut image).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(set.read(0, &mut image[..100]).is_err());
}

/// A linear model must do much better than chance (the set is learnable) and
/// leave a gap for a convolutional one (it is not trivial).
#[test]
fn a_linear_model_learns_it_but_not_all_of_it() {
    let train = synthetic::digits(6000, 1);
    let test = synthetic::range(60_000, 1000, 1);
    let mut weights = vec![[0.0_f32; PIXELS + 1]; 10];
    let mut image = vec![0.0; PIXELS];
    let scores = |weights: &[[f32; PIXELS + 1]], image: &[f32]| -> Vec<f32> {
        let row = |w: &[f32; PIXELS + 1]| {
            image.iter().zip(w).map(|(x, w)| x * w).sum::<f32>() + w[PIXELS]
        };
        weights.iter().map(row).collect()
    };
    for _ in 0..3 {
        for i in 0..train.len() {
            let label = train.read(i, &mut image).unwrap() as usize;
            let scores = scores(&weights, &image);
            let most = scores.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = scores.iter().map(|s| (s - most).exp()).sum();
            for (class, w) in weights.iter_mut().enumerate() {
                let target = if class == label { 1.0 } else { 0.0 };
                let slope = (scores[class] - most).exp() / sum - target;
                for (w, x) in w.iter_mut().zip(&image) {
                    *w -= 0.001 * slope * x;
                }
                w[PIXELS] -= 0.001 * slope;
            }
        }
    }
    let mut right = 0;
    for i in 0..test.len() {
        let label = test.read(i, &mut image).unwrap() as usize;
        let scores = scores(&weights, &image);
        right += usize::from(phalanx_data::metrics::argmax(&scores) == Some(label));
    }
    eprintln!("linear model: {right} of 1000");
    assert!((600..930).contains(&right), "{right} of 1000");
}

/// Nearest class mean over raw pixels, trained on 2000 and tested on 1000: pictures are no
/// noise, yet no plain template either.
#[test]
fn pictures_are_balanced_reproducible_and_no_templates() {
    use phalanx_data::cifar10::Scaling;
    use phalanx_data::synthetic::pictures;
    let train = pictures(0, 2000, 5, Scaling::Normalised);
    let test = pictures(2000, 1000, 5, Scaling::Normalised);
    let read = |set: &dyn ImageDataset, i: usize| {
        let mut image = vec![0.0; 3072];
        let label = set.read(i, &mut image).expect("drawn");
        (image, label as usize)
    };
    assert_eq!(
        read(&train, 7),
        read(&pictures(7, 1, 5, Scaling::Normalised), 0)
    );
    assert_ne!(
        read(&train, 7).0,
        read(&pictures(0, 8, 6, Scaling::Normalised), 7).0
    );
    let (mut means, mut counts) = (vec![vec![0.0f64; 3072]; 10], [0usize; 10]);
    for i in 0..2000 {
        let (image, label) = read(&train, i);
        counts[label] += 1;
        for (mean, value) in means[label].iter_mut().zip(&image) {
            *mean += f64::from(*value);
        }
    }
    assert!(counts.iter().all(|n| (150..250).contains(n)), "{counts:?}");
    for (mean, count) in means.iter_mut().zip(counts) {
        mean.iter_mut().for_each(|m| *m /= count as f64);
    }
    let right = (0..1000).filter(|i| {
        let (image, label) = read(&test, *i);
        let distance = |mean: &Vec<f64>| -> f64 {
            mean.iter()
                .zip(&image)
                .map(|(m, v)| (m - f64::from(*v)).powi(2))
                .sum()
        };
        let best = (0..10).min_by(|a, b| distance(&means[*a]).total_cmp(&distance(&means[*b])));
        best == Some(label)
    });
    let right = right.count();
    // Chance is 100. Who knows only the mean of each class should not know much more.
    assert!(right < 500, "{right} of 1000");
}

#[test]
fn noise_has_the_documents_labels() {
    use phalanx_data::synthetic::noise::noise;
    let set = noise(1000, 2026, 0);
    let mut labels = [0; 2];
    let (mut sum, mut squares) = (0.0, 0.0);
    for i in 0..1000 {
        let mut image = vec![0.0; 3072];
        labels[set.read(i, &mut image).expect("noise") as usize] += 1;
        sum += image.iter().map(|v| f64::from(*v)).sum::<f64>();
        squares += image
            .iter()
            .map(|v| f64::from(*v) * f64::from(*v))
            .sum::<f64>();
    }
    assert_eq!(labels, [500, 500]);
    let n = 3_072_000.0;
    assert!(
        (sum / n).abs() < 0.003 && (squares / n - 1.0).abs() < 0.005,
        "{sum} {squares}"
    );
}
