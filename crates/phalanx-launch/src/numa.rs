//! Which processors each rank may use with `--numa-binding`.
//!
//! torchrun asks on which NUMA node a rank's GPU is. Ranks here compute on processors, so the local ranks are
//! spread over the NUMA nodes evenly and in order: with two NUMA nodes and four ranks, ranks 0 and 1 are on the
//! first one. Within a NUMA node the modes are torchrun's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::{Error, Result};

/// A mode of `--numa-binding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// All processors of the rank's NUMA node.
    Node,
    /// All processors of the NUMA nodes on the same socket.
    Socket,
    /// An equal share of the NUMA node's cores.
    Exclusive,
    /// The processors that share one last-level cache.
    CoreComplex,
}

impl Binding {
    /// The mode of that name.
    pub fn named(name: &str) -> Option<Binding> {
        Some(match name {
            "node" => Binding::Node,
            "socket" => Binding::Socket,
            "exclusive" => Binding::Exclusive,
            "core-complex" => Binding::CoreComplex,
            _ => return None,
        })
    }

    /// The processors of each of the local ranks of this host.
    ///
    /// # Errors
    /// Usage, when the system does not describe its processors, or there are too few cores.
    pub fn processors(self, local_ranks: usize) -> Result<Vec<Vec<usize>>> {
        let allowed = rustix::thread::sched_getaffinity(None);
        let allowed: BTreeSet<usize> = match allowed {
            Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
                .filter(|cpu| set.is_set(*cpu))
                .collect(),
            Err(_) => BTreeSet::new(),
        };
        let processors = read(Path::new("/sys/devices/system"), &allowed);
        if processors.is_empty() {
            return Err(Error::usage(
                "--numa-binding: this system does not describe its NUMA nodes in /sys/devices/system/node",
            )
            .note("fix", "leave it out, or put `taskset` or `numactl` before PROGRAM"));
        }
        self.share(&processors, local_ranks)
    }

    fn share(self, processors: &[Processor], local_ranks: usize) -> Result<Vec<Vec<usize>>> {
        let numa: BTreeSet<usize> = processors.iter().map(|p| p.numa).collect();
        let numa: Vec<usize> = numa.into_iter().collect();
        let home = |rank: usize| numa[rank * numa.len() / local_ranks];
        let each = |rank: usize| {
            let on_node = || processors.iter().filter(|p| p.numa == home(rank));
            // This rank's number among those of its NUMA node, and how many they are.
            let before = (0..rank).filter(|r| home(*r) == home(rank)).count();
            let here = (0..local_ranks).filter(|r| home(*r) == home(rank));
            let here = here.count();
            Ok(match self {
                Binding::Node => on_node().map(|p| p.number).collect(),
                Binding::Socket => {
                    let sockets: BTreeSet<usize> = on_node().map(|p| p.socket).collect();
                    let on_socket = processors.iter().filter(|p| sockets.contains(&p.socket));
                    on_socket.map(|p| p.number).collect()
                }
                Binding::Exclusive => {
                    let cores: Vec<Vec<usize>> = grouped(on_node(), |p| p.core);
                    if cores.len() < here {
                        return Err(Error::usage(format!(
                            "--numa-binding exclusive: NUMA node {} has {} cores for {here} ranks",
                            home(rank),
                            cores.len()
                        ))
                        .note("fix", "start fewer ranks, or use --numa-binding node"));
                    }
                    let (share, more) = (cores.len() / here, cores.len() % here);
                    let first = before * share + before.min(more);
                    let count = share + usize::from(before < more);
                    cores[first..first + count].concat()
                }
                Binding::CoreComplex => {
                    let mut caches = grouped(on_node(), |p| p.cache);
                    // Stable: among equals, the one with the lowest number comes first.
                    caches.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
                    caches[before % caches.len()].clone()
                }
            })
        };
        (0..local_ranks).map(each).collect()
    }
}

/// One processor that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Processor {
    number: usize,
    numa: usize,
    socket: usize,
    /// The lowest processor of the same core.
    core: usize,
    /// The lowest processor that shares the last-level cache.
    cache: usize,
}

fn grouped<'a>(
    processors: impl Iterator<Item = &'a Processor>,
    key: impl Fn(&Processor) -> usize,
) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for processor in processors {
        let group = groups.entry(key(processor)).or_default();
        group.push(processor.number);
    }
    groups.into_values().collect()
}

/// The allowed processors, by number; empty where `system` does not describe them.
fn read(system: &Path, allowed: &BTreeSet<usize>) -> Vec<Processor> {
    let text = |path: &str| std::fs::read_to_string(system.join(path)).ok();
    let list = |path: &str| text(path).map(|text| numbers(&text)).unwrap_or_default();
    let mut found = BTreeMap::new();
    for numa in list("node/online") {
        for number in list(&format!("node/node{numa}/cpulist")) {
            if !allowed.contains(&number) {
                continue;
            }
            let cpu = format!("cpu/cpu{number}");
            let lowest = |path: &str| list(path).first().copied().unwrap_or(number);
            let socket = text(&format!("{cpu}/topology/physical_package_id"));
            let cache = (0..8)
                .filter_map(|index| {
                    let cache = format!("{cpu}/cache/index{index}");
                    let kind = text(&format!("{cache}/type"))?;
                    let level: usize = text(&format!("{cache}/level"))?.trim().parse().ok()?;
                    let holds_data = matches!(kind.trim(), "Unified" | "Data");
                    holds_data.then(|| (level, lowest(&format!("{cache}/shared_cpu_list"))))
                })
                .max_by_key(|(level, _)| *level);
            found.insert(
                number,
                Processor {
                    number,
                    numa,
                    socket: socket.and_then(|s| s.trim().parse().ok()).unwrap_or(0),
                    core: lowest(&format!("{cpu}/topology/thread_siblings_list")),
                    cache: cache.map_or(number, |(_, lowest)| lowest),
                },
            );
        }
    }
    found.into_values().collect()
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

    /// Two sockets with one NUMA node of four cores each, two threads a core, two caches a socket.
    fn machine() -> Vec<Processor> {
        let processor = |number: usize| {
            let core = number % 8;
            Processor {
                number,
                numa: core / 4,
                socket: core / 4,
                core,
                cache: core / 2 * 2,
            }
        };
        (0..16).map(processor).collect()
    }

    #[test]
    fn ranks_are_spread_over_numa_nodes_in_order() {
        let share = |binding: Binding, ranks| binding.share(&machine(), ranks).unwrap();
        let (first, second) = (
            vec![0, 1, 2, 3, 8, 9, 10, 11],
            vec![4, 5, 6, 7, 12, 13, 14, 15],
        );
        for binding in [Binding::Node, Binding::Socket] {
            assert_eq!(
                share(binding, 3),
                [first.clone(), first.clone(), second.clone()]
            );
            assert_eq!(share(binding, 1)[0], first);
        }
        assert_eq!(
            share(Binding::Exclusive, 4),
            [
                vec![0, 8, 1, 9],
                vec![2, 10, 3, 11],
                vec![4, 12, 5, 13],
                vec![6, 14, 7, 15]
            ]
        );
        // Cores that do not divide evenly go to the first ranks.
        let shares = share(Binding::Exclusive, 6);
        let sizes: Vec<usize> = shares.iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 2, 2, 4, 2, 2]);
        assert_eq!(
            share(Binding::CoreComplex, 6)[..3],
            [vec![0, 1, 8, 9], vec![2, 3, 10, 11], vec![0, 1, 8, 9]]
        );
        let error = Binding::Exclusive.share(&machine(), 9).unwrap_err();
        assert!(
            error.chain().contains("4 cores for 5 ranks"),
            "{}",
            error.chain()
        );
    }

    #[test]
    fn a_socket_has_all_its_numa_nodes() {
        let machine: Vec<Processor> = machine()
            .into_iter()
            .map(|p| Processor { socket: 0, ..p })
            .collect();
        let all: Vec<usize> = (0..16).collect();
        assert_eq!(
            Binding::Socket.share(&machine, 2).unwrap(),
            [all.clone(), all]
        );
    }

    #[test]
    fn sys_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("node/online", "0-1\n");
        write("node/node0/cpulist", "0-1\n");
        write("node/node1/cpulist", "2,3\n");
        for cpu in 0..4 {
            write(
                &format!("cpu/cpu{cpu}/topology/physical_package_id"),
                &format!("{}\n", cpu / 2),
            );
            write(
                &format!("cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{cpu}\n"),
            );
            for (index, level, kind, shared) in [
                (0, 1, "Data", cpu.to_string()),
                (1, 1, "Instruction", cpu.to_string()),
                (
                    2,
                    3,
                    "Unified",
                    if cpu < 2 { "0-1" } else { "2-3" }.to_owned(),
                ),
            ] {
                let cache = format!("cpu/cpu{cpu}/cache/index{index}");
                write(&format!("{cache}/level"), &format!("{level}\n"));
                write(&format!("{cache}/type"), kind);
                write(&format!("{cache}/shared_cpu_list"), &shared);
            }
        }
        let all = BTreeSet::from([0, 1, 3]);
        let got = read(dir.path(), &all);
        let want = |number, numa, core, cache| Processor {
            number,
            numa,
            socket: numa,
            core,
            cache,
        };
        assert_eq!(got, [want(0, 0, 0, 0), want(1, 0, 1, 0), want(3, 1, 3, 2)]);
        assert!(read(&dir.path().join("none"), &all).is_empty());
    }
}
