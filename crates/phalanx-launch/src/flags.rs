//! Command lines, as typed.
//!
//! Numbers of nodes and of `phalanx launch` stay text, so that the same checks and messages serve flags and `PET_*` variables.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use phalanx_base::address::Address;
use phalanx_comm::Algorithm;

use crate::gpus;

/// The flags of a job, as typed: `phalanx launch` and commands that start ranks of their own.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct NodeFlags {
    /// Number of nodes; run the same command on each [default: 1, or set by the cluster engine]. MIN:MAX: nodes may come and go
    #[arg(long, value_name = "N")]
    pub(crate) nnodes: Option<String>,
    /// Number of this node, from 0 [default: set by the cluster engine]
    #[arg(long, value_name = "R")]
    pub(crate) node_rank: Option<String>,
    /// Host of node 0; required with several nodes, unless MASTER_ADDR or the cluster engine sets it
    #[arg(long, value_name = "HOST")]
    pub(crate) master_addr: Option<String>,
    /// Port of node 0 where the nodes meet [default: MASTER_PORT, or 29500]; on one node, MASTER_PORT of the ranks
    /// [default: a free one]
    #[arg(long, value_name = "PORT")]
    pub(crate) master_port: Option<String>,
    /// Ports for everything that other hosts connect to (the store, ranks, MASTER_PORT), for firewalls [default: PHALANX_PORT_RANGE, else 29500 for the store and any free ports]
    #[arg(long, value_name = "FIRST-LAST")]
    pub(crate) port_range: Option<String>,
    /// Seconds without a heartbeat after which another node is lost [default: 2]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) lost_after: Option<String>,
    /// Keep training when ranks or nodes fail, leave or join: the other processes take the step again with the same samples. Implied by --nnodes MIN:MAX, except for `phalanx launch`
    #[arg(long)]
    pub(crate) elastic: bool,
    /// File with the job token (see `phalanx token`), for ranks on several hosts [default: PHALANX_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Show the job on a web page while it runs, at PORT, HOST:PORT or [IPV6]:PORT [default with --live: a free port of 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    pub(crate) live: Option<Option<Address>>,
}

/// `phalanx launch`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct LaunchCli {
    #[command(flatten)]
    pub(crate) nodes: NodeFlags,
    /// Number of ranks on this node; gpu means one per GPU, auto and cpu one per core [default: 1].
    #[arg(long, value_name = "N|auto|cpu|gpu")]
    pub nproc_per_node: Option<String>,
    /// HOST[:PORT]; torchrun's alternative to --master-addr and --master-port. HOST may be an IPv6 address in brackets.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,
    /// static, or c10d: --node-rank may be left out, the launcher on HOST of --rdzv-endpoint is node 0 and the others are numbered in order of arrival [default: static].
    #[arg(long, value_name = "NAME")]
    pub(crate) rdzv_backend: Option<String>,
    /// Name of the job; launchers with different names do not join.
    #[arg(long, value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,
    /// Settings of the rendezvous, separated by commas: timeout or join_timeout (seconds, as --rdzv-timeout); last_call_timeout (seconds to wait for more than MIN nodes of --nnodes MIN:MAX [default: 30]); is_host (true or false: this launcher is node 0 with --rdzv-backend c10d); torchrun's other keys have no effect.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) rdzv_conf: Option<String>,
    /// Accepted for compatibility with torchrun; no effect (the exit of a rank is noticed at once).
    #[arg(long, value_name = "S")]
    pub(crate) monitor_interval: Option<String>,
    /// Accepted for compatibility with torchrun; no effect (every rank is a new process).
    #[arg(long, value_name = "spawn|fork|forkserver")]
    pub(crate) start_method: Option<String>,
    /// Seconds to wait for all nodes, or for MIN of --nnodes MIN:MAX [default: 300, with MIN:MAX 600].
    #[arg(long, value_name = "S")]
    pub(crate) rdzv_timeout: Option<String>,
    /// Run on this node only, on a free port, ignoring cluster variables.
    #[arg(long)]
    pub(crate) standalone: bool,
    /// With --elastic: kill a rank that has blocked a collective for S seconds. Less than the ranks' own deadline for a collective.
    #[arg(long, value_name = "S")]
    pub(crate) evict_after: Option<String>,
    /// Number of restarts after a failure: the ranks of all nodes are stopped and started again [default: 0]. With --elastic, a lost rank alone is started again.
    #[arg(long, value_name = "K")]
    pub(crate) max_restarts: Option<String>,
    /// Folder for the ranks' output and error files; each run makes a new folder in it.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<String>,
    /// Streams written to files only: 0 (none), 1 (stdout), 2 (stderr), 3 (both), or per rank, as in 0:1,1:2. Without --log-dir the files are in a new temporary folder, which is printed.
    #[arg(short = 'r', long, value_name = "SPEC")]
    pub(crate) redirects: Option<String>,
    /// Streams written to files and to the terminal, as in --redirects [default with --log-dir: 3].
    #[arg(short = 't', long, value_name = "SPEC")]
    pub(crate) tee: Option<String>,
    /// Local ranks whose output is shown on the terminal, as in 0,2 [default: all]. Files have the output of all.
    #[arg(long, value_name = "RANKS")]
    pub(crate) local_ranks_filter: Option<String>,
    /// Copy lines of stdout that contain one of these texts to filtered_stdout.log in the log folder; two commas are one comma of a text.
    #[arg(long, value_name = "TEXT,...")]
    pub(crate) duplicate_stdout_filters: Option<String>,
    /// The same for stderr and filtered_stderr.log.
    #[arg(long, value_name = "TEXT,...")]
    pub(crate) duplicate_stderr_filters: Option<String>,
    /// Accepted for compatibility with torchrun; only default.
    #[arg(long, value_name = "NAME")]
    pub(crate) logs_specs: Option<String>,
    /// Accepted for compatibility with torchrun; only null.
    #[arg(long, value_name = "NAME")]
    pub(crate) event_log_handler: Option<String>,
    /// Address or host name on which the store and this node's ranks listen.
    #[arg(long, value_name = "ADDR", alias = "local-addr")]
    pub(crate) bind: Option<String>,
    /// Seconds between SIGTERM and SIGKILL when the ranks are stopped [default: 1.5; after Ctrl-C or SIGTERM 30, if a rank or a process of its group handles SIGTERM, as with `train --save-every`, and more if a rank announces more, as `train` does after a checkpoint that took long].
    #[arg(long, value_name = "S")]
    pub(crate) stop_grace_s: Option<String>,
    /// torchrun's name for --stop-grace-s.
    #[arg(long, value_name = "S", conflicts_with = "stop_grace_s")]
    pub(crate) shutdown_timeout: Option<String>,
    /// Signals that end the job. One of SIGUSR1 and SIGUSR2 is sent to the ranks itself, the others as SIGTERM [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT].
    #[arg(long, value_name = "NAMES")]
    pub(crate) signals_to_handle: Option<String>,
    /// Bind each rank to the processors of one NUMA node (MODE: node); local ranks are spread over the NUMA nodes in order.
    #[arg(long, value_name = "MODE")]
    pub(crate) numa_binding: Option<String>,
    /// Set LOCAL_RANK to 0 in every rank, and CUDA_VISIBLE_DEVICES to the one device of its local rank.
    #[arg(long)]
    pub(crate) virtual_local_rank: bool,
    /// Use Phalanx where the PyTorch program asks for the back end gloo. Needs the Python package phalanx.
    #[arg(long)]
    pub(crate) as_gloo: bool,
    /// Value of ROLE_NAME in the ranks [default: default].
    #[arg(long, value_name = "NAME")]
    pub(crate) role: Option<String>,
    /// Do not prefix output lines with `[rank N]`.
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// Prefix of output lines; ${rank}, ${local_rank}, ${role_name} and ${hostname} are filled in [default: `[rank ${rank}] `, and none with one rank].
    #[arg(long, value_name = "TEXT")]
    pub(crate) log_line_prefix_template: Option<String>,
    /// PROGRAM is a Python module: run `python3 -u -m PROGRAM`.
    #[arg(short = 'm', long)]
    pub(crate) module: bool,
    /// Run PROGRAM as it is, also if its name ends in .py. The same as `--` before PROGRAM.
    #[arg(long)]
    pub(crate) no_python: bool,
    /// PROGRAM is a Python script, whatever its name: run `python3 -u PROGRAM`.
    #[arg(long)]
    pub(crate) run_path: bool,
    /// The program and its arguments. `python3 -u` (or PYTHON_EXEC) runs a PROGRAM whose name ends in .py, unless --no-python or `--` comes before it. If the job fails or is interrupted, all processes that it has started are ended. If all ranks succeed, processes in sessions of their own (daemons) live on.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Which kind of link the ranks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TransportArg {
    /// Shared memory between ranks of one host, TCP between hosts
    Auto,
    /// Ranks are threads of one process
    Thread,
    /// Shared memory only; an error if ranks cannot share memory
    Shm,
    /// TCP only
    Tcp,
}

/// The all-reduce algorithms by name, with a line of help each.
fn algorithms() -> impl TypedValueParser<Value = Algorithm> {
    let value = |a: Algorithm| PossibleValue::new(a.name()).help(a.summary());
    PossibleValuesParser::new(Algorithm::ALL.map(value)).try_map(|name| name.parse::<Algorithm>())
}

/// Flags about ranks, shared by all recipes and benchmarks.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Ranks")]
pub struct RankArgs {
    /// Number of ranks to start on this host; gpu means one per GPU, auto and cpu one per core. Under a launcher, the launcher sets it [default: 1]
    #[arg(long, visible_alias = "world", value_name = "N|auto|cpu|gpu", value_parser = count_of_ranks)]
    pub(crate) nproc_per_node: Option<usize>,
    #[command(flatten)]
    pub(crate) nodes: NodeFlags,
    /// With --elastic: kill a rank that has blocked a collective for S seconds. Ranks that load data, evaluate or save are
    /// waited for (--phase-timeout)
    #[arg(long, value_name = "S")]
    pub(crate) evict_after: Option<f64>,
    /// Number of restarts: with --elastic of lost ranks, which join the others; without it of all ranks, which continue from
    /// the last checkpoint
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) max_restarts: u32,
    /// Transport between ranks
    #[arg(long, visible_alias = "backend", value_enum, default_value_t = TransportArg::Auto)]
    pub transport: TransportArg,
    /// All-reduce algorithm
    #[arg(long, value_parser = algorithms(), default_value_t = Algorithm::Auto)]
    pub algorithm: Algorithm,
    /// Compute threads per rank [default: SLURM_CPUS_PER_TASK, OMP_NUM_THREADS, or the cores divided by local ranks]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Rendezvous: env://, tcp://HOST:PORT or file:///PATH
    #[arg(long, default_value = "env://", value_name = "URL")]
    pub init_method: String,
    /// Rank of this process, when you start each rank yourself with --world-size and --init-method tcp://HOST:PORT
    /// [default: 0]
    #[arg(long, value_name = "R")]
    pub rank: Option<usize>,
    /// World size when you start each rank yourself; required with --init-method tcp://HOST:PORT. 1 trains in this
    /// process alone, even on a cluster [default: 1]
    #[arg(long, value_name = "N")]
    pub world_size: Option<usize>,
    /// Seconds in which all ranks must join and finish their first collective
    #[arg(long, default_value_t = 300.0, value_name = "S")]
    pub init_timeout: f64,
    /// Deadline of a collective in seconds, not counting phases in which a rank is busy on its own (--phase-timeout)
    #[arg(long, default_value_t = 60.0, value_name = "S")]
    pub timeout: f64,
    /// Seconds that ranks wait for a rank that is alive and loading data, evaluating, saving or downloading
    #[arg(long, default_value_t = 3600.0, value_name = "S")]
    pub phase_timeout: f64,
    /// Address to listen on for other ranks [default: loopback; on several hosts, the address that reaches the master]
    #[arg(long, value_name = "IP", env = "PHALANX_BIND")]
    pub bind: Option<IpAddr>,
    /// Ignore flags that this command does not have, and name them in one line; a misspelt flag is still an error. Implied on
    /// ModelArts, which appends flags: --train_url and --data_url stand for --output-dir and --data where these are not given
    #[arg(long)]
    pub allow_unknown: bool,
}

/// Parses the value of `--nproc-per-node`.
///
/// # Errors
/// The reason why it is not a number of ranks.
fn count_of_ranks(text: &str) -> Result<usize, &'static str> {
    count_with(text, crate::cores(), || gpus().len())
}

/// The same of a host with these numbers of cores and GPUs; the latter is found out if it is asked for.
pub fn count_with(
    text: &str,
    cores: usize,
    gpus: impl FnOnce() -> usize,
) -> Result<usize, &'static str> {
    match text.trim() {
        "auto" | "cpu" => Ok(cores),
        "gpu" | "cuda" | "xpu" => match gpus() {
            0 => Err("no GPU was found; use cpu (one rank per core) or a number"),
            gpus => Ok(gpus),
        },
        number => number
            .parse()
            .map_err(|_| "a whole number, auto, cpu or gpu is expected"),
    }
}
