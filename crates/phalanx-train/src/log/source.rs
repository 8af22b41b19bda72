//! Where a run comes from: the command, the code's git commit, the user and the system. What cannot be found out is left
//! out.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long rank 0 waits for git.
const GIT_LIMIT: Duration = Duration::from_secs(1);

/// The program's name.
pub(super) fn command() -> Option<String> {
    let program = std::env::args_os().next()?;
    let name = Path::new(&program).file_name()?;
    Some(name.to_string_lossy().into_owned())
}

/// The name of the user, otherwise the number.
pub(super) fn user() -> String {
    let name = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
    let name = name.ok().filter(|name| !name.is_empty());
    name.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}

/// The operating system, its version and the architecture.
pub(super) fn system() -> String {
    let system = rustix::system::uname();
    let [name, release, machine] = [system.sysname(), system.release(), system.machine()];
    [name, release, machine]
        .map(|part| part.to_string_lossy())
        .join(" ")
}

/// Commit and branch of the work tree that `folder` is in, and whether tracked files differ from the commit.
/// *Blocks* for at most a second.
pub(super) fn git(folder: &Path) -> Option<Value> {
    let folder = folder.canonicalize().ok()?;
    folder
        .ancestors()
        .find(|folder| folder.join(".git").exists())?;
    // A repository's own setting must not start a program.
    let options = [
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "status",
    ];
    let mut git = Command::new("git")
        .args(options)
        .args(["--porcelain=v2", "--branch", "--untracked-files=no"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let deadline = Instant::now() + GIT_LIMIT;
    let (done, text) = sync_channel(1);
    let mut out = git.stdout.take()?;
    let reader = std::thread::Builder::new().spawn(move || {
        let mut text = Vec::new();
        let read = std::io::Read::read_to_end(&mut out, &mut text);
        let _ = done.send(read.map(|_| text));
    });
    let text = reader.ok().and_then(|_| text.recv_timeout(GIT_LIMIT).ok());
    let left = deadline.saturating_duration_since(Instant::now());
    if text.is_none() || left.is_zero() {
        let _ = git.kill();
    }
    let status = git.wait().ok()?;
    let text = text.filter(|_| status.success())?.ok()?;
    Some(state(&String::from_utf8_lossy(&text)))
}

/// What the output of `git status --porcelain=v2 --branch` says.
fn state(text: &str) -> Value {
    let after = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    json!({
        "commit": after("# branch.oid ").filter(|commit| *commit != "(initial)"),
        "branch": after("# branch.head ").filter(|branch| *branch != "(detached)"),
        "modified": text.lines().any(|line| !line.starts_with('#')),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_and_changes_of_tracked_files_are_found() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path();
        let run = |words: &str| {
            let mut git = Command::new("git");
            git.args(["-c", "user.name=a", "-c", "user.email=a@b"]);
            let done = git.args(words.split(' ')).current_dir(path).output();
            done.is_ok_and(|done| done.status.success())
        };
        std::fs::create_dir(path.join("sub")).expect("folder");
        assert_eq!(git(&path.join("sub")), None, "no repository");
        if !run("init -q -b trunk") {
            // A damaged repository, or no git.
            std::fs::create_dir(path.join(".git")).expect("folder");
            assert_eq!(git(path), None);
            return;
        }
        let first = git(path).expect("a repository");
        assert_eq!(
            first,
            json!({ "commit": null, "branch": "trunk", "modified": false })
        );
        std::fs::write(path.join("a"), "1").expect("written");
        assert!(run("add a") && run("commit -q -m one"));
        let clean = git(&path.join("sub")).expect("a repository");
        assert_eq!(clean["commit"].as_str().map(str::len), Some(40), "{clean}");
        assert_eq!(
            (&clean["branch"], &clean["modified"]),
            (&json!("trunk"), &json!(false))
        );
        std::fs::write(path.join("untracked"), "1").expect("written");
        assert_eq!(git(path), Some(clean.clone()));
        std::fs::write(path.join("a"), "2").expect("written");
        let changed = git(path).expect("a repository");
        assert_eq!(
            (&changed["commit"], &changed["modified"]),
            (&clean["commit"], &json!(true))
        );
        assert!(run("checkout -q --detach"));
        assert_eq!(git(path).expect("a repository")["branch"], json!(null));
        std::fs::write(path.join(".git/HEAD"), "x").expect("written");
        assert_eq!(git(path), None, "damaged");
    }
}
