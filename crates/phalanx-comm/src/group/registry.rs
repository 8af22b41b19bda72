//! Where threads of one process find the meshes of their subgroups.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::sync::lock;
use crate::transport::{Mesh, thread_mesh_with};

/// Shared by all ranks of one group of threads, and by its subgroups.
pub(super) struct Registry {
    ring_bytes: usize,
    arena_bytes: Option<usize>,
    /// Meshes not yet fetched, by group id. Looked up, never iterated.
    waiting: Mutex<HashMap<u32, Vec<Option<Mesh>>>>,
}

impl Registry {
    pub(super) fn new(ring_bytes: usize, arena_bytes: Option<usize>) -> Registry {
        Registry {
            ring_bytes,
            arena_bytes,
            waiting: Mutex::default(),
        }
    }

    /// The mesh of member `index` of the group `id` with `world` members. The first
    /// member to call creates the meshes of all; the last one removes the entry.
    pub(super) fn take(&self, id: u32, index: usize, world: usize) -> Option<Mesh> {
        let mut waiting = lock(&self.waiting);
        let seats = waiting.entry(id).or_insert_with(|| {
            let meshes = thread_mesh_with(world, self.ring_bytes, self.arena_bytes);
            meshes.into_iter().map(Some).collect()
        });
        let mesh = seats.get_mut(index).and_then(Option::take);
        if seats.iter().all(Option::is_none) {
            waiting.remove(&id);
        }
        mesh
    }
}
