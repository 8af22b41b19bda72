//! What the ranks of a job find out together.

use std::fs::File;
use std::io;

use phalanx::member::RankContext;
use phalanx_base::files::read_pieces;
use phalanx_base::host_name;
use phalanx_comm::transport::machine;
use phalanx_comm::{ProcessGroup, ReduceOp, format_ranks};
use phalanx_launch::TransportArg;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::check::{Check, Status};
use super::data::{self, Data};
use super::pairs::{self, Pair};
use super::report::{HostReport, Report};
use super::{DoctorArgs, host, verdict};
use crate::error::Result;
use crate::format::plural;
use crate::launch;

/// The most ranks of one host that measure each other.
const MOST_MEASURED: usize = 8;
/// Clocks further apart confuse logs and file times.
const CLOCK_SECONDS: f64 = 1.0;
/// A pair that is this many times slower than the median is named.
const SLOW: f64 = 4.0;
const SUMMED: usize = 1000;
/// Large enough that ranks of one host read it where it lies.
const COPIED_BYTES: usize = 4 << 20;

/// What a rank knows before anything is measured.
#[derive(Clone, Serialize, Deserialize)]
struct RankFacts {
    host: String,
    machine: String,
    address: Option<String>,
    version: String,
    /// SHA-256 of the program; of one rank a host.
    program: Option<String>,
    threads: usize,
    instructions: String,
    transports: Vec<(usize, String)>,
    checks: Vec<Check>,
    data: Option<Data>,
}

/// What a rank measured.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Measured {
    /// The sum of whole numbers was right.
    is_right: bool,
    /// Of the bits of a sum of fractions.
    sum: String,
    /// Whether large data was read where it lay; `None` where that does not apply.
    single_copy: Option<bool>,
    pairs: Vec<Pair>,
    /// Of rank 0: host, seconds ahead, largest error.
    clocks: Vec<(usize, f64, f64)>,
}

/// Runs all checks of the job; rank 0 prints the report.
///
/// # Errors
///
/// Failed collectives; problems that were found, on rank 0.
pub fn examine(ctx: &RankContext, args: &DoctorArgs) -> Result<()> {
    let group = &ctx.group();
    let all = group.all_gather_object(&facts(ctx, args)?)?;
    let hosts = hosts_of(&all);
    let mut mine = Measured::default();
    add_up(group, &mut mine)?;
    mine.single_copy = single_copy(ctx)?;
    measure_pairs(group, &hosts, &mut mine.pairs)?;
    for (index, ranks) in hosts.iter().enumerate().skip(1) {
        if (group.rank() == 0 || group.rank() == ranks[0])
            && let Some((ahead, error)) = pairs::clock_of(group, ranks[0])?
        {
            mine.clocks.push((index, ahead, error));
        }
    }
    let measured = group.gather_object(&mine, 0)?;
    let Some(measured) = measured else {
        return Ok(());
    };
    let report = report(&all, &hosts, &measured, args);
    report.print(args.json)?;
    verdict(report.count(Status::Problem))
}

fn facts(ctx: &RankContext, args: &DoctorArgs) -> Result<RankFacts> {
    let place = launch::rank_place(&launch::real_env())?;
    let is_first = ctx.local_rank == 0;
    let links = ctx.group().transports();
    let mut checks = host::checks(args)?;
    for check in checks.iter_mut().filter(|c| c.name == host::HOST_NAME) {
        *check = Check::ok(host::HOST_NAME, check.found.as_str());
    }
    Ok(RankFacts {
        machine: Some(machine())
            .filter(|m| !m.is_empty())
            .unwrap_or_else(host_name),
        host: host_name(),
        address: host::address(&args.ranks, place.as_ref()).map(|ip| ip.to_string()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        program: is_first.then(|| program().ok()).flatten(),
        threads: ctx.threads,
        instructions: phalanx_nn::isa_name().to_owned(),
        transports: links
            .iter()
            .map(|(peer, kind)| (*peer, kind.name().to_owned()))
            .collect(),
        checks,
        data: args.data.as_deref().filter(|_| is_first).map(data::scan),
    })
}

/// SHA-256 of this program's file.
fn program() -> io::Result<String> {
    let mut hash = Sha256::new();
    read_pieces(File::open("/proc/self/exe")?, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    Ok(data::short(&hash.finalize()))
}

/// The ranks of each host, in ascending order; that of rank 0 is the first host.
fn hosts_of(all: &[RankFacts]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (rank, facts) in all.iter().enumerate() {
        match hosts
            .iter_mut()
            .find(|ranks| all[ranks[0]].machine == facts.machine)
        {
            Some(ranks) => ranks.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    hosts
}

/// Adds known numbers over all ranks.
fn add_up(group: &ProcessGroup, mine: &mut Measured) -> Result<()> {
    let (rank, world) = (group.rank() as i64, group.world_size() as i64);
    let mut whole: Vec<i64> = (0..SUMMED as i64).map(|i| rank + i).collect();
    group.all_reduce(&mut whole, ReduceOp::Sum)?;
    let sum = |i: i64| world * (world - 1) / 2 + world * i;
    mine.is_right = (0_i64..).zip(&whole).all(|(i, found)| *found == sum(i));
    let mut parts: Vec<f32> = (0..SUMMED)
        .map(|i| 1.0 / (1 + i + group.rank()) as f32)
        .collect();
    group.all_reduce(&mut parts, ReduceOp::Sum)?;
    let mut hash = Sha256::new();
    parts.iter().for_each(|x| hash.update(x.to_le_bytes()));
    mine.sum = data::short(&hash.finalize());
    Ok(())
}

/// Whether ranks that share memory may read each other's (`process_vm_readv`).
fn single_copy(ctx: &RankContext) -> Result<Option<bool>> {
    if ctx.world() == 1 || ctx.transport() != "shm" {
        return Ok(None);
    }
    let before = ctx.group().counters().staged_bytes;
    let input = vec![ctx.rank() as u8; COPIED_BYTES / ctx.world() * ctx.world()];
    let mut output = vec![0; input.len()];
    ctx.group().all_to_all(&input, &mut output)?;
    Ok(Some(ctx.group().counters().staged_bytes == before))
}

/// The first rank of each host with that of each other host, then two ranks of each host; on one host, all ranks with
/// each other.
fn measure_pairs(group: &ProcessGroup, hosts: &[Vec<usize>], found: &mut Vec<Pair>) -> Result<()> {
    let members: Vec<usize> = match hosts {
        [ranks] => ranks.iter().copied().take(MOST_MEASURED).collect(),
        hosts => hosts.iter().map(|ranks| ranks[0]).collect(),
    };
    let mut rounds = pairs::rounds(&members);
    if hosts.len() > 1 {
        let inside = hosts.iter().filter(|ranks| ranks.len() > 1);
        rounds.push(inside.map(|ranks| (ranks[0], ranks[1])).collect());
    }
    let me = group.rank();
    for round in rounds {
        if let Some(pair) = round.into_iter().find(|(a, b)| *a == me || *b == me) {
            found.extend(pairs::measure(group, pair)?);
        }
    }
    Ok(())
}

fn report(
    all: &[RankFacts],
    hosts: &[Vec<usize>],
    measured: &[Measured],
    args: &DoctorArgs,
) -> Report {
    let mut reports: Vec<HostReport> = hosts.iter().map(|ranks| host_report(all, ranks)).collect();
    name_apart(&mut reports);
    let names: Vec<&str> = reports.iter().map(|host| host.name.as_str()).collect();
    let mut pairs: Vec<Pair> = measured.iter().flat_map(|m| m.pairs.clone()).collect();
    pairs.sort_by_key(|pair| (pair.from, pair.to));
    let mut job = Vec::new();
    if all.len() > 1 {
        job.push(Check::ok(
            "ranks",
            format!(
                "{} on {}",
                plural(all.len(), "rank"),
                plural(hosts.len(), "host")
            ),
        ));
        job.push(same_program(all));
        job.push(same_settings(all));
        job.push(transport(all, hosts, &names, args));
        job.extend(copies(measured));
        job.push(sums(measured));
        job.extend(clocks(&measured[0], &names));
        job.extend(slow_pair(&pairs));
        job.extend(same_data(all, hosts, &names));
    }
    Report {
        world: all.len(),
        hosts: reports,
        job,
        pairs,
    }
}

/// The checks of a host's first rank, and of the others what is worse.
fn host_report(all: &[RankFacts], ranks: &[usize]) -> HostReport {
    let first = &all[ranks[0]];
    let mut checks = first.checks.clone();
    for rank in &ranks[1..] {
        for other in &all[*rank].checks {
            if let Some(check) = checks.iter_mut().find(|check| check.name == other.name)
                && check.status < other.status
            {
                *check = other.clone();
                check.found = format!("rank {rank}: {}", other.found);
            }
        }
    }
    let data = ranks.iter().find_map(|rank| all[*rank].data.as_ref());
    checks.extend(data.map(Data::check));
    HostReport {
        name: first.host.clone(),
        address: first.address.clone(),
        ranks: ranks.to_vec(),
        checks,
    }
}

/// Hosts with one name (containers, network namespaces) are named by their addresses.
fn name_apart(hosts: &mut [HostReport]) {
    let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
    for (index, host) in hosts.iter_mut().enumerate() {
        if names.iter().filter(|name| **name == host.name).count() > 1 {
            host.name = match host.address.clone() {
                Some(address) => address,
                None => format!("{}#{index}", host.name),
            };
        }
    }
}

/// `2 ranks`, or the numbers of a few.
fn ranks_where(all: &[RankFacts], holds: impl Fn(&RankFacts) -> bool) -> String {
    let ranks: Vec<usize> = (0..all.len()).filter(|rank| holds(&all[*rank])).collect();
    format_ranks(&ranks)
}

fn same_program(all: &[RankFacts]) -> Check {
    const NAME: &str = "program";
    let first = &all[0];
    if all.iter().any(|facts| facts.version != first.version) {
        let other = ranks_where(all, |facts| facts.version != first.version);
        return Check::problem(
            NAME,
            format!("{other}: another version than rank 0's {}", first.version),
            "install the same version on all hosts",
        );
    }
    let mut known = all.iter().filter_map(|facts| facts.program.as_ref());
    let Some(hash) = known.next() else {
        return Check::ok(NAME, format!("version {} on all ranks", first.version));
    };
    if known.any(|other| other != hash) {
        let differs = |facts: &RankFacts| facts.program.as_ref().is_some_and(|p| p != hash);
        return Check::warning(
            NAME,
            format!(
                "{}: another build of version {} than rank 0's",
                ranks_where(all, differs),
                first.version
            ),
            "copy one file to all hosts",
        );
    }
    Check::ok(
        NAME,
        format!("phalanx {} ({hash}) on all hosts", first.version),
    )
}

fn same_settings(all: &[RankFacts]) -> Check {
    const NAME: &str = "settings";
    let first = &all[0];
    let other = |differs: &dyn Fn(&RankFacts) -> bool| {
        all.iter().any(differs).then(|| ranks_where(all, differs))
    };
    if let Some(ranks) = other(&|facts| facts.instructions != first.instructions) {
        return Check::warning(
            NAME,
            format!(
                "{ranks}: other vector instructions than rank 0 ({})",
                first.instructions
            ),
            "hosts of one kind, or PHALANX_ISA=avx2 on all: the slowest rank sets the pace",
        );
    }
    if let Some(ranks) = other(&|facts| facts.threads != first.threads) {
        return Check::warning(
            NAME,
            format!("{ranks}: not {} as rank 0", plural(first.threads, "thread")),
            "--threads N, the same for all: the slowest rank sets the pace",
        );
    }
    let threads = plural(first.threads, "thread");
    Check::ok(
        NAME,
        format!("{threads} and {} on all ranks", first.instructions),
    )
}

fn transport(all: &[RankFacts], hosts: &[Vec<usize>], names: &[&str], args: &DoctorArgs) -> Check {
    const NAME: &str = "transport";
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for (rank, facts) in all.iter().enumerate() {
        for (_, kind) in facts.transports.iter().filter(|(peer, _)| *peer > rank) {
            match kinds.iter_mut().find(|(known, _)| known == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((kind, 1)),
            }
        }
    }
    let found: Vec<String> = kinds
        .iter()
        .map(|(kind, count)| format!("{} over {kind}", plural(*count, "pair")))
        .collect();
    let found = found.join(", ");
    if args.ranks.transport == TransportArg::Tcp {
        return Check::ok(NAME, format!("{found} (--transport tcp)"));
    }
    for (host, ranks) in hosts.iter().enumerate() {
        let first = &all[ranks[0]];
        let apart = first
            .transports
            .iter()
            .find(|(peer, kind)| ranks.contains(peer) && kind == "tcp");
        if let Some((peer, _)) = apart {
            return Check::warning(
                NAME,
                format!(
                    "{found}: ranks {} and {peer} on {} do not share memory",
                    ranks[0], names[host]
                ),
                "start them as one user and in one container; PHALANX_LOG=debug shows the reason",
            );
        }
    }
    Check::ok(NAME, found)
}

fn copies(measured: &[Measured]) -> Option<Check> {
    const NAME: &str = "single_copy";
    let known: Vec<bool> = measured.iter().filter_map(|m| m.single_copy).collect();
    Some(match (known.is_empty(), known.iter().all(|yes| *yes)) {
        (true, _) => return None,
        (_, true) => Check::ok(NAME, "ranks read large data of each other in place"),
        (_, false) => Check::warning(
            NAME,
            "ranks may not read each other's memory (process_vm_readv): large data is copied twice",
            "kernel.yama.ptrace_scope=0 or 1, a seccomp profile that allows it; unset PHALANX_SINGLE_COPY",
        ),
    })
}

fn sums(measured: &[Measured]) -> Check {
    const NAME: &str = "all_reduce";
    let wrong: Vec<usize> = (0..measured.len())
        .filter(|rank| !measured[*rank].is_right || measured[*rank].sum != measured[0].sum)
        .collect();
    match wrong.is_empty() {
        true => Check::ok(NAME, "right, and the same bits on all ranks"),
        false => Check::problem(
            NAME,
            format!("wrong sums on {}", format_ranks(&wrong)),
            "the same program on all hosts; then check the memory of these hosts",
        ),
    }
}

fn clocks(rank_0: &Measured, names: &[&str]) -> Option<Check> {
    const NAME: &str = "clocks";
    let by_distance =
        |a: &&(usize, f64, f64), b: &&(usize, f64, f64)| a.1.abs().total_cmp(&b.1.abs());
    let (host, ahead, error) = rank_0.clocks.iter().max_by(by_distance)?;
    let apart = ahead.abs();
    let shown = match apart {
        a if a < 0.01 => format!("{:.2} ms", (a.max(*error)) * 1e3),
        a => format!("{a:.2} s"),
    };
    Some(match apart < CLOCK_SECONDS {
        true => Check::ok(NAME, format!("within {shown} of each other")),
        false => Check::warning(
            NAME,
            format!(
                "that of {} is {shown} {} that of {}",
                names[*host],
                if *ahead > 0.0 { "ahead of" } else { "behind" },
                names[0]
            ),
            "NTP or chrony on all hosts: logs and file times of the run will not fit together",
        ),
    })
}

/// The pair of hosts with far less bandwidth than others.
fn slow_pair(pairs: &[Pair]) -> Option<Check> {
    let mut tcp: Vec<&Pair> = pairs.iter().filter(|p| p.transport == "tcp").collect();
    tcp.sort_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s));
    let (slowest, middle) = (tcp.first()?, tcp[tcp.len() / 2]);
    (tcp.len() > 2 && slowest.gb_per_s * SLOW < middle.gb_per_s).then(|| {
        Check::warning(
            "network",
            format!(
                "ranks {} and {} exchange {:.2} GB/s, others {:.2}",
                slowest.from, slowest.to, slowest.gb_per_s, middle.gb_per_s
            ),
            "check the cable, switch port and interface (--bind) of these hosts",
        )
    })
}

fn same_data(all: &[RankFacts], hosts: &[Vec<usize>], names: &[&str]) -> Option<Check> {
    const NAME: &str = "same_data";
    let of = |host: usize| hosts[host].iter().find_map(|rank| all[*rank].data.as_ref());
    let first = of(0)?;
    if hosts.len() == 1 {
        return None;
    }
    for (host, name) in names.iter().enumerate().skip(1) {
        let Some(data) = of(host) else { continue };
        if let Some(difference) = data.difference(name, first, names[0]) {
            return Some(Check::problem(
                NAME,
                difference,
                "copy the data set again; ranks would train on different samples",
            ));
        }
    }
    Some(Check::ok(NAME, "the same names and sizes on all hosts"))
}
