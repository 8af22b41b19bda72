//! Data that must be there before ranks can read it: the first rank of each
//! host gets it, the others wait in a barrier. A rank that fails or dies meanwhile
//! is noticed, and named, by all.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use phalanx::prelude::*;
use phalanx::train::FolderArgs;
use phalanx_base::files::{Dir, as_typed, folder_of};

use crate::download;

/// How often a rank that downloads checks whether another has failed.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// Arguments about data that are not there yet.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct FetchArgs {
    /// Download the data set first if it is missing, from the mirror URL if given; the first rank of each host downloads and unpacks it
    #[arg(long, value_name = "URL")]
    pub download: Option<Option<String>>,
}

impl FetchArgs {
    /// Whether data may be missing at the start.
    pub fn wanted(&self) -> bool {
        self.download.is_some()
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self) -> Result<()> {
        match &self.download {
            Some(Some(url)) => download::check_mirror("--download", url),
            _ => Ok(()),
        }
    }

    /// A usage error for data that is not published.
    pub fn refuse(&self, data: &str) -> Result<()> {
        if self.wanted() {
            return Err(Error::usage(format!(
                "--download needs a folder for the data set, not {data}; name one with --data"
            )));
        }
        Ok(())
    }

    /// Gets the data set of that kind into `folder` on the first rank of each host, if it is to be downloaded. *Blocks*
    /// until all these have done it; all ranks call it.
    ///
    /// # Errors
    ///
    /// What went wrong, on the rank where it did; the loss of that rank, with its
    /// reason, on the others.
    pub fn run(&self, job: &Job<'_>, kind: Kind, folder: &str) -> Result<()> {
        let (ctx, args) = (job.context(), job.settings().saving.folder);
        let (from, folder) = (self.download.clone().flatten(), PathBuf::from(folder));
        let get = move || kind.get(&folder, from.as_deref(), args);
        all_after(ctx, (self.wanted() && ctx.local_rank == 0).then_some(get))
    }
}

/// A data set that can be downloaded.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Four files, read as they are.
    Mnist,
    /// An archive, unpacked into its own folder.
    Cifar10,
}

impl Kind {
    /// Gets what is not in `folder` yet, from the mirror `from` if given.
    ///
    /// # Errors
    ///
    /// Those of downloading and unpacking, naming file and folder.
    fn get(self, folder: &Path, from: Option<&str>, args: FolderArgs) -> Result<()> {
        let (name, found) = match self {
            Kind::Mnist => ("mnist", mnist::check(folder)),
            Kind::Cifar10 => ("cifar10", cifar10::check(folder).map(drop)),
        };
        if found.is_err() {
            download::ensure(name, folder, from, args)?;
        }
        if matches!(self, Kind::Cifar10) && cifar10::is_packed(folder)? {
            args.check(&Dir::open(folder)?)?;
            cifar10::unpack(folder)?;
        }
        Ok(())
    }
}

/// Reading the data set of that kind in `folder` failed. Where a file is damaged that is no
/// crash, and getting it again is the way out.
pub fn unreadable(kind: Kind, folder: &str, error: Error) -> Error {
    if error.kind() != ErrorKind::Data {
        return error;
    }
    let mut folder = Path::new(folder).to_owned();
    if folder.is_file() {
        folder = folder_of(&folder);
    }
    let (name, other) = match kind {
        Kind::Mnist => ("mnist", "   (or fashion-mnist)"),
        Kind::Cifar10 => ("cifar10", ""),
    };
    let to = as_typed(&folder);
    let fix = format!("phalanx download {name} --to {to} --force{other}");
    error.into_usage().note("try", fix)
}

/// Does `work`, where there is some, and waits until all ranks have done theirs.
fn all_after(
    ctx: &RankContext,
    work: Option<impl FnOnce() -> Result<()> + Send + 'static>,
) -> Result<()> {
    if ctx.world() == 1 {
        return work.map_or(Ok(()), |work| work());
    }
    // Who fails at once must not be gone before all have met: they could not hear why.
    ctx.group().barrier()?;
    if let Some(work) = work {
        let _phase = ctx.phase("downloading data");
        let (done, outcome) = channel();
        // Not waited for when another rank fails: the process is about to end.
        let thread = std::thread::Builder::new().name("prepare".into());
        let started = thread.spawn(move || {
            let _ = done.send(work());
        });
        started.map_err(|e| Error::new(ErrorKind::System, "cannot start a thread").caused_by(e))?;
        loop {
            match outcome.recv_timeout(CHECK_EVERY) {
                // A failure ends this rank, and the barrier of the others by name.
                Ok(result) => break result?,
                Err(RecvTimeoutError::Timeout) => ctx.group().check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let what = "preparing the data panicked; this is a bug in phalanx";
                    return Err(Error::new(ErrorKind::Failed, what));
                }
            }
        }
    }
    ctx.group().barrier()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    use phalanx::comm::{GroupOptions, ProcessGroup};

    use super::*;

    /// Three ranks, two of them first of their hosts; what each ended with.
    fn three(
        work: impl Fn(usize) -> Result<()> + Clone + Send + Sync + 'static,
    ) -> Vec<Result<()>> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ProcessGroup::threads(3, GroupOptions::default())
                .into_iter()
                .zip([0, 1, 0])
                .map(|(group, local_rank)| {
                    let work = work.clone();
                    scope.spawn(move || {
                        let mut ctx = RankContext::new(group, 1);
                        ctx.local_rank = local_rank;
                        let rank = ctx.rank();
                        let work = (local_rank == 0).then_some(move || work(rank));
                        let outcome = all_after(&ctx, work);
                        if let Err(error) = &outcome {
                            ctx.group().abort(&error.to_string());
                        }
                        outcome
                    })
                })
                .collect();
            let ended = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            ended.collect()
        })
    }

    #[test]
    fn the_first_of_each_host_works_and_nobody_goes_on_before_all_have() {
        let (worked, both) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(2)));
        let (count, meet) = (Arc::clone(&worked), Arc::clone(&both));
        let ended = three(move |rank| {
            assert_ne!(rank, 1, "not the first of its host");
            // Both at the same time, or this would never end.
            meet.wait();
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        assert_eq!(worked.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_failure_is_told_by_name_to_those_that_wait() {
        let ended = three(|rank| match rank {
            2 => Err(Error::new(ErrorKind::System, "the disk is on fire")),
            // Longer than anybody will wait for it.
            _ => loop {
                std::thread::park();
            },
        });
        let text = |rank: usize| ended[rank].as_ref().expect_err("failed").chain();
        assert_eq!(text(2), "the disk is on fire");
        for rank in [0, 1] {
            let text = text(rank);
            assert!(
                text.contains("rank 2") && text.contains("the disk is on fire"),
                "{text}"
            );
        }
    }
}
