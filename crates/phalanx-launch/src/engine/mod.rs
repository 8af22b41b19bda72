//! Token, address and port of a job through the engine that started its processes: a user need not copy
//! a token or to name a host.
//!
//! Process 0 makes an offer: its address, a port that is free there and a new token. The engine's own
//! channel carries it to all others.
//!
//! | engine | channel | file |
//! |---|---|---|
//! | MPICH, Intel MPI, Flux, `srun --mpi=pmi2` | PMI-1 at the inherited socket `PMI_FD` | `pmi.rs` |
//! | Open MPI | `MPI_Bcast` by a short-lived helper process | `mpi.rs` |
//! | Slurm | `sbcast` copies a private file to every node of the step | `slurm.rs` |
//!
//! `docs/design/security.md` says who can read the token on its way.

mod address;
mod child;
mod mpi;
mod pmi;
mod slurm;

pub(crate) use mpi::helper;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use phalanx_store::host_port;
use phalanx_wire::Token;

use crate::error::{Error, ErrorKind, Result};
use crate::place::{Address, Channel, Env, Meeting, Process};
use crate::port::PortForRanks;
use crate::{say, token};

/// Where the processes of a job meet, and their secret.
pub(crate) struct Agreement {
    pub host: String,
    pub port: u16,
    pub token: Token,
    /// What process 0 holds and what lies on this node until all have met.
    pub until_met: RendezvousResources,
}

impl Agreement {
    /// As an init method.
    pub(crate) fn url(&self) -> String {
        format!("tcp://{}", host_port(&self.host, self.port))
    }
}

/// Kept until all processes have met: the port that process 0 named is its own until then, and
/// the file that `sbcast` made is removed afterwards.
#[derive(Default)]
pub(crate) struct RendezvousResources {
    _port: Option<PortForRanks>,
    _file: Option<slurm::BroadcastFile>,
}

/// Agrees on the token and the address, where they were not `given`; every process of the job calls it. *Blocks* for at most `limit`. `None`: all
/// that is needed was given, or the engine has no channel.
///
/// # Errors
///
/// `Usage` names what the engine's channel lacks, and the flags that replace it; `Timeout`.
pub(crate) fn agree(
    env: &Env,
    process: &Process,
    token: Option<&Token>,
    given: &Address,
    bind: Option<IpAddr>,
    limit: Duration,
) -> Result<Option<Agreement>> {
    if token.is_some() && given.host.is_some() {
        return Ok(None);
    }
    let deadline = Instant::now() + limit;
    let Some(channel) = process.channel(env) else {
        return Ok(None);
    };
    if let (Channel::Slurm, Some(token)) = (&channel, token) {
        // Slurm says the rest to every process.
        return Ok(Some(Agreement {
            host: match &given.host {
                Some(host) => host.clone(),
                None => slurm::first_node_address(process, deadline)?,
            },
            port: match given.port {
                Some(port) => port,
                None => slurm::port(env, given.ports),
            },
            token: token.clone(),
            until_met: RendezvousResources::default(),
        }));
    }
    let mut until_met = RendezvousResources::default();
    let offer = match process.rank {
        0 => Some(offer(env, token, given, bind, &mut until_met, deadline)?.text()),
        _ => None,
    };
    let waiting = WaitNotice::new(process);
    let text = match channel {
        Channel::Mpi => mpi::broadcast(env, process.world, offer.as_deref(), deadline, waiting)?,
        Channel::Pmi => pmi::broadcast(env, offer.as_deref(), deadline, waiting)?,
        Channel::Slurm => {
            let (text, file) = slurm::broadcast(env, offer.as_deref(), deadline, waiting)?;
            until_met._file = Some(file);
            text
        }
    };
    let offer = RendezvousInfo::parse(&text).ok_or_else(|| {
        Error::new(
            ErrorKind::System,
            format!(
                "process 0 sent no token, address and port through {}",
                process.source
            ),
        )
        .note(
            "perhaps",
            "the processes run different versions of the program",
        )
    })?;
    Ok(Some(Agreement {
        host: given.host.clone().unwrap_or(offer.host),
        port: given.port.unwrap_or(offer.port),
        token: token.cloned().unwrap_or(offer.token),
        until_met,
    }))
}

/// Settles where the nodes of `meeting` meet, and their token, where the engine that started their launchers
/// can. `token` was given.
///
/// # Errors
///
/// As [`agree`].
pub(crate) fn settle(
    meeting: &mut Meeting,
    token: Option<Token>,
    env: &Env,
    bind: Option<IpAddr>,
) -> Result<(Option<Token>, RendezvousResources)> {
    let Some(carrier) = meeting.carrier.take() else {
        return Ok((token, RendezvousResources::default()));
    };
    let (given, limit) = (&meeting.given, meeting.timeout);
    let Some(agreed) = agree(env, &carrier, token.as_ref(), given, bind, limit)? else {
        return Ok((token, RendezvousResources::default()));
    };
    meeting.host = agreed.host;
    meeting.port = agreed.port;
    Ok((Some(agreed.token), agreed.until_met))
}

/// What process 0 sends.
#[derive(Debug, PartialEq)]
struct RendezvousInfo {
    token: Token,
    port: u16,
    host: String,
}

/// Process 0's part.
fn offer(
    env: &Env,
    token: Option<&Token>,
    given: &Address,
    bind: Option<IpAddr>,
    until_met: &mut RendezvousResources,
    deadline: Instant,
) -> Result<RendezvousInfo> {
    let port = match given.port {
        Some(port) => port,
        None => {
            let held = PortForRanks::new(None, given.ports)?;
            let number = held.number();
            until_met._port = Some(held);
            number
        }
    };
    Ok(RendezvousInfo {
        token: match token {
            Some(token) => token.clone(),
            None => token::mint()?,
        },
        port,
        host: match &given.host {
            Some(host) => host.clone(),
            None => address::own(bind, &slurm::names_of_this_node(env, deadline)).to_string(),
        },
    })
}

/// The first word of an offer's text.
const VERSION: &str = "phalanx-1";

impl RendezvousInfo {
    /// One word: PMI's values have no blanks.
    fn text(&self) -> String {
        format!(
            "{VERSION}/{}/{}/{}",
            self.token.to_hex(),
            self.port,
            self.host
        )
    }

    fn parse(text: &str) -> Option<RendezvousInfo> {
        let mut parts = text.trim().splitn(4, '/');
        let is_ours = parts.next()? == VERSION;
        let token = Token::from_hex(parts.next()?).ok()?;
        let port = parts.next()?.parse().ok().filter(|port| *port != 0)?;
        let host = parts.next()?;
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".:-_%".contains(&byte);
        let is_sound = !host.is_empty() && host.len() < 256 && host.bytes().all(is_host);
        (is_ours && is_sound).then(|| RendezvousInfo {
            token,
            port,
            host: host.to_owned(),
        })
    }
}

/// Says once, after two seconds, what this process waits for.
struct WaitNotice {
    started: Instant,
    is_reported: bool,
    engine: &'static str,
}

impl WaitNotice {
    /// One process of each host speaks.
    fn new(process: &Process) -> WaitNotice {
        WaitNotice {
            started: Instant::now(),
            is_reported: process.local_rank != 0,
            engine: process.source,
        }
    }

    /// To be called a few times a second. `what` is waited for.
    fn tick(&mut self, what: &str, deadline: Instant) {
        if self.is_reported || self.started.elapsed() < Duration::from_secs(2) {
            return;
        }
        self.is_reported = true;
        let left = deadline.saturating_duration_since(Instant::now()).as_secs();
        say::note(format_args!(
            "waiting for {what} ({} carries the job's token and address); deadline in {left} s",
            self.engine
        ));
    }
}

/// How to do without the engine's channel; completes every error about it.
fn by_hand(error: Error) -> Error {
    error
        .note(
            "fix",
            "phalanx token --out job.token   (once; copy it to every node, mode 0600)",
        )
        .note(
            "then",
            "add --token-file job.token, and set MASTER_ADDR to the host of process 0, in all processes",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_are_one_word_and_read_back() {
        for host in ["10.0.0.1", "fd00::1", "node-1.cluster_a"] {
            let offer = RendezvousInfo {
                token: token::mint().unwrap(),
                port: 65535,
                host: host.to_owned(),
            };
            let text = offer.text();
            assert!(text.len() < 256 && !text.contains([' ', '=', '\n']));
            assert_eq!(RendezvousInfo::parse(&format!("{text}\n")), Some(offer));
        }
        let token = "00".repeat(32);
        let parse = |text: &str| RendezvousInfo::parse(&text.replace("TOKEN", &token));
        assert!(parse("phalanx-1/TOKEN/1/h").is_some());
        for wrong in [
            "",
            "phalanx-2/TOKEN/1/h",
            "phalanx-1/TOKEN/0/h",
            "phalanx-1/TOKEN/65536/h",
            "phalanx-1/TOKEN/1/",
            "phalanx-1/TOKEN/1/h/x",
            "phalanx-1/TOKEN/1/h x",
            "phalanx-1/TOKEN",
            "phalanx-1/TOKE/1/h",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn nothing_is_agreed_where_all_is_given_or_the_engine_has_no_channel() {
        let process = |source| Process {
            source,
            rank: 1,
            world: 2,
            local_rank: 0,
            local_world: None,
            master_addr: None,
            master_port: 0,
        };
        let limit = Duration::ZERO;
        let token = token::mint().unwrap();
        let given = Address {
            host: Some("h".to_owned()),
            ..Address::default()
        };
        let agree =
            |engine, token, given| agree(&Env::new(), &process(engine), token, given, None, limit);
        for engine in ["Open MPI", "PMI", "Slurm"] {
            let agreed = agree(engine, Some(&token), &given);
            assert!(agreed.unwrap().is_none(), "{engine}");
        }
        let agreed = agree("PMI", None, &Address::default());
        assert!(agreed.unwrap().is_none());
    }
}
