//! Connections that wait for keys.

use std::collections::HashMap;

/// Identifier of a connection; never reused.
pub(super) type ConnId = u64;

/// Maps a missing key to the connections that wait for it. A wait is listed under
/// each of its missing keys, as often as it names the key.
#[derive(Debug, Default)]
pub(super) struct Waiters(HashMap<String, Vec<ConnId>>);

impl Waiters {
    pub(super) fn add(&mut self, key: &str, conn: ConnId) {
        if let Some(list) = self.0.get_mut(key) {
            list.push(conn);
        } else {
            self.0.insert(key.to_owned(), vec![conn]);
        }
    }

    /// Removes and returns the connections that wait for a key that now exists.
    pub(super) fn take(&mut self, key: &str) -> Vec<ConnId> {
        self.0.remove(key).unwrap_or_default()
    }

    /// Removes and returns the connection that waits longest for this key.
    pub(super) fn take_first(&mut self, key: &str) -> Option<ConnId> {
        let list = self.0.get_mut(key)?;
        let first = list.remove(0);
        if list.is_empty() {
            self.0.remove(key);
        }
        Some(first)
    }

    /// Removes a connection's waits for these keys.
    pub(super) fn remove<'a>(&mut self, keys: impl Iterator<Item = &'a str>, conn: ConnId) {
        for key in keys {
            if let Some(list) = self.0.get_mut(key) {
                list.retain(|other| *other != conn);
                if list.is_empty() {
                    self.0.remove(key);
                }
            }
        }
    }

    /// Number of keys with waiting connections.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
