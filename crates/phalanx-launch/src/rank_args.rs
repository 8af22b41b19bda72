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
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args as _, FromArgMatches as _};
use phalanx_base::panic_text;
use phalanx_comm::{GroupOptions, InitOptions, MAX_LOCAL_RANKS, ProcessGroup, Transport};
use phalanx_member::{Elastic, Newcomer, RankContext};
use phalanx_store::host_port;
use phalanx_wire::Token;
use rustix::process::{Resource, getrlimit};

use crate::args::check_evict_after;
use crate::contract::{ELASTIC_VARIABLE, JOIN_VARIABLE, STARTED_VARIABLE};
use crate::engine::{self, Agreement, RendezvousResources};
use crate::error::{Error, ErrorKind, Result, check_count, refuse};
use crate::flags::{RankArgs, TransportArg};
use crate::place::{self, Env, Node, Place, Process, real_env};
use crate::plan::LaunchPlan;
use crate::streams::Prefix;
use crate::threads::{self, Cores, Threads};
use crate::{Launch, RunJob, say, stop, token};

impl RankArgs {
    /// The defaults, for commands without these flags.
    ///
    /// # Errors
    ///
    /// Usage errors of environment variables that stand for flags.
    pub fn untyped() -> Result<RankArgs> {
        let command = RankArgs::augment_args(clap::Command::new("phalanx"));
        let matches = command.try_get_matches_from(["phalanx"]);
        let args = matches.and_then(|matches| RankArgs::from_arg_matches(&matches));
        args.map_err(|e| Error::usage(e.to_string().trim_start_matches("error: ").trim()))
    }

    /// The world size, when it is known before the ranks have met; of several nodes, if each starts
    /// as many ranks as this one.
    pub fn known_world(&self) -> Result<usize> {
        Ok(match self.place()? {
            Place::Rank(rank) => first_world(&real_env())?.unwrap_or(rank.world),
            Place::Node(node) => node.local_ranks * node.meeting.map_or(1, |meeting| meeting.nodes),
        })
    }

    /// How many ranks this command starts, if it starts them.
    pub fn ranks_to_start(&self) -> Result<usize> {
        place::local_ranks(self, &real_env())
    }

    /// Whether the first rank is this process or one that it starts; `None` before nodes that come and go have met.
    pub fn has_first(&self) -> Result<Option<bool>> {
        Ok(match self.place()? {
            // In place of a lost rank 0 there is another one.
            Place::Rank(rank) => {
                let joins = place::number(&real_env(), JOIN_VARIABLE)?.is_some();
                Some(rank.rank == 0 && !joins)
            }
            Place::Node(node) if node.comes_and_goes() => None,
            Place::Node(node) => Some(node.is_first()),
        })
    }

    /// Whether the job continues when ranks or nodes are lost.
    pub fn is_elastic(&self) -> bool {
        let nodes = self.nodes.nnodes.as_deref().unwrap_or_default();
        self.nodes.elastic || nodes.contains(':')
    }

    /// Whether this process is one rank of a job that another program has started.
    pub fn is_rank(&self) -> Result<bool> {
        Ok(matches!(self.place()?, Place::Rank(_)))
    }

    /// The compute threads of each rank that this process is or runs, and where the number comes from.
    pub fn compute_threads(&self) -> Result<Threads> {
        match self.place()? {
            Place::Rank(rank) => self.threads_of(Some(&rank), rank.local_world.unwrap_or(1)),
            Place::Node(node) => self.threads_of(None, node.local_ranks),
        }
    }

    /// Compute threads of each of `ranks` ranks on this host, of which this process is `rank`, or runs all.
    fn threads_of(&self, rank: Option<&Process>, ranks: usize) -> Result<Threads> {
        let env = real_env();
        threads::decide(self.threads, &env, rank, ranks, Cores::here())
    }

    /// What this process is.
    fn place(&self) -> Result<Place> {
        Place::of_ranks(self, &real_env(), &typed_command())
    }

    /// What a rank on several hosts agrees on with the others through the engine that started them.
    fn agree(&self, rank: &Process, token: Option<&Token>, env: &Env) -> Result<Option<Agreement>> {
        let is_by_hand = self.init_method != "env://" || rank.is_by_variables();
        if is_by_hand || rank.is_on_one_host() {
            return Ok(None);
        }
        let given = rank.given_address(env, place::ports_of_rank(self, env)?);
        let limit = Duration::from_secs_f64(self.init_timeout);
        engine::agree(env, rank, token, &given, self.bind, limit)
    }

    /// The init method of a rank that another program has started.
    fn rank_init_method(&self, rank: &Process, has_token: bool, env: &Env) -> Result<String> {
        if self.init_method != "env://" {
            return Ok(self.init_method.clone());
        }
        // torchrun starts ranks as engines do; those of a launcher of ours have a token.
        if rank.is_by_engine(env)
            && !has_token
            && rank.is_on_one_host()
            && let Some(file) = rank.address_file(env)
        {
            return Ok(format!("file://{}", file.display()));
        }
        Ok(match &rank.master_addr {
            // An engine's own variables say all that env:// needs, by other names.
            Some(host) if !rank.is_by_variables() => {
                format!("tcp://{}", host_port(host, rank.master_port))
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
        let why = if !is_alone || self.world_size.is_some() || self.rank.is_some() {
            "--workers sets the number of ranks of this host; leave out --nproc-per-node, --nnodes, --world-size and --rank"
        } else if self.transport == TransportArg::Thread {
            "compare runs its workers as processes; leave out --transport thread"
        } else if self.nodes.live.is_some() {
            "--live shows one job, and compare runs several; leave it out"
        } else {
            return Ok(());
        };
        Err(Error::usage(why))
    }

    /// What the user of a rank that another program started should know.
    fn say_of_rank(&self, rank: &Process, env: &Env) {
        // Ranks that this command started have its arguments too.
        if rank.rank > 0 || env.contains_key(STARTED_VARIABLE) {
            return;
        }
        if rank.is_by_variables() && rank.world > 1 && !env.contains_key("LOCAL_RANK") {
            say::note(format_args!(
                "WORLD_SIZE={} counts ranks here, as LOCAL_RANK is not set; if it counts nodes, add --nnodes \"$WORLD_SIZE\"",
                rank.world
            ));
        }
        if self.nodes.live.is_some() {
            say::note(
                "warning: --live is ignored: this process is one rank of a job that another program has started; \
                 give it to that program, if it is `phalanx launch`",
            );
        }
    }

    fn validate(&self) -> Result<()> {
        check_local_ranks("--nproc-per-node", self.nproc_per_node.unwrap_or(1))?;
        let cores = crate::cores();
        check_count("--threads", self.threads.unwrap_or(1), threads::most(cores))?;
        for (flag, seconds) in [
            ("--timeout", self.timeout),
            ("--init-timeout", self.init_timeout),
            ("--phase-timeout", self.phase_timeout),
        ] {
            if Duration::try_from_secs_f64(seconds).is_ok_and(|d| !d.is_zero()) {
                continue;
            }
            refuse!("{flag} must be a number of seconds above 0");
        }
        if let Some(seconds) = self.evict_after {
            let after = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            check_evict_after(after, self.is_elastic())?;
            if seconds >= self.timeout {
                refuse!(
                    "--evict-after {seconds} is not less than --timeout {}, after which the other ranks give up",
                    self.timeout
                );
            }
        }
        Ok(())
    }
}

/// With how many ranks an elastic job began.
fn first_world(env: &Env) -> Result<Option<usize>> {
    let first = place::number(env, ELASTIC_VARIABLE)?;
    Ok(first.filter(|world| *world > 0))
}

/// How many times `--timeout` ranks that form a new group wait for one that is alive: it may be evaluating or saving on its own.
const PATIENCE_IN_TIMEOUTS: u32 = 10;

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

/// Which ranks print on standard output, and whether each line begins with its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrintingRanks {
    /// Rank 0.
    Rank0,
    /// All ranks; each line begins with the rank.
    All,
    /// All ranks, their lines as they are.
    AllUnmarked,
}

/// A usage error unless this number of ranks can share the memory of one host.
pub fn check_local_ranks(flag: &str, value: usize) -> Result<()> {
    if value > MAX_LOCAL_RANKS {
        refuse!(
            "{flag} can be at most {MAX_LOCAL_RANKS}, not {value}: no more ranks can share the memory of one host"
        );
    }
    check_count(flag, value, MAX_LOCAL_RANKS)
}

/// Runs `rank` in every rank of the world (or in the one that this process is).
/// `extra` arguments are added to the command line of started ranks; when
/// these fail, their flight recorders are written into `flight_dir`. `run_job` runs the job of started ranks.
///
/// # Errors
///
/// The root cause.
pub fn run(
    args: &RankArgs,
    printing: PrintingRanks,
    extra: &[OsString],
    flight_dir: Option<&Path>,
    run_job: RunJob,
    rank: impl Fn(&RankContext) -> Result<()> + Sync,
) -> Result<()> {
    args.validate()?;
    let started = Instant::now() - since_command_start();
    let mut node = match args.place()? {
        Place::Node(node) => *node,
        Place::Rank(place) => return as_launched_rank(args, &place, started, rank),
    };
    check_count("--nproc-per-node", node.local_ranks, MAX_LOCAL_RANKS)?;
    let is_one_node = node.meeting.is_none();
    // Its nodes come and go.
    let elastic = args.nodes.elastic || node.comes_and_goes();
    // With a limit, the launcher must survive to report a rank that got no memory.
    let is_limited = getrlimit(Resource::As).current.is_some();
    if args.transport == TransportArg::Thread && (elastic || args.max_restarts > 0) {
        refuse!(
            "--elastic and --max-restarts are for ranks that are processes; leave out --transport thread"
        );
    }
    if args.transport == TransportArg::Thread {
        let why = match (&args.nodes.live, is_one_node) {
            (Some(_), _) => "--live shows ranks that are processes; leave out --transport thread",
            (None, false) => {
                "--transport thread runs all ranks in one process; leave it out on several nodes"
            }
            (None, true) => return as_threads(args, node.local_ranks, printing, started, rank),
        };
        return Err(Error::usage(why));
    }
    let is_supervised = is_limited || args.nodes.live.is_some() || elastic || args.max_restarts > 0;
    if node.local_ranks == 1 && !is_supervised && is_one_node {
        return as_threads(args, 1, printing, started, rank);
    }
    if let Some(meeting) = &mut node.meeting {
        meeting.timeout = Duration::from_secs_f64(args.init_timeout);
        let lost_after = meeting.lost_after.as_secs_f64();
        if elastic && lost_after >= args.timeout {
            refuse!(
                "--lost-after {lost_after} is not less than --timeout {}, after which the other ranks give up",
                args.timeout
            );
        }
    }
    let own = std::env::args_os().skip(1).collect();
    let (env, token_file) = (real_env(), args.nodes.token_file.as_deref());
    let mut plan = LaunchPlan::of_this_program(node, own, extra, token_file, args.bind, &env)?;
    plan.prefix = match printing {
        PrintingRanks::Rank0 => Prefix::AllButRank0,
        PrintingRanks::All => Prefix::All,
        PrintingRanks::AllUnmarked => Prefix::None,
    };
    if !env.contains_key("RAYON_NUM_THREADS") {
        plan.rayon_threads = args.threads.or(plan.rayon_threads);
    }
    plan.args.elastic = elastic;
    plan.args.evict_after = args.evict_after.map(Duration::from_secs_f64);
    plan.args.max_restarts = args.max_restarts;
    plan.args.live = args.nodes.live.clone().map(Option::unwrap_or_default);
    // The page shows what rank 0 writes too.
    plan.rank0_owns_stderr &= plan.args.live.is_none();
    plan.flight_dir = flight_dir.map(Path::to_owned);
    run_plan(plan, run_job)
}

/// Starts this program as `ranks` ranks with `args` and `more` arguments, and *blocks* until all have ended. When these fail, their flight
/// recorders are written into `flight_dir`.
///
/// Must be called on a thread that lives as long as the process, best the main one.
///
/// # Errors
///
/// The root cause; its [`exit_code`](crate::error::Error::exit_code) is the job's, printing it is the caller's.
pub fn start(
    ranks: usize,
    args: Vec<OsString>,
    more: &[OsString],
    flight_dir: PathBuf,
    run_job: RunJob,
) -> Result<()> {
    let node = Node::alone(ranks);
    let mut plan = LaunchPlan::of_this_program(node, args, more, None, None, &real_env())?;
    plan.flight_dir = Some(flight_dir);
    run_plan(plan, run_job)
}

fn run_plan(plan: LaunchPlan, run_job: RunJob) -> Result<()> {
    let owns_stderr = plan.rank0_owns_stderr;
    let result = run_job(Launch::new(plan)?);
    if result.is_err() && owns_stderr {
        // Rank 0's progress bar may have left the cursor inside a line.
        say::note("");
    }
    result
}

/// How long ago the command was typed that started this rank; nothing when this is it.
fn since_command_start() -> Duration {
    let since = || {
        let then = std::env::var(STARTED_VARIABLE).ok()?.parse().ok()?;
        phalanx_base::unix_time().checked_sub(Duration::from_nanos(then))
    };
    since().unwrap_or_default()
}

fn as_launched_rank(
    args: &RankArgs,
    place: &Process,
    started: Instant,
    rank: impl Fn(&RankContext) -> Result<()>,
) -> Result<()> {
    let env = &real_env();
    args.say_of_rank(place, env);
    stop::listen_early()?;
    // Ranks of a launcher of ours have that launcher's, whatever was typed.
    let typed = args.nodes.token_file.as_deref();
    let typed = typed.filter(|_| !place::is_under_launcher(env));
    let token = token::find(typed, env, true)?;
    let (init_method, token, until_met) = match args.agree(place, token.as_ref(), env)? {
        Some(agreed) => (agreed.url(), Some(agreed.token), agreed.until_met),
        None => {
            let url = args.rank_init_method(place, token.is_some(), env)?;
            (url, token, RendezvousResources::default())
        }
    };
    let transport = match args.transport {
        TransportArg::Auto => Transport::Auto,
        TransportArg::Shm => Transport::Shm,
        TransportArg::Tcp => Transport::Tcp,
        TransportArg::Thread => {
            refuse!(
                "--transport thread runs all ranks in one process, but a launcher started this one as a rank of \
                 several; use auto, shm or tcp"
            );
        }
    };
    let threads = args.threads_of(Some(place), place.local_world.unwrap_or(1))?;
    let threads = threads.count;
    let init = InitOptions {
        init_method,
        rank: Some(place.rank),
        world_size: Some(place.world),
        token,
        timeout: Duration::from_secs_f64(args.init_timeout),
        op_timeout: Duration::from_secs_f64(args.timeout),
        first_op_timeout: Duration::from_secs_f64(args.init_timeout),
        transport,
        bind: args.bind,
        port_range: place::ports_of_rank(args, env)?,
        algorithm: args.algorithm,
        compute_threads: Some(threads),
        ..InitOptions::default()
    };
    let mut ctx = match place::number(env, JOIN_VARIABLE)? {
        Some(number) => {
            let newcomer = Newcomer::new(number, init)?;
            let alone = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
            RankContext::of_newcomer(newcomer, alone, threads)
        }
        None => RankContext::new(ProcessGroup::init(init)?, threads),
    };
    ctx.elastic = first_world(env)?.map(|first_world| Elastic {
        first_world,
        patience: Duration::from_secs_f64(args.timeout)
            .saturating_mul(PATIENCE_IN_TIMEOUTS)
            .min(Duration::from_secs_f64(args.phase_timeout)),
    });
    drop(until_met);
    ctx.phase_limit = Duration::from_secs_f64(args.phase_timeout);
    ctx.local_rank = place.local_rank;
    ctx.runs_since(started.elapsed());
    let outcome = rank(&ctx);
    finish(ctx, outcome)
}

fn as_threads(
    args: &RankArgs,
    world: usize,
    printing: PrintingRanks,
    started: Instant,
    rank: impl Fn(&RankContext) -> Result<()> + Sync,
) -> Result<()> {
    phalanx_process::signals::end_on_signals()?;
    stop::listen_early()?;
    let threads = args.threads_of(None, world)?.count;
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
                let prefix = format!("[rank {}] ", group.rank());
                let mut ctx = RankContext::new(group, threads);
                ctx.phase_limit = Duration::from_secs_f64(args.phase_timeout);
                ctx.prefix = (world > 1 && printing == PrintingRanks::All).then_some(prefix);
                ctx.runs_since(started.elapsed());
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
    let text = panic_text(panic);
    let colon = if text.is_empty() { "" } else { ": " };
    Error::new(
        ErrorKind::Failed,
        format!("rank {rank} panicked{colon}{text}"),
    )
}

/// Leaves the group: with a shutdown after success and when all ranks stop together; with an abort
/// after a failure, so that the other ranks get the cause at once instead of a lost connection.
fn finish(ctx: RankContext, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if !error.is_printed() => {
            ctx.group().abort(&error.to_string());
            Err(error)
        }
        outcome => {
            let left = match ctx.group().shutdown() {
                // What an elastic training leaves is complete.
                Err(_) if ctx.elastic.is_some() => Ok(()),
                left => left.map_err(Error::from),
            };
            match outcome {
                // All is saved.
                Err(error) if error.kind() == ErrorKind::Stopped => left,
                outcome => outcome.and(left),
            }
        }
    }
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
