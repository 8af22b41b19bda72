//! Programs of the engine, run to their end or to a deadline.

use std::io::{Read, Result, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_base::env::TOKEN_VARIABLE;

/// The most that is read of each of a program's outputs.
const OUTPUT_BYTES: u64 = 64 << 10;

/// How a program ended, and what it printed.
pub(super) struct ProcessOutput {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

/// Runs `command` with `input` on its standard input, and without a token in its environment. `None`: it was
/// killed at the deadline. *Blocks* until then, and calls `tick` four times a second.
pub(super) fn run(
    mut command: Command,
    input: &str,
    deadline: Instant,
    mut tick: impl FnMut(),
) -> Result<Option<ProcessOutput>> {
    let mut child = command
        .env_remove(TOKEN_VARIABLE)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut pipe) = child.stdin.take() {
        // If it has ended, its own words say why.
        let _ = pipe.write_all(input.as_bytes());
    }
    let (sender, outputs) = channel();
    read_all(child.stdout.take(), 0, sender.clone());
    read_all(child.stderr.take(), 1, sender);
    let mut texts = [String::new(), String::new()];
    let mut missing = texts.len();
    while missing > 0 {
        match outputs.recv_timeout(Duration::from_millis(250)) {
            Ok((which, text)) => {
                texts[which] = text;
                missing -= 1;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => tick(),
            Err(RecvTimeoutError::Timeout) => {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
        }
    }
    let [out, err] = texts;
    let status = child.wait()?;
    Ok(Some(ProcessOutput { status, out, err }))
}

/// Reads to the end in a thread of its own.
fn read_all(
    pipe: Option<impl Read + Send + 'static>,
    which: usize,
    sender: Sender<(usize, String)>,
) {
    let read = move || {
        let mut bytes = Vec::new();
        let _ = pipe.map(|pipe| pipe.take(OUTPUT_BYTES).read_to_end(&mut bytes));
        let _ = sender.send((which, String::from_utf8_lossy(&bytes).into_owned()));
    };
    // Without it the end of the other, or the deadline, ends the wait.
    let _ = crate::spawn("phalanx-child", read);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn outputs_and_the_end_are_known_or_the_program_is_killed() {
        let in_a_minute = Instant::now() + Duration::from_secs(60);
        let script = "cat; echo why >&2; head -c 200000 /dev/zero | tr '\\0' x >&2; exit 3";
        let ended = run(shell(script), "words", in_a_minute, || {})
            .unwrap()
            .unwrap();
        assert_eq!((ended.status.code(), &*ended.out), (Some(3), "words"));
        assert!(ended.err.starts_with("why\n"));
        assert_eq!(ended.err.len() as u64, OUTPUT_BYTES);
        // Long enough for a tick, however slowly a program starts on a busy host.
        let soon = Instant::now() + Duration::from_secs(3);
        let mut ticks = 0;
        let ended = run(shell("exec sleep 60"), "", soon, || ticks += 1).unwrap();
        assert!(ended.is_none() && ticks > 0);
        assert!(run(Command::new("/no/such/program"), "", soon, || {}).is_err());
    }
}
