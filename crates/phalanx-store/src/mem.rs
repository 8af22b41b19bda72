//! A store for the threads of one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use phalanx_wire::store_msg::{Request, Response};

use crate::table::Table;
use crate::{Result, Store};

/// A store for the threads of one process. Clones share their keys.
#[derive(Clone, Debug, Default)]
pub struct MemStore(Arc<MemTable>);

#[derive(Debug, Default)]
struct MemTable {
    table: Mutex<Table>,
    /// Notified when a key may have appeared.
    changed: Condvar,
}

impl MemStore {
    /// An empty store with the default limits.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Store for MemStore {
    fn location(&self) -> String {
        "the in-memory store".to_owned()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        let start = Instant::now();
        // Usable after a panic of another thread: each change is complete before anything can panic.
        let mut table = self.0.table.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (response, changed) = table.apply(request);
            if !changed.is_empty() {
                self.0.changed.notify_all();
            }
            let left = request.timeout().saturating_sub(start.elapsed());
            let is_over = !matches!(response, Response::Missing(_) | Response::NotFound);
            if is_over || left.is_zero() {
                return Ok(response);
            }
            let waited = self.0.changed.wait_timeout(table, left);
            (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
