//! Which file of a run's folder has its weights.

use std::path::{Path, PathBuf};

use phalanx_checkpoint::{self as checkpoint, Adapter, LoadOptions};
use phalanx_member::RankContext;
use phalanx_nn::Params;

use super::output::{ASIDE_BEST_FILE, BEST_FILE};
use super::run_dir::SUMMARY_FILE;
use crate::args::{Start, TuneArgs};
use crate::error::{Error, ErrorKind, Result};
use crate::saving::newest;
use crate::say;

/// The file to read weights from: `path`, unless it is a folder. Of a run's folder the weights
/// that it ended with; before its end its newest checkpoint, if it saves any.
///
/// # Errors
///
/// Usage, when it is not clear which, naming the candidates; data, when all checkpoints are
/// damaged; system.
pub fn file_of(path: &Path) -> Result<PathBuf> {
    let chosen = weights_of(path)?;
    if chosen != path {
        say::note(format_args!("weights  {}", chosen.display()));
    }
    Ok(chosen)
}

/// As [`file_of`], without saying which.
///
/// # Errors
///
/// As [`file_of`].
pub fn weights_of(dir: &Path) -> Result<PathBuf> {
    if !dir.is_dir() {
        return Ok(dir.to_owned());
    }
    let mut finals = at_the_end(dir)?;
    // With it, a run is complete; without, they may be an earlier run's.
    if dir.join(SUMMARY_FILE).is_file() && finals.len() == 1 {
        return Ok(finals.remove(0));
    }
    let (newest, _) = newest(dir, |text| say::note(text))?;
    if let Some(state) = newest {
        return Ok(state.path().to_owned());
    }
    match &finals[..] {
        [one] => Ok(one.clone()),
        [] => Err(Error::usage(format!(
            "there are neither weights nor checkpoints in the folder {}",
            dir.display()
        ))
        .note(
            "name",
            "a file of weights (.pth, .pt, .safetensors), a checkpoint's .json, or a run's folder",
        )),
        several => {
            let names = several.iter().map(|path| path.display().to_string());
            let names: Vec<String> = names.collect();
            Err(Error::usage(format!(
                "there is more than one file of weights in the folder {}; name one",
                dir.display()
            ))
            .note("one of", names.join("\n")))
        }
    }
}

/// The files of weights in `dir`: of epochs only the last's, of the same weights in several
/// formats the one that says most, and not those of the best epoch.
fn at_the_end(dir: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = |error: std::io::Error| {
        Error::usage(format!("cannot read the folder {}", dir.display())).caused_by(error)
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let is_hidden = name(&path).starts_with('.');
        if !is_hidden && rank(&path).is_some() && path.is_file() {
            files.push(path);
        }
    }
    files.sort_by(|a, b| (a.file_stem(), rank(a)).cmp(&(b.file_stem(), rank(b))));
    files.dedup_by(|next, first| next.file_stem() == first.file_stem());
    let best = [BEST_FILE, ASIDE_BEST_FILE].map(|name| Path::new(name).file_stem());
    files.retain(|path| !best.contains(&path.file_stem()));
    let last = files.iter().filter_map(|path| epoch(path)).max();
    files.retain(|path| epoch(path).is_none_or(|epoch| Some(epoch) == last));
    Ok(files)
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Of formats of weights, the lower the more they say besides.
fn rank(path: &Path) -> Option<usize> {
    let ending = path.extension()?.to_str()?;
    ["safetensors", "pth", "pt"]
        .iter()
        .position(|known| *known == ending)
}

/// The `12` of `epoch_12.pth`.
fn epoch(path: &Path) -> Option<u64> {
    path.file_stem()?
        .to_str()?
        .strip_prefix("epoch_")?
        .parse()
        .ok()
}

impl Start {
    /// Fills freshly built `params` of rank 0; the wrapper gives them to the
    /// other ranks, so that only rank 0's host needs the file.
    ///
    /// # Errors
    ///
    /// Usage or data, naming the file and the first tensors that do not fit.
    pub fn fill(&self, ctx: &RankContext, params: &mut Params, tune: &TuneArgs) -> Result<()> {
        let adapter = tune.adapter().map(Adapter::tensors_in);
        let adapter = adapter.map(|path| (path, LoadOptions::new().only_adapters()));
        let weights = match self {
            Start::File(path) if ctx.is_main() => Some((file_of(path)?, tune.load_options())),
            _ => None,
        };
        for (path, options) in weights.into_iter().chain(adapter.filter(|_| ctx.is_main())) {
            const FIX: &str = "--init-skip PATTERN leaves out tensors by name, as in --init-skip 'fc.*' for a head of other classes; --init-map OLD=NEW renames those of the file";
            let loaded = checkpoint::load_params_with(&path, params, &options);
            let loaded = loaded.map_err(|e| match e.kind() {
                ErrorKind::Data => e.note("other tensors", FIX),
                _ => e,
            })?;
            for warning in &loaded.warnings {
                ctx.note(&format!("warning: {warning}"));
            }
            for note in loaded.notes() {
                ctx.note(&format!("weights  {}: {note}", path.display()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weights_at_the_end_are_chosen_or_the_candidates_named() {
        for (files, chosen) in [
            (
                &[
                    "net.safetensors",
                    "net.pt",
                    "best.pth",
                    "summary.json",
                    "notes.txt",
                ][..],
                Ok("net.safetensors"),
            ),
            (
                &[
                    "epoch_9.pth",
                    "epoch_10.pth",
                    "epoch_10.safetensors",
                    "best.safetensors",
                ],
                Ok("epoch_10.safetensors"),
            ),
            (&["only.pt", ".only.pt.7-1.tmp"], Ok("only.pt")),
            (&["a.pt", "b.pth", "summary.json"], Err("b.pth")),
            (
                &["summary.json", "best.pth"],
                Err("neither weights nor checkpoints"),
            ),
            (&[], Err("neither weights nor checkpoints")),
        ] {
            let dir = tempfile::tempdir().expect("folder");
            for name in files {
                std::fs::write(dir.path().join(name), "").expect("written");
            }
            match (file_of(dir.path()), chosen) {
                (Ok(path), Ok(name)) => assert_eq!(path, dir.path().join(name)),
                (Err(error), Err(words)) => {
                    assert_eq!(error.exit_code(), 2);
                    assert!(error.render().contains(words), "{}", error.render());
                }
                (other, _) => panic!("{files:?}: {other:?}"),
            }
        }
    }
}
