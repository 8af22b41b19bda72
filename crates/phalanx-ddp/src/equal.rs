//! Checks that the weights are the same on all ranks.

use phalanx_comm::ProcessGroup;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::parameters::Parameters;

/// How to keep buffers equal.
const EQUAL_BUFFERS: &str = if cfg!(feature = "nn") {
    "call DistributedDataParallel::sync_buffers after each step, with other Buffers than Never"
} else {
    "broadcast or average them after each step"
};

/// SHA-256 of all values of a model, parameters and buffers, as little-endian bytes. Does not communicate.
pub fn digest(params: &dyn Parameters) -> [u8; 32] {
    let values: Vec<&[f32]> = (0..params.tensors()).map(|i| params.values(i)).collect();
    hash_elems(&values)
}

/// Compares `digest` (any hash of the weights, such as [`digest`]) with all other ranks. Costs one all-gather of
/// 32 bytes per rank when the ranks agree.
///
/// *Blocks* until all ranks of the group call it.
///
/// # Errors
///
/// `Mismatch`, on every rank, naming the ranks that differ from rank 0 and the
/// first parameter or buffer in which the first of them does.
pub fn verify_equal(group: &ProcessGroup, params: &dyn Parameters, digest: [u8; 32]) -> Result<()> {
    let failed = |e| Error::comm_while("the ranks' weights could not be compared", e);
    let world = group.world_size();
    if world == 1 {
        return Ok(());
    }
    let mut all = vec![0u8; world * digest.len()];
    group.all_gather(&digest, &mut all).map_err(failed)?;
    let hashes: Vec<&[u8]> = all.chunks_exact(digest.len()).collect();
    let different: Vec<usize> = (1..world).filter(|&r| hashes[r] != hashes[0]).collect();
    let Some(&first) = different.first() else {
        return Ok(());
    };
    let mine: Vec<u8> = (0..params.tensors())
        .flat_map(|i| hash_elems(&[params.values(i)]))
        .collect();
    let mut all = vec![0u8; world * mine.len()];
    group.all_gather(&mine, &mut all).map_err(failed)?;
    let of = |rank: usize| all[rank * mine.len()..][..mine.len()].chunks_exact(32);
    let differs = of(0).zip(of(first)).position(|(a, b)| a != b);
    let name = differs.map_or("what is neither parameter nor buffer", |i| params.name(i));
    let (what, so) = match differs {
        // The first difference, so all parameters are equal.
        Some(i) if params.is_buffer(i) => ("buffers", EQUAL_BUFFERS),
        _ => ("weights", "the ranks no longer train the same model"),
    };
    let ranks: Vec<String> = different.iter().map(usize::to_string).collect();
    Err(Error::mismatch(format!(
        "the {what} of rank{} {} differ from rank 0's, first in {name}; {so}",
        if ranks.len() == 1 { "" } else { "s" },
        ranks.join(", ")
    )))
}

fn hash_elems(tensors: &[&[f32]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for value in tensors.iter().copied().flatten() {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().into()
}
