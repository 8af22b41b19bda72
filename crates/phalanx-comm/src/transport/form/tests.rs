//! Forming through a store, with threads as ranks.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use phalanx_store::MemStore;

use super::super::testing::{PATIENCE, SOON, exchange, loiter, on_all, recv_byte};
use super::super::{Interest, Poison};
use super::*;

mod processes;

fn options(rank: usize, world: usize, token: &Token, prefer: Transport) -> FormOptions {
    FormOptions {
        rank,
        world,
        token: token.clone(),
        generation: 1,
        group: 0,
        timeout: PATIENCE,
        bind: BindAddr::Loopback,
        ports: None,
        server: None,
        prefer,
        ring_bytes: None,
        compute_threads: 1,
        arena_bytes: None,
    }
}

/// Forms a group whose rank r claims to be on `hosts[r]`.
fn form_on(store: &MemStore, prefer: Transport, hosts: &[&str]) -> Vec<Result<Mesh>> {
    let token = Token::generate().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = hosts
            .iter()
            .enumerate()
            .map(|(rank, hint)| {
                let o = options(rank, hosts.len(), &token, prefer);
                let host = Host {
                    machine: "this".to_owned(),
                    hint: (*hint).to_owned(),
                };
                scope.spawn(move || form_at(store, &o, host, &none_lost))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn formed(prefer: Transport, hosts: &[&str]) -> Vec<Mesh> {
    let store = MemStore::new();
    let meshes = form_on(&store, prefer, hosts)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(
        store.delete_prefix("").unwrap_or(0),
        0,
        "keys were left in the store"
    );
    meshes
}

fn kinds(mesh: &Mesh) -> Vec<TransportKind> {
    mesh.describe().into_iter().map(|(_, kind)| kind).collect()
}

/// Rank 2 comes and is then stopped; rank 1 cannot finish without it.
#[test]
fn who_only_waits_is_not_blamed_for_a_late_forming() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    let mut o = options(0, 4, &token, Transport::Tcp);
    o.timeout = Duration::from_secs(4);
    // What rank 2 would have written before it was stopped.
    let stopped = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let record = Member {
        instance: 7,
        process: "process 7 on node7".to_owned(),
        world: 4,
        prefer: Transport::Tcp,
        host: Host::here(),
        share: Share::here(1),
        address: Some(stopped.local_addr().unwrap()),
    };
    store.set("comm/1/0/4/member/2", &record.encode()).unwrap();
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let ranks: Vec<_> = [0, 1, 3]
            .into_iter()
            .map(|rank| {
                let (store, o) = (&store, FormOptions { rank, ..o.clone() });
                scope.spawn(move || form(store, &o).unwrap_err())
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for e in errors {
        let text = e.to_string();
        assert!(text.contains("rank 2 did not"), "{text}");
        assert!(!text.contains("ranks "), "{text}");
    }
}

#[test]
fn one_host_shares_memory() {
    for world in [2, 3, 5] {
        on_all(formed(Transport::Auto, &vec!["a"; world]), |mut mesh| {
            assert_eq!(kinds(&mesh), vec![TransportKind::Shm; world - 1]);
            exchange(&mut mesh, 200_000).unwrap();
        });
    }
}

#[test]
fn tcp_on_request() {
    for world in [2, 4] {
        on_all(formed(Transport::Tcp, &vec!["a"; world]), |mut mesh| {
            assert_eq!(kinds(&mesh), vec![TransportKind::Tcp; world - 1]);
            exchange(&mut mesh, 3_000_000).unwrap();
            exchange(&mut mesh, 1).unwrap();
        });
    }
}

#[test]
fn hosts_are_mixed_per_pair() {
    use TransportKind::{Shm, Tcp};
    // Hosts interleaved, and one alone.
    let expected = [
        vec![Tcp, Shm, Tcp, Tcp],
        vec![Tcp, Tcp, Shm, Tcp],
        vec![Shm, Tcp, Tcp, Tcp],
        vec![Tcp, Shm, Tcp, Tcp],
        vec![Tcp, Tcp, Tcp, Tcp],
    ];
    on_all(
        formed(Transport::Auto, &["a", "b", "a", "b", "c"]),
        |mut mesh| {
            assert_eq!(kinds(&mesh), expected[mesh.rank()]);
            exchange(&mut mesh, 500_000).unwrap();
            exchange(&mut mesh, 1).unwrap();
        },
    );
}

#[test]
fn a_rank_without_a_hint_uses_tcp() {
    for mesh in formed(Transport::Auto, &["", ""]) {
        assert_eq!(kinds(&mesh), [TransportKind::Tcp]);
    }
}

#[test]
fn a_group_of_one_needs_nobody() {
    for prefer in [Transport::Auto, Transport::Shm, Transport::Tcp] {
        let mut meshes = formed(prefer, &["a"]);
        assert!(meshes[0].describe().is_empty());
        loiter(&mut meshes[0], Duration::from_millis(5)).unwrap();
    }
}

#[test]
fn the_real_host_is_found_by_probing() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    let meshes: Vec<Mesh> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let o = options(rank, 2, &token, Transport::Shm);
                let store = &store;
                scope.spawn(move || form(store, &o).unwrap())
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    on_all(meshes, |mut mesh| exchange(&mut mesh, 10_000).unwrap());
}

#[test]
fn several_groups_share_a_store() {
    let store = Arc::new(MemStore::new());
    let token = Token::generate().unwrap();
    std::thread::scope(|scope| {
        for group in 0..3 {
            for rank in 0..2 {
                let o = FormOptions {
                    group,
                    ..options(rank, 2, &token, Transport::Auto)
                };
                let store = Arc::clone(&store);
                scope.spawn(move || exchange(&mut form(&*store, &o).unwrap(), 1000).unwrap());
            }
        }
    });
}

#[test]
fn forming_may_take_for_ever() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    for prefer in [Transport::Shm, Transport::Tcp] {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let o = FormOptions {
                    timeout: Duration::MAX,
                    ..options(rank, 2, &token, prefer)
                };
                let store = &store;
                scope.spawn(move || form(store, &o).unwrap());
            }
        });
    }
}

#[test]
fn late_ranks_are_named() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for rank in [0, 2] {
            let timeout = Duration::from_millis(3000);
            let o = FormOptions {
                timeout,
                ..options(rank, 4, &token, Transport::Auto)
            };
            let store = &store;
            scope.spawn(move || {
                let e = form(store, &o).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Timeout);
                let text = e.to_string();
                assert!(
                    text.contains("ranks 1, 3 did not arrive within 3 s; arrived: 0, 2"),
                    "{text}"
                );
            });
        }
    });
    assert!(start.elapsed() < SOON);
}

#[test]
fn who_comes_after_the_others_gave_up_hears_it_at_once() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    for prefer in [Transport::Shm, Transport::Tcp] {
        let generation = prefer as u32;
        let hasty = FormOptions {
            generation,
            timeout: Duration::from_millis(100),
            ..options(0, 2, &token, prefer)
        };
        assert_eq!(form(&store, &hasty).unwrap_err().kind(), ErrorKind::Timeout);
        let late = FormOptions {
            generation,
            ..options(1, 2, &token, prefer)
        };
        let start = Instant::now();
        let e = form(&store, &late).unwrap_err();
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(e.origin_rank(), Some(0), "{e}");
        assert!(e.to_string().contains("rank 1 did not arrive"), "{e}");
    }
}

/// The first to claim the rank keeps it, and no other rank is affected.
#[test]
fn of_a_rank_taken_twice_only_the_second_is_refused() {
    for prefer in [Transport::Auto, Transport::Tcp] {
        let store = MemStore::new();
        let token = Token::generate().unwrap();
        let form_as = |rank| form(&store, &options(rank, 2, &token, prefer));
        let started = Instant::now();
        let error = std::thread::scope(|scope| {
            let twins = [1, 1].map(|rank| scope.spawn(move || form_as(rank)));
            // The refused one does not wait for the others to come.
            while !twins.iter().any(|twin| twin.is_finished()) {
                assert!(started.elapsed() < SOON);
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut zero = form_as(0).unwrap();
            let (mut formed, mut refused): (Vec<Mesh>, Vec<Error>) = (Vec::new(), Vec::new());
            for twin in twins {
                match twin.join().unwrap() {
                    Ok(mesh) => formed.push(mesh),
                    Err(e) => refused.push(e),
                }
            }
            assert_eq!((formed.len(), refused.len()), (1, 1), "{refused:?}");
            let mut one = formed.remove(0);
            scope.spawn(move || exchange(&mut one, 5000).unwrap());
            exchange(&mut zero, 5000).unwrap();
            refused.remove(0)
        });
        assert_eq!(error.kind(), ErrorKind::Usage);
        let holder = format!(
            "rank 1 is already taken by {}",
            super::member::this_process()
        );
        assert!(error.to_string().contains(&holder), "{error}");
    }
}

/// A process with another size comes before all others: it is refused when rank 0 has come, and the others form.
#[test]
fn a_stray_of_another_size_that_came_first_is_refused_alone() {
    for size in [3, 5, 1000] {
        let store = MemStore::new();
        let token = Token::generate().unwrap();
        let form_as = |rank, world| form(&store, &options(rank, world, &token, Transport::Auto));
        std::thread::scope(|scope| {
            let stray = scope.spawn(|| form_as(2, size).map(drop).unwrap_err());
            let record = format!("comm/1/0/{size}/member/2");
            store.wait(&[&record], PATIENCE).unwrap();
            let right = [0, 1, 3].map(|rank| scope.spawn(move || form_as(rank, 4).unwrap()));
            // Not before the right one in its place has come: that is not needed.
            let error = stray.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            let text = error.to_string();
            assert!(
                text.contains(&format!("rank 2 was started for {size} ranks"))
                    && text.contains("but rank 0 (process ")
                    && text.contains(") for 4: "),
                "{text}"
            );
            let last = form_as(2, 4).unwrap();
            let mut meshes: Vec<Mesh> = right.map(|r| r.join().unwrap()).into();
            meshes.insert(2, last);
            on_all(meshes, |mut mesh| exchange(&mut mesh, 1000).unwrap());
        });
        assert_eq!(store.delete_prefix("").unwrap(), 0, "keys were left");
    }
}

/// A stray that has not looked since rank 0 came finds no key of the group.
#[test]
fn a_stray_is_refused_by_a_group_that_has_formed() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    let form_as = |rank, world| form(&store, &options(rank, world, &token, Transport::Auto));
    std::thread::scope(|scope| {
        let strays = [1, 2].map(|rank| {
            let stray = scope.spawn(move || form_as(rank, 100).map(drop).unwrap_err());
            let record = format!("comm/1/0/100/member/{rank}");
            store.wait(&[&record], PATIENCE).unwrap();
            stray
        });
        let right = [0, 1].map(|rank| scope.spawn(move || form_as(rank, 2).unwrap()));
        let meshes = right.map(|r| r.join().unwrap()).into();
        on_all(meshes, |mut mesh| exchange(&mut mesh, 1000).unwrap());
        for stray in strays {
            let error = stray.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("does not take part"), "{error}");
        }
    });
    assert_eq!(store.delete_prefix("").unwrap(), 0, "keys were left");
}

#[test]
fn a_missed_deadline_says_who_was_turned_away() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    // The note of a process that was started for another size.
    let note = "process 7 on node7 was started as rank 2 of 4 and takes no part";
    store
        .set("comm/1/0/3/turned_away", note.as_bytes())
        .unwrap();
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let (store, mut o) = (&store, options(rank, 3, &token, Transport::Tcp));
            o.timeout = Duration::from_secs(1);
            scope.spawn(move || {
                let text = form(store, &o).map(drop).unwrap_err().to_string();
                // The rank whose deadline comes first ends the other's wait.
                assert!(text.contains("rank 2 did not arrive"), "{text}");
                assert!(text.contains(note), "{text}");
            });
        }
    });
}

#[test]
fn disagreement_is_named_and_ends_everyones_wait() {
    let token = Token::generate().unwrap();
    let disagree = |a: FormOptions, b: FormOptions| {
        let store = MemStore::new();
        let start = Instant::now();
        let errors = std::thread::scope(|scope| {
            let a = scope.spawn(|| form(&store, &a).unwrap_err().to_string());
            let b = scope.spawn(|| form(&store, &b).unwrap_err().to_string());
            [a.join().unwrap(), b.join().unwrap()]
        });
        assert!(start.elapsed() < SOON);
        errors
    };
    let auto = |rank, world| FormOptions {
        timeout: Duration::from_secs(2),
        ..options(rank, world, &token, Transport::Auto)
    };
    for text in disagree(auto(0, 2), options(1, 2, &token, Transport::Tcp)) {
        assert!(text.contains("transport"), "{text}");
    }
    let [first, second] = disagree(auto(0, 2), auto(1, 3));
    assert!(
        second.contains("rank 1 was started for 3 ranks, but rank 0 ("),
        "{second}"
    );
    assert!(first.contains("was started as rank 1 of 3"), "{first}");
}

#[test]
fn shm_on_request_or_an_error_saying_why() {
    let results = form_on(&MemStore::new(), Transport::Shm, &["a", "b"]);
    for result in results {
        let e = result.unwrap_err();
        assert!(e.to_string().contains("another host"), "{e}");
    }
}

#[test]
fn loopback_between_machines_is_refused_at_once() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let o = options(rank, 2, &token, Transport::Auto);
            let name = format!("machine {rank}");
            let host = Host {
                machine: name.clone(),
                hint: name,
            };
            let store = &store;
            scope.spawn(move || {
                let e = form_at(store, &o, host, &none_lost).unwrap_err();
                assert!(e.to_string().contains("loopback only"), "{e}");
            });
        }
    });
}

/// The address that `rank` has published, as an attacker on the network would
/// find it by scanning.
fn published(store: &MemStore, world: usize, rank: usize) -> SocketAddr {
    let key = format!("comm/1/0/{world}/member/{rank}");
    let record = store.get(&key, PATIENCE).unwrap();
    Member::decode(&record).unwrap().address.unwrap()
}

#[test]
fn strangers_do_not_disturb_forming() {
    let store = MemStore::new();
    let token = Token::generate().unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let (store, o) = (&store, options(rank, 3, &token, Transport::Tcp));
                scope.spawn(move || {
                    // Rank 2 is late: the others listen for a while.
                    if rank == 2 {
                        std::thread::sleep(Duration::from_millis(200));
                    }
                    form(store, &o).unwrap()
                })
            })
            .collect();
        let mut slow = Vec::new();
        for rank in 0..2 {
            let address = published(&store, 3, rank);
            for _ in 0..40 {
                slow.push(TcpStream::connect(address).unwrap());
            }
            drop(TcpStream::connect(address).unwrap());
            let mut http = TcpStream::connect(address).unwrap();
            http.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                .unwrap();
            let mut noise = TcpStream::connect(address).unwrap();
            noise.write_all(&[0x5a; 4096]).unwrap();
        }
        let meshes = ranks.into_iter().map(|t| t.join().unwrap()).collect();
        drop(slow);
        on_all(meshes, |mut mesh| exchange(&mut mesh, 10_000).unwrap());
    });
}

#[test]
fn another_token_is_a_users_mistake() {
    let store = MemStore::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let token = Token::generate().unwrap();
            let timeout = Duration::from_secs(6);
            let o = FormOptions {
                timeout,
                ..options(rank, 2, &token, Transport::Tcp)
            };
            let store = &store;
            scope.spawn(move || {
                let e = form(store, &o).unwrap_err();
                let kind = if rank == 1 {
                    ErrorKind::Usage
                } else {
                    ErrorKind::Aborted
                };
                assert_eq!(e.kind(), kind, "{e}");
            });
        }
    });
}

#[test]
fn abort_crosses_tcp_with_its_cause() {
    on_all(formed(Transport::Tcp, &["a"; 3]), |mut mesh| {
        if mesh.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            mesh.abort_handle().poison(&Poison::new(1, "disk full"));
            return;
        }
        // Rank 0 waits for the aborting rank, rank 2 for an innocent one.
        let peer = if mesh.rank() == 0 { 1 } else { 0 };
        let e = recv_byte(&mut mesh, peer).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        assert_eq!(e.origin_rank(), Some(1));
        assert!(e.to_string().contains("disk full"), "{e}");
        assert_eq!(mesh.abort_handle().poisoned().unwrap().origin_rank, 1);
    });
}

#[test]
fn abort_reaches_all_hosts_of_a_mixed_mesh() {
    on_all(
        formed(Transport::Auto, &["a", "a", "b", "b"]),
        |mut mesh| {
            let start = Instant::now();
            if mesh.rank() == 3 {
                std::thread::sleep(Duration::from_millis(20));
                mesh.abort_handle().poison(&Poison::new(3, "enough"));
            }
            // Every rank waits for its neighbour in shared memory only.
            let peer = mesh.rank() ^ 1;
            let e = recv_byte(&mut mesh, peer).unwrap_err();
            assert_eq!(e.origin_rank(), Some(3), "{e}");
            assert!(start.elapsed() < SOON);
        },
    );
}

#[test]
fn leaving_over_tcp_is_a_loss_only_for_those_who_expect_something() {
    on_all(formed(Transport::Tcp, &["a"; 3]), |mut mesh| {
        match mesh.rank() {
            0 => {
                assert_eq!(recv_byte(&mut mesh, 2).unwrap(), b'a');
                let e = recv_byte(&mut mesh, 2).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
                assert_eq!(e.peer(), Some(2));
                assert!(e.to_string().contains("left the group"), "{e}");
            }
            1 => {
                // Still works with the others after rank 2 has gone.
                loiter(&mut mesh, Duration::from_millis(150)).unwrap();
                assert!(mesh.describe().contains(&(2, TransportKind::Tcp)));
            }
            _ => assert_eq!(mesh.link(0).try_send(b"a").unwrap(), 1),
        }
    });
}

#[test]
fn sending_to_one_who_left_over_tcp_ends() {
    on_all(formed(Transport::Tcp, &["a"; 2]), |mut mesh| {
        if mesh.rank() == 1 {
            return;
        }
        let until = Instant::now() + PATIENCE;
        let want = [
            Interest::default(),
            Interest {
                send: true,
                recv: false,
                ..Interest::default()
            },
        ];
        let e = loop {
            assert!(Instant::now() < until);
            match mesh.link(1).try_send(&[0; 65_536]) {
                Ok(0) => {
                    if let Err(e) = mesh.idle(&want, 9, until) {
                        break e;
                    }
                }
                Ok(_) => {}
                Err(e) => break e,
            }
        };
        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        assert_eq!(e.peer(), Some(1));
    });
}

#[test]
fn a_poisoned_rank_that_leaves_passes_the_first_cause_on() {
    on_all(
        formed(Transport::Auto, &["a", "a", "b"]),
        |mut mesh| match mesh.rank() {
            0 => assert!(mesh.abort_handle().poison(&Poison::new(0, "root"))),
            // Learns it through shared memory, and leaves.
            1 => {
                assert!(loiter(&mut mesh, PATIENCE).is_err());
            }
            _ => {
                let e = recv_byte(&mut mesh, 1).unwrap_err();
                assert_eq!(e.origin_rank(), Some(0), "{e}");
            }
        },
    );
}
