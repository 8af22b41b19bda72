//! Notices on standard error while ranks wait, and how they print ranks, times and
//! hosts.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind as IoKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Receives the lines printed on standard error about late or lost ranks.
pub type NoticeListener = Arc<dyn Fn(&str) + Send + Sync>;

static LISTENER: RwLock<Option<NoticeListener>> = RwLock::new(None);

/// Calls `listener` with each line that this process prints on standard error about ranks that are late or lost, from
/// the thread that prints it. It replaces an earlier one; `None` removes it.
pub fn set_notice_listener(listener: Option<NoticeListener>) {
    *LISTENER.write().unwrap_or_else(PoisonError::into_inner) = listener;
}

/// Time until the first notice that a group does not form.
const FORMING_AFTER: Duration = Duration::from_secs(2);
/// Seconds after which a waiting rank reports the ranks it waits for.
const LATE_VARIABLE: &str = "PHALANX_LATE_AFTER_S";

/// The value of [`LATE_VARIABLE`].
pub(crate) fn late_variable() -> Option<Duration> {
    std::env::var(LATE_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|time| !time.is_zero())
}

/// When to report that a group does not form: after 2 s ([`LATE_VARIABLE`]), and each time
/// the wait has doubled.
pub(crate) struct Waiting {
    since: Instant,
    next: Duration,
}

impl Waiting {
    pub(crate) fn start() -> Waiting {
        Waiting {
            since: Instant::now(),
            next: late_variable().unwrap_or(FORMING_AFTER),
        }
    }

    /// How long the wait has been, if it is to be reported now.
    pub(crate) fn due(&mut self) -> Option<Duration> {
        let waited = self.since.elapsed();
        if waited < self.next {
            return None;
        }
        self.next = waited.max(self.next) * 2;
        Some(waited)
    }
}

/// The right to report a wait on behalf of all processes of a job on this host that wait for the same thing. The
/// first process that asks has it, until this is dropped. It is an abstract Unix socket, which ends with its
/// process.
pub(crate) struct HostSpeaker {
    name: String,
    held: Option<UnixListener>,
}

impl HostSpeaker {
    /// For the waits of `job` for `what`.
    pub(crate) fn new(job: u64, what: &str) -> HostSpeaker {
        // Short enough for a name; processes of one job run the same program.
        let mut hash = DefaultHasher::new();
        (job, what).hash(&mut hash);
        HostSpeaker {
            name: format!("phalanx-waits-{:016x}", hash.finish()),
            held: None,
        }
    }

    /// Whether this process reports the wait.
    pub(crate) fn speaks(&mut self) -> bool {
        if self.held.is_some() {
            return true;
        }
        let name = SocketAddr::from_abstract_name(&self.name);
        match name.and_then(|name| UnixListener::bind_addr(&name)) {
            Ok(held) => self.held = Some(held),
            Err(e) if e.kind() == IoKind::AddrInUse => return false,
            // Duplicate lines are better than none.
            Err(e) => tracing::debug!("cannot find out who reports a wait on this host: {e}"),
        }
        true
    }
}

/// One write, so that the lines of several processes do not mix; over a
/// progress bar if there is one, which comes back by itself.
pub(crate) fn say(text: &str) {
    use std::io::{IsTerminal, Write};
    let listener = LISTENER
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    if let Some(listener) = listener {
        listener(text);
    }
    let mut stderr = std::io::stderr().lock();
    let clear = if stderr.is_terminal() {
        "\r\x1b[2K"
    } else {
        ""
    };
    // A closed stderr is not an error.
    let _ = stderr.write_all(format!("{clear}{text}\n").as_bytes());
}

/// `0, 1, 3`.
pub(crate) fn list(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    numbers.join(", ")
}

/// `rank 0`, `ranks 0, 1, 3`; of many, the first.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let shown = list(&ranks[..ranks.len().min(SHOWN)]);
    let plural = if ranks.len() == 1 { "" } else { "s" };
    let more = match ranks.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{plural} {shown}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_a_host_reports_a_wait() {
        let job = getrandom::u64().unwrap();
        let (mut first, mut second) = (HostSpeaker::new(job, "a"), HostSpeaker::new(job, "a"));
        assert!(first.speaks() && !second.speaks() && first.speaks());
        assert!(HostSpeaker::new(job, "b").speaks());
        // Another process takes over.
        drop(first);
        assert!(second.speaks());
    }

    #[test]
    fn ranks_are_listed() {
        assert_eq!(ranks(&[2]), "rank 2");
        assert_eq!(ranks(&[0, 1, 3]), "ranks 0, 1, 3");
        let many: Vec<usize> = (0..11).collect();
        assert_eq!(ranks(&many), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more");
    }
}
