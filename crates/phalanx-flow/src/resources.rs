//! What this machine has, which task uses it, and how limits are enforced.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_base::error::{Error, Result};
use phalanx_base::format;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::child::ProcessLimits;
use crate::spec::{Resources, Task};

/// What tasks may use in total.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub cpus: u32,
    pub memory: u64,
    pub gpus: Vec<String>,
    /// The numbers of the processors that this process may use.
    ids: Vec<usize>,
}

impl Machine {
    /// This machine; `given` replaces what is found.
    pub fn new(given: &Resources) -> Machine {
        let set = sched_getaffinity(None).unwrap_or_default();
        let found = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = || {
            let installed = installed_memory().unwrap_or(u64::MAX);
            phalanx_process::oom::memory_limit().map_or(installed, |limit| limit.min(installed))
        };
        Machine {
            cpus: given
                .cpus
                .unwrap_or(u32::try_from(found).unwrap_or(u32::MAX)),
            memory: given.memory.unwrap_or_else(memory),
            gpus: match given.gpus {
                Some(count) => (0..count).map(|gpu| gpu.to_string()).collect(),
                None => gpus(),
            },
            ids: (0..CpuSet::MAX_CPU)
                .filter(|cpu| set.is_set(*cpu))
                .collect(),
        }
    }

    /// Checks that `task` could ever run here.
    pub fn check(&self, task: &Task) -> Result<()> {
        let asked = asked(task);
        let too_much = |what: &str, asked: String, has: String| {
            let message = format!(
                "task {:?} requests {asked}, but this machine has {has}",
                task.name
            );
            Err(Error::usage(message).note(
                "try",
                format!("a smaller request, or {what} to count otherwise"),
            ))
        };
        if asked.cpus > self.cpus {
            let has = self.cpus.to_string();
            return too_much(
                "--cpus",
                format::plural(asked.cpus as usize, "processor"),
                has,
            );
        }
        if asked.memory > self.memory {
            return too_much("--memory", size(asked.memory), size(self.memory));
        }
        if asked.gpus > self.gpus.len() {
            let has = self.gpus.len().to_string();
            return too_much("--gpus", format::plural(asked.gpus, "GPU"), has);
        }
        Ok(())
    }
}

pub(crate) fn size(bytes: u64) -> String {
    format::bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
}

fn installed_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Those of `CUDA_VISIBLE_DEVICES`, or all of NVIDIA's.
fn gpus() -> Vec<String> {
    if let Ok(visible) = std::env::var("CUDA_VISIBLE_DEVICES") {
        let ids = visible.split(',').map(str::trim);
        return ids
            .filter(|id| !id.is_empty() && *id != "-1")
            .map(str::to_owned)
            .collect();
    }
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut ids: Vec<u32> = entries
        .filter_map(|entry| {
            entry
                .file_name()
                .to_str()?
                .strip_prefix("nvidia")?
                .parse()
                .ok()
        })
        .collect();
    ids.sort_unstable();
    ids.iter().map(u32::to_string).collect()
}

struct Asked {
    cpus: u32,
    memory: u64,
    gpus: usize,
}

/// A limit without a request is a request too; a task needs one processor at least.
fn asked(task: &Task) -> Asked {
    let (requests, limits) = (&task.requests, &task.limits);
    Asked {
        cpus: requests.cpus.or(limits.cpus).unwrap_or(1).max(1),
        memory: requests.memory.or(limits.memory).unwrap_or(0),
        gpus: requests.gpus.or(limits.gpus).unwrap_or(0) as usize,
    }
}

/// What a running task has.
#[derive(Debug, Default)]
pub(crate) struct Grant {
    cpus: u32,
    memory: u64,
    pub gpus: Vec<String>,
    /// Processors that it is limited to; empty: no limit.
    pub ids: Vec<usize>,
}

/// What is free.
pub(crate) struct Pool {
    machine: Machine,
    cpus: u32,
    memory: u64,
    gpus: Vec<String>,
    /// How many limited tasks run on each processor.
    load: Vec<u32>,
}

impl Pool {
    pub fn new(machine: Machine) -> Pool {
        Pool {
            cpus: machine.cpus,
            memory: machine.memory,
            gpus: machine.gpus.clone(),
            load: vec![0; machine.ids.len()],
            machine,
        }
    }

    /// Takes what `task` requests, or says what is not free.
    pub fn take(&mut self, task: &Task) -> std::result::Result<Grant, String> {
        let asked = asked(task);
        let free =
            |free: String, all: String, what: &str| Err(format!("{free} of {all} {what} free"));
        if asked.gpus > self.gpus.len() {
            let all = self.machine.gpus.len().to_string();
            return free(self.gpus.len().to_string(), all, "GPUs");
        }
        if asked.cpus > self.cpus {
            return free(
                self.cpus.to_string(),
                self.machine.cpus.to_string(),
                "processors",
            );
        }
        if asked.memory > self.memory {
            return free(size(self.memory), size(self.machine.memory), "memory");
        }
        self.cpus -= asked.cpus;
        self.memory -= asked.memory;
        let mut order: Vec<usize> = (0..self.load.len()).collect();
        order.sort_by_key(|at| self.load[*at]);
        let limit = task.limits.cpus.map_or(0, |cpus| cpus as usize);
        // A limit of all processors is none.
        let some = if limit < order.len() { limit } else { 0 };
        let chosen = &order[..some];
        chosen.iter().for_each(|at| self.load[*at] += 1);
        Ok(Grant {
            cpus: asked.cpus,
            memory: asked.memory,
            gpus: self.gpus.drain(..asked.gpus).collect(),
            ids: chosen.iter().map(|at| self.machine.ids[*at]).collect(),
        })
    }

    pub fn give_back(&mut self, grant: Grant) {
        self.cpus += grant.cpus;
        self.memory += grant.memory;
        self.gpus.extend(grant.gpus);
        self.gpus.sort();
        for id in grant.ids {
            if let Some(at) = self.machine.ids.iter().position(|own| *own == id) {
                self.load[at] -= 1;
            }
        }
    }
}

/// How limits are enforced.
pub(crate) enum Limiter {
    /// By a child of this cgroup (version 2) for each attempt.
    Cgroup(PathBuf),
    /// By limits of each process, for this reason.
    Process(String),
}

impl Limiter {
    /// The best that this process may use.
    pub fn new() -> Limiter {
        match delegated_cgroup() {
            Ok(group) => Limiter::Cgroup(group),
            Err(why) => Limiter::Process(why),
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        match self {
            Limiter::Cgroup(group) => format!("cgroup v2, below {}", group.display()),
            Limiter::Process(why) => format!("rlimit and affinity of each process ({why})"),
        }
    }

    /// The limits of an attempt of `task`, and these in words.
    pub fn limits(
        &self,
        task: &Task,
        grant: &Grant,
        name: &str,
    ) -> Result<(ProcessLimits, String)> {
        let Resources {
            cpus,
            memory,
            storage,
            ephemeral_storage,
            ..
        } = task.limits;
        // A file is in one or the other.
        let storage = storage.max(ephemeral_storage);
        let mut limits = ProcessLimits {
            file_size: storage,
            ..ProcessLimits::default()
        };
        let mut said = Vec::new();
        if let Limiter::Cgroup(parent) = self
            && (cpus.is_some() || memory.is_some())
        {
            limits.cgroup = Some(make_group(parent, name, cpus, memory)?);
            said.extend(memory.map(|bytes| format!("memory {} by cgroup", size(bytes))));
            said.extend(
                cpus.map(|cpus| {
                    format!("{} by cgroup", format::plural(cpus as usize, "processor"))
                }),
            );
        } else {
            if let Some(bytes) = memory {
                // CUDA reserves far more addresses than memory.
                if grant.gpus.is_empty() {
                    limits.address_space = Some(bytes);
                    said.push(format!(
                        "address space {} of each process by rlimit",
                        size(bytes)
                    ));
                } else {
                    said.push("memory not limited: rlimit does not work with GPUs".to_owned());
                }
            }
            limits.cpus.clone_from(&grant.ids);
            if let Some(cpus) = cpus {
                said.push(format!(
                    "{} by affinity",
                    format::plural(cpus as usize, "processor")
                ));
            }
        }
        said.extend(storage.map(|bytes| format!("each file {} by rlimit", size(bytes))));
        Ok((limits, said.join(", ")))
    }
}

/// Our cgroup, if its memory and processors may be divided among children of it.
fn delegated_cgroup() -> std::result::Result<PathBuf, String> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::"));
    let path = path.ok_or("cgroup v2 is not mounted")?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
    let mut fields = mount.ok_or("cgroup v2 is not mounted")?.split(' ').skip(3);
    let (Some(root), Some(point)) = (fields.next(), fields.next()) else {
        return Err("cgroup v2 is not mounted".to_owned());
    };
    let below = path.strip_prefix(root).unwrap_or(path);
    let own = Path::new(point).join(below.trim_start_matches('/'));
    let has = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
    for needed in ["memory", "cpu"] {
        if !has
            .split_whitespace()
            .any(|controller| controller == needed)
        {
            return Err(format!("cgroup v2 has no controller {needed:?} here"));
        }
    }
    let enable = || fs::write(own.join("cgroup.subtree_control"), "+memory +cpu");
    if enable().is_ok() {
        return Ok(own);
    }
    // A group with processes has no limited children: this process moves into a leaf.
    let leaf = own.join(format!("phalanx-flow-engine-{}", std::process::id()));
    let me = std::process::id().to_string();
    let moved = fs::create_dir(&leaf).and_then(|()| fs::write(leaf.join("cgroup.procs"), &me));
    match moved.and_then(|()| enable()) {
        Ok(()) => Ok(own),
        Err(error) => {
            let _ = fs::write(own.join("cgroup.procs"), &me);
            let _ = fs::remove_dir(&leaf);
            Err(format!(
                "cgroup {} is not ours to divide: {error}",
                own.display()
            ))
        }
    }
}

fn make_group(
    parent: &Path,
    name: &str,
    cpus: Option<u32>,
    memory: Option<u64>,
) -> Result<PathBuf> {
    let group = parent.join(format!("phalanx-flow-{}-{name}", std::process::id()));
    let write = |file: &str, text: String| fs::write(group.join(file), text);
    let make = || {
        // One of a killed engine with our number is empty, and has this name.
        if let Err(error) = fs::create_dir(&group)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        if let Some(bytes) = memory {
            write("memory.max", bytes.to_string())?;
            // Without swap the file is missing.
            let _ = write("memory.swap.max", "0".to_owned());
        }
        if let Some(cpus) = cpus {
            write("cpu.max", format!("{} 100000", u64::from(cpus) * 100_000))?;
        }
        Ok(())
    };
    make().map_err(|error| crate::objects::cannot("set up", &group, error))?;
    Ok(group)
}

/// Ends all processes of an attempt's cgroup and removes it; whether its memory was exceeded.
pub(crate) fn end_group(group: &Path) -> bool {
    let events = fs::read_to_string(group.join("memory.events")).unwrap_or_default();
    let _ = fs::write(group.join("cgroup.kill"), "1");
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let kills = events
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "));
    kills.is_some_and(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Action;

    fn task(cpus: u32, gpus: u32) -> Task {
        let mut task = Task::new("t", Action::Function);
        task.requests.cpus = Some(cpus);
        task.requests.gpus = Some(gpus);
        task
    }

    #[test]
    fn what_is_taken_is_not_free_and_comes_back() {
        let given = Resources {
            cpus: Some(4),
            memory: Some(1 << 30),
            gpus: Some(2),
            ..Resources::default()
        };
        let machine = Machine::new(&given);
        assert!(machine.check(&task(4, 2)).is_ok());
        let text = machine.check(&task(1, 3)).unwrap_err().chain();
        assert_eq!(text, "task \"t\" requests 3 GPUs, but this machine has 2");
        let mut pool = Pool::new(machine);
        let one = pool.take(&task(3, 1)).unwrap();
        assert_eq!(one.gpus, ["0"]);
        assert_eq!(
            pool.take(&task(2, 0)).unwrap_err(),
            "1 of 4 processors free"
        );
        let two = pool.take(&task(1, 1)).unwrap();
        assert_eq!(two.gpus, ["1"]);
        assert_eq!(pool.take(&task(1, 1)).unwrap_err(), "0 of 2 GPUs free");
        pool.give_back(one);
        assert_eq!(pool.take(&task(3, 1)).unwrap().gpus, ["0"]);
    }

    #[test]
    fn limits_are_those_of_each_process_without_a_cgroup() {
        let given = Resources {
            gpus: Some(1),
            ..Resources::default()
        };
        let mut pool = Pool::new(Machine::new(&given));
        let limiter = Limiter::Process("of the test".into());
        let mut plain = task(1, 0);
        plain.limits.memory = Some(1 << 30);
        plain.limits.cpus = Some(1);
        plain.requests.memory = Some(0);
        let grant = pool.take(&plain).unwrap();
        let (limits, said) = limiter.limits(&plain, &grant, "x").unwrap();
        assert_eq!(limits.address_space, Some(1 << 30));
        assert_eq!(
            said,
            "address space 1 GiB of each process by rlimit, 1 processor by affinity"
        );
        pool.give_back(grant);
        plain.limits.storage = Some(1 << 20);
        plain.limits.ephemeral_storage = Some(2 << 20);
        plain.requests.gpus = Some(1);
        let grant = pool.take(&plain).unwrap();
        let (limits, said) = limiter.limits(&plain, &grant, "x").unwrap();
        assert_eq!(
            (limits.address_space, limits.file_size),
            (None, Some(2 << 20))
        );
        assert!(said.contains("not limited"), "{said}");
    }

    /// A folder in place of a cgroup: the files that the kernel would read.
    #[test]
    fn a_group_has_the_limits_in_the_kernels_words() {
        let dir = tempfile::tempdir().unwrap();
        let limiter = Limiter::Cgroup(dir.path().to_owned());
        let mut task = task(1, 0);
        task.limits.memory = Some(64 << 20);
        task.limits.cpus = Some(2);
        let (limits, said) = limiter.limits(&task, &Grant::default(), "t-1").unwrap();
        assert_eq!(said, "memory 64 MiB by cgroup, 2 processors by cgroup");
        let group = limits.cgroup.unwrap();
        let read = |file: &str| fs::read_to_string(group.join(file)).unwrap();
        assert_eq!(read("memory.max"), "67108864");
        assert_eq!(read("cpu.max"), "200000 100000");
        assert_eq!((limits.address_space, limits.cpus.len()), (None, 0));
    }
}
