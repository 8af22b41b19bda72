//! Copies the ranks' output to ours.
//!
//! Each rank has two pipes and a thread for each. Whole lines go out in one
//! write under one lock for each of our streams, so lines of different ranks
//! never mix. Without a prefix bytes pass as they come.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::lock;

/// How many lines of a rank's stderr are kept for the report.
pub const TAIL_LINES: usize = 50;

/// Longer lines are cut in the tail, so that a rank that prints a tensor
/// does not fill our memory.
const TAIL_LINE_BYTES: usize = 2000;

/// A line that grows beyond this is passed on in pieces.
const LINE_BYTES: usize = 1 << 20;

/// The first failure to write output, standard error excepted. The run continues without the
/// output, but does not end as a success.
#[derive(Clone, Debug, Default)]
pub struct WriteError(Arc<Mutex<Option<String>>>);

impl WriteError {
    /// Records and prints the first failure. A closed pipe (`| head`) is printed only: it is
    /// not a failure of the run.
    fn record(&self, what: &str, error: &std::io::Error) {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            let _ = writeln!(
                std::io::stderr(),
                "{what} is closed: the ranks continue, and what they write there is lost"
            );
            return;
        }
        let mut first = lock(&self.0);
        if first.is_none() {
            let text = format!("{what} cannot be written: {error}");
            // stderr itself may be what is full.
            let _ = writeln!(
                std::io::stderr(),
                "warning: {text}; its later lines are lost"
            );
            *first = Some(text);
        }
    }

    /// What was recorded.
    pub fn first(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

/// One of our own streams, unbuffered, shared by all pumps.
pub struct Sink {
    name: &'static str,
    file: Mutex<Option<File>>,
    colour: bool,
    /// `None`: failures are ignored.
    unwritten: Option<WriteError>,
}

impl Sink {
    /// A sink over a copy of the descriptor of `stream`. A stream that is closed makes a sink that discards.
    pub fn new(
        name: &'static str,
        stream: impl AsFd + IsTerminal,
        unwritten: Option<WriteError>,
    ) -> Arc<Sink> {
        let fd = stream.as_fd().try_clone_to_owned();
        Arc::new(Sink {
            name,
            file: Mutex::new(fd.ok().map(File::from)),
            colour: stream.is_terminal() && colour_wanted(),
            unwritten,
        })
    }

    /// Writes all of `bytes`; after a failure, discards everything.
    fn write(&self, bytes: &[u8]) {
        let mut file = lock(&self.file);
        if let Some(open) = file.as_mut()
            && let Err(error) = open.write_all(bytes)
        {
            *file = None;
            if let Some(unwritten) = &self.unwritten {
                unwritten.record(self.name, &error);
            }
        }
    }
}

/// Whether colours are allowed: not with `NO_COLOR` (any text) or `TERM=dumb`.
fn colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// What begins each line of a rank.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// Gives the colour.
    pub rank: usize,
    /// `[rank 3] `, or what was asked for.
    pub text: String,
}

/// The prefix, in the rank's colour if `colour`; white space at its end has none.
fn coloured(prefix: &Prefix, colour: bool) -> String {
    /// Cyan, yellow, green, magenta, blue, and their bright forms, which are readable
    /// on black and on white; red is for errors.
    const COLOURS: [u8; 10] = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94];
    let (text, Prefix { rank, .. }) = (prefix.text.trim_end(), prefix);
    if colour && !text.is_empty() {
        let colour = COLOURS[rank % COLOURS.len()];
        format!("\x1b[{colour}m{text}\x1b[0m{}", &prefix.text[text.len()..])
    } else {
        prefix.text.clone()
    }
}

/// The last lines of one rank's stderr.
#[derive(Debug, Default)]
pub struct Tail {
    lines: VecDeque<String>,
    partial: Vec<u8>,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let room = TAIL_LINE_BYTES.saturating_sub(self.partial.len());
            let text = piece.strip_suffix(b"\n").unwrap_or(piece);
            self.partial
                .extend_from_slice(&text[..text.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        let line = String::from_utf8_lossy(&self.partial);
        self.lines.push_back(line.trim_end_matches('\r').to_owned());
        self.partial.clear();
    }

    /// The lines, oldest first, with the unfinished one.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.lines.iter().cloned().collect();
        if !self.partial.is_empty() {
            lines.push(String::from_utf8_lossy(&self.partial).into_owned());
        }
        lines
    }
}

/// Where one pipe's bytes go.
pub struct Route {
    /// Ours; `None` with `--redirects`.
    pub sink: Option<Arc<Sink>>,
    /// What begins its lines.
    pub prefix: Option<Prefix>,
    /// A log file.
    pub log: Option<Log>,
    /// Lines with one of these texts are copied to this file.
    pub filtered: Option<(Vec<String>, Log)>,
    /// Where the last lines are kept (stderr).
    pub tail: Option<Arc<Mutex<Tail>>>,
    /// Where the live page gets it, and whether it is stderr.
    pub live: Option<(Arc<phalanx_live::Tail>, bool)>,
}

/// A file that keeps a copy of a rank's output, or the only one.
#[derive(Debug)]
pub struct Log {
    /// Open for writing.
    pub file: File,
    /// For messages.
    pub path: PathBuf,
    /// Records a failure.
    pub unwritten: WriteError,
}

impl Log {
    /// Whether all of `bytes` was written. A full disk, for example: the run continues, and fails at
    /// its end.
    fn write(&mut self, bytes: &[u8]) -> bool {
        let written = self.file.write_all(bytes);
        if let Err(error) = &written {
            self.unwritten
                .record(&self.path.display().to_string(), error);
        }
        written.is_ok()
    }
}

/// `lines`, each with the prefix, the last one ended.
fn prefixed<'a>(lines: impl Iterator<Item = &'a [u8]>, prefix: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for line in lines {
        out.extend_from_slice(prefix.as_bytes());
        out.extend_from_slice(line);
    }
    if out.last().is_some_and(|last| *last != b'\n') {
        out.push(b'\n');
    }
    out
}

impl Route {
    /// Whole lines, or anything where there is neither a prefix nor a filter.
    fn pass(&mut self, bytes: &[u8]) {
        if self.log.as_mut().is_some_and(|log| !log.write(bytes)) {
            self.log = None;
        }
        let lines = || bytes.split_inclusive(|b| *b == b'\n');
        if let Some((texts, file)) = &mut self.filtered {
            let is_wanted = |line: &&[u8]| {
                let line = String::from_utf8_lossy(line);
                texts.iter().any(|text| line.contains(text.as_str()))
            };
            let prefix = self.prefix.as_ref().map_or("", |prefix| &prefix.text);
            let wanted = prefixed(lines().filter(is_wanted), prefix);
            if !wanted.is_empty() && !file.write(&wanted) {
                self.filtered = None;
            }
        }
        let Some(sink) = &self.sink else { return };
        match &self.prefix {
            None => sink.write(bytes),
            Some(prefix) => sink.write(&prefixed(lines(), &coloured(prefix, sink.colour))),
        }
    }

    fn run(mut self, mut from: impl Read) {
        let mut chunk = vec![0; 64 << 10];
        let mut line = Vec::new();
        loop {
            let count = match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let bytes = &chunk[..count];
            if let Some(tail) = &self.tail {
                lock(tail).push(bytes);
            }
            if let Some((live, err)) = &self.live {
                live.push(*err, bytes);
            }
            if self.prefix.is_none() && self.filtered.is_none() {
                self.pass(bytes);
                continue;
            }
            line.extend_from_slice(bytes);
            let whole = line
                .iter()
                .rposition(|b| *b == b'\n')
                .map_or(0, |at| at + 1);
            if whole > 0 {
                self.pass(&line[..whole]);
                line.drain(..whole);
            } else if line.len() > LINE_BYTES {
                self.pass(&line);
                line.clear();
            }
        }
        if !line.is_empty() {
            self.pass(&line);
        }
    }
}

/// Counts the pumps of one rank that still have an open pipe.
#[derive(Clone, Default)]
pub struct OpenPipes(Arc<(Mutex<usize>, Condvar)>);

impl OpenPipes {
    /// Waits until all pipes have ended, at most until `until`. A pipe stays
    /// open as long as any process that the rank started holds it.
    pub fn wait_closed(&self, until: Instant) -> bool {
        let (count, changed) = &*self.0;
        let mut count = lock(count);
        while *count > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return false;
            };
            if left == Duration::ZERO {
                return false;
            }
            count = changed
                .wait_timeout(count, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    fn add(&self, delta: isize) {
        let (count, changed) = &*self.0;
        let mut count = lock(count);
        *count = count.saturating_add_signed(delta);
        changed.notify_all();
    }
}

/// Starts pumping `from` along `route`.
///
/// # Errors
/// When no thread can be started.
pub fn start(
    from: impl Read + Send + 'static,
    route: Route,
    open: &OpenPipes,
) -> std::io::Result<()> {
    open.add(1);
    let mine = open.clone();
    let started = thread::Builder::new()
        .name("output".into())
        .stack_size(128 << 10)
        .spawn(move || {
            route.run(from);
            mine.add(-1);
        });
    match started {
        Ok(_) => Ok(()),
        Err(error) => {
            open.add(-1);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Seek;

    /// A sink that is a memory-backed temporary file.
    fn sink() -> (Arc<Sink>, File) {
        let file = tempfile::tempfile().unwrap();
        let reader = file.try_clone().unwrap();
        let sink = Sink {
            name: "a test",
            file: Mutex::new(Some(file)),
            colour: false,
            unwritten: None,
        };
        (Arc::new(sink), reader)
    }

    fn text(mut file: File) -> String {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    fn route(sink: &Arc<Sink>, prefix: Option<usize>) -> Route {
        Route {
            sink: Some(sink.clone()),
            prefix: prefix.map(|rank| Prefix {
                rank,
                text: format!("[rank {rank}] "),
            }),
            log: None,
            filtered: None,
            tail: None,
            live: None,
        }
    }

    /// Gives its pieces one at a time, as a pipe does.
    struct Pieces(VecDeque<&'static [u8]>);

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let Some(piece) = self.0.pop_front() else {
                return Ok(0);
            };
            into[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }

    #[test]
    fn lines_are_joined_from_pieces_and_prefixed() {
        let (sink, file) = sink();
        let pieces: [&[u8]; 5] = [b"on", b"e\ntwo\nth", b"ree", b"\n\n", b"rest"];
        route(&sink, Some(3)).run(Pieces(pieces.into()));
        assert_eq!(
            text(file),
            "[rank 3] one\n[rank 3] two\n[rank 3] three\n[rank 3] \n[rank 3] rest\n"
        );
    }

    #[test]
    fn without_a_prefix_bytes_pass_unchanged() {
        let (sink, file) = sink();
        let pieces: [&[u8]; 3] = [b"10 %\r20", b" %\r", b"no end"];
        route(&sink, None).run(Pieces(pieces.into()));
        assert_eq!(text(file), "10 %\r20 %\rno end");
    }

    #[test]
    fn lines_with_a_text_are_copied() {
        let (sink, file) = sink();
        let copy = tempfile::tempfile().unwrap();
        let mut route = route(&sink, Some(3));
        route.filtered = Some((
            vec!["apple".to_owned(), "pear".to_owned()],
            Log {
                file: copy.try_clone().unwrap(),
                path: PathBuf::from("copy"),
                unwritten: WriteError::default(),
            },
        ));
        let pieces: [&[u8]; 4] = [b"an ap", b"ple\nplum\n", b"a pear\n", b"last apple"];
        route.run(Pieces(pieces.into()));
        assert_eq!(text(file).lines().count(), 4);
        let mut copied = Vec::new();
        let mut copy = copy;
        copy.rewind().unwrap();
        copy.read_to_end(&mut copied).unwrap();
        assert_eq!(
            copied,
            b"[rank 3] an apple\n[rank 3] a pear\n[rank 3] last apple\n"
        );
    }

    #[test]
    fn lines_of_ranks_never_mix() {
        let (sink, file) = sink();
        let open = OpenPipes::default();
        for rank in 0..8 {
            let line = format!("{}\n", "abcdefgh".repeat(40));
            let bytes = line.repeat(200).into_bytes();
            // odd pieces, so that reads end inside lines
            let reader = std::io::Cursor::new(bytes);
            struct Slow(std::io::Cursor<Vec<u8>>);
            impl Read for Slow {
                fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
                    let most = into.len().min(777);
                    self.0.read(&mut into[..most])
                }
            }
            start(Slow(reader), route(&sink, Some(rank)), &open).unwrap();
        }
        assert!(open.wait_closed(Instant::now() + Duration::from_secs(20)));
        let text = text(file);
        assert_eq!(text.lines().count(), 1600);
        let body = "abcdefgh".repeat(40);
        for line in text.lines() {
            let rest = line.strip_prefix("[rank ").unwrap();
            assert_eq!(&rest[1..], format!("] {body}"));
        }
    }

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let mut tail = Tail::default();
        for n in 0..80 {
            tail.push(format!("line {n}\n").as_bytes());
        }
        tail.push(b"unfini");
        tail.push(b"shed");
        let lines = tail.lines();
        assert_eq!(lines.len(), TAIL_LINES + 1);
        assert_eq!(lines[0], "line 30");
        assert_eq!(lines[50], "unfinished");
        let mut tail = Tail::default();
        tail.push(&[b'x'; 10_000]);
        assert_eq!(tail.lines()[0].len(), TAIL_LINE_BYTES);
    }

    #[test]
    fn an_endless_line_is_passed_in_pieces() {
        let (sink, file) = sink();
        route(&sink, Some(0)).run(std::io::repeat(b'y').take(3 << 20));
        let text = text(file);
        assert!(text.lines().count() >= 2);
        assert_eq!(text.bytes().filter(|b| *b == b'y').count(), 3 << 20);
    }

    #[test]
    fn colours_wrap_the_prefix_only() {
        let of = |rank, text: &str, colour| {
            let text = text.to_owned();
            coloured(&Prefix { rank, text }, colour)
        };
        assert_eq!(of(1, "[rank 1] ", true), "\x1b[33m[rank 1]\x1b[0m ");
        assert_eq!(of(12, "[rank 12] ", false), "[rank 12] ");
        assert_eq!(of(0, "", true), "");
    }
}
