//! Arguments about resumable checkpoints.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use phalanx_base::files::{Dir, as_typed};

use super::Attempt;
use crate::error::{Error, Result, check_count, refuse};
use crate::{choice_name, stop};
use phalanx_member::RankContext;

/// Folder of checkpoints in a run's output folder.
pub const FOLDER: &str = "checkpoints";

/// `--resume` with this continues from the newest checkpoint, or starts anew without one.
pub const AUTO: &str = "auto";

/// What to do if a checkpoint cannot be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SaveErrors {
    /// Stop the training with an error
    Stop,
    /// Warn and continue training
    Warn,
}

/// That a run may remove what lies in its folder: no attempt of its job has trained there, `--resume` was not given, and it
/// holds no earlier run, unless that is to be replaced. Only [`SavingArgs::found_nothing`] gives one, after the folder was
/// checked.
#[derive(Debug, Clone)]
pub(crate) struct Fresh(());

/// What a run finds in its folder.
#[derive(Debug, Clone, Default)]
pub(crate) enum Found {
    /// Perhaps the training of an earlier attempt: the newest checkpoint is gone on with, and nothing is removed.
    #[default]
    Attempt,
    /// What `--resume` says; nothing is removed.
    Resumed,
    /// Nothing that is to be kept.
    Nothing(Fresh),
}

/// Which folders are written into.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct FolderArgs {
    /// Allow a folder that another user owns or can write to
    #[arg(long)]
    pub allow_shared_folder: bool,
}

impl FolderArgs {
    /// An error where other users may change what is in `dir`, unless that is allowed.
    ///
    /// # Errors
    ///
    /// Usage, with the reason and the ways out.
    pub fn check(self, dir: &Dir) -> Result<()> {
        let shared = match self.allow_shared_folder {
            true => None,
            false => dir.shared_with()?,
        };
        let Some(why) = shared else {
            return Ok(());
        };
        let path = dir.path();
        let mut error = Error::usage(format!("{} {why}", path.display()))
            .note("so", "they could replace or remove what is written there");
        if !why.starts_with("belongs") {
            error = error.note("fix", format!("chmod go-w {}", as_typed(path)));
        }
        Err(error.note("or", "--allow-shared-folder, if you trust them"))
    }
}

/// Arguments about resumable checkpoints.
#[derive(Debug, Clone, clap::Args)]
pub struct SavingArgs {
    /// Save a resumable checkpoint every N steps (delayed while the previous save is still running), after each epoch, and on SIGTERM (exit code 130) or SIGUSR1, which stop the training
    #[arg(long, value_name = "STEPS")]
    pub save_every: Option<u64>,
    /// Number of newest checkpoints to keep; the newest with finite weights is always kept [default: 2]
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// What to do if a checkpoint, or the weights of the best epoch or of an epoch before the last, cannot be saved
    #[arg(long, value_enum, default_value_t = SaveErrors::Stop)]
    pub save_errors: SaveErrors,
    /// Resume training: `auto` takes the newest checkpoint in --output-dir with finite weights, if there is one; PATH is a run's folder or a checkpoint's JSON file. Checkpoints of later steps are renamed to aside-*. After a restart by phalanx launch or torchrun, training always resumes from the newest checkpoint of its folder (torchrun on several nodes: set --output-dir)
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "auto|PATH")]
    pub resume: Option<String>,
    /// Replace an earlier run in the --output-dir; without --overwrite or --resume, such a folder is an error
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Save a checkpoint and stop after N steps of this run
    #[arg(long, value_name = "STEPS")]
    pub stop_after: Option<u64>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub folder: FolderArgs,
    /// Seconds that a training has after SIGTERM to save and exit before phalanx launch kills it; torchrun and Slurm have their own settings [default: 30, or 3 times as long as the last save took]
    #[arg(long, value_name = "S")]
    pub stop_grace_s: Option<f64>,
    /// Which attempt of a job this is.
    #[arg(skip)]
    pub(crate) attempt: Attempt,
    /// What rank 0 has found in the folder.
    #[arg(skip)]
    pub(crate) found: Found,
}

/// Checkpoints that are kept by default.
const KEEP: usize = 2;

impl SavingArgs {
    /// Checkpoints to keep.
    pub fn keep(&self) -> usize {
        self.keep.unwrap_or(KEEP)
    }

    /// Whether there are checkpoints at all.
    pub fn enabled(&self) -> bool {
        self.save_every.is_some() || self.resume.is_some() || self.stop_after.is_some()
    }

    /// That what lies in the run's folder may be removed, if so; on rank 0.
    pub(crate) fn fresh(&self) -> Option<&Fresh> {
        match &self.found {
            Found::Nothing(fresh) => Some(fresh),
            Found::Attempt | Found::Resumed => None,
        }
    }

    /// What is found in a folder where nothing is in the way of these arguments; it was checked.
    pub(crate) fn found_nothing(&self) -> Found {
        match self.resume {
            Some(_) => Found::Resumed,
            None => Found::Nothing(Fresh(())),
        }
    }

    /// Whether an attempt before this one may have trained here, as rank 0 has found; without a checkpoint its steps are
    /// taken again. *Blocks* until all ranks call it, in an attempt that is not the first.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub(crate) fn begins_again(&self, ctx: &RankContext) -> Result<bool> {
        if self.attempt.restarts == 0 {
            return Ok(false);
        }
        let found = matches!(self.found, Found::Attempt);
        Ok(ctx.group().broadcast_object(Some(&found), 0)?)
    }

    /// Whether the newest checkpoint in `dir` is to be continued from, and there is none.
    pub(crate) fn takes_up(&self, dir: &Path) -> bool {
        let is_wanted = self.resume.as_deref() == Some(AUTO);
        let has_any = || Dir::open(&dir.join(FOLDER)).and_then(|dir| dir.names());
        is_wanted && !has_any().is_ok_and(|names| names.iter().any(|name| name.ends_with(".json")))
    }

    /// How long a stop may take before a save was measured.
    pub fn stop_grace(&self) -> Duration {
        let typed = self.stop_grace_s;
        let typed = typed.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        typed.unwrap_or(stop::GRACE)
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, has_folder: bool) -> Result<()> {
        check_count("--keep", self.keep(), 1_000_000)?;
        if self.keep.is_some() && !self.enabled() {
            refuse!(
                "--keep is for resumable checkpoints, and none is saved; add --save-every STEPS, or leave it out"
            );
        }
        for (flag, steps) in [
            ("--save-every", self.save_every),
            ("--stop-after", self.stop_after),
        ] {
            if steps == Some(0) {
                refuse!("{flag} must be at least 1");
            }
        }
        if let Some(seconds) = self.stop_grace_s
            && Duration::try_from_secs_f64(seconds).is_err()
        {
            refuse!("--stop-grace-s must be a number of seconds from 0 up");
        }
        if self.resume.as_deref() == Some(AUTO) && !has_folder {
            refuse!("--resume auto looks for checkpoints in the --output-dir; say which");
        }
        Ok(())
    }

    /// What must be the same on all ranks. A new flag is named here, whether or not it is compared.
    pub fn must_agree(&self) -> Vec<String> {
        let SavingArgs {
            save_every,
            stop_after,
            resume,
            save_errors,
            // Of rank 0 alone.
            keep: _,
            overwrite: _,
            found: _,
            // The largest counts.
            stop_grace_s: _,
            // The launcher's.
            attempt: _,
            folder: _,
        } = self;
        let steps = |n: Option<u64>| n.map(|n| n.to_string());
        let typed = |flag: &str, value: Option<String>| match value {
            Some(value) => format!("{flag} {value}"),
            None => format!("no {flag}"),
        };
        vec![
            format!("--save-errors {}", choice_name(save_errors)),
            typed("--save-every", steps(*save_every)),
            typed("--stop-after", steps(*stop_after)),
            typed("--resume", resume.clone()),
        ]
    }

    /// What `--resume` names, if that is not `auto`.
    pub fn resumed_path(&self) -> Option<&Path> {
        let typed = self.resume.as_ref().filter(|path| *path != AUTO);
        typed.map(Path::new)
    }

    /// The run's folder that `--resume PATH` continues in.
    pub fn resumed_dir(&self) -> Option<PathBuf> {
        // The parent of a bare name.
        let here = |path: &Path| match path.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => path.to_path_buf(),
        };
        let path = self.resumed_path()?;
        // A checkpoint that is gone was one: an attempt before this has saved later ones.
        let folder = match path.is_dir() {
            true => path.to_path_buf(),
            false => here(path.parent()?),
        };
        if folder.file_name().is_some_and(|name| name == FOLDER) {
            return Some(here(folder.parent()?));
        }
        if folder.join(FOLDER).is_dir() {
            return Some(folder);
        }
        // `.` and `..` have no name of their own.
        let real = std::fs::canonicalize(&folder).ok()?;
        (real.file_name()? == FOLDER).then_some(folder.join(".."))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        saving: SavingArgs,
    }

    pub(crate) fn saving(typed: &[&str]) -> SavingArgs {
        Cli::parse_from([&["test"], typed].concat()).saving
    }

    #[test]
    fn what_ranks_must_agree_on_is_as_it_is_typed() {
        let args = saving(&["--save-every", "5", "--resume", "a b"]);
        let facts = args.must_agree();
        let [errors, typed @ ..] = &facts[..] else {
            panic!("{facts:?}")
        };
        assert_eq!(errors, "--save-errors stop");
        assert_eq!(typed, ["--save-every 5", "no --stop-after", "--resume a b"]);
    }
}
