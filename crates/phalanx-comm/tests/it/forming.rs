//! How groups come to be: `tcp://`, `file://`, and what can go wrong.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_comm::{
    Error, ErrorKind, InitOptions, ProcessGroup, ReduceOp, Transport, TransportKind,
};
use phalanx_store::{MemStore, Store, TcpServer};
use phalanx_wire::Token;

use crate::common::{Over, PATIENCE, SOON, init_options};

/// Runs `init` for each of the given options at once.
fn init_all(all: Vec<InitOptions>) -> Vec<Result<ProcessGroup, Error>> {
    let members: Vec<_> = all
        .into_iter()
        .map(|options| std::thread::spawn(move || ProcessGroup::init(options)))
        .collect();
    members
        .into_iter()
        .map(|member| member.join().unwrap())
        .collect()
}

fn options(method: &str, rank: usize, world: usize) -> InitOptions {
    InitOptions {
        init_method: method.into(),
        rank: Some(rank),
        world_size: Some(world),
        timeout: PATIENCE,
        ..InitOptions::default()
    }
}

/// The sum of ranks over a group, then its orderly end.
fn use_and_leave(groups: Vec<Result<ProcessGroup, Error>>) {
    let world = groups.len() as i64;
    crate::common::on_each(groups.into_iter().map(Result::unwrap).collect(), |group| {
        let mut data = [group.rank() as i64];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [world * (world - 1) / 2]);
        group.shutdown().unwrap();
    });
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[test]
fn ranks_meet_over_tcp_with_rank_0_hosting() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let token = Token::generate().unwrap();
    for transport in [Transport::Auto, Transport::Tcp] {
        let all = (0..3).map(|rank| InitOptions {
            token: Some(token.clone()),
            transport,
            ..options(&method, rank, 3)
        });
        let groups = init_all(all.collect());
        let kind = if transport == Transport::Tcp {
            TransportKind::Tcp
        } else {
            TransportKind::Shm
        };
        for (rank, group) in groups.iter().enumerate() {
            let group = group.as_ref().unwrap();
            assert_eq!((group.rank(), group.world_size()), (rank, 3));
            let seen = group.store().try_get("no such key").unwrap();
            assert!(seen.is_none());
            assert!(group.transports().iter().all(|(_, k)| *k == kind));
        }
        use_and_leave(groups);
    }
}

#[test]
fn ranks_meet_in_a_file_without_a_token_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    let method = format!("file://{}/meet", dir.path().display());
    for _ in 0..3 {
        use_and_leave(init_all(
            (0..2).map(|rank| options(&method, rank, 2)).collect(),
        ));
    }
}

/// The file may be left over from a killed job, whose address leads nowhere or to another job.
#[test]
fn ranks_wait_until_rank_0_replaces_an_old_address_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meet");
    let method = format!("file://{}", path.display());
    let other = TcpServer::bind("127.0.0.1:0".parse().unwrap(), Token::generate().unwrap());
    let other = other.unwrap();
    let at = [
        format!("127.0.0.1:{}", free_port()),
        other.local_addr().to_string(),
    ];
    for place in at {
        let token = Token::generate().unwrap().to_hex();
        let host = phalanx_comm::transport::machine();
        std::fs::write(&path, format!("phalanx-store {place} {token} {host}\n")).unwrap();
        let late = options(&method, 1, 2);
        let late = std::thread::spawn(move || ProcessGroup::init(late));
        std::thread::sleep(Duration::from_millis(600));
        assert!(!late.is_finished());
        let first = ProcessGroup::init(options(&method, 0, 2));
        use_and_leave(vec![first, late.join().unwrap()]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn what_is_wrong_with_an_address_file_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meet");
    let method = format!("file://{}", path.display());
    let init = |method: &str, rank, world| {
        let error = ProcessGroup::init(InitOptions {
            timeout: Duration::from_millis(300),
            ..options(method, rank, world)
        });
        error.unwrap_err()
    };
    let error = init(&method, 1, 2);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("meet") && text.contains("was rank 0 started"),
        "{text}"
    );
    let members = [0, 1].map(|rank| {
        let init = options(&method, rank, 3);
        // The store ends with rank 0: rank 1 gives up first.
        let timeout = Duration::from_secs(if rank == 0 { 5 } else { 3 });
        std::thread::spawn(move || ProcessGroup::init(InitOptions { timeout, ..init }))
    });
    let kinds = [ErrorKind::Aborted, ErrorKind::Timeout];
    for (member, kind) in members.into_iter().zip(kinds) {
        let error = member.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 2 did not arrive"), "{text}");
    }
    assert!(!path.exists());
    std::fs::write(&path, "my thesis").unwrap();
    for rank in [0, 1] {
        let error = init(&method, rank, 2);
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("was not changed"), "{error}");
        let nowhere = format!("file://{}/none/meet", dir.path().display());
        let error = init(&nowhere, rank, 2);
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.to_string().contains("none/meet"), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"my thesis");
}

#[test]
fn one_rank_meets_nobody() {
    let group = ProcessGroup::init(options("env://", 0, 1)).unwrap();
    use_and_leave(vec![Ok(group)]);
}

#[test]
fn absent_ranks_are_listed() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let store =
        phalanx_store::TcpStore::connect(&server.local_addr().to_string(), token.clone(), PATIENCE)
            .unwrap();
    let options = InitOptions {
        timeout: Duration::from_secs(3),
        ..init_options(Over::Tcp, &token)
    };
    let store = Arc::new(store);
    let members: Vec<_> = [0, 3]
        .map(|rank| {
            let (store, options) = (store.clone(), options.clone());
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, 5, options))
        })
        .into_iter()
        .collect();
    for member in members {
        let error = member.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(
            error.to_string().contains("ranks 1, 2, 4 did not arrive"),
            "{error}"
        );
    }
}

#[test]
fn a_wrong_world_is_refused_and_named_to_those_that_wait() {
    let store = Arc::new(MemStore::new());
    let token = Token::generate().unwrap();
    let members = [(0, 2), (1, 3)].map(|(rank, world)| {
        let (store, mut options) = (store.clone(), init_options(Over::Shm, &token));
        options.timeout = Duration::from_secs(2);
        std::thread::spawn(move || ProcessGroup::from_store(store, rank, world, options))
    });
    let [right, wrong] = members.map(|member| member.join().unwrap().unwrap_err());
    assert_eq!(wrong.kind(), ErrorKind::Usage, "{wrong}");
    let text = wrong.to_string();
    assert!(
        text.contains("all ranks must be started with the same"),
        "{text}"
    );
    assert_eq!(right.kind(), ErrorKind::Timeout, "{right}");
    let text = right.to_string();
    assert!(text.contains("rank 1 did not arrive"), "{text}");
    assert!(text.contains("was started as rank 1 of 3"), "{text}");
}

/// Processes of a rank that were started with other world sizes: the group of
/// the others forms all the same.
#[test]
fn second_processes_with_another_world_are_refused_alone() {
    let store = Arc::new(MemStore::new());
    let token = Token::generate().unwrap();
    let start = |rank, world| {
        let (store, options) = (store.clone(), init_options(Over::Shm, &token));
        std::thread::spawn(move || ProcessGroup::from_store(store, rank, world, options))
    };
    let first = start(0, 2);
    store.wait(&["comm/0/0/2/member/0"], PATIENCE).unwrap();
    let others = [3, 1000].map(|world| (world, start(0, world)));
    for (world, other) in others {
        let error = other.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let wrong = format!("rank 0 was started for {world} ranks");
        assert!(error.to_string().contains(&wrong), "{error}");
    }
    let second = start(1, 2);
    use_and_leave([first, second].map(|m| m.join().unwrap()).into());
}

#[test]
fn tcp_without_a_token_says_how_to_make_one() {
    // The variables may be set where the tests run; then there is a token.
    if std::env::var_os("PHALANX_TOKEN")
        .or(std::env::var_os("PHALANX_TOKEN_FILE"))
        .is_some()
    {
        return;
    }
    let error = ProcessGroup::init(options("tcp://127.0.0.1:1", 0, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("PHALANX_TOKEN_FILE"), "{error}");
    let store = Arc::new(MemStore::new());
    let error = ProcessGroup::from_store(store, 0, 2, InitOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
}

#[test]
fn a_busy_port_is_explained() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = ProcessGroup::init(InitOptions {
        token: Some(Token::generate().unwrap()),
        ..options(&format!("tcp://127.0.0.1:{port}"), 0, 2)
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    assert!(text.contains("rank 0 cannot host the store"), "{text}");
    assert!(text.contains(&port.to_string()), "{text}");
}

#[test]
fn a_missing_host_is_named_within_the_deadline() {
    let started = Instant::now();
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let error = ProcessGroup::init(InitOptions {
        token: Some(Token::generate().unwrap()),
        timeout: Duration::from_millis(300),
        ..options(&method, 1, 2)
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("was rank 0 started"), "{error}");
    assert!(started.elapsed() < SOON);
}

#[test]
fn a_rank_outside_the_world_is_a_mistake() {
    let error = ProcessGroup::init(options("file:///nowhere", 2, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("ranks are 0 to 1"), "{error}");
}
