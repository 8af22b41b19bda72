//! The manifest of a checkpoint (JSON).

use std::collections::BTreeMap;

use phalanx_nn::{ParamInfo, Params};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use phalanx_base::text::one_line;

/// Value of the field `format`.
const FORMAT: &str = "phalanx state";

/// Version of the format; only this one is read.
const VERSION: u32 = 1;

/// Far above any optimizer: Adam with AMSGrad has three.
const MAX_OPTIMIZER_BUFFERS: usize = 16;

/// Position of a training between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Epoch of the next step, from 0.
    pub epoch: u64,
    /// Number of samples of this epoch that all ranks together have taken.
    pub samples: u64,
    /// Number of steps of this epoch that were taken.
    pub step_in_epoch: u64,
    /// Number of steps of the training that were taken.
    pub step: u64,
}

/// Everything in a checkpoint except the values of tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub(super) format: String,
    pub(super) version: u32,
    /// Name of the data file next to the manifest.
    pub(super) file: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// Where the training continues.
    pub place: Place,
    /// Number of optimizer steps: fewer than the training's if ranks skipped some.
    pub optimizer_steps: u64,
    /// Number of steps that updated a parameter, by name. Parameters that are not listed
    /// were updated in all steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub optimizer_updates: BTreeMap<String, u64>,
    /// Names of the optimizer's buffers, in its order.
    pub optimizer_buffers: Vec<String>,
    /// Settings that a resumed training must share, as names and values.
    pub facts: BTreeMap<String, String>,
    /// Other values of the program: losses, accuracies.
    pub progress: serde_json::Value,
    /// Name of the first parameter or buffer with an infinite or NaN value, if there is one. Files from
    /// before this field do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_finite: Option<String>,
    /// SHA-256 of the manifest's text with [`NO_HASH`] in this place, to detect damage. It
    /// is the last field.
    pub(super) manifest_sha256: String,
}

/// What was written.
pub(super) struct Written {
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// Name of the model's first tensor with an infinite or NaN value.
    pub(super) not_finite: Option<String>,
}

/// Placeholder for the hash while it is computed.
const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

impl Manifest {
    /// A manifest without data file, facts and progress. `counts` are the optimizer's steps and those
    /// that updated each of the parameters `names`.
    pub(super) fn new<'a>(
        place: Place,
        counts: (u64, &[u64]),
        names: impl Iterator<Item = &'a str>,
        optimizer_buffers: Vec<String>,
    ) -> Manifest {
        let (steps, updates) = counts;
        let fewer = names.zip(updates).filter(|(_, count)| **count != steps);
        Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            file: String::new(),
            bytes: 0,
            sha256: String::new(),
            place,
            optimizer_steps: steps,
            optimizer_updates: fewer.map(|(name, n)| (name.to_owned(), *n)).collect(),
            optimizer_buffers,
            facts: BTreeMap::new(),
            progress: serde_json::Value::Null,
            not_finite: None,
            manifest_sha256: NO_HASH.to_owned(),
        }
    }

    /// The same for a data file of that name.
    pub(super) fn for_file(&self, file: &str, written: Written) -> Manifest {
        Manifest {
            file: file.to_owned(),
            bytes: written.bytes,
            sha256: written.sha256,
            not_finite: written.not_finite,
            ..self.clone()
        }
    }

    /// Number of steps that updated each of `params`, in their order.
    pub fn updates(&self, params: &Params) -> Vec<u64> {
        let updates = |info: &ParamInfo| self.optimizer_updates.get(&info.name);
        let all = params.infos().iter().map(updates);
        all.map(|n| n.copied().unwrap_or(self.optimizer_steps))
            .collect()
    }

    /// The content of the manifest's file, with its hash.
    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        let unsigned = Manifest {
            manifest_sha256: NO_HASH.to_owned(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&unsigned)?;
        let hash = hex::encode(Sha256::digest(&text));
        Ok(put_last(&text, NO_HASH, &hash).unwrap_or(text))
    }

    /// Parses a manifest's file. The error is the reason.
    pub(super) fn from_text(text: &[u8]) -> Result<Manifest, String> {
        let no_manifest = |why: &dyn std::fmt::Display| {
            format!("it is not a checkpoint manifest; expected complete JSON: {why}")
        };
        let text = std::str::from_utf8(text)
            .map_err(|e| no_manifest(&format_args!("byte {} is not text", e.valid_up_to())))?;
        let manifest: Manifest =
            serde_json::from_str(text).map_err(|e| no_manifest(&one_line(&e.to_string())))?;
        if manifest.format != FORMAT || manifest.version != VERSION {
            return Err(format!(
                "it is {:?} of version {}; expected {FORMAT:?} of version {VERSION}",
                manifest.format, manifest.version
            ));
        }
        // All ranks make room for each, before any is read.
        let buffers = &manifest.optimizer_buffers;
        let has_twice = (1..buffers.len()).any(|i| buffers[..i].contains(&buffers[i]));
        if buffers.len() > MAX_OPTIMIZER_BUFFERS || has_twice {
            return Err(format!(
                "it names {} buffers of the optimizer; expected at most {MAX_OPTIMIZER_BUFFERS}, each once",
                buffers.len()
            ));
        }
        let saved = &manifest.manifest_sha256;
        let found = put_last(text, saved, NO_HASH).map(|text| hex::encode(Sha256::digest(text)));
        match found {
            Some(found) if found == *saved => Ok(manifest),
            _ => Err(
                "it was damaged or edited: its text does not have the SHA-256 that it says".into(),
            ),
        }
    }
}

/// `text` with the last `old` replaced, if there is one.
fn put_last(text: &str, old: &str, new: &str) -> Option<String> {
    let (before, after) = text.rsplit_once(old)?;
    Some([before, new, after].concat())
}
