//! What the launcher reads of its environment, of other processes and of dumps, fed with
//! garbage: the bodies of the fuzz targets in `tools/fuzz/`, which the tests here run on garbled
//! seeds.

use phalanx_process::oom;

use super::args::LaunchArgs;
use super::flags::LaunchCli;
use super::nodes::LauncherEvent;
use super::place::torchrun::rendezvous_conf;
use super::place::{self, Env};
use super::report::{self, JobFailure};
use super::streams::StreamChoice;
use crate::inspect::fuzzing as inspect;
use crate::stop;
use crate::torchrun;

/// Name, body, seeds.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All of them.
pub const TARGETS: &[Target] = &[
    ("phalanx_cluster", cluster, cluster_seeds),
    ("phalanx_launch_args", args, args_seeds),
    ("phalanx_messages", messages, messages_seeds),
    ("phalanx_system", system, system_seeds),
    ("phalanx_dumps", inspect::dumps, inspect::dumps_seeds),
];

/// Lines `NAME=value`.
fn env(text: &str) -> Env {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn seeds(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// What a cluster engine says.
pub fn cluster(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(host) = place::first_host(&text) {
        // It goes into a socket address, never into a shell; but still.
        let sound = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        assert!(!host.is_empty() && host.bytes().all(sound), "{host:?}");
    }
    let env = env(&text);
    if let Ok(Some(process)) = place::detect(&env) {
        assert!(process.rank < process.world);
    }
    if let Ok(Some(rank)) = place::rank_place(&env) {
        assert!(rank.rank < rank.world);
    }
    for command in [None, Some("phalanx train")] {
        for typed in [None, Some(2)] {
            match place::among_nodes(&env, command, typed, false) {
                Ok(Some(node)) => assert!(node.rank < node.world && node.world > 1),
                Ok(None) => {}
                Err(error) => assert_eq!(error.exit_code(), 2),
            }
        }
    }
}

pub fn cluster_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        "gnode[10,20,25-37],big1",
        "r[1-2]n[001-9]",
        "SLURM_PROCID=5\nSLURM_NODEID=1\nSLURM_NNODES=2\nSLURM_NTASKS=8\nSLURM_LOCALID=1\nSLURM_STEP_ID=0\nSLURM_JOB_NODELIST=a,b[7-8]\n",
        "OMPI_COMM_WORLD_RANK=2\nOMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_LOCAL_RANK=0\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n",
        "PMI_RANK=0\nPMI_SIZE=3\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=1\n",
        "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=1234\n",
        "SKYPILOT_NUM_NODES=2\nSKYPILOT_NODE_RANK=1\nVC_A_NUM=1\nVC_B_HOSTS=a,b\nJOB_COMPLETION_INDEX=3\n",
    ])
}

/// `PET_*` variables, which say all that flags can.
pub fn args(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = text.parse::<StreamChoice>();
    let _ = rendezvous_conf(&text);
    let _ = torchrun::fill_in(&text, |name| (name == "rank").then(|| "0".to_owned()));
    let cli = LaunchCli {
        program: vec!["program".into()],
        ..LaunchCli::default()
    };
    if let Ok(args) = LaunchArgs::resolve(&cli, &env(&text), 2) {
        assert!((1..=1024).contains(&args.node.local_ranks));
        if let Some(meeting) = args.node.meeting {
            assert!(meeting.node_rank.is_none_or(|rank| rank < meeting.nodes));
            assert!(meeting.nodes <= 1024);
        }
    }
}

pub fn args_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        "PET_NNODES=2\nPET_NODE_RANK=1\nPET_MASTER_ADDR=a\nPET_MASTER_PORT=5\nPET_NPROC_PER_NODE=auto\n",
        "PET_RDZV_ENDPOINT=[::1]:29400\nPET_NNODES=1:2\nPET_RDZV_BACKEND=c10d\n",
        "PET_STANDALONE=1\nPET_MAX_RESTARTS=3\nPET_LOG_DIR=x\nPET_TEE=0:1,1:2\nPET_REDIRECTS=3\n",
        "PET_STOP_GRACE_S=1e3\nPET_RDZV_TIMEOUT=inf\nPET_BIND=::1\nPET_ROLE=r\nPET_RDZV_ID=x\n",
        "PET_RDZV_CONF=is_host=1,timeout=9\nPET_SIGNALS_TO_HANDLE=SIGTERM,SIGUSR1\nPET_LOCAL_RANKS_FILTER=0,1\nPET_NNODES=2\nPET_RDZV_BACKEND=c10d\nPET_RDZV_ENDPOINT=a:1\n",
        "PET_DUPLICATE_STDOUT_FILTERS=a,,b,c\nPET_LOG_LINE_PREFIX_TEMPLATE=$${rank}\nPET_VIRTUAL_LOCAL_RANK=1\nCUDA_VISIBLE_DEVICES=0,1\nPET_NUMA_BINDING=node\n",
        "0:1,1:2",
    ])
}

/// JSON of other launchers and of ranks.
pub fn messages(data: &[u8]) {
    if let Ok(verdict) = serde_json::from_slice::<JobFailure>(data) {
        let error = verdict.into_error(None);
        assert!(!error.render().is_empty());
        assert_ne!(error.exit_code(), 0, "a verdict is never a success");
    }
    let _ = serde_json::from_slice::<LauncherEvent>(data);
    let text = String::from_utf8_lossy(data);
    if let Some(message) = report::error_file_message(&text) {
        assert!(message.chars().count() <= 2000);
    }
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if let Some(said) = report::said(&lines) {
        assert!(said.lines().count() <= 20);
    }
}

pub fn messages_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        r#"{"code":3,"echo":false,"node":1,"message":"rank 1 was killed","notes":[["stderr","x\ny"]]}"#,
        r#"{"code":0,"echo":true,"node":18446744073709551615,"message":"","notes":[]}"#,
        r#"{"nodes":2,"local_ranks":2,"run_id":"none","host":"a","pid":1,"version":"0.1.0"}"#,
        r#"{"message": {"message": "ValueError: boom", "extraInfo": {"timestamp": "1"}}}"#,
        "x\nTraceback (most recent call last):\n  File \"a\"\nValueError: boom",
    ])
}

/// `/proc` and cgroup files.
pub fn system(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for path in oom::candidates(&text) {
        assert!(path.starts_with("/sys/fs/cgroup"), "{}", path.display());
    }
    let _ = oom::kills(&text);
    for signal in 1..=31 {
        let _ = stop::is_ignored(&text, signal);
    }
}

pub fn system_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n",
        "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
        "Name:\tx\nSigIgn:\t0000000000000001\n",
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 1000, run);
        }
    }
}
