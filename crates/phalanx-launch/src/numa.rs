//! Which processors each rank may use with `--numa-binding node`.
//!
//! torchrun asks on which NUMA node a rank's GPU is. Ranks here compute on processors, so the local ranks are
//! spread over the NUMA nodes evenly and in order: with two NUMA nodes and four ranks, ranks 0 and 1 are on the
//! first one.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Error, Result};

/// The processors of each of the local ranks of this host: all of the rank's NUMA node.
///
/// # Errors
/// Usage, when the system does not describe its processors.
pub fn processors(local_ranks: usize) -> Result<Vec<Vec<usize>>> {
    let allowed = rustix::thread::sched_getaffinity(None);
    let allowed: BTreeSet<usize> = match allowed {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect(),
        Err(_) => BTreeSet::new(),
    };
    let nodes = read(Path::new("/sys/devices/system/node"), &allowed);
    if nodes.is_empty() {
        return Err(Error::usage(
            "--numa-binding: this system does not describe its NUMA nodes in /sys/devices/system/node",
        )
        .note("fix", "leave it out, or put `taskset` or `numactl` before PROGRAM"));
    }
    Ok(share(&nodes, local_ranks))
}

fn share(nodes: &[Vec<usize>], local_ranks: usize) -> Vec<Vec<usize>> {
    let node = |rank: usize| nodes[rank * nodes.len() / local_ranks].clone();
    (0..local_ranks).map(node).collect()
}

/// The allowed processors of each NUMA node that has some; empty where `system` does not describe them.
fn read(system: &Path, allowed: &BTreeSet<usize>) -> Vec<Vec<usize>> {
    let list = |path: &str| {
        let text = std::fs::read_to_string(system.join(path));
        text.map(|text| numbers(&text)).unwrap_or_default()
    };
    let nodes = list("online").into_iter().map(|node| {
        let mut processors = list(&format!("node{node}/cpulist"));
        processors.retain(|number| allowed.contains(number));
        processors
    });
    nodes.filter(|processors| !processors.is_empty()).collect()
}

/// The numbers of `0-2,4`, as `/sys` writes them.
fn numbers(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // A host has fewer; a broken file must not fill the memory.
        (last < 1 << 16).then_some(first..=last)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_spread_over_numa_nodes_in_order() {
        let nodes = [vec![0, 1, 4, 5], vec![2, 3, 6, 7]];
        let of = |ranks: &[usize]| ranks.iter().map(|r| nodes[*r].clone()).collect::<Vec<_>>();
        assert_eq!(share(&nodes, 1), of(&[0]));
        assert_eq!(share(&nodes, 3), of(&[0, 0, 1]));
        assert_eq!(share(&nodes, 4), of(&[0, 0, 1, 1]));
    }

    #[test]
    fn sys_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("online", "0-2\n");
        write("node0/cpulist", "0-1\n");
        write("node1/cpulist", "2,3\n");
        // Memory without processors.
        write("node2/cpulist", "\n");
        let allowed = BTreeSet::from([0, 1, 3]);
        assert_eq!(read(dir.path(), &allowed), [vec![0, 1], vec![3]]);
        assert!(read(&dir.path().join("none"), &allowed).is_empty());
    }
}
