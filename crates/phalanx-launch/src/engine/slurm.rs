//! Slurm without PMI: task 0 of a step sends a private file to every node of the step with `sbcast`, which Slurm
//! authenticates, and which writes as the job's user.
//!
//! The file lies in `/tmp`, as `sbcast` makes no folders and nodes may differ in `TMPDIR`. Its name has the
//! user, the job, the step and the number of restarts. `sbcast` creates it with mode 0700 at most, and never
//! writes into one that exists; readers take it from their own user only.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind as IoKind, Read};
use std::net::{IpAddr, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use phalanx_comm::PortRange;
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{WaitNotice, by_hand, child};
use crate::error::{Error, ErrorKind, Result};
use crate::place::{Env, Process, is_set, text};
use crate::program::in_path;
use crate::{system, token};

/// Where every node has a folder of its own for files of all users.
const FOLDER: &str = "/tmp";

/// The tasks of a step start together, and `sbcast` takes a second on a thousand nodes: a file
/// that is not there after this time never comes.
const LIMIT: Duration = Duration::from_secs(60);

/// How long another node's copy in a shared `/tmp` may still take.
const ARRIVAL: Duration = Duration::from_secs(2);

/// How long `scontrol` may take.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// More than any offer has.
const MAX_BYTES: u64 = 1024;

/// The first port of [`port`]: above those that Linux gives to outgoing connections.
const FIRST_PORT: u16 = 61440;

/// The file on this node. The first task of the node removes it when all have met, or when this one gives up.
pub(super) struct BroadcastFile(Option<PathBuf>);

impl Drop for BroadcastFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Sends `text` (of task 0, `None` elsewhere) to all tasks of this step.
pub(super) fn broadcast(
    env: &Env,
    text: Option<&str>,
    deadline: Instant,
    mut waiting: WaitNotice,
) -> Result<(String, BroadcastFile)> {
    // Every task looks, so that none waits for a task 0 that cannot send.
    let folders = env.get("PATH").map(String::as_str);
    let Some(sbcast) = in_path("sbcast".as_ref(), folders) else {
        return Err(by_hand(Error::usage(
            "the tasks of this Slurm step have no common job token: there is no program sbcast in PATH, which \
             would carry one to every node",
        )));
    };
    let (job, step) = job_and_step(env)?;
    let path = path(env, &job, &step);
    let is_first_here = env.get("SLURM_LOCALID").is_some_and(|id| id.trim() == "0");
    let file = BroadcastFile(is_first_here.then(|| path.clone()));
    let deadline = deadline.min(Instant::now() + LIMIT);
    if let Some(text) = text {
        send(&sbcast, &format!("{job}.{step}"), text, &path, deadline)?;
    }
    loop {
        if let Some(text) = read(&path, rustix::process::geteuid().as_raw())? {
            return Ok((text, file));
        }
        if Instant::now() >= deadline {
            return Err(by_hand(
                Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "task 0 of this Slurm step did not send the job token ({} did not appear)",
                        path.display()
                    ),
                )
                .note(
                    "perhaps",
                    "task 0 failed, or this task has a /tmp of its own (a container)",
                ),
            ));
        }
        waiting.tick("task 0 of this Slurm step", deadline);
        thread::sleep(Duration::from_millis(50));
    }
}

/// The numbers of the job and of the step; they become a file name and an argument.
fn job_and_step(env: &Env) -> Result<(String, String)> {
    let number = |names: [&'static str; 2]| -> Result<String> {
        let name = names.into_iter().find(|name| is_set(env, name));
        let text = name.map_or("", |name| env[name].trim());
        match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => Ok(text.to_owned()),
            false => Err(Error::usage(format!(
                "{}={text} is not a number, so sbcast cannot send the job token",
                names[0]
            ))),
        }
    };
    Ok((
        number(["SLURM_JOB_ID", "SLURM_JOBID"])?,
        number(["SLURM_STEP_ID", "SLURM_STEPID"])?,
    ))
}

fn path(env: &Env, job: &str, step: &str) -> PathBuf {
    let restart: u32 = env
        .get("SLURM_RESTART_COUNT")
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0);
    let user = rustix::process::geteuid().as_raw();
    Path::new(FOLDER).join(format!("phalanx-{user}-{job}-{step}-{restart}"))
}

fn send(sbcast: &Path, step: &str, text: &str, path: &Path, deadline: Instant) -> Result<()> {
    // A file without a name: nothing is left if this process is killed.
    let source = token::memory_file_of(format!("{text}\n"), "the job token")?;
    let source = format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd());
    let mut command = Command::new(sbcast);
    command.args(["-p", "-j", step]).arg(source).arg(path);
    let output =
        run(command, deadline).map_err(system("cannot run sbcast, which sends the job token"))?;
    let Err(why) = output else {
        return Ok(());
    };
    // Of nodes that share /tmp, only one can create the file.
    let is_there = why.split("; ").all(|line| line.contains("File exists"));
    if is_there && has_arrived(path, text)? {
        return Ok(());
    }
    let error = Error::usage(format!(
        "Slurm's sbcast could not send the job token to every node: {why}"
    ));
    Err(by_hand(match is_there {
        true => error.note("or", format!("remove {} on every node", path.display())),
        false => error,
    }))
}

/// Whether the file is there after all, with this text.
fn has_arrived(path: &Path, text: &str) -> Result<bool> {
    let until = Instant::now() + ARRIVAL;
    loop {
        match read(path, rustix::process::geteuid().as_raw())? {
            Some(there) => return Ok(there == text),
            None if Instant::now() >= until => return Ok(false),
            None => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// The command's output, or what it printed when it failed; it is killed at the deadline.
fn run(
    command: Command,
    deadline: Instant,
) -> std::io::Result<std::result::Result<String, String>> {
    let Some(ended) = child::run(command, "", deadline, || {})? else {
        return Ok(Err("it did not end in time".to_owned()));
    };
    if ended.status.success() {
        return Ok(Ok(ended.out));
    }
    let lines: Vec<&str> = ended.err.lines().take(3).map(str::trim).collect();
    Ok(Err(match lines.is_empty() {
        true => format!("it ended with {}", ended.status),
        false => lines.join("; "),
    }))
}

/// The line that task 0 has sent; `None`: not all of it has come.
fn read(path: &Path, user: u32) -> Result<Option<String>> {
    let shown = path.display();
    let failed = |error| {
        Error::usage(format!(
            "cannot read {shown}, in which task 0 sends the job token"
        ))
        .caused_by(error)
    };
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let file: File = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == IoKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let about = file.metadata().map_err(failed)?;
    if !about.is_file() || about.uid() != user || about.mode() & 0o077 != 0 {
        return Err(by_hand(Error::usage(format!(
            "{shown}, in which task 0 sends the job token, is not a private file of user {user} (owner {}, mode {:04o})",
            about.uid(),
            about.mode() & 0o7777
        ))));
    }
    let mut text = String::new();
    file.take(MAX_BYTES)
        .read_to_string(&mut text)
        .map_err(failed)?;
    Ok(text.strip_suffix('\n').map(str::to_owned))
}

/// Names and addresses of this node, as Slurm knows it; empty outside of Slurm.
pub(super) fn names_of_this_node(env: &Env, deadline: Instant) -> Vec<String> {
    let Some(node) = text(env, "SLURMD_NODENAME") else {
        return Vec::new();
    };
    let resolves = |name: &str| (name, 0).to_socket_addrs().is_ok();
    match resolves(node) {
        true => vec![node.to_owned()],
        false => node_address(node, deadline).into_iter().collect(),
    }
}

/// The host of task 0: the first node's name if it resolves, else its address in Slurm's configuration.
pub(super) fn first_node_address(process: &Process, deadline: Instant) -> Result<String> {
    let Some(node) = &process.master_addr else {
        return Err(
            Error::usage("Slurm does not say on which nodes this step runs")
                .note("fix", "set MASTER_ADDR to the host of task 0 in all tasks"),
        );
    };
    let is_known = node.parse::<IpAddr>().is_ok() || (node.as_str(), 0).to_socket_addrs().is_ok();
    if is_known {
        return Ok(node.clone());
    }
    // A name that does not resolve yet is the last word.
    Ok(node_address(node, deadline).unwrap_or_else(|| node.clone()))
}

/// `NodeAddr` of Slurm's configuration.
fn node_address(node: &str, deadline: Instant) -> Option<String> {
    let mut command = Command::new("scontrol");
    command.args(["show", "node", "--oneliner", node]);
    let deadline = deadline.min(Instant::now() + ASK_LIMIT);
    address_in(&run(command, deadline).ok()?.ok()?)
}

fn address_in(text: &str) -> Option<String> {
    let address = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix("NodeAddr="))?;
    (!address.is_empty()).then(|| address.to_owned())
}

/// A port by the job and its step, for steps whose token is given: two of them on the same nodes rarely
/// have the same one.
pub(super) fn port(env: &Env, ports: Option<PortRange>) -> u16 {
    let mut hash = Sha256::new();
    for name in ["SLURM_JOB_ID", "SLURM_STEP_ID"] {
        hash.update([0]);
        hash.update(env.get(name).map_or("", String::as_str));
    }
    let hash = hash.finalize();
    let hash = u16::from_be_bytes([hash[0], hash[1]]);
    match ports {
        None => FIRST_PORT + hash % 4096,
        // Below 65536, as the last port is.
        Some(ports) => ports.first() + (usize::from(hash) % ports.count()) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::env_of as env;
    use std::os::unix::fs::PermissionsExt;

    fn waiting() -> WaitNotice {
        WaitNotice {
            started: Instant::now(),
            is_reported: true,
            engine: "Slurm",
        }
    }

    #[test]
    fn only_a_complete_private_file_of_ours_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let me = rustix::process::geteuid().as_raw();
        let mode = |bits| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(bits)).unwrap();
        };
        assert_eq!(read(&path, me).unwrap(), None);
        std::fs::write(&path, "").unwrap();
        mode(0o700);
        assert_eq!(read(&path, me).unwrap(), None);
        std::fs::write(&path, "half").unwrap();
        assert_eq!(read(&path, me).unwrap(), None);
        std::fs::write(&path, "whole\n").unwrap();
        assert_eq!(read(&path, me).unwrap().as_deref(), Some("whole"));
        let refused = |path: &Path, user| {
            let error = read(path, user).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{}", error.chain());
        };
        refused(&path, me + 1);
        mode(0o640);
        refused(&path, me);
        let link = dir.path().join("link");
        mode(0o600);
        std::os::unix::fs::symlink(&path, &link).unwrap();
        refused(&link, me);
        refused(dir.path(), me);
    }

    #[test]
    fn what_sbcast_lacks_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_str().unwrap();
        let job = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
            ("PATH", folder),
        ];
        let fails = |env: &Env, text, want: &str, code| {
            let soon = Instant::now() + Duration::from_millis(300);
            let error = broadcast(env, text, soon, waiting()).err().unwrap();
            let said = error.render();
            assert!(said.contains(want), "{want}: {said}");
            assert!(
                code == 2 && want.contains("number") || said.contains("--token-file"),
                "{said}"
            );
            assert_eq!(error.exit_code(), code);
        };
        fails(&env(&job), None, "no program sbcast", 2);
        let script = dir.path().join("sbcast");
        let write = |text: &str| {
            std::fs::write(&script, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        };
        write("echo 'sbcast: error: REQUEST_FILE_BCAST(n2): File exists' >&2; exit 17");
        fails(&env(&job), Some("x"), "n2): File exists", 2);
        // Two nodes share /tmp: the second finds what the first has written.
        let shared = env(&[
            ("SLURM_JOB_ID", &std::process::id().to_string()),
            ("SLURM_STEP_ID", "314159"),
            ("SLURM_LOCALID", "0"),
            ("PATH", &format!("{folder}:/usr/bin:/bin")),
        ]);
        let twice = |text: &str, other: &str| {
            write(&format!(
                "printf '{text}\\n' >$5; chmod 600 $5; echo 'REQUEST_FILE_BCAST(n1): File exists{other}' >&2; exit 17"
            ));
            broadcast(
                &shared,
                Some("x"),
                Instant::now() + Duration::from_secs(9),
                waiting(),
            )
        };
        let (got, delivered) = twice("x", "").expect("the same text");
        assert_eq!(got, "x");
        drop(delivered);
        let error = twice("y", "").err().expect("another text").render();
        assert!(error.contains("File exists"), "{error}");
        // A third one has a /tmp of its own, without room.
        let full = "\nREQUEST_FILE_BCAST(n3): No space left on device";
        let error = twice("x", full).err().expect("a full disk").render();
        assert!(error.contains("n3): No space left"), "{error}");
        write("exec sleep 60");
        fails(&env(&job), Some("x"), "did not end in time", 2);
        write("exit 0");
        fails(&env(&job), None, "did not appear", 4);
        let mut wrong = env(&job);
        wrong.insert("SLURM_STEP_ID".to_owned(), "../x".to_owned());
        fails(&wrong, None, "SLURM_STEP_ID=../x is not a number", 2);
    }

    #[test]
    fn a_file_of_its_own_for_each_job_step_and_restart() {
        let one = |job, step, restart| path(&env(&[("SLURM_RESTART_COUNT", restart)]), job, step);
        let all = [
            one("1", "0", ""),
            one("1", "1", "0"),
            one("11", "0", "0"),
            one("1", "0", "2"),
        ];
        for (index, path) in all.iter().enumerate() {
            assert!(path.starts_with("/tmp") && !all[index + 1..].contains(path));
        }
    }

    #[test]
    fn ports_and_addresses() {
        let within = |ports, job: &str, step: &str| {
            port(
                &env(&[("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)]),
                ports,
            )
        };
        let port_of = |job: &str, step: &str| within(None, job, step);
        let two: PortRange = "65534-65535".parse().unwrap();
        let of_two: std::collections::BTreeSet<u16> = (0..20)
            .map(|job| within(Some(two), &job.to_string(), "0"))
            .collect();
        assert_eq!(Vec::from_iter(of_two), [65534, 65535]);
        assert_eq!(port_of("12", "0"), port_of("12", "0"));
        let ports: std::collections::BTreeSet<u16> =
            (0..20).map(|job| port_of(&job.to_string(), "0")).collect();
        assert!(ports.len() > 15, "{ports:?}");
        assert!(ports.iter().all(|port| *port >= FIRST_PORT));
        assert_ne!(port_of("1", "10"), port_of("11", "0"));
        let text = "NodeName=n1 Arch=x86_64 NodeAddr=10.78.0.1 NodeHostName=vm Version=22.05.8";
        assert_eq!(address_in(text).as_deref(), Some("10.78.0.1"));
        assert_eq!(address_in("Node n1 not found"), None);
    }
}
