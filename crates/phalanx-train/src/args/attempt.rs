//! Which attempt of a job this process belongs to, where a launcher starts the ranks again after a failure.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use rustix::process::{Pid, getppid};

use crate::error::Result;
use crate::say;
use phalanx_base::env::{number, real_env};

/// How often the ranks were started before.
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";

/// The job's name, which its user may give to other jobs too.
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";

/// How often they may be.
const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";

/// Whether a launcher starts ranks again.
pub(crate) fn restarts_ranks() -> bool {
    std::env::var(MAX_RESTARTS).is_ok_and(|most| most != "0")
}

/// What a launcher gives each rank of an attempt, and what the rank's own children inherit.
const OF_A_RANK: [&str; 4] = [RESTARTS, RUN_ID, "RANK", "MASTER_PORT"];

/// One attempt of a job.
#[derive(Debug, Clone, Default)]
pub(crate) struct Attempt {
    /// Attempts before this one.
    pub(crate) restarts: usize,
    /// The same in all attempts of a job that one launcher makes on this host, and nowhere else: the training has the same
    /// arguments in each. `None` where no launcher would make another.
    pub(crate) job: Option<String>,
}

impl Attempt {
    /// What the environment says.
    ///
    /// # Errors
    ///
    /// Usage, when the variables are no numbers.
    pub(crate) fn of_this_process() -> Result<Attempt> {
        let restarts = number(&real_env(), RESTARTS)?;
        let most = std::env::var(MAX_RESTARTS);
        let is_one_of_several = restarts.is_some() && most.as_deref() != Ok("0");
        let id = std::env::var(RUN_ID).ok().filter(|_| is_one_of_several);
        let job = id.and_then(|id| {
            let arguments = say::arguments().join(" ");
            Some(format!("{id} of {}: {arguments}", launcher()?))
        });
        Ok(Attempt {
            restarts: restarts.unwrap_or(0),
            job,
        })
    }
}

/// The process that started the ranks: the first one above this that has not their variables, as a shell between them
/// has. It lives as long as the job, and its number with the moment of its start is no other's.
fn launcher() -> Option<String> {
    let own: Vec<Option<OsString>> = OF_A_RANK.iter().map(std::env::var_os).collect();
    let mut pid = getppid()?;
    loop {
        let (parent, started) = stat(pid)?;
        if of_a_rank(pid) != own {
            let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
            let boot = boot.trim();
            return Some(format!("{boot}/{}/{started}", pid.as_raw_nonzero()));
        }
        pid = parent?;
    }
}

/// The parent of a process, and when it started.
fn stat(pid: Pid) -> Option<(Option<Pid>, String)> {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name before is in parentheses, and may hold any.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let parent = Pid::from_raw(fields.nth(1)?.parse().ok()?);
    Some((parent, fields.nth(17)?.to_owned()))
}

/// What a process was started with; nothing where that is not shown.
fn of_a_rank(pid: Pid) -> Vec<Option<OsString>> {
    let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
    let text = std::fs::read(path).unwrap_or_default();
    let variables = || text.split(|byte| *byte == 0);
    let value = |name: &&str| {
        let found = variables().find_map(|line| {
            line.strip_prefix(name.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
        });
        found.map(|value| OsStr::from_bytes(value).to_owned())
    };
    OF_A_RANK.iter().map(value).collect()
}
