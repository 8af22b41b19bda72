//! Arguments about resumable checkpoints.

use std::path::{Path, PathBuf};

use clap::builder::NonEmptyStringValueParser;

use super::{AUTO, FOLDER};
use crate::error::{Error, Result};
use crate::ranks;
use crate::train::FolderArgs;

/// What to do about a checkpoint that cannot be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SaveErrors {
    /// End the training
    Stop,
    /// Warn, and train on
    Warn,
}

/// Arguments about resumable checkpoints.
#[derive(Debug, Clone, clap::Args)]
pub struct SavingArgs {
    /// Save resumable state every so many steps (later while the one before is still being written, which hurries from then on), after each epoch, and when SIGTERM (then with exit code 130) or SIGUSR1 asks to stop
    #[arg(long, value_name = "STEPS")]
    pub save_every: Option<u64>,
    /// Resumable checkpoints to keep, the newest [default: 2]
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// What to do about a checkpoint, or weights of the best epoch or of any but the last, that cannot be saved
    #[arg(long, value_enum, default_value_t = SaveErrors::Stop)]
    pub save_errors: SaveErrors,
    /// Go on from the newest checkpoint of the --output-dir, if there is one, of a run's folder, or from a checkpoint's JSON file; checkpoints of later steps are set aside (aside-*). A restart by phalanx launch or torchrun goes on so by itself
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "auto|PATH")]
    pub resume: Option<String>,
    /// Replace what an earlier run left in the --output-dir; without it, or --resume, such a folder is refused
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Save and stop after so many steps of this run
    #[arg(long, value_name = "STEPS")]
    pub stop_after: Option<u64>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

/// Checkpoints that are kept where nobody said how many.
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

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, has_folder: bool) -> Result<()> {
        ranks::check_count("--keep", self.keep(), 1_000_000)?;
        if self.keep.is_some() && !self.enabled() {
            return Err(Error::usage(
                "--keep is for resumable checkpoints, and none is saved; add --save-every STEPS, or leave it out",
            ));
        }
        for (flag, steps) in [
            ("--save-every", self.save_every),
            ("--stop-after", self.stop_after),
        ] {
            if steps == Some(0) {
                return Err(Error::usage(format!("{flag} must be at least 1")));
            }
        }
        if self.resume.as_deref() == Some(AUTO) && !has_folder {
            return Err(Error::usage(
                "--resume auto looks for checkpoints in the --output-dir; say which",
            ));
        }
        Ok(())
    }

    /// What must be the same on all ranks.
    pub fn must_agree(&self) -> Vec<String> {
        let steps = |n: Option<u64>| n.map(|n| n.to_string());
        let typed = |flag: &str, value: Option<String>| match value {
            Some(value) => format!("{flag} {value}"),
            None => format!("no {flag}"),
        };
        vec![
            typed("--save-every", steps(self.save_every)),
            typed("--stop-after", steps(self.stop_after)),
            typed("--resume", self.resume.clone()),
        ]
    }

    /// What `--resume` names, if that is not [`AUTO`].
    pub fn resumed_path(&self) -> Option<&Path> {
        let typed = self.resume.as_ref().filter(|path| *path != AUTO);
        typed.map(Path::new)
    }

    /// The run's folder that `--resume PATH` goes on in.
    pub fn resumed_dir(&self) -> Option<PathBuf> {
        // The parent of a bare name.
        let here = |path: &Path| match path.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => path.to_path_buf(),
        };
        let path = self.resumed_path()?;
        let folder = match path.is_file() {
            true => here(path.parent()?),
            false => path.to_path_buf(),
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
mod tests {
    use super::*;

    #[test]
    fn what_ranks_must_agree_on_is_as_it_is_typed() {
        let args = SavingArgs {
            save_every: Some(5),
            keep: None,
            save_errors: SaveErrors::Stop,
            resume: Some("a b".to_owned()),
            overwrite: false,
            stop_after: None,
            folder: FolderArgs::default(),
        };
        let facts = args.must_agree();
        assert_eq!(facts, ["--save-every 5", "no --stop-after", "--resume a b"]);
    }
}
