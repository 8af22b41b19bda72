//! Checks whether the host of a peer still lives.
//!
//! A process that dies closes its connections, and its peers see that at once. A host that loses
//! power or its network closes none. So of each pair of hosts one connection of a group, the
//! control connection of their lowest ranks, is probed by the kernel (TCP keep-alive). Lost
//! probes alone prove nothing, because a busy host may drop them: after some of them a new
//! connection is tried, which the other kernel answers by itself, also by refusing it. A host
//! that answers neither is considered gone, 25 to 36 s after its last answer.

use std::io::{Error, ErrorKind as IoKind};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::control::Control;
use super::options::{keep_alive, unanswered_probes};
use crate::{Result, limits};

/// Least silence after which the kernel probes, and least interval of its probes; see [`jitter`].
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// Unanswered probes after which a new connection is tried; the last may still be in flight.
const SUSPICIOUS: u32 = 5;
/// How long a new connection may go unanswered; the kernel sends a SYN at 0, 1 and 3 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two checks of the number of lost probes.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Silence after which other connections between hosts are probed, only so that firewalls, which
/// drop idle connections after some minutes, do not drop them.
const KEEP_OPEN_EVERY: Duration = Duration::from_secs(240);

/// Keeps firewalls between hosts from dropping an idle connection.
pub(in super::super) fn keep_open(stream: &TcpStream) -> std::io::Result<()> {
    keep_alive(stream, KEEP_OPEN_EVERY + jitter(60), KEEP_OPEN_EVERY)
}

/// Probes `stream` as [`HostProbe`] needs it.
pub(in super::super) fn probe(stream: &TcpStream) -> std::io::Result<()> {
    keep_alive(stream, PROBE_EVERY + jitter(2), PROBE_EVERY + jitter(1))
}

/// Up to `most_s` seconds at random, so that connections are not probed at the same moments.
fn jitter(most_s: u64) -> Duration {
    Duration::from_secs(getrandom::u64().unwrap_or(0) % (most_s + 1))
}

/// Checks the host of one peer.
pub(in super::super) struct HostProbe {
    control: Arc<Control>,
    /// Where the peer listened while the group formed.
    address: SocketAddr,
    next_check: Instant,
    /// A new connection is being tried.
    asked: Option<Receiver<std::io::Result<()>>>,
}

impl HostProbe {
    /// `control` was given to [`probe`].
    pub(in super::super) fn new(control: Arc<Control>, address: SocketAddr) -> HostProbe {
        HostProbe {
            control,
            address,
            next_check: Instant::now(),
            asked: None,
        }
    }

    /// An error if the host is gone.
    pub(in super::super) fn check(&mut self, now: Instant) -> Result<()> {
        if now < self.next_check || !self.control.is_open() {
            return Ok(());
        }
        self.next_check = now + LOOK_EVERY;
        let lost = unanswered_probes(&self.control.socket()).unwrap_or(0);
        match self.judge(lost) {
            None => Ok(()),
            Some(how) => Err(super::Fate::Lost(how).into_error(self.control.peer())),
        }
    }

    /// Why the host is gone, given how many probes went unanswered.
    fn judge(&mut self, lost: u32) -> Option<String> {
        if lost < SUSPICIOUS {
            self.asked = None;
            return None;
        }
        let Some(asked) = &self.asked else {
            self.asked = ask(self.address);
            return None;
        };
        match asked.try_recv() {
            Err(TryRecvError::Empty) => None,
            Ok(Err(e)) => Some(format!(
                "its host does not answer: neither {lost} probes of a connection nor a new connection \
                 to {} ({e})",
                self.address
            )),
            Ok(Ok(())) | Err(TryRecvError::Disconnected) => {
                tracing::debug!(
                    peer = self.control.peer(),
                    lost,
                    "its host lives, although probes were lost"
                );
                self.asked = None;
                None
            }
        }
    }
}

/// Tries to connect to `address`, on a separate thread; an error means that the host does not answer.
fn ask(address: SocketAddr) -> Option<Receiver<std::io::Result<()>>> {
    let (sender, receiver) = channel();
    let started = std::thread::Builder::new()
        .name("phalanx-probe".to_owned())
        .stack_size(128 << 10)
        .spawn(move || {
            if let Some(answer) = verdict(TcpStream::connect_timeout(&address, ANSWER_WITHIN).err())
            {
                let _ = sender.send(answer);
            }
        });
    match started {
        Ok(_) => Some(receiver),
        Err(e) => {
            tracing::debug!("cannot start a thread to look for a host: {e}");
            None
        }
    }
}

/// What the result of an attempt to connect shows about the host; `None` if it failed on this host.
fn verdict(failure: Option<Error>) -> Option<std::io::Result<()>> {
    match failure {
        None => Some(Ok(())),
        Some(e) if limits::is_out_of_files(&e) => None,
        Some(e) => match e.kind() {
            IoKind::ConnectionRefused | IoKind::ConnectionReset => Some(Ok(())),
            IoKind::TimedOut | IoKind::HostUnreachable | IoKind::NetworkUnreachable => Some(Err(e)),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::Layout;
    use super::super::super::segment::Segment;
    use super::*;
    use std::net::TcpListener;

    fn host_probe(address: SocketAddr) -> HostProbe {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let segment = Arc::new(Segment::private(Layout::new(1, 64).unwrap()).unwrap());
        HostProbe::new(Arc::new(Control::new(1, (0, 0), stream, segment)), address)
    }

    /// Judges until `done` returns that the attempt to connect has ended.
    fn judged(probe: &mut HostProbe, done: impl Fn(&HostProbe) -> bool) -> Option<String> {
        let start = Instant::now();
        loop {
            let judged = probe.judge(SUSPICIOUS);
            if judged.is_some() || done(probe) {
                return judged;
            }
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn lost_probes_alone_are_no_verdict() {
        // No process listens there any more, as when a group has formed: the kernel refuses.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let mut probe = host_probe(address);
        for _ in 0..3 {
            assert_eq!(probe.judge(SUSPICIOUS), None);
            assert!(probe.asked.is_some());
            assert_eq!(judged(&mut probe, |probe| probe.asked.is_none()), None);
        }
        // Probes that are answered again end the suspicion.
        assert_eq!(probe.judge(SUSPICIOUS), None);
        assert_eq!(probe.judge(0), None);
        assert!(probe.asked.is_none());
    }

    /// A full queue, like a host that is gone, does not answer.
    #[test]
    fn a_host_that_answers_nothing_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let short = Duration::from_millis(200);
        let mut queue = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&address, short) {
            queue.push(stream);
        }
        let mut probe = host_probe(address);
        let how = judged(&mut probe, |_| false).unwrap();
        assert!(how.contains("does not answer"), "{how}");
        assert!(how.contains(&address.to_string()), "{how}");
    }

    #[test]
    fn what_fails_here_says_nothing_of_the_host() {
        let of = |code| verdict(Some(Error::from_raw_os_error(code)));
        assert!(matches!(of(libc::ECONNREFUSED), Some(Ok(()))));
        assert!(matches!(of(libc::EHOSTUNREACH), Some(Err(_))));
        assert!(matches!(of(libc::ETIMEDOUT), Some(Err(_))));
        assert!(of(libc::EMFILE).is_none());
        assert!(of(libc::EADDRNOTAVAIL).is_none());
        assert!(matches!(verdict(None), Some(Ok(()))));
    }

    #[test]
    fn a_peer_that_computes_is_not_cut_off_and_a_dead_host_is_suspected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        probe(&stream).unwrap();
        use rustix::net::sockopt;
        // Zero: the kernel never gives up on a window that stays closed.
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 0);
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(unanswered_probes(&stream).unwrap(), 0);
        let (idle, interval) = (
            sockopt::tcp_keepidle(&stream).unwrap(),
            sockopt::tcp_keepintvl(&stream).unwrap(),
        );
        let found_after = idle + interval * (SUSPICIOUS - 1) + ANSWER_WITHIN;
        assert!(
            (25..=36).contains(&found_after.as_secs()),
            "{found_after:?}"
        );
        // The kernel's own timeout comes much later.
        let own = interval * sockopt::tcp_keepcnt(&stream).unwrap();
        assert!(own > Duration::from_secs(300), "{own:?}");
    }
}
