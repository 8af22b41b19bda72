//! The variables each rank gets: torchrun's names and relations
//! (`tests/fixtures/torchrun.json`), and some of our own.
//!
//! One value differs from torchrun's: `TORCHELASTIC_USE_AGENT_STORE` is `False`.
//! torchrun hosts PyTorch's store at `MASTER_ADDR:MASTER_PORT`, and `True` informs
//! `init_process_group` of it. Our store speaks another protocol and is where
//! `PHALANX_STORE` says; `MASTER_PORT` is a port of node 0 that is kept free, for
//! rank 0 of a PyTorch program to host PyTorch's store at.

use std::collections::BTreeMap;
use std::ffi::OsString;

use phalanx_comm::PortRange;
use phalanx_process::error_file::ERROR_FILE_VARIABLE;

/// Says where the launcher hosts the store, so that rank 0 connects like
/// everybody else.
pub const STORE_VARIABLE: &str = "PHALANX_STORE";
/// Names the file that says where the store is, once it has moved.
pub const STORE_FILE_VARIABLE: &str = "PHALANX_STORE_FILE";
/// Names the file with the job token.
pub const TOKEN_FILE_VARIABLE: &str = "PHALANX_TOKEN_FILE";
/// When the command was typed, in nanoseconds since 1970, for the ranks that it starts.
pub const STARTED_VARIABLE: &str = "PHALANX_STARTED_NS";
/// Where the launcher does not end the job when a rank is lost, as the others continue without it: the number of ranks that the
/// job began with; 0 elsewhere.
pub const ELASTIC_VARIABLE: &str = "PHALANX_ELASTIC";
/// Names the file with the arguments of a rank of this program, where its launcher has read them from a configuration.
pub const ARGUMENTS_FILE_VARIABLE: &str = "PHALANX_ARGUMENTS_FILE";
/// The number of a process that is to join the others, among all that the job has started.
pub const JOIN_VARIABLE: &str = "PHALANX_JOIN";
/// Where it is set, the Python package `phalanx` takes the place of Gloo as `import torch` ends.
pub const AS_GLOO_VARIABLE: &str = "PHALANX_AS_GLOO";
/// Whether PyTorch's store is there already, which rank 0 would host otherwise.
const AGENT_STORE_VARIABLE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// The address this node's ranks listen on, when there are several nodes.
pub const BIND_VARIABLE: &str = "PHALANX_BIND";
/// The ports that this node's ranks listen on, when there are several nodes.
pub const PORTS_VARIABLE: &str = "PHALANX_PORT_RANGE";

/// What the variables say that is the same for all ranks of one launcher.
#[derive(Clone, Debug)]
pub struct LauncherVariables {
    /// This node's number.
    pub node_rank: usize,
    /// Number of nodes.
    pub nodes: usize,
    /// Ranks on nodes before this one.
    pub first_rank: usize,
    /// Ranks on this node.
    pub local_ranks: usize,
    /// Ranks in all.
    pub world: usize,
    /// The role's name.
    pub role: String,
    /// The store, as the ranks should dial it.
    pub store: String,
    /// The file that says where it has moved, if it may move.
    pub store_file: Option<OsString>,
    /// The host of rank 0.
    pub master_addr: String,
    /// A port there that is left to the program.
    pub master_port: u16,
    /// The job's name.
    pub run_id: String,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Where ranks listen, when there are several nodes.
    pub bind: Option<String>,
    /// On which ports they listen, when there are several nodes.
    pub ports: Option<PortRange>,
    /// The signals that end the job.
    pub signals: String,
    /// OMP_NUM_THREADS is set outside and stays.
    pub threads_set: bool,
    /// Threads of rayon, with which candle and Burn compute; `None` leaves them as they are.
    pub rayon_threads: Option<usize>,
    /// Ranks continue without those that are lost.
    pub elastic: bool,
}

/// What they say that differs between ranks and attempts.
#[derive(Clone, Debug)]
pub struct RankVariables {
    /// Number of the rank on this node.
    pub local_rank: usize,
    /// Restarts so far.
    pub restarts: u32,
    /// Where the rank may leave a report of its failure.
    pub error_file: OsString,
    /// Where it reads the token.
    pub token_file: OsString,
    /// Its number, if it is to join the others.
    pub joins_as: Option<usize>,
}

/// The variables to set for one rank.
pub fn variables(
    shared: &LauncherVariables,
    own: &RankVariables,
) -> BTreeMap<&'static str, OsString> {
    let rank = shared.first_rank + own.local_rank;
    // Ranks of a node that has joined later.
    let world = shared.world.max(rank + 1);
    let number = |n: usize| OsString::from(n.to_string());
    let mut set = BTreeMap::from([
        ("RANK", number(rank)),
        ("LOCAL_RANK", number(own.local_rank)),
        ("GROUP_RANK", number(shared.node_rank)),
        ("ROLE_RANK", number(rank)),
        ("ROLE_NAME", OsString::from(&shared.role)),
        ("WORLD_SIZE", number(world)),
        ("LOCAL_WORLD_SIZE", number(shared.local_ranks)),
        ("GROUP_WORLD_SIZE", number(shared.nodes)),
        ("ROLE_WORLD_SIZE", number(world)),
        ("MASTER_ADDR", OsString::from(&shared.master_addr)),
        ("MASTER_PORT", number(usize::from(shared.master_port))),
        (
            "TORCHELASTIC_RESTART_COUNT",
            OsString::from(own.restarts.to_string()),
        ),
        (
            "TORCHELASTIC_MAX_RESTARTS",
            OsString::from(shared.max_restarts.to_string()),
        ),
        ("TORCHELASTIC_RUN_ID", OsString::from(&shared.run_id)),
        (AGENT_STORE_VARIABLE, "False".into()),
        (ERROR_FILE_VARIABLE, own.error_file.clone()),
        (
            "TORCHELASTIC_SIGNALS_TO_HANDLE",
            OsString::from(&shared.signals),
        ),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".into()),
        (STORE_VARIABLE, OsString::from(&shared.store)),
        (TOKEN_FILE_VARIABLE, own.token_file.clone()),
    ]);
    if let Some(bind) = &shared.bind {
        set.insert(BIND_VARIABLE, OsString::from(bind));
    }
    // Also where an outer job has set them.
    set.insert(
        STORE_FILE_VARIABLE,
        shared.store_file.clone().unwrap_or_default(),
    );
    let elastic = if shared.elastic { shared.world } else { 0 };
    set.insert(ELASTIC_VARIABLE, number(elastic));
    set.insert(JOIN_VARIABLE, own.joins_as.map(number).unwrap_or_default());
    if let Some(ports) = shared.ports {
        set.insert(PORTS_VARIABLE, ports.to_string().into());
    }
    if !shared.threads_set && shared.local_ranks > 1 {
        set.insert("OMP_NUM_THREADS", "1".into());
    }
    if let Some(threads) = shared.rayon_threads {
        set.insert("RAYON_NUM_THREADS", number(threads));
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torchrun::TorchrunOptions;
    use std::collections::BTreeSet;

    const FIXTURE: &str = include_str!("../tests/fixtures/torchrun.json");

    /// Ours that torchrun does not know.
    const OWN: [&str; 8] = [
        STORE_FILE_VARIABLE,
        ELASTIC_VARIABLE,
        JOIN_VARIABLE,
        STORE_VARIABLE,
        TOKEN_FILE_VARIABLE,
        BIND_VARIABLE,
        PORTS_VARIABLE,
        "RAYON_NUM_THREADS",
    ];

    /// Ranks a node, restart name, for each launch of the fixture.
    fn launches() -> Vec<(&'static str, Vec<usize>)> {
        vec![
            ("one node, 2 processes", vec![2]),
            ("one node, 1 process", vec![1]),
            (
                "one node, 1 process, --master-port given (static rendezvous)",
                vec![1],
            ),
            ("two nodes x 2, static rendezvous", vec![2, 2]),
            ("two nodes, 2 + 1 processes, static rendezvous", vec![2, 1]),
            ("two nodes x 1, c10d rendezvous", vec![1, 1]),
        ]
    }

    #[test]
    fn names_and_relations_are_torchruns() {
        let fixture: serde_json::Value = serde_json::from_str(FIXTURE).unwrap();
        for (name, nodes) in launches() {
            let workers = fixture[name].as_array().unwrap();
            let world: usize = nodes.iter().sum();
            assert_eq!(workers.len(), world, "{name}");
            let mut index = 0;
            for (node_rank, local_ranks) in nodes.iter().enumerate() {
                for local_rank in 0..*local_ranks {
                    let mut want: BTreeMap<String, String> =
                        serde_json::from_value(workers[index].clone()).unwrap();
                    // Ours is no store that PyTorch could talk to.
                    let theirs = want.insert(AGENT_STORE_VARIABLE.into(), "False".into());
                    assert_eq!(theirs.as_deref(), Some("True"));
                    let shared = LauncherVariables {
                        node_rank,
                        nodes: nodes.len(),
                        first_rank: nodes[..node_rank].iter().sum(),
                        local_ranks: *local_ranks,
                        world,
                        role: "default".into(),
                        store: "127.0.0.1:4".into(),
                        store_file: None,
                        master_addr: want["MASTER_ADDR"].clone(),
                        master_port: want["MASTER_PORT"].parse().unwrap(),
                        run_id: want["TORCHELASTIC_RUN_ID"].clone(),
                        max_restarts: 0,
                        bind: (nodes.len() > 1).then(|| "127.0.0.1".into()),
                        ports: PortRange::new(1, 2).ok(),
                        signals: TorchrunOptions::default().signal_names(),
                        threads_set: false,
                        rayon_threads: Some(3),
                        elastic: false,
                    };
                    let own = RankVariables {
                        local_rank,
                        restarts: 0,
                        error_file: want["TORCHELASTIC_ERROR_FILE"].clone().into(),
                        token_file: "/proc/self/fd/9".into(),
                        joins_as: None,
                    };
                    let got: BTreeMap<String, String> = variables(&shared, &own)
                        .into_iter()
                        .filter(|(name, _)| !OWN.contains(name))
                        .map(|(name, value)| (name.to_owned(), value.into_string().unwrap()))
                        .collect();
                    assert_eq!(got, want, "{name}, worker {index}");
                    index += 1;
                }
            }
        }
    }

    #[test]
    fn our_own_variables() {
        let shared = LauncherVariables {
            node_rank: 0,
            nodes: 1,
            first_rank: 0,
            local_ranks: 2,
            world: 2,
            role: "default".into(),
            store: "127.0.0.1:4".into(),
            store_file: None,
            master_addr: "127.0.0.1".into(),
            master_port: 5,
            run_id: "x".into(),
            max_restarts: 3,
            bind: None,
            ports: None,
            signals: "SIGTERM".into(),
            threads_set: true,
            rayon_threads: None,
            elastic: false,
        };
        let own = RankVariables {
            local_rank: 1,
            restarts: 2,
            error_file: "/proc/self/fd/8".into(),
            token_file: "/proc/self/fd/9".into(),
            joins_as: None,
        };
        let set = variables(&shared, &own);
        assert_eq!(set[STORE_VARIABLE], "127.0.0.1:4");
        assert_eq!(set["MASTER_PORT"], "5");
        assert_eq!(set[TOKEN_FILE_VARIABLE], "/proc/self/fd/9");
        assert_eq!(set["TORCHELASTIC_RESTART_COUNT"], "2");
        assert_eq!(set["TORCHELASTIC_MAX_RESTARTS"], "3");
        let several = LauncherVariables {
            ports: PortRange::new(20000, 20009).ok(),
            ..shared.clone()
        };
        assert_eq!(variables(&several, &own)[PORTS_VARIABLE], "20000-20009");
        let names: BTreeSet<_> = set.keys().copied().collect();
        assert!(
            !names.contains("OMP_NUM_THREADS"),
            "the user's own setting stays"
        );
        assert!(!names.contains(BIND_VARIABLE), "one node stays on loopback");
        assert_eq!(
            (&*set[ELASTIC_VARIABLE], &*set[JOIN_VARIABLE]),
            ("0".as_ref(), "".as_ref())
        );
        assert_eq!(set[STORE_FILE_VARIABLE], "");
        let elastic = LauncherVariables {
            elastic: true,
            store_file: Some("/tmp/a".into()),
            ..shared
        };
        let joining = RankVariables {
            joins_as: Some(5),
            ..own
        };
        let set = variables(&elastic, &joining);
        let world = OsString::from(elastic.world.to_string());
        let got = (&*set[ELASTIC_VARIABLE], &*set[JOIN_VARIABLE]);
        assert_eq!(got, (&*world, "5".as_ref()));
        assert_eq!(set["WORLD_SIZE"], world);
        assert_eq!(set[STORE_FILE_VARIABLE], "/tmp/a");
        // Of a node that came when the others had begun.
        let late = LauncherVariables {
            first_rank: 7,
            ..elastic
        };
        let set = variables(&late, &joining);
        let got = ["RANK", "WORLD_SIZE"].map(|name| set[name].to_str().unwrap().to_owned());
        assert_eq!(got, ["8", "9"]);
        assert_eq!(set[ELASTIC_VARIABLE], world);
    }
}
