//! `phalanx flow export`: files that run a workflow on Flyte, Kubernetes or Slurm.
//!
//! | file | makes |
//! |---|---|
//! | `flyte` | a Python module for flytekit; `flyte.py` is its fixed part |
//! | `kubernetes` | a Job for each task, a volume claim, and `submit.sh` |
//! | `slurm` | a batch script for each task, and `submit.sh` |
//! | `script` | the shell script of one attempt, for the last two |
//! | `text` | what several of them need: notes, quoting, templates |

mod cli;
mod flyte;
mod kubernetes;
mod script;
mod slurm;
mod text;

pub(crate) use cli::{ExportArgs, run};
use kubernetes::Volume;
use text::Notes;

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_base::error::{Error, Result, refuse};
use phalanx_base::files::Dir;
use serde_json::Value as Json;

use crate::spec::{Action, Workflow};

/// A system that runs exported workflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Engine {
    /// Flyte: a Python module for flytekit
    Flyte,
    /// Kubernetes: Jobs on a shared volume, and a script that submits them in order
    Kubernetes,
    /// Slurm: batch scripts with dependencies, and a script that submits them
    Slurm,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Engine::Flyte => "flyte",
            Engine::Kubernetes => "kubernetes",
            Engine::Slurm => "slurm",
        }
    }
}

/// A workflow for another engine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Export {
    /// The files: path in the folder and text.
    pub files: Vec<(String, String)>,
    /// What to do with them.
    pub next: String,
    /// What the engine does differently, or what must be done by hand; one line each.
    pub notes: Vec<String>,
}

/// Makes files that run `workflow` on `engine`.
///
/// `inputs` are values of the workflow's inputs; others have their defaults. Nothing is written; for Kubernetes, files
/// and folders that are inputs are read.
///
/// # Errors
///
/// Usage: a task is a Rust function, an image is missing (Kubernetes), an input has no value
/// (Kubernetes and Slurm).
pub(crate) fn export(
    workflow: &Workflow,
    inputs: &BTreeMap<String, Json>,
    engine: Engine,
    volume: &Volume,
) -> Result<Export> {
    for task in &workflow.tasks {
        if task.action == Action::Function {
            return Err(Error::usage(format!(
                "task {:?} is a function of a Rust program",
                task.name
            ))
            .note("so", "only commands and scripts can run on another engine"));
        }
    }
    if engine != Engine::Kubernetes && *volume != Volume::default() {
        refuse!("--volume-size, --access-mode and --storage-class are for --to kubernetes");
    }
    let mut workflow = workflow.clone();
    for (name, input) in &mut workflow.inputs {
        if let Some(value) = inputs.get(name) {
            input.default = Some(value.clone());
        }
        if input.default.is_none() && engine != Engine::Flyte {
            return Err(Error::usage(format!("input {name:?} has no value"))
                .note("fix", format!("--input {name}=VALUE")));
        }
    }
    let mut notes = Notes {
        workflow: &workflow,
        engine: engine.name(),
        lines: Vec::new(),
    };
    let (files, next) = match engine {
        Engine::Flyte => flyte::files(&workflow, &mut notes),
        Engine::Kubernetes => kubernetes::files(&workflow, volume, &mut notes)?,
        Engine::Slurm => slurm::files(&workflow, &mut notes),
    };
    Ok(Export {
        files,
        next,
        notes: notes.lines,
    })
}

impl Export {
    /// Writes the files to `folder`, which is created if needed. Files of these names are replaced.
    ///
    /// # Errors
    ///
    /// Those of writing, naming the file.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let dir = Dir::create(folder)?;
        for (name, text) in &self.files {
            let (dir, name) = match name.split_once('/') {
                Some((sub, name)) => (&dir.create_sub(sub)?, name),
                None => (&dir, name.as_str()),
            };
            dir.write(name, |out| out.write_all(text.as_bytes()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
