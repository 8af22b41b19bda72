//! `phalanx index`: where the samples of shards lie.

use std::path::PathBuf;

use phalanx_data::stream::Stream;

use crate::error::Result;
use crate::say;

/// Arguments of `phalanx index`.
#[derive(Debug, clap::Args)]
pub struct IndexArgs {
    /// Folder of .tar, .jsonl, .ndjson or .parquet files, or its URL
    #[arg(value_name = "FOLDER")]
    place: String,
    /// File to write [default: phalanx.index beside the shards]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Skip samples that cannot be read (a cut-off archive, an invalid line) instead of failing at the first
    #[arg(long)]
    skip_damaged: bool,
}

/// Runs `phalanx index`.
///
/// # Errors
///
/// Those of reading the shards, naming file and offset, and of writing.
pub fn run(args: &IndexArgs) -> Result<()> {
    let made = Stream::new(&args.place).make_index(args.output.as_deref(), args.skip_damaged)?;
    say::note(format_args!("{made}"));
    Ok(())
}
