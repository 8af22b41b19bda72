//! PyTorch's generator against PyTorch 2.15 (`fixtures/rng.json`, an extract
//! of the project's parity fixtures).

use phalanx_nn::rng::init;
use phalanx_nn::rng::torch::{DEFAULT_SEED, Generator};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn cases(key: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("../fixtures/rng.json")).unwrap();
    let cases = all[key].as_array().unwrap().clone();
    assert!(!cases.is_empty(), "no cases of {key}");
    cases
}

fn seeded(case: &Value) -> Generator {
    Generator::new(case["seed"].as_u64().unwrap())
}

fn u64s(value: &Value) -> Vec<u64> {
    let list = value.as_array().unwrap();
    list.iter().map(|v| v.as_u64().unwrap()).collect()
}

fn length(case: &Value) -> usize {
    case["n"].as_u64().unwrap() as usize
}

fn sha256(bytes: impl Iterator<Item = [u8; 4]>) -> String {
    let mut hash = Sha256::new();
    bytes.for_each(|b| hash.update(b));
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn f32_bits(value: &Value) -> Vec<u32> {
    let list = value["bits"].as_array().unwrap();
    list.iter().map(|v| v.as_i64().unwrap() as u32).collect()
}

#[test]
fn raw_words() {
    for case in cases("raw_u32") {
        let mut g = seeded(&case);
        let words: Vec<u64> = (0..1300).map(|_| u64::from(g.random())).collect();
        assert_eq!(words[..8], u64s(&case["first"])[..]);
        assert_eq!(words[624..628], u64s(&case["at_624"])[..]);
        assert_eq!(words[1248..1252], u64s(&case["at_1248"])[..]);
    }
}

#[test]
fn an_unseeded_generator_has_pytorchs_default_seed() {
    assert_eq!(Generator::default(), Generator::new(DEFAULT_SEED));
}

#[test]
fn permutations() {
    for case in cases("randperm") {
        let perm = seeded(&case).randperm(length(&case));
        assert_eq!(perm, u64s(&case["perm"]));
    }
    for case in cases("randperm_hash") {
        let perm = seeded(&case).randperm(length(&case));
        assert_eq!(perm[..6], u64s(&case["first"])[..]);
        let hash = sha256(perm.iter().map(|&i| (i as u32).to_le_bytes()));
        assert_eq!(hash, case["sha256_u32le"].as_str().unwrap());
    }
}

#[test]
fn uniform_numbers() {
    for case in cases("rand_bits") {
        let mut out = vec![0.0; length(&case)];
        seeded(&case).fill_uniform_f32(&mut out, 0.0, 1.0);
        let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, f32_bits(&case));
    }
    for case in cases("uniform_bits") {
        let (lo, hi) = (case["lo"].as_f64().unwrap(), case["hi"].as_f64().unwrap());
        let mut out = vec![0.0; length(&case)];
        seeded(&case).fill_uniform_f32(&mut out, lo, hi);
        let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, f32_bits(&case));
    }
}

#[test]
fn normal_numbers_within_2e_6() {
    for case in cases("randn_float") {
        let mut out = vec![0.0_f32; length(&case)];
        seeded(&case).fill_normal_f32(&mut out, 0.0, 1.0);
        let want = case["values"]["data"].as_array().unwrap();
        assert_eq!(out.len(), want.len());
        for (got, want) in out.iter().zip(want) {
            let want = want.as_f64().unwrap();
            assert!((f64::from(*got) - want).abs() <= 2e-6, "{got} {want}");
        }
    }
}

#[test]
fn normal_numbers_bit_for_bit() {
    let cases: Value = serde_json::from_str(include_str!("../fixtures/randn.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let mut out = vec![0.0_f32; length(case)];
        let (mean, std) = (
            case["mean"].as_f64().unwrap(),
            case["std"].as_f64().unwrap(),
        );
        seeded(case).fill_normal_f32(&mut out, mean, std);
        let hash = sha256(out.iter().map(|v| v.to_le_bytes()));
        assert_eq!(hash, case["sha256"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn the_second_half_of_a_scalar_normal_pair_carries_over() {
    let mut split = Generator::new(9);
    let mut whole = Generator::new(9);
    let mut parts = [0.0; 6];
    split.fill_normal_f32(&mut parts[..3], 0.0, 1.0);
    split.fill_normal_f32(&mut parts[3..], 0.0, 1.0);
    let mut all = [0.0; 6];
    whole.fill_normal_f32(&mut all, 0.0, 1.0);
    assert_eq!(parts, all);
    assert_eq!(split, whole);
}

#[test]
fn bernoulli_masks_and_64_bit_integers() {
    for case in cases("bernoulli") {
        let mut g = seeded(&case);
        let p = case["p"].as_f64().unwrap();
        let mask: Vec<u64> = (0..length(&case)).map(|_| g.bernoulli(p).into()).collect();
        assert_eq!(mask, u64s(&case["values"]));
    }
    for case in cases("random_int64") {
        assert_eq!(
            seeded(&case).random_int64(),
            case["value"].as_i64().unwrap()
        );
    }
}

/// (name prefix, elements of the weight, fan-in, elements of the bias)
type Layer = (&'static str, usize, usize, usize);

#[test]
fn default_initial_weights() {
    let cnn: &[Layer] = &[
        ("conv1.", 32 * 9, 9, 32),
        ("conv2.", 64 * 32 * 9, 32 * 9, 64),
        ("fc1.", 128 * 9216, 9216, 128),
        ("fc2.", 10 * 128, 128, 10),
    ];
    for case in cases("init") {
        let layers: &[Layer] = match case["model"].as_str().unwrap() {
            "linear 37->11" => &[("", 37 * 11, 37, 11)],
            "conv2d 3->8 k3" => &[("", 8 * 27, 27, 8)],
            "conv2d 8->8 k3 groups 8 no bias" => &[("", 8 * 9, 9, 0)],
            "mnist cnn" => cnn,
            other => panic!("fixture has unknown model {other}"),
        };
        let mut g = seeded(&case);
        for &(prefix, weights, fan_in, biases) in layers {
            let mut weight = vec![0.0; weights];
            let mut bias = vec![0.0; biases];
            init::fill_weight(&mut g, &mut weight, fan_in);
            init::fill_bias(&mut g, &mut bias, fan_in);
            for (kind, values) in [("weight", &weight), ("bias", &bias)] {
                if values.is_empty() {
                    continue;
                }
                let name = format!("{prefix}{kind}");
                let got = sha256(values.iter().map(|v| v.to_le_bytes()));
                let want = case["sha256_f32le"][&name].as_str().unwrap();
                assert_eq!(got, want, "{} {name}", case["model"]);
            }
        }
    }
}
