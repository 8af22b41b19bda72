//! Latency and bandwidth between two ranks, and the difference of their clocks.

use std::time::{Duration, Instant};

use phalanx_comm::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// The most other ranks that a rank measures with.
const MOST_ROUNDS: usize = 32;
/// Exchanges before the time of one is known.
const FIRST: usize = 5;
/// Time for the small exchanges of a pair, and for the large messages.
const SMALL: Duration = Duration::from_millis(40);
const LARGE: Duration = Duration::from_millis(120);
const MESSAGE_BYTES: usize = 1 << 20;
/// Exchanges of the time of day; the shortest counts.
const CLOCK_ROUNDS: usize = 10;

/// What was measured between two ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pair {
    pub from: usize,
    pub to: usize,
    pub transport: String,
    /// Half of the median time of a small message there and back.
    pub latency_us: f64,
    /// Of large messages one way.
    pub gb_per_s: f64,
}

/// Rounds of disjoint pairs in which each of `members` meets each other one, or [`MOST_ROUNDS`] of them.
pub fn rounds(members: &[usize]) -> Vec<Vec<(usize, usize)>> {
    let mut seats: Vec<Option<usize>> = members.iter().copied().map(Some).collect();
    if seats.len() % 2 == 1 {
        seats.push(None);
    }
    let n = seats.len();
    let mut rounds = Vec::new();
    for _ in 0..n.saturating_sub(1).min(MOST_ROUNDS) {
        let pairs = (0..n / 2).filter_map(|i| {
            let (a, b) = (seats[i]?, seats[n - 1 - i]?);
            Some((a.min(b), a.max(b)))
        });
        rounds.push(pairs.collect());
        // All but the first move on by one.
        seats[1..].rotate_right(1);
    }
    rounds
}

/// Measures as one end of `pair`; the lower rank gets the result.
pub fn measure(group: &ProcessGroup, pair: (usize, usize)) -> Result<Option<Pair>> {
    let (from, to) = pair;
    let is_first = group.rank() == from;
    let other = if is_first { to } else { from };
    let mut times = Vec::new();
    exchanges(group, is_first, other, FIRST, &mut times)?;
    times.clear();
    exchanges(group, is_first, other, FIRST, &mut times)?;
    let count = agree(
        group,
        is_first,
        other,
        fitting(SMALL, median(&mut times), 5, 500),
    )?;
    exchanges(group, is_first, other, count, &mut times)?;
    let latency = median(&mut times) / 2;

    let mut message = vec![0_u8; MESSAGE_BYTES];
    // The first opens windows and touches memory.
    stream(group, is_first, other, &mut message, 1)?;
    let one = stream(group, is_first, other, &mut message, 1)?;
    let count = agree(group, is_first, other, fitting(LARGE, one, 1, 64))?;
    let time = stream(group, is_first, other, &mut message, count)?;
    if !is_first {
        return Ok(None);
    }
    let links = group.transports();
    let link = links.iter().find(|(peer, _)| *peer == to);
    Ok(Some(Pair {
        from,
        to,
        transport: link.map_or("none", |(_, kind)| kind.name()).to_owned(),
        latency_us: latency.as_secs_f64() * 1e6,
        gb_per_s: (count * MESSAGE_BYTES) as f64 / time.as_secs_f64().max(1e-9) / 1e9,
    }))
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// How often `each` fits into `time`.
fn fitting(time: Duration, each: Duration, least: usize, most: usize) -> usize {
    let times = time.as_nanos() / each.as_nanos().max(1);
    usize::try_from(times).unwrap_or(most).clamp(least, most)
}

/// The first end's number, at both ends.
fn agree(group: &ProcessGroup, is_first: bool, other: usize, mine: usize) -> Result<usize> {
    let mut number = [mine as i64];
    match is_first {
        true => group.send(&number, other)?,
        false => drop(group.recv(&mut number, other)?),
    }
    Ok(usize::try_from(number[0]).unwrap_or(1).clamp(1, 1 << 16))
}

fn exchanges(
    group: &ProcessGroup,
    is_first: bool,
    other: usize,
    count: usize,
    times: &mut Vec<Duration>,
) -> Result<()> {
    let mut word = [0_i64];
    for _ in 0..count {
        let began = Instant::now();
        if is_first {
            group.send(&word, other)?;
            group.recv(&mut word, other)?;
            times.push(began.elapsed());
        } else {
            group.recv(&mut word, other)?;
            group.send(&word, other)?;
        }
    }
    Ok(())
}

/// The time of `count` large messages from the first end, until the other end has all.
fn stream(
    group: &ProcessGroup,
    is_first: bool,
    other: usize,
    message: &mut [u8],
    count: usize,
) -> Result<Duration> {
    let began = Instant::now();
    for _ in 0..count {
        match is_first {
            true => group.send(message, other)?,
            false => drop(group.recv(message, other)?),
        }
    }
    let mut word = [0_i64];
    match is_first {
        true => drop(group.recv(&mut word, other)?),
        false => group.send(&word, other)?,
    }
    Ok(began.elapsed())
}

/// By how many seconds the clock of `other` is ahead of that of rank 0, and the largest error of that. Called by both.
pub fn clock_of(group: &ProcessGroup, other: usize) -> Result<Option<(f64, f64)>> {
    let now = || i64::try_from(phalanx_base::unix_time().as_nanos()).unwrap_or(0);
    let mut best: Option<(i64, i64)> = None;
    for _ in 0..CLOCK_ROUNDS {
        let mut theirs = [0_i64];
        if group.rank() == other {
            group.recv(&mut theirs, 0)?;
            group.send(&[now()], 0)?;
            continue;
        }
        let sent = now();
        group.send(&[sent], other)?;
        group.recv(&mut theirs, other)?;
        let took = (now() - sent).max(0);
        let ahead = theirs[0].saturating_sub(sent + took / 2);
        if best.is_none_or(|(least, _)| took < least) {
            best = Some((took, ahead));
        }
    }
    Ok(best.map(|(took, ahead)| (ahead as f64 / 1e9, took as f64 / 2e9)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use phalanx_comm::GroupOptions;

    use super::*;

    #[test]
    fn each_meets_each_once_and_nobody_two_at_a_time() {
        for n in 0..=32 {
            let members: Vec<usize> = (0..n).map(|i| 10 * i).collect();
            let mut met = BTreeSet::new();
            for round in rounds(&members) {
                let busy: BTreeSet<usize> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                assert_eq!(busy.len(), 2 * round.len(), "{n}: {round:?}");
                for pair in round {
                    assert!(pair.0 < pair.1 && met.insert(pair), "{n}: {pair:?}");
                }
            }
            assert_eq!(met.len(), n * n.saturating_sub(1) / 2, "{n}");
        }
        let many: Vec<usize> = (0..1000).collect();
        assert_eq!(rounds(&many).len(), MOST_ROUNDS);
    }

    /// Threads have one clock and pass memory on.
    #[test]
    fn two_threads_measure_each_other() {
        let groups = ProcessGroup::threads(2, GroupOptions::default());
        let results: Vec<_> = std::thread::scope(|scope| {
            let run = |group: &ProcessGroup| {
                let pair = measure(group, (0, 1)).unwrap();
                (pair, clock_of(group, 1).unwrap())
            };
            let handles: Vec<_> = groups
                .iter()
                .map(|group| scope.spawn(move || run(group)))
                .collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        let (Some(pair), Some((ahead, error))) = results[0].clone() else {
            panic!("{results:?}")
        };
        assert!(results[1].0.is_none() && results[1].1.is_none());
        assert_eq!((pair.from, pair.to, &*pair.transport), (0, 1, "thread"));
        assert!(pair.latency_us > 0.0 && pair.gb_per_s > 0.0, "{pair:?}");
        assert!(ahead.abs() <= error + 1e-3, "{ahead} {error}");
    }
}
