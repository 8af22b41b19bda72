//! Prefixes, whole lines, files.

use std::io::Write;

use crate::launch::harness::{Family, one_folder};

#[test]
fn lines_carry_their_rank_and_never_mix() {
    let family = Family::new();
    let script = "i=0; while [ $i -lt 300 ]; do printf 'aaaaaaaaaaaaaaaaaaaa'; printf 'bbbbbbbbbbbbbbbbbbbb\\n'; i=$((i+1)); done; printf last";
    let done = family.run(&["launch", "--nproc-per-node", "3", "sh", "-c", script]);
    assert_eq!(done.code(), 0);
    for rank in 0..3 {
        let prefix = format!("[rank {rank}] ");
        let mine: Vec<&str> = done
            .out
            .lines()
            .filter_map(|l| l.strip_prefix(&prefix))
            .collect();
        assert_eq!(mine.len(), 301, "rank {rank}");
        assert!(
            mine[..300]
                .iter()
                .all(|l| *l == "aaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbb")
        );
        assert_eq!(mine[300], "last", "an unfinished line is finished");
    }
    assert_eq!(done.out.lines().count(), 903);
}

#[test]
fn streams_stay_apart_and_one_rank_has_no_prefix() {
    let family = Family::new();
    let done = family.run(&[
        "launch",
        "--nproc-per-node",
        "2",
        "sh",
        "-c",
        "echo out; echo err >&2",
    ]);
    assert_eq!(done.sorted(), ["[rank 0] out", "[rank 1] out"]);
    let mut err: Vec<&str> = done.err.lines().collect();
    err.sort_unstable();
    assert_eq!(err, ["[rank 0] err", "[rank 1] err"]);
    let done = family.run(&["launch", "sh", "-c", "printf 'no newline'; printf err >&2"]);
    assert_eq!(
        (done.out.as_str(), done.err.as_str()),
        ("no newline\n", "err")
    );
}

/// Rust's `eprintln!` writes the parts of a line one after the other.
#[test]
fn lines_that_are_written_in_parts_are_whole() {
    let family = Family::new();
    let script = "for i in 1 2 3 4 5 6 7 8 9; do printf 'no ' >&2; printf 'file' >&2; printf '\\n' >&2; done";
    for flags in [&["--no-prefix"][..], &[]] {
        let launch = ["launch", "--nproc-per-node", "4"];
        let done = family.run(&[&launch, flags, &["sh", "-c", script]].concat());
        assert_eq!(done.err.lines().count(), 36, "{done:#?}");
        let mut lines = done.err.lines();
        assert!(
            lines.all(|line| match flags.is_empty() {
                true => line.starts_with("[rank ") && line.ends_with("] no file"),
                false => line == "no file",
            }),
            "{done:#?}"
        );
    }
}

/// A bar is seen while it is drawn, and a question before its answer.
#[test]
fn bars_and_questions_of_several_ranks_are_seen_in_time() {
    let family = Family::new();
    let script =
        "if [ $RANK = 1 ]; then printf '\\r10%%'; sleep 2; printf '\\r20%%\\n'; fi; read a";
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    command.stdin(reader);
    let mut running = crate::launch::harness::Running::new(command);
    // It ends with an answer only.
    assert_eq!(running.line(), "[rank 1] 10%\r[rank 1] 20%");
    writer.write_all(b"a\na\n").unwrap();
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
}

#[test]
fn output_of_background_processes_is_not_lost() {
    let family = Family::new();
    let done = family.run(&["launch", "sh", "-c", "(sleep 0.2; echo late) & echo early"]);
    assert_eq!(done.code(), 0);
    assert_eq!(done.out, "early\nlate\n");
}

#[test]
fn logs_have_torchruns_layout() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().to_str().unwrap();
    let script = "echo out $RANK; echo err $RANK >&2; echo $TORCHELASTIC_ERROR_FILE";
    let args = [
        "launch",
        "--nproc-per-node",
        "2",
        "--log-dir",
        logs,
        "--rdzv-id",
        "j1",
    ];
    let done = family.run(&[&args[..], &["sh", "-c", script]].concat());
    assert_eq!(done.code(), 0);
    assert!(
        done.out.contains("[rank 1] out 1\n"),
        "shown as well: {done:#?}"
    );
    let run = one_folder(dir.path());
    let shown = format!("logs: {}\n", run.display());
    assert!(done.err.contains(&shown), "{done:#?}");
    let read = |path: &str| std::fs::read_to_string(run.join("attempt_0").join(path)).unwrap();
    assert!(read("1/stdout.log").starts_with("out 1\n"));
    assert_eq!(read("0/stderr.log"), "err 0\n");
    let error_file = format!("{}/attempt_0/0/error.json\n", run.display());
    assert!(read("0/stdout.log").ends_with(&error_file));
    let name = run.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("j1_"), "{name}");
    std::fs::remove_dir_all(run).unwrap();

    let done = family.run(
        &[
            &args[..6],
            &["j2", "--redirects", "1:3", "sh", "-c", script],
        ]
        .concat(),
    );
    assert!(
        done.out.contains("[rank 0] out 0\n") && !done.out.contains("rank 1"),
        "{done:#?}"
    );
    assert!(done.err.ends_with("\n[rank 0] err 0\n"), "{done:#?}");
    let run = one_folder(dir.path());
    assert!(run.join("attempt_0/1/stderr.log").exists());
    assert!(!run.join("attempt_0/0/stderr.log").exists());
}

/// What the run before has left is neither overwritten nor taken for this run's.
#[test]
fn a_run_with_the_name_of_another_has_a_folder_of_its_own() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().to_str().unwrap();
    let run = |script: &str| {
        let launch = ["launch", "--log-dir", logs, "--rdzv-id", "same"];
        family.run(&[&launch[..], &["sh", "-c", script]].concat())
    };
    let first = run(
        r#"echo first; echo '{"phalanx_exit_code":2,"message":"stale"}' >$TORCHELASTIC_ERROR_FILE; exit 2"#,
    );
    assert_eq!(first.last_error(), "error: stale\n");
    let folder = one_folder(dir.path());
    let second = run("kill -9 $$");
    assert_eq!(second.code(), 3, "{second:#?}");
    assert!(!second.err.contains("stale"), "{second:#?}");
    let again = run("exit 2");
    assert!(!again.err.contains("stale"), "{again:#?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    let log = std::fs::read_to_string(folder.join("attempt_0/0/stdout.log"));
    assert_eq!(log.unwrap(), "first\n");
}

#[test]
fn nothing_is_written_without_a_log_folder() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let mut command =
        family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", "exit $RANK"]);
    command.current_dir(dir.path()).env("TMPDIR", dir.path());
    assert_eq!(
        crate::launch::harness::Running::new(command).wait().code(),
        1
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn output_that_nobody_reads_any_more_is_told_once() {
    let family = Family::new();
    let script = "yes | head -n 100000; echo done >&2";
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    let mut child = command.spawn().unwrap();
    // As `head` does.
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let told = err.matches("standard output is closed: ").count();
    assert_eq!(told, 1, "{err}");
    assert_eq!(err.matches("done").count(), 2, "{err}");
}
