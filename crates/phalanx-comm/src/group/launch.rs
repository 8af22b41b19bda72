//! Resolves the options and the environment, without opening anything.

use std::path::PathBuf;

use super::options::InitOptions;
use crate::{Error, PortRange, Result};

/// Names of environment variables. The first four are PyTorch's.
const RANK: &str = "RANK";
const WORLD_SIZE: &str = "WORLD_SIZE";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// A private file, or `/proc/self/fd/N`, with the token.
const TOKEN_FILE: &str = "PHALANX_TOKEN_FILE";
/// The token itself: visible to other processes of the same user.
pub(super) const TOKEN: &str = "PHALANX_TOKEN";
/// `host:port`: the launcher hosts the store there, and `MASTER_PORT` is left to
/// the program. `external`: it hosts the store at `MASTER_ADDR:MASTER_PORT`.
const STORE: &str = "PHALANX_STORE";
/// The file that says where the store is, once it has moved to another launcher.
pub(super) const STORE_FILE: &str = "PHALANX_STORE_FILE";
/// `True`: torchrun hosts PyTorch's store at `MASTER_ADDR:MASTER_PORT`.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const GENERATION: &str = "PHALANX_EPOCH";
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";
const THREADS: &str = "PHALANX_THREADS";
/// `FIRST-LAST`: ports of ranks for other hosts.
const PORT_RANGE: &str = "PHALANX_PORT_RANGE";
/// Set by our launcher and by torchrun; may be a list with one number per nesting level.
const OMP_THREADS: &str = "OMP_NUM_THREADS";

/// How many processes an engine has started, whose other variables are read by the crate `phalanx-launch` only.
const SIZES: [&str; 5] = [
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "PET_NNODES",
];

/// Looks up a variable of this process.
pub(super) fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// How many threads a rank computes with: its option, or the `variable`s, or one.
pub(super) fn compute_threads(
    given: Option<usize>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<usize> {
    let variable = |name| variable(name).filter(|text| !text.trim().is_empty());
    let threads = match (given, variable(THREADS)) {
        (Some(threads), _) => threads,
        (None, Some(text)) => parse(THREADS, &text)?,
        (None, None) => variable(OMP_THREADS)
            // An OpenMP variable: an invalid value is not our error.
            .and_then(|text| text.split(',').next()?.trim().parse().ok())
            .unwrap_or(1),
    };
    if threads == 0 {
        return Err(Error::usage(
            "a rank with 0 compute threads: it has at least the one that calls",
        ));
    }
    Ok(threads)
}

/// The ports on which a rank listens for other hosts: its option, or the variable.
pub(super) fn port_range(
    given: Option<PortRange>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<PortRange>> {
    match (given, variable(PORT_RANGE).filter(|t| !t.trim().is_empty())) {
        (Some(range), _) => Ok(Some(range)),
        (None, Some(text)) => {
            let range = text.trim().parse::<PortRange>();
            let named = |e: Error| Error::usage(format!("{PORT_RANGE}: {}", e.message()));
            range.map(Some).map_err(named)
        }
        (None, None) => Ok(None),
    }
}

/// Where the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// No other rank is expected.
    Alone,
    Tcp {
        host: String,
        port: u16,
    },
    File(PathBuf),
}

/// Where the token comes from when the options have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenSource {
    File(PathBuf),
    Variable,
    None,
}

/// The validated answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) generation: u32,
    pub(super) meeting: Meeting,
    pub(super) token: TokenSource,
    /// Another process hosts the TCP store.
    pub(super) external_store: bool,
}

impl Launch {
    /// `variable` looks up an environment variable.
    pub(super) fn resolve(
        options: &InitOptions,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Launch> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (rank, world) = numbers(options, &variable)?;
        let mut named = [GENERATION, RESTARTS].into_iter();
        let set = named.find_map(|name| Some((name, variable(name)?)));
        let generation = match (options.generation, set) {
            (Some(generation), _) => generation,
            (None, Some((name, text))) => parse(name, &text)?,
            (None, None) => 0,
        };
        let token = match (variable(TOKEN_FILE), variable(TOKEN)) {
            (Some(path), _) => TokenSource::File(path.into()),
            (None, Some(_)) => TokenSource::Variable,
            (None, None) => TokenSource::None,
        };
        let has_token = options.token.is_some() || token != TokenSource::None;
        // Others may join it later where a launcher or the caller gives a store to meet at.
        let is_alone = match &options.init_method {
            method if is_env(method) => variable(STORE).is_none_or(|store| store == "external"),
            method => method.starts_with("tcp://") && !has_token,
        };
        let (meeting, external_store) = match world {
            1 if is_alone => (Meeting::Alone, false),
            _ => Self::meeting(&options.init_method, &variable)?,
        };
        Ok(Launch {
            rank,
            world,
            generation,
            meeting,
            token,
            external_store,
        })
    }

    /// The meeting, and whether another process hosts its store.
    fn meeting(
        method: &str,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<(Meeting, bool)> {
        let store = variable(STORE);
        let external = store.as_deref() == Some("external");
        if is_env(method) {
            if let Some(place) = store.filter(|_| !external) {
                let (host, port) = host_and_port(&place).ok_or_else(|| {
                    Error::usage(format!(
                        "{STORE} is {place:?}: write host:port, or external for \
                         {MASTER_ADDR}:{MASTER_PORT}"
                    ))
                })?;
                let port = parse(STORE, port)?;
                return Ok((Meeting::Tcp { host, port }, true));
            }
            let (host, port) = match (variable(MASTER_ADDR), variable(MASTER_PORT)) {
                (Some(host), Some(port)) => (host, port),
                (host, _) => {
                    let name = if host.is_some() {
                        MASTER_PORT
                    } else {
                        MASTER_ADDR
                    };
                    return Err(Error::usage(format!(
                        "{name} is not set: env:// needs {MASTER_ADDR} and {MASTER_PORT}, \
                         the address of rank 0; `phalanx launch` sets both"
                    )));
                }
            };
            let port = parse(MASTER_PORT, &port)?;
            let agent = !external
                && variable(AGENT_STORE)
                    .is_some_and(|v| v.eq_ignore_ascii_case("true") || v == "1");
            let port = if agent { next_to(port) } else { port };
            return Ok((Meeting::Tcp { host, port }, external));
        }
        if let Some(address) = method.strip_prefix("tcp://") {
            let (host, port) = host_and_port(address.trim_end_matches('/')).ok_or_else(|| {
                Error::usage(format!(
                    "{method:?} has no host and port: write tcp://host:port"
                ))
            })?;
            let port = parse("the port in tcp://host:port", port)?;
            return Ok((Meeting::Tcp { host, port }, external));
        }
        if let Some(path) = method.strip_prefix("file://") {
            if path.is_empty() {
                return Err(Error::usage(
                    "file:// has no path: write file:///path/to/file",
                ));
            }
            return Ok((Meeting::File(path.into()), false));
        }
        Err(Error::usage(format!(
            "unknown init method {method:?}: choose env://, tcp://host:port or file:///path"
        )))
    }
}

fn is_env(method: &str) -> bool {
    matches!(method, "env://" | "env")
}

/// The rank and the number of ranks: 0 and 1 for a program that was not started as one of several.
fn numbers(
    options: &InitOptions,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<(usize, usize)> {
    let number = |given: Option<usize>, name: &str| match given {
        Some(value) => Ok(Some(value)),
        None => variable(name).map(|text| parse(name, &text)).transpose(),
    };
    let rank = number(options.rank, RANK)?;
    let world = number(options.world_size, WORLD_SIZE)?;
    let several = SIZES.into_iter().find(|name| {
        let count = variable(name).and_then(|text| text.trim().parse().ok());
        options.world_size.is_none() && count > Some(1_usize)
    });
    let is_by_launcher = !is_env(&options.init_method) || variable(STORE).is_some();
    let missing = match (rank, world, several) {
        (Some(rank), Some(world), _) => {
            check_rank(rank, world)?;
            return Ok((rank, world));
        }
        (None, Some(1), None) => return Ok((0, 1)),
        (None, None, None) if !is_by_launcher => return Ok((0, 1)),
        (None, _, Some(name)) => format!("{RANK} is not set, and {name} is above 1"),
        (None, ..) => format!("{RANK} is not set"),
        (Some(_), None, _) => format!("{WORLD_SIZE} is not set"),
    };
    Err(Error::usage(format!(
        "{missing}: start this program with `phalanx launch`, or set {RANK} and {WORLD_SIZE} (and {MASTER_ADDR}, \
         {MASTER_PORT} for env://)"
    )))
}

/// The parts of `host:port`; an IPv6 address is in brackets.
fn host_and_port(address: &str) -> Option<(String, &str)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

/// The port of our store on rank 0 when torchrun's own store, with another protocol,
/// has `port`. All ranks must derive the same port without communication.
fn next_to(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(port - 1)
}

pub(super) fn check_rank(rank: usize, world: usize) -> Result<()> {
    if world == 0 {
        return Err(Error::usage(
            "a world size of 0: at least one rank is needed",
        ));
    }
    if rank >= world {
        return Err(Error::usage(format!(
            "rank {rank} does not exist in a world of {world}: ranks are 0 to {}",
            world - 1
        )));
    }
    if u32::try_from(world).is_err() {
        return Err(Error::usage(format!(
            "a world of {world} ranks is too large"
        )));
    }
    Ok(())
}

fn parse<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    text.trim()
        .parse()
        .map_err(|_| Error::usage(format!("{name} is {text:?}, which is not a valid number")))
}

/// Reads a token variable's text; the value is never shown.
pub(super) fn token_variable() -> Option<String> {
    std::env::var(TOKEN).ok()
}

/// The error that explains how to make a token.
pub(super) fn no_token() -> Error {
    Error::usage(format!(
        "no job token: ranks that meet over tcp must prove that they belong together. Start them \
         with `phalanx launch`, or make a token once, `phalanx token --out job.token`, copy it to every \
         host, and set {TOKEN_FILE}=job.token (or {TOKEN} to its text)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn resolve(method: &str, variables: &[(&str, &str)]) -> Result<Launch> {
        let options = InitOptions {
            init_method: method.into(),
            ..InitOptions::default()
        };
        Launch::resolve(&options, |name| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    const TWO: [(&str, &str); 4] = [
        (RANK, "1"),
        (WORLD_SIZE, "2"),
        (MASTER_ADDR, "10.0.0.1"),
        (MASTER_PORT, "29500"),
    ];

    #[test]
    fn environment_is_read_like_pytorchs() {
        let launch = resolve("env://", &TWO).unwrap();
        assert_eq!((launch.rank, launch.world, launch.generation), (1, 2, 0));
        assert_eq!(
            launch.meeting,
            Meeting::Tcp {
                host: "10.0.0.1".into(),
                port: 29500
            }
        );
        assert_eq!(launch.token, TokenSource::None);
        assert!(!launch.external_store);
    }

    #[test]
    fn launchers_store_token_and_generation_are_honoured() {
        let mut variables = TWO.to_vec();
        variables.extend([
            (STORE, "[::1]:7000"),
            (RESTARTS, "3"),
            (TOKEN, "ab"),
            (TOKEN_FILE, "/proc/self/fd/9"),
        ]);
        let launch = resolve("env://", &variables).unwrap();
        assert!(launch.external_store);
        let host = "::1".into();
        assert_eq!(launch.meeting, Meeting::Tcp { host, port: 7000 });
        assert_eq!(launch.generation, 3);
        assert_eq!(launch.token, TokenSource::File("/proc/self/fd/9".into()));
        variables.extend([(GENERATION, "5")]);
        assert_eq!(resolve("env://", &variables).unwrap().generation, 5);
        let external = [(RANK, "0"), (WORLD_SIZE, "2"), (STORE, "external")];
        assert!(resolve("tcp://h:1", &external).unwrap().external_store);
        // With another address, rank 0 hosts the store there.
        let elsewhere = resolve("tcp://h:1", &variables).unwrap();
        assert!(!elsewhere.external_store);
    }

    /// What listens at torchrun's MASTER_PORT is PyTorch's store, not ours.
    #[test]
    fn under_torchrun_rank_0_hosts_the_store_beside_pytorchs() {
        for (port, want) in [("29500", 29501), ("65535", 65534)] {
            let variables = [
                (RANK, "1"),
                (WORLD_SIZE, "2"),
                (MASTER_ADDR, "h"),
                (MASTER_PORT, port),
                (AGENT_STORE, "True"),
            ];
            let launch = resolve("env://", &variables).unwrap();
            let host = "h".to_owned();
            assert_eq!(launch.meeting, Meeting::Tcp { host, port: want });
            assert!(!launch.external_store);
        }
    }

    #[test]
    fn options_win_over_variables() {
        let options = InitOptions {
            init_method: "tcp://[::1]:7000".into(),
            rank: Some(0),
            world_size: Some(3),
            generation: Some(9),
            ..InitOptions::default()
        };
        let launch = Launch::resolve(&options, |_| Some("7".into())).unwrap();
        assert_eq!((launch.rank, launch.world, launch.generation), (0, 3, 9));
        assert_eq!(
            launch.meeting,
            Meeting::Tcp {
                host: "::1".into(),
                port: 7000
            }
        );
    }

    #[test]
    fn compute_threads_come_from_options_then_variables() {
        let with = |given, variables: &[(&str, &str)]| {
            compute_threads(given, |name| {
                let found = variables.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(with(None, &[]).unwrap(), 1);
        assert_eq!(with(None, &[(OMP_THREADS, "4,2")]).unwrap(), 4);
        assert_eq!(with(None, &[(OMP_THREADS, "many")]).unwrap(), 1);
        let both = [(THREADS, "3"), (OMP_THREADS, "4")];
        assert_eq!(with(None, &both).unwrap(), 3);
        assert_eq!(with(Some(2), &both).unwrap(), 2);
        let error = with(None, &[(THREADS, "two")]).unwrap_err();
        assert!(error.to_string().contains("PHALANX_THREADS"), "{error}");
        assert_eq!(with(Some(0), &[]).unwrap_err().kind(), ErrorKind::Usage);
    }

    #[test]
    fn the_port_range_comes_from_options_then_the_variable() {
        let says = |text: &'static str| move |_: &str| Some(text.to_owned());
        assert_eq!(port_range(None, |_| None).unwrap(), None);
        let range = PortRange::new(7, 9).unwrap();
        assert_eq!(port_range(None, says("7-9")).unwrap(), Some(range));
        assert_eq!(port_range(Some(range), says("1-2")).unwrap(), Some(range));
        let error = port_range(None, says("9-7")).unwrap_err();
        assert!(
            error.to_string().contains("PHALANX_PORT_RANGE: 9-7"),
            "{error}"
        );
    }

    #[test]
    fn one_rank_needs_no_meeting() {
        type Variables<'a> = &'a [(&'a str, &'a str)];
        let alone: [(&str, Variables<'_>); 9] = [
            ("env://", &[]),
            ("env://", &[(RANK, "0"), (WORLD_SIZE, "1")]),
            ("env://", &[(WORLD_SIZE, "1"), (AGENT_STORE, "True")]),
            ("env://", &[(MASTER_ADDR, "h"), (MASTER_PORT, "1")]),
            (
                "env://",
                &[(WORLD_SIZE, "1"), (MASTER_ADDR, "h"), (MASTER_PORT, "1")],
            ),
            (
                "env://",
                &[
                    (RANK, "0"),
                    (WORLD_SIZE, "1"),
                    (MASTER_ADDR, "h"),
                    (MASTER_PORT, "1"),
                    (TOKEN, "ab"),
                ],
            ),
            ("env://", &[("SLURM_NTASKS", "1"), ("PET_NNODES", "1:4")]),
            ("tcp://h:1", &[(WORLD_SIZE, "1")]),
            ("tcp://h:1", &[(RANK, "0"), (WORLD_SIZE, "1")]),
        ];
        for (method, variables) in alone {
            let launch = resolve(method, variables).expect("one rank");
            let got = (launch.rank, launch.world, launch.meeting);
            assert_eq!(got, (0, 1, Meeting::Alone), "{variables:?}");
        }
        // Others may come later.
        let one = [
            (RANK, "0"),
            (WORLD_SIZE, "1"),
            (STORE, "h:1"),
            (TOKEN, "ab"),
        ];
        for method in ["env://", "tcp://h:1"] {
            let launch = resolve(method, &one).expect("one rank");
            assert_ne!(launch.meeting, Meeting::Alone, "{method}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        type Variables<'a> = &'a [(&'a str, &'a str)];
        let cases: [(&str, Variables<'_>, &str); 14] = [
            (
                "env://",
                &[(RANK, "0"), (WORLD_SIZE, "2"), (STORE, "elsewhere")],
                "PHALANX_STORE is \"elsewhere\": write host:port",
            ),
            (
                "env://",
                &[(RANK, "0"), (WORLD_SIZE, "2"), (STORE, "h:x")],
                "PHALANX_STORE is \"x\"",
            ),
            (
                "env://",
                &[(WORLD_SIZE, "2")],
                "RANK is not set: start this",
            ),
            (
                "env://",
                &[("SLURM_NTASKS", "3")],
                "RANK is not set, and SLURM_NTASKS is above 1",
            ),
            ("env://", &[(STORE, "h:1")], "RANK is not set"),
            ("tcp://h:1", &[], "RANK is not set"),
            ("env://", &[(RANK, "0")], "WORLD_SIZE is not set"),
            (
                "env://",
                &[(RANK, "0"), (WORLD_SIZE, "2")],
                "MASTER_ADDR is not set",
            ),
            (
                "env://",
                &[(RANK, "0"), (WORLD_SIZE, "2"), (MASTER_ADDR, "h")],
                "MASTER_PORT is not set",
            ),
            (
                "env://",
                &[(RANK, "2"), (WORLD_SIZE, "2")],
                "rank 2 does not exist",
            ),
            ("env://", &[(RANK, "x"), (WORLD_SIZE, "2")], "\"x\""),
            (
                "tcp://nohost",
                &[(RANK, "0"), (WORLD_SIZE, "2")],
                "tcp://host:port",
            ),
            ("file://", &[(RANK, "0"), (WORLD_SIZE, "2")], "file:///path"),
            (
                "mpi://",
                &[(RANK, "0"), (WORLD_SIZE, "2")],
                "unknown init method",
            ),
        ];
        for (method, variables, expected) in cases {
            let error = resolve(method, variables).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
