//! `phalanx export`: the weights of a checkpoint in another format.

use std::path::PathBuf;

use phalanx_base::text::one_line;
use phalanx_checkpoint::{Adapter, read_tensors, save_tensors};

use crate::error::{Result, refuse};
use crate::format::{bytes, plural};
use crate::say;
use phalanx_train::{check_folder_of, file_of};

/// Arguments of `phalanx export`.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Weights (.pth, .pt, .safetensors, the .index.json of a model in several files), a resumable checkpoint's .json, or the folder of a run
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// File to write; the extension selects the format: .pth or .pt for torch.load, or .safetensors
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Add low-rank adapters (LoRA) to the weights that they belong to: those of CHECKPOINT, or of a PEFT adapter's folder ADAPTER
    #[arg(long, value_name = "ADAPTER", num_args = 0..=1, require_equals = true, conflicts_with = "adapter")]
    #[allow(clippy::option_option, reason = "the flag has a value or none")]
    merge: Option<Option<PathBuf>>,
    /// Write only the low-rank adapters of CHECKPOINT, as PEFT's files in the folder --to
    #[arg(long)]
    adapter: bool,
}

/// Runs `phalanx export`.
///
/// # Errors
///
/// Usage for another ending; those of reading and writing, naming the file.
pub fn run(args: &ExportArgs) -> Result<()> {
    let ending = args.to.extension().and_then(|e| e.to_str());
    if !args.adapter && !matches!(ending, Some("pth" | "pt" | "safetensors")) {
        refuse!(
            "--to {}: the name must end in .pth, .pt or .safetensors",
            args.to.display()
        );
    }
    // That of an adapter may be there.
    if !(args.adapter && args.to.is_dir()) {
        check_folder_of("--to", &args.to)?;
    }
    let file = file_of(&args.checkpoint)?;
    let (mut tensors, mut loaded) = read_tensors(&file)?;
    for warning in &loaded.warnings {
        say::note(format_args!("warning: {warning}"));
    }
    if let Some(tensor) = tensors.iter().find(|tensor| !tensor.is_finite()) {
        say::note(format_args!(
            "warning: the weights have infinite or NaN values (first in {})",
            one_line(&tensor.name)
        ));
    }
    if args.adapter {
        Adapter::take(&mut tensors, &mut loaded.metadata, &file)?.save(&args.to)?;
        say::note(format_args!(
            "{}: a LoRA adapter for PEFT",
            args.to.display()
        ));
        return Ok(());
    }
    if let Some(folder) = &args.merge {
        let adapter = match folder {
            Some(folder) => Adapter::read(folder)?,
            None => Adapter::take(&mut tensors, &mut loaded.metadata, &file)?,
        };
        let layers = adapter.merge_into(&mut tensors)?;
        let layers = plural(layers, "layer");
        say::note(format_args!(
            "low-rank adapters added to the weights of {layers}"
        ));
    }
    let total_bytes: usize = tensors.iter().map(|t| t.bytes.len()).sum();
    let count = tensors.len();
    save_tensors(&args.to, tensors, &loaded.metadata)?;
    say::note(format_args!(
        "{}: {}, {}",
        args.to.display(),
        plural(count, "tensor"),
        bytes(total_bytes)
    ));
    Ok(())
}
