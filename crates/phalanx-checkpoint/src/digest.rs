//! SHA-256 of the optimizer's state and of metrics, to compare runs bit for bit.

use phalanx_base::{Error, Result};
use phalanx_nn::ParamInfo;
use sha2::digest::common::hazmat::{SerializableState, SerializedState};
use sha2::{Digest, Sha256};

use crate::state::OptimizerState;
use crate::weights::{TensorId, little_endian};

/// SHA-256 of an optimizer's state, in hexadecimal: the number of steps (u64), the number
/// of updates of each parameter (u64) unless all are equal to it, then name and float32
/// values of each buffer, in the optimizer's order and memory layout, little-endian.
pub fn optimizer_sha256<'a>(optimizer: impl Into<OptimizerState<'a>>) -> String {
    let state = optimizer.into();
    let mut hash = hash_of_counts(&state);
    for (name, values) in &state.buffers {
        hash.update(name.as_bytes());
        for value in values.iter() {
            hash.update(value.to_le_bytes());
        }
    }
    hex::encode(hash.finalize())
}

/// As [`optimizer_sha256`], of an optimizer of `params` whose buffers `values` returns a parameter at a time: in full,
/// and in PyTorch's order. Of `state` only the counts and the names of its buffers are used.
///
/// # Errors
///
/// Those of `values`; `Internal` when the number of values does not match a parameter's shape.
pub fn optimizer_sha256_with(
    state: &OptimizerState<'_>,
    params: &[ParamInfo],
    mut values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
) -> Result<String> {
    let mut hash = hash_of_counts(state);
    for (buffer, (name, _)) in state.buffers.iter().enumerate() {
        hash.update(name.as_bytes());
        for (param, info) in params.iter().enumerate() {
            let region = info.region(&values(TensorId::State { buffer, param })?);
            let region = region.map_err(|e| Error::internal(e.to_string()).with_source(e))?;
            hash.update(little_endian(&region));
        }
    }
    Ok(hex::encode(hash.finalize()))
}

fn hash_of_counts(state: &OptimizerState<'_>) -> Sha256 {
    let mut hash = Sha256::new();
    hash.update(state.steps.to_le_bytes());
    if state.updates.iter().any(|count| *count != state.steps) {
        for count in state.updates.iter() {
            hash.update(count.to_le_bytes());
        }
    }
    hash
}

/// SHA-256 of a sequence of metrics.
#[derive(Clone, Debug, Default)]
pub struct MetricsDigest {
    hash: Sha256,
}

impl MetricsDigest {
    /// An empty sequence.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value with all its 64 bits.
    pub fn add(&mut self, value: f64) {
        self.hash.update(value.to_le_bytes());
    }

    /// The state of the hash, in hexadecimal: as long for any number of values.
    pub fn state(&self) -> String {
        hex::encode(self.hash.serialize())
    }

    /// Continues from `state`, as [`state`](Self::state) returned it; `None` when it is no state.
    pub fn from_state(state: &str) -> Option<Self> {
        let mut bytes = SerializedState::<Sha256>::default();
        hex::decode_to_slice(state, &mut bytes).ok()?;
        let hash = Sha256::deserialize(&bytes).ok()?;
        Some(MetricsDigest { hash })
    }

    /// The digest of all values so far, in hexadecimal.
    pub fn sha256(&self) -> String {
        hex::encode(self.hash.clone().finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::optim::{Optimizer as _, Sgd};
    use phalanx_nn::{Scope, Seed, layers::Linear};

    #[test]
    fn every_bit_of_a_metric_counts_and_so_does_the_order() {
        let digest = |values: &[f64]| {
            let mut digest = MetricsDigest::new();
            values.iter().for_each(|v| digest.add(*v));
            digest.sha256()
        };
        assert_eq!(digest(&[1.0, 2.0]), digest(&[1.0, 2.0]));
        assert_ne!(digest(&[1.0, 2.0]), digest(&[2.0, 1.0]));
        assert_ne!(digest(&[1.0]), digest(&[1.0 + f64::EPSILON]));
        // sha256 of nothing
        assert!(digest(&[]).starts_with("e3b0c44298fc1c14"));
    }

    #[test]
    fn a_digest_goes_on_from_its_state_at_every_length() {
        let (mut whole, mut length) = (MetricsDigest::new(), None);
        for value in 0..40 {
            let state = whole.state();
            assert_eq!(*length.get_or_insert(state.len()), state.len());
            whole.add(f64::from(value));
            let mut resumed = MetricsDigest::from_state(&state).expect("a state");
            resumed.add(f64::from(value));
            assert_eq!(resumed.sha256(), whole.sha256());
        }
        // `sha256sum` of 40 values.
        let all: Vec<u8> = (0..40).flat_map(|v| f64::from(v).to_le_bytes()).collect();
        assert_eq!(whole.sha256(), hex::encode(Sha256::digest(all)));
        let state = whole.state();
        let overlong = format!("{}ff{}", &state[..80], &state[82..]);
        for wrong in ["", "0", &state[1..], &state.replace('0', "g"), &overlong] {
            assert!(MetricsDigest::from_state(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn steps_and_state_of_an_optimizer_count() {
        let mut scope = Scope::new(Seed(0));
        Linear::new(scope.enter("only"), 2, 2);
        let params = scope.build().expect("model builds");
        let elems = params.flat().len();
        let mut sgd = Sgd::new(&params, 0.1).momentum(0.9);
        let mut seen = vec![optimizer_sha256(&sgd)];
        let cases = [
            (1, [1, 1], 0.0f32),
            (2, [2, 2], 0.0),
            (2, [2, 2], -0.0),
            (2, [1, 2], 0.0),
            (2, [2, 1], 0.0),
        ];
        for (steps, updates, value) in cases {
            let buffer = vec![value; elems];
            sgd.restore(steps, &updates, &[("momentum_buffer", &buffer)])
                .expect("restore");
            let digest = optimizer_sha256(&sgd);
            assert!(!seen.contains(&digest));
            seen.push(digest);
        }
    }
}
