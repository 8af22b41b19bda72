//! torchrun's command lines as they are typed.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::Signal;

use crate::launch::harness::{Done, Family, Running, one_folder};
use crate::support::free_port;

/// A folder with a token and Python scripts, and the processes started in it.
struct Place {
    family: Family,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Place {
            family: Family::new(),
            dir: tempfile::tempdir().unwrap(),
        };
        let done = place.run(&["token", "--out", "job.token"]);
        assert_eq!(done.code(), 0, "{done:#?}");
        place
    }

    /// Writes a file; `sh` scripts stand for Python where its name is in `PYTHON_EXEC`.
    fn write(&self, name: &str, text: &str, mode: u32) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn start_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Running {
        let mut command = self.family.command(args);
        command.current_dir(self.dir.path());
        command.env("PHALANX_TOKEN_FILE", self.dir.path().join("job.token"));
        command.env("TMPDIR", self.dir.path());
        command.envs(variables.iter().copied());
        Running::new(command)
    }

    fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Done {
        self.start_with(args, variables).wait()
    }

    fn run(&self, args: &[&str]) -> Done {
        self.run_with(args, &[])
    }
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().collect()
}

#[test]
fn a_script_is_run_by_python_unless_it_is_meant_as_it_is() {
    let place = Place::new();
    // Stands for an interpreter, and shows how it was started.
    let python = place.write("python", "#!/bin/sh\necho python \"$@\"\n", 0o755);
    let set = [("PYTHON_EXEC", python.as_str())];
    place.write("plain.py", "print()\n", 0o644);
    place.write("own.py", "#!/bin/sh\necho own \"$@\"\n", 0o755);
    place.write("program", "#!/bin/sh\necho program \"$@\"\n", 0o755);
    for (args, want) in [
        (
            &["plain.py", "--a_b", "--", "c"][..],
            "python -u plain.py --a_b -- c",
        ),
        (&["own.py", "-m"], "python -u own.py -m"),
        (&["--no-python", "./own.py", "-m"], "own -m"),
        (&["--", "./own.py", "-m"], "own -m"),
        (&["./program", "x.py"], "program x.py"),
        (&["--run-path", "program", "1"], "python -u program 1"),
        (&["-m", "pkg.train", "-m"], "python -u -m pkg.train -m"),
        (&["--module", "--", "pkg.train"], "python -u -m pkg.train"),
    ] {
        let done = place.run_with(&[&["launch"], args].concat(), &set);
        assert_eq!(done.code(), 0, "{args:?}: {done:#?}");
        assert_eq!(done.out, format!("{want}\n"), "{args:?}");
    }
    let by_variable = [set[0], ("PET_MODULE", "1")];
    let done = place.run_with(&["launch", "pkg"], &by_variable);
    assert_eq!(done.out, "python -u -m pkg\n", "{done:#?}");
    for (args, want) in [
        (&["-m", "--no-python", "x"][..], "--module and --no-python"),
        (&["none.py"], "cannot read none.py"),
        (
            &["--", "./plain.py"],
            "./plain.py is not an executable file",
        ),
    ] {
        let done = place.run_with(&[&["launch"], args].concat(), &set);
        assert_eq!((done.code(), done.out.as_str()), (2, ""), "{done:#?}");
        assert!(done.err.contains(want), "{want}: {done:#?}");
    }
    let nowhere = [("PYTHON_EXEC", "no-such-python")];
    let done = place.run_with(&["launch", "plain.py"], &nowhere);
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(done.err.contains("PYTHON_EXEC"), "{done:#?}");
}

#[test]
fn files_without_a_log_folder_are_in_a_temporary_one() {
    let place = Place::new();
    let script = "echo out $RANK; echo err $RANK >&2";
    for flags in [&["-t", "3"][..], &["-r3"], &["-t=1", "-r", "2"]] {
        let done = place.run(&[&["launch"], flags, &["sh", "-c", script]].concat());
        assert_eq!(done.code(), 0, "{done:#?}");
        let begin = format!("logs: {}/phalanx-logs-", place.dir.path().display());
        let line = done.err.lines().find(|line| line.starts_with(&begin));
        let folder = line.and_then(|line| line.strip_prefix("logs: "));
        let folder = Path::new(folder.unwrap_or_else(|| panic!("{done:#?}")));
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(read("attempt_0/0/stdout.log"), "out 0\n", "{flags:?}");
        assert_eq!(read("attempt_0/0/stderr.log"), "err 0\n", "{flags:?}");
        let mode = folder.parent().unwrap().metadata().unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o700);
        assert_eq!(
            done.out.is_empty(),
            flags == ["-r3"],
            "{flags:?}: {done:#?}"
        );
    }
    // No ranks, no logs: nobody answers there.
    let place = Place::new();
    let second = "launch -r 3 --nnodes 2 --node-rank 1 --rdzv-timeout 1 --master-addr 127.0.0.1 --master-port";
    let port = free_port().to_string();
    let args: Vec<&str> = second.split(' ').chain([port.as_str(), "true"]).collect();
    let done = place.run(&args);
    assert_eq!(done.code(), 4, "{done:#?}");
    assert!(
        one_folder(place.dir.path()).ends_with("job.token"),
        "{done:#?}"
    );
}

#[test]
fn only_filtered_ranks_are_shown_and_files_have_all() {
    let place = Place::new();
    let script = "echo an apple of $RANK; echo a pear; echo error, $RANK >&2";
    let args = [
        "launch",
        "--nproc-per-node=3",
        "--local-ranks-filter=0,2",
        "--log-dir=logs",
        "--duplicate-stdout-filters=apple",
        "--duplicate-stderr-filters=error,,",
        "--role=part",
        "--log-line-prefix-template=<${role_name} ${local_rank}/${rank}> ",
        "sh",
        "-c",
        script,
    ];
    let done = place.run(&args);
    assert_eq!(done.code(), 0, "{done:#?}");
    assert_eq!(
        done.sorted(),
        [
            "<part 0/0> a pear",
            "<part 0/0> an apple of 0",
            "<part 2/2> a pear",
            "<part 2/2> an apple of 2"
        ]
    );
    assert!(!done.err.contains("error, 1"), "{done:#?}");
    let attempt = one_folder(&place.dir.path().join("logs")).join("attempt_0");
    let read = |name: &str| std::fs::read_to_string(attempt.join(name)).unwrap();
    assert_eq!(read("1/stdout.log"), "an apple of 1\na pear\n");
    assert_eq!(read("1/stderr.log"), "error, 1\n");
    for (file, text) in [
        ("filtered_stdout.log", "an apple of"),
        ("filtered_stderr.log", "error,"),
    ] {
        let text_of = read(file);
        let mut all = lines(&text_of);
        all.sort_unstable();
        let want = [0, 1, 2].map(|rank| format!("<part {rank}/{rank}> {text} {rank}"));
        assert_eq!(all, want, "{file}");
    }
}

#[test]
fn each_rank_is_local_rank_0_with_a_device_of_its_own() {
    let place = Place::new();
    let script = "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let args = [
        "launch",
        "--nproc-per-node=2",
        "--virtual-local-rank",
        "--no-prefix",
    ];
    let args = [&args[..], &["sh", "-c", script]].concat();
    let done = place.run(&args);
    assert_eq!(done.sorted(), ["0 0 0", "1 0 1"], "{done:#?}");
    let done = place.run_with(&args, &[("CUDA_VISIBLE_DEVICES", "5,7")]);
    assert_eq!(done.sorted(), ["0 0 5", "1 0 7"], "{done:#?}");
    let done = place.run_with(&args, &[("CUDA_VISIBLE_DEVICES", "5")]);
    assert_eq!((done.code(), done.out.as_str()), (2, ""), "{done:#?}");
}

#[test]
fn ranks_are_bound_to_processors() {
    let place = Place::new();
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = |status: &str| {
        let line = status.lines().find(|l| l.starts_with("Cpus_allowed_list:"));
        line.unwrap().to_owned()
    };
    let show = ["grep", "Cpus_allowed_list:", "/proc/self/status"];
    let run = |mode: &str, ranks: &str| {
        let args = [
            "launch",
            "--numa-binding",
            mode,
            "--no-prefix",
            "--nproc-per-node",
            ranks,
        ];
        place.run(&[&args[..], &show].concat())
    };
    if !Path::new("/sys/devices/system/node/online").exists() {
        let done = run("node", "1");
        assert_eq!(done.code(), 2, "{done:#?}");
        return;
    }
    let numa = std::fs::read_to_string("/sys/devices/system/node/online").unwrap();
    if numa.trim() == "0" {
        // The only NUMA node has all processors.
        assert_eq!(run("node", "1").out.trim_end(), list(&own));
    }
    for mode in ["exclusive", "near"] {
        let done = run(mode, "1");
        assert_eq!(done.code(), 2, "{done:#?}");
        assert!(done.err.contains("numactl"), "{done:#?}");
    }
}

#[test]
fn a_listed_signal_ends_the_job_and_reaches_the_ranks() {
    let place = Place::new();
    let script = "trap 'echo saved; exit 0' USR1; echo $TORCHELASTIC_SIGNALS_TO_HANDLE; while :; do sleep 0.05; done";
    let args = [
        "launch",
        "--signals-to-handle",
        "SIGTERM,SIGUSR1",
        "--shutdown-timeout=60",
    ];
    let mut job = place.start_with(&[&args[..], &["bash", "-c", script]].concat(), &[]);
    assert_eq!(job.line(), "SIGTERM,SIGUSR1");
    job.signal(Signal::USR1);
    let done = job.wait();
    assert_eq!(
        (done.code(), done.out.as_str()),
        (130, "SIGTERM,SIGUSR1\nsaved\n"),
        "{done:#?}"
    );
    assert!(done.last_error().contains("SIGUSR1"), "{done:#?}");
    // One that is not listed ends the launcher, and its guard ends the ranks.
    let job_of = |script: &str| {
        let args = [
            "launch",
            "--signals-to-handle",
            "SIGTERM",
            "bash",
            "-c",
            script,
        ];
        place.start_with(&args, &[])
    };
    let mut job = job_of("echo up; exec sleep 50");
    job.line();
    job.signal(Signal::HUP);
    let done = job.wait();
    assert_eq!(done.code(), -1, "{done:#?}");
    place.family.assert_gone_soon();
}

#[test]
fn what_is_wrong_is_named_with_what_is_known() {
    let place = Place::new();
    for (flags, want) in [
        (
            &["--rdzv-conf", "tiemout=3"][..],
            "there is no key tiemout; known are timeout",
        ),
        (
            &["--signals-to-handle", "SIGFOO"],
            "there is no signal SIGFOO",
        ),
        (
            &["--local-ranks-filter", "1"],
            "--local-ranks-filter cannot be \"1\"",
        ),
        (&["--logs-specs", "mine"], "--logs-specs cannot be \"mine\""),
        (&["--event-log-handler", "console"], "only null"),
        (
            &["--nproc-per-node", "gpus"],
            "--nproc-per-node cannot be \"gpus\"",
        ),
        (&["--nnodes", "4:1"], "--nnodes cannot be \"4:1\""),
        (&["--nnodes", "0:2"], "--nnodes cannot be \"0:2\""),
        (&["--nnodes", "1:4"], "--nnodes 1:4 requires --master-addr"),
    ] {
        let done = place.run(&[&["launch"], flags, &["echo", "ran"]].concat());
        assert_eq!((done.code(), done.out.as_str()), (2, ""), "{done:#?}");
        assert!(done.err.contains(want), "{want}: {done:#?}");
    }
}

/// torchrun's line for several nodes, the same on each.
struct Nodes {
    place: Place,
    endpoint: String,
}

impl Nodes {
    fn new(host: &str) -> Self {
        Nodes {
            place: Place::new(),
            endpoint: format!("{host}:{}", free_port()),
        }
    }

    fn start(&self, nodes: &str, more: &[&str], script: &str) -> Running {
        let args = [
            "launch",
            "--nnodes",
            nodes,
            "--nproc-per-node",
            "2",
            "--rdzv-id",
            "7",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            &self.endpoint,
        ];
        let args = [&args[..], more, &["--no-prefix", "sh", "-c", script]].concat();
        self.place.start_with(&args, &[])
    }
}

#[test]
fn the_same_line_on_every_node_makes_one_world() {
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK on $GROUP_RANK of $GROUP_WORLD_SIZE at $MASTER_ADDR";
    for (host, master) in [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("localhost", "localhost"),
    ] {
        let job = Nodes::new(host);
        let all: Vec<Running> = (0..3).map(|_| job.start("3", &[], script)).collect();
        let all: Vec<Done> = all.into_iter().map(Running::wait).collect();
        assert!(all.iter().all(|done| done.code() == 0), "{all:#?}");
        let mut got: Vec<&str> = all.iter().flat_map(|done| done.out.lines()).collect();
        got.sort_unstable();
        let want: Vec<String> = (0..6)
            .map(|rank| format!("{rank} of 6, {} on {} of 3 at {master}", rank % 2, rank / 2))
            .collect();
        assert_eq!(got, want, "{host}");
        // Each launcher has the ranks of one node.
        for done in &all {
            let nodes: Vec<&str> = done
                .out
                .lines()
                .map(|l| l.split(' ').nth(5).unwrap())
                .collect();
            assert_eq!(nodes[0], nodes[1], "{done:#?}");
        }
    }
}

#[test]
fn the_host_of_the_endpoint_may_be_chosen_and_is_node_0() {
    let job = Nodes::new("127.0.0.1");
    let script = "echo $GROUP_RANK";
    let b = job.start("2", &["--rdzv-conf", "is_host=false"], script);
    let a = job.start("2", &["--rdzv-conf=is_host=true,join_timeout=60"], script);
    let (a, b) = (a.wait(), b.wait());
    assert_eq!(
        (a.out.as_str(), b.out.as_str()),
        ("0\n0\n", "1\n1\n"),
        "{a:#?} {b:#?}"
    );
    // Nobody hosts the store.
    let job = Nodes::new("127.0.0.1");
    let conf = "--rdzv-conf=is_host=false,join_timeout=1";
    let done = job.start("2", &[conf], "echo never").wait();
    assert_eq!((done.code(), done.out.as_str()), (4, ""), "{done:#?}");
}

#[test]
fn a_launcher_too_many_is_refused_and_harms_nobody() {
    let job = Nodes::new("127.0.0.1");
    let script = "until [ -e go ]; do sleep 0.05; done; echo done";
    let all: Vec<Running> = (0..2)
        .map(|_| job.start("2", &[], &format!("echo up; {script}")))
        .collect();
    let mut all: Vec<Running> = all;
    for one in &mut all {
        one.lines(2);
    }
    let more = job.start("2", &[], "echo never").wait();
    assert_eq!((more.code(), more.out.as_str()), (2, ""), "{more:#?}");
    assert!(more.err.contains("has its 2 nodes already"), "{more:#?}");
    std::fs::write(job.place.dir.path().join("go"), "").unwrap();
    for done in all.into_iter().map(Running::wait) {
        assert_eq!(
            (done.code(), done.out.as_str()),
            (0, "up\nup\ndone\ndone\n"),
            "{done:#?}"
        );
    }
}
