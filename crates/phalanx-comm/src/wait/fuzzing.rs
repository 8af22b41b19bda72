//! Fuzzes the core descriptions that other ranks send.

use super::topology::{Share, Topology};

/// Lines, one per rank: computing with every accepted line must not panic.
pub(crate) fn cores(data: &[u8]) {
    let text = String::from_utf8_lossy(&data[..data.len().min(1024)]);
    let shares: Vec<Share> = text
        .lines()
        .filter_map(|line| Share::decode(line).ok())
        .collect();
    for (mine, share) in shares.iter().enumerate() {
        assert_eq!(Share::decode(&share.encode()).as_ref(), Ok(share));
        let topology = Topology::of_host(mine, &shares);
        let _ = topology.fits(true);
        assert!(!topology.to_string().is_empty());
    }
}

pub(crate) fn cores_seeds() -> Vec<Vec<u8>> {
    [
        "2 threads on 0-3,8 quota 2\n1 threads on 0-1\n",
        "1 threads on 0\n65536 threads on 65535 quota 1\n",
        "7 threads on 1,3,5,7",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
