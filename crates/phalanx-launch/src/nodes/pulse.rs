//! Signs of life: each node's own, and node 0's watch over all.

use std::time::{Duration, Instant};

use phalanx_store::{Store, Will};

/// How often a launcher shows that it lives.
pub(super) const BEAT: Duration = Duration::from_secs(1);
/// A node that did not beat for this long is lost. Only a dead or cut-off
/// host gets here, so it may be patient with a busy one.
pub(super) const BEAT_LIMIT: Duration = Duration::from_secs(15);
/// A node that did not beat for this long is the reason why ranks have lost those of that node.
pub(super) const SILENT: Duration = Duration::from_secs(3);
/// The value of [`gone_key`] of a node whose connection ended.
const CLOSED: &[u8] = b"closed";

/// Says that nothing comes from the node: see the table in `mod.rs`.
pub(super) fn gone_key(node: usize) -> String {
    format!("launch/gone/{node}")
}

/// Our own beat and, on node 0, everybody's.
pub(super) struct Pulse {
    next: Option<Instant>,
    /// Tells the others that our connection to the store has ended.
    will: Option<Will>,
    heard: Vec<(Option<Vec<u8>>, Option<Instant>)>,
}

impl Pulse {
    /// Of `nodes` nodes, none of which was heard yet.
    pub(super) fn new(nodes: usize) -> Self {
        Pulse {
            next: None,
            will: None,
            heard: vec![(None, None); nodes],
        }
    }

    /// Nothing more will come from this node, which has lost the store.
    pub(super) fn end(self) {
        self.will.into_iter().for_each(Will::execute);
    }

    /// Beats when it is time. `Some(node)`: that node is lost.
    pub(super) fn beat(
        &mut self,
        store: &dyn Store,
        me: usize,
        now: Instant,
    ) -> phalanx_store::Result<Option<usize>> {
        if self.next.is_some_and(|next| now < next) {
            return Ok(None);
        }
        self.next = Some(now + BEAT);
        if me != 0 {
            let gone = gone_key(me);
            if store.try_get(&gone)?.is_some() {
                // This node is alive: a connection broke, or its beats were late.
                self.will = None;
                store.delete(&gone)?;
            }
            if self.will.is_none() {
                self.will = store.leave_will(&gone, CLOSED)?;
            }
        }
        store.add(&format!("launch/beat/{me}"), 1)?;
        if me != 0 {
            return Ok(None);
        }
        for (node, (value, since)) in self.heard.iter_mut().enumerate() {
            if node == me {
                continue;
            }
            let beat = store.try_get(&format!("launch/beat/{node}"))?;
            if beat != *value || since.is_none() {
                *value = beat;
                *since = Some(now);
                continue;
            }
            let silent = since.map_or(Duration::ZERO, |since| now.duration_since(since));
            if silent > BEAT_LIMIT {
                return Ok(Some(node));
            }
            if silent >= SILENT {
                store.set(&gone_key(node), silent.as_secs().to_string().as_bytes())?;
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_store::MemStore;

    use super::*;

    #[test]
    fn a_silent_node_is_lost_and_a_beating_one_is_not() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(3);
        let start = Instant::now();
        let mut now = start;
        let mut lost = None;
        while lost.is_none() && now < start + 2 * BEAT_LIMIT {
            // node 1 beats, node 2 does for three seconds
            store.add("launch/beat/1", 1).unwrap();
            if now < start + 3 * BEAT {
                store.add("launch/beat/2", 1).unwrap();
            }
            lost = pulse.beat(&store, 0, now).unwrap();
            now += BEAT;
        }
        assert_eq!(lost, Some(2));
        assert!(now > start + BEAT_LIMIT + 3 * BEAT);
        // So do those whose ranks have lost node 2 sooner, for the same reason.
        assert_eq!(store.try_get(&gone_key(2)).unwrap().unwrap(), b"15");
        assert_eq!(store.try_get(&gone_key(1)).unwrap(), None);
        // It is heard again.
        Pulse::new(3).beat(&store, 2, now).unwrap();
        assert_eq!(store.try_get(&gone_key(2)).unwrap(), None);
    }

    #[test]
    fn a_node_that_never_beat_is_lost_too() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(2);
        let start = Instant::now();
        assert_eq!(pulse.beat(&store, 0, start).unwrap(), None);
        assert_eq!(pulse.beat(&store, 0, start + BEAT_LIMIT).unwrap(), None);
        assert_eq!(
            pulse.beat(&store, 0, start + 2 * BEAT_LIMIT).unwrap(),
            Some(1)
        );
    }

    #[test]
    fn other_nodes_only_beat() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(2);
        let start = Instant::now();
        for n in 0..40 {
            assert_eq!(pulse.beat(&store, 1, start + n * BEAT).unwrap(), None);
        }
        assert_eq!(store.try_get("launch/beat/1").unwrap().unwrap(), b"40");
    }
}
