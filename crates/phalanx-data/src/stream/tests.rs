//! The cache, shared by threads and processes; object stores, played by servers with faults.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_base::files::try_lock;

use super::cache::Cache;

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> = names
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Bytes of all files of a cache, while no room is made.
fn used(at: &Path) -> u64 {
    let cache = Cache::open(Some(at), 0).unwrap();
    let _lock = cache.hold("lock", true).unwrap();
    let sizes = names(at)
        .into_iter()
        .map(|name| fs::metadata(at.join(name)));
    sizes.flatten().map(|about| about.len()).sum()
}

/// Shards of 100 bytes, each of its number.
fn open(cache: &Cache, number: u8, fetched: &AtomicUsize) -> File {
    let fetch = |out: &File| {
        fetched.fetch_add(1, Ordering::Relaxed);
        out.write_all_at(&[number; 100], 0).unwrap();
        Ok(())
    };
    cache
        .shard(&number.to_string(), "s", 100, true, &fetch)
        .unwrap()
        .unwrap()
}

fn content(file: &File) -> [u8; 100] {
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn what_was_not_used_for_longest_is_removed_and_stays_readable_to_its_readers() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("a/cache");
    let cache = Cache::open(Some(&at), 350).unwrap();
    assert_eq!(
        fs::metadata(&at).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let fetched = AtomicUsize::new(0);
    let files: Vec<File> = (0..3).map(|i| open(&cache, i, &fetched)).collect();
    // Times of files have the clock's ticks.
    std::thread::sleep(std::time::Duration::from_millis(20));
    open(&cache, 0, &fetched);
    open(&cache, 3, &fetched);
    assert_eq!(names(&at), ["0.shard", "2.shard", "3.shard", "lock"]);
    assert_eq!(fetched.load(Ordering::Relaxed), 4);
    for (i, file) in (0..3).zip(&files) {
        assert_eq!(content(file), [i; 100]);
    }
    // One of another length is fetched again.
    File::options()
        .write(true)
        .open(at.join("2.shard"))
        .unwrap()
        .set_len(7)
        .unwrap();
    assert_eq!(content(&open(&cache, 2, &fetched)), [2; 100]);
    assert_eq!(fetched.load(Ordering::Relaxed), 5);
}

#[test]
fn what_killed_jobs_have_left_is_removed_and_what_others_fetch_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let cache = Cache::open(Some(at), 250).unwrap();
    let fetched = AtomicUsize::new(0);
    fs::write(at.join("8.part"), [8; 200]).unwrap();
    fs::write(at.join("1.part"), [8; 40]).unwrap();
    assert_eq!(content(&open(&cache, 1, &fetched)), [1; 100]);
    assert_eq!(names(at), ["1.shard", "lock"]);
    // Another process fetches, and leaves room only when it is done.
    let other = cache.hold("9.part", true).unwrap().unwrap();
    other.set_len(200).unwrap();
    assert!(cache.hold("9.part", false).unwrap().is_none());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| content(&open(&cache, 2, &fetched)));
        std::thread::sleep(std::time::Duration::from_millis(60));
        assert!(!waiting.is_finished());
        cache.dir.rename("9.part", "9.shard").unwrap();
        drop(other);
        assert_eq!(waiting.join().unwrap(), [2; 100]);
    });
    assert_eq!(names(at), ["2.shard", "lock"]);
    // A fetch that fails leaves nothing.
    let failed = cache.shard("5", "s", 100, true, &|_| {
        Err(phalanx_base::Error::usage("broken"))
    });
    assert_eq!(failed.unwrap_err().to_string(), "broken");
    assert_eq!(names(at), ["2.shard", "lock"]);
    // A folder that others can change is refused.
    fs::set_permissions(at, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(Cache::open(Some(at), 1).is_err());
}

/// Jobs that together need more than the cache has: each shard is right, the limit is kept, and each is fetched once where
/// all want it at the same time.
#[test]
fn several_jobs_share_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let fetched = AtomicUsize::new(0);
    let barrier = Barrier::new(4);
    std::thread::scope(|scope| {
        for job in 0..4_u8 {
            let (fetched, barrier) = (&fetched, &barrier);
            scope.spawn(move || {
                let cache = Cache::open(Some(at), 500).unwrap();
                for i in 0..40 {
                    let number = (i * (job + 1)) % 10;
                    assert_eq!(content(&open(&cache, number, fetched)), [number; 100]);
                    assert!(used(at) <= 500);
                }
                barrier.wait();
                let before = fetched.load(Ordering::Relaxed);
                barrier.wait();
                open(&cache, 77, fetched);
                barrier.wait();
                assert_eq!(fetched.load(Ordering::Relaxed), before + 1);
            });
        }
    });
    assert!(names(at).iter().all(|name| !name.ends_with(".part")));
    assert!(try_lock(&File::open(at.join("lock")).unwrap()));
}

#[cfg(feature = "object-store")]
mod remote;
