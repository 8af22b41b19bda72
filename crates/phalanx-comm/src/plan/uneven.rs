//! Collectives in one round, with lengths that are equal or differ by rank.
//!
//! If lengths differ there is no [`Spec`]: the lengths are part of the collective. All
//! ranks know the same lengths (or, for all-to-all, have compared them), so both sides
//! of every transfer agree on its size.
//!
//! *Steps:* 1 round.
//! *Bytes sent per rank:* all-gather: `(P − 1)·n_r`; reduce-scatter: all
//! parts but its own; gather: its part; scatter: the root all parts but its
//! own; all-to-all: all parts but its own.
//! *Order of additions:* canonical.
//! *Scratch:* reduce-scatter: `P − 1` parts of the rank's own length.

use super::{Buf, Method, Part, RankPlan, Round, Spec, padded_elems, rotation, slot};

/// One collective; lengths are in elements and indexed by rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Uneven<'a> {
    /// Rank `r` contributes `lengths[r]`.
    AllGather { lengths: &'a [usize] },
    /// The same, to the root only.
    Gather { lengths: &'a [usize], root: usize },
    /// Rank `r` gets `lengths[r]` of the root.
    Scatter { lengths: &'a [usize], root: usize },
    /// Rank `r` gets `lengths[r]` of the sum.
    ReduceScatter { lengths: &'a [usize] },
    /// What this rank sends to and receives from each rank.
    AllToAll {
        sends: &'a [usize],
        recvs: &'a [usize],
    },
}

/// The plan of a collective whose lengths are equal.
pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let lengths = &vec![spec.count; spec.world][..];
    let root = spec.root;
    let kind = match spec.method {
        Method::AllGather => Uneven::AllGather { lengths },
        Method::Gather => Uneven::Gather { lengths, root },
        Method::Scatter => Uneven::Scatter { lengths, root },
        Method::ReduceScatter => Uneven::ReduceScatter { lengths },
        _ => Uneven::AllToAll {
            sends: lengths,
            recvs: lengths,
        },
    };
    kind.plan(rank, spec.world, spec.elem_bytes)
}

/// Runs of `buf`, one a rank, one behind the other.
fn runs(buf: Buf, lengths: &[usize]) -> Vec<Part> {
    let mut next = 0;
    let run = |&len: &usize| {
        let start = next;
        next += len;
        Part::new(buf, start, len)
    };
    lengths.iter().map(run).collect()
}

impl Uneven<'_> {
    /// The plan of `rank` of `world`.
    pub(crate) fn plan(self, rank: usize, world: usize, elem_bytes: usize) -> RankPlan {
        let mut round = Round::default();
        let (mut input_elems, mut output_elems, mut scratch_elems) = (0, 0, 0);
        match self {
            Uneven::AllGather { lengths } => {
                let mine = Part::new(Buf::Input, 0, lengths[rank]);
                let places = runs(Buf::Output, lengths);
                (input_elems, output_elems) = (mine.len, lengths.iter().sum());
                for (to, from) in rotation(rank, world) {
                    round.send(to, mine);
                    round.recv(from, places[from]);
                }
                round.copy(mine, places[rank]);
            }
            Uneven::Gather { lengths, root } => {
                let mine = Part::new(Buf::Input, 0, lengths[rank]);
                input_elems = mine.len;
                if rank == root {
                    let places = runs(Buf::Output, lengths);
                    output_elems = lengths.iter().sum();
                    for (_, from) in rotation(rank, world) {
                        round.recv(from, places[from]);
                    }
                    round.copy(mine, places[rank]);
                } else {
                    round.send(root, mine);
                }
            }
            Uneven::Scatter { lengths, root } => {
                let mine = Part::new(Buf::Output, 0, lengths[rank]);
                output_elems = mine.len;
                if rank == root {
                    let parts = runs(Buf::Input, lengths);
                    input_elems = lengths.iter().sum();
                    for (to, _) in rotation(rank, world) {
                        round.send(to, parts[to]);
                    }
                    round.copy(parts[rank], mine);
                } else {
                    round.recv(root, mine);
                }
            }
            Uneven::ReduceScatter { lengths } => {
                let (parts, len) = (runs(Buf::Input, lengths), lengths[rank]);
                (input_elems, output_elems) = (lengths.iter().sum(), len);
                let result = Part::new(Buf::Output, 0, len);
                let stride = padded_elems(len, elem_bytes);
                scratch_elems = stride * (world - 1);
                let inbox = |peer| Part::new(Buf::Scratch, slot(rank, peer) * stride, len);
                for (to, from) in rotation(rank, world) {
                    round.send(to, parts[to]);
                    round.recv(from, inbox(from));
                }
                if world == 1 {
                    round.copy(parts[rank], result);
                } else {
                    let from = |r| if r == rank { parts[rank] } else { inbox(r) };
                    round.fold_all(result, (0..world).map(from).collect());
                }
            }
            Uneven::AllToAll { sends, recvs } => {
                let (parts, places) = (runs(Buf::Input, sends), runs(Buf::Output, recvs));
                (input_elems, output_elems) = (sends.iter().sum(), recvs.iter().sum());
                for (to, from) in rotation(rank, world) {
                    round.send(to, parts[to]);
                    round.recv(from, places[from]);
                }
                round.copy(parts[rank], places[rank]);
            }
        }
        RankPlan {
            world,
            rank,
            input_elems,
            output_elems,
            scratch_elems,
            rounds: vec![round],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: [&[usize]; 5] = [&[3], &[0, 5], &[4, 0, 1], &[0, 0, 0, 0], &[7, 16, 17, 0, 1]];

    /// Both sides of every transfer are there and agree on its length, and
    /// each plan is safe to run.
    fn check(plans: &[RankPlan]) {
        for plan in plans {
            plan.check_local().unwrap();
            let round = &plan.rounds[0];
            for send in &round.sends {
                let theirs = &plans[send.peer].rounds[0].recvs;
                let recv = theirs.iter().find(|recv| recv.peer == plan.rank).unwrap();
                assert_eq!(recv.part.len, send.part.len);
            }
            for recv in &round.recvs {
                let theirs = &plans[recv.peer].rounds[0].sends;
                assert!(theirs.iter().any(|send| send.peer == plan.rank));
            }
        }
    }

    #[test]
    fn both_sides_of_every_transfer_agree() {
        for lengths in LENGTHS {
            let world = lengths.len();
            for root in 0..world {
                for kind in [
                    Uneven::AllGather { lengths },
                    Uneven::Gather { lengths, root },
                    Uneven::Scatter { lengths, root },
                    Uneven::ReduceScatter { lengths },
                ] {
                    let plans: Vec<_> = (0..world).map(|r| kind.plan(r, world, 4)).collect();
                    check(&plans);
                }
            }
        }
    }

    #[test]
    fn all_to_all_is_cut_by_row_and_column() {
        let matrix = [[1, 0, 3], [4, 5, 0], [0, 8, 9]];
        let column = |r: usize| matrix.map(|row| row[r]);
        let plans: Vec<_> = (0..3)
            .map(|rank| {
                let kind = Uneven::AllToAll {
                    sends: &matrix[rank],
                    recvs: &column(rank),
                };
                kind.plan(rank, 3, 8)
            })
            .collect();
        check(&plans);
        assert_eq!((plans[1].input_elems, plans[1].output_elems), (9, 13));
    }
}
