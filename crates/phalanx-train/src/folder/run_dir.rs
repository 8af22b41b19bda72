//! The folder of one run: which it is, that it can be written into, and what may become of what lies there.
//!
//! A launcher (`phalanx launch --max-restarts`, torchrun) starts all ranks again after a failure. Rank 0 of the first attempt
//! leaves a [`Claim`] in the folder, by which rank 0 of a later one finds it; the other ranks hear from rank 0 which it is.
//! What lies in a folder may be removed by who has a [`Fresh`], and a later attempt gets none as soon as an earlier one
//! may have trained there.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use phalanx_base::files::{Dir, as_typed, create_folder, create_new_folder};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::{AUTO, Attempt, FOLDER, FolderArgs, Found, SavingArgs};
use crate::error::{Error, Result};
use crate::log::RUN_FILE;

/// What a run ends with.
pub(crate) const SUMMARY_FILE: &str = "summary.json";

/// Folder of runs that were given none.
const RUNS: &str = "runs";

/// `runs/<recipe>-<date>-<time>` (UTC).
pub fn default_output_dir(recipe: &str) -> PathBuf {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let stamp: String = now.trim_end_matches('Z').replace('T', "-").replace(':', "");
    Path::new(RUNS).join(format!("{recipe}-{stamp}"))
}

/// Says in a run's folder which job writes there.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Claim {
    /// [`Attempt::job`].
    job: String,
    /// Whether an attempt has begun to write there.
    begun: bool,
}

/// The file with a [`Claim`].
const CLAIM_FILE: &str = ".job.json";

/// Longest claim that is read; ours have some hundred bytes.
const CLAIM_BYTES: u64 = 16 << 10;

impl Claim {
    fn read(dir: &Path) -> Option<Claim> {
        Claim::read_in(&Dir::open(dir).ok()?)
    }

    fn read_in(dir: &Dir) -> Option<Claim> {
        let text = dir.read(CLAIM_FILE, CLAIM_BYTES).ok()??;
        serde_json::from_slice(&text).ok()
    }

    fn write(&self, dir: &Dir) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|e| {
            Error::new(crate::error::ErrorKind::Failed, "a claim is not JSON").caused_by(e)
        })?;
        dir.write(CLAIM_FILE, |out| out.write_all(&text))
    }
}

/// Says that from now on this job's training is in `dir`: a later attempt continues it. On rank 0, before anything is
/// written there.
///
/// # Errors
///
/// Those of writing.
pub(crate) fn begin(dir: &Dir, attempt: &Attempt) -> Result<()> {
    match (Claim::read_in(dir), &attempt.job) {
        (Some(claim), Some(job)) if claim.job == *job && !claim.begun => Claim {
            begun: true,
            ..claim
        }
        .write(dir),
        _ => Ok(()),
    }
}

/// A folder for one run's files.
pub struct RunDir {
    path: PathBuf,
    /// What was made for it here, the innermost first; kept only if something is written into it:
    /// a mistake leaves no files.
    made: Vec<PathBuf>,
}

impl RunDir {
    /// `runs/PROGRAM-<date>-<time>`, or that with `-2` and so on where a training of the same second
    /// has it.
    pub fn claim(recipe: &str) -> RunDir {
        RunDir::unused(default_output_dir(recipe))
    }

    /// The one that an earlier attempt has claimed, or else [a new one](Self::claim).
    pub(crate) fn of_attempt(recipe: &str, attempt: &Attempt) -> RunDir {
        let claimed = || RunDir::claimed(Path::new(RUNS), recipe, attempt);
        claimed().map_or_else(|| RunDir::claim(recipe), RunDir::at)
    }

    fn claimed(runs: &Path, recipe: &str, attempt: &Attempt) -> Option<PathBuf> {
        let job = attempt.job.as_ref().filter(|_| attempt.restarts > 0)?;
        let entries = std::fs::read_dir(runs).into_iter().flatten().flatten();
        let of_recipe = entries.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            let rest = name.and_then(|name| name.strip_prefix(recipe));
            rest.is_some_and(|rest| rest.starts_with('-'))
        });
        let ours = |path: &PathBuf| Claim::read(path).is_some_and(|claim| claim.job == *job);
        of_recipe.filter(ours).max()
    }

    /// Claims it for `attempt`, and says what is to become of what lies there. On rank 0.
    ///
    /// # Errors
    ///
    /// Usage, where it holds an earlier run that `saving` says nothing of, or that cannot be resumed; those of writing.
    pub(crate) fn settle(&self, attempt: &Attempt, saving: &SavingArgs) -> Result<Found> {
        let ours = Claim::read(&self.path)
            .filter(|claim| attempt.restarts > 0 && Some(&claim.job) == attempt.job.as_ref());
        // Without a claim it is not known how far an earlier attempt came.
        let begun = attempt.restarts > 0 && ours.as_ref().is_none_or(|claim| claim.begun);
        if let (None, Some(job)) = (&ours, &attempt.job) {
            let job = job.clone();
            Claim { job, begun }.write(&Dir::open(&self.path)?)?;
        }
        if begun {
            return Ok(Found::Attempt);
        }
        self.check(saving, &self.path)?;
        Ok(saving.found_nothing())
    }

    /// That no results are lost that `saving` does not give up. `--output-dir` names the folder `typed`, this one or the
    /// one around it.
    ///
    /// # Errors
    ///
    /// Usage, naming what an earlier run left there and the ways out.
    pub(crate) fn check(&self, saving: &SavingArgs, typed: &Path) -> Result<()> {
        match (saving.resume.as_deref(), saving.resumed_dir()) {
            (Some(AUTO), _) => self.check_resumable(),
            (Some(_), Some(from)) => self.check_elsewhere(&from),
            (None, _) if !saving.overwrite => self.check_no_run(typed),
            _ => Ok(()),
        }
    }

    /// One that may be there.
    pub fn at(path: PathBuf) -> RunDir {
        RunDir {
            path,
            made: Vec::new(),
        }
    }

    /// Makes it where it is missing, and sees to it that files can be written there.
    ///
    /// # Errors
    ///
    /// As [`make`](Self::make).
    pub fn prepare(&mut self, args: FolderArgs) -> Result<()> {
        self.make(args)?.check_writable().map_err(mistake)
    }

    /// Protects days of training from a forgotten flag.
    ///
    /// # Errors
    ///
    /// Usage, naming what an earlier run left there and the ways out.
    fn check_no_run(&self, typed: &Path) -> Result<()> {
        let Some(left) = left_by_a_run(&self.path) else {
            return Ok(());
        };
        let (error, folder) = (self.held(left.name()), as_typed(typed));
        let replace = "--overwrite replaces it; another --output-dir leaves it alone";
        Err(match left {
            Left::Checkpoint(_) => error
                .note("continue", format!("--resume auto --output-dir {folder}"))
                .note("or", replace),
            Left::Result(_) => error.note("try", replace),
        })
    }

    /// That `--resume auto` does not begin anew where an earlier run has results and no checkpoint.
    fn check_resumable(&self) -> Result<()> {
        let Some(Left::Result(name)) = left_by_a_run(&self.path) else {
            return Ok(());
        };
        let about = std::fs::read(self.path.join(RUN_FILE)).unwrap_or_default();
        let about: Value = serde_json::from_slice(&about).unwrap_or_default();
        let flags = about["typed"].as_array().map_or(&[][..], |flags| flags);
        let saving = ["--save-every", "--stop-after", "--resume"];
        let saves = flags.iter().any(|flag| saving.iter().any(|f| flag == f));
        // A run that saves checkpoints was killed before its first one; files without run.json are no run's.
        if !self.path.join(SUMMARY_FILE).exists() && (about.is_null() || saves) {
            return Ok(());
        }
        let init = format!(
            "--init {} with another --output-dir starts a training with its weights",
            as_typed(&self.path)
        );
        Err(self
            .held(&name)
            .note("so", "--resume auto finds no checkpoint there")
            .note(
                "try",
                "--overwrite instead of --resume auto replaces it; another --output-dir leaves it alone",
            )
            .note("or", init))
    }

    /// That a run that is resumed from the folder `from` does not replace the results of another one.
    fn check_elsewhere(&self, from: &Path) -> Result<()> {
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        if !self.path.join(SUMMARY_FILE).exists() || real(from) == real(&self.path) {
            return Ok(());
        }
        Err(self.held(SUMMARY_FILE).note("try", "another --output-dir"))
    }

    fn held(&self, name: &str) -> Error {
        let path = self.path.display();
        Error::usage(format!("{path} holds an earlier run: {name}"))
    }

    /// Makes it where it is missing, and opens it.
    ///
    /// # Errors
    ///
    /// Usage, naming what is in the way, or because the folder is not the user's own
    /// ([`FolderArgs`]); failed, where there is no room.
    pub fn make(&mut self, args: FolderArgs) -> Result<Dir> {
        let missing = self.path.ancestors().take_while(|at| !at.exists());
        let missing = missing.filter(|at| !at.as_os_str().is_empty());
        self.made.extend(missing.map(Path::to_owned));
        let dir = Dir::create(&self.path).map_err(mistake)?;
        args.check(&dir)?;
        Ok(dir)
    }

    /// The first of `path`, `path-2`, ... that was not there. Other errors with them are
    /// reported when files are written.
    fn unused(path: PathBuf) -> RunDir {
        let others = (2..1000).map(|next| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!("-{next}"));
            PathBuf::from(name)
        });
        let _ = path.parent().map(create_folder);
        let mut all = std::iter::once(path.clone()).chain(others);
        let free = all.find_map(|path| match create_new_folder(&path) {
            Ok(()) => {
                let parent = path.parent().map(Path::to_owned);
                let made = std::iter::once(path.clone()).chain(parent).collect();
                Some(RunDir { path, made })
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
            Err(_) => Some(RunDir::at(path)),
        });
        free.unwrap_or_else(|| RunDir::at(path.clone()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What would be lost with an earlier run.
enum Left {
    Checkpoint(String),
    /// A summary or a file of weights, and no checkpoint.
    Result(String),
}

impl Left {
    fn name(&self) -> &str {
        match self {
            Left::Checkpoint(name) | Left::Result(name) => name,
        }
    }
}

/// What would be lost with an earlier run in `dir`: its newest checkpoint, its summary or a file of weights. Not what a
/// run has that failed before it saved anything.
fn left_by_a_run(dir: &Path) -> Option<Left> {
    let names = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    let checkpoints = names(&dir.join(FOLDER));
    let manifest = |name: &&String| name.starts_with("step-") && name.ends_with(".json");
    if let Some(newest) = checkpoints.iter().rfind(manifest) {
        return Some(Left::Checkpoint(format!("{}/{newest}", FOLDER)));
    }
    let valuable = |name: &String| {
        let ending = Path::new(name).extension().and_then(|e| e.to_str());
        name == SUMMARY_FILE
            || matches!(ending, Some("safetensors" | "pth" | "pt")) && !name.starts_with('.')
    };
    names(dir).into_iter().find(valuable).map(Left::Result)
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // The claim of an attempt that came to nothing.
        if !self.made.is_empty() && Claim::read(&self.path).is_some_and(|claim| !claim.begun) {
            let _ = std::fs::remove_file(self.path.join(CLAIM_FILE));
        }
        // Fails where something is in it.
        let mut made = self.made.iter();
        while made
            .next()
            .is_some_and(|at| std::fs::remove_dir(at).is_ok())
        {}
    }
}

/// A folder that cannot be written into was typed by somebody.
fn mistake(error: phalanx_base::Error) -> Error {
    match error.kind() {
        phalanx_base::ErrorKind::System => error.into_usage(),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_an_earlier_runs_only_if_something_would_be_lost() {
        let dir = tempfile::tempdir().expect("folder");
        let run = dir.path().join("a run");
        let check = || RunDir::at(run.clone()).check_no_run(&run);
        check().expect("not there yet");
        std::fs::create_dir_all(run.join("checkpoints")).expect("folder");
        for harmless in [
            "metrics.jsonl",
            ".best.safetensors.7.tmp",
            "notes.txt",
            "checkpoints/aside",
        ] {
            std::fs::write(run.join(harmless), "").expect("written");
        }
        check().expect("nothing that anybody would miss");
        for lost in [
            "best.pth",
            "net.safetensors",
            "summary.json",
            "checkpoints/step-000000100.json",
        ] {
            std::fs::write(run.join(lost), "").expect("written");
            let error = check().expect_err(lost);
            assert_eq!(error.exit_code(), 2);
            let text = error.to_string();
            assert!(
                text.contains(lost) && text.contains("holds an earlier run"),
                "{text}"
            );
            std::fs::remove_file(run.join(lost)).expect("removed");
        }
    }

    #[test]
    fn what_is_made_for_nothing_goes_again_and_what_was_there_stays() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("there")).expect("folder");
        let prepared = |name: &str| {
            let mut folder = RunDir::at(at(name));
            folder.prepare(FolderArgs::default()).map(|()| folder)
        };
        let (there, new) = (prepared("there/a/b"), prepared("new/c"));
        std::fs::write(at("new/file"), "").expect("written");
        drop((there, new));
        assert!(at("there").is_dir() && !at("there/a").exists());
        assert!(at("new").is_dir() && !at("new/c").exists());
        for wrong in ["new/file", "new/file/x"] {
            let error = prepared(wrong).err().expect("a file");
            assert_eq!(error.exit_code(), 2, "{}", error.render());
            assert!(
                error.chain().contains("new/file is a file"),
                "{}",
                error.render()
            );
        }
        for wrong in ["/proc", "/proc/x", "/dev/null"] {
            let prepared = RunDir::at(wrong.into()).prepare(FolderArgs::default());
            let error = prepared.expect_err(wrong);
            assert_eq!(error.exit_code(), 2, "{}", error.render());
            assert!(error.chain().contains(wrong), "{}", error.render());
        }
    }

    #[test]
    fn no_two_trainings_get_the_same_folder_and_mistakes_leave_none() {
        let dir = tempfile::tempdir().expect("folder");
        let runs = dir.path().join("runs");
        let claim = || RunDir::unused(runs.join("x"));
        let claimed: Vec<RunDir> = std::thread::scope(|scope| {
            let at_once: Vec<_> = (0..4).map(|_| scope.spawn(claim)).collect();
            let claimed = at_once.into_iter().map(|c| c.join().expect("no panic"));
            claimed.collect()
        });
        let mut paths: Vec<&Path> = claimed.iter().map(RunDir::path).collect();
        paths.sort();
        assert_eq!(
            paths,
            ["x", "x-2", "x-3", "x-4"].map(|name| runs.join(name))
        );
        std::fs::write(runs.join("x-2/file"), "").expect("written");
        drop(claimed);
        let left: Vec<_> = std::fs::read_dir(&runs).expect("runs").flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(left[0].file_name(), "x-2");
        std::fs::remove_dir_all(&runs).expect("removed");
        drop(claim());
        assert!(!runs.exists());
    }
}
