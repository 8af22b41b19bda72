//! Downloads one file over HTTP: resumed, retried, checked.

use std::fs::File as OsFile;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_base::files::{Dir, as_typed, lock_holder, try_lock};
use phalanx_http::ureq::Agent;
use phalanx_http::ureq::http::StatusCode;
use phalanx_http::ureq::http::header::{CONTENT_RANGE, RANGE};
use phalanx_http::{ROOTS, check_tls, through_proxy, ureq};

use super::meter::Meter;
use super::sets::File;
use super::sum;
use crate::error::{Error, ErrorKind, Result};

/// Timeouts and retries; tests use shorter ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Timeout for connecting and for each read.
    pub(super) silence: Duration,
    /// Failures in a row, without a byte received, after which a source is given up.
    pub(super) attempts: u32,
    /// Pause before the first retry; doubled each time.
    pub(super) pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            silence: Duration::from_secs(20),
            attempts: 4,
            pause: Duration::from_secs(1),
        }
    }
}

impl Patience {
    /// How long to wait for another process that downloads the same file without writing a byte:
    /// it may try all sources before it gives up.
    fn others(&self) -> Duration {
        10 * self.silence
    }
}

/// How often to check whether another process goes on.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// An HTTP client with these timeouts.
///
/// # Errors
///
/// `Usage` if the file of root certificates cannot be read.
pub(super) fn agent(patience: Patience) -> Result<Agent> {
    phalanx_http::agent(patience.silence, false)
}

/// Why an attempt failed.
enum Failure {
    /// Temporary: try again.
    Passing(String),
    /// This source cannot provide the file.
    Final(String),
    /// An error of this host, not of the source.
    Here(Error),
}

/// Outcome of [`fetch`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Got {
    /// Downloaded from this URL.
    From(String),
    /// It was there already.
    Already,
}

/// The partial file beside the target, locked by one process at a time.
struct Part {
    file: OsFile,
    path: PathBuf,
}

impl Part {
    /// Opens and locks it; waits for another process that has it, as long as that one makes progress.
    fn open(dir: &Dir, target: &str, patience: Patience, meter: &mut Meter) -> Result<Part> {
        let name = part_of(target);
        let path = dir.path().join(&name);
        loop {
            let file = dir.open_private(&name)?;
            let (mut since, mut len, mut told) = (Instant::now(), None, false);
            // While we waited it may have been finished and renamed, or removed.
            let is_there = |file: &OsFile| dir.is_at(file, &name);
            while !try_lock(&file) && is_there(&file) {
                let now = file.metadata().map(|about| about.len()).ok();
                if now != len {
                    (since, len) = (Instant::now(), now);
                }
                let holder = lock_holder(&file);
                if since.elapsed() >= patience.others() {
                    return Err(locked(&path, &holder, patience));
                }
                if !std::mem::replace(&mut told, true) {
                    meter.note(&format!(
                        "waiting for another process{holder} that downloads the same file"
                    ));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            if is_there(&file) || dir.has(target) {
                return Ok(Part { file, path });
            }
        }
    }

    fn len(&self) -> std::result::Result<u64, Failure> {
        let len = self.file.metadata().map(|m| m.len());
        len.map_err(|e| Failure::Here(cannot("read", &self.path, e)))
    }

    fn cut(&mut self, len: u64) -> std::result::Result<(), Failure> {
        self.file
            .set_len(len)
            .and_then(|()| self.file.seek(SeekFrom::Start(len)).map(|_| ()))
            .map_err(|e| Failure::Here(cannot("write", &self.path, e)))
    }
}

/// The name of the half-finished file of `target`.
fn part_of(target: &str) -> String {
    format!("{target}.part")
}

fn locked(path: &Path, holder: &str, patience: Patience) -> Error {
    let what = format!(
        "{} is locked by another process{holder}, which has not written to it for {}",
        path.display(),
        humantime::format_duration(patience.others())
    );
    let fix = format!("end that process, or remove {}", as_typed(path));
    Error::new(ErrorKind::Timeout, what).note("fix", fix)
}

fn cannot(what: &str, path: &Path, e: std::io::Error) -> Error {
    Error::new(
        ErrorKind::System,
        format!("cannot {what} {}", path.display()),
    )
    .caused_by(e)
}

/// Gets `file` from the first of `sources` that has it, into `folder`.
///
/// What is there already and has the published sum is left alone, and another
/// file in its place is removed if `force` says so; what was begun is continued. The file appears under its name when it is whole and
/// its sum is right, or not at all. *Blocks* at most `patience` without a byte.
///
/// # Errors
///
/// `System` where the folder refuses, or no source gives the file: each is
/// named with its reason. `Usage` if another file is in its place.
pub(super) fn fetch(
    agent: &Agent,
    patience: Patience,
    sources: &[String],
    dir: &Dir,
    file: &File,
    force: bool,
    meter: &mut Meter,
) -> Result<Got> {
    if is_there(dir, file, force)? {
        return Ok(Got::Already);
    }
    let mut part = Part::open(dir, file.name, patience, meter)?;
    if is_there(dir, file, force)? {
        return Ok(Got::Already);
    }
    let mut reasons = Vec::new();
    for source in sources {
        let url = format!("{}/{}", source.trim_end_matches('/'), file.name);
        match from(agent, patience, &url, &mut part, file, meter) {
            Ok(()) => {
                // Whole and right.
                dir.publish(&part.file, &part_of(file.name), file.name)?;
                return Ok(Got::From(url));
            }
            Err(Failure::Passing(reason) | Failure::Final(reason)) => {
                reasons.push(format!("{url}: {reason}"));
            }
            Err(Failure::Here(error)) => return Err(error),
        }
    }
    let mut error = Error::new(ErrorKind::System, format!("no source gave {}", file.name));
    for (i, reason) in reasons.into_iter().enumerate() {
        error = error.note(if i == 0 { "tried" } else { "" }, reason);
    }
    if part.len().is_ok_and(|len| len > 0) {
        error = error.note(
            "kept",
            format!("{} (the next attempt resumes it)", part.path.display()),
        );
    } else {
        // Nothing worth keeping.
        let _ = dir.remove(&part_of(file.name));
    }
    Err(error.note(
        "perhaps",
        format!(
            "this machine has no way out (https_proxy is respected); or get {} elsewhere and put it into {}",
            file.name,
            dir.path().display()
        ),
    ))
}

/// Whether the finished file is in its place; `force` removes another one.
fn is_there(dir: &Dir, file: &File, force: bool) -> Result<bool> {
    let target = &dir.path().join(file.name);
    match sum::differs(target, file.sum) {
        Ok(None) => Ok(true),
        Ok(Some(_)) if force => {
            dir.remove(file.name)?;
            Ok(false)
        }
        Ok(Some(has)) => Err(Error::usage(format!(
            "{} is not the published file: it has {has}, expected {}",
            target.display(),
            file.sum.shown()
        ))
        .note("fix", "remove it, or download with --force")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(cannot("read", target, e)),
    }
}

/// All attempts at one source.
fn from(
    agent: &Agent,
    patience: Patience,
    url: &str,
    part: &mut Part,
    file: &File,
    meter: &mut Meter,
) -> std::result::Result<(), Failure> {
    if url.starts_with("https:") {
        // The sources of a data set are all https, or none is.
        check_tls().map_err(|why| Failure::Here(Error::usage(why)))?;
    }
    let (mut failures, mut pause) = (0, patience.pause);
    let mut goes_on = part.len()? > 0;
    loop {
        let before = part.len()?;
        let failure = match attempt(agent, url, part, file, meter) {
            Ok(()) => match sum::differs(&part.path, file.sum) {
                Ok(None) => return Ok(()),
                Ok(Some(_)) if goes_on => {
                    goes_on = false;
                    part.cut(0)?;
                    "the partial file has other content".to_owned()
                }
                Ok(Some(has)) => {
                    part.cut(0)?;
                    return Err(Failure::Final(format!(
                        "wrong checksum ({has}, expected {})",
                        file.sum.shown()
                    )));
                }
                Err(e) => return Err(Failure::Here(cannot("read", &part.path, e))),
            },
            Err(Failure::Passing(reason)) => reason,
            Err(failure) => return Err(failure),
        };
        // A source that makes progress gets as many attempts as it takes.
        if part.len()? > before {
            (failures, pause) = (0, patience.pause);
        } else {
            failures += 1;
        }
        if failures >= patience.attempts {
            return Err(Failure::Passing(failure));
        }
        meter.note(&format!("{failure}; trying again"));
        std::thread::sleep(pause);
        pause *= 2;
    }
}

/// Requests the missing part of the file.
fn attempt(
    agent: &Agent,
    url: &str,
    part: &mut Part,
    file: &File,
    meter: &mut Meter,
) -> std::result::Result<(), Failure> {
    let have = part.len()?;
    let mut request = agent.get(url);
    if have > 0 {
        request = request.header(RANGE, format!("bytes={have}-"));
    }
    let answer = request
        .call()
        .map_err(|e| failure(&e, &through_proxy(agent, url)))?;
    let start = match answer.status() {
        StatusCode::OK => 0,
        StatusCode::PARTIAL_CONTENT => {
            let range = answer.headers().get(CONTENT_RANGE);
            let range = range.and_then(|range| range.to_str().ok());
            match range.and_then(range_start) {
                Some(start) if start == have => start,
                _ => {
                    part.cut(0)?;
                    return Err(Failure::Passing(
                        "it sent another range than requested".into(),
                    ));
                }
            }
        }
        // Our partial file is longer than the source's file.
        StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => {
            part.cut(0)?;
            return Err(Failure::Passing(
                "its file is shorter than the partial file".into(),
            ));
        }
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            return Err(Failure::Passing(format!("HTTP status {status}")));
        }
        status => return Err(Failure::Final(format!("HTTP status {status}"))),
    };
    part.cut(start)?;
    meter.at(start);
    // A source that sends without end must not fill the disk.
    let most = 2 * file.bytes + (1 << 20);
    let mut body = answer
        .into_body()
        .into_with_config()
        .limit(u64::MAX)
        .reader();
    let mut bytes = vec![0; 1 << 16];
    let mut at = start;
    loop {
        let count = match body.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(e) => {
                return Err(Failure::Passing(format!(
                    "broke off after {at} bytes ({e})"
                )));
            }
        };
        if at + count as u64 > most {
            part.cut(0)?;
            return Err(Failure::Final(format!(
                "it sent more than {most} bytes where {} are expected",
                file.bytes
            )));
        }
        part.file
            .write_all(&bytes[..count])
            .map_err(|e| Failure::Here(cannot("write", &part.path, e)))?;
        at += count as u64;
        meter.at(at);
    }
}

/// The `4096` of `bytes 4096-8191/8192`.
fn range_start(range: &str) -> Option<u64> {
    range
        .strip_prefix("bytes ")?
        .split_once('-')?
        .0
        .parse()
        .ok()
}

/// `through` names the proxy.
fn failure(e: &ureq::Error, through: &str) -> Failure {
    match e {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failure::Final(e.to_string()),
        ureq::Error::TooManyRedirects => Failure::Final("too many redirects".to_owned()),
        // A TLS error would be the same the next time.
        ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => Failure::Final(
            format!("{e} ({ROOTS} may name a file of further root certificates)"),
        ),
        ureq::Error::Io(e) => Failure::Passing(format!("{e}{through}")),
        ureq::Error::HostNotFound => Failure::Passing(format!("host not found{through}")),
        _ => Failure::Passing(format!("{e}{through}")),
    }
}

#[cfg(test)]
mod tests;
