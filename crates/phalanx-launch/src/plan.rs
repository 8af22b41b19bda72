//! From settings to a plan: finds the program, reads or creates the token. The last step
//! before sockets and processes.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_base::files::{as_typed, open_regular};
use phalanx_comm::transport::is_own_address;
use phalanx_live::Address;
use phalanx_wire::Token;

use super::args::{LaunchArgs, Meeting};
use super::cluster::Env;
use super::engine::{self, UntilMet};
use super::folder;
use super::ranks::{Logs, Prefix};
use super::token;
use super::torchrun::TorchrunOptions;
use crate::error::{Error, ErrorKind, Result};

/// Everything that a launch needs, checked.
pub struct LaunchPlan {
    /// `None`: one node.
    pub meeting: Option<Meeting>,
    /// How long to wait for the other nodes.
    pub meeting_timeout: Duration,
    /// The ranks' MASTER_PORT on one node; `None`: a free one.
    pub master_port: Option<u16>,
    /// Listen address.
    pub bind: Option<IpAddr>,
    /// Ranks on this node.
    pub local_ranks: usize,
    /// The job's name.
    pub run_id: String,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Output files.
    pub logs: Option<Logs>,
    /// The job's secret.
    pub token: Token,
    /// Dropped when the nodes have met.
    pub until_met: Cell<UntilMet>,
    /// Where flight recorders are written; `None`: where the ranks ask for.
    pub flight_dir: Option<PathBuf>,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Duration,
    /// The same where a rank's group has a handler for SIGTERM and nothing failed.
    pub handler_grace: Duration,
    /// It was given on the command line, so ranks cannot ask for more.
    pub grace_is_typed: bool,
    /// Where the job is shown while it runs.
    pub live: Option<Address>,
    /// Ranks that end with code 130 have printed why.
    pub ranks_tell: bool,
    /// ROLE_NAME.
    pub role: String,
    /// Whose lines get a prefix.
    pub prefix: Prefix,
    /// Rank 0 writes to our stderr itself.
    pub rank0_owns_stderr: bool,
    /// What only torchrun's flags say.
    pub torchrun: TorchrunOptions,
    /// What to run.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// More variables for the ranks.
    pub variables: Vec<(OsString, OsString)>,
    /// OMP_NUM_THREADS is set outside.
    pub threads_set: bool,
}

impl LaunchPlan {
    /// Finds the program, reads or mints the token.
    ///
    /// # Errors
    /// `Usage` for a program that is not there and for a missing, loose or
    /// broken token file.
    pub fn prepare(mut args: LaunchArgs, env: &Env) -> Result<Self> {
        let run = args.run;
        let found = find_program(&run.program, env.get("PATH").map(String::as_str));
        found.map_err(|error| match run.args.first() {
            Some(first) if first == "-u" => {
                error.note("set", "PYTHON_EXEC to a Python interpreter")
            }
            _ => error,
        })?;
        if let Some(script) = &run.script {
            std::fs::metadata(script).map_err(|error| {
                Error::usage(format!("cannot read {}", script.display())).caused_by(error)
            })?;
        }
        let typed = args.token_file.as_deref();
        let bind = args.bind.as_deref().map(own_address).transpose()?;
        let (token, until_met) = job_token(
            typed,
            env,
            args.meeting.as_mut(),
            bind,
            args.meeting_timeout,
        )?;
        // As torchrun: a given address without a name is "none".
        let is_named = args.meeting.is_some() || args.master_port.is_some();
        let run_id = run_id(args.run_id, is_named)?;
        let node = args.meeting.as_ref().map(|meeting| {
            let host = || phalanx_base::host_name();
            meeting
                .node_rank
                .map_or_else(host, |rank| format!("node{rank}"))
        });
        let filters = [&args.torchrun.out_filters, &args.torchrun.err_filters];
        let are_wanted = args.redirects.any()
            || args.tee.any()
            || filters.iter().any(|filters| !filters.is_empty());
        let dir = match args.log_dir {
            None if are_wanted => Some(folder::temporary()?),
            dir => dir,
        };
        let logs = match &dir {
            None => None,
            Some(dir) => Some(Logs {
                dir: folder::for_logs(dir, &run_id, node.as_deref())?,
                redirects: args.redirects,
                tee: args.tee,
            }),
        };
        let flight_dir = env
            .get(phalanx_comm::recorder::DIR_VARIABLE)
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
            .or_else(|| Some(logs.as_ref()?.dir.join("flight")));
        let alone = args.local_ranks == 1 && args.meeting.is_none();
        Ok(LaunchPlan {
            meeting: args.meeting,
            meeting_timeout: args.meeting_timeout,
            master_port: args.master_port,
            bind,
            until_met: until_met.into(),
            local_ranks: args.local_ranks,
            run_id,
            max_restarts: args.max_restarts,
            logs,
            token,
            flight_dir,
            stop_grace: args.stop_grace,
            handler_grace: args.handler_grace,
            grace_is_typed: args.grace_is_typed,
            live: args.live,
            ranks_tell: false,
            role: args.role,
            prefix: if args.prefix && (!alone || args.torchrun.prefix_template.is_some()) {
                Prefix::Everybody
            } else {
                Prefix::Nobody
            },
            rank0_owns_stderr: false,
            torchrun: args.torchrun,
            program: run.program,
            args: run.args,
            variables: Vec::new(),
            threads_set: env.contains_key("OMP_NUM_THREADS"),
        })
    }
}

/// The token from `file`, a variable, or, on one node, a new one. On several, the engine that started them may carry
/// one to all, with the address at which they meet.
///
/// # Errors
/// `Usage` for a file or variable that holds none, and where several nodes have none.
pub fn job_token(
    file: Option<&Path>,
    env: &Env,
    meeting: Option<&mut Meeting>,
    bind: Option<IpAddr>,
    limit: Duration,
) -> Result<(Token, UntilMet)> {
    let given = token::given(file, env, meeting.is_some())?;
    let Some(meeting) = meeting else {
        let token = given.map_or_else(token::mint, Ok)?;
        return Ok((token, UntilMet::default()));
    };
    match engine::settle(meeting, given, env, bind, limit)? {
        (Some(token), until_met) => Ok((token, until_met)),
        (None, _) => Err(Error::usage("several nodes need a common job token")
            .note(
                "make",
                "phalanx token --out job.token     (once; copy it to every node, mode 0600)",
            )
            .note("then", "add --token-file job.token on every node")
            .note(
                "or",
                format!(
                    "set {} to its text, where no file can be shared",
                    token::TOKEN_VARIABLE
                ),
            )),
    }
}

/// The job's name: the given one, the same on all nodes where there is an address, or a random one.
pub fn run_id(given: Option<String>, is_named: bool) -> Result<String> {
    match given {
        Some(id) => Ok(id),
        None if is_named => Ok("none".to_owned()),
        None => random_id(),
    }
}

/// The address of this host that `text` is or names.
fn own_address(text: &str) -> Result<IpAddr> {
    let addresses = (text, 0).to_socket_addrs().map_err(|error| {
        Error::usage(format!(
            "--bind {text} is neither an IP address nor a host name that is known here"
        ))
        .caused_by(error)
    })?;
    let addresses: Vec<IpAddr> = addresses.map(|address| address.ip()).collect();
    let is_own = |address: &&IpAddr| is_own_address(**address);
    addresses.iter().find(is_own).copied().ok_or_else(|| {
        let shown: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let shown = match &shown[..] {
            [one] if one == text => String::new(),
            all => format!(" ({})", all.join(", ")),
        };
        Error::usage(format!(
            "--bind {text}{shown} is not an address of this host"
        ))
    })
}

/// A name that no other job has, in the form of a UUID.
pub fn random_id() -> Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::System, "no random numbers").caused_by(error))?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = hex::encode(bytes);
    Ok(format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    ))
}

/// Checks that the program can be started, so that a typing error gives one message
/// and not one from every rank.
fn find_program(program: &OsStr, path: Option<&str>) -> Result<()> {
    let shown = program.display();
    if program.is_empty() {
        return Err(Error::usage("the program's name is empty"));
    }
    if program.as_encoded_bytes().contains(&b'/') {
        let file = Path::new(program);
        return match std::fs::metadata(file) {
            Err(error) => Err(Error::usage(format!("cannot start {shown}")).caused_by(error)),
            Ok(about) if about.is_dir() => {
                Err(Error::usage(format!("{shown} is a folder, not a program")))
            }
            Ok(_) if executable(file) => match has_dos_interpreter(file) {
                true => Err(Error::usage(format!(
                    "cannot start {shown}: its first line names an interpreter and ends in CR LF, as on Windows"
                ))
                .note("fix", format!("sed -i 's/\\r$//' {}", as_typed(file)))),
                false => Ok(()),
            },
            Ok(_) => Err(interpreter_hint(
                Error::usage(format!("{shown} is not an executable file")),
                program,
                true,
            )),
        };
    }
    if in_path(program, path).is_some() {
        return Ok(());
    }
    let error = Error::usage(format!("no program \"{shown}\" in PATH"));
    Err(if ["train", "bench"].iter().any(|ours| program == *ours) {
        error
            .note(
                "try",
                format!("phalanx {shown} ..., which starts its own ranks"),
            )
            .note("or", format!("phalanx launch ... phalanx {shown} ..."))
    } else if Path::new(program).is_file() {
        interpreter_hint(error, program, executable(Path::new(program)))
    } else {
        error
    })
}

/// The file of a program that is given by its name alone.
pub fn in_path(program: &OsStr, path: Option<&str>) -> Option<PathBuf> {
    // What execvp takes where PATH is unset.
    path.unwrap_or("/bin:/usr/bin")
        .split(':')
        .map(|dir| PathBuf::from(if dir.is_empty() { "." } else { dir }).join(program))
        .find(|file| executable(file))
}

/// Whether the system would look for an interpreter whose name ends in a carriage return.
fn has_dos_interpreter(file: &Path) -> bool {
    let mut first = Vec::new();
    let read = open_regular(file).map(|file| file.take(256).read_to_end(&mut first));
    let line = first.split(|byte| *byte == b'\n').next();
    read.is_ok() && line.is_some_and(|line| line.starts_with(b"#!") && line.ends_with(b"\r"))
}

fn executable(file: &Path) -> bool {
    std::fs::metadata(file)
        .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// torchrun takes a script; we take a program.
fn interpreter_hint(error: Error, program: &OsStr, here: bool) -> Error {
    let shown = as_typed(program.as_ref());
    let python = Path::new(program).extension().is_some_and(|e| e == "py");
    if python {
        // It was typed after `--` or --no-python.
        error.note(
            "try",
            format!("phalanx launch ... {shown}   (Python runs it then)"),
        )
    } else if here && !program.as_encoded_bytes().contains(&b'/') {
        let here = as_typed(&Path::new(".").join(program));
        error.note("try", format!("phalanx launch ... {here}"))
    } else {
        error.note("fix", format!("chmod +x {shown}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_or_named() {
        assert!(find_program("sh".as_ref(), Some("/nowhere:/bin")).is_ok());
        assert!(find_program("sh".as_ref(), None).is_ok());
        assert!(find_program("/bin/sh".as_ref(), None).is_ok());
        for (program, want) in [
            ("", "empty"),
            ("no-such-program", "no program \"no-such-program\" in PATH"),
            ("/no/such", "cannot start /no/such: "),
            ("/etc/passwd", "/etc/passwd is not an executable file"),
            ("/bin", "/bin is a folder, not a program"),
            ("train", "no program \"train\" in PATH"),
        ] {
            let error = find_program(program.as_ref(), Some("/bin")).unwrap_err();
            assert!(error.chain().contains(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        let error = find_program(script.as_os_str(), None).unwrap_err();
        assert!(
            error.render().contains("Python runs it"),
            "{}",
            error.render()
        );
        let script = dir.path().join("dos.sh");
        std::fs::write(&script, "#!/bin/sh\r\necho\r\n").unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
        let error = find_program(script.as_os_str(), None).unwrap_err();
        assert!(
            error.render().contains("sed -i 's/\\r$//' "),
            "{}",
            error.render()
        );
        std::fs::write(&script, "#!/bin/sh\necho\r\n").unwrap();
        assert!(find_program(script.as_os_str(), None).is_ok());
        let error = find_program("train".as_ref(), Some("/bin")).unwrap_err();
        assert!(
            error.render().contains("try     phalanx train"),
            "{}",
            error.render()
        );
    }

    #[test]
    fn addresses_of_this_host_may_be_names() {
        let loopback = |text| own_address(text).is_ok_and(|ip| ip.is_loopback());
        assert!(loopback("127.0.0.2") && loopback("localhost"));
        for (text, want) in [
            ("", "--bind  is neither"),
            ("no such host", "--bind no such host is neither"),
            (
                "192.0.2.1",
                "--bind 192.0.2.1 is not an address of this host",
            ),
        ] {
            let error = own_address(text).unwrap_err();
            assert!(error.chain().starts_with(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn random_ids_look_like_uuids_and_differ() {
        let (a, b) = (random_id().unwrap(), random_id().unwrap());
        assert_ne!(a, b);
        assert_eq!(a.len(), 36);
        assert_eq!(a.as_bytes()[14], b'4');
    }
}
