//! What each node publishes when it joins, and what must be equal on all.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::rank_list;
use crate::plan::UNNAMED;

/// What a node publishes when it joins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeInfo {
    /// How many nodes it expects, at most.
    pub nodes: usize,
    /// The fewest, where launchers may come and go.
    #[serde(default)]
    pub least: Option<usize>,
    /// Ranks that it starts.
    pub local_ranks: usize,
    /// The job's name.
    pub run_id: String,
    /// The program, which distinguishes jobs without a name.
    #[serde(default)]
    pub program: String,
    /// Host name.
    pub host: String,
    /// The address by which other nodes reach it.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The launcher's process id.
    pub pid: u32,
    /// On node 0, a free port for rank 0 (`MASTER_PORT`).
    pub master_port: Option<u16>,
    /// Restarts that it allows.
    #[serde(default)]
    pub max_restarts: u32,
    /// Whether launchers are numbered by arrival.
    #[serde(default)]
    pub by_arrival: bool,
    /// Whether ranks continue in place (`--elastic`).
    #[serde(default)]
    pub elastic: bool,
    /// For a launcher that joins a running attempt: the number of its first rank.
    #[serde(default)]
    pub joins_as: Option<usize>,
    /// The address of the store if this launcher becomes its host.
    #[serde(default)]
    pub standby: Option<SocketAddr>,
    /// Our version: launchers of different builds do not mix.
    pub version: String,
}

/// The ranks of a node.
pub(super) fn ranks_of(infos: &[NodeInfo], node: usize) -> Range<usize> {
    let Some(info) = infos.get(node) else {
        return 0..0;
    };
    let before = infos.iter().take(node).map(|info| info.local_ranks);
    let first = info.joins_as.unwrap_or_else(|| before.sum());
    first..first + info.local_ranks
}

/// `node 1 (host b, 10.0.0.2, ranks 2 and 3)`.
pub(super) fn name_of(infos: &[NodeInfo], node: usize) -> String {
    let Some(info) = infos.get(node) else {
        return format!("node {node}");
    };
    let ranks: Vec<usize> = ranks_of(infos, node).collect();
    let address = info.address.map_or(String::new(), |ip| format!(", {ip}"));
    format!(
        "node {node} (host {}{address}, {})",
        info.host,
        rank_list(&ranks)
    )
}

/// The error of a launcher with `--node-rank` and one without.
pub(super) fn mixed(mine: &NodeInfo, theirs: &NodeInfo) -> Error {
    let (with, without) = match mine.by_arrival {
        true => (theirs, mine),
        false => (mine, theirs),
    };
    Error::usage(format!(
        "the launcher on host {} (pid {}) has --node-rank and the one on host {} (pid {}) has none",
        with.host, with.pid, without.host, without.pid
    ))
    .note(
        "fix",
        "give --node-rank to all launchers of the job, or to none (with --rdzv-backend c10d)",
    )
}

/// Whether a launcher belongs to the job of the launcher `theirs`, of node 0 at the address `dial`.
pub(super) fn compare_jobs(mine: &NodeInfo, theirs: &NodeInfo, dial: &str) -> Result<()> {
    let [job, own] = if theirs.run_id != mine.run_id {
        [theirs, mine].map(|info| format!("--rdzv-id {}", info.run_id))
    } else if theirs.run_id == UNNAMED && theirs.program != mine.program {
        [theirs, mine].map(|info| format!("the program {}", info.program))
    } else {
        return Ok(());
    };
    Err(Error::usage(format!(
        "another job is at {dial}: node 0 (host {}) has {job}, this launcher (host {}) has {own}",
        theirs.host, mine.host
    ))
    .note("fix", "for another job, choose another --master-port")
    .note(
        "or",
        "for the same job, start the same program on all nodes (with `phalanx launch`, the same --rdzv-id)",
    ))
}

/// Two nodes must agree about the world before anything starts.
pub(super) fn compare(
    mine: &NodeInfo,
    me: Option<usize>,
    theirs: &NodeInfo,
    node: usize,
) -> Result<()> {
    if theirs.by_arrival != mine.by_arrival {
        return Err(mixed(mine, theirs));
    }
    let flags = |info: &NodeInfo| {
        let nodes = match info.least {
            Some(least) => format!("{least}:{}", info.nodes),
            None => info.nodes.to_string(),
        };
        let elastic = if info.elastic { "given" } else { "left out" };
        [
            ("--nnodes", nodes),
            ("--max-restarts", info.max_restarts.to_string()),
            ("--elastic", elastic.to_owned()),
            ("phalanx", info.version.clone()),
        ]
    };
    let mut pairs = flags(theirs).into_iter().zip(flags(mine));
    let Some(((what, their), (_, my))) = pairs.find(|(their, my)| their != my) else {
        return Ok(());
    };
    let own = me.map_or("this launcher".to_owned(), |me| format!("node {me}"));
    Err(Error::usage(format!(
        "node {node} (host {}) was started with {what} {their}, {own} (host {}) with {my}",
        theirs.host, mine.host
    ))
    .note(
        "fix",
        match what {
            "phalanx" => "install the same version on all hosts",
            _ => "give all launchers of the job the same flags, apart from --node-rank",
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> NodeInfo {
        NodeInfo {
            nodes: 2,
            least: None,
            local_ranks: 2,
            run_id: "none".into(),
            program: "x".into(),
            host: "a".into(),
            address: None,
            pid: 1,
            master_port: None,
            max_restarts: 0,
            by_arrival: false,
            elastic: false,
            joins_as: None,
            standby: None,
            version: "0.1.0".into(),
        }
    }

    #[test]
    fn numbers_are_typed_on_all_nodes_or_on_none() {
        let by_arrival = NodeInfo {
            by_arrival: true,
            host: "b".into(),
            ..info()
        };
        for (mine, theirs) in [(&info(), &by_arrival), (&by_arrival, &info())] {
            let error = compare(mine, Some(0), theirs, 1).unwrap_err();
            let want = "on host a (pid 1) has --node-rank and the one on host b (pid 1) has none";
            assert!(error.chain().contains(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn node_infos_must_agree() {
        let mine = info();
        assert!(
            compare(
                &mine,
                Some(0),
                &NodeInfo {
                    local_ranks: 7,
                    ..info()
                },
                1
            )
            .is_ok()
        );
        for (theirs, want) in [
            (NodeInfo { nodes: 3, ..info() }, "--nnodes 3"),
            (
                NodeInfo {
                    least: Some(1),
                    ..info()
                },
                "--nnodes 1:2",
            ),
            (
                NodeInfo {
                    max_restarts: 1,
                    ..info()
                },
                "--max-restarts 1",
            ),
            (
                NodeInfo {
                    elastic: false,
                    joins_as: None,
                    version: "9".into(),
                    ..info()
                },
                "phalanx 9",
            ),
        ] {
            let error = compare(&mine, Some(0), &theirs, 1).unwrap_err();
            assert!(error.chain().contains(want), "{}", error.chain());
            assert!(
                error.chain().starts_with("node 1 (host a)"),
                "{}",
                error.chain()
            );
        }
    }

    #[test]
    fn jobs_differ_by_their_names_or_else_by_their_programs() {
        let job = |run_id: &str, program: &str| NodeInfo {
            run_id: run_id.into(),
            program: program.into(),
            ..info()
        };
        let compared = |mine: (&str, &str), theirs: (&str, &str)| {
            compare_jobs(&job(mine.0, mine.1), &job(theirs.0, theirs.1), "h:29500")
        };
        compared(("none", "x"), ("none", "x")).unwrap();
        compared(("A", "python3"), ("A", "python3.11")).unwrap();
        for (mine, theirs, want) in [
            (
                ("B", "x"),
                ("A", "x"),
                "--rdzv-id A, this launcher (host a) has --rdzv-id B",
            ),
            (
                ("none", "x"),
                ("A", "x"),
                "--rdzv-id A, this launcher (host a) has --rdzv-id none",
            ),
            (
                ("none", "a.py"),
                ("none", "b.py"),
                "the program b.py, this launcher (host a) has the program a.py",
            ),
        ] {
            let error = compared(mine, theirs).unwrap_err();
            assert!(error.chain().contains(want), "{}", error.chain());
            assert!(
                error.chain().contains("another job is at h:29500"),
                "{}",
                error.chain()
            );
            assert_eq!(error.exit_code(), 2);
        }
    }
}
