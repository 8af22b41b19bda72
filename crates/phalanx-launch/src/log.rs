//! What the libraries have to say (strangers turned away, fallbacks taken), on standard
//! error.

use std::io::{IsTerminal, Write};

use phalanx_base::text::visible;
use tracing_subscriber::filter::LevelFilter;

use crate::place::{is_under_launcher, rank_place, real_env};
use crate::say;

/// `PHALANX_LOG=off|error|warn|info|debug|trace`.
const VARIABLE: &str = "PHALANX_LOG";

/// Starts logging: warnings and worse unless `PHALANX_LOG` says otherwise.
pub fn start() {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let level = level(&wanted);
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    // Fails only when a subscriber is set already, which is then in charge.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(move || Visible { colour })
        .with_ansi(colour)
        .with_target(false)
        .without_time()
        // It would panic on a standard error that cannot be written.
        .log_internal_errors(false)
        .try_init();
}

/// Standard error, of which one line is written at a time. What remote programs and files say
/// may be in it.
struct Visible {
    /// Escape sequences of colours are the subscriber's; it has escaped those of others.
    colour: bool,
}

impl Write for Visible {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let mut shown = String::with_capacity(text.len());
        let mut rest = &*text;
        if self.colour {
            while let Some((before, code)) = rest.split_once("\x1b[")
                && let Some((code, after)) = code.split_once('m')
                && code.bytes().all(|b| b.is_ascii_digit() || b == b';')
            {
                shown.push_str(&visible(before));
                shown.push_str(&format!("\x1b[{code}m"));
                rest = after;
            }
        }
        shown.push_str(&visible(rest));
        std::io::stderr().write_all(shown.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Warns of a `PHALANX_LOG` that means nothing: once a job, not from ranks after the first
/// nor from those whose launcher has said it.
pub fn warn_of_nonsense() {
    let Some(wanted) = std::env::var_os(VARIABLE) else {
        return;
    };
    let env = real_env();
    let is_first = match rank_place(&env) {
        Ok(Some(place)) => place.rank == 0,
        _ => true,
    };
    if !is_under_launcher(&env) && is_first && !is_known(&wanted.to_string_lossy()) {
        say::note(format_args!(
            "warning: {VARIABLE} cannot be \"{}\"; it is off, error, warn, info, debug or trace, and warn is taken",
            wanted.display()
        ));
    }
}

fn is_known(wanted: &str) -> bool {
    wanted.is_empty() || wanted.parse::<LevelFilter>().is_ok()
}

/// Warnings where nothing, or nothing that is known, is wanted.
fn level(wanted: &str) -> LevelFilter {
    // The library takes an empty text for "error".
    if wanted.is_empty() {
        return LevelFilter::WARN;
    }
    wanted.parse().unwrap_or(LevelFilter::WARN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_shown_unless_somebody_says_otherwise() {
        for (wanted, level_then) in [
            ("", LevelFilter::WARN),
            ("nonsense", LevelFilter::WARN),
            ("off", LevelFilter::OFF),
            ("error", LevelFilter::ERROR),
            ("debug", LevelFilter::DEBUG),
        ] {
            assert_eq!(level(wanted), level_then, "{wanted:?}");
            assert_eq!(is_known(wanted), wanted != "nonsense", "{wanted:?}");
        }
    }
}
