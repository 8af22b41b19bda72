//! What the libraries have to say (strangers turned away, fallbacks taken), on standard
//! error.

use std::io::IsTerminal;

use tracing_subscriber::filter::LevelFilter;

/// `PHALANX_LOG=off|error|warn|info|debug|trace`.
const VARIABLE: &str = "PHALANX_LOG";

/// Starts logging: warnings and worse unless `PHALANX_LOG` says otherwise.
pub(crate) fn start() {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let level = wanted.parse().unwrap_or(LevelFilter::WARN);
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    // Fails only when a subscriber is set already, which is then in charge.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        .with_target(false)
        .without_time()
        .try_init();
}
