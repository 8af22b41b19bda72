//! Which connection waits for which key.

use std::collections::HashMap;

/// Name of a connection for its life; never used twice.
pub(super) type ConnId = u64;

/// From a key that is not there to the connections that wait for it. Each
/// wait stands under each of its missing keys, once per mention.
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

    /// The key has appeared: everyone who waited for it, once per mention.
    pub(super) fn take(&mut self, key: &str) -> Vec<ConnId> {
        self.0.remove(key).unwrap_or_default()
    }

    /// The connection no longer waits for these keys.
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

    /// Keys that somebody waits for.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
