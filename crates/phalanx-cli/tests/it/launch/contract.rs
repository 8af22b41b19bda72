//! What a rank finds in its environment.

use std::collections::BTreeMap;
use std::io::{Seek, Write};
use std::process::Stdio;

use crate::launch::harness::{Family, REACH_MASTER};

/// `NAME=value` lines of one rank's `env`, from prefixed output.
fn variables(out: &str, rank: usize) -> BTreeMap<String, String> {
    let prefix = format!("[rank {rank}] ");
    out.lines()
        .filter_map(|line| line.strip_prefix(&prefix)?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn ranks_get_torchruns_variables_and_no_secret() {
    let family = Family::new();
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "env"]);
    let secret = "ab".repeat(32);
    command.env("PHALANX_TOKEN", &secret);
    let running = crate::launch::harness::Running::new(command);
    let pid = running.pid().as_raw_nonzero();
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
    let fixture: BTreeMap<String, Vec<BTreeMap<String, String>>> = serde_json::from_str(
        include_str!("../../../../phalanx-launch/tests/fixtures/torchrun.json"),
    )
    .unwrap();
    let mut ports = Vec::new();
    for (rank, torchrun) in fixture["one node, 2 processes"].iter().enumerate() {
        let ours = variables(&done.out, rank);
        for (name, value) in torchrun {
            let mine = ours
                .get(name)
                .unwrap_or_else(|| panic!("{name} is missing"));
            // Addresses, names and paths are each launcher's own, and nothing
            // listens at MASTER_PORT that PyTorch could talk to.
            if ![
                "TORCHELASTIC_USE_AGENT_STORE",
                "MASTER_ADDR",
                "MASTER_PORT",
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_ERROR_FILE",
            ]
            .contains(&name.as_str())
            {
                assert_eq!(mine, value, "{name}");
            }
        }
        assert_eq!(ours["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(ours["TORCHELASTIC_USE_AGENT_STORE"], "False");
        let store = ours["PHALANX_STORE"].strip_prefix("127.0.0.1:").unwrap();
        assert!(store.parse::<u16>().is_ok_and(|port| port > 0), "{store}");
        assert_ne!(store, ours["MASTER_PORT"]);
        let launcher = format!("/proc/{pid}/fd/");
        assert!(ours["PHALANX_TOKEN_FILE"].starts_with(&launcher));
        assert_eq!(ours["TORCHELASTIC_RUN_ID"].len(), 36);
        ports.push(ours["MASTER_PORT"].clone());
    }
    assert_eq!(ports[0], ports[1]);
    assert!(
        !done.out.contains(&secret),
        "the token is in the environment"
    );
}

#[test]
fn the_token_is_read_as_a_private_file_and_seen_by_nobody_else() {
    let family = Family::new();
    // Twice: each opening reads from the start.
    let script = "cat $PHALANX_TOKEN_FILE $PHALANX_TOKEN_FILE; stat -L -c %a $PHALANX_TOKEN_FILE; \
                  cat /proc/$PPID/cmdline /proc/self/cmdline | tr '\\0' ' '; echo";
    let done = family.run(&["launch", "sh", "-c", script]);
    assert_eq!(done.code(), 0, "{done:#?}");
    let lines: Vec<&str> = done.out.lines().collect();
    assert_eq!(lines[0].len(), 64, "{done:#?}");
    assert_eq!(lines[0], lines[1]);
    assert_eq!(lines[2], "600");
    assert!(!lines[3].contains(lines[0]), "{done:#?}");
}

/// Python's `subprocess` closes what a child would inherit, and another file gets the number.
#[test]
fn what_a_rank_starts_needs_no_inherited_descriptor() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("own");
    let exe = env!("CARGO_BIN_EXE_phalanx");
    // A file of the program's own for every number that a variable could name.
    let script = format!(
        "stat -c '%a' $(dirname $TORCHELASTIC_ERROR_FILE)/../.. >$0.$RANK; \
         for n in $(seq 3 40); do eval \"exec $n<>$0\"; done; echo precious >$0; \
         {exe} bench all-reduce --bytes 4KiB --iters 5 >/dev/null || exit 5; \
         echo '{{\"message\":\"boom\"}}' >$TORCHELASTIC_ERROR_FILE; cat $0; exit 7"
    );
    let launch = ["launch", "--nproc-per-node", "2", "--no-prefix"];
    let path = own.to_str().unwrap();
    let mut command = family.command(&[&launch[..], &["bash", "-c", &script, path]].concat());
    command.env("TMPDIR", dir.path());
    let done = crate::launch::harness::Running::new(command).wait();
    assert_eq!(done.code(), 1, "{done:#?}");
    assert!(done.last_error().contains("said    boom"), "{done:#?}");
    assert_eq!(std::fs::read_to_string(&own).unwrap(), "precious\n");
    for rank in 0..2 {
        let seen = std::fs::read_to_string(format!("{path}.{rank}")).unwrap();
        assert_eq!(seen, "700\n", "a private folder");
    }
    // The private folder is gone.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

/// As in a container: the launcher's descriptors cannot be opened there by its process id.
#[test]
fn ranks_in_namespaces_of_their_own_read_the_token() {
    let family = Family::new();
    let may = |flags: &[&str]| {
        let output = std::process::Command::new("unshare")
            .args(flags)
            .arg("true")
            .output();
        output.is_ok_and(|output| output.status.success())
    };
    let bench = [
        env!("CARGO_BIN_EXE_phalanx"),
        "bench",
        "all-reduce",
        "--bytes",
        "4KiB",
        "--iters",
        "5",
    ];
    for flags in [&["-r"][..], &["-r", "-p", "-f", "--mount-proc"]] {
        if !may(flags) {
            continue; // the system does not let us
        }
        let launch = ["launch", "--nproc-per-node", "2", "--", "unshare"];
        let done = family.run(&[&launch[..], flags, &bench].concat());
        assert_eq!(done.code(), 0, "{flags:?}: {done:#?}");
    }
}

#[test]
fn one_rank_keeps_all_threads_and_set_threads_stay() {
    let family = Family::new();
    let done = family.run(&["launch", "sh", "-c", "echo ${OMP_NUM_THREADS-unset}"]);
    assert_eq!(done.out, "unset\n");
    let mut command = family.command(&[
        "launch",
        "--nproc-per-node",
        "2",
        "--no-prefix",
        "sh",
        "-c",
        "echo $OMP_NUM_THREADS",
    ]);
    command.env("OMP_NUM_THREADS", "7");
    assert_eq!(
        crate::launch::harness::Running::new(command).wait().out,
        "7\n7\n"
    );
}

#[test]
fn ranks_divide_the_cores_among_their_rayon_threads() {
    let cores = std::thread::available_parallelism().expect("cores").get();
    let family = Family::new();
    let print = ["sh", "-c", "echo ${RAYON_NUM_THREADS-unset}"];
    let of = |ranks: &str, set: Option<&str>| {
        let flags = ["launch", "--nproc-per-node", ranks, "--no-prefix"];
        let mut command = family.command(&[&flags[..], &print].concat());
        command.env_remove("RAYON_NUM_THREADS");
        set.map(|threads| command.env("RAYON_NUM_THREADS", threads));
        crate::launch::harness::Running::new(command).wait().out
    };
    assert_eq!(of("1", None), "unset\n");
    assert_eq!(of("2", None), format!("{0}\n{0}\n", (cores / 2).max(1)));
    assert_eq!(of("2", Some("7")), "7\n7\n");
}

#[test]
fn torchruns_own_input_variables_are_read() {
    let family = Family::new();
    let mut command = family.command(&[
        "launch",
        "--no-prefix",
        "sh",
        "-c",
        "echo $RANK $WORLD_SIZE $TORCHELASTIC_RUN_ID",
    ]);
    command
        .env("PET_NPROC_PER_NODE", "3")
        .env("PET_NNODES", "1")
        .env("PET_RDZV_ID", "job7");
    let done = crate::launch::harness::Running::new(command).wait();
    assert_eq!(done.sorted(), ["0 3 job7", "1 3 job7", "2 3 job7"]);
}

#[test]
fn ranks_lead_their_own_sessions_and_read_what_the_launcher_does() {
    let family = Family::new();
    // Fields 5 and 6 of stat are the process group and the session.
    let script = "cut -d' ' -f1,5,6 /proc/$$/stat; cat; echo end";
    let done = family.run(&["launch", "sh", "-c", script]);
    let first: Vec<&str> = done.out.lines().next().unwrap().split(' ').collect();
    assert!(first[0] == first[1] && first[1] == first[2], "{done:#?}");
    assert!(done.out.ends_with("end\n"), "stdin is empty: {done:#?}");
    // A pipe, and a file from where it was read to.
    let read = |flags: &[&str], script: &str, input: Stdio| {
        let launch = ["launch", "--nproc-per-node"];
        let mut command = family.command(&[&launch, flags, &["sh", "-c", script]].concat());
        command.stdin(input);
        crate::launch::harness::Running::new(command).wait()
    };
    let piped = |text: &str| {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(text.as_bytes()).unwrap();
        Stdio::from(reader)
    };
    let done = read(&["1"], "read a; echo $a; cat", piped("one\ntwo\nthree\n"));
    assert_eq!((done.code(), &*done.out), (0, "one\ntwo\nthree\n"));
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"seen\nnew\n").unwrap();
    file.seek(std::io::SeekFrom::Start(5)).unwrap();
    let done = read(&["1"], "cat", Stdio::from(file));
    assert_eq!((done.code(), &*done.out), (0, "new\n"));
    // One rank of several, and what is left for the next attempt.
    let script = "[ $RANK = 0 ] || read a; echo $a";
    let done = read(&["2", "--no-prefix"], script, piped("for rank 1\n"));
    assert_eq!((done.code(), done.sorted()), (0, vec!["", "for rank 1"]));
    let script = "read a; echo $a; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let done = read(&["1", "--max-restarts", "1"], script, piped("one\ntwo\n"));
    assert_eq!((done.code(), &*done.out), (0, "one\ntwo\n"), "{done:#?}");
    // The guard has a pipe of its own, and no rank has it.
    let script = "for file in /proc/$$/fd/*; do readlink $file; done";
    let done = read(&["1"], script, piped(""));
    // Others came with the test.
    let own = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let own: Vec<_> = own.filter_map(|fd| fd.path().read_link().ok()).collect();
    let pipes = done.out.lines().filter(|file| file.starts_with("pipe:"));
    let pipes = pipes.filter(|file| !own.iter().any(|own| own.as_os_str() == *file));
    assert_eq!(pipes.count(), 3, "{done:#?}");
    family.assert_gone_soon();
}

#[test]
fn the_store_listens_where_the_variable_says() {
    let family = Family::new();
    let script = "exec 3<>/dev/tcp/${PHALANX_STORE/:/\\/} && echo connected";
    let done = family.run(&[
        "launch",
        "--nproc-per-node",
        "2",
        "--no-prefix",
        "bash",
        "-c",
        script,
    ]);
    assert_eq!(done.out, "connected\nconnected\n", "{done:#?}");
}

/// As rank 0 of a PyTorch program does, and its others after it.
#[test]
fn rank_0_can_listen_at_master_port_and_the_others_reach_it() {
    let family = Family::new();
    let mut running = family.start(&[
        "launch",
        "--nproc-per-node",
        "2",
        "--no-prefix",
        "bash",
        "-c",
        REACH_MASTER,
    ]);
    let port: u16 = running.line().parse().unwrap();
    let _rank_0 = std::net::TcpListener::bind(("0.0.0.0", port)).unwrap();
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
    assert_eq!(done.out.matches("reached").count(), 2, "{done:#?}");
}

#[test]
fn a_given_port_is_used_and_an_occupied_one_is_named() {
    let family = Family::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let done = family.run(&["launch", "--master-port", &port, "sh", "-c", "exit 0"]);
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(
        done.err
            .starts_with(&format!("error: cannot listen on --master-port {port}: ")),
        "{done:#?}"
    );
    assert!(done.err.contains("--master-port"), "{done:#?}");
    drop(taken);
    let done = family.run(&[
        "launch",
        "--master_port",
        &port,
        "sh",
        "-c",
        "echo $MASTER_PORT $TORCHELASTIC_RUN_ID",
    ]);
    assert_eq!(done.out, format!("{port} none\n"), "{done:#?}");
}
