//! The settings of `phalanx launch`: flags, else `PET_*` variables, else defaults; every value is checked. No files, names
//! or sockets are used here: that is `plan.rs`.

use std::path::PathBuf;
use std::time::Duration;

use phalanx_base::address::Address;

use super::place::torchrun::{Setting, setting, switch, variable};
use super::place::{Env, Node};
use super::program::{Interpretation, Program};
use super::streams::{StreamChoice, Streams};
use super::torchrun::{self, TorchrunOptions, VisibleDevices};
use crate::error::{Result, refuse};
use crate::flags::LaunchCli;
use crate::stop;

/// The least that `--evict-after` may be.
const SHORTEST_EVICTION: Duration = Duration::from_secs(1);

/// The settings of a launch, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchArgs {
    /// This node, its ranks, and where it meets the others.
    pub node: Node,
    /// Name of the job, where it was given.
    pub run_id: Option<String>,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// A lost rank does not end the job.
    pub elastic: bool,
    /// When a rank of an elastic job is killed that has blocked the others.
    pub evict_after: Option<Duration>,
    /// Where logs go.
    pub log_dir: Option<PathBuf>,
    /// Streams that go to files only.
    pub redirects: StreamChoice,
    /// Streams that go to files and on.
    pub tee: StreamChoice,
    /// Token file.
    pub token_file: Option<PathBuf>,
    /// Listen address, or a name for it.
    pub bind: Option<String>,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Duration,
    /// The same where a rank has a handler for SIGTERM and nothing failed.
    pub handler_grace: Duration,
    /// It was given on the command line, so ranks cannot ask for more.
    pub grace_is_typed: bool,
    /// Where the job is shown.
    pub live: Option<Address>,
    /// ROLE_NAME.
    pub role: String,
    /// Prefix lines with their rank.
    pub prefix: bool,
    /// A PyTorch program gets Phalanx for Gloo.
    pub as_gloo: bool,
    /// What only torchrun's flags say.
    pub torchrun: TorchrunOptions,
    /// What to run.
    pub run: Program,
}

impl LaunchArgs {
    /// The defaults, for the ranks of `node` that run `run`.
    pub fn new(node: Node, run: Program) -> LaunchArgs {
        LaunchArgs {
            node,
            run_id: None,
            max_restarts: 0,
            elastic: false,
            evict_after: None,
            log_dir: None,
            redirects: StreamChoice::default(),
            tee: StreamChoice::default(),
            token_file: None,
            bind: None,
            stop_grace: super::STOP_GRACE,
            handler_grace: stop::GRACE,
            grace_is_typed: false,
            live: None,
            role: "default".to_owned(),
            prefix: true,
            as_gloo: false,
            torchrun: TorchrunOptions::default(),
            run,
        }
    }

    /// Merges and checks. `cores` is what `auto` means.
    ///
    /// # Errors
    /// `Usage`, naming the flag or variable.
    pub fn resolve(cli: &LaunchCli, env: &Env, cores: usize) -> Result<Self> {
        let run = Interpretation {
            module: switch(env, "module", cli.module),
            no_python: switch(env, "no-python", cli.no_python),
            run_path: switch(env, "run-path", cli.run_path),
        };
        let run = run.command(&cli.program, env)?;
        let node = Node::of_launch(cli, env, cores)?;
        check_unused(cli, env)?;
        let given = |flag, typed| setting(env, flag, typed);
        let owned = |given: Setting<'_>| given.text.to_owned();
        let mut args = LaunchArgs {
            log_dir: given("log-dir", &cli.log_dir).map(|g| PathBuf::from(g.text)),
            token_file: (cli.nodes.token_file.clone())
                .or_else(|| given("token-file", &None).map(|g| PathBuf::from(g.text))),
            bind: given("bind", &cli.bind).map(owned),
            run_id: given("rdzv-id", &cli.rdzv_id).map(owned),
            live: cli.nodes.live.clone().map(Option::unwrap_or_default),
            prefix: !cli.no_prefix,
            as_gloo: cli.as_gloo,
            torchrun: torchrun_options(cli, env, node.local_ranks)?,
            ..LaunchArgs::new(node, run)
        };
        if let Some(given) = given("max-restarts", &cli.max_restarts) {
            args.max_restarts = given.number("not a number of restarts")?;
        }
        args.elastic = cli.nodes.elastic;
        if let Some(given) = given("evict-after", &cli.evict_after) {
            let after = given.seconds(86_400.0)?;
            check_evict_after(after, args.elastic)?;
            args.evict_after = Some(after);
        }
        if let Some(given) = given("role", &cli.role) {
            args.role = owned(given);
        }
        for (name, text) in [
            ("--role", Some(&args.role)),
            ("--rdzv-id", args.run_id.as_ref()),
        ] {
            if text.is_some_and(|t| t.is_empty() || t.len() > 200 || t.contains(['/', '\0', '\n']))
            {
                refuse!("{name} must be 1 to 200 characters without / and line breaks");
            }
        }
        let streams = |flag, typed| {
            let given = given(flag, typed);
            let choice = given.map(|given| streams(&given, args.node.local_ranks));
            choice.transpose()
        };
        let redirects = streams("redirects", &cli.redirects)?;
        let tee = streams("tee", &cli.tee)?;
        args.tee = match (&args.log_dir, &redirects, tee) {
            (_, _, Some(tee)) => tee,
            (Some(_), None, None) => StreamChoice::all(Streams::ALL),
            _ => StreamChoice::default(),
        };
        args.redirects = redirects.unwrap_or_default();
        let grace = given("stop-grace-s", &cli.stop_grace_s);
        let grace = grace
            .filter(|_| cli.shutdown_timeout.is_none())
            .or_else(|| given("shutdown-timeout", &cli.shutdown_timeout))
            .or_else(|| variable(env, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"));
        if let Some(grace) = grace {
            args.stop_grace = grace.seconds(86_400.0)?;
            args.handler_grace = args.stop_grace;
            args.grace_is_typed = true;
        }
        Ok(args)
    }
}

/// Checks `--evict-after`.
pub fn check_evict_after(after: Duration, is_elastic: bool) -> Result<()> {
    match is_elastic {
        _ if after < SHORTEST_EVICTION => refuse!(
            "--evict-after must be at least 1 second: ranks wait for each other in every step"
        ),
        false => {
            refuse!("--evict-after kills a rank, and the job continues without it: add --elastic")
        }
        true => Ok(()),
    }
}

/// Checks the flags of torchrun that change nothing here.
fn check_unused(cli: &LaunchCli, env: &Env) -> Result<()> {
    if let Some(given) = setting(env, "monitor-interval", &cli.monitor_interval) {
        given.seconds(86_400.0)?;
    }
    let unused: [(&str, &Option<String>, &[&str], &str); 4] = [
        (
            "rdzv-backend",
            &cli.rdzv_backend,
            &["static", "c10d"],
            "only static and c10d are accepted, and both use Phalanx's own store; leave it out",
        ),
        (
            "start-method",
            &cli.start_method,
            &["spawn", "fork", "forkserver"],
            "not spawn, fork or forkserver",
        ),
        (
            "logs-specs",
            &cli.logs_specs,
            &["default"],
            "it would name a Python class; only default is accepted",
        ),
        (
            "event-log-handler",
            &cli.event_log_handler,
            &["null"],
            "the launcher writes no events of torchelastic; only null is accepted",
        ),
    ];
    for (flag, typed, accepted, why) in unused {
        let given = setting(env, flag, typed);
        if let Some(given) = given.filter(|given| !accepted.contains(&given.text)) {
            return Err(given.wrong(why));
        }
    }
    Ok(())
}

/// The streams of `--redirects` or `--tee`.
fn streams(given: &Setting<'_>, local_ranks: usize) -> Result<StreamChoice> {
    let choice: StreamChoice = given
        .text
        .parse()
        .map_err(|why: String| given.wrong(&why))?;
    let Some(rank) = choice.beyond(local_ranks) else {
        return Ok(choice);
    };
    let count = match local_ranks {
        1 => "only rank counts".to_owned(),
        ranks => format!("{ranks} ranks count"),
    };
    Err(given.wrong(&format!(
        "there is no rank {rank} on this node; its {count} from 0"
    )))
}

fn torchrun_options(cli: &LaunchCli, env: &Env, local_ranks: usize) -> Result<TorchrunOptions> {
    let mut options = TorchrunOptions::default();
    if let Some(given) = setting(env, "signals-to-handle", &cli.signals_to_handle) {
        options.signals = torchrun::signals(given.text).map_err(|why| given.wrong(&why))?;
    }
    if let Some(given) = setting(env, "local-ranks-filter", &cli.local_ranks_filter) {
        let shown = torchrun::ranks_filter(given.text, local_ranks);
        options.shown = Some(shown.map_err(|why| given.wrong(&why))?);
    }
    let template = &cli.log_line_prefix_template;
    let template = setting(env, "log-line-prefix-template", template)
        .or_else(|| variable(env, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"));
    options.prefix_template = template.map(|given| given.text.to_owned());
    let filters = |flag: &str, typed: &Option<String>| {
        let given = setting(env, flag, typed);
        given.map_or(Vec::new(), |given| torchrun::line_filters(given.text))
    };
    options.out_filters = filters("duplicate-stdout-filters", &cli.duplicate_stdout_filters);
    options.err_filters = filters("duplicate-stderr-filters", &cli.duplicate_stderr_filters);
    if let Some(given) = setting(env, "numa-binding", &cli.numa_binding) {
        if given.text != "node" {
            let why = "only node is supported; for another binding, launch a script that calls `numactl` according to $LOCAL_RANK";
            return Err(given.wrong(why));
        }
        options.numa = true;
    }
    if switch(env, "virtual-local-rank", cli.virtual_local_rank) {
        options.devices = Some(VisibleDevices::new(env, local_ranks)?);
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::env;

    /// `flags` as "name=value" pairs, so that tables stay readable.
    fn resolve(flags: &str, variables: &str) -> Result<LaunchArgs> {
        let mut cli = LaunchCli {
            program: vec!["prog".into(), "--x".into()],
            ..LaunchCli::default()
        };
        for pair in flags.split_whitespace() {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = Some(value.to_owned());
            match name {
                "nnodes" => cli.nodes.nnodes = value,
                "nproc" => cli.nproc_per_node = value,
                "node-rank" => cli.nodes.node_rank = value,
                "addr" => cli.nodes.master_addr = value,
                "port" => cli.nodes.master_port = value,
                "ports" => cli.nodes.port_range = value,
                "lost" => cli.nodes.lost_after = value,
                "endpoint" => cli.rdzv_endpoint = value,
                "backend" => cli.rdzv_backend = value,
                "restarts" => cli.max_restarts = value,
                "evict" => cli.evict_after = value,
                "log-dir" => cli.log_dir = value,
                "tee" => cli.tee = value,
                "redirects" => cli.redirects = value,
                "grace" => cli.stop_grace_s = value,
                "bind" => cli.bind = value,
                "id" => cli.rdzv_id = value,
                "interval" => cli.monitor_interval = value,
                "method" => cli.start_method = value,
                "standalone" => cli.standalone = true,
                "conf" => cli.rdzv_conf = value,
                "shutdown" => cli.shutdown_timeout = value,
                "signals" => cli.signals_to_handle = value,
                "filter" => cli.local_ranks_filter = value,
                "specs" => cli.logs_specs = value,
                "events" => cli.event_log_handler = value,
                "numa" => cli.numa_binding = value,
                other => panic!("no such flag in this test: {other}"),
            }
        }
        LaunchArgs::resolve(&cli, &env(variables), 6)
    }

    #[test]
    fn defaults_are_one_rank_on_one_node() {
        let args = resolve("interval=0.1 method=spawn", "HOME=/root").unwrap();
        assert_eq!(args.node.meeting, None);
        assert_eq!(
            (
                args.node.local_ranks,
                args.node.master_port,
                args.max_restarts
            ),
            (1, None, 0)
        );
        assert_eq!(args.stop_grace, Duration::from_millis(1500));
        assert!(args.prefix);
        assert_eq!(args.run.program, "prog");
        assert_eq!(args.run.args, ["--x"]);
        assert_eq!(args.torchrun, TorchrunOptions::default());
    }

    #[test]
    fn one_node_by_environment() {
        for (flags, variables, ranks, port) in [
            ("nproc=2", "", 2, None),
            ("nproc=auto", "", 6, None),
            ("nproc=cpu", "PET_NPROC_PER_NODE=3", 6, None),
            ("", "PET_NPROC_PER_NODE=3", 3, None),
            ("", "PET_NPROC_PER_NODE=auto PET_NNODES=1:1", 6, None),
            ("port=1234", "", 1, Some(1234)),
            ("", "PET_MASTER_PORT=1235", 1, Some(1235)),
            ("endpoint=localhost:77", "", 1, Some(77)),
            ("port=1", "PET_RDZV_ENDPOINT=localhost:77", 1, Some(1)),
            ("endpoint=localhost:0", "", 1, None),
            ("port=0", "", 1, None),
            ("standalone port=9", "", 1, None),
            // left over from an outer job: not ours
            (
                "",
                "MASTER_ADDR=x MASTER_PORT=5 RANK=1 WORLD_SIZE=9 LOCAL_RANK=1",
                1,
                None,
            ),
            (
                "standalone",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2]",
                1,
                None,
            ),
            (
                "nnodes=1",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2]",
                1,
                None,
            ),
            (
                "",
                "PET_STANDALONE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4",
                1,
                None,
            ),
            (
                "",
                "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_NNODES=1 SLURM_NODELIST=a1",
                1,
                None,
            ),
        ] {
            let args = resolve(flags, variables).unwrap();
            assert_eq!(args.node.meeting, None, "{flags} {variables}");
            assert_eq!(
                (args.node.local_ranks, args.node.master_port),
                (ranks, port),
                "{flags} {variables}"
            );
        }
    }

    #[test]
    fn several_nodes_by_environment() {
        let slurm = "SLURM_PROCID=1 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=gnode[10,20,25-37]";
        for (flags, variables, want) in [
            ("nnodes=2 node-rank=1 addr=h port=7", "", (2, 1, "h", 7)),
            ("nnodes=2:2 node-rank=0 addr=h", "", (2, 0, "h", 29500)),
            (
                "nnodes=2 node-rank=0",
                "MASTER_ADDR=m MASTER_PORT=12",
                (2, 0, "m", 12),
            ),
            (
                "nnodes=2 node-rank=0 addr=f port=3",
                "MASTER_ADDR=m MASTER_PORT=12",
                (2, 0, "f", 3),
            ),
            (
                "",
                "PET_NNODES=3 PET_NODE_RANK=2 PET_MASTER_ADDR=p PET_MASTER_PORT=8",
                (3, 2, "p", 8),
            ),
            (
                "node-rank=0",
                "PET_NNODES=3 PET_NODE_RANK=2 PET_MASTER_ADDR=p",
                (3, 0, "p", 29500),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=e:99 backend=c10d",
                "",
                (2, 1, "e", 99),
            ),
            ("nnodes=2 node-rank=1 endpoint=e", "", (2, 1, "e", 29500)),
            (
                "nnodes=2 node-rank=1 addr=e ports=20000-20009",
                "PHALANX_PORT_RANGE=1-2",
                (2, 1, "e", 20000),
            ),
            (
                "nnodes=2 node-rank=1 addr=e port=30009",
                "PHALANX_PORT_RANGE=30000-30009",
                (2, 1, "e", 30009),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=e backend=c10d",
                "",
                (2, 1, "e", 29400),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=[fe80::1]:99",
                "",
                (2, 1, "fe80::1", 99),
            ),
            (
                "nnodes=2 node-rank=1 endpoint=fe80::1",
                "",
                (2, 1, "fe80::1", 29500),
            ),
            ("", slurm, (2, 1, "gnode10", 29500)),
            ("addr=x", slurm, (2, 1, "x", 29500)),
            ("nnodes=2", slurm, (2, 1, "gnode10", 29500)),
            ("nnodes=4 node-rank=3", slurm, (4, 3, "gnode10", 29500)),
            (
                "addr=x",
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4",
                (4, 2, "x", 29500),
            ),
            (
                "",
                "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=q",
                (2, 1, "q", 29500),
            ),
            (
                "",
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                (2, 1, "127.0.0.1", 29500),
            ),
        ] {
            let meeting = resolve(flags, variables).unwrap().node.meeting.unwrap();
            let got = (
                meeting.nodes,
                meeting.node_rank.unwrap(),
                meeting.host.as_str(),
                meeting.port,
            );
            assert_eq!(got, want, "{flags} {variables}");
        }
    }

    #[test]
    fn what_an_engine_can_carry_is_left_to_it() {
        let mpi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4";
        let here = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        for (flags, variables, want) in [
            ("", mpi, Some((None, None))),
            ("addr=h", mpi, Some((Some("h"), None))),
            ("port=7", mpi, Some((None, Some(7)))),
            ("", "PMI_RANK=1 PMI_SIZE=2 PMI_FD=9", Some((None, None))),
            ("", here, Some((Some("127.0.0.1"), None))),
            // No channel, or other nodes than the engine's.
            ("addr=h", "PMI_RANK=1 PMI_SIZE=2", None),
            ("nnodes=2 node-rank=0 addr=h", mpi, None),
            ("nnodes=2 node-rank=0 addr=h", "", None),
        ] {
            let meeting = resolve(flags, variables).unwrap().node.meeting.unwrap();
            let given = &meeting.given;
            let got = meeting.carrier.as_ref();
            let got = got.map(|_| (given.host.as_deref(), given.port));
            assert_eq!(got, want, "{flags} {variables}");
        }
    }

    #[test]
    fn mistakes_are_usage_errors_that_name_the_culprit() {
        for (flags, variables, want) in [
            ("nnodes=1:2", "", "--nnodes 1:2 requires --master-addr"),
            ("nnodes=0:2", "", "--nnodes cannot be \"0:2\""),
            ("nnodes=1:2000", "", "--nnodes cannot be"),
            ("nnodes=1:2 standalone", "", "--standalone"),
            ("nnodes=0", "", "--nnodes"),
            ("nnodes=2:1", "", "--nnodes"),
            ("nnodes=x", "", "--nnodes"),
            ("nnodes=2", "", "--nnodes 2 requires --node-rank"),
            (
                "nnodes=2 node-rank=1",
                "",
                "--nnodes 2 requires --master-addr",
            ),
            ("", "SKYPILOT_NUM_NODES=2", "one of 2 nodes"),
            ("", "SLURM_NNODES=2 SLURM_PROCID=0 SLURM_NTASKS=2", "srun"),
            ("nnodes=2 node-rank=2", "", "outside --nnodes 2"),
            ("ports=20000", "", "--port-range cannot be \"20000\""),
            ("", "PHALANX_PORT_RANGE=9-1", "PHALANX_PORT_RANGE cannot be"),
            (
                "nnodes=2 node-rank=0 addr=h port=77 ports=80-90",
                "",
                "port 77, which is outside --port-range 80-90",
            ),
            ("node-rank=1", "", "outside --nnodes 1"),
            (
                "nnodes=2 node-rank=0 addr=h lost=8:9",
                "",
                "--lost-after cannot be \"8:9\"",
            ),
            ("nnodes=2 node-rank=0 addr=h lost=0.5", "", "from 1 to"),
            ("nnodes=2 node-rank=0 addr=h lost=NaN", "", "--lost-after"),
            (
                "nnodes=2 node-rank=0 addr=h",
                "PET_LOST_AFTER=soon",
                "PET_LOST_AFTER",
            ),
            ("", "PET_NNODES=none", "PET_NNODES"),
            ("nproc=0", "", "--nproc-per-node"),
            ("nproc=gpus", "", "cpu or gpu is expected"),
            ("nproc=9999", "", "between 1 and 1024"),
            ("nproc=-1", "", "--nproc-per-node"),
            ("port=0 nnodes=2 node-rank=0 addr=h", "", "--master-port"),
            ("port=1 endpoint=localhost:77", "", "contradict each other"),
            ("addr=k endpoint=h:77", "", "contradict each other"),
            ("addr=k endpoint=h", "", "contradict each other"),
            ("port=70000", "", "--master-port"),
            ("endpoint=h:x nnodes=2 node-rank=0", "", "--rdzv-endpoint"),
            ("backend=etcd", "", "--rdzv-backend"),
            ("standalone nnodes=2 node-rank=0", "", "--standalone"),
            ("restarts=-1", "", "--max-restarts"),
            ("evict=10", "", "add --elastic"),
            ("evict=0.9", "", "--evict-after must be at least 1 second"),
            ("evict=x", "", "--evict-after"),
            ("tee=7 log-dir=x", "", "--tee"),
            ("nproc=2 tee=5:1 log-dir=x", "", "no rank 5 on this node"),
            (
                "nproc=2 redirects=0:3,2:1 log-dir=x",
                "",
                "no rank 2 on this node; its 2 ranks count from 0",
            ),
            ("redirects=1:3 log-dir=x", "", "its only rank counts from 0"),
            ("grace=-1", "", "--stop-grace-s"),
            ("interval=often", "", "--monitor-interval"),
            ("method=thread", "", "--start-method"),
            ("grace=NaN", "", "--stop-grace-s"),
            ("id=a/b", "", "--rdzv-id"),
            ("", "PMI_RANK=1 PMI_SIZE=2", "does not say on which host"),
            ("conf=is_hots=1", "", "there is no key is_hots"),
            ("", "PET_RDZV_CONF=timeout", "PET_RDZV_CONF"),
            ("signals=SIGNONE", "", "--signals-to-handle"),
            ("nproc=2 filter=2", "", "--local-ranks-filter"),
            ("specs=mine", "", "--logs-specs"),
            ("events=console", "", "--event-log-handler"),
            ("numa=far", "", "--numa-binding"),
            ("shutdown=soon", "", "--shutdown-timeout"),
            ("", "PET_SHUTDOWN_TIMEOUT=-1", "PET_SHUTDOWN_TIMEOUT"),
            ("nnodes=2 backend=c10d", "", "--master-addr"),
            ("nnodes=3", "PMI_RANK=1 PMI_SIZE=2", "PMI started 2"),
        ] {
            let error = resolve(flags, variables).unwrap_err();
            assert!(
                error.chain().contains(want),
                "{flags} {variables}: {}",
                error.chain()
            );
            assert_eq!(error.exit_code(), 2, "{flags} {variables}");
        }
    }

    #[test]
    fn nodes_without_a_number_are_numbered_by_arrival() {
        for (flags, variables, want) in [
            (
                "nnodes=2 backend=c10d endpoint=h:9",
                "",
                (None, None, "h", 9),
            ),
            (
                "nnodes=2 backend=c10d endpoint=[::1]",
                "",
                (None, None, "::1", 29400),
            ),
            (
                "nnodes=2 backend=c10d addr=[::1] port=4",
                "",
                (None, None, "::1", 4),
            ),
            (
                "nnodes=2 conf=is_host=1",
                "PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=h",
                (None, Some(true), "h", 29400),
            ),
            (
                "nnodes=2 backend=c10d endpoint=h node-rank=1",
                "",
                (Some(1), None, "h", 29400),
            ),
            // Slurm numbers them, in the order of its node list.
            (
                "backend=c10d endpoint=h",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2] SLURM_STEP_ID=0",
                (Some(1), None, "h", 29400),
            ),
        ] {
            let meeting = resolve(flags, variables).unwrap().node.meeting.unwrap();
            let got = (
                meeting.node_rank,
                meeting.is_host,
                &*meeting.host,
                meeting.port,
            );
            assert_eq!(got, want, "{flags} {variables}");
        }
        for (flags, least, seconds, last_call, is_host) in [
            ("nnodes=2 node-rank=0", None, 300, 30, None),
            ("nnodes=1:4", Some(1), 600, 30, None),
            (
                "nnodes=2:4 conf=last_call_timeout=5,join_timeout=7 node-rank=3",
                Some(2),
                7,
                5,
                Some(false),
            ),
            ("nnodes=1:2 node-rank=0", Some(1), 600, 30, Some(true)),
        ] {
            let slurm = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NODELIST=a[1-2] SLURM_STEP_ID=0";
            let args = resolve(&format!("addr=h {flags}"), slurm).unwrap();
            let meeting = args.node.meeting.unwrap();
            assert_eq!(
                (meeting.least, meeting.is_host),
                (least, is_host),
                "{flags}"
            );
            let [want, call] = [seconds, last_call].map(Duration::from_secs);
            assert_eq!(
                (meeting.timeout, meeting.last_call),
                (want, call),
                "{flags}"
            );
            assert_eq!(meeting.node_rank.is_none(), least.is_some(), "{flags}");
        }
        let args = resolve("nnodes=2 node-rank=0 addr=h conf=timeout=9", "").unwrap();
        assert_eq!(args.node.meeting.unwrap().timeout, Duration::from_secs(9));
    }

    #[test]
    fn how_long_a_node_may_be_silent() {
        for (flags, want) in [("", 2000), ("lost=10", 10_000), ("lost=1.5", 1500)] {
            let args = resolve(&format!("nnodes=2 node-rank=0 addr=h {flags}"), "").unwrap();
            let limit = args.node.meeting.unwrap().lost_after;
            assert_eq!(limit.as_millis(), want, "{flags}");
        }
    }

    #[test]
    fn torchruns_timeout_of_a_stop_is_ours() {
        for (flags, variables, seconds) in [
            ("shutdown=7", "PET_STOP_GRACE_S=9", 7),
            ("grace=8", "PET_SHUTDOWN_TIMEOUT=9", 8),
            (
                "",
                "PET_SHUTDOWN_TIMEOUT=9 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3",
                9,
            ),
            ("", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3", 3),
        ] {
            let args = resolve(flags, variables).unwrap();
            let want = Duration::from_secs(seconds);
            assert_eq!(
                (args.stop_grace, args.handler_grace),
                (want, want),
                "{flags} {variables}"
            );
            assert!(args.grace_is_typed);
        }
    }

    #[test]
    fn logs_are_shown_too_unless_redirected() {
        let args = resolve("tee=3", "").unwrap();
        assert_eq!((args.log_dir, args.tee.of(0)), (None, Streams::ALL));
        let args = resolve("log-dir=d", "").unwrap();
        assert_eq!(args.tee.of(0), Streams::ALL);
        let args = resolve("log-dir=d redirects=3", "").unwrap();
        assert_eq!(args.tee.of(0), Streams::default());
        assert_eq!(args.redirects.of(1), Streams::ALL);
        let args = resolve("nproc=2 log-dir=d redirects=1:3", "").unwrap();
        assert_eq!(args.redirects.of(1), Streams::ALL);
    }
}
