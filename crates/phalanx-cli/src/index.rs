//! `phalanx index`: where the samples of shards lie.

use std::path::PathBuf;

use phalanx_data::stream::Stream;

use crate::error::Result;
use crate::say;

/// Arguments of `phalanx index`.
#[derive(Debug, clap::Args)]
pub struct IndexArgs {
    /// A folder of .tar or .jsonl files, or one in an object store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX
    #[arg(value_name = "PLACE")]
    place: String,
    /// File to write [default: phalanx.index beside the shards]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Leave out what cannot be read, as the end of a cut-off archive; without this the first such place is an error
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
