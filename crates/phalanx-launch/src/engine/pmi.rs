//! PMI-1, the protocol between `mpiexec` and its processes, as Flux RFC 13 describes it: lines of `name=value`
//! words over the inherited socket `PMI_FD`. Process 0 puts one value, all others get it after a barrier.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use phalanx_comm::inherited_socket;

use super::{WaitNotice, by_hand};
use crate::error::{Error, ErrorKind, Result};
use crate::place::{Env, PMI_SOCKET as VARIABLE, number};

/// The value's name.
const KEY: &str = "phalanx";

/// How long the server, which runs on this host, may take for what does not depend on other processes.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The longest line that is accepted. Servers allow values of 1024 bytes.
const LINE_BYTES: usize = 4096;

/// How often a wait looks at the time.
const SLICE: Duration = Duration::from_millis(250);

/// Sends `text` (of process 0, `None` elsewhere) to all.
pub(super) fn broadcast(
    env: &Env,
    text: Option<&str>,
    deadline: Instant,
    waiting: WaitNotice,
) -> Result<String> {
    let descriptor = number(env, VARIABLE)?.and_then(|fd| i32::try_from(fd).ok());
    let socket = inherited_socket(descriptor.unwrap_or(-1)).map_err(|error| {
        by_hand(
            Error::usage(format!(
                "{VARIABLE}={} is not the socket of mpiexec",
                env.get(VARIABLE).map_or("", String::as_str)
            ))
            .caused_by(error)
            .note(
                "perhaps",
                "a program between mpiexec and this process has closed it",
            ),
        )
    })?;
    talk(socket, text, deadline, waiting, ANSWER_LIMIT)
}

fn talk(
    socket: UnixStream,
    text: Option<&str>,
    deadline: Instant,
    waiting: WaitNotice,
    answer_limit: Duration,
) -> Result<String> {
    // The limit of a read has no effect otherwise.
    let blocks = socket.set_nonblocking(false);
    blocks.map_err(|error| closed("init", Some(error)))?;
    let mut server = Server {
        socket,
        read: Vec::new(),
        waiting,
        deadline,
        answer_limit,
    };
    server.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")?;
    let space = server.ask("get_my_kvsname", "my_kvsname")?;
    let space = word(&space, "kvsname").unwrap_or_default().to_owned();
    if let Some(text) = text {
        let maxes = server.ask("get_maxes", "maxes")?;
        let most = word(&maxes, "vallen_max").and_then(|most| most.parse().ok());
        if most.is_some_and(|most: usize| most <= text.len()) {
            let why = format!("it takes values of less than {} bytes", most.unwrap_or(0));
            return Err(refused(&why));
        }
        let put = format!("put kvsname={space} key={KEY} value={text}");
        server.ask(&put, "put_result")?;
    }
    server.ask("barrier_in", "barrier_out")?;
    let got = server.ask(&format!("get kvsname={space} key={KEY}"), "get_result")?;
    let got = word(&got, "value").unwrap_or_default().to_owned();
    // Otherwise mpiexec takes our end for a crash.
    server.ask("finalize", "finalize_ack")?;
    Ok(got)
}

struct Server {
    socket: UnixStream,
    /// What has arrived beyond the last line.
    read: Vec<u8>,
    waiting: WaitNotice,
    deadline: Instant,
    answer_limit: Duration,
}

impl Server {
    /// Sends a command, and returns the answer, which has this name.
    fn ask(&mut self, command: &str, answer: &str) -> Result<String> {
        // The token is not for messages.
        let shown = command.split(' ').next().unwrap_or_default();
        self.socket
            .write_all(format!("cmd={command}\n").as_bytes())
            .map_err(|error| closed(shown, Some(error)))?;
        let until = match shown {
            "barrier_in" => self.deadline,
            _ => self.deadline.min(Instant::now() + self.answer_limit),
        };
        let line = self.line(shown, until)?;
        if word(&line, "cmd") != Some(answer) {
            return Err(refused(&format!(
                "it answered {shown} with other words than cmd={answer}"
            )));
        }
        match word(&line, "rc") {
            None | Some("0") => Ok(line),
            Some(code) => Err(refused(&format!(
                "it answered {shown} with error {}",
                code.escape_debug()
            ))),
        }
    }

    fn line(&mut self, command: &str, until: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return String::from_utf8(line)
                    .map_err(|_| refused(&format!("it answered {command} with what is no text")));
            }
            if self.read.len() >= LINE_BYTES {
                return Err(refused(&format!(
                    "it answered {command} with too long a line"
                )));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late(command));
            }
            let limited = self.socket.set_read_timeout(Some(left.min(SLICE)));
            limited.map_err(|error| closed(command, Some(error)))?;
            let mut bytes = [0; 1024];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(closed(command, None)),
                Ok(count) => self.read.extend_from_slice(&bytes[..count]),
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {
                    let what = "the other processes of this job at PMI's barrier";
                    self.waiting.tick(what, self.deadline);
                }
                Err(error) => return Err(closed(command, Some(error))),
            }
        }
    }
}

/// The value of a word `name=value`.
fn word<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

fn refused(why: &str) -> Error {
    by_hand(Error::usage(format!(
        "the program at the socket {VARIABLE} does not carry the job's token: {why}"
    )))
}

fn closed(command: &str, cause: Option<std::io::Error>) -> Error {
    let error = Error::new(
        ErrorKind::PeerLost,
        format!("mpiexec closed the socket {VARIABLE} instead of answering {command}"),
    );
    let error = match cause {
        Some(cause) => error.caused_by(cause),
        None => error,
    };
    by_hand(error.note("perhaps", USED))
}

fn late(command: &str) -> Error {
    let message = match command {
        "barrier_in" => {
            format!("not all processes of this job have come to PMI's barrier ({VARIABLE})")
        }
        _ => format!("mpiexec did not answer {command} at the socket {VARIABLE}"),
    };
    let error = Error::new(ErrorKind::Timeout, message);
    match command {
        "barrier_in" => error.note(
            "perhaps",
            "some ended, or are not started by the same command",
        ),
        _ => by_hand(error.note("perhaps", USED)),
    }
}

const USED: &str =
    "an MPI program or an earlier command of ours has used it: it serves one program a process";

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::thread;

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_secs(1);

    fn waiting() -> WaitNotice {
        WaitNotice {
            started: Instant::now(),
            is_reported: true,
            engine: "PMI",
        }
    }

    /// A PMI-1 server of one process that answers with what `answer` makes of each command (without `cmd=`);
    /// `None` closes the socket.
    fn ask_server(
        text: Option<&str>,
        limit: Duration,
        mut answer: impl FnMut(&str) -> Option<String> + Send,
    ) -> Result<String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut out = theirs.try_clone().unwrap();
                for line in BufReader::new(theirs).lines() {
                    // A client that has given up may leave answers unread.
                    let Ok(line) = line else { break };
                    match answer(line.strip_prefix("cmd=").unwrap()) {
                        Some(text) => drop(out.write_all(text.as_bytes())),
                        None => break,
                    }
                }
            });
            talk(ours, text, Instant::now() + limit, waiting(), limit)
        })
    }

    /// What Hydra answers.
    fn hydra(command: &str, stored: &mut Option<String>) -> String {
        let name = command.split(' ').next().unwrap();
        let words = match name {
            "init" => "response_to_init rc=0 pmi_version=1 pmi_subversion=2".to_owned(),
            "get_maxes" => "maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024".to_owned(),
            "get_my_kvsname" => "my_kvsname rc=0 kvsname=kvs_1_0_a".to_owned(),
            "put" => {
                assert_eq!(word(command, "kvsname"), Some("kvs_1_0_a"));
                *stored = word(command, "value").map(str::to_owned);
                "put_result rc=0".to_owned()
            }
            "barrier_in" => "barrier_out tag=0".to_owned(),
            "get" => match stored {
                Some(value) => format!("get_result rc=0 value={value}"),
                None => "get_result rc=1".to_owned(),
            },
            "finalize" => "finalize_ack rc=0".to_owned(),
            other => panic!("no such command: {other}"),
        };
        format!("cmd={words}\n")
    }

    #[test]
    fn process_0_puts_and_all_get() {
        let mut stored = None;
        let mut asked = Vec::new();
        let got = ask_server(Some("phalanx-1/x"), LONG, |command| {
            asked.push(command.split(' ').next().unwrap().to_owned());
            Some(hydra(command, &mut stored))
        });
        assert_eq!(got.unwrap(), "phalanx-1/x");
        assert_eq!(asked.first().unwrap(), "init");
        assert_eq!(asked.last().unwrap(), "finalize");
        let mut stored = Some("phalanx-1/y".to_owned());
        let got = ask_server(None, LONG, |command| Some(hydra(command, &mut stored)));
        assert_eq!(got.unwrap(), "phalanx-1/y");
    }

    #[test]
    fn wrong_answers_are_errors_that_name_the_socket() {
        // At this command the server answers so; `None` closes the socket, "" never answers.
        let table: &[(&str, Option<&str>, &str, u8)] = &[
            (
                "init",
                None,
                "closed the socket PMI_FD instead of answering init",
                3,
            ),
            ("init", Some(""), "did not answer init", 4),
            (
                "init",
                Some("cmd=response_to_init rc=-1\n"),
                "answered init with error -1",
                2,
            ),
            (
                "init",
                Some("HTTP/1.1 400\n"),
                "other words than cmd=response_to_init",
                2,
            ),
            ("init", Some("\u{1b}[2J\n"), "other words", 2),
            (
                "get_maxes",
                Some("cmd=maxes vallen_max=64\n"),
                "less than 64 bytes",
                2,
            ),
            (
                "get_maxes",
                Some("cmd=maxes"),
                "did not answer get_maxes",
                4,
            ),
            (
                "put",
                Some("cmd=put_result rc=1 msg=no\n"),
                "answered put with error 1",
                2,
            ),
            ("barrier_in", None, "instead of answering barrier_in", 3),
            ("barrier_in", Some(""), "not all processes", 4),
            (
                "get",
                Some("cmd=get_result rc=1\n"),
                "answered get with error 1",
                2,
            ),
            ("finalize", None, "instead of answering finalize", 3),
        ];
        for (at, reply, want, code) in table {
            let mut stored = None;
            let text = "x".repeat(100);
            // Only what never comes needs to be waited for.
            let limit = if *code == 4 { SHORT } else { LONG };
            let got = ask_server(Some(&text), limit, |command| {
                match command.split(' ').next() == Some(at) {
                    true => reply.map(str::to_owned),
                    false => Some(hydra(command, &mut stored)),
                }
            });
            let error = got.unwrap_err();
            assert!(error.chain().contains(want), "{at}: {}", error.chain());
            assert!(error.chain().contains("PMI_FD"), "{at}: {}", error.chain());
            assert_eq!(error.exit_code(), *code, "{at}: {}", error.chain());
            assert!(!error.render().contains(&text), "a token was printed");
        }
        let long = "x".repeat(LINE_BYTES + 2000);
        let error = ask_server(None, LONG, |_| Some(long.clone())).unwrap_err();
        assert!(
            error.chain().contains("too long a line"),
            "{}",
            error.chain()
        );
    }

    #[test]
    fn what_is_no_socket_is_named() {
        for fd in ["", "x", "-1", "99999"] {
            let env = Env::from([(VARIABLE.to_owned(), fd.to_owned())]);
            let error = broadcast(&env, None, Instant::now(), waiting()).unwrap_err();
            assert!(
                error.chain().contains(&format!("PMI_FD={fd}")),
                "{}",
                error.chain()
            );
            assert_eq!(error.exit_code(), 2);
        }
    }
}
