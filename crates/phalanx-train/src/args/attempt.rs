//! Which attempt of a job this process belongs to, where a launcher starts the ranks again after a failure.

use phalanx_base::env::{number, real_env};
use phalanx_process::proc_stat::starter;

use crate::error::Result;
use crate::say;

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

/// The process that started the ranks. It lives as long as the job, and its number with the moment of its start is no
/// other's.
fn launcher() -> Option<String> {
    let (pid, process) = starter(&OF_A_RANK)?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{}/{pid}/{}", boot.trim(), process.started))
}
