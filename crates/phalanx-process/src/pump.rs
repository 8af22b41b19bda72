//! Copies the ranks' output to ours.
//!
//! Each rank has two pipes and a thread for each. Whole lines go out in one
//! write under one lock for each of our streams, so lines of different ranks
//! never mix. A carriage return, with which a progress bar begins or ends, ends a piece that
//! goes out too, and so does a second without more: of a bar, or of a question that waits for its answer.
//! Of a rank that has the stream for itself bytes pass as they come.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use phalanx_base::lock;

/// How many lines of a rank's stderr are kept for the report.
pub const TAIL_LINES: usize = 50;

/// Longer lines are cut in the tail, so that a rank that prints a tensor
/// does not fill our memory.
const TAIL_LINE_BYTES: usize = 2000;

/// A line that grows beyond this is passed on in pieces.
const LINE_BYTES: usize = 1 << 20;

/// A piece of a line that has waited for so long is passed on.
const HOLD: Duration = Duration::from_secs(1);

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
    file: Mutex<Out>,
    colour: bool,
    /// `None`: failures are ignored.
    unwritten: Option<WriteError>,
}

/// A line without its end.
#[derive(Clone, Copy)]
struct Unfinished {
    rank: usize,
    is_bar: bool,
    /// The cursor is at its beginning again.
    is_returned: bool,
}

/// The stream, until a write fails.
struct Out {
    file: Option<File>,
    /// The last line, if a rank has not finished it.
    unfinished: Option<Unfinished>,
    /// The ranks that have written a carriage return last: what follows is a bar, if it is no line.
    returned: BTreeSet<usize>,
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
            file: Mutex::new(Out {
                file: fd.ok().map(File::from),
                unfinished: None,
                returned: BTreeSet::new(),
            }),
            colour: stream.is_terminal() && colour_wanted(),
            unwritten,
        })
    }

    /// Writes all of `bytes`; after a failure, discards everything.
    fn write(&self, out: &mut Out, bytes: &[u8]) {
        if let Some(open) = out.file.as_mut()
            && let Err(error) = open.write_all(bytes)
        {
            out.file = None;
            if let Some(unwritten) = &self.unwritten {
                unwritten.record(self.name, &error);
            }
        }
    }

    /// Writes `bytes` of `rank` in one piece, with `prefix` before each line and each piece that a carriage return ends. What
    /// another rank has not finished stays as it is, but a bar, which another one replaces.
    fn write_lines(&self, rank: usize, prefix: &str, bytes: &[u8]) {
        let mut out = lock(&self.file);
        let mut text = Vec::with_capacity(bytes.len() + prefix.len());
        for piece in pieces(bytes) {
            let (is_returned, is_line) = (piece.ends_with(b"\r"), piece.ends_with(b"\n"));
            let follows_return = match is_returned {
                true => !out.returned.insert(rank),
                false => out.returned.remove(&rank),
            };
            let own = out.unfinished.filter(|line| line.rank == rank);
            let goes_on = own.filter(|line| !line.is_returned);
            let is_of_bar = follows_return || goes_on.is_some_and(|line| line.is_bar);
            let is_bar = is_returned || is_of_bar && !is_line;
            if piece == b"\r" && own.is_none() && !prefix.is_empty() {
                // The cursor is at the beginning of a line, or is put there.
                continue;
            }
            if let (None, Some(line)) = (own, out.unfinished) {
                match line.is_bar && is_bar {
                    true if line.is_returned => {}
                    true => text.push(b'\r'),
                    false => text.push(b'\n'),
                }
            }
            let is_end_only = piece == b"\r" || piece == b"\n" && own.is_some();
            if !is_end_only && goes_on.is_none() {
                text.extend_from_slice(prefix.as_bytes());
            }
            text.extend_from_slice(piece);
            out.unfinished = (!is_line).then_some(Unfinished {
                rank,
                is_bar,
                is_returned,
            });
        }
        self.write(&mut out, &text);
    }

    /// Ends the line that `rank` has not finished.
    fn end_line(&self, rank: usize) {
        let mut out = lock(&self.file);
        if out.unfinished.is_some_and(|line| line.rank == rank) {
            out.unfinished = None;
            self.write(&mut out, b"\n");
        }
    }
}

/// Whether a piece ends at this byte: a line, or a carriage return before what replaces the line.
fn ends_piece(bytes: &[u8], at: usize) -> bool {
    match bytes.get(at) {
        Some(b'\r') => bytes.get(at + 1).is_some_and(|next| *next != b'\n'),
        byte => byte == Some(&b'\n'),
    }
}

/// All of `bytes`; the last piece may be unfinished.
fn pieces(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let end = (0..bytes.len()).position(|at| ends_piece(bytes, at));
        let (piece, rest) = bytes.split_at(end.map_or(bytes.len(), |at| at + 1));
        bytes = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Whether `from` has something to read, or has ended, at the latest after `limit`.
fn is_readable(from: &impl AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).ok();
    let mut fds = [PollFd::new(from, PollFlags::IN)];
    // Whether it was interrupted or cannot be asked: a read waits.
    poll(&mut fds, limit.as_ref()) != Ok(0)
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

/// Takes bytes as they come.
pub type Taker = Box<dyn Fn(&[u8]) + Send>;

/// Where one pipe's bytes go.
pub struct Route {
    /// Whose it is.
    pub rank: usize,
    /// Other ranks write there too.
    pub is_shared: bool,
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
    /// Gets all bytes, too; it never waits.
    pub copy: Option<Taker>,
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
    /// To the file of lines with certain texts: whole ones.
    fn filter(&mut self, lines: &[u8]) {
        let Some((texts, file)) = &mut self.filtered else {
            return;
        };
        let is_wanted = |line: &&[u8]| {
            let line = String::from_utf8_lossy(line);
            texts.iter().any(|text| line.contains(text.as_str()))
        };
        let prefix = self.prefix.as_ref().map_or("", |prefix| &prefix.text);
        let lines = lines.split_inclusive(|b| *b == b'\n');
        let wanted = prefixed(lines.filter(is_wanted), prefix);
        if !wanted.is_empty() && !file.write(&wanted) {
            self.filtered = None;
        }
    }

    fn show(&self, bytes: &[u8]) {
        let Some(sink) = &self.sink else { return };
        let prefix = self.prefix.as_ref();
        match prefix.map(|prefix| coloured(prefix, sink.colour)) {
            None if !self.is_shared => sink.write(&mut lock(&sink.file), bytes),
            prefix => sink.write_lines(self.rank, &prefix.unwrap_or_default(), bytes),
        }
    }

    fn run(mut self, mut from: impl Read + AsFd) {
        let passes_at_once = self.prefix.is_none() && !self.is_shared;
        let mut chunk = vec![0; 64 << 10];
        // What was not shown yet, and since when; what was not filtered.
        let (mut line, mut whole) = (Vec::new(), Vec::new());
        let mut since = Instant::now();
        loop {
            if !line.is_empty() && !is_readable(&from, HOLD.saturating_sub(since.elapsed())) {
                self.show(&line);
                line.clear();
            }
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
            if let Some(copy) = &self.copy {
                copy(bytes);
            }
            if self.log.as_mut().is_some_and(|log| !log.write(bytes)) {
                self.log = None;
            }
            if self.filtered.is_some() {
                whole.extend_from_slice(bytes);
                let end = match whole.iter().rposition(|b| *b == b'\n') {
                    Some(at) => at + 1,
                    None if whole.len() > LINE_BYTES => whole.len(),
                    None => 0,
                };
                self.filter(&whole[..end]);
                whole.drain(..end);
            }
            if passes_at_once {
                self.show(bytes);
                continue;
            }
            if line.is_empty() {
                since = Instant::now();
            }
            line.extend_from_slice(bytes);
            if let Some(at) = (0..line.len()).rposition(|at| ends_piece(&line, at)) {
                self.show(&line[..=at]);
                line.drain(..=at);
                since = Instant::now();
            } else if line.len() > LINE_BYTES {
                self.show(&line);
                self.end_line();
                line.clear();
            }
        }
        self.filter(&whole);
        self.show(&line);
        self.end_line();
    }

    /// Where lines have a prefix.
    fn end_line(&self) {
        if let (Some(sink), Some(_)) = (&self.sink, &self.prefix) {
            sink.end_line(self.rank);
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
    from: impl Read + AsFd + Send + 'static,
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
    use std::io::{PipeReader, Seek};

    /// A sink that is a memory-backed temporary file.
    fn sink() -> (Arc<Sink>, File) {
        let file = tempfile::tempfile().unwrap();
        let reader = file.try_clone().unwrap();
        let sink = Sink {
            name: "a test",
            file: Mutex::new(Out {
                file: Some(file),
                unfinished: None,
                returned: BTreeSet::new(),
            }),
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
            rank: prefix.unwrap_or_default(),
            is_shared: prefix.is_some(),
            sink: Some(sink.clone()),
            prefix: prefix.map(|rank| Prefix {
                rank,
                text: format!("[rank {rank}] "),
            }),
            log: None,
            filtered: None,
            tail: None,
            copy: None,
        }
    }

    /// A pipe that gets these bytes at these times, in milliseconds.
    fn piped(pieces: Vec<(u64, Vec<u8>)>) -> PipeReader {
        let (reader, mut writer) = std::io::pipe().unwrap();
        thread::spawn(move || {
            let began = Instant::now();
            for (at, piece) in pieces {
                thread::sleep(Duration::from_millis(at).saturating_sub(began.elapsed()));
                writer.write_all(&piece).unwrap();
            }
        });
        reader
    }

    /// What is shown of one rank's `pieces`, which are written one soon after the other.
    fn shown(prefix: Option<usize>, pieces: &[&str]) -> String {
        let (sink, file) = sink();
        let pieces = pieces.iter().enumerate();
        let pieces = pieces.map(|(index, text)| (20 * index as u64, text.as_bytes().to_vec()));
        route(&sink, prefix).run(piped(pieces.collect()));
        text(file)
    }

    #[test]
    fn lines_are_joined_from_pieces_and_prefixed() {
        let pieces = ["on", "e\ntwo\nth", "ree", "\n\n", "rest"];
        assert_eq!(
            shown(Some(3), &pieces),
            "[rank 3] one\n[rank 3] two\n[rank 3] three\n[rank 3] \n[rank 3] rest\n"
        );
    }

    #[test]
    fn without_a_prefix_bytes_pass_unchanged() {
        let pieces = ["10 %\r20", " %\r", "no end"];
        assert_eq!(shown(None, &pieces), "10 %\r20 %\rno end");
    }

    #[test]
    fn carriage_returns_end_pieces_but_not_before_a_line_feed() {
        for (pieces, wanted) in [
            // tqdm, which ends a bar with a line feed; programs that write the return behind.
            (
                &["\r10%", "\r20%", "\r30%\n"][..],
                "[rank 2] 10%\r[rank 2] 20%\r[rank 2] 30%\n",
            ),
            (&["10%\r", "20%\r"], "[rank 2] 10%\r[rank 2] 20%\r\n"),
            (
                &["one\r", "\ntwo\r\n", "\r\n"],
                "[rank 2] one\r\n[rank 2] two\r\n[rank 2] \r\n",
            ),
            (&["a\r\r", "b\n"], "[rank 2] a\r\r[rank 2] b\n"),
        ] {
            assert_eq!(shown(Some(2), pieces), wanted, "{pieces:?}");
        }
    }

    #[test]
    fn what_waits_is_shown_after_a_second() {
        let (sink, file) = sink();
        let mut seen = file.try_clone().unwrap();
        let pieces = [
            (0, "\r10%"),
            (1500, "\r20%"),
            (3000, "\ndone? "),
            (4500, "yes\n"),
        ];
        let pieces = pieces.map(|(at, text)| (at, text.as_bytes().to_vec()));
        let mut route = route(&sink, Some(2));
        let (log, mut logged) = (tempfile::tempfile().unwrap(), String::new());
        route.log = Some(Log {
            file: log.try_clone().unwrap(),
            path: PathBuf::from("log"),
            unwritten: WriteError::default(),
        });
        let runs = thread::spawn(move || route.run(piped(pieces.to_vec())));
        let until = Instant::now() + Duration::from_secs(20);
        let wanted = "[rank 2] 10%\r[rank 2] 20%\n[rank 2] done? yes\n";
        let mut prefixes = 0;
        for end in ["10%", "20%", "done? ", "yes\n"] {
            loop {
                let mut text = String::new();
                seen.rewind().unwrap();
                seen.read_to_string(&mut text).unwrap();
                assert!(wanted.starts_with(&text), "{text:?}");
                if text.ends_with(end) {
                    break;
                }
                assert!(Instant::now() < until, "{text:?} without {end:?}");
                thread::sleep(Duration::from_millis(5));
            }
            prefixes += 1;
        }
        assert_eq!(prefixes, 4);
        runs.join().unwrap();
        let mut log = log;
        log.rewind().unwrap();
        log.read_to_string(&mut logged).unwrap();
        assert_eq!(logged, "\r10%\r20%\ndone? yes\n");
    }

    /// Bars replace each other, and anything else gets a line of its own.
    #[test]
    fn unfinished_lines_of_two_ranks_do_not_mix() {
        for (writes, wanted) in [
            (
                &[(0, "10%\r"), (1, "15%\r"), (0, "20%\r")][..],
                "0:10%\r1:15%\r0:20%\r",
            ),
            (
                &[(0, "10%\r"), (1, "line\n"), (0, "20%\r")],
                "0:10%\r\n1:line\n0:20%\r",
            ),
            (
                &[(0, "name? "), (1, "line\n"), (0, "\n")],
                "0:name? \n1:line\n0:\n",
            ),
            (
                &[(0, "10%"), (1, "15%"), (0, "\r"), (0, "20%")],
                "0:10%\n1:15%\n0:20%",
            ),
            (&[(0, "10%"), (1, "15%\r"), (1, "\n")], "0:10%\n1:15%\r\n"),
            (
                &[(0, "\r"), (0, "1"), (0, "0%"), (1, "\r15%"), (0, "\r20%")],
                "0:10%\r1:15%\r0:20%",
            ),
            (
                &[(0, "\r10%"), (1, "\r15%"), (0, "\r   \rline\n"), (0, "5")],
                "0:10%\r1:15%\r0:   \r0:line\n0:5",
            ),
            (
                &[(0, "\r10%"), (1, "line\n"), (1, "\r15%"), (0, "\r100%\n")],
                "0:10%\n1:line\n1:15%\n0:100%\n",
            ),
        ] {
            let (sink, file) = sink();
            for (rank, text) in writes {
                sink.write_lines(*rank, &format!("{rank}:"), text.as_bytes());
            }
            assert_eq!(text(file), wanted);
        }
    }

    /// Rust's standard error passes on each part of a message.
    #[test]
    fn lines_without_a_prefix_are_whole_beside_others() {
        let (sink, file) = sink();
        let open = OpenPipes::default();
        for rank in 0..3 {
            let line = ["warning: ", "no ", "file", "\n"].map(|part| part.as_bytes().to_vec());
            let parts = (0..400).map(|at| (at / 4, line[at as usize % 4].clone()));
            let mut route = route(&sink, Some(rank).filter(|rank| *rank > 0));
            route.is_shared = true;
            start(piped(parts.collect()), route, &open).unwrap();
        }
        assert!(open.wait_closed(Instant::now() + Duration::from_secs(20)));
        let text = text(file);
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        lines.dedup();
        let whole = "warning: no file";
        let marked = [1, 2].map(|rank| format!("[rank {rank}] {whole}"));
        assert_eq!(lines, [&marked[0], &marked[1], whole]);
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
        let pieces = ["an ap", "ple\nplum\n", "a pear\n", "last apple"];
        let pieces = pieces.map(|text| (0, text.as_bytes().to_vec()));
        route.run(piped(pieces.to_vec()));
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
            let reader = piped(vec![(0, bytes)]);
            struct Slow(PipeReader);
            impl AsFd for Slow {
                fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
                    self.0.as_fd()
                }
            }
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
        route(&sink, Some(0)).run(piped(vec![(0, vec![b'y'; 3 << 20])]));
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
