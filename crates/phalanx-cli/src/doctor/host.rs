//! What this host, and this process on it, can do.

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_comm::transport::local_address_towards;
use phalanx_launch::{Cores, Process, RankArgs};
use phalanx_nn::Family;
use phalanx_store::host_port;
use rustix::fs::{Access, MemfdFlags, access, ftruncate, memfd_create, statvfs};
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use rustix::thread::sched_getaffinity;

use super::DoctorArgs;
use super::check::Check;
use crate::bench::memory;
use crate::error::Result;
use crate::format::{self, plural};
use crate::launch;

/// Least free memory for a rank, and least free disk for a run.
const MEMORY_BYTES: u64 = 256 << 20;
const DISK_BYTES: u64 = 1 << 30;
/// With less than this, not even a checkpoint of a small model can be written.
const DISK_MIN_BYTES: u64 = 64 << 20;
/// How long the resolver may take.
const RESOLVER: Duration = Duration::from_secs(3);
/// Before this program was written: the clock was never set.
const YEAR_2025: u64 = 1_735_689_600;

/// Of no consequence once the ranks have met.
pub const HOST_NAME: &str = "host_name";

/// All checks that need no other rank.
pub fn checks(args: &DoctorArgs) -> Result<Vec<Check>> {
    let env = launch::real_env();
    let place = launch::rank_place(&env)?;
    let place = place.as_ref();
    let world = args.ranks.known_world()?;
    let here = match place {
        Some(place) => place.local_world.unwrap_or(1),
        None if args.ranks.is_rank()? => 1,
        None => args.ranks.ranks_to_start()?,
    };
    let cores = Cores::here();
    let mut checks = vec![
        engine(place, &args.ranks, world),
        cores_check(cores),
        threads(&args.ranks, here, cores)?,
        instructions(),
        gpu(),
        memory_check(here),
        open_files(world, here),
        shared_memory(),
        temporary_folder(),
    ];
    // Rank 0 writes the run.
    if place.is_none_or(|place| place.rank == 0) {
        checks.push(disk(&args.output_dir));
    }
    checks.push(clock());
    checks.push(name(world > here, place, address(&args.ranks, place)));
    Ok(checks)
}

/// Who started this process, and as which rank.
fn engine(place: Option<&Process>, ranks: &RankArgs, world: usize) -> Check {
    const NAME: &str = "engine";
    let env = launch::real_env();
    let is_set = |name: &str| env.get(name).is_some_and(|text| !text.is_empty());
    let Some(place) = place else {
        return Check::ok(
            NAME,
            match ranks.world_size.unwrap_or(1) {
                1 if world > 1 => format!("none: this command starts {world} ranks"),
                1 => "none: one rank, alone".to_owned(),
                world => format!(
                    "none: rank {} of {world}, meeting at {}",
                    ranks.rank.unwrap_or(0),
                    ranks.init_method
                ),
            },
        );
    };
    let engine = match place.source {
        "RANK" if is_set("PHALANX_STORE") => "phalanx",
        "RANK" if is_set("TORCHELASTIC_RUN_ID") => "torchrun",
        "RANK" => "RANK and WORLD_SIZE",
        engine => engine,
    };
    let local = match place.local_world {
        Some(ranks) => format!(", {} of {ranks} on this host", place.local_rank),
        None => String::new(),
    };
    let meeting = match (&place.master_addr, env.get("PHALANX_STORE")) {
        _ if ranks.init_method != "env://" => format!(", meeting at {}", ranks.init_method),
        // Of no interest there, and under MPI and Slurm a file.
        _ if place.is_on_one_host() => String::new(),
        (_, Some(store)) if store.contains(':') => format!(", meeting at {store}"),
        (Some(host), _) => format!(", meeting at {}", host_port(host, place.master_port)),
        _ => String::new(),
    };
    Check::ok(
        NAME,
        format!(
            "{engine}: rank {} of {}{local}{meeting}",
            place.rank, place.world
        ),
    )
}

fn cores_check(cores: Cores) -> Check {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let host = text.lines().filter(|l| l.starts_with("processor")).count();
    let host = host.max(cores.usable);
    let mask = sched_getaffinity(None).map_or(0, |set| set.count() as usize);
    Check::ok(
        "cores",
        match cores.usable {
            usable if usable == host => plural(usable, "core"),
            usable if usable < mask => format!("{usable} of {host} (cgroup quota)"),
            usable => format!("{usable} of {host} (affinity mask)"),
        },
    )
}

fn threads(ranks: &RankArgs, here: usize, cores: Cores) -> Result<Check> {
    const NAME: &str = "threads";
    let threads = ranks.compute_threads()?;
    let each = if here > 1 { " for each rank" } else { "" };
    let found = format!("{}{each} ({})", threads.count, threads.source);
    let (all, cores) = (here * threads.count, cores.shared);
    if all <= cores {
        return Ok(Check::ok(NAME, found));
    }
    let fix = match here > cores {
        true => format!("--nproc-per-node {cores}, or more cores for this job"),
        false => format!("--threads {}", cores / here),
    };
    let text = format!(
        "{found}: {} of {} share {}",
        plural(all, "thread"),
        plural(here, "rank"),
        plural(cores, "core")
    );
    Ok(Check::warning(NAME, text, fix))
}

fn instructions() -> Check {
    const NAME: &str = "instructions";
    match phalanx_nn::isa_name() {
        name @ "no SIMD" => Check::warning(
            NAME,
            name,
            "a processor with AVX2; in a virtual machine, the host's processor type; unset PHALANX_ISA",
        ),
        name => Check::ok(NAME, format!("{name}, {} for bf16", Family::here().title())),
    }
}

fn gpu() -> Check {
    let found = phalanx_launch::gpus();
    Check::ok(
        "gpu",
        match found.len() {
            0 => "none found, and none is needed".to_owned(),
            n => format!(
                "{n} ({}); programs of Burn and PyTorch can use it, `phalanx train` computes on processors",
                found[0]
            ),
        },
    )
}

fn memory_check(here: usize) -> Check {
    const NAME: &str = "memory";
    let size = |bytes: u64| format::bytes(usize::try_from(bytes).unwrap_or(usize::MAX));
    let Some(left) = memory::left_bytes() else {
        return Check::ok(NAME, "unknown: there is no /proc/meminfo");
    };
    let mut found = format!("{} for {}", size(left), plural(here, "rank"));
    if let Some(limit) = phalanx_process::oom::memory_limit() {
        found.push_str(&format!(" (cgroup limit {})", size(limit)));
    }
    if let Some(limit) = getrlimit(Resource::As).current {
        found.push_str(&format!(" (ulimit -v {})", size(limit)));
    }
    if left / here.max(1) as u64 >= MEMORY_BYTES {
        return Check::ok(NAME, found);
    }
    Check::warning(
        NAME,
        found,
        "fewer ranks on this host, or more memory for the job",
    )
}

/// Files and sockets of a rank with two groups, or of the launcher of these ranks, which needs more for each of them: a
/// rank has three connections to each rank of another host in each group, and the store has three clients a rank.
fn open_files(world: usize, here: usize) -> Check {
    const NAME: &str = "open_files";
    const OWN: u64 = 16;
    let (world, here) = (world as u64, here as u64);
    let needed = OWN + 5 * here + 9 * world.saturating_sub(here);
    let limit = getrlimit(Resource::Nofile).current;
    let ranks = plural(world as usize, "rank");
    let found = match limit {
        None => "no limit".to_owned(),
        Some(limit) => format!("{limit} (ulimit -Hn), about {needed} needed for {ranks}"),
    };
    let limit = limit.unwrap_or(u64::MAX);
    let fix = format!(
        "ulimit -n {}, LimitNOFILE= of a service, or docker --ulimit nofile=",
        (4 * needed).next_power_of_two().max(1024)
    );
    match () {
        () if limit < needed => Check::problem(NAME, found, fix),
        () if limit < 2 * needed => Check::warning(NAME, found, fix),
        () => Check::ok(NAME, found),
    }
}

/// What ranks of one host share memory by: memory files and handles of processes.
fn shared_memory() -> Check {
    const NAME: &str = "shared_memory";
    const BYTES: u64 = 1 << 20;
    let memory = memfd_create("phalanx-doctor", MemfdFlags::CLOEXEC)
        .and_then(|file| ftruncate(&file, BYTES).map(|()| file))
        .map_err(std::io::Error::from)
        .and_then(|file| fs::File::from(file).write_all(&[1; 4096]));
    let process = pidfd_open(getpid(), PidfdFlags::empty());
    let limit = getrlimit(Resource::Fsize).current;
    match (memory, process, limit) {
        (Err(e), ..) => Check::problem(
            NAME,
            format!("memory files are refused (memfd_create: {e})"),
            "allow memfd_create in the container's seccomp profile",
        ),
        (_, Err(e), _) => Check::warning(
            NAME,
            format!(
                "handles of processes are refused (pidfd_open: {e}): ranks of this host talk over TCP"
            ),
            "allow pidfd_open in the container's seccomp profile; Linux 5.3 or later",
        ),
        (.., Some(limit)) if limit < 1 << 30 => Check::warning(
            NAME,
            format!("files, and so memory files, can have at most {limit} bytes (ulimit -f)"),
            "ulimit -f unlimited",
        ),
        _ => Check::ok(NAME, "works (memory files; /dev/shm is not used)"),
    }
}

fn temporary_folder() -> Check {
    const NAME: &str = "tmpdir";
    let folder = std::env::temp_dir();
    let file = folder.join(format!("phalanx-doctor-{}", std::process::id()));
    let written = fs::File::create_new(&file).and_then(|mut file| file.write_all(b"x"));
    let _ = fs::remove_file(&file);
    match written {
        Ok(()) => Check::ok(NAME, format!("{} can be written", folder.display())),
        Err(e) => Check::problem(
            NAME,
            format!("{} cannot be written: {e}", folder.display()),
            "set TMPDIR to a folder that can",
        ),
    }
}

fn disk(output: &Path) -> Check {
    const NAME: &str = "disk";
    let is_there = |folder: &&Path| folder.exists();
    let folder = match output.ancestors().find(is_there) {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let shown = output.display();
    if let Err(e) = access(folder, Access::WRITE_OK | Access::EXEC_OK) {
        return Check::problem(
            NAME,
            format!("{shown} cannot be written: {}", std::io::Error::from(e)),
            "--output-dir DIR, a folder that can be written",
        );
    }
    let free = match statvfs(folder) {
        Ok(disk) => disk.f_bavail.saturating_mul(disk.f_frsize),
        Err(e) => {
            let e = std::io::Error::from(e);
            return Check::ok(NAME, format!("{shown}: free space unknown ({e})"));
        }
    };
    let size = format::bytes(usize::try_from(free).unwrap_or(usize::MAX));
    let found = format!("{size} free for {shown}");
    let fix = "free some, or --output-dir DIR on another disk";
    match free {
        DISK_BYTES.. => Check::ok(NAME, found),
        DISK_MIN_BYTES.. => Check::warning(NAME, found, fix),
        _ => Check::problem(NAME, found, fix),
    }
}

fn clock() -> Check {
    const NAME: &str = "clock";
    if phalanx_base::unix_time().as_secs() < YEAR_2025 {
        return Check::problem(
            NAME,
            "the system time is before 2025",
            "set it (NTP): certificates and file times depend on it",
        );
    }
    let file = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(file).unwrap_or_default();
    match source.trim() {
        slow @ ("hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") => Check::warning(
            NAME,
            format!("clock source {slow} is slow to read"),
            "a kernel and hypervisor with tsc or kvm-clock",
        ),
        "" => Check::ok(NAME, "set"),
        source => Check::ok(NAME, format!("set, clock source {source}")),
    }
}

/// Whether other hosts could reach this one by its name: Debian's /etc/hosts maps it to 127.0.1.1.
fn name(has_several_hosts: bool, place: Option<&Process>, own: Option<IpAddr>) -> Check {
    let host = phalanx_base::host_name();
    let asked = host.clone();
    let (answer, answered) = channel();
    let asking = std::thread::Builder::new().spawn(move || {
        let found = (asked.as_str(), 0).to_socket_addrs();
        let found: Vec<IpAddr> = found
            .into_iter()
            .flatten()
            .map(|address| address.ip())
            .collect();
        let _ = answer.send(found);
    });
    let addresses = match asking.is_ok() {
        true => answered.recv_timeout(RESOLVER),
        false => Ok(Vec::new()),
    };
    let own = own.map_or("ADDRESS".to_owned(), |ip| ip.to_string());
    let fix = format!("give addresses instead of names: --master-addr {own} for this host");
    let (found, is_trap) = match addresses {
        Err(_) => (
            format!("{host} was not resolved within {} s", RESOLVER.as_secs()),
            true,
        ),
        Ok(list) => match list.iter().find(|ip| !ip.is_loopback()) {
            Some(ip) => (format!("{host} is {ip}"), false),
            None => match list.first() {
                None => (format!("{host} does not resolve here"), true),
                Some(ip) => (
                    format!("{host} is {ip} here, which other hosts cannot reach (/etc/hosts)"),
                    true,
                ),
            },
        },
    };
    let is_master = place.is_some_and(|p| p.rank == 0 && p.master_addr.as_ref() == Some(&host));
    match (is_trap && has_several_hosts, is_master) {
        (true, true) => Check::problem(HOST_NAME, found, fix),
        (true, false) => Check::warning(HOST_NAME, found, fix),
        _ => Check::ok(HOST_NAME, found),
    }
}

/// The address at which this rank is reached by ranks of other hosts.
pub fn address(ranks: &RankArgs, place: Option<&Process>) -> Option<IpAddr> {
    if ranks.bind.is_some() {
        return ranks.bind;
    }
    let store = std::env::var("PHALANX_STORE").ok();
    let typed = ranks.init_method.strip_prefix("tcp://").map(str::to_owned);
    let by_place = place
        .filter(|_| ranks.init_method == "env://")
        .and_then(|place| Some(host_port(place.master_addr.as_ref()?, place.master_port)));
    let store = store.filter(|store| store.contains(':'));
    let meeting = typed.or(store).or(by_place)?;
    let meeting: SocketAddr = meeting.to_socket_addrs().ok()?.next()?;
    match meeting.ip() {
        ip if ip.is_loopback() => Some(ip),
        _ => local_address_towards(meeting).ok(),
    }
}
