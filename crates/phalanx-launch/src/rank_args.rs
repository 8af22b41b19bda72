//! How `train` and `bench` become ranks.
//!
//! | asked for | this process |
//! |---|---|
//! | `RANK` is set (under a launcher), or `srun` or `mpirun` started it | is that rank |
//! | `--nnodes`, or an engine started one process on each node | is the launcher of its node |
//! | `--transport thread` | runs all ranks as threads |
//! | `--nproc-per-node 1` | is the only rank, unless its address space is limited |
//! | otherwise | starts itself once per rank and supervises |

use std::any::Any;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use phalanx_comm::{
    Algorithm, GroupOptions, InitOptions, MAX_LOCAL_RANKS, PortRange, ProcessGroup, Transport,
};
use phalanx_store::host_port;
use phalanx_wire::Token;
use rustix::process::{Resource, getrlimit};

use crate::context::RankContext;
use phalanx_base::say;
use phalanx_live::Address;

use crate::alone::Asking;
use crate::args::{Meeting, NodeFlags, WhichNodes, count_of_ranks, untyped_ranks};
use crate::cluster::{Env, detect, half_a_rank, is_set, text};
use crate::contract::PORTS_VARIABLE;
use crate::engine::{self, Agreement, Given, UntilMet};
use crate::error::{Error, ErrorKind, Result, check_count};
use crate::same_host::store_file;
use crate::threads::{self, Cores, Threads};
use crate::{self as launch, LocalRun, Prefix, RankPlace, stop, token};

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
    /// Number of ranks to start on this host; auto and cpu mean one per core. Under a launcher, the launcher sets it [default: 1]
    #[arg(long, visible_alias = "world", value_name = "N|auto|cpu", value_parser = count_of_ranks)]
    nproc_per_node: Option<usize>,
    #[command(flatten)]
    nodes: NodeFlags,
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
    /// File with the job token (see `phalanx token`), for ranks on several hosts that you start yourself [default:
    /// PHALANX_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Show the job on a web page while it runs, at PORT, HOST:PORT or [IPV6]:PORT [default with --live: a free port
    /// of 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    live: Option<Option<Address>>,
    /// Address to listen on for other ranks [default: loopback; on several hosts, the address that reaches the master]
    #[arg(long, value_name = "IP", env = "PHALANX_BIND")]
    pub bind: Option<IpAddr>,
}

/// A command line of nothing but [`RankArgs`].
#[derive(clap::Parser)]
struct Bare {
    #[command(flatten)]
    ranks: RankArgs,
}

impl RankArgs {
    /// The defaults, for commands without these flags.
    ///
    /// # Errors
    ///
    /// Usage errors of environment variables that stand for flags.
    pub fn untyped() -> Result<RankArgs> {
        use clap::Parser as _;
        match Bare::try_parse_from(["phalanx"]) {
            Ok(bare) => Ok(bare.ranks),
            Err(e) => Err(Error::usage(
                e.to_string().trim_start_matches("error: ").trim(),
            )),
        }
    }

    /// The world size, when it is known before the ranks have met; of several nodes, if each starts
    /// as many ranks as this one.
    pub fn known_world(&self) -> Result<usize> {
        Ok(match self.way()? {
            Way::Rank(place) => place.world,
            Way::Launcher(ranks, meeting) => ranks * meeting.map_or(1, |meeting| meeting.nodes),
        })
    }

    /// How many ranks this command starts, if it starts them.
    pub fn ranks_to_start(&self) -> Result<usize> {
        match self.nproc_per_node {
            Some(typed) => Ok(typed),
            None => untyped_ranks(&launch::real_env()),
        }
    }

    /// Whether the first rank is this process or one that it starts.
    pub fn has_first(&self) -> Result<bool> {
        Ok(match self.way()? {
            Way::Rank(place) => place.rank == 0,
            Way::Launcher(_, meeting) => meeting.is_none_or(|meeting| meeting.node_rank == Some(0)),
        })
    }

    /// Whether this process is one rank of a job that another program has started.
    pub fn is_rank(&self) -> Result<bool> {
        Ok(matches!(self.way()?, Way::Rank(_)))
    }

    /// The compute threads of each rank that this process is or runs, and where the number comes from.
    pub fn compute_threads(&self) -> Result<Threads> {
        match self.way()? {
            Way::Rank(place) => threads(self, Some(&place), place.local_world.unwrap_or(1)),
            Way::Launcher(ranks, _) => threads(self, None, ranks),
        }
    }

    /// What this process is: from a launcher's or cluster's variables, else from `--rank` and
    /// `--world-size`, else from `--nnodes`.
    fn way(&self) -> Result<Way> {
        let env = launch::real_env();
        // Ranks that this command started have its arguments too.
        let is_ours = env.contains_key(STARTED_VARIABLE);
        let world_size = self.world_size.filter(|_| !is_ours);
        let has_nodes = self.nodes.nnodes.is_some() && !is_ours;
        if let Some(place) = launch::rank_place(&env)?.filter(|p| !self.is_node(p, has_nodes, &env))
        {
            place.check(self.nproc_per_node, world_size, has_nodes)?;
            if !is_ours {
                self.nodes.check_of_rank(&place)?;
            }
            let is_found = place.is_by_rank()
                || place.master_addr.is_some()
                || engine::has_channel(&env, place.source);
            if self.init_method == "env://" && !is_found {
                return Err(Error::usage(format!(
                    "{} started {} ranks, and does not say on which host rank 0 runs",
                    place.source, place.world
                ))
                .note("fix", "set MASTER_ADDR to that host in all ranks (mpirun -x MASTER_ADDR=HOST), or add --init-method tcp://HOST:PORT"));
            }
            return Ok(Way::Rank(place));
        }
        let here = self.ranks_to_start()?;
        let (rank, world_size) = (self.rank.unwrap_or(0), self.world_size.unwrap_or(1));
        if rank >= world_size {
            return Err(Error::usage(format!(
                "--rank {rank} is not below --world-size {world_size}; ranks count from 0"
            )));
        }
        if let (Some(nodes), true) = (
            &self.nodes.nnodes,
            self.world_size.is_some() || self.rank.is_some(),
        ) {
            return Err(Error::usage(format!(
                "--nnodes {nodes} cannot be combined with --rank and --world-size: with --nnodes, this command starts the ranks of its node"
            )));
        }
        if world_size == 1 {
            // Ranks that are started here get the init method themselves.
            let meets = self.init_method != "env://" && here == 1;
            if self.world_size.is_none() && (meets || self.rank.is_some()) {
                let what = match meets {
                    true => format!("--init-method {}", self.init_method),
                    false => format!("--rank {rank}"),
                };
                return Err(Error::usage(format!(
                    "{what} requires --world-size N, the number of ranks that you start"
                )));
            }
            if self.world_size.is_some() {
                return Ok(Way::Launcher(here, None));
            }
            // With --nproc-per-node above 1 the ranks are started here.
            if here == 1
                && !has_nodes
                && let Some(error) = half_a_rank(&env)?
            {
                return Err(error);
            }
            let which = WhichNodes {
                flags: &self.nodes,
                endpoint: &None,
                standalone: false,
                default_port: launch::DEFAULT_PORT,
                by_arrival: false,
                asking: Asking::Ranks,
                command: &typed_command(),
            };
            let (meeting, _) = which.resolve(&env)?;
            if meeting.is_none()
                && let Some(flag) = self.nodes.beside_nnodes()
                && self.nodes.nnodes.is_none()
            {
                return Err(Error::usage(format!(
                    "{flag} requires --nnodes, the number of nodes"
                )));
            }
            return Ok(Way::Launcher(here, meeting));
        }
        if here > 1 {
            return Err(Error::usage(
                "--world-size cannot be combined with --nproc-per-node: each process that you start is one rank; use --nnodes for several ranks per node",
            ));
        }
        if self.init_method == "env://" {
            return Err(Error::usage(format!(
                "--world-size {world_size} requires --init-method tcp://HOST:PORT, the same for all ranks"
            )));
        }
        Ok(Way::Rank(RankPlace {
            source: "--rank",
            rank,
            world: world_size,
            local_rank: 0,
            local_world: None,
            // Not looked at: the init method says it.
            master_addr: None,
            master_port: 0,
        }))
    }

    /// Whether the process that an engine started at `place` is one node of several and starts the
    /// ranks there: it is the only process of its node, and `--nproc-per-node` is above 1 or there is
    /// `--nnodes`. `RANK` and `WORLD_SIZE` without `LOCAL_RANK` may count nodes, too.
    fn is_node(&self, place: &RankPlace, has_nodes: bool, env: &Env) -> bool {
        match place.is_by_rank() {
            true => has_nodes && !is_set(env, "LOCAL_RANK"),
            false => place.local_world == Some(1) && (has_nodes || self.nproc_per_node > Some(1)),
        }
    }

    /// The job token, from the command line or the environment.
    fn token(&self) -> Result<Option<Token>> {
        // Ranks of a launcher of ours have that launcher's, whatever was typed.
        let typed = self.token_file.as_deref();
        let typed = typed.filter(|_| !launch::is_under_a_launcher_of_ours());
        token::given(typed, &launch::real_env(), true)
    }

    /// The ports for other hosts. A launcher of ours has left out those that its ranks may not use.
    fn port_range(&self) -> Result<Option<PortRange>> {
        let env = launch::real_env();
        if launch::is_under_a_launcher_of_ours() && is_set(&env, PORTS_VARIABLE) {
            return Ok(None);
        }
        self.nodes.port_range(&env)
    }

    /// What a rank on several hosts agrees on with the others through the engine that started them.
    fn agree(&self, place: &RankPlace, token: Option<&Token>) -> Result<Option<Agreement>> {
        let env = launch::real_env();
        let is_by_hand = self.init_method != "env://" || place.is_by_rank();
        if is_by_hand || place.is_on_one_host() {
            return Ok(None);
        }
        let Some(process) = detect(&env)? else {
            return Ok(None);
        };
        let given = Given {
            token: token.cloned(),
            host: text(&env, "MASTER_ADDR").map(str::to_owned),
            port: is_set(&env, "MASTER_PORT")
                .then_some(place.master_port)
                .filter(|port| *port > 0),
            ports: self.port_range()?,
        };
        let limit = Duration::from_secs_f64(self.init_timeout);
        engine::agree(&env, &process, &given, self.bind, limit)
    }

    /// The init method of a rank that another program has started.
    fn meeting(&self, place: &RankPlace, has_token: bool) -> Result<String> {
        let env = launch::real_env();
        // torchrun starts ranks as engines do; those of a launcher of ours have a token.
        let is_started = !place.is_by_rank() || env.contains_key("TORCHELASTIC_RUN_ID");
        let file = match self.init_method == "env://" && is_started && !has_token {
            true if place.is_on_one_host() => store_file(&env)?,
            _ => None,
        };
        Ok(match (file, &place.master_addr) {
            (Some(file), _) => format!("file://{}", file.display()),
            // An engine's own variables say all that env:// needs, by other names.
            (None, Some(host)) if self.init_method == "env://" && !place.is_by_rank() => {
                format!("tcp://{}", host_port(host, place.master_port))
            }
            _ => self.init_method.clone(),
        })
    }

    /// Checks them for a command that sets the number of ranks itself and runs them as processes.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn check_untyped_world(&self) -> Result<()> {
        self.validate()?;
        let is_alone = self.nproc_per_node.unwrap_or(1) == 1 && self.nodes.nnodes.is_none();
        if !is_alone || self.world_size.is_some() || self.rank.is_some() {
            return Err(Error::usage(
                "--workers sets the number of ranks of this host; leave out --nproc-per-node, --nnodes, --world-size and --rank",
            ));
        }
        if self.transport == TransportArg::Thread {
            return Err(Error::usage(
                "compare runs its workers as processes; leave out --transport thread",
            ));
        }
        if self.live.is_some() {
            return Err(Error::usage(
                "--live shows one job, and compare runs several; leave it out",
            ));
        }
        Ok(())
    }

    /// What the user of a rank that another program started should know.
    fn say_of_place(&self, place: &RankPlace) {
        // Ranks that this command started have its arguments too.
        if place.rank > 0 || std::env::var_os(STARTED_VARIABLE).is_some() {
            return;
        }
        if place.is_by_rank() && place.world > 1 && std::env::var_os("LOCAL_RANK").is_none() {
            say::note(format_args!(
                "WORLD_SIZE={} counts ranks here, as LOCAL_RANK is not set; if it counts nodes, add --nnodes \"$WORLD_SIZE\"",
                place.world
            ));
        }
        if self.live.is_some() {
            say::note(
                "warning: --live is ignored: this process is one rank of a job that another program has started; \
                 give it to that program, if it is `phalanx launch`",
            );
        }
    }

    fn validate(&self) -> Result<()> {
        check_local_ranks("--nproc-per-node", self.nproc_per_node.unwrap_or(1))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        check_count("--threads", self.threads.unwrap_or(1), threads::most(cores))?;
        for (flag, seconds) in [
            ("--timeout", self.timeout),
            ("--init-timeout", self.init_timeout),
            ("--phase-timeout", self.phase_timeout),
        ] {
            if Duration::try_from_secs_f64(seconds).is_ok_and(|d| !d.is_zero()) {
                continue;
            }
            return Err(Error::usage(format!(
                "{flag} must be a number of seconds above 0"
            )));
        }
        Ok(())
    }
}

/// How a command becomes ranks.
enum Way {
    /// It is one.
    Rank(RankPlace),
    /// It starts so many on this node, which may be one of several.
    Launcher(usize, Option<Meeting>),
}

/// `phalanx train`, or the name of a program of a user's own.
fn typed_command() -> String {
    let mut args = std::env::args_os();
    let program = args.next().map(PathBuf::from);
    let name = program.as_deref().and_then(Path::file_name);
    let name = name.map_or_else(|| "phalanx".into(), |name| name.to_string_lossy());
    match args.next().filter(|_| name == "phalanx") {
        Some(command) => format!("{name} {}", command.to_string_lossy()),
        None => name.into_owned(),
    }
}

/// Which ranks write results, and so which lines need the rank in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speakers {
    /// Only rank 0 does.
    Rank0,
    /// Every rank does; each line gets its rank.
    All,
    /// Every rank does, in lines that name the rank themselves.
    Unmarked,
}

/// When the command was typed, in nanoseconds since 1970, for the ranks that it starts.
const STARTED_VARIABLE: &str = "PHALANX_STARTED_NS";

/// A usage error unless so many ranks can share the memory of one host.
pub fn check_local_ranks(flag: &str, value: usize) -> Result<()> {
    if value > MAX_LOCAL_RANKS {
        return Err(Error::usage(format!(
            "{flag} can be at most {MAX_LOCAL_RANKS}, not {value}: no more ranks can share the memory of one host"
        )));
    }
    check_count(flag, value, MAX_LOCAL_RANKS)
}

/// Runs `rank` in every rank of the world (or in the one that this process is).
/// `extra` arguments are added to the command line of started ranks; when
/// these fail, their flight recorders are written into `flight_dir`.
///
/// # Errors
///
/// The root cause.
pub fn run(
    args: &RankArgs,
    speakers: Speakers,
    extra: &[OsString],
    flight_dir: Option<&Path>,
    rank: impl Fn(&RankContext) -> Result<()> + Sync,
) -> Result<()> {
    args.validate()?;
    let started = Instant::now() - since_command_start();
    let (here, meeting) = match args.way()? {
        Way::Launcher(here, meeting) => (here, meeting),
        Way::Rank(place) => {
            args.say_of_place(&place);
            return as_launched_rank(args, &place, started, rank);
        }
    };
    let live = args.live.clone().map(Option::unwrap_or_default);
    check_count("--nproc-per-node", here, MAX_LOCAL_RANKS)?;
    // With a limit, the launcher must survive to report a rank that got no memory.
    let is_limited = getrlimit(Resource::As).current.is_some();
    if args.transport == TransportArg::Thread && live.is_some() {
        return Err(Error::usage(
            "--live shows ranks that are processes; leave out --transport thread",
        ));
    }
    if args.transport == TransportArg::Thread && meeting.is_some() {
        return Err(Error::usage(
            "--transport thread runs all ranks in one process; leave it out on several nodes",
        ));
    }
    let can_be_here = here == 1 && !is_limited && live.is_none() && meeting.is_none();
    if args.transport == TransportArg::Thread || can_be_here {
        return as_threads(args, here, speakers, started, rank);
    }
    let own = std::env::args_os().skip(1);
    let own = own.chain(extra.iter().cloned()).collect();
    let mut local = LocalRun::new(here, own);
    local.prefix = match speakers {
        Speakers::Rank0 => Prefix::AllButRank0,
        Speakers::All => Prefix::Everybody,
        Speakers::Unmarked => Prefix::Nobody,
    };
    local.live = live;
    local.flight_dir = flight_dir.map(Path::to_owned);
    local.token_file = args.token_file.clone();
    local.bind = args.bind;
    local.meeting_timeout = Duration::from_secs_f64(args.init_timeout);
    local.meeting = meeting;
    start(local)
}

/// Starts this program as ranks, and *blocks* until all have ended.
///
/// # Errors
///
/// The root cause.
pub fn start(mut local: LocalRun) -> Result<()> {
    // The page shows what rank 0 writes too.
    local.rank0_owns_stderr &= local.live.is_none();
    if let Some(grace) = stop::grace() {
        local.stop_grace = grace;
    }
    if let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) {
        local
            .variables
            .push((STARTED_VARIABLE.into(), now.as_nanos().to_string().into()));
    }
    launch::run_local(local)
}

/// How long ago the command was typed that started this rank; nothing when this is it.
fn since_command_start() -> Duration {
    std::env::var(STARTED_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .map(Duration::from_nanos)
        .and_then(|then| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .ok()?
                .checked_sub(then)
        })
        .unwrap_or_default()
}

fn as_launched_rank(
    args: &RankArgs,
    place: &RankPlace,
    started: Instant,
    rank: impl Fn(&RankContext) -> Result<()>,
) -> Result<()> {
    stop::listen_early()?;
    let token = args.token()?;
    let (init_method, token, until_met) = match args.agree(place, token.as_ref())? {
        Some(agreed) => (agreed.url(), Some(agreed.token), agreed.until_met),
        None => {
            let met = UntilMet::default();
            (args.meeting(place, token.is_some())?, token, met)
        }
    };
    let transport = match args.transport {
        TransportArg::Auto => Transport::Auto,
        TransportArg::Shm => Transport::Shm,
        TransportArg::Tcp => Transport::Tcp,
        TransportArg::Thread => {
            return Err(Error::usage(
                "--transport thread runs all ranks in one process, but a launcher started this one as a rank of \
                 several; use auto, shm or tcp",
            ));
        }
    };
    let threads = threads(args, Some(place), place.local_world.unwrap_or(1))?.count;
    let group = ProcessGroup::init(InitOptions {
        init_method,
        rank: Some(place.rank),
        world_size: Some(place.world),
        token,
        timeout: Duration::from_secs_f64(args.init_timeout),
        op_timeout: Duration::from_secs_f64(args.timeout),
        first_op_timeout: Duration::from_secs_f64(args.init_timeout),
        transport,
        bind: args.bind,
        port_range: args.port_range()?,
        algorithm: args.algorithm,
        compute_threads: Some(threads),
        ..InitOptions::default()
    })?;
    drop(until_met);
    let ctx = RankContext {
        phase_limit: Duration::from_secs_f64(args.phase_timeout),
        threads,
        local_rank: place.local_rank,
        prefix: None,
        started,
        group,
    };
    let outcome = rank(&ctx);
    finish(ctx, outcome)
}

fn as_threads(
    args: &RankArgs,
    world: usize,
    speakers: Speakers,
    started: Instant,
    rank: impl Fn(&RankContext) -> Result<()> + Sync,
) -> Result<()> {
    crate::signals::end_on_signals()?;
    stop::listen_early()?;
    let threads = threads(args, None, world)?.count;
    let options = GroupOptions {
        op_timeout: Duration::from_secs_f64(args.timeout),
        first_op_timeout: Duration::from_secs_f64(args.init_timeout),
        algorithm: args.algorithm,
        compute_threads: Some(threads),
        ..GroupOptions::default()
    };
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let handles: Vec<_> = ProcessGroup::threads(world, options)
            .into_iter()
            .map(|group| {
                let ctx = RankContext {
                    phase_limit: Duration::from_secs_f64(args.phase_timeout),
                    threads,
                    local_rank: group.rank(),
                    prefix: (world > 1 && speakers == Speakers::All)
                        .then(|| format!("[rank {}] ", group.rank())),
                    started,
                    group,
                };
                let rank = &rank;
                scope.spawn(move || {
                    let outcome = rank(&ctx);
                    finish(ctx, outcome)
                })
            })
            .collect();
        handles
            .into_iter()
            .enumerate()
            .map(|(r, handle)| {
                // Every operation in there has a deadline of its own.
                handle
                    .join()
                    .unwrap_or_else(|panic| Err(panicked(r, &*panic)))
            })
            .collect()
    });
    // A rank that lost a peer is not the cause.
    let mut failures: Vec<Error> = outcomes.into_iter().filter_map(Result::err).collect();
    let cause = failures
        .iter()
        .position(|e| e.kind() != ErrorKind::PeerLost)
        .unwrap_or(0);
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.swap_remove(cause))
    }
}

/// The error of a rank whose panic has been printed: of its program's code, or of ours.
fn panicked(rank: usize, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = text.map_or(String::new(), |text| format!(": {text}"));
    Error::new(ErrorKind::Failed, format!("rank {rank} panicked{text}"))
}

/// Leaves the group: with a shutdown after success and when all ranks stop together; with an abort
/// after a failure, so that the other ranks get the cause at once instead of a lost connection.
fn finish(ctx: RankContext, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if !error.is_told() => {
            ctx.group.abort(&error.to_string());
            Err(error)
        }
        outcome => {
            let left = ctx.group.shutdown().map_err(Error::from);
            match outcome {
                // All is saved.
                Err(error) if error.kind() == ErrorKind::Stopped => left,
                outcome => outcome.and(left),
            }
        }
    }
}

/// Compute threads of each of `ranks` ranks on this host, of which this process is the one at `place`, or runs all.
fn threads(args: &RankArgs, place: Option<&RankPlace>, ranks: usize) -> Result<Threads> {
    let env = launch::real_env();
    threads::decide(args.threads, &env, place, ranks, Cores::here(&env))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panic of a user's program is not called a bug of ours.
    #[test]
    fn a_panic_is_named_by_its_text() {
        let error = panicked(3, &"no row 7".to_owned());
        assert_eq!(error.render(), "error: rank 3 panicked: no row 7\n");
        assert_eq!(panicked(0, &"x").chain(), "rank 0 panicked: x");
        assert_eq!(panicked(0, &7).chain(), "rank 0 panicked");
    }
}
