//! Fuzz target: a checkpoint, as manifest, zero byte and data file.

use std::collections::BTreeMap;
use std::fs;

use phalanx_nn::optim::{Optimizer, Sgd};
use sha2::{Digest, Sha256};

use super::{Folder, Manifest, Place, Snapshot, State};
use crate::fuzzing::model;
use crate::weights::weights_sha256;

/// Reads it as it is, and with correct hashes, which would otherwise stop it.
pub(crate) fn fuzz(bytes: &[u8]) {
    let (Some(mut params), Ok(folder)) = (model(), tempfile::tempdir()) else {
        return;
    };
    let cut = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    let (text, data) = (&bytes[..cut], bytes.get(cut + 1..).unwrap_or_default());
    let path = folder.path().join("step-000000001.json");
    if fs::write(&path, text).is_err() || fs::write(folder.path().join("data"), data).is_err() {
        return;
    }
    let _ = State::load(&path);
    let Ok(mut manifest) = serde_json::from_slice::<Manifest>(text) else {
        return;
    };
    manifest.bytes = data.len() as u64;
    manifest.sha256 = hex::encode(Sha256::digest(data));
    let signed = manifest.to_text().map(|text| fs::write(&path, text));
    let (Ok(Ok(())), Ok(state)) = (signed, State::load(&path)) else {
        return;
    };
    let before = weights_sha256(&params);
    if state.restore_params(&mut params).is_err() {
        assert_eq!(weights_sha256(&params), before);
    }
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    if state.restore_optimizer(&params, &mut optimizer).is_err() {
        assert_eq!(optimizer.steps(), 0);
    }
}

pub(crate) fn fuzz_seeds() -> Vec<Vec<u8>> {
    let saved = || -> Option<Vec<u8>> {
        let params = model()?;
        let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
        let grads = phalanx_nn::Grads::like(&params);
        let mut stepped = params.clone();
        optimizer.step(&mut stepped, &grads).ok()?;
        let place = Place {
            step: 1,
            ..Place::default()
        };
        let facts = BTreeMap::from([("--seed".to_owned(), "1".to_owned())]);
        let progress = serde_json::json!({"losses": [0.5, 1]});
        let snapshot = Snapshot::take(&stepped, &optimizer, place, facts, progress);
        let folder = tempfile::tempdir().ok()?;
        let path = Folder::new(folder.path(), 1).save(&snapshot).ok()?.path;
        let text = fs::read_to_string(&path).ok()?;
        let data = fs::read(path.with_extension("safetensors")).ok()?;
        let text = text.replace("step-000000001.safetensors", "data");
        Some([text.as_bytes(), &[0], &data].concat())
    };
    saved().into_iter().collect()
}

#[test]
fn the_seed_is_restored_in_whole() {
    let seed = fuzz_seeds().remove(0);
    let cut = seed.iter().position(|b| *b == 0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step-000000001.json");
    let manifest: Manifest = serde_json::from_slice(&seed[..cut]).unwrap();
    fs::write(&path, manifest.to_text().unwrap()).unwrap();
    fs::write(folder.path().join("data"), &seed[cut + 1..]).unwrap();
    let state = State::load(&path).unwrap();
    let mut params = model().unwrap();
    state.restore_params(&mut params).unwrap();
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    state.restore_optimizer(&params, &mut optimizer).unwrap();
    assert_eq!(optimizer.steps(), 1);
}
