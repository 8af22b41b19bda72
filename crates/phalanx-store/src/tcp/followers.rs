//! The copies of the table that followers keep.
//!
//! Every change has a number. A response to a member is held until all followers have
//! acknowledged the changes before it, so nothing that a member knows is missing in a
//! copy. A new follower is sent all keys first, and counts from the start: what is
//! acknowledged never exceeds what its copy has.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use phalanx_wire::store_msg::Response;

use super::conn::Conn;
use super::waiters::ConnId;
use crate::table::Table;

/// How much of the table is queued at once for a new follower.
const COPY_BYTES: usize = 256 << 10;

/// How far the copy of a follower is.
enum Copy {
    /// The keys up to this one were sent.
    UpTo(String),
    /// The end of the copy was sent with this number.
    Sent(u64),
}

struct Follower {
    /// `None` after its connection has ended.
    conn: Option<ConnId>,
    /// Number of the last change that its copy has for certain.
    acked: u64,
    copy: Copy,
}

/// The followers of a server.
pub(super) struct Followers {
    /// Number of the newest change; 1 before the first.
    seq: u64,
    /// Number of the last change that all followers have; the maximum without any, and 0 while one lacks `least`.
    acked: u64,
    /// The change of which every copy must know before anything is answered.
    least: u64,
    /// `acked` has grown.
    grown: bool,
    all: BTreeMap<u64, Follower>,
    dropped: BTreeSet<u64>,
    broken: BTreeSet<u64>,
    /// They continue without this server.
    left: BTreeSet<u64>,
    left_out: Vec<String>,
}

impl Default for Followers {
    fn default() -> Self {
        Self {
            seq: 1,
            acked: u64::MAX,
            least: 0,
            grown: false,
            all: BTreeMap::new(),
            dropped: BTreeSet::new(),
            broken: BTreeSet::new(),
            left: BTreeSet::new(),
            left_out: Vec::new(),
        }
    }
}

impl Followers {
    /// The change that must be acknowledged before a response about `keys` that is made now is sent.
    pub(super) fn hold<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> Option<u64> {
        let is_copied = |key| Self::is_copied(&self.left_out, key);
        let is_held = self.acked < self.seq && keys.into_iter().any(is_copied);
        is_held.then_some(self.seq)
    }

    /// Number of the last change that all have, if it has grown since the last call.
    pub(super) fn take_grown(&mut self) -> Option<u64> {
        std::mem::take(&mut self.grown).then_some(self.acked)
    }

    fn count(&mut self) {
        let acked = self.all.values().map(|f| f.acked).min();
        let acked = acked.unwrap_or(u64::MAX);
        let acked = if acked < self.least { 0 } else { acked };
        self.grown |= acked > self.acked;
        self.acked = acked;
    }

    /// From now on nothing is answered until all followers have the newest change.
    pub(super) fn demand_newest(&mut self) {
        self.least = self.seq;
        self.count();
    }

    pub(super) fn have_demanded(&self) -> bool {
        self.acked >= self.least
    }

    pub(super) fn leave_out(&mut self, prefix: String) {
        self.left_out.push(prefix);
    }

    fn is_copied(left_out: &[String], key: &str) -> bool {
        !left_out.iter().any(|prefix| key.starts_with(prefix))
    }

    /// Sends the new state of a key to all followers.
    pub(super) fn changed(&mut self, conns: &mut HashMap<ConnId, Conn>, table: &Table, key: &str) {
        if self.all.is_empty() || !Self::is_copied(&self.left_out, key) {
            return;
        }
        self.seq += 1;
        let change = Response::Change {
            seq: self.seq,
            key: key.to_owned(),
            value: table.get(key).map(<[u8]>::to_vec),
        };
        for conn in self.all.values().filter_map(|follower| follower.conn) {
            if let Some(conn) = conns.get_mut(&conn) {
                conn.queue(&change);
            }
        }
    }

    /// All that follow, or did and were not dropped.
    pub(super) fn registered(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }

    /// Whether a follower was dropped.
    pub(super) fn is_dropped(&self, id: u64) -> bool {
        self.dropped.contains(&id)
    }

    /// Adds a follower. Returns its previous connection.
    pub(super) fn add(&mut self, id: u64, conn: ConnId) -> Option<ConnId> {
        self.broken.remove(&id);
        self.left.remove(&id);
        let follower = self.all.entry(id).or_insert(Follower {
            conn: None,
            acked: 0,
            copy: Copy::Sent(0),
        });
        // Until it has the copy, it lacks even the newest change.
        follower.acked = follower.acked.min(self.seq - 1);
        follower.copy = Copy::UpTo(String::new());
        let previous = follower.conn.replace(conn);
        self.count();
        previous
    }

    /// Queues the next part of a copy. Returns false if all was queued before.
    pub(super) fn copy(&mut self, id: u64, conn: &mut Conn, table: &Table) -> bool {
        let Some(Follower { copy, .. }) = self.all.get_mut(&id) else {
            return false;
        };
        let Copy::UpTo(last) = copy else {
            return false;
        };
        let last = std::mem::take(last);
        let seq = self.seq;
        for (key, value) in table.after(&last) {
            if !Self::is_copied(&self.left_out, key) {
                continue;
            }
            conn.queue(&Response::Change {
                seq,
                key: key.to_owned(),
                value: Some(value.to_vec()),
            });
            if conn.outbox.len() >= COPY_BYTES {
                *copy = Copy::UpTo(key.to_owned());
                return true;
            }
        }
        conn.queue(&Response::Copied { seq });
        *copy = Copy::Sent(seq);
        true
    }

    /// Notes an acknowledgement. Returns false if it is impossible.
    pub(super) fn acknowledge(&mut self, id: u64, seq: u64) -> bool {
        let Some(follower) = self.all.get_mut(&id) else {
            return false;
        };
        if !matches!(follower.copy, Copy::Sent(end) if end <= seq)
            || !(follower.acked..=self.seq).contains(&seq)
        {
            return false;
        }
        follower.acked = seq;
        self.count();
        true
    }

    /// Notes that a connection has ended.
    pub(super) fn ended(&mut self, conn: ConnId) {
        let ended = self.all.iter_mut().find(|(_, f)| f.conn == Some(conn));
        if let Some((id, follower)) = ended {
            follower.conn = None;
            if !self.left.contains(id) {
                self.broken.insert(*id);
            }
        }
    }

    /// Notes that a follower continues without this server.
    pub(super) fn leave(&mut self, id: u64) {
        self.left.insert(id);
    }

    /// Forgets a follower for good. Returns its connection.
    pub(super) fn remove(&mut self, id: u64) -> Option<ConnId> {
        self.dropped.insert(id);
        self.broken.remove(&id);
        let removed = self.all.remove(&id);
        self.count();
        removed?.conn
    }

    /// These do not follow any more.
    pub(super) fn refuse(&mut self, ids: impl IntoIterator<Item = u64>) {
        self.dropped.extend(ids);
    }

    /// Forgets all followers, but not which ones were dropped.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.broken.clear();
        self.least = 0;
        self.count();
    }

    /// Those with a complete copy that are connected.
    pub(super) fn complete(&self) -> Vec<u64> {
        let complete = self.all.iter().filter(|(_, f)| {
            let is_copied = matches!(f.copy, Copy::Sent(end) if f.acked >= end);
            f.conn.is_some() && is_copied
        });
        complete.map(|(id, _)| *id).collect()
    }

    /// Those that lack a change.
    pub(super) fn behind(&self) -> Vec<u64> {
        let behind = self.all.iter().filter(|(_, f)| f.acked < self.seq);
        behind.map(|(id, _)| *id).collect()
    }

    pub(super) fn broken(&self) -> Vec<u64> {
        self.broken.iter().copied().collect()
    }
}
