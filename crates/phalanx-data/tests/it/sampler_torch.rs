//! The torch order against PyTorch 2.15 (`fixtures/sampler.json`, from the
//! project's parity fixtures), bit for bit.

use phalanx_base::{ErrorKind, Result};
use phalanx_data::sampler::{Cursor, Sampler, SamplerConfig, TorchBatches};
use phalanx_nn::rng::torch::Generator;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn cases(key: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("../fixtures/sampler.json")).unwrap();
    let cases = all[key].as_array().unwrap().clone();
    assert!(!cases.is_empty());
    cases
}

fn number(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

fn list(value: &Value) -> Vec<u64> {
    let items = value.as_array().unwrap();
    items.iter().map(|v| v.as_u64().unwrap()).collect()
}

fn sampler(case: &Value, world: usize, rank: usize, batch_size: usize) -> Result<Sampler> {
    let config = SamplerConfig {
        samples: number(case, "n"),
        world,
        rank,
        shuffle: case["shuffle"] != false,
        seed: case["seed"].as_u64().unwrap(),
    };
    let batches = TorchBatches {
        batch_size,
        drop_samples: case["drop_last"] == true,
        drop_batch: false,
    };
    Sampler::torch(config, batches)
}

fn order(sampler: &Sampler, epoch: u64) -> Vec<u64> {
    sampler
        .epoch(epoch)
        .iter()
        .flat_map(|s| s.indices)
        .collect()
}

#[test]
fn every_small_case_of_distributed_sampler() {
    let cases = cases("distributed");
    assert_eq!(cases.len(), 149);
    for case in cases {
        let world = number(&case, "world");
        let epoch = case["epoch"].as_u64().unwrap();
        let ranks = case["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), world);
        for (rank, want) in ranks.iter().enumerate() {
            // The order must not depend on how it is cut into batches.
            for batch in [1, 3, 64] {
                let sampler = sampler(&case, world, rank, batch).unwrap();
                assert_eq!(order(&sampler, epoch), list(want), "{case}");
            }
        }
    }
}

#[test]
fn every_big_case_of_distributed_sampler() {
    let cases = cases("distributed_big");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let (world, rank) = (number(&case, "world"), number(&case, "rank"));
        let sampler = sampler(&case, world, rank, 64).unwrap();
        let got = order(&sampler, case["epoch"].as_u64().unwrap());
        assert_eq!(got.len(), number(&case, "len"));
        assert_eq!(got[..5], list(&case["first"])[..]);
        let mut hash = Sha256::new();
        got.iter()
            .for_each(|&i| hash.update((i as u32).to_le_bytes()));
        assert_eq!(
            hex::encode(hash.finalize()),
            case["sha256_u32le"].as_str().unwrap()
        );
    }
}

#[test]
fn batches_are_cut_as_batch_sampler_cuts_them() {
    for case in cases("batch_sampler") {
        let config = SamplerConfig {
            samples: number(&case, "samples"),
            world: 1,
            rank: 0,
            shuffle: false,
            seed: 0,
        };
        let batches = TorchBatches {
            batch_size: number(&case, "batch"),
            drop_samples: false,
            drop_batch: case["drop_last"] == true,
        };
        let plan = Sampler::torch(config, batches).unwrap().epoch(0);
        assert_eq!(plan.len(), number(&case, "len"), "{case}");
        let sizes: Vec<u64> = plan.iter().map(|s| s.indices.len() as u64).collect();
        let last_two = &sizes[sizes.len().saturating_sub(2)..];
        assert_eq!(last_two, list(&case["sizes"]), "{case}");
        assert_eq!(plan.samples() as u64, sizes.iter().sum::<u64>());
    }
}

/// `DataLoader(shuffle=True)` draws a base seed and then the permutation's
/// seed from the default generator at the start of every epoch.
#[test]
fn a_plain_shuffling_data_loader_can_be_followed() {
    for case in cases("dataloader_shuffle_true") {
        let mut default = Generator::new(case["manual_seed"].as_u64().unwrap());
        for want in case["epochs"].as_array().unwrap() {
            default.random_int64();
            let config = SamplerConfig {
                samples: number(&case, "n"),
                world: 1,
                rank: 0,
                shuffle: true,
                seed: default.random_int64() as u64,
            };
            let batches = TorchBatches {
                batch_size: 4,
                drop_samples: false,
                drop_batch: false,
            };
            let sampler = Sampler::torch(config, batches).unwrap();
            assert_eq!(order(&sampler, 0), list(want));
        }
    }
}

#[test]
fn global_length_counts_padding_too() {
    let config = SamplerConfig {
        samples: 10,
        world: 4,
        rank: 3,
        shuffle: true,
        seed: 0,
    };
    let batches = TorchBatches {
        batch_size: 2,
        drop_samples: false,
        drop_batch: false,
    };
    let plan = Sampler::torch(config, batches).unwrap().epoch(0);
    let lengths: Vec<usize> = plan.iter().map(|s| s.global_len).collect();
    assert_eq!(lengths, [8, 4]);
}

#[test]
fn resuming_needs_a_step_boundary() {
    let config = SamplerConfig {
        samples: 21,
        world: 2,
        rank: 1,
        shuffle: true,
        seed: 3,
    };
    let batches = TorchBatches {
        batch_size: 4,
        drop_samples: false,
        drop_batch: false,
    };
    let sampler = Sampler::torch(config, batches).unwrap();
    let whole = sampler.epoch(5);
    let all: Vec<_> = whole.iter().collect();
    for steps in 0..all.len() {
        let cursor = whole.cursor_after(steps);
        assert_eq!(cursor.samples, steps as u64 * 8);
        let rest: Vec<_> = sampler.resume(cursor).unwrap().iter().collect();
        assert_eq!(rest, all[steps..]);
    }
    for samples in [1, 7, 20, 23, u64::MAX] {
        let error = sampler.resume(Cursor { epoch: 5, samples }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{samples}");
    }
    // The end itself is a boundary, although the last step is short.
    let end = Cursor {
        epoch: 5,
        samples: 22,
    };
    assert!(sampler.resume(end).unwrap().is_empty());
}
