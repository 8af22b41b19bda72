//! Finds cycles of ranks that wait for each other.
//!
//! A rank *waits for* another if it cannot leave its operation before the other has
//! left its own. A cycle of such waits never ends. The ranks' posts show whether they
//! wait:
//!
//! | rank `x` is | and `y` | so | is it certain |
//! |---|---|---|---|
//! | receiving a message that is not among the first k of `y` | has sent at most k messages to `x`, and does nothing else meanwhile | `x` waits for `y` | while another thread of `y` sends nothing |
//! | in collective s, without data of `y` | has not begun s | `x` waits for `y` | yes |
//! | in collective s, which ends on `x` only after `y` has begun it | has not begun s | `x` waits for `y` | yes |
//! | in collective s, without room to `y` | has not begun s | `x` waits for `y` | while `x` finds no room |
//!
//! A send is in no cycle: a rank that waits takes messages in, up to a limit. Nor is a
//! receive from any of several ranks, or a rank that several threads call, or one that
//! waits for a message while a collective runs in the background. Such cycles end at the
//! deadline.
//!
//! *A cycle of certain waits never ends, however old the posts are.* Each post
//! describes one operation of a rank, in which it begins nothing else. So each rank
//! leaves its operation only after the next one in the cycle has left its own: none can
//! be the first.
//!
//! *Room* may have become free since a rank reported that it has none: its peer read
//! the earlier data and then began another operation. So a cycle with such a wait
//! counts only if every rank in it has checked once more without progress after all
//! were seen in it ([`Suspect`]). In shared memory it is certain then: no rank in it
//! reads what another waits to write. Over TCP the network may still accept bytes after
//! such a silence; a program that relies on this sends to a rank that does not receive.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::post::StallReport;
use crate::plan::Collective;

/// Reports of a rank after which at least one was made after the first was seen: one
/// report may be on its way to the store and one may wait for it. About three seconds:
/// a network may be silent for a moment, and a thread that has not used the group yet
/// may send.
const CHECKS: u64 = 12;

/// Ranks of a cycle that the message names.
const NAMED: usize = 5;

/// The beginning of the cause.
pub(super) const PREFIX: &str = "ranks wait for each other in a circle";

/// One rank of a cycle, and how it waits for the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) rank: usize,
    next: usize,
    what: What,
    stall: u64,
    check: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Receives(u64),
    Meets {
        name: &'static str,
        seq: u64,
        is_sure: bool,
    },
}

impl What {
    fn is_certain(self) -> bool {
        match self {
            What::Receives(_) => false,
            What::Meets { is_sure, .. } => is_sure,
        }
    }
}

/// Whether `post` is of a collective that ends on its rank only after rank
/// `other` has begun it.
fn depends((rank, post): (usize, &StallReport), other: usize) -> bool {
    let operation = &post.operation;
    let Some(collective) = operation.collective() else {
        return false;
    };
    // Some uneven lengths may be zero; then a rank may wait for no other.
    if collective != Collective::Barrier && (operation.count() == 0 || operation.has_lengths()) {
        return false;
    }
    let is_root = |rank: usize| operation.root() == rank as u64;
    match collective {
        Collective::SendRecv => false,
        Collective::Broadcast | Collective::Scatter => is_root(other),
        Collective::Gather | Collective::Reduce => is_root(rank),
        _ => true,
    }
}

/// How rank `x` waits for rank `y`, if it does.
fn waits((x, mine): (usize, &StallReport), (y, theirs): (usize, &StallReport)) -> Option<What> {
    let awaited = mine.awaited(y);
    if !mine.is_message() {
        let seq = mine.operation.seq();
        let is_due = theirs.begun <= seq
            && (theirs.is_blocked || !theirs.is_message())
            && (awaited.is_some() || depends((x, mine), y))
            // In a collective of the same number the ranks are in different ones, which
            // has a better message.
            && (theirs.is_message() || theirs.operation.seq() != seq);
        return is_due.then(|| What::Meets {
            name: mine
                .operation
                .collective()
                .map_or("a collective", Collective::name),
            seq,
            is_sure: !theirs.is_message()
                && (depends((x, mine), y) || awaited.is_none_or(|awaited| awaited.data)),
        });
    }
    let sent = theirs.sent(x)?;
    let takes = awaited?.takes.filter(|k| sent <= *k);
    takes.filter(|_| theirs.is_blocked).map(What::Receives)
}

/// A cycle of at most `most` ranks through rank `me`, beginning with the lowest rank.
/// `ask` returns the last post of a rank.
pub(super) fn find<E>(
    (me, mine): (usize, &StallReport),
    most: usize,
    mut ask: impl FnMut(usize) -> Result<Option<StallReport>, E>,
) -> Result<Option<Vec<Wait>>, E> {
    // The path so far; the last one's peers are tried one after another.
    let mut path: Vec<(usize, StallReport, usize)> = vec![(me, mine.clone(), 0)];
    let mut ways: Vec<What> = Vec::new();
    let mut seen = HashSet::from([me]);
    let mut asked: HashMap<usize, Option<StallReport>> = HashMap::new();
    while let Some((x, post, tried)) = path.last_mut() {
        // The way back to `me` is tried first: in a collective it may exist although
        // the plan does not wait for `me` directly.
        if *tried == 0
            && *x != me
            && let Some(what) = waits((*x, post), (me, mine))
        {
            ways.push(what);
            return Ok(Some(in_order(&path, &ways)));
        }
        let next = post.awaits.get(*tried).map(|awaited| awaited.peer);
        *tried += 1;
        let Some(y) = next else {
            path.pop();
            ways.pop();
            continue;
        };
        let x = *x;
        if path.len() >= most || seen.contains(&y) {
            continue;
        }
        let theirs = match asked.entry(y) {
            Entry::Occupied(said) => said.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(ask(y)?),
        };
        let Some(theirs) = theirs else { continue };
        let from = path.last().map(|(_, post, _)| post);
        if let Some(what) = from.and_then(|from| waits((x, from), (y, theirs))) {
            // Only now: another rank on the path may wait for it even if this one does not.
            seen.insert(y);
            ways.push(what);
            path.push((y, theirs.clone(), 0));
        }
    }
    Ok(None)
}

fn in_order(path: &[(usize, StallReport, usize)], ways: &[What]) -> Vec<Wait> {
    let nexts = path.iter().cycle().skip(1);
    let mut circle: Vec<Wait> = path
        .iter()
        .zip(nexts)
        .zip(ways)
        .map(|(((rank, post, _), (next, ..)), what)| Wait {
            rank: *rank,
            next: *next,
            what: *what,
            stall: post.stall,
            check: post.check,
        })
        .collect();
    let lowest = circle.iter().enumerate().min_by_key(|(_, wait)| wait.rank);
    let lowest = lowest.map_or(0, |(at, _)| at);
    circle.rotate_left(lowest);
    circle
}

/// A cycle that was seen and may still end.
#[derive(Default)]
pub(super) struct Suspect {
    first_seen: Vec<Wait>,
}

impl Suspect {
    /// Whether the `circle` seen now will never end.
    pub(super) fn is_for_ever(&mut self, circle: &[Wait]) -> bool {
        if circle.iter().all(|wait| wait.what.is_certain()) {
            return true;
        }
        let same = self.first_seen.len() == circle.len()
            && self.first_seen.iter().zip(circle).all(|(then, now)| {
                (then.rank, then.next, then.what, then.stall)
                    == (now.rank, now.next, now.what, now.stall)
            });
        if !same {
            self.first_seen = circle.to_vec();
            return false;
        }
        let mut both = self.first_seen.iter().zip(circle);
        both.all(|(then, now)| now.check.saturating_sub(then.check) >= CHECKS)
    }

    /// No cycle is seen any more.
    pub(super) fn forget(&mut self) {
        self.first_seen.clear();
    }
}

/// The message that names the cycle and the remedy.
pub(super) fn describe(circle: &[Wait]) -> String {
    let named: Vec<String> = circle
        .iter()
        .take(NAMED)
        .map(|wait| {
            let (rank, next) = (wait.rank, wait.next);
            match wait.what {
                What::Receives(seq) => {
                    format!("rank {rank} waits in recv from rank {next} (seq {seq})")
                }
                What::Meets { name, seq, .. } => {
                    format!("rank {rank} waits in {name} (seq {seq}) for rank {next}")
                }
            }
        })
        .collect();
    let more = match circle.len().saturating_sub(NAMED) {
        0 => String::new(),
        n => format!(", and {n} more"),
    };
    let is_recv = |wait: &Wait| matches!(wait.what, What::Receives(_));
    let advice = if circle.iter().all(is_recv) {
        "none sends; call send first on one of them, or use batch_send_recv"
    } else {
        "none can continue; change the order of one, or use batch_send_recv"
    };
    format!("{PREFIX}: {}{more}: {advice}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::counts::Counts;
    use super::super::post::Awaited;
    use super::*;
    use crate::operation::PeerOperation;

    const NOBODY: [usize; 0] = [];

    /// Rank numbers with their posts, as in the store.
    type Said = Vec<(usize, StallReport)>;

    fn post(
        collective: Collective,
        (root, seq, count): (u64, u64, u64),
        (begun, check): (u64, u64),
        awaits: &[Awaited],
        counts: &[(u64, u64)],
    ) -> StallReport {
        let first = u64::from(collective.wire()) | root << 32;
        let operation = PeerOperation([first, count, seq]);
        let awaits = awaits.iter().copied();
        let counts = Counts::of(begun, counts);
        StallReport::new(operation, &counts.begun(&|| true), (3, check), awaits)
    }

    /// A send waits for no rank.
    fn sends(to: usize, k: u64, counts: &[(u64, u64)]) -> StallReport {
        let awaited = Awaited {
            peer: to,
            data: false,
            takes: None,
        };
        post(Collective::SendRecv, (0, k, 9), (5, 1), &[awaited], counts)
    }

    fn receives(from: usize, k: u64, counts: &[(u64, u64)]) -> StallReport {
        let awaited = Awaited {
            peer: from,
            data: true,
            takes: Some(k),
        };
        post(Collective::SendRecv, (0, k, 9), (5, 1), &[awaited], counts)
    }

    /// In collective `seq`, waiting for `from`.
    fn inside(collective: Collective, seq: u64, from: usize, data: bool) -> StallReport {
        let awaited = Awaited {
            peer: from,
            data,
            takes: None,
        };
        post(collective, (0, seq, 9), (seq + 1, 1), &[awaited], &[])
    }

    fn seen_by(me: usize, said: &Said) -> Option<Vec<Wait>> {
        let of = |rank| {
            said.iter()
                .find(|(who, _)| *who == rank)
                .map(|(_, post)| post.clone())
        };
        let mine = of(me).unwrap();
        find::<()>((me, &mine), 32, |rank| Ok(of(rank))).unwrap()
    }

    fn ranks(circle: &Option<Vec<Wait>>) -> Vec<usize> {
        let waits = circle.iter().flatten();
        waits.map(|wait| wait.rank).collect()
    }

    /// Every rank of it finds the same cycle.
    fn text_of(said: &Said) -> String {
        let texts: Vec<String> = said
            .iter()
            .map(|(rank, _)| describe(&seen_by(*rank, said).unwrap()))
            .collect();
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        texts[0].clone()
    }

    #[test]
    fn facing_receives_are_a_circle_of_two() {
        // Rank 0 receives message 4 of rank 1, which receives message 7 of rank 0.
        let said = vec![
            (0, receives(1, 4, &[(0, 0), (7, 5)])),
            (1, receives(0, 7, &[(4, 8)])),
        ];
        let text = text_of(&said);
        assert_eq!(
            text,
            "ranks wait for each other in a circle: rank 0 waits in recv from rank 1 (seq 4), rank 1 \
             waits in recv from rank 0 (seq 7): none sends; call send first on one of them, or \
             use batch_send_recv"
        );
        // Facing sends are none.
        let said = vec![(0, sends(1, 4, &[])), (1, sends(0, 7, &[]))];
        assert_eq!(seen_by(0, &said), None);
    }

    /// A rank whose other thread may send is in no circle.
    #[test]
    fn a_rank_must_be_blocked_as_a_whole() {
        let of = |is_blocked| {
            let mut other = receives(0, 0, &[]);
            other.is_blocked = is_blocked;
            seen_by(0, &vec![(0, receives(1, 0, &[])), (1, other)])
        };
        assert_eq!(of(false), None);
        assert!(!Suspect::default().is_for_ever(&of(true).unwrap()));
    }

    #[test]
    fn what_is_on_its_way_is_no_circle() {
        let one = receives(0, 7, &[(4, 8)]);
        let sent = |zero: StallReport| ranks(&seen_by(0, &vec![(0, zero), (1, one.clone())]));
        assert_eq!(sent(receives(1, 4, &[(0, 0), (7, 5)])), [0, 1]);
        assert_eq!(
            sent(receives(1, 4, &[(0, 0), (8, 5)])),
            NOBODY,
            "begun to be sent"
        );
        assert_eq!(
            sent(receives(1, 3, &[(0, 0), (7, 4)])),
            NOBODY,
            "was sent before"
        );
    }

    #[test]
    fn circles_of_three_are_followed() {
        let next = |rank: usize| (rank + 1) % 3;
        let mut said: Said = (0..3)
            .map(|rank| (rank, receives(next(rank), 0, &[])))
            .collect();
        for me in 0..3 {
            assert_eq!(ranks(&seen_by(me, &said)), [0, 1, 2]);
        }
        // Rank 3 waits for them and is not part of the cycle.
        said.push((3, receives(0, 0, &[])));
        assert_eq!(seen_by(3, &said), None);
        // One has no post, so it may be computing.
        said.retain(|(rank, _)| *rank != 1);
        assert_eq!(seen_by(0, &said), None);
        assert_eq!(seen_by(2, &said), None);
    }

    #[test]
    fn a_batch_in_a_circle_is_found_by_whichever_of_its_messages() {
        let takes = |peer| Awaited {
            peer,
            data: true,
            takes: Some(0),
        };
        let awaits = [takes(1), takes(2)];
        let batch = |counts: &[(u64, u64)]| {
            let of = (0, 0, 9);
            post(Collective::SendRecv, of, (5, 1), &awaits, counts)
        };
        let other = (2, receives(0, 0, &[]));
        let found = |zero: StallReport| ranks(&seen_by(0, &vec![(0, zero), other.clone()]));
        assert_eq!(found(batch(&[(0, 0), (0, 1), (0, 1)])), [0, 2]);
        // It sends to rank 2 as well.
        assert_eq!(found(batch(&[(0, 0), (0, 1), (1, 1)])), NOBODY);
    }

    /// Rank 2 is reached on a path that does not wait for it before the one that does.
    #[test]
    fn a_rank_is_left_out_only_where_nobody_waits_for_it() {
        let takes = |peer| Awaited {
            peer,
            data: true,
            takes: Some(0),
        };
        let awaits = [takes(2), takes(1)];
        // Rank 2 has begun to send message 0; rank 1 has not begun its own.
        let batch = post(Collective::SendRecv, (0, 0, 9), (5, 1), &awaits, &[]);
        let said = vec![
            (0, batch),
            (1, receives(2, 0, &[])),
            (2, receives(0, 0, &[(1, 0), (0, 0)])),
        ];
        assert_eq!(ranks(&seen_by(0, &said)), [0, 1, 2]);
    }

    /// Rank 0 is in collective 5, rank 1 in message 2 between them.
    #[test]
    fn a_collective_against_a_message() {
        let outside = |shape: fn(usize, u64, &[(u64, u64)]) -> StallReport| shape(0, 2, &[]);
        let met = |zero: &StallReport, one: &StallReport| {
            let said = vec![(0, zero.clone()), (1, one.clone())];
            let there = ranks(&seen_by(0, &said));
            assert_eq!(there, ranks(&seen_by(1, &said)));
            there == [0, 1]
        };
        let barrier = inside(Collective::Barrier, 5, 1, true);
        assert!(met(&barrier, &outside(receives)));
        assert!(!met(&barrier, &outside(sends)));
        // Rank 1 was in the collective before; its part is on its way.
        assert!(!met(
            &inside(Collective::Barrier, 4, 1, true),
            &outside(receives)
        ));
        // Rank 0 has sent that message, or taken it, before.
        let counts = Counts::of(6, &[(0, 0), (3, 3)]);
        let begun = counts.begun(&|| true);
        let sent = StallReport::new(
            barrier.operation,
            &begun,
            (3, 1),
            barrier.awaits.into_iter(),
        );
        assert!(!met(&sent, &outside(receives)));
    }

    /// By its plan a leaf waits for a rank other than the root, which has not begun.
    #[test]
    fn a_collective_leads_back_to_whom_it_needs() {
        let leaf = inside(Collective::Broadcast, 5, 1, true);
        let between = inside(Collective::Broadcast, 5, 0, true);
        let said = vec![(0, receives(2, 0, &[])), (1, between), (2, leaf)];
        let circle = seen_by(0, &said).unwrap();
        assert_eq!(circle.len(), 2);
        let text = describe(&circle);
        assert!(
            text.contains("rank 2 waits in broadcast (seq 5) for rank 0"),
            "{text}"
        );
        // A leaf does not need another leaf.
        let said = vec![
            (1, receives(2, 0, &[])),
            (2, inside(Collective::Broadcast, 5, 3, true)),
        ];
        assert_eq!(seen_by(1, &said), None);
        // With zero elements nothing is certain.
        let mut none = inside(Collective::AllReduce, 5, 1, true);
        none.operation.0[1] = 0;
        let said = vec![(0, receives(2, 0, &[])), (2, none)];
        assert_eq!(seen_by(0, &said), None);
    }

    #[test]
    fn what_is_not_sure_counts_only_after_all_have_looked_again() {
        let circle = |checks: [u64; 2], stall| {
            let other = receives(0, 0, &[]);
            let mut circle = seen_by(0, &vec![(0, receives(1, 0, &[])), (1, other)]).unwrap();
            for (wait, check) in circle.iter_mut().zip(checks) {
                (wait.check, wait.stall) = (check, stall);
            }
            circle
        };
        let mut suspect = Suspect::default();
        assert!(!suspect.is_for_ever(&circle([1, 1], 3)));
        assert!(!suspect.is_for_ever(&circle([90, 1], 3)), "one is stopped");
        assert!(!suspect.is_for_ever(&circle([90, CHECKS], 3)));
        assert!(suspect.is_for_ever(&circle([90, 1 + CHECKS], 3)));
        // Something moved in between.
        assert!(!suspect.is_for_ever(&circle([90, 90], 4)));
        assert!(!suspect.is_for_ever(&circle([91, 91], 4)));
        suspect.forget();
        assert!(!suspect.is_for_ever(&circle([200, 200], 4)));
        assert!(suspect.is_for_ever(&circle([200 + CHECKS, 200 + CHECKS], 4)));
    }

    #[test]
    fn the_text_fits_into_a_poison_however_long_the_circle_is() {
        let n = 40;
        let said: Said = (0..n)
            .map(|rank| {
                (
                    rank + 10_000,
                    receives((rank + 1) % n + 10_000, 1 << 20, &[]),
                )
            })
            .collect();
        let of = |rank: usize| {
            said.iter()
                .find(|(who, _)| *who == rank)
                .map(|(_, post)| post.clone())
        };
        let mine = of(10_000).unwrap();
        let circle = find::<()>((10_000, &mine), 64, |rank| Ok(of(rank)))
            .unwrap()
            .unwrap();
        let text = describe(&circle);
        assert!(text.contains(", and 35 more"), "{text}");
        let poison = crate::transport::Poison::new(0, text.clone());
        assert_eq!(poison.cause, text, "{} bytes", text.len());
        // A cycle longer than the limit.
        let short = find::<()>((10_000, &mine), 32, |rank| Ok(of(rank))).unwrap();
        assert_eq!(short, None);
    }
}
