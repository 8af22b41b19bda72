//! The loader: order, bounds, recycling, errors, early drops.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_base::{Error, ErrorKind, Result};
use phalanx_data::ImageDataset;
use phalanx_data::loader::{Loader, LoaderOptions};
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig};

/// Image i is [i, -i] with label i mod 10; some samples misbehave.
#[derive(Default)]
struct Numbers {
    len: usize,
    slow: Option<Duration>,
    broken: Option<usize>,
    panicking: Option<usize>,
    reads: AtomicUsize,
}

impl ImageDataset for Numbers {
    fn name(&self) -> &str {
        "numbers"
    }
    fn len(&self) -> usize {
        self.len
    }
    fn image_shape(&self) -> [usize; 3] {
        [1, 2, 1]
    }
    fn classes(&self) -> usize {
        10
    }
    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if let Some(time) = self.slow {
            std::thread::sleep(time);
        }
        if self.broken == Some(index) {
            return Err(Error::new(
                ErrorKind::Data,
                format!("sample {index} is bad"),
            ));
        }
        assert!(self.panicking != Some(index), "cannot stand {index}");
        out.copy_from_slice(&[index as f32, -(index as f32)]);
        Ok(index as u32 % 10)
    }
}

fn plan(samples: usize, batch: usize, epoch: u64, shuffle: bool) -> EpochPlan {
    let config = SamplerConfig {
        samples,
        world: 1,
        rank: 0,
        shuffle,
        seed: 5,
    };
    Sampler::exact(config, batch).unwrap().epoch(epoch)
}

fn loader(data: Numbers, workers: usize, ahead: usize) -> (Loader<Numbers>, Arc<Numbers>) {
    let data = Arc::new(data);
    let options = LoaderOptions { workers, ahead };
    (Loader::new(data.clone(), options).unwrap(), data)
}

fn numbers(len: usize) -> Numbers {
    Numbers {
        len,
        ..Numbers::default()
    }
}

#[test]
fn batches_come_in_order_with_any_number_of_workers() {
    for (workers, ahead) in [(1, 1), (1, 4), (2, 3), (5, 2), (8, 64)] {
        let (mut loader, _) = loader(numbers(103), workers, ahead);
        for epoch in 0..3 {
            let plan = plan(103, 10, epoch, true);
            loader.start(plan.clone());
            for step in plan.iter() {
                let batch = loader.next_batch().unwrap().unwrap();
                assert_eq!(batch.indices(), step.indices);
                assert_eq!(batch.global_len(), step.global_len);
                let images: Vec<f32> = step
                    .indices
                    .iter()
                    .flat_map(|&i| [i as f32, -(i as f32)])
                    .collect();
                assert_eq!(batch.images, images);
                let labels: Vec<u32> = step.indices.iter().map(|&i| i as u32 % 10).collect();
                assert_eq!(batch.labels, labels);
            }
            assert!(loader.next_batch().unwrap().is_none());
            assert!(loader.next_batch().unwrap().is_none());
        }
    }
}

#[test]
fn nothing_to_read_is_no_batch() {
    let (mut loader, _) = loader(numbers(0), 2, 2);
    assert!(loader.next_batch().unwrap().is_none());
    loader.start(plan(0, 4, 0, true));
    assert!(loader.next_batch().unwrap().is_none());
}

#[test]
fn steps_without_a_sample_on_this_rank_are_empty_batches() {
    let config = SamplerConfig {
        samples: 9,
        world: 4,
        rank: 3,
        shuffle: true,
        seed: 5,
    };
    let (mut loader, _) = loader(numbers(9), 1, 2);
    loader.start(Sampler::exact(config, 8).unwrap().epoch(0));
    assert_eq!(loader.next_batch().unwrap().unwrap().labels.len(), 2);
    let last = loader.next_batch().unwrap().unwrap();
    assert_eq!((last.labels.len(), last.images.len()), (0, 0));
    assert_eq!(last.global_len(), 1);
}

#[test]
fn workers_stay_within_the_bound() {
    let (mut loader, data) = loader(numbers(1000), 2, 3);
    loader.start(plan(1000, 1, 0, false));
    // All that may be read ahead is read, and then nothing more.
    let deadline = Instant::now() + Duration::from_secs(20);
    while data.reads.load(Ordering::Relaxed) < 3 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(data.reads.load(Ordering::Relaxed), 3);
    drop(loader.next_batch().unwrap());
    std::thread::sleep(Duration::from_millis(30));
    assert!(data.reads.load(Ordering::Relaxed) <= 4);
}

#[test]
fn dropped_batches_are_filled_again_in_place() {
    let (mut loader, _) = loader(numbers(4000), 1, 2);
    let mut places = std::collections::HashSet::new();
    for epoch in 0..2 {
        loader.start(plan(4000, 8, epoch, true));
        while let Some(batch) = loader.next_batch().unwrap() {
            places.insert(batch.images.as_ptr() as usize);
        }
    }
    // 1000 batches lived in the memory of two ahead, one in the worker's
    // hands and one at the consumer.
    assert!(places.len() <= 4, "{} buffers", places.len());
}

#[test]
fn held_batches_are_not_overwritten() {
    let (mut loader, _) = loader(numbers(40), 2, 2);
    loader.start(plan(40, 4, 0, false));
    let mut held = vec![];
    while let Some(batch) = loader.next_batch().unwrap() {
        held.push(batch);
    }
    assert_eq!(held.len(), 10);
    for (step, batch) in held.iter().enumerate() {
        assert_eq!(batch.images[0], step as f32 * 4.0);
    }
}

#[test]
fn an_error_comes_after_the_batches_before_it_and_ends_the_epoch() {
    for workers in [1, 3] {
        let data = Numbers {
            broken: Some(13),
            ..numbers(40)
        };
        let (mut loader, _) = loader(data, workers, 4);
        loader.start(plan(40, 5, 0, false));
        for step in 0..2 {
            let batch = loader.next_batch().unwrap().unwrap();
            assert_eq!(batch.indices()[0], step * 5);
        }
        let error = loader.next_batch().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert_eq!(error.to_string(), "sample 13 is bad");
        assert!(loader.next_batch().unwrap().is_none());
        // The loader itself is fine: another plan avoids the bad sample.
        loader.start(plan(10, 5, 0, false));
        assert_eq!(loader.next_batch().unwrap().unwrap().indices()[0], 0);
    }
}

#[test]
fn a_panicking_data_set_is_an_error_not_a_hang() {
    let data = Numbers {
        panicking: Some(3),
        ..numbers(8)
    };
    let (mut loader, _) = loader(data, 1, 2);
    loader.start(plan(8, 4, 0, false));
    let error = loader.next_batch().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    let text = error.to_string();
    assert!(
        text.contains("numbers") && text.contains("cannot stand 3"),
        "{text}"
    );
}

#[test]
fn a_sample_beyond_the_data_set_is_an_error() {
    let set = Arc::new(phalanx_data::synthetic::digits(10, 1));
    let mut loader = Loader::new(set, LoaderOptions::default()).unwrap();
    loader.start(plan(11, 11, 0, false));
    let error = loader.next_batch().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("no sample 10"), "{error}");
}

#[test]
fn dropping_early_never_blocks() {
    for taken in 0..6 {
        for workers in [1, 4] {
            let data = Numbers {
                slow: Some(Duration::from_micros(200)),
                ..numbers(10_000)
            };
            let (mut loader, data) = loader(data, workers, 2);
            loader.start(plan(10_000, 2, 0, true));
            let mut held = vec![];
            for _ in 0..taken {
                held.push(loader.next_batch().unwrap());
            }
            let began = Instant::now();
            drop(loader);
            assert!(began.elapsed() < Duration::from_secs(10));
            // A batch may outlive its loader.
            drop(held);
            assert!(data.reads.load(Ordering::Relaxed) < 10_000);
            assert_eq!(Arc::strong_count(&data), 1);
        }
    }
}

#[test]
fn a_new_plan_replaces_an_unfinished_one() {
    let (mut loader, _) = loader(numbers(1000), 3, 4);
    for epoch in 0..20 {
        let whole = plan(1000, 7, epoch, true);
        loader.start(whole.clone());
        for step in 0..3 {
            let batch = loader.next_batch().unwrap().unwrap();
            assert_eq!(batch.indices(), whole.step(step).unwrap().indices);
        }
    }
    let config = SamplerConfig {
        samples: 1000,
        world: 1,
        rank: 0,
        shuffle: true,
        seed: 5,
    };
    let sampler = Sampler::exact(config, 7).unwrap();
    let resumed = Cursor {
        epoch: 2,
        samples: 990,
    };
    loader.start(sampler.resume(resumed).unwrap());
    let mut rest = 0;
    while let Some(batch) = loader.next_batch().unwrap() {
        rest += batch.labels.len();
    }
    assert_eq!(rest, 10);
}

#[test]
fn waiting_time_is_that_of_the_consumer() {
    let slow = Numbers {
        slow: Some(Duration::from_millis(20)),
        ..numbers(4)
    };
    let (mut slow, _) = loader(slow, 1, 1);
    slow.start(plan(4, 1, 0, false));
    while slow.next_batch().unwrap().is_some() {}
    assert!(
        slow.waited() >= Duration::from_millis(10),
        "{:?}",
        slow.waited()
    );

    let (mut fast, data) = loader(numbers(4), 1, 4);
    fast.start(plan(4, 1, 0, false));
    let deadline = Instant::now() + Duration::from_secs(20);
    while data.reads.load(Ordering::Relaxed) < 4 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(5));
    let before = fast.waited();
    fast.next_batch().unwrap();
    assert_eq!(fast.waited(), before);
}

#[test]
fn impossible_options_are_refused() {
    for options in [
        LoaderOptions {
            workers: 0,
            ahead: 1,
        },
        LoaderOptions {
            workers: 1,
            ahead: 0,
        },
    ] {
        let error = Loader::new(Arc::new(numbers(1)), options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}
