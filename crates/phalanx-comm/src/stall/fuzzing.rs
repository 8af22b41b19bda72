//! Fuzzes the posts of stalled ranks, which every waiting rank reads.

use super::circle;
use super::counts::Counts;
use super::post::{AWAITED_MAX, Awaited, StallReport};
use crate::operation::PeerOperation;
use crate::plan::Collective;

/// Posts of ranks 0, 1, ..., each after its length in two bytes: an accepted post
/// encodes to an equal one, and a reported cycle is one.
pub(crate) fn posts(mut data: &[u8]) {
    const RANKS: usize = 12;
    let mut table: Vec<Option<StallReport>> = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk()
        && table.len() < RANKS
    {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (bytes, rest) = rest.split_at(length);
        let post = StallReport::decode(bytes);
        if let Some(post) = &post {
            assert!(post.awaits.len() <= AWAITED_MAX);
            let again = serde_json::to_vec(post).ok();
            let again = again.and_then(|bytes| StallReport::decode(&bytes));
            // It may be longer than it came: a list without names is accepted too.
            assert!(again.is_none_or(|again| again == *post));
        }
        table.push(post);
        data = rest;
    }
    for (me, mine) in table.iter().enumerate() {
        let Some(mine) = mine else { continue };
        let ask = |rank: usize| Ok::<_, ()>(table.get(rank).cloned().flatten());
        let Ok(Some(found)) = circle::find((me, mine), RANKS, ask) else {
            continue;
        };
        let mut ranks: Vec<usize> = found.iter().map(|wait| wait.rank).collect();
        assert!(ranks.contains(&me) && ranks.iter().all(|rank| ranks[0] <= *rank));
        assert!(!circle::describe(&found).contains(char::is_control));
        let many = ranks.len();
        ranks.sort_unstable();
        ranks.dedup();
        assert_eq!(ranks.len(), many, "a rank twice");
    }
}

/// Cycles of receives, of sends, through a collective; no rank waiting.
pub(crate) fn posts_seeds() -> Vec<Vec<u8>> {
    let post = |collective: Collective, peer: usize, takes: bool| {
        let operation = PeerOperation([u64::from(collective.wire()), 9, 3]);
        let awaited = Awaited {
            peer,
            data: takes || collective != Collective::SendRecv,
            takes: takes.then_some(2),
        };
        let counts = Counts::of(3, &[(1, 1), (0, 0), (2, 2)]);
        let begun = counts.begun(&|| true);
        StallReport::new(operation, &begun, (1, 1), [awaited].into_iter())
    };
    let all = |posts: &[StallReport]| {
        let encoded = posts
            .iter()
            .filter_map(|post| serde_json::to_vec(post).ok());
        let framed =
            encoded.map(|bytes| [&(bytes.len() as u16).to_le_bytes(), &bytes[..]].concat());
        framed.collect::<Vec<_>>().concat()
    };
    let message = Collective::SendRecv;
    vec![
        all(&[post(message, 1, true), post(message, 0, true)]),
        all(&[
            post(message, 1, false),
            post(message, 2, false),
            post(message, 0, false),
        ]),
        all(&[post(Collective::Barrier, 1, false), post(message, 0, true)]),
        all(&[post(Collective::AllReduce, 2, false)]),
    ]
}
