//! Downloads one file over HTTP. A download that fails starts again.

use std::io::{self, Read};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use phalanx_base::files::{Dir, open_regular, read_pieces};
use phalanx_http::ureq::Agent;
use phalanx_http::ureq::http::StatusCode;
use phalanx_http::{ROOTS, check_tls, through_proxy, ureq};
use sha2::{Digest, Sha256};

use super::sets::File;
use crate::error::{Error, ErrorKind, Result};
use crate::say;

/// Timeout for connecting and for each read.
pub(super) const SILENCE: Duration = Duration::from_secs(20);

/// Attempts at one source.
const ATTEMPTS: u32 = 4;

/// Pause before the second attempt; doubled each time.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1000 });

/// Why an attempt failed.
enum Failure {
    /// Another attempt may succeed.
    Temporary(String),
    /// This source cannot provide the file.
    Final(String),
    /// An error of this host, not of the source.
    Local(Error),
}

/// Outcome of [`fetch`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Got {
    /// Downloaded from this URL.
    From(String),
    /// It was there already.
    Already,
}

/// Downloads `file` from the first of `sources` that has it, into `dir`.
///
/// A file that is there and has the right checksum is kept; another one in its place is replaced if `force` says so. The file
/// gets its name when it is complete and its checksum is right. *Blocks* as long as data arrive, and for the timeouts of
/// `agent`.
///
/// # Errors
///
/// `System` when the folder cannot be written, or no source provides the file: the error has each URL and the reason. `Usage`
/// when another file is in its place.
pub(super) fn fetch(
    agent: &Agent,
    sources: &[String],
    dir: &Dir,
    file: &File,
    force: bool,
) -> Result<Got> {
    if is_there(dir, file, force)? {
        return Ok(Got::Already);
    }
    let mut error = Error::new(ErrorKind::System, format!("no source gave {}", file.name));
    for (i, source) in sources.iter().enumerate() {
        let url = format!("{}/{}", source.trim_end_matches('/'), file.name);
        if url.starts_with("https:") {
            check_tls().map_err(Error::usage)?;
        }
        match download(agent, &url, dir, file) {
            Ok(()) => return Ok(Got::From(url)),
            Err(Failure::Local(error)) => return Err(error),
            Err(Failure::Temporary(reason) | Failure::Final(reason)) => {
                let label = if i == 0 { "tried" } else { "" };
                error = error.note(label, format!("{url}: {reason}"));
            }
        }
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

/// Whether the file is in its place already; `force` allows another one there.
fn is_there(dir: &Dir, file: &File, force: bool) -> Result<bool> {
    let path = &dir.path().join(file.name);
    let has = match open_regular(path).and_then(|there| sha256(there, |_| Ok(()))) {
        Ok(has) => has,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io("cannot read", path, e)),
    };
    if has == file.sha256 || force {
        return Ok(has == file.sha256);
    }
    let (path, has, wanted) = (path.display(), &has[..16], &file.sha256[..16]);
    let what = format!(
        "{path} is not the published file: it has SHA-256 {has}…, expected SHA-256 {wanted}…"
    );
    Err(Error::usage(what).note("fix", "remove it, or download with --force"))
}

/// All attempts at one source.
fn download(agent: &Agent, url: &str, dir: &Dir, file: &File) -> std::result::Result<(), Failure> {
    for retry in 0..ATTEMPTS - 1 {
        match attempt(agent, url, dir, file) {
            Err(Failure::Temporary(reason)) => {
                say::note(format_args!("{}: {reason}; trying again", file.name));
            }
            ended => return ended,
        }
        std::thread::sleep(PAUSE * 2_u32.pow(retry));
    }
    attempt(agent, url, dir, file)
}

fn attempt(agent: &Agent, url: &str, dir: &Dir, file: &File) -> std::result::Result<(), Failure> {
    let answer = agent.get(url).call();
    let answer = answer.map_err(|e| failure(&e, &through_proxy(agent, url)))?;
    let status = answer.status();
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return Err(Failure::Temporary(format!("HTTP status {status}")));
    }
    if status != StatusCode::OK {
        return Err(Failure::Final(format!("HTTP status {status}")));
    }
    let bar = bar(file);
    if bar.is_hidden() {
        say::note(format_args!(
            "{}: {} bytes from {url}",
            file.name, file.bytes
        ));
    }
    // A longer file cannot have the right checksum.
    let body = answer.into_body().into_reader().take(file.bytes + 1);
    let mut body = bar.wrap_read(body);
    let mut failure = None;
    let written = dir.write(file.name, |out| {
        let mut unwritten = false;
        let got = sha256(&mut body, |bytes| {
            out.write_all(bytes).inspect_err(|_| unwritten = true)
        });
        failure = Some(match got {
            Ok(has) if has == file.sha256 => return Ok(()),
            Ok(has) => {
                let (has, wanted) = (&has[..16], &file.sha256[..16]);
                let reason = format!("wrong checksum (SHA-256 {has}…, expected SHA-256 {wanted}…)");
                Failure::Final(reason)
            }
            Err(e) if unwritten => return Err(e),
            Err(e) => {
                let reason = format!("broke off after {} bytes ({e})", bar.position());
                Failure::Temporary(reason)
            }
        });
        Err(io::Error::other("not the file"))
    });
    bar.finish_and_clear();
    written.map_err(|e| failure.unwrap_or(Failure::Local(e)))
}

/// The SHA-256 of what `from` has; `each` gets the bytes.
fn sha256(from: impl Read, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<String> {
    let mut hash = Sha256::new();
    read_pieces(from, |piece| {
        hash.update(piece);
        each(piece)
    })?;
    Ok(hex::encode(hash.finalize()))
}

/// Shown on a terminal only.
fn bar(file: &File) -> ProgressBar {
    let style =
        "{prefix} {bar:24} {percent:>3} %  {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left";
    let style = ProgressStyle::with_template(style);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(file.bytes).with_prefix(file.name);
    bar.with_style(style.progress_chars("━╸━"))
}

/// `through` names the proxy.
fn failure(e: &ureq::Error, through: &str) -> Failure {
    match e {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failure::Final(e.to_string()),
        ureq::Error::TooManyRedirects => Failure::Final("too many redirects".to_owned()),
        // A TLS error would be the same the next time.
        ureq::Error::Io(e) if e.kind() == io::ErrorKind::InvalidData => Failure::Final(format!(
            "{e} ({ROOTS} may name a file of further root certificates)"
        )),
        ureq::Error::Io(e) => Failure::Temporary(format!("{e}{through}")),
        ureq::Error::HostNotFound => Failure::Temporary(format!("host not found{through}")),
        _ => Failure::Temporary(format!("{e}{through}")),
    }
}

#[cfg(test)]
mod tests;
