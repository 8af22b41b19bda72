//! The command `phalanx flow export`.

use std::path::PathBuf;

use phalanx_base::error::Result;
use phalanx_base::format::plural;
use phalanx_base::say;

use super::{Engine, Volume, export};
use crate::create::inputs;
use crate::spec::Workflow;

#[derive(clap::Args, Debug)]
pub(crate) struct ExportArgs {
    /// Workflow file, or its folder [default: flow.toml]
    pub file: Option<PathBuf>,
    /// Engine that shall run the workflow
    #[arg(long, value_enum)]
    to: Engine,
    /// Folder for the files [default: WORKFLOW-ENGINE]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Set an input of the workflow; a file or folder by its path
    #[arg(long, value_name = "NAME=VALUE")]
    input: Vec<String>,
    /// Container image of tasks that have none
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    #[command(flatten)]
    volume: Volume,
}

/// Runs the command for `workflow`.
///
/// # Errors
///
/// Those of [`export`] and of writing; usage for a wrong `--input`.
pub(crate) fn run(args: &ExportArgs, mut workflow: Workflow) -> Result<()> {
    for task in &mut workflow.tasks {
        task.image = task.image.take().or_else(|| args.image.clone());
    }
    let name = format!("{}-{}", workflow.name, args.to.name());
    let folder = args.output.clone().unwrap_or_else(|| name.into());
    let exported = export(
        &workflow,
        &inputs(&workflow, &args.input)?,
        args.to,
        &args.volume,
    )?;
    exported.write(&folder)?;
    for note in &exported.notes {
        say::note(format_args!("note: {note}"));
    }
    let count = plural(exported.files.len(), "file");
    say::print(&format!(
        "{count} in {}\nnext: {}\n",
        folder.display(),
        exported.next
    ))
}
