//! What `/proc` knows about the job's processes: who they are, where they
//! listen, how much memory they took.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};

use crate::line::Place;

/// All living descendants of these processes, themselves included.
pub fn family(roots: &[u32]) -> BTreeSet<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for pid in processes() {
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = BTreeSet::new();
    let mut next: Vec<u32> = roots.to_vec();
    while let Some(pid) = next.pop() {
        if found.insert(pid) {
            next.extend(children.get(&pid).into_iter().flatten());
        }
    }
    found
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may hold any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}

/// Inodes of the sockets that these processes hold.
fn sockets(pids: &BTreeSet<u32>) -> BTreeSet<u64> {
    let mut inodes = BTreeSet::new();
    for pid in pids {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for entry in entries.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            let text = target.to_string_lossy();
            let inode = text
                .strip_prefix("socket:[")
                .and_then(|t| t.strip_suffix(']'));
            inodes.extend(inode.and_then(|i| i.parse::<u64>().ok()));
        }
    }
    inodes
}

/// Where these processes listen now.
pub fn listening(pids: &BTreeSet<u32>) -> BTreeSet<Place> {
    let mine = sockets(pids);
    let tcp = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let unix = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let tcp = tcp.lines().filter_map(tcp_listener);
    let unix = unix.lines().filter_map(unix_listener);
    tcp.chain(unix)
        .filter(|(_, inode)| mine.contains(inode))
        .map(|(place, _)| place)
        .collect()
}

/// `sl local rem st ...`: address, and inode if it listens (state 0A).
fn tcp_listener(line: &str) -> Option<(Place, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    if *fields.get(3)? != "0A" {
        return None;
    }
    let (ip, port) = fields.get(1)?.split_once(':')?;
    // The kernel prints the address's bytes as one number in its own order.
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    let port = u16::from_str_radix(port, 16).ok()?;
    let place = Place::Tcp(SocketAddr::from((ip, port)));
    Some((place, fields.get(9)?.parse().ok()?))
}

/// `Num RefCount Protocol Flags Type St Inode Path`: abstract names that listen.
fn unix_listener(line: &str) -> Option<(Place, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let listens = u32::from_str_radix(fields.get(3)?, 16).ok()? & 0x10000 != 0;
    let name = fields.get(7)?.strip_prefix('@')?;
    let inode = fields.get(6)?.parse().ok()?;
    listens.then(|| (Place::Unix(name.to_owned()), inode))
}

/// Unix sockets in the abstract name space that listen now, of any process:
/// name and inode.
pub fn abstract_listeners() -> Vec<(String, u64)> {
    let unix = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let found = unix.lines().filter_map(unix_listener);
    found
        .filter_map(|(place, inode)| match place {
            Place::Unix(name) => Some((name, inode)),
            Place::Tcp(_) => None,
        })
        .collect()
}

/// Whether one of these processes holds the socket.
pub fn holds(pids: &BTreeSet<u32>, inode: u64) -> bool {
    sockets(pids).contains(&inode)
}

/// The most memory each process ever had, in KiB.
pub fn peaks(pids: &BTreeSet<u32>) -> BTreeMap<u32, u64> {
    pids.iter()
        .filter_map(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
            Some((*pid, line.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}

/// Whether its command line or environment holds this text.
pub fn shows(pid: u32, secret: &str) -> bool {
    ["cmdline", "environ"].iter().any(|file| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let needle = secret.as_bytes();
        bytes.windows(needle.len()).any(|part| part == needle)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::UnixListener;
    use std::time::{Duration, Instant};

    #[test]
    fn our_own_listeners_are_found() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("phalanx-attacks-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        let _unix = UnixListener::bind_addr(&address).unwrap();
        let me = family(&[std::process::id()]);
        let listeners = abstract_listeners();
        let inode = listeners.iter().find(|(n, _)| *n == name).unwrap().1;
        assert!(holds(&me, inode) && !holds(&BTreeSet::new(), inode));
        let found = listening(&me);
        assert!(found.contains(&Place::Tcp(tcp.local_addr().unwrap())));
        assert!(found.contains(&Place::Unix(name)));
        assert!(peaks(&me)[&std::process::id()] > 100);
        assert!(!listening(&BTreeSet::new()).contains(&Place::Tcp(tcp.local_addr().unwrap())));
    }

    #[test]
    fn children_belong_to_the_family() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let family = family(&[std::process::id()]);
        // A child counts as started while the kernel still lays out its new memory, command line included.
        let started = Instant::now();
        let mut visible = shows(child.id(), "60");
        while !visible && started.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
            visible = shows(child.id(), "60");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(family.contains(&child.id()));
        assert!(visible);
    }
}
