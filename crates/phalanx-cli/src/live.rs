//! `phalanx live`: the runs below a folder on one web page.

use std::path::PathBuf;

use phalanx_base::address::Address;
use phalanx_live::Page;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;

use crate::error::{Error, ErrorKind, Result};
use crate::say;

/// Arguments of `phalanx live`.
#[derive(Debug, clap::Args)]
pub struct LiveArgs {
    /// Folder with the runs, or with folders of runs
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Where to listen [default: a free port of 127.0.0.1]
    #[arg(long, value_name = "[HOST:]PORT")]
    address: Option<Address>,
}

/// Runs `phalanx live`: until a signal.
///
/// # Errors
///
/// `Usage` for a folder that does not exist and an address that cannot be had; `Interrupted` by a signal.
pub fn run(args: &LiveArgs) -> Result<()> {
    let failed = |e| Error::new(ErrorKind::System, "cannot watch for signals").caused_by(e);
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).map_err(failed)?;
    let page = Page::of_runs(&args.address.clone().unwrap_or_default(), &args.folder)?;
    say::note(format_args!("live: {}", page.link()));
    let signal = signals.forever().next().and_then(signal_name);
    drop(page);
    let signal = signal.unwrap_or("a signal");
    Err(Error::new(
        ErrorKind::Interrupted,
        format!("stopped by {signal}"),
    ))
}
