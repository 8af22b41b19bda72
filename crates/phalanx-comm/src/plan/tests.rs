mod check;
pub(super) mod sent;

use self::check::{check, check_on};
use super::*;

fn spec(method: Method, world: usize, count: usize, root: usize) -> Spec {
    Spec {
        method,
        world,
        count,
        elem_bytes: 4,
        root,
        short_segments: false,
    }
}

/// All distinct specs of one method, world and count that a checker should see.
fn variants(method: Method, world: usize, count: usize) -> Vec<Spec> {
    let collective = method.collective();
    let mut roots = vec![0];
    if collective.has_root() {
        roots.extend([world / 2, world - 1]);
        roots.sort_unstable();
        roots.dedup();
    }
    roots
        .into_iter()
        .map(|root| spec(method, world, count, root))
        .collect()
}

#[test]
fn every_plan_up_to_64_ranks_keeps_its_promise() {
    for method in Method::all() {
        for world in 1..=64usize {
            let mut counts = vec![0, 1, world - 1, world, world + 1, 1000, 10007];
            counts.dedup();
            if method == Method::Barrier {
                counts.truncate(1);
            } else if world > 20 {
                // Two counts, one with fewer elements than ranks and one with more: all of them take minutes.
                counts = vec![[1, world - 1][world % 2], [world + 1, 10007][world / 2 % 2]];
            }
            for count in counts {
                for spec in variants(method, world, count) {
                    if let Err(e) = check(&spec) {
                        panic!("{spec:?}: {e}");
                    }
                }
            }
        }
    }
}

#[test]
fn plans_hold_for_every_element_size() {
    for method in Method::all() {
        for world in [1, 2, 3, 5, 8] {
            for elem_bytes in [1, 2, 4, 8] {
                for count in [1, 7, 63, 64, 65, 511, 1000] {
                    for spec in variants(method, world, count) {
                        let spec = Spec { elem_bytes, ..spec };
                        if let Err(e) = check(&spec) {
                            panic!("{spec:?}: {e}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn long_chunks_are_reduced_a_segment_at_a_time() {
    for (short_segments, segment_bytes) in [(false, 256 << 10), (true, 64 << 10)] {
        for world in [2, 3, 5] {
            for elem_bytes in [1, 2, 4, 8] {
                // Eight whole segments a rank, and one that only the first ranks have.
                let segment = segment_bytes / elem_bytes;
                let spec = Spec {
                    elem_bytes,
                    short_segments,
                    ..spec(Method::AllReduceDirect, world, 8 * world * segment + 1, 0)
                };
                assert_eq!(check(&spec), Ok(()), "{spec:?}");
                for rank in 0..world {
                    let plan = build(&spec, rank);
                    assert_eq!(plan.rounds.len(), 18);
                    assert_eq!(plan.scratch_elems, 3 * (world - 1) * segment);
                }
            }
        }
    }
}

/// [`check::check_plans`] of ranks on one host.
fn check_plans(spec: &Spec, plans: &[RankPlan]) -> Result<(), PlanError> {
    check::check_plans(spec, &Hosts::one(spec.world), plans)
}

const HIERARCHICAL: [Method; 6] = [
    Method::AllReduceRails,
    Method::AllReduceChain,
    Method::BroadcastHosts,
    Method::AllGatherHosts,
    Method::ReduceHosts,
    Method::ReduceScatterHosts,
];

#[test]
fn hierarchical_plans_keep_their_promise_on_any_grid() {
    let grids: [&[usize]; 16] = [
        &[1, 1],
        &[1, 1, 1, 1, 1],
        &[2, 2],
        &[2, 4],
        &[4, 2],
        &[3, 3],
        &[2, 2, 2],
        &[4, 4, 4, 4],
        &[8, 8],
        &[2, 1, 3],
        &[1, 3],
        &[3, 1, 1, 2],
        &[5, 4, 3, 2, 1],
        &[1, 7, 1],
        &[16, 16, 16, 16],
        &[4; 16],
    ];
    for sizes in grids {
        let hosts = Hosts::of_sizes(sizes);
        let world = hosts.world();
        for method in HIERARCHICAL {
            for count in [0, 1, world - 1, world, world + 1, 1000, 10007] {
                for elem_bytes in [1, 4, 8] {
                    for spec in variants(method, world, count) {
                        let spec = Spec { elem_bytes, ..spec };
                        if let Err(e) = check_on(&spec, &hosts) {
                            panic!("{spec:?} on {sizes:?}: {e}");
                        }
                    }
                }
            }
            if world <= 16 {
                for spec in variants(method, world, (1 << 20) + 17) {
                    assert_eq!(check_on(&spec, &hosts), Ok(()), "{spec:?} on {sizes:?}");
                }
            }
        }
    }
}

#[test]
fn a_changed_hierarchical_plan_is_noticed() {
    for sizes in [&[2usize, 2][..], &[2, 1, 3]] {
        let hosts = Hosts::of_sizes(sizes);
        for method in HIERARCHICAL {
            let spec = spec(method, hosts.world(), 1000, 0);
            let plans: Vec<RankPlan> = (0..spec.world)
                .map(|rank| build_on(&spec, &hosts, rank))
                .collect();
            let mut tried = 0;
            for rank in 0..spec.world {
                for index in 0..plans[rank].rounds.len() {
                    for change in 0..3 {
                        let mut changed = plans.clone();
                        let round = &mut changed[rank].rounds[index];
                        let fold = round.local.iter_mut().find_map(|step| match step {
                            Local::Fold {
                                sources, finish, ..
                            } => Some((sources, finish)),
                            Local::Copy { .. } => None,
                        });
                        match (change, fold) {
                            (0, Some((sources, _))) => sources.swap(0, 1),
                            (1, Some((_, finish))) => *finish = !*finish,
                            (2, _) if !round.sends.is_empty() => drop(round.sends.remove(0)),
                            _ => continue,
                        }
                        tried += 1;
                        assert!(
                            check::check_plans(&spec, &hosts, &changed).is_err(),
                            "change {change} of rank {rank}, round {index}, {spec:?}"
                        );
                    }
                }
            }
            let least = match method.collective() {
                Collective::AllReduce => 20,
                Collective::Reduce | Collective::ReduceScatter => 15,
                _ => 5,
            };
            assert!(tried >= least, "{tried}");
        }
    }
}

/// Calls `change` with a copy of the plans for every place in them; the checker must
/// refuse each changed copy.
fn refuses(
    spec: &Spec,
    what: &str,
    mut change: impl FnMut(&mut [RankPlan], usize) -> bool,
) -> usize {
    let plans: Vec<RankPlan> = (0..spec.world).map(|r| build(spec, r)).collect();
    assert_eq!(check_plans(spec, &plans), Ok(()));
    let mut tried = 0;
    for place in 0.. {
        let mut changed = plans.clone();
        if !change(&mut changed, place) {
            break;
        }
        if changed == plans {
            continue;
        }
        assert!(
            check_plans(spec, &changed).is_err(),
            "{what} at place {place} of {spec:?} went unnoticed"
        );
        tried += 1;
    }
    tried
}

/// All rounds of all ranks.
fn rounds(plans: &mut [RankPlan]) -> impl Iterator<Item = &mut Round> {
    plans.iter_mut().flat_map(|p| p.rounds.iter_mut())
}

/// Applies `change` to the `place`th item of a kind; false when there are
/// fewer.
fn nth<'a, T: 'a>(
    mut items: impl Iterator<Item = &'a mut T>,
    place: usize,
    change: impl FnOnce(&mut T),
) -> bool {
    match items.nth(place) {
        Some(item) => {
            change(item);
            true
        }
        None => false,
    }
}

fn faulty_specs() -> Vec<Spec> {
    let mut all = Vec::new();
    for method in Method::all() {
        for world in [2, 4, 5] {
            all.extend(variants(method, world, 1000));
        }
    }
    all
}

#[test]
fn a_dropped_transfer_is_noticed() {
    let mut tried = 0;
    for spec in faulty_specs() {
        for sends in [true, false] {
            tried += refuses(&spec, "a dropped transfer", |plans, place| {
                let mut left = place;
                for round in rounds(plans) {
                    let list = if sends {
                        &mut round.sends
                    } else {
                        &mut round.recvs
                    };
                    if left < list.len() {
                        list.remove(left);
                        return true;
                    }
                    left -= list.len();
                }
                false
            });
        }
    }
    assert!(tried > 500, "{tried}");
}

#[test]
fn a_dropped_pair_of_transfers_is_noticed() {
    let mut tried = 0;
    for spec in faulty_specs() {
        tried += refuses(&spec, "a dropped pair", |plans, place| {
            let mut left = place;
            for rank in 0..plans.len() {
                for index in 0..plans[rank].rounds.len() {
                    let sends = &mut plans[rank].rounds[index].sends;
                    if left < sends.len() {
                        let peer = sends.remove(left).peer;
                        plans[peer].rounds[index].recvs.retain(|t| t.peer != rank);
                        return true;
                    }
                    left -= sends.len();
                }
            }
            false
        });
    }
    assert!(tried > 250, "{tried}");
}

#[test]
fn a_shifted_or_resized_range_is_noticed() {
    let mut tried = 0;
    for spec in faulty_specs() {
        for change in [
            (|p: &mut Part| p.start += 1) as fn(&mut Part),
            |p| p.start = p.start.wrapping_sub(1),
            |p| p.len += 1,
            |p| p.len = p.len.saturating_sub(1),
        ] {
            // An empty message may come from anywhere.
            if spec.method == Method::Barrier {
                continue;
            }
            for sends in [true, false] {
                tried += refuses(&spec, "a changed range", |plans, place| {
                    let transfers = rounds(plans).flat_map(|r| {
                        if sends {
                            r.sends.iter_mut()
                        } else {
                            r.recvs.iter_mut()
                        }
                    });
                    nth(transfers, place, |t| change(&mut t.part))
                });
            }
            tried += refuses(&spec, "a changed destination", |plans, place| {
                let steps = rounds(plans).flat_map(|r| r.local.iter_mut());
                nth(steps, place, |step| match step {
                    Local::Fold { into, .. } | Local::Copy { into, .. } => change(into),
                })
            });
        }
    }
    assert!(tried > 2000, "{tried}");
}

#[test]
fn a_changed_peer_is_noticed() {
    let mut tried = 0;
    for spec in faulty_specs() {
        for sends in [true, false] {
            tried += refuses(&spec, "a changed peer", |plans, place| {
                let transfers = rounds(plans).flat_map(|r| {
                    if sends {
                        r.sends.iter_mut()
                    } else {
                        r.recvs.iter_mut()
                    }
                });
                nth(transfers, place, |t| t.peer += 1)
            });
        }
    }
    assert!(tried > 500, "{tried}");
}

#[test]
fn a_changed_fold_is_noticed() {
    let mut tried = 0;
    for spec in faulty_specs() {
        for kind in 0..4 {
            tried += refuses(&spec, "a changed fold", |plans, place| {
                let folds = rounds(plans)
                    .flat_map(|r| r.local.iter_mut())
                    .filter(|step| matches!(step, Local::Fold { .. }));
                nth(folds, place, |step| {
                    let Local::Fold {
                        sources, finish, ..
                    } = step
                    else {
                        return;
                    };
                    match kind {
                        0 => {
                            let last = sources.len() - 1;
                            sources.swap(last - 1, last);
                        }
                        1 => drop(sources.pop()),
                        2 => sources.push(sources[0]),
                        _ => *finish = !*finish,
                    }
                })
            });
        }
        tried += refuses(&spec, "a dropped local step", |plans, place| {
            let mut left = place;
            for round in rounds(plans) {
                if left < round.local.len() {
                    round.local.remove(left);
                    return true;
                }
                left -= round.local.len();
            }
            false
        });
    }
    assert!(tried > 200, "{tried}");
}

#[test]
fn a_write_over_memory_in_flight_is_noticed() {
    // Rank 0 receives chunk 1 to where it still sends chunk 2 from.
    let spec = spec(Method::AllReduceDirect, 3, 1000, 0);
    let mut plans: Vec<RankPlan> = (0..3).map(|r| build(&spec, r)).collect();
    let sent = plans[0].rounds[0].sends[0].part;
    plans[0].rounds[0].recvs[0].part.buf = sent.buf;
    plans[0].rounds[0].recvs[0].part.start = sent.start;
    assert!(check_plans(&spec, &plans).is_err());
    // Two receives into the same place.
    let mut plans: Vec<RankPlan> = (0..3).map(|r| build(&spec, r)).collect();
    plans[0].rounds[1].recvs[1].part = plans[0].rounds[1].recvs[0].part;
    assert!(plans[0].check_local().is_err());
}

#[test]
fn ring_ranks_talk_to_their_neighbours_only() {
    for world in 2..=9 {
        let spec = spec(Method::AllReduceRing, world, 1000, 0);
        for rank in 0..world {
            let plan = build(&spec, rank);
            assert_eq!(plan.rounds.len(), 2 * (world - 1));
            for round in &plan.rounds {
                assert!(round.sends.iter().all(|t| t.peer == (rank + 1) % world));
                assert!(
                    round
                        .recvs
                        .iter()
                        .all(|t| t.peer == (rank + world - 1) % world)
                );
            }
        }
    }
}

#[test]
fn wire_codes_are_distinct() {
    for c in Collective::ALL {
        assert_eq!(Collective::from_wire(c.wire()), Some(c));
    }
    for m in Method::all() {
        assert_eq!(Method::from_wire(m.wire()), Some(m));
    }
    assert_eq!(Collective::from_wire(0), None);
    assert_eq!(Method::from_wire(0), None);
}
