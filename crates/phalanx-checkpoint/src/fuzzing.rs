//! Fuzz targets for the readers of weights and checkpoints. The tests here run them on garbled seeds.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use phalanx_nn::{Init, Layout, Params, Scope, Seed};

use crate as checkpoint;
use crate::AdapterConfig;
use crate::pth::{self, DType, PthFile, Saved};
use crate::state;

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[
    ("checkpoint_safetensors", safetensors, safetensors_seeds),
    ("checkpoint_checkpoint", state::fuzz, state::fuzz_seeds),
    ("checkpoint_pth_archive", pth_archive, pth_seeds),
    ("checkpoint_pth_pickle", pth_pickle, pickle_seeds),
    ("checkpoint_adapter", adapter, adapter_seeds),
];

/// A memory file with these bytes, and a path to it.
fn file(bytes: &[u8]) -> Option<(File, PathBuf)> {
    let mut file = tempfile::tempfile().ok()?;
    file.write_all(bytes).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    Some((file, path))
}

pub(crate) fn model() -> Option<Params> {
    let mut scope = Scope::new(Seed(1));
    let mut fc = scope.enter("fc");
    fc.param(
        "weight",
        &[2, 3],
        Layout::Same,
        Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
    );
    scope.enter("norm").buffer("running_mean", &[2], 0.0);
    scope.build().ok()
}

/// A file is either valid for this model, or the model is unchanged.
fn safetensors(data: &[u8]) {
    let (Some(mut params), Some((_file, path))) = (model(), file(data)) else {
        return;
    };
    let before = checkpoint::weights_sha256(&params);
    if checkpoint::load_params(&path, &mut params).is_err() {
        assert_eq!(checkpoint::weights_sha256(&params), before);
    }
}

fn safetensors_seeds() -> Vec<Vec<u8>> {
    let saved = || -> Option<Vec<u8>> {
        let folder = tempfile::tempdir().ok()?;
        let path: &Path = &folder.path().join("seed");
        let notes = [("epoch".to_owned(), "3".to_owned())].into();
        checkpoint::save_params(path, &model()?, &notes).ok()?;
        std::fs::read(path).ok()
    };
    let header = br#"{"fc.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let mut half = (header.len() as u64).to_le_bytes().to_vec();
    half.extend_from_slice(header);
    half.extend([0; 24]);
    saved().into_iter().chain([half]).collect()
}

/// Reads a file and all its tensors.
fn read_pth(path: &Path) {
    let Ok(file) = PthFile::read(path) else {
        return;
    };
    for (_, tensor) in file.state_dict().into_iter().flatten() {
        assert_eq!(tensor.to_f32().len(), tensor.len());
    }
    if let Ok((tensors, _)) = checkpoint::read_tensors(path) {
        let bytes: usize = tensors.iter().map(|t| t.bytes.len()).sum();
        assert!(bytes <= 16 << 20);
    }
    if let Some(mut params) = model() {
        let before = checkpoint::weights_sha256(&params);
        if checkpoint::load_params(path, &mut params).is_err() {
            assert_eq!(checkpoint::weights_sha256(&params), before);
        }
    }
}

fn pth_archive(data: &[u8]) {
    if let Some((_file, path)) = file(data) {
        read_pth(&path);
    }
}

/// `data` as the pickle in a valid archive, since the checksums would stop it otherwise.
/// The archive has a storage of six numbers.
fn pth_pickle(data: &[u8]) {
    let mut whole = Vec::new();
    if pth::write_archive(&mut whole, "a", data, 1, |_| Ok([1; 24])).is_ok() {
        pth_archive(&whole);
    }
}

/// The configuration of an adapter that is accepted can be written and read again.
fn adapter(data: &[u8]) {
    let parse = |text: &[u8]| AdapterConfig::parse("adapter_config.json".as_ref(), text);
    if let Ok(config) = parse(data) {
        let text = serde_json::to_vec(&config).unwrap_or_default();
        assert!(parse(&text).is_ok_and(|again| again.r == config.r));
    }
}

fn adapter_seeds() -> Vec<Vec<u8>> {
    let seed = br#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none", "fan_in_fan_out": true,
        "target_modules": ["c_attn", "c_proj"], "use_dora": false, "rank_pattern": {}, "task_type": null}"#;
    vec![seed.to_vec()]
}

fn pth_seeds() -> Vec<Vec<u8>> {
    let tensors = pth_tensors();
    let mut whole = Vec::new();
    let written = pth::write_state_dict(&mut whole, "seed", &tensors);
    written.map(|()| whole).into_iter().collect()
}

fn pickle_seeds() -> Vec<Vec<u8>> {
    let views = b"\x80\x02}q\x00(X\x01\0\0\0aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\0\0\0storage\
        ctorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tq\x03QK\x01K\x02K\x02\x86K\x01K\x02\x86\x89\
        ccollections\nOrderedDict\n)RtRX\x01\0\0\0b]q\x04(K\x01M\x02\x03J\x01\0\0\0\x8a\x01\xffG?\xf0\0\0\0\0\0\0\
        N\x88h\x01ej\x04\0\0\0\x85a\x87s.";
    vec![views.to_vec(), pth::pickle(&[pth_tensors()[0].head()])]
}

/// The parameters of [`model`].
fn pth_tensors() -> Vec<Saved> {
    let saved = |name: &str, shape: &[usize]| Saved {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        bytes: vec![0; 4 * shape.iter().product::<usize>()],
    };
    vec![
        saved("fc.weight", &[2, 3]),
        saved("norm.running_mean", &[2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 1500, run);
        }
    }

    #[test]
    fn seeds_are_accepted() {
        let (_file, path) = file(&safetensors_seeds()[0]).unwrap();
        checkpoint::load_params(&path, &mut model().unwrap()).unwrap();
        let (_file, path) = file(&pth_seeds()[0]).unwrap();
        checkpoint::load_params(&path, &mut model().unwrap()).unwrap();
    }
}
