//! Why a launcher that the other nodes wait for does not join.

use std::time::Duration;

use phalanx_store::{Store, TcpStore};

use super::attempts::attempt_key;
use super::{NodeInfo, decode, node_key};
use crate::error::Error;
use crate::report::{JobFailure, taken_apart};

/// The longest message that is sent, in characters.
const LONGEST: usize = 4000;

/// Leaves `error` of a node of `host` in the store, unless the nodes have met.
pub(super) fn leave_word(store: &TcpStore, host: &str, error: &Error) -> phalanx_store::Result<()> {
    // Nodes that come and go: it runs without this one.
    if store.try_get(&attempt_key(0))?.is_some() {
        return Ok(());
    }
    let first = store.try_get(&node_key(0))?;
    if let Some(first) = first.and_then(|bytes| decode::<NodeInfo>(&bytes)) {
        let keys: Vec<String> = (0..first.nodes).map(node_key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if store.wait(&keys, Duration::ZERO).is_ok() {
            return Ok(());
        }
    }
    let text: String = error.render().chars().take(LONGEST).collect();
    let (message, notes) = taken_apart(text.strip_prefix("error: ").unwrap_or(&text).trim_end());
    let address = store
        .local_ip()
        .map_or(String::new(), |ip| format!(", {ip}"));
    let verdict = JobFailure {
        mistake: true,
        notes,
        ..JobFailure::new(
            error.exit_code(),
            usize::MAX,
            format!("a node (host {host}{address}): {message}"),
        )
    };
    verdict.publish(store).map(drop)
}
