//! `rm` and `prune`: removes runs, cached results, and files that nothing refers to.
//!
//! Records go first, in one transaction. Files without a record are removed by the next command
//! that removes some, so a command that is killed loses nothing and leaves nothing for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_base::error::Result;
use phalanx_base::{format, say};

use crate::child;
use crate::resources::size;
use crate::store::{Cached, Items, Run, Store, now, objects_in};

/// What `prune` keeps.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Keep {
    /// Remove runs, cached results and folders of failed attempts that were not used for this
    /// long, such as 30d
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// Remove the oldest ones until the store has at most this size, such as 20GiB
    #[arg(long, value_name = "SIZE", value_parser = crate::spec::parse_size)]
    keep_size: Option<u64>,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
}

/// Removes the runs of these names; cached results stay.
pub(crate) fn rm(store: &Store, names: &[String]) -> Result<()> {
    let _lock = store.lock()?;
    let mut gone = Gone::default();
    for name in names {
        let (id, run) = store.find(name)?;
        gone.runs.insert(id, run);
    }
    remove(store, &gone, false)
}

/// Removes what is not to be kept.
pub(crate) fn prune(store: &Store, keep: &Keep) -> Result<()> {
    let _lock = store.lock()?;
    let gone = select(store, keep, now())?;
    remove(store, &gone, keep.dry_run)
}

/// Forgets the cached results with these keys.
pub(crate) fn forget(store: &Store, cache: Vec<(String, Cached)>) -> Result<Removed> {
    let gone = Gone {
        cache,
        ..Gone::default()
    };
    apply(store, &gone, false)
}

/// What is removed.
#[derive(Default)]
struct Gone {
    runs: BTreeMap<String, Run>,
    cache: Vec<(String, Cached)>,
    /// Folders of attempts, of runs that stay too.
    attempts: Vec<PathBuf>,
}

/// Files and folders of the store that are removed, objects and others.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Removed {
    pub count: usize,
    pub bytes: u64,
}

/// What can be removed for itself.
enum Part {
    Attempt(PathBuf),
    Run(String, Box<Run>),
    Cached(String, Cached),
}

struct Candidate {
    /// When it was used last.
    time: u64,
    part: Part,
    /// Bytes in files that are only its own.
    own: u64,
    objects: BTreeMap<String, u64>,
}

/// Those that `keep` does not keep at time `now`, the oldest first.
fn select(store: &Store, keep: &Keep, now: u64) -> Result<Gone> {
    let mut all = candidates(store)?;
    // A run after its attempts, and what it has cached after it.
    let rank = |part: &Part| match part {
        Part::Attempt(_) => 0,
        Part::Run(..) => 1,
        Part::Cached(..) => 2,
    };
    all.sort_by_key(|candidate| (candidate.time, rank(&candidate.part)));
    let mut users: BTreeMap<String, usize> = BTreeMap::new();
    let mut total = 0;
    for candidate in &all {
        total += candidate.own;
        for (sha256, bytes) in &candidate.objects {
            let users = users.entry(sha256.clone()).or_default();
            *users += 1;
            total += if *users == 1 { *bytes } else { 0 };
        }
    }
    let age = keep.older_than.map(|age| u64::try_from(age.as_millis()));
    let before = age.map(|age| now.saturating_sub(age.unwrap_or(u64::MAX)));
    let takes_only_attempts = before.is_none() && keep.keep_size.is_none();
    let mut gone = Gone::default();
    for candidate in all {
        let is_old = before.is_some_and(|before| candidate.time < before);
        let is_too_much = keep.keep_size.is_some_and(|most| total > most);
        let is_attempt = matches!(candidate.part, Part::Attempt(_));
        if !(is_old || is_too_much || takes_only_attempts && is_attempt) {
            continue;
        }
        total -= candidate.own;
        for (sha256, bytes) in &candidate.objects {
            let left = users.entry(sha256.clone()).or_default();
            *left = left.saturating_sub(1);
            total -= if *left == 0 { *bytes } else { 0 };
        }
        match candidate.part {
            Part::Attempt(dir) => gone.attempts.push(dir),
            Part::Run(id, run) => drop(gone.runs.insert(id, *run)),
            Part::Cached(key, entry) => gone.cache.push((key, entry)),
        }
    }
    Ok(gone)
}

fn candidates(store: &Store) -> Result<Vec<Candidate>> {
    let mut all = Vec::new();
    // When tasks' outputs were used.
    let mut used: Vec<(u64, Vec<(String, Items)>)> = Vec::new();
    for (id, run) in store.runs()? {
        let mut objects = BTreeMap::new();
        for items in [&run.inputs, &run.constants, &run.outputs] {
            objects.extend(objects_of(items));
        }
        let mut time = run.started.max(run.ended.unwrap_or(0));
        let mut nodes = Vec::new();
        let mut own = bytes_in(&store.run_dir(&id));
        for task in &run.workflow.tasks {
            let node = store.node(&id, &task.name)?;
            objects.extend(objects_of(&node.outputs));
            for (at, attempt) in node.attempts.iter().enumerate() {
                let dir = store.attempt_dir(&id, &task.name, at + 1);
                let attempt_time = attempt.started.max(attempt.ended.unwrap_or(0));
                time = time.max(attempt_time);
                let bytes: u64 = left_by(&dir).iter().map(|folder| bytes_in(folder)).sum();
                if !left_by(&dir).is_empty() {
                    own -= bytes.min(own);
                    all.push(Candidate {
                        time: attempt_time,
                        part: Part::Attempt(dir),
                        own: bytes,
                        objects: BTreeMap::new(),
                    });
                }
            }
            nodes.push((task.name.clone(), node.outputs));
        }
        used.push((time, nodes));
        all.push(Candidate {
            time,
            part: Part::Run(id, Box::new(run)),
            own,
            objects,
        });
    }
    for (key, entry) in store.cache()? {
        let result = (entry.task.clone(), entry.outputs.clone());
        let uses = used.iter().filter(|(_, nodes)| nodes.contains(&result));
        let last = uses.map(|(time, _)| *time).max().unwrap_or(0);
        all.push(Candidate {
            time: entry.time.max(last),
            own: 0,
            objects: objects_of(&entry.outputs).collect(),
            part: Part::Cached(key, entry),
        });
    }
    Ok(all)
}

fn objects_of(items: &Items) -> impl Iterator<Item = (String, u64)> {
    objects_in(items).map(|(_, object)| (object.sha256.clone(), object.bytes))
}

/// The folders that an attempt without success leaves; its log stays.
fn left_by(attempt: &Path) -> Vec<PathBuf> {
    let all = child::folders(attempt).into_iter();
    all.filter(|folder| folder.is_dir()).collect()
}

/// Bytes of the files at and below `path`; links are not followed.
fn bytes_in(path: &Path) -> u64 {
    match path.symlink_metadata() {
        Ok(about) if about.is_dir() => fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| bytes_in(&entry.path()))
            .sum(),
        Ok(about) if about.is_file() => about.len(),
        _ => 0,
    }
}

/// Removes `gone`, and prints it.
fn remove(store: &Store, gone: &Gone, dry_run: bool) -> Result<()> {
    let removed = apply(store, gone, dry_run)?;
    let mut text = String::new();
    for dir in &gone.attempts {
        text.push_str(&format!("attempt {}\n", dir.display()));
    }
    for (id, run) in &gone.runs {
        text.push_str(&format!("run {id} ({})\n", run.state.name()));
    }
    for (_, entry) in &gone.cache {
        let (task, run) = (&entry.task, &entry.run);
        text.push_str(&format!("cached result of {task} (from {run})\n"));
    }
    text.push_str(&format!(
        "{}: {}, {}, {} in {}\n",
        if dry_run { "would remove" } else { "removed" },
        format::plural(gone.runs.len(), "run"),
        format::plural(gone.cache.len(), "cached result"),
        size(removed.bytes),
        format::plural(removed.count, "path")
    ));
    say::print(&text)
}

/// Removes the records of `gone`, then all files and folders that none of the others needs.
fn apply(store: &Store, gone: &Gone, dry_run: bool) -> Result<Removed> {
    let goes_with_its_run = |dir: &Path| {
        let mut runs = gone.runs.keys();
        runs.any(|id| dir.starts_with(store.run_dir(id)))
    };
    let attempts = gone.attempts.iter().filter(|dir| !goes_with_its_run(dir));
    let mut paths: Vec<PathBuf> = attempts.flat_map(|dir| left_by(dir)).collect();
    paths.extend(unused(store, gone)?);
    let removed = Removed {
        count: paths.len(),
        bytes: paths.iter().map(|path| bytes_in(path)).sum(),
    };
    if dry_run {
        return Ok(removed);
    }
    // Of an engine that was killed, and whose tasks have left processes.
    for (id, run) in &gone.runs {
        for task in &run.workflow.tasks {
            let attempts = store.node(id, &task.name)?.attempts;
            for (at, _) in attempts.iter().enumerate().filter(|(_, a)| a.end.is_none()) {
                child::end_all(&store.attempt_dir(id, &task.name, at + 1))?;
            }
        }
    }
    gone.attempts
        .iter()
        .try_for_each(|dir| child::end_all(dir))?;
    let last = store.next_number()? - 1;
    store.write(|changes| {
        for (id, run) in &gone.runs {
            changes.remove_run(id, run);
        }
        gone.cache.iter().for_each(|(key, _)| changes.forget(key));
        changes.last_number(last);
    })?;
    store.objects.clear_tmp()?;
    paths
        .iter()
        .try_for_each(|path| store.objects.discard(path))?;
    Ok(removed)
}

/// Objects, and folders of runs, that no record other than those of `gone` refers to.
fn unused(store: &Store, gone: &Gone) -> Result<Vec<PathBuf>> {
    let (mut objects, mut runs) = (BTreeSet::new(), BTreeSet::new());
    let mut keep = |items: &Items| objects.extend(objects_of(items).map(|(sha256, _)| sha256));
    for (id, run) in store.runs()? {
        if gone.runs.contains_key(&id) {
            continue;
        }
        let items = [&run.inputs, &run.constants, &run.outputs];
        items.into_iter().for_each(&mut keep);
        for task in &run.workflow.tasks {
            keep(&store.node(&id, &task.name)?.outputs);
        }
        runs.insert(id);
    }
    let forgotten: BTreeSet<&String> = gone.cache.iter().map(|(key, _)| key).collect();
    for (key, entry) in store.cache()? {
        if !forgotten.contains(&key) {
            keep(&entry.outputs);
        }
    }
    let stored = store.objects.all().into_iter();
    let unused = stored.filter(|(sha256, _)| !objects.contains(sha256));
    let mut paths: Vec<PathBuf> = unused.map(|(_, path)| path).collect();
    for entry in fs::read_dir(store.dir.join("runs")).into_iter().flatten() {
        let entry = entry?;
        if !runs.contains(&*entry.file_name().to_string_lossy()) {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::work_dir;
    use crate::objects::Object;
    use crate::spec::Type;
    use crate::store::tests::run;
    use crate::store::{Attempt, Item, Node, State};

    const KIB: usize = 1024;

    fn object(store: &Store, byte: u8, kib: usize) -> Object {
        let path = store.dir.join("made");
        fs::write(&path, vec![byte; kib * KIB]).unwrap();
        store.objects.import(&path, Type::File).unwrap()
    }

    fn items(object: &Object) -> Items {
        Items::from([("x".to_owned(), Item::Object(object.clone()))])
    }

    fn node(outputs: Items, attempts: &[(u64, &str)]) -> Node {
        let attempt = |(ended, end): &(u64, &str)| Attempt {
            started: *ended,
            ended: Some(*ended),
            end: Some((*end).to_owned()),
            ..Attempt::new(String::new(), Vec::new())
        };
        Node {
            state: State::Done,
            outputs,
            attempts: attempts.iter().map(attempt).collect(),
            ..Node::new()
        }
    }

    /// Run 1 with an input (4 KiB) and a cached output (2 KiB), which run 2 uses in addition to one of its
    /// own (1 KiB); the cached result of a run that was removed (16 KiB); run 3 with a failed attempt (8 KiB).
    fn store(dir: &Path) -> (Store, [Object; 4]) {
        let store = Store::create(&dir.join("s")).unwrap();
        let all = [(b'i', 4), (b'a', 2), (b'b', 1), (b'c', 16)];
        let all = all.map(|(byte, kib)| object(&store, byte, kib));
        let [input, shared, own, removed] = &all;
        let cached = |run: &str, time, object| Cached {
            task: "a".to_owned(),
            version: "1".to_owned(),
            run: run.to_owned(),
            time,
            outputs: items(object),
        };
        store
            .write(|changes| {
                let mut first = run(1, State::Done, 1000);
                first.inputs = items(input);
                changes.run("w-1", &first);
                changes.node("w-1", "a", &node(items(shared), &[(900, "done")]));
                changes.cache("shared", &cached("w-1", 950, shared));
                changes.run("w-2", &run(2, State::Done, 5000));
                changes.node("w-2", "a", &node(items(shared), &[]));
                changes.node("w-2", "b", &node(items(own), &[]));
                changes.cache("removed", &cached("w-0", 3000, removed));
                changes.run("w-3", &run(3, State::Interrupted, 9000));
                let failed = node(Items::new(), &[(8500, "exit code 1")]);
                changes.node("w-3", "a", &failed);
            })
            .unwrap();
        let attempt = store.attempt_dir("w-3", "a", 1);
        fs::create_dir_all(work_dir(&attempt)).unwrap();
        fs::write(work_dir(&attempt).join("big"), vec![0; 8 * KIB]).unwrap();
        fs::write(child::log_file(&attempt), "").unwrap();
        fs::create_dir_all(store.attempt_dir("w-1", "a", 1)).unwrap();
        (store, all)
    }

    /// What is left: runs, keys of cached results, whether each object and the failed attempt's
    /// folder are there.
    fn left(store: &Store, all: &[Object; 4]) -> (Vec<String>, Vec<String>, [bool; 4], bool) {
        let runs = store.runs().unwrap().into_iter().map(|(id, _)| id);
        let cache = store.cache().unwrap().into_iter().map(|(key, _)| key);
        let attempt = store.attempt_dir("w-3", "a", 1);
        (
            runs.collect(),
            cache.collect(),
            [0, 1, 2, 3].map(|at| store.objects.check(&all[at]).is_ok()),
            work_dir(&attempt).exists(),
        )
    }

    fn names(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn keep(older_than: Option<u64>, kib: Option<u64>) -> Keep {
        Keep {
            older_than: older_than.map(Duration::from_millis),
            keep_size: kib.map(|kib| kib << 10),
            dry_run: false,
        }
    }

    #[test]
    fn what_is_old_or_too_much_goes_and_what_others_need_stays() {
        let all = ["w-1", "w-2", "w-3"];
        type Case<'a> = (Keep, &'a [&'a str], &'a [&'a str], [bool; 4], bool, u64);
        let cases: [Case<'_>; 7] = [
            (
                keep(None, None),
                &all,
                &["removed", "shared"],
                [true; 4],
                false,
                8,
            ),
            (
                keep(Some(10_000 - 2000), None),
                &all[1..],
                &["removed", "shared"],
                [false, true, true, true],
                true,
                4,
            ),
            (
                keep(Some(10_000 - 4000), None),
                &all[1..],
                &["shared"],
                [false, true, true, false],
                true,
                20,
            ),
            (
                keep(None, Some(31)),
                &all,
                &["removed", "shared"],
                [true; 4],
                true,
                0,
            ),
            (
                keep(None, Some(30)),
                &all[1..],
                &["removed", "shared"],
                [false, true, true, true],
                true,
                4,
            ),
            (
                keep(None, Some(10)),
                &all[2..],
                &["shared"],
                [false, true, false, false],
                true,
                21,
            ),
            (keep(None, Some(0)), &all[2..], &[], [false; 4], false, 31),
        ];
        for (keep, runs, cache, objects, has_attempt, kib) in cases {
            let dir = tempfile::tempdir().unwrap();
            let (store, all) = store(dir.path());
            let before = left(&store, &all);
            let gone = select(&store, &keep, 10_000).unwrap();
            let planned = apply(&store, &gone, true).unwrap();
            assert_eq!(left(&store, &all), before, "{keep:?}");
            assert_eq!(apply(&store, &gone, false).unwrap(), planned, "{keep:?}");
            let want = (names(runs), names(cache), objects, has_attempt);
            assert_eq!(left(&store, &all), want, "{keep:?}");
            assert_eq!(planned.bytes, kib << 10, "{keep:?}");
            assert!(child::log_file(&store.attempt_dir("w-3", "a", 1)).exists());
        }
    }

    #[test]
    fn a_removed_run_leaves_its_cached_result_and_no_other_gets_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let (store, all) = store(dir.path());
        let lock = store.lock().unwrap();
        let text = rm(&store, &names(&["w-3"])).unwrap_err().chain();
        assert!(text.contains("in use by another engine"), "{text}");
        drop(lock);
        let text = rm(&store, &names(&["w-1", "w-9"])).unwrap_err().chain();
        assert!(text.contains("no run \"w-9\""), "{text}");
        assert_eq!(store.runs().unwrap().len(), 3);
        rm(&store, &names(&["w-1", "last"])).unwrap();
        let want = [false, true, true, true];
        let cache = names(&["removed", "shared"]);
        assert_eq!(left(&store, &all), (names(&["w-2"]), cache, want, false));
        assert!(!store.run_dir("w-1").exists() && !store.run_dir("w-3").exists());
        assert!(store.node("w-1", "a").unwrap().attempts.is_empty());
        assert_eq!(store.next_number().unwrap(), 4);
    }
}
