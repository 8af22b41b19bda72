//! A new group of the ranks that are left and of newcomers: generations, majorities, stragglers, lost ranks, ranks as threads
//! and as processes that are killed.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use phalanx_comm::{Error, ErrorKind, Formation, InitOptions, ProcessGroup, ReduceOp};
use phalanx_member::{Event, Log, Newcomer, RequestedChange, ShrinkOptions, grow, shrink};
use phalanx_store::{MemStore, Store, TcpServer};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{Request, Response};

use crate::common::{
    EVERYWHERE, Over, PATIENCE, SOON, all_ready, at_once, everywhere, groups, init_options,
    on_each, sum_of_members, two_with_store,
};

/// Long enough that a rank which does come is never left out, also on a busy
/// machine.
const STRAGGLER_WAIT: Duration = Duration::from_millis(1200);

fn hasty() -> ShrinkOptions {
    ShrinkOptions {
        straggler_wait: STRAGGLER_WAIT,
        timeout: PATIENCE,
        ..ShrinkOptions::default()
    }
}

#[test]
fn survivors_go_on_whoever_was_lost() {
    everywhere(|over| {
        {
            let world = 4;
            // The first, one between, the last.
            for victim in [0, world / 2, world - 1] {
                let gate = Barrier::new(world);
                on_each(groups(over, world), |group| {
                    all_ready(&group, &gate);
                    let rank = group.rank();
                    if rank == victim {
                        return; // its links end
                    }
                    let error = group.barrier().unwrap_err();
                    assert!(
                        matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Aborted),
                        "{error}"
                    );
                    let other_handle = group.clone();
                    let group = shrink(group, &hasty()).unwrap();
                    assert_eq!(group.generation(), 1);
                    assert_eq!(group.world_size(), world - 1);
                    assert_eq!(group.rank(), rank - usize::from(rank > victim));
                    assert_eq!(group.global_rank(), rank);
                    let all: usize = (0..world).sum();
                    for _ in 0..3 {
                        assert_eq!(sum_of_members(&group), (all - victim) as i64);
                    }
                    // The old group stays as it ended.
                    let error = other_handle.barrier().unwrap_err();
                    assert!(error.kind() != ErrorKind::Timeout, "{error}");
                    drop(other_handle);
                    // Subgroups of the new one work.
                    let sub = group.new_group(&[0, 1]).unwrap();
                    assert_eq!(sub.is_some(), group.rank() < 2);
                    if let Some(sub) = sub {
                        sub.barrier().unwrap();
                    }
                    group.shutdown().unwrap();
                });
            }
        }
    });
}

#[test]
fn twice_in_a_row_down_to_one() {
    everywhere(|over| {
        let gates = [4, 3, 2].map(Barrier::new);
        on_each(groups(over, 4), |group| {
            let global_rank = group.rank();
            let mut group = group;
            // Rank 0 goes, then rank 3, then rank 2: of 4, of 3, of 2.
            for (generation, victim) in [(1, 0), (2, 3), (3, 2)] {
                all_ready(&group, &gates[generation as usize - 1]);
                if global_rank == victim {
                    return;
                }
                group.barrier().unwrap_err();
                let options = ShrinkOptions {
                    min_world: Some(1),
                    ..hasty()
                };
                // With a minimum of one, a fast rank must wait for the others.
                group = shrink(group, &options).unwrap();
                assert_eq!(group.generation(), generation);
                assert_eq!(group.world_size(), 4 - generation as usize);
            }
            assert_eq!((group.rank(), group.global_rank()), (0, 1));
            assert_eq!(sum_of_members(&group), 1);
            // No other rank remains: the group still forms.
            group.abort("enough");
            let group = shrink(group, &hasty()).unwrap();
            assert_eq!((group.generation(), group.world_size()), (4, 1));
        });
    });
}

#[test]
fn all_may_go_on_after_an_abort() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        on_each(groups(over, 3), |group| {
            all_ready(&group, &gate);
            let rank = group.rank();
            if rank == 1 {
                group.abort("changed my mind");
            }
            let started = Instant::now();
            let group = shrink(
                group,
                &ShrinkOptions {
                    straggler_wait: PATIENCE,
                    timeout: PATIENCE,
                    ..ShrinkOptions::default()
                },
            );
            let group = group.unwrap();
            assert_eq!((group.rank(), group.world_size()), (rank, 3));
            assert!(started.elapsed() < SOON, "no rank was waited for");
            assert_eq!(sum_of_members(&group), 3);
            group.shutdown().unwrap();
        });
    }
}

/// No rank waits for one that is reported lost, and no majority is needed where all that do not come are.
#[test]
fn ranks_that_are_reported_lost_are_not_waited_for() {
    everywhere(|over| {
        let gate = Barrier::new(4);
        on_each(groups(over, 4), |group| {
            all_ready(&group, &gate);
            if group.rank() != 3 {
                if group.rank() == 0 {
                    for rank in 0..3 {
                        lose(&group.store(), rank);
                    }
                }
                // In its place a rank that is still there, and hears nothing.
                gate.wait();
                return;
            }
            let options = ShrinkOptions {
                straggler_wait: Duration::MAX,
                timeout: PATIENCE,
                ..ShrinkOptions::default()
            };
            let group = shrink(group, &options).unwrap();
            gate.wait();
            assert_eq!(
                (group.rank(), group.world_size(), group.global_rank()),
                (0, 1, 3)
            );
            assert_eq!(sum_of_members(&group), 3);
        });
    });
}

#[test]
fn ranks_that_form_anew_hear_that_the_job_ends() {
    everywhere(|over| {
        let gate = Barrier::new(2);
        on_each(groups(over, 2), |group| {
            all_ready(&group, &gate);
            if group.rank() == 1 {
                Log::new(group.store()).end("it is not needed").unwrap();
                gate.wait();
                return;
            }
            let error = shrink(group, &ShrinkOptions::default()).unwrap_err();
            gate.wait();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(
                error.to_string().contains("the job ends: it is not needed"),
                "{error}"
            );
        });
    });
}

fn lose(store: &Arc<dyn Store>, number: usize) {
    Log::new(Arc::clone(store))
        .lose(number, "it is a test")
        .unwrap();
}

fn tell(store: &Arc<dyn Store>, event: Event) {
    let mut log = Log::new(Arc::clone(store));
    log.append(|_| Some(event.clone())).unwrap();
}

/// What is asked of the ranks of `group`.
fn requested(group: &ProcessGroup) -> RequestedChange {
    let mut log = Log::new(group.store());
    log.read().unwrap().requested(group.global_ranks())
}

fn wait_for(group: &ProcessGroup, joining: &[usize]) {
    while requested(group).joining != joining {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The options of `hasty`, with which no rank is left out.
fn patient() -> ShrinkOptions {
    ShrinkOptions {
        straggler_wait: Duration::MAX,
        timeout: PATIENCE,
        ..ShrinkOptions::default()
    }
}

#[test]
fn newcomers_join_are_lost_and_others_take_their_numbers_place() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, token, groups) = two_with_store(over);
        let newcomer = |number| {
            Newcomer::from_store(Arc::clone(&store), number, init_options(over, &token)).unwrap()
        };
        let continues_with = |numbers: &[usize]| {
            let mut log = Log::new(store.clone());
            let state = log.read().unwrap();
            state.continues_with(2, numbers.iter().copied())
        };
        let can_grow = true;
        assert!(!continues_with(&[0, 1]), "no rank said so");
        tell(&store, Event::Elastic { can_grow });
        tell(&store, Event::NotElastic);
        assert!(!continues_with(&[0, 1]), "it was taken back");
        tell(&store, Event::Elastic { can_grow });
        assert!(continues_with(&[1, 7]));
        assert!(!continues_with(&[5, 7]), "they are in no group");
        let gate = &Barrier::new(4);
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    wait_for(&group, &[5, 7]);
                    group.barrier().unwrap();
                    let group = grow(group, &patient()).unwrap();
                    assert_eq!((group.world_size(), group.generation()), (4, 1));
                    assert_eq!(group.global_ranks(), [0, 1, 5, 7]);
                    assert_eq!(sum_of_members(&group), 13);
                    assert!(requested(&group).is_none());
                    gate.wait();
                    // Rank 5 goes.
                    group.barrier().unwrap_err();
                    let group = shrink(group, &patient()).unwrap();
                    assert_eq!(sum_of_members(&group), 8);
                    group.shutdown().unwrap();
                });
            }
            for number in [5, 7] {
                let newcomer = newcomer(number);
                let store = &store;
                scope.spawn(move || {
                    let group = newcomer.join(&patient()).unwrap().expect("the job runs");
                    assert_eq!(
                        (group.rank(), group.global_rank()),
                        ((number - 1) / 2, number)
                    );
                    let dump = group.flight();
                    assert_eq!((dump.rank, dump.joined), (number, 1));
                    assert_eq!(dump.members, [0, 1, 5, 7]);
                    assert_eq!(sum_of_members(&group), 13);
                    gate.wait();
                    if number == 5 {
                        return lose(store, 5);
                    }
                    let took_part = true;
                    tell(store, Event::Joined { number, took_part });
                    group.barrier().unwrap_err();
                    let group = shrink(group, &patient()).unwrap();
                    assert_eq!((group.rank(), group.world_size()), (2, 3));
                    assert_eq!(sum_of_members(&group), 8);
                    group.shutdown().unwrap();
                });
            }
        });
        assert!(!continues_with(&[5]), "it has no state");
        assert!(continues_with(&[7]));
    }
}

/// The process `number` asks to join, as another process that says no more.
fn ask(store: &Arc<dyn Store>, number: usize) {
    tell(store, Event::Asks { number, tag: 3 });
}

/// The group whose members gather, and where the process `number` says that it is there for the next one.
fn gathering(store: &Arc<dyn Store>, number: usize) -> (Formation, String) {
    let mut log = Log::new(store.clone());
    let group = loop {
        let state = log.wait(PATIENCE).unwrap();
        let mut gathers = state.groups().filter(|group| group.gathers);
        if let Some(group) = gathers.next() {
            break group.formation.clone();
        }
    };
    let (job, next) = (group.job, group.generation + 1);
    (group, format!("job/here/{job:016x}/{next}/{number}"))
}

/// As an elastic training waits, which has no limit for members.
#[test]
fn a_newcomer_that_comes_late_is_waited_for() {
    let (store, token, groups) = two_with_store(Over::Tcp);
    ask(&store, 7);
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                group.barrier().unwrap();
                let group = grow(group, &patient()).unwrap();
                assert_eq!(sum_of_members(&group), 8);
                group.shutdown().unwrap();
            });
        }
        let (group, here) = gathering(&store, 7);
        std::thread::sleep(Duration::from_millis(400));
        store.set(&here, b"").unwrap();
        let mut log = Log::new(store.clone());
        let next = loop {
            let state = log.wait(PATIENCE).unwrap();
            let next = state.group(group.job).unwrap();
            if next.formation.generation > group.generation {
                break next.formation.clone();
            }
        };
        let options = init_options(Over::Tcp, &token);
        let mut process = phalanx_comm::Detached::from_store(store.clone(), 7, options).unwrap();
        let group = process.form(next, PATIENCE).unwrap();
        assert_eq!(sum_of_members(&group), 8);
        group.shutdown().unwrap();
    });
}

/// It was stopped, or hangs in a file system.
#[test]
fn a_newcomer_that_has_asked_and_does_not_come_is_left_out() {
    let (store, _, groups) = two_with_store(Over::Tcp);
    ask(&store, 5);
    on_each(groups, |group| {
        assert_eq!(requested(&group).joining, [5]);
        group.barrier().unwrap();
        let group = grow(group, &patient()).unwrap();
        assert_eq!(group.global_ranks(), [0, 1]);
        assert!(requested(&group).is_none());
        assert_eq!(sum_of_members(&group), 1);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_newcomer_that_is_lost_before_it_joins_is_not_waited_for() {
    let (store, _, groups) = two_with_store(Over::Shm);
    ask(&store, 4);
    on_each(groups, |group| {
        group.barrier().unwrap();
        lose(&store, 4);
        let group = grow(group, &patient()).unwrap();
        assert_eq!((group.world_size(), sum_of_members(&group)), (2, 1));
        group.shutdown().unwrap();
    });
}

/// It has come to the meeting, and is lost before it connects to the others.
#[test]
fn a_member_that_is_lost_before_it_connects_is_not_waited_for() {
    let (store, _, groups) = two_with_store(Over::Tcp);
    ask(&store, 7);
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (group, here) = gathering(&store, 7);
            store.set(&here, b"").unwrap();
            let mut log = Log::new(store.clone());
            while log.wait(PATIENCE).unwrap().group(group.job).unwrap().new != [7] {}
            std::thread::sleep(Duration::from_millis(300));
            lose(&store, 7);
        });
        for group in groups {
            scope.spawn(|| {
                group.barrier().unwrap();
                let group = grow(group, &patient()).unwrap();
                assert_eq!((group.world_size(), group.generation()), (2, 2));
                assert_eq!(sum_of_members(&group), 1);
                group.shutdown().unwrap();
            });
        }
    });
    assert!(started.elapsed() < PATIENCE / 4, "{:?}", started.elapsed());
}

#[test]
fn a_rank_that_is_asked_to_leaves_and_is_not_waited_for() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, _, groups) = two_with_store(over);
        // Numbers that are no members' are not those of this group.
        for number in [0, 9] {
            tell(&store, Event::Leave { number });
        }
        let hold = |why| Log::new(store.clone()).hold(why).unwrap();
        hold(Some("it is a test"));
        on_each(groups, |group| {
            let asked = requested(&group);
            assert_eq!((asked.joining, asked.leaving), (vec![], vec![0]));
            assert_eq!(asked.hold.as_deref(), Some("it is a test"));
            group.barrier().unwrap();
            if group.rank() == 0 {
                return group.shutdown().unwrap();
            }
            lose(&store, 0);
            hold(None);
            let group = grow(group, &patient()).unwrap();
            assert_eq!((group.rank(), group.world_size()), (0, 1));
            assert!(requested(&group).is_none());
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn a_process_number_that_is_used_twice_is_refused() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, token, groups) = two_with_store(over);
        let newcomer = |number| {
            Newcomer::from_store(Arc::clone(&store), number, init_options(over, &token)).unwrap()
        };
        let refused = |error: Error, number: usize| {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            let words = format!("process number {number} is already used");
            assert!(error.to_string().contains(&words), "{error}");
        };
        lose(&store, 9);
        refused(newcomer(9).join(&patient()).unwrap_err(), 9);
        let first = groups[0].clone();
        std::thread::scope(|scope| {
            let [member, five] = [1, 5].map(|number| {
                let newcomer = newcomer(number);
                scope.spawn(move || newcomer.join(&patient()))
            });
            wait_for(&first, &[1, 5]);
            // It asks already.
            refused(newcomer(5).join(&patient()).unwrap_err(), 5);
            drop(first);
            for group in groups {
                scope.spawn(move || {
                    let group = grow(group, &patient()).unwrap();
                    assert_eq!(group.global_ranks(), [0, 1, 5]);
                    assert_eq!(sum_of_members(&group), 6);
                    group.shutdown().unwrap();
                });
            }
            refused(member.join().unwrap().unwrap_err(), 1);
            let group = five.join().unwrap().unwrap().expect("the job runs");
            assert_eq!(sum_of_members(&group), 6);
            // It is a member, or was lost.
            refused(newcomer(5).join(&patient()).unwrap_err(), 5);
            group.shutdown().unwrap();
        });
        lose(&store, 5);
        refused(newcomer(5).join(&patient()).unwrap_err(), 5);
    }
}

#[test]
fn a_newcomer_learns_that_the_job_is_over() {
    let (store, token, _groups) = two_with_store(Over::Shm);
    let newcomer = || {
        let options = init_options(Over::Shm, &token);
        Newcomer::from_store(store.clone(), 2, options).unwrap()
    };
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| newcomer().join(&patient()).unwrap().is_none());
        std::thread::sleep(Duration::from_millis(50));
        Log::new(store.clone()).end("all is done").unwrap();
        assert!(waits.join().unwrap());
    });
    assert!(newcomer().join(&patient()).unwrap().is_none());
}

/// A garbled event is an error and no wait.
#[test]
fn an_event_that_is_none_is_refused() {
    let (store, token, _groups) = two_with_store(Over::Shm);
    store.set("job/log/0", b"{\"Asks\": 1}").unwrap();
    let newcomer = Newcomer::from_store(store, 2, init_options(Over::Shm, &token)).unwrap();
    let error = newcomer.join(&patient()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("event 0 of job/log"), "{error}");
}

#[test]
fn a_straggler_is_refused_with_the_reason() {
    everywhere(|over| {
        let formed = Barrier::new(4);
        on_each(groups(over, 4), |group| {
            let rank = group.rank();
            all_ready(&group, &formed);
            if rank == 2 {
                formed.wait();
                let error = shrink(group, &hasty()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Excluded, "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("process 2 was excluded from generation 1 (members: 0, 1, 3)")
                        && text.contains("waited 1.2 s"),
                    "{text}"
                );
                return;
            }
            let group = shrink(group, &hasty()).unwrap();
            formed.wait();
            for _ in 0..20 {
                assert_eq!(sum_of_members(&group), 4);
            }
            group.shutdown().unwrap();
        });
    });
}

#[test]
fn less_than_a_majority_does_not_go_on() {
    let gate = Barrier::new(4);
    on_each(groups(Over::Tcp, 4), |group| {
        all_ready(&group, &gate);
        if group.rank() >= 2 {
            return;
        }
        let error = shrink(
            group,
            &ShrinkOptions {
                timeout: Duration::from_millis(3000),
                ..hasty()
            },
        )
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("2 of 4 ranks came within 3.0 s, 3 are needed, more than half")
                && text.contains("did not come: 2, 3"),
            "{text}"
        );
    });
}

/// However the ranks are delayed, they form at most one group, and a rank that is
/// not in it gets an error.
#[test]
fn there_is_never_more_than_one_group() {
    for round in 0..6_u64 {
        let gate = Barrier::new(5);
        let outcomes = on_each(groups(Over::Shm, 5), |group| {
            all_ready(&group, &gate);
            let rank = group.rank() as u64;
            let pause = (rank * 7919 + round * 104_729) % 400;
            std::thread::sleep(Duration::from_millis(pause));
            let options = ShrinkOptions {
                min_world: Some(2),
                straggler_wait: Duration::from_millis(100),
                timeout: PATIENCE,
            };
            match shrink(group, &options) {
                Ok(group) => {
                    let sum = sum_of_members(&group);
                    let outcome = (group.generation(), group.world_size(), sum);
                    group.shutdown().unwrap();
                    Some(outcome)
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Excluded, "{error}");
                    None
                }
            }
        });
        let members: Vec<i64> = (0..5).filter(|r| outcomes[*r as usize].is_some()).collect();
        let want = (1, members.len(), members.iter().sum::<i64>());
        assert!(members.len() >= 2, "round {round}: {outcomes:?}");
        for outcome in outcomes.iter().flatten() {
            assert_eq!(*outcome, want, "round {round}: {outcomes:?}");
        }
    }
}

#[test]
fn a_subgroup_cannot_be_formed_anew() {
    on_each(groups(Over::Thread, 2), |group| {
        let sub = group.new_group(&[0, 1]).unwrap().unwrap();
        let error = shrink(sub, &hasty()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        group.barrier().unwrap();
    });
}

#[test]
fn a_store_that_died_with_rank_0_is_the_end_and_says_so() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let token = Token::generate().unwrap();
    let gate = Arc::new(Barrier::new(3));
    let members: Vec<_> = (0..3)
        .map(|rank| {
            let (token, gate) = (token.clone(), gate.clone());
            std::thread::spawn(move || {
                let group = ProcessGroup::init(InitOptions {
                    init_method: format!("tcp://127.0.0.1:{port}"),
                    rank: Some(rank),
                    world_size: Some(3),
                    ..init_options(Over::Tcp, &token)
                })
                .unwrap();
                all_ready(&group, &gate);
                if rank == 0 {
                    return;
                }
                group.barrier().unwrap_err();
                let error = shrink(group, &hasty()).unwrap_err();
                assert!(
                    error.to_string().contains("rank 0 hosts the store"),
                    "{error}"
                );
            })
        })
        .collect();
    for member in members {
        member.join().unwrap();
    }
}

/// A store that counts what it is asked for, and does not answer while it is `silent`.
#[derive(Default)]
struct Watched {
    store: MemStore,
    silent: AtomicBool,
    asked: AtomicUsize,
}

impl Watched {
    fn ask(&self) -> phalanx_store::Result<&MemStore> {
        self.asked.fetch_add(1, SeqCst);
        match self.silent.load(SeqCst) {
            true => {
                std::thread::sleep(Duration::from_millis(20));
                let kind = phalanx_store::ErrorKind::NoAnswer;
                Err(phalanx_store::Error::new(kind, "it did not answer"))
            }
            false => Ok(&self.store),
        }
    }
}

impl Store for Watched {
    fn location(&self) -> String {
        self.store.location()
    }

    fn execute(&self, request: &Request<'_>) -> phalanx_store::Result<Response> {
        self.ask()?.execute(request)
    }
}

/// The store answers again in time: the dead rank is no member, and no generation is lost.
#[test]
fn ranks_wait_until_the_store_answers() {
    let store = Arc::new(Watched::default());
    let token = Token::generate().unwrap();
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let (store, options) = (store.clone(), init_options(Over::Tcp, &token));
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, 3, options))
        })
        .collect();
    let ranks = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap());
    let gate = Barrier::new(3);
    on_each(ranks.collect(), |group: ProcessGroup| {
        all_ready(&group, &gate);
        if group.rank() == 2 {
            return;
        }
        group.barrier().unwrap_err();
        if group.rank() == 0 {
            store.silent.store(true, SeqCst);
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                store.silent.store(false, SeqCst);
            });
        }
        let group = shrink(group, &ShrinkOptions::default()).unwrap();
        assert_eq!((group.generation(), group.world_size()), (1, 2));
        assert_eq!(sum_of_members(&group), 1);
    });
}

/// A look at what is asked of the ranks costs one request, however many processes have come and gone.
#[test]
fn a_look_costs_one_request() {
    let watched = Arc::new(Watched::default());
    let store: Arc<dyn Store> = watched.clone();
    let mut log = Log::new(store.clone());
    for number in 1..40 {
        ask(&store, number);
        lose(&store, number);
    }
    for _ in 0..3 {
        let before = watched.asked.load(SeqCst);
        assert!(log.read().unwrap().requested(&[0]).is_none());
        assert_eq!(watched.asked.load(SeqCst) - before, 1);
    }
    assert_eq!(log.state().why_lost(39), Some("it is a test"));
}

const PLACE: &str = "PHALANX_TEST_FORMING_STORE";
const TOKEN: &str = "PHALANX_TEST_FORMING_TOKEN";
const RANK: &str = "PHALANX_TEST_FORMING_RANK";
const OVER: &str = "PHALANX_TEST_FORMING_OVER";
const PROCESSES: usize = 4;

struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A rank that is a process of its own: reduces until somebody dies, forms
/// anew, and so on; ends well when two are left and have reduced.
#[test]
fn child() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let variable = |name| std::env::var(name).unwrap();
    let token = Token::from_hex(&variable(TOKEN)).unwrap();
    let rank: usize = variable(RANK).parse().unwrap();
    let over = if variable(OVER) == "tcp" {
        Over::Tcp
    } else {
        Over::Shm
    };
    let store = phalanx_store::TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
    let options = init_options(over, &token);
    let mut group = ProcessGroup::from_store(Arc::new(store), rank, PROCESSES, options).unwrap();
    let mut data = vec![1f32; 20_000];
    loop {
        let store = group.store();
        store
            .set(&format!("test/ready/{}/{rank}", group.generation()), b"1")
            .unwrap();
        if group.world_size() == 2 {
            break;
        }
        let error: Error = loop {
            data.fill(1.0);
            match group.all_reduce(&mut data, ReduceOp::Sum) {
                Ok(()) => assert!(data.iter().all(|x| *x == group.world_size() as f32)),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Aborted),
            "{error}"
        );
        group = shrink(
            group,
            &ShrinkOptions {
                min_world: Some(2),
                ..hasty()
            },
        )
        .unwrap();
    }
    group.shutdown().unwrap();
}

fn kill_two_of_four(over: &str, victims: [usize; 2]) {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let place = server.local_addr().to_string();
    let temp = tempfile::tempdir().unwrap();
    let mut ranks: Vec<Rank> = (0..PROCESSES)
        .map(|rank| {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "forming::child", "--nocapture"])
                .env(PLACE, &place)
                .env(TOKEN, token.to_hex())
                .env(RANK, rank.to_string())
                .env(OVER, over)
                .env("TMPDIR", temp.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            Rank(child)
        })
        .collect();
    let store = phalanx_store::TcpStore::connect(&place, token, PATIENCE).unwrap();
    let mut alive: Vec<usize> = (0..PROCESSES).collect();
    for (generation, victim) in victims.into_iter().enumerate() {
        let ready: Vec<String> = alive
            .iter()
            .map(|r| format!("test/ready/{generation}/{r}"))
            .collect();
        let ready: Vec<&str> = ready.iter().map(String::as_str).collect();
        store.wait(&ready, PATIENCE).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        ranks[victim].0.kill().unwrap();
        let killed = Instant::now();
        alive.retain(|r| *r != victim);
        let again: Vec<String> = alive
            .iter()
            .map(|r| format!("test/ready/{}/{r}", generation + 1))
            .collect();
        let again: Vec<&str> = again.iter().map(String::as_str).collect();
        store.wait(&again, PATIENCE).unwrap();
        let took = killed.elapsed();
        assert!(took < SOON, "{over} {victims:?}: {took:?}");
    }
    for rank in alive {
        let status = ranks[rank].0.wait().unwrap();
        assert!(status.success(), "{over} {victims:?} rank {rank}: {status}");
    }
    drop(ranks);
    let left: Vec<_> = std::fs::read_dir(temp.path()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let shared = std::fs::read_dir(Path::new("/dev/shm")).unwrap().flatten();
    assert!(
        !shared
            .into_iter()
            .any(|e| e.file_name().to_string_lossy().contains("phalanx"))
    );
}

#[test]
fn killed_processes_are_left_behind_over_shm() {
    at_once(&[[0, 2], [3, 1]], |victims| {
        kill_two_of_four("shm", *victims)
    });
}

#[test]
fn killed_processes_are_left_behind_over_tcp() {
    at_once(&[[0, 3], [1, 0]], |victims| {
        kill_two_of_four("tcp", *victims)
    });
}
