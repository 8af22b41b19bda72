//! What is particular to the store in a file: several processes, remains of
//! dead jobs, damage.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::common::{LONG, SHORT};
use phalanx_store::{ErrorKind, FileStore, Limits, Store};

/// Names the store to a process that one of these tests has started.
const CHILD: &str = "PHALANX_TEST_STORE_FILE";

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    (folder, path)
}

/// This test binary again, running one test with the store's path.
fn child(test: &str, path: &PathBuf) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("file::{test}"), "--nocapture"])
        .args(["--test-threads", "1"])
        .env(CHILD, path);
    command
}

/// The store that the parent has named; `None` in the parent itself.
fn named_by_parent() -> Option<FileStore> {
    let path = std::env::var_os(CHILD)?;
    Some(FileStore::open(path).unwrap())
}

#[test]
fn works_across_processes() {
    const EACH: i64 = 200;
    if let Some(store) = named_by_parent() {
        store.get("go", LONG).unwrap();
        for _ in 0..EACH {
            store.add("count", 1).unwrap();
        }
        store.add("done", 1).unwrap();
        // Leaves only after the parent has seen it.
        store.get("end", LONG).unwrap();
        return;
    }
    let (_folder, path) = folder();
    let store = FileStore::open(&path).unwrap();
    let mut children: Vec<_> = (0..3)
        .map(|_| child("works_across_processes", &path).spawn().unwrap())
        .collect();
    store.set("go", b"").unwrap();
    crate::common::eventually("all have counted", || store.add("done", 0).unwrap() == 3);
    assert_eq!(store.add("count", 0).unwrap(), 3 * EACH);
    store.set("end", b"").unwrap();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
}

/// A killed process cleans nothing up; the next job must not see its keys.
#[test]
fn remains_of_a_killed_job_are_discarded() {
    if let Some(store) = named_by_parent() {
        store.set("rank/0", b"address of a dead process").unwrap();
        std::process::abort();
    }
    let (_folder, path) = folder();
    let status = child("remains_of_a_killed_job_are_discarded", &path)
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
    assert!(fs::metadata(&path).unwrap().len() > 24, "it left nothing");
    let store = FileStore::open(&path).unwrap();
    assert_eq!(store.try_get("rank/0").unwrap(), None);
}

#[test]
fn the_last_member_removes_the_files() {
    let (folder, path) = folder();
    let a = FileStore::open(&path).unwrap();
    let b = FileStore::open(&path).unwrap();
    assert_eq!(a.path(), path);
    a.set("k", b"v").unwrap();
    drop(a);
    assert_eq!(b.get("k", SHORT).unwrap(), b"v");
    let c = FileStore::open(&path).unwrap();
    drop(b);
    assert_eq!(c.get("k", SHORT).unwrap(), b"v");
    drop(c);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn members_come_and_go_at_random() {
    let (folder, path) = folder();
    let counted = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let store = FileStore::open(&path).unwrap();
                    store.add("n", 1).unwrap();
                    assert!(store.add("n", 0).unwrap() >= 1);
                    counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(counted.into_inner(), 200);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn only_its_owner_may_read_it() {
    let (_folder, path) = folder();
    let _store = FileStore::open(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn an_empty_file_becomes_a_store() {
    let (_folder, path) = folder();
    fs::write(&path, b"").unwrap();
    FileStore::open(&path).unwrap().set("k", b"").unwrap();
}

#[test]
fn a_file_that_is_something_else_is_left_alone() {
    let (_folder, path) = folder();
    for content in [&b"my thesis, chapter one"[..], b"x", b"PHXSTOR"] {
        fs::write(&path, content).unwrap();
        let error = FileStore::open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("not changed"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn a_folder_that_is_not_there() {
    let (_folder, path) = folder();
    let error = FileStore::open(path.join("deeper")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("deeper"), "{error}");
}

/// Two members, then `damage` to the file, then the second looks.
fn damaged(damage: impl FnOnce(&PathBuf)) -> phalanx_store::Error {
    let (_folder, path) = folder();
    let a = FileStore::open(&path).unwrap();
    let b = FileStore::open(&path).unwrap();
    a.set("key", b"value").unwrap();
    damage(&path);
    let error = b.get("key", LONG).unwrap_err();
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
    error
}

fn rewrite(path: &PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    // In place: the same file, as a failing disk would leave it.
    fs::write(path, bytes).unwrap();
}

#[test]
fn truncated_record() {
    for cut in [1, 5, 12] {
        let error = damaged(|path| rewrite(path, |b| b.truncate(b.len() - cut)));
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(
            error.to_string().contains("middle of the record"),
            "{error}"
        );
    }
}

#[test]
fn truncated_below_what_was_read() {
    let error = damaged(|path| rewrite(path, |b| b.truncate(3)));
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("truncated"), "{error}");
}

#[test]
fn every_flipped_byte_of_a_record_is_noticed() {
    for at in 24..24 + 8 + 14 {
        let error = damaged(|path| rewrite(path, |b| b[at] ^= 0x40));
        assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at}: {error}");
    }
}

#[test]
fn damaged_header() {
    let (_folder, path) = folder();
    let _member = FileStore::open(&path).unwrap();
    for (at, what) in [
        (0, "not a store file"),
        (8, "format"),
        (15, "damaged header"),
    ] {
        rewrite(&path, |b| b[at] ^= 1);
        let error = FileStore::open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(what), "{error}");
        rewrite(&path, |b| b[at] ^= 1);
    }
    rewrite(&path, |b| b.truncate(10));
    let error = FileStore::open(&path).unwrap_err();
    assert!(error.to_string().contains("too short"), "{error}");
}

#[test]
fn removed_while_in_use() {
    let error = damaged(|path| fs::remove_file(path).unwrap());
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("was removed"), "{error}");
}

#[test]
fn replaced_by_another_job() {
    let (_folder, path) = folder();
    let other = path.with_extension("other");
    let b = FileStore::open(&path).unwrap();
    let _other = FileStore::open(&other).unwrap();
    fs::rename(&other, &path).unwrap();
    for _ in 0..2 {
        let error = b.get("key", LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("another job"), "{error}");
    }
}

#[test]
fn limits() {
    let (_folder, path) = folder();
    let limits = Limits::new(2, 50);
    let store = FileStore::open_with(&path, limits).unwrap();
    store.set("a", b"").unwrap();
    store.set("b", b"").unwrap();
    let error = store.set("c", b"").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    let error = store.set("a", &[0; 50]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    // What was refused is not in the file either.
    let again = FileStore::open_with(&path, limits).unwrap();
    assert_eq!(again.get("a", SHORT).unwrap(), b"");
    assert_eq!(again.try_get("c").unwrap(), None);
}

/// The log does not grow with the number of changes for ever, and members
/// notice nothing when it is written anew.
#[test]
fn a_long_log_is_written_anew() {
    let (_folder, path) = folder();
    let a = FileStore::open(&path).unwrap();
    let b = FileStore::open(&path).unwrap();
    a.set("small", b"kept").unwrap();
    let value = vec![7; 1 << 20];
    for round in 0..20_u8 {
        let (writer, reader) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        writer.set("large", &value).unwrap();
        writer.set("round", &[round]).unwrap();
        assert_eq!(reader.get("round", SHORT).unwrap(), [round]);
        assert_eq!(reader.get("small", SHORT).unwrap(), b"kept");
    }
    assert!(fs::metadata(&path).unwrap().len() < 11 << 20);
    let c = FileStore::open(&path).unwrap();
    assert_eq!(c.get("large", Duration::ZERO).unwrap(), value);
    assert_eq!(c.get("round", Duration::ZERO).unwrap(), [19]);
}

/// In a folder that others may write, a link leads where they like.
#[test]
fn links_and_what_is_no_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "").unwrap();
    for name in ["store", "store.lock"] {
        let link = dir.path().join(name);
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let error = FileStore::open(dir.path().join("store")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{name}: {error}");
        assert!(error.to_string().contains("symbolic link"), "{error}");
        std::fs::remove_file(&link).unwrap();
        let _ = std::fs::remove_file(dir.path().join("store"));
        let _ = std::fs::remove_file(dir.path().join("store.lock"));
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"");
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let error = FileStore::open(&pipe).unwrap_err();
    assert!(error.to_string().contains("is not a file"), "{error}");
}
