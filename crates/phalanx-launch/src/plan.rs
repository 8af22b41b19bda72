//! From settings to a plan: finds the program, reads or creates the token. The last step
//! before sockets and processes.

use std::cell::Cell;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use phalanx_base::env::TOKEN_VARIABLE;
use phalanx_comm::transport::is_own_address;
use phalanx_process::proc_stat::path_of;
use phalanx_process::{folder, own_program};
use phalanx_wire::Token;

use super::args::LaunchArgs;
use super::contract::{ARGUMENTS_FILE_VARIABLE, AS_GLOO_VARIABLE, STARTED_VARIABLE};
use super::engine::{self, RendezvousResources};
use super::place::{Env, Meeting, Node};
use super::program::Program;
use super::streams::{Logs, Prefix};
use super::token;
use crate::error::{Error, Result};
use crate::threads::Cores;
use crate::{say, stop};

/// Everything that a launch needs, checked.
pub struct LaunchPlan {
    /// The settings.
    pub args: LaunchArgs,
    /// Listen address.
    pub bind: Option<IpAddr>,
    /// The job's name.
    pub run_id: String,
    /// Output files.
    pub logs: Option<Logs>,
    /// The job's secret.
    pub token: Token,
    /// Dropped when the nodes have met.
    pub until_met: Cell<RendezvousResources>,
    /// Where flight recorders are written; `None`: where the ranks ask for.
    pub flight_dir: Option<PathBuf>,
    /// Ranks that end with code 130 have printed why.
    pub ranks_report: bool,
    /// Whose lines get a prefix.
    pub prefix: Prefix,
    /// Rank 0 writes to our stderr itself, so that its progress bar sees the
    /// terminal. Its last lines are then not known to the report.
    pub rank0_owns_stderr: bool,
    /// The arguments that [`ARGUMENTS_FILE_VARIABLE`] names.
    pub arguments: Option<OwnedFd>,
    /// More variables for the ranks.
    pub variables: Vec<(OsString, OsString)>,
    /// OMP_NUM_THREADS is set outside.
    pub threads_set: bool,
    /// Of rayon in each rank, unless RAYON_NUM_THREADS is set outside.
    pub rayon_threads: Option<usize>,
}

impl LaunchPlan {
    /// Finds the program, reads or mints the token.
    ///
    /// # Errors
    /// `Usage` for a program that is not there and for a missing, loose or
    /// broken token file.
    pub fn prepare(mut args: LaunchArgs, env: &Env) -> Result<Self> {
        args.run.check(env)?;
        let bind = args.bind.as_deref().map(own_address).transpose()?;
        let node = &mut args.node;
        let typed = args.token_file.as_deref();
        let (token, until_met) = job_token(typed, env, node.meeting.as_mut(), bind)?;
        // As torchrun: a given address without a name is "none".
        let is_named = node.meeting.is_some() || node.master_port.is_some();
        let run_id = run_id(args.run_id.take(), is_named)?;
        let name = node.meeting.as_ref().map(|meeting| {
            let host = || phalanx_base::host_name();
            meeting
                .node_rank
                .map_or_else(host, |rank| format!("node{rank}"))
        });
        let filters = [&args.torchrun.out_filters, &args.torchrun.err_filters];
        let are_wanted = args.redirects.any()
            || args.tee.any()
            || filters.iter().any(|filters| !filters.is_empty());
        let dir = match args.log_dir.take() {
            None if are_wanted => Some(folder::temporary()?),
            dir => dir,
        };
        let logs = match &dir {
            None => None,
            Some(dir) => Some(Logs {
                dir: folder::for_logs(dir, &run_id, name.as_deref())?,
                redirects: args.redirects.clone(),
                tee: args.tee.clone(),
            }),
        };
        let flight_dir = env
            .get(phalanx_comm::recorder::DIR_VARIABLE)
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
            .or_else(|| Some(logs.as_ref()?.dir.join("flight")));
        let alone = args.node.local_ranks == 1 && args.node.meeting.is_none();
        let prefix = args.prefix && (!alone || args.torchrun.prefix_template.is_some());
        let as_gloo = args.as_gloo.then(|| (AS_GLOO_VARIABLE.into(), "1".into()));
        Ok(LaunchPlan {
            bind,
            run_id,
            logs,
            flight_dir,
            prefix: match prefix {
                true => Prefix::All,
                false => Prefix::None,
            },
            variables: as_gloo.into_iter().collect(),
            ..LaunchPlan::new(args, token, until_met, env)
        })
    }

    /// The ranks of `node` as processes of this program, each with `args` and `more` arguments; flags of a configuration
    /// that was read here are among them, and no rank reads it again. Lines of rank 0, which reports for the job,
    /// have no prefix, and on a terminal it writes to it directly. `token_file` and `bind` are as typed.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn of_this_program(
        mut node: Node,
        mut args: Vec<OsString>,
        more: &[OsString],
        token_file: Option<&Path>,
        bind: Option<IpAddr>,
        env: &Env,
    ) -> Result<Self> {
        let started = phalanx_base::unix_time().as_nanos().to_string();
        let (token, until_met) = match &mut node.meeting {
            // Variables belong to an outer job.
            None => (token::mint()?, RendezvousResources::default()),
            meeting => job_token(token_file, env, meeting.as_mut(), bind)?,
        };
        let arguments = say::configured().map(|words| {
            let words: Vec<&[u8]> = words.iter().chain(more).map(|w| w.as_bytes()).collect();
            token::memory_file_of(words.join(&0), "the arguments of ranks")
        });
        let arguments = arguments.transpose()?;
        let file = arguments.as_ref().map(path_of);
        let file = file.map(|file| (ARGUMENTS_FILE_VARIABLE.into(), file));
        args.extend(more.iter().cloned());
        let program = std::env::current_exe();
        let run = Program {
            program: program.map_or_else(|_| own_program(), PathBuf::into_os_string),
            args,
            script: None,
        };
        let run_id = run_id(None, node.meeting.is_some())?;
        let is_first = node.is_first();
        let grace = stop::grace().unwrap_or(crate::STOP_GRACE);
        let args = LaunchArgs {
            stop_grace: grace,
            handler_grace: grace,
            ..LaunchArgs::new(node, run)
        };
        Ok(LaunchPlan {
            bind,
            run_id,
            ranks_report: true,
            prefix: Prefix::AllButRank0,
            rank0_owns_stderr: is_first && std::io::stderr().is_terminal(),
            arguments,
            variables: [(STARTED_VARIABLE.into(), started.into())]
                .into_iter()
                .chain(file)
                .collect(),
            ..LaunchPlan::new(args, token, until_met, env)
        })
    }

    fn new(
        args: LaunchArgs,
        token: Token,
        until_met: RendezvousResources,
        env: &Env,
    ) -> LaunchPlan {
        let ranks = args.node.local_ranks;
        let rayon_threads = (ranks > 1).then(|| (Cores::here().shared / ranks).max(1));
        LaunchPlan {
            args,
            bind: None,
            run_id: String::new(),
            logs: None,
            token,
            until_met: until_met.into(),
            flight_dir: None,
            ranks_report: false,
            prefix: Prefix::None,
            rank0_owns_stderr: false,
            arguments: None,
            variables: Vec::new(),
            threads_set: env.contains_key("OMP_NUM_THREADS"),
            rayon_threads: rayon_threads.filter(|_| !env.contains_key("RAYON_NUM_THREADS")),
        }
    }
}

/// The token from `file`, a variable, or, on one node, a new one. On several, the engine that started them may carry
/// one to all, with the address at which they meet.
///
/// # Errors
/// `Usage` for a file or variable that holds none, and where several nodes have none.
fn job_token(
    file: Option<&Path>,
    env: &Env,
    meeting: Option<&mut Meeting>,
    bind: Option<IpAddr>,
) -> Result<(Token, RendezvousResources)> {
    let given = token::find(file, env, meeting.is_some())?;
    let Some(meeting) = meeting else {
        let token = given.map_or_else(token::mint, Ok)?;
        return Ok((token, RendezvousResources::default()));
    };
    match engine::settle(meeting, given, env, bind)? {
        (Some(token), until_met) => Ok((token, until_met)),
        (None, _) => Err(Error::usage("several nodes need a common job token")
            .note(
                "make",
                "phalanx token --out job.token     (once; copy it to every node, mode 0600)",
            )
            .note("then", "add --token-file job.token on every node")
            .note(
                "or",
                format!(
                    "set {} to its text, where no file can be shared",
                    TOKEN_VARIABLE
                ),
            )),
    }
}

/// The name of a job at a given address that was given none.
pub(crate) const UNNAMED: &str = "none";

/// The job's name: the given one, the same on all nodes where there is an address, or a random one.
fn run_id(given: Option<String>, is_named: bool) -> Result<String> {
    match given {
        Some(id) => Ok(id),
        None if is_named => Ok(UNNAMED.to_owned()),
        None => folder::random_id(),
    }
}

/// The address of this host that `text` is or names.
fn own_address(text: &str) -> Result<IpAddr> {
    let addresses = (text, 0).to_socket_addrs().map_err(|error| {
        Error::usage(format!(
            "--bind {text} is neither an IP address nor a host name that is known here"
        ))
        .caused_by(error)
    })?;
    let addresses: Vec<IpAddr> = addresses.map(|address| address.ip()).collect();
    let is_own = |address: &&IpAddr| is_own_address(**address);
    addresses.iter().find(is_own).copied().ok_or_else(|| {
        let shown: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let shown = match &shown[..] {
            [one] if one == text => String::new(),
            all => format!(" ({})", all.join(", ")),
        };
        Error::usage(format!(
            "--bind {text}{shown} is not an address of this host"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::LaunchCli;

    #[test]
    fn as_gloo_is_a_variable_of_the_ranks() {
        let variables = |as_gloo| {
            let cli = LaunchCli {
                as_gloo,
                program: vec!["/bin/sh".into()],
                ..LaunchCli::default()
            };
            let args = LaunchArgs::resolve(&cli, &Env::new(), 1).unwrap();
            let plan = LaunchPlan::prepare(args, &Env::new()).unwrap();
            plan.variables
        };
        assert_eq!(variables(false), []);
        let set = (AS_GLOO_VARIABLE.into(), "1".into());
        assert_eq!(variables(true), [set]);
    }

    #[test]
    fn addresses_of_this_host_may_be_names() {
        let loopback = |text| own_address(text).is_ok_and(|ip| ip.is_loopback());
        assert!(loopback("127.0.0.2") && loopback("localhost"));
        for (text, want) in [
            ("", "--bind  is neither"),
            ("no such host", "--bind no such host is neither"),
            (
                "192.0.2.1",
                "--bind 192.0.2.1 is not an address of this host",
            ),
        ] {
            let error = own_address(text).unwrap_err();
            assert!(error.chain().starts_with(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
    }
}
