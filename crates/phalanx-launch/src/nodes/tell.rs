//! Why a launcher that the other nodes wait for does not join.

use std::net::IpAddr;

use super::LauncherLog;
use crate::error::Error;
use crate::report::{JobFailure, taken_apart};

/// The longest message that is sent, in characters.
const LONGEST: usize = 4000;

/// Ends the job by `error` of a node of `host` at `address`, unless an attempt has begun, which runs without this one.
pub(super) fn leave_word(
    log: &mut LauncherLog,
    address: Option<IpAddr>,
    host: &str,
    error: &Error,
) -> phalanx_store::Result<()> {
    let text: String = error.render().chars().take(LONGEST).collect();
    let (message, notes) = taken_apart(text.strip_prefix("error: ").unwrap_or(&text).trim_end());
    let address = address.map_or(String::new(), |ip| format!(", {ip}"));
    let verdict = JobFailure {
        mistake: true,
        notes,
        ..JobFailure::new(
            error.exit_code(),
            usize::MAX,
            format!("a node (host {host}{address}): {message}"),
        )
    };
    log.append(|all| all.attempt().is_none().then(|| all.abort_for(&verdict))?)
}
