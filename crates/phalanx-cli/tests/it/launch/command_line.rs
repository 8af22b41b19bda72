//! What can be typed wrongly, and the first-minute commands.

use crate::launch::harness::{Family, Running};
use std::os::unix::fs::PermissionsExt;

#[test]
fn version_and_help_go_to_stdout() {
    let family = Family::new();
    let done = family.run(&["--version"]);
    assert_eq!(
        (done.code(), done.out.as_str()),
        (0, concat!("phalanx ", env!("CARGO_PKG_VERSION"), "\n"))
    );
    let done = family.run(&["launch", "--help"]);
    assert_eq!(done.code(), 0);
    assert!(done.out.contains("--nproc-per-node"), "{done:#?}");
    assert!(!done.out.contains("exec-child"));
}

#[test]
fn unknown_words_are_usage_errors_with_a_suggestion() {
    let family = Family::new();
    for (args, want) in [
        (
            &["lunch", "sh"][..],
            "error: unknown command \"lunch\"; did you mean \"launch\"?",
        ),
        (
            &["launch", "--nproc-per-nodes", "2", "sh"],
            "did you mean \"--nproc-per-node\"?",
        ),
        (
            &["launch", "--master_prot", "2", "sh"],
            "did you mean \"--master-port\"?",
        ),
        (&["launch"], "error: missing PROGRAM"),
        (
            &["launch", "--nproc-per-node", "two", "sh"],
            "--nproc-per-node cannot be \"two\"",
        ),
        (
            &["launch", "--nnodes", "4:1", "sh"],
            "the smaller one first",
        ),
        (
            &["launch", "--nnodes", "2", "sh"],
            "--nnodes 2 requires --node-rank, the number of this node",
        ),
        (
            &["launch", "no-such-program-here"],
            "no program \"no-such-program-here\" in PATH",
        ),
        (&["token"], "--out"),
    ] {
        let done = family.run(args);
        assert_eq!(done.code(), 2, "{done:#?}");
        assert!(
            done.err.starts_with("error: ") && done.err.contains(want),
            "{want}: {done:#?}"
        );
        assert_eq!(done.out, "");
    }
}

/// What engines set that start one process on each of two nodes, without what would be needed to
/// follow them: the variables, and a part of what to type instead.
const OF_TWO_NODES: [(&[(&str, &str)], &str); 5] = [
    (
        &[("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
        "--nnodes \"$WORLD_SIZE\"",
    ),
    (
        &[
            ("SKYPILOT_NUM_NODES", "2"),
            ("SKYPILOT_NODE_RANK", "0"),
            ("SKYPILOT_NODE_IPS", "10.0.0.1"),
        ],
        "--nnodes \"$SKYPILOT_NUM_NODES\"",
    ),
    (
        &[("VC_WORKER_NUM", "2"), ("VC_WORKER_HOSTS", "a,b")],
        "--nnodes \"$VC_WORKER_NUM\"",
    ),
    (&[("JOB_COMPLETION_INDEX", "0")], "--nnodes PODS"),
    (
        &[
            ("SLURM_JOB_NUM_NODES", "2"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_NODELIST", "a[1-2]"),
        ],
        "srun --ntasks-per-node=1 phalanx launch",
    ),
];

#[test]
fn a_launch_on_one_of_several_nodes_is_refused_unless_it_is_meant() {
    let family = Family::new();
    for (variables, instead) in OF_TWO_NODES {
        let run = |flag: Option<&str>| {
            let flag = flag.into_iter();
            let args: Vec<&str> = ["launch"]
                .into_iter()
                .chain(flag)
                .chain(["echo", "ran"])
                .collect();
            let mut command = family.command(&args);
            command.envs(variables.iter().copied());
            Running::new(command).wait()
        };
        let done = run(None);
        assert_eq!((done.code(), done.out.as_str()), (2, ""), "{done:#?}");
        let (name, value) = variables[0];
        for words in [format!("{name}={value}"), instead.to_owned()] {
            assert!(done.err.contains(&words), "{words}: {done:#?}");
        }
        let done = run(Some("--standalone"));
        assert_eq!((done.code(), done.out.as_str()), (0, "ran\n"), "{done:#?}");
    }
}

#[test]
fn underscores_work_like_dashes() {
    let family = Family::new();
    let done = family.run(&[
        "launch",
        "--nproc_per_node=2",
        "--no_prefix",
        "sh",
        "-c",
        "echo $0 $RANK",
        "--a_b",
    ]);
    assert_eq!(done.code(), 0, "{done:#?}");
    assert_eq!(done.sorted(), ["--a_b 0", "--a_b 1"]);
}

#[test]
fn a_closed_stdout_is_no_failure() {
    let family = Family::new();
    for args in [
        "phalanx --help",
        "phalanx launch sh -c 'for i in 1 2 3; do echo $i; sleep 0.05; done'",
    ] {
        let exe = env!("CARGO_BIN_EXE_phalanx");
        let script = format!(
            "{{ {} ; echo code $? >&2; }} | true",
            args.replacen("phalanx", exe, 1)
        );
        let mut command = family.command(&[]);
        let envs: Vec<_> = command
            .get_envs()
            .filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned())))
            .collect();
        command = std::process::Command::new("sh");
        command.args(["-c", &script]).envs(envs);
        let output = command.output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        let told =
            "standard output is closed: the ranks continue, and what they write there is lost\n";
        assert_eq!(err.replace(told, ""), "code 0\n");
    }
}

#[test]
fn a_token_is_written_once_and_privately() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("job.token");
    let args = ["token", "--out", path.to_str().unwrap()];
    assert_eq!(family.run(&args).code(), 0);
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.trim().len(), 64);
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
        0o600
    );
    let again = family.run(&args);
    assert_eq!(again.code(), 2);
    assert!(again.err.contains("exists"), "{again:#?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
}

/// What help shows must be what the parser takes.
#[test]
fn defaults_of_lists_are_shown_as_they_are_typed() {
    let family = Family::new();
    for (command, shown) in [
        (&["train", "mnist", "--help"][..], "[default: 0.25,0.5]"),
        (&["compare", "--help"], "[default: 1,2]"),
    ] {
        let done = family.run(command);
        assert_eq!(done.code(), 0, "{done:#?}");
        assert!(done.out.contains(shown), "{command:?}: {done:#?}");
    }
}

#[test]
fn torchruns_flags_that_change_nothing_here_are_taken() {
    let family = Family::new();
    let flags = ["--monitor_interval=0.1", "--start-method", "spawn"];
    let done = family.run(&[&["launch"], &flags[..], &["sh", "-c", "echo $RANK"]].concat());
    assert_eq!((done.code(), done.out.as_str()), (0, "0\n"), "{done:#?}");
}

#[test]
fn the_programs_name_is_the_same_on_all_pages() {
    use std::os::unix::process::CommandExt;
    for (page, want) in [
        (&["--help"][..], "Usage: phalanx <COMMAND>"),
        (&["train", "mnist", "--help"], "Usage: phalanx train mnist "),
        (&["launch", "--help"], "Usage: phalanx launch "),
        (&["train", "--help"], "Usage: phalanx train "),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_phalanx"));
        let output = command.arg0("px").args(page).output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(out.contains(want), "{want}: {out}");
    }
}
