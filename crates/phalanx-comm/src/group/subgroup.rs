//! Groups of some of the ranks.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::join::lone_mesh;
use super::{Identity, Member, Origin, ProcessGroup};
use crate::select::Selector;
use crate::{Error, ErrorKind, Result};

impl ProcessGroup {
    /// Forms a group of some ranks of this one. All ranks of *this* group must
    /// call it, with the same ranks; members get `Some`, the others `None`.
    ///
    /// In the new group ranks are numbered in ascending order of their number
    /// here, whatever the order of `ranks` (as in PyTorch), so that canonical
    /// order stays ascending. It has its own links: operations of the two groups do not
    /// wait for each other, and one can fail without the other.
    ///
    /// *Blocks until* all ranks of this group have come and the members are
    /// connected; deadlines as for an operation, then
    /// [`InitOptions::timeout`](super::InitOptions::timeout).
    ///
    /// # Errors
    ///
    /// `Usage` for an empty list, a rank twice, or an unknown one; `Desync`
    /// when ranks ask for different groups.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>> {
        const NAME: &str = "new_group";
        let members = self.members(NAME, ranks)?;
        let print = fingerprint(self.core.id, self.next_call(), &members);
        self.agree(print).map_err(|e| e.with_operation(NAME))?;

        match members.contains(&self.core.rank) {
            true => self.form_subgroup(NAME, &members, print).map(Some),
            false => Ok(None),
        }
    }

    /// Forms a group of some ranks of this one, of which this rank is one; only these call it, with the same ranks. What the
    /// others do is not disturbed. Otherwise as [`new_group`](Self::new_group). Groups of the same ranks differ by
    /// how many were created before. PyTorch: `new_group(ranks, use_local_synchronization=True)`.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// let groups = ProcessGroup::threads(3, GroupOptions::default());
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             if group.rank() != 1 {
    ///                 let pair = group.new_group_among(&[0, 2]).unwrap();
    ///                 let mut sum = [group.rank() as i32];
    ///                 pair.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    ///                 assert_eq!(sum, [2]);
    ///             }
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// *Blocks until* the members are connected, at most [`InitOptions::timeout`](super::InitOptions::timeout).
    ///
    /// # Errors
    ///
    /// `Usage` as for `new_group`, and for ranks without this one; `Timeout` naming the members that did not come.
    pub fn new_group_among(&self, ranks: &[usize]) -> Result<ProcessGroup> {
        const NAME: &str = "new_group_among";
        /// Other numbers than those of groups that all ranks make.
        const AMONG: u64 = 1 << 63;
        let members = self.members(NAME, ranks)?;
        if !members.contains(&self.core.rank) {
            let why = format!("rank {} is not one of the given ranks", self.core.rank);
            return Err(self.usage(NAME, why));
        }
        let number = {
            let among = self.core.among.lock();
            let mut among = among.unwrap_or_else(PoisonError::into_inner);
            let made = among.entry(members.clone()).or_default();
            *made += 1;
            AMONG | u64::from(self.core.generation) << 32 | *made
        };
        let print = fingerprint(self.core.id, number, &members);
        self.form_subgroup(NAME, &members, print)
    }

    /// The ranks of a new group, in order.
    fn members(&self, name: &str, ranks: &[usize]) -> Result<Vec<usize>> {
        let mut members = ranks.to_vec();
        members.sort_unstable();
        if members.is_empty() {
            return Err(self.usage(name, "no ranks were given".into()));
        }
        if let Some(pair) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.usage(name, format!("rank {} is given twice", pair[0])));
        }
        let known = |rank: &usize| self.check_peer(name, "rank", *rank);
        members.iter().try_for_each(known)?;
        Ok(members)
    }

    /// Forms a group of all ranks that give the same `color`, as MPI's `MPI_Comm_split`; ranks that give `None` are in no
    /// group. All ranks of *this* group must call it. Otherwise as [`new_group`](Self::new_group), with one exchange for all
    /// groups.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    ///
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let half = group.split(Some(group.rank() as u32 % 2))?.expect("a color");
    /// assert_eq!(half.world_size(), 1);
    /// # Ok::<(), phalanx_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Desync` when ranks have formed different numbers of subgroups before.
    pub fn split(&self, color: Option<u32>) -> Result<Option<ProcessGroup>> {
        const NAME: &str = "split";
        let call = self.next_call();
        let mine = [call.cast_signed(), color.map_or(-1, i64::from)];
        let mut all = vec![0i64; 2 * self.core.world];
        self.all_gather(&mine, &mut all)
            .map_err(|e| e.with_operation(NAME))?;
        let (calls, colors): (Vec<i64>, Vec<i64>) = all.chunks(2).map(|c| (c[0], c[1])).unzip();
        self.are_equal(&calls).map_err(|e| e.with_operation(NAME))?;
        if color.is_none() {
            return Ok(None);
        }
        let members = colors.iter().enumerate().filter(|(_, c)| **c == mine[1]);
        let members: Vec<usize> = members.map(|(rank, _)| rank).collect();
        let print = fingerprint(self.core.id, call, &members);
        self.form_subgroup(NAME, &members, print).map(Some)
    }

    /// The number of this call, which must be the same on all ranks.
    fn next_call(&self) -> u64 {
        let number = self.core.subgroups.fetch_add(1, Ordering::Relaxed);
        number | u64::from(self.core.generation) << 32
    }

    /// Forms the group of `members`, of which this rank is one, on all of them.
    fn form_subgroup(&self, name: &str, members: &[usize], print: u64) -> Result<ProcessGroup> {
        let rank = members.iter().filter(|m| **m < self.core.rank).count();
        let roster = &self.core.identity.roster;
        let member = Member {
            rank,
            world: members.len(),
            id: group_id(print),
            generation: self.core.generation,
            limits: self.core.limits,
            algorithm: self.core.algorithm,
            identity: Some(Identity {
                roster: members.iter().map(|member| roster[*member]).collect(),
                ..self.core.identity.clone()
            }),
        };
        let named = |e: Error| e.with_rank(self.core.rank).with_operation(name);
        let mut mesh = match &*self.core.origin {
            _ if member.world == 1 => lone_mesh().map_err(named)?,
            Origin::Threads { registry, .. } => registry
                .take(member.id, rank, member.world)
                .ok_or_else(|| named(Error::internal("two subgroups have the same id")))?,
            Origin::Processes(processes) => processes
                .form(member.id, rank, member.world, processes.options.timeout)
                .map_err(named)?,
        };
        // The ranks that are not members still compute.
        mesh.share_cores(self.core.budgets.topology());
        let parent = &self.core.selector;
        // The network is that of the parent group.
        let selector = Selector::new(
            mesh.hosts().clone(),
            *parent.costs(),
            parent.rules().clone(),
        );
        let origin = Arc::clone(&self.core.origin);
        let recorder = Arc::clone(&self.core.recorder);
        Self::from_mesh(member, mesh, selector, origin, recorder, false)
    }

    /// Compares the requests of all ranks. All see the same answers, so all succeed or
    /// all fail, and this group stays usable.
    fn agree(&self, print: u64) -> Result<()> {
        let mine = [print.cast_signed()];
        let mut all = vec![0i64; self.core.world];
        self.all_gather(&mine, &mut all)?;
        self.are_equal(&all)
    }

    fn are_equal(&self, all: &[i64]) -> Result<()> {
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(other) => Err(Error::new(
                ErrorKind::Desync,
                format!(
                    "ranks 0 and {other} ask for different groups: all ranks must make the same \
                     groups in the same order"
                ),
            )
            .with_rank(self.core.rank)
            .with_peer(other)),
        }
    }
}

/// FNV-1a over the parent, the number of the call and the members.
fn fingerprint(parent: u32, number: u64, members: &[usize]) -> u64 {
    let words = [u64::from(parent), number]
        .into_iter()
        .chain(members.iter().map(|r| *r as u64));
    super::fnv(words)
}

/// A group id that is not the world's.
fn group_id(fingerprint: u64) -> u32 {
    ((fingerprint >> 32) as u32 ^ fingerprint as u32) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_by_members_number_and_parent() {
        let ids: std::collections::HashSet<u32> = [
            fingerprint(0, 0, &[0, 1]),
            fingerprint(0, 1, &[0, 1]),
            fingerprint(0, 0, &[0, 2]),
            fingerprint(1, 0, &[0, 1]),
            fingerprint(0, 0, &[0, 1, 2]),
        ]
        .into_iter()
        .map(group_id)
        .collect();
        assert_eq!(ids.len(), 5);
        assert!(!ids.contains(&0));
    }
}
