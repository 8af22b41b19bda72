//! Where a training's weights start.

use std::path::{Path, PathBuf};

use phalanx_member::RankContext;

/// `--init`: what weights are before the first step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// What PyTorch draws after `torch.manual_seed(seed)` when it builds the
    /// same network: the same bits.
    Torch,
    /// Those of a file.
    File(PathBuf),
}

impl From<PathBuf> for Start {
    fn from(typed: PathBuf) -> Start {
        if typed.as_os_str() == "torch" {
            Start::Torch
        } else {
            Start::File(typed)
        }
    }
}

impl Start {
    /// The file or run's folder that was named.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Start::Torch => None,
            Start::File(path) => Some(path),
        }
    }

    /// Says that a run that continues from a checkpoint has its weights from there.
    pub fn announce_unused(&self, ctx: &RankContext) {
        if let Start::File(path) = self {
            ctx.note(&format!(
                "weights  as the checkpoint has them; --init {} was for the run's start",
                path.display()
            ));
        }
    }

    /// For the person at the terminal.
    pub fn describe(&self, seed: u64) -> String {
        match self {
            Start::Torch => format!("as PyTorch draws them with seed {seed}"),
            Start::File(path) => format!("from {}", path.display()),
        }
    }
}
