//! Priority of a save in progress.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::thread::{Builder, Thread, current, park};

use rustix::process::setpriority_process;
use rustix::thread::gettid;

/// Writes a save piece by piece, only while a processor is idle; after
/// [`hurry`](Pace::hurry), at normal priority.
///
/// A thread that lowers its priority cannot raise it again without privileges. So the
/// saving thread keeps its own, and waits before each piece for another thread of the
/// lowest priority, the *pacer*: when that runs, a processor was idle. They share no lock,
/// since a pacer that is not scheduled would keep it.
#[derive(Debug, Default)]
pub(super) struct Pace(AtomicU8);

/// A piece is being written.
const WRITES: u8 = 0;
/// The save waits for the pacer.
const WAITS: u8 = 1;
/// The save does not wait any more: it is urgent, or over.
const FREE: u8 = 2;

/// The lowest priority.
const NICE: i32 = 19;

/// Size of a piece: one to three milliseconds of processor time. On a busy machine the
/// pacer runs about five times a second.
const PIECE_BYTES: usize = 1 << 20;

impl Pace {
    /// From now on the writing thread `save` does not wait.
    pub(super) fn hurry(&self, save: &Thread) {
        self.0.store(FREE, SeqCst);
        save.unpark();
    }

    /// Makes the caller the saving thread.
    pub(super) fn start(self: &Arc<Self>) -> Pacer {
        let (pace, save) = (self.clone(), current());
        let pacer = Builder::new()
            .name("checkpoint-pace".into())
            .spawn(move || pace.keep(&save));
        if pacer.is_err() {
            // Without it the save disturbs a little more.
            self.0.store(FREE, SeqCst);
        }
        Pacer {
            pace: self.clone(),
            thread: pacer.ok().map(|pacer| pacer.thread().clone()),
        }
    }

    /// The loop of the pacer.
    fn keep(&self, save: &Thread) {
        // As above.
        let _ = setpriority_process(Some(gettid()), NICE);
        loop {
            match self.0.compare_exchange(WAITS, WRITES, SeqCst, SeqCst) {
                Ok(_) => save.unpark(),
                Err(FREE) => return,
                Err(_) => park(),
            }
        }
    }
}

/// The saving thread's handle of the pacer, which ends when it is dropped.
pub(super) struct Pacer {
    pace: Arc<Pace>,
    thread: Option<Thread>,
}

impl Pacer {
    /// *Blocks* until a processor is idle, unless the save is urgent.
    fn next_piece(&self) {
        let state = &self.pace.0;
        let waits = state.compare_exchange(WRITES, WAITS, SeqCst, SeqCst);
        if waits.is_ok() {
            self.wake();
            while state.load(SeqCst) == WAITS {
                park();
            }
        }
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }

    /// Writes to `out` at this pace.
    pub(super) fn writer<'a>(&'a self, out: &'a mut dyn Write) -> impl Write + 'a {
        Paced {
            pacer: self,
            out,
            left: 0,
        }
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.pace.0.store(FREE, SeqCst);
        self.wake();
    }
}

struct Paced<'a> {
    pacer: &'a Pacer,
    out: &'a mut dyn Write,
    /// Remaining bytes of the current piece.
    left: usize,
}

impl Write for Paced<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            self.pacer.next_piece();
            self.left = PIECE_BYTES;
        }
        let taken = self.out.write(buffer)?;
        self.left = self.left.saturating_sub(taken);
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_save_that_is_wanted_waits_for_no_pacer() {
        let pace = Arc::new(Pace::default());
        let (sender, receiver) = channel();
        let its = pace.clone();
        let save = std::thread::spawn(move || {
            // As where no processor is ever to spare.
            let pacer = Pacer {
                pace: its,
                thread: None,
            };
            let mut out = Vec::new();
            let mut paced = pacer.writer(&mut out);
            sender.send(()).unwrap();
            for _ in 0..3 {
                paced.write_all(&[7; PIECE_BYTES]).unwrap();
            }
            drop(paced);
            out
        });
        receiver.recv().unwrap();
        while pace.0.load(SeqCst) != WAITS {
            std::thread::yield_now();
        }
        assert!(!save.is_finished());
        pace.hurry(save.thread());
        assert_eq!(save.join().unwrap(), [7; 3 * PIECE_BYTES]);
    }

    /// It is let on piece by piece, and its pacer ends with it.
    #[test]
    fn a_pacer_lets_a_save_on_to_its_end() {
        let pace = Arc::new(Pace::default());
        let mut out = Vec::new();
        let pacer = pace.start();
        let written = vec![3; 5 * PIECE_BYTES + 1];
        pacer.writer(&mut out).write_all(&written).unwrap();
        assert_eq!(pace.0.load(SeqCst), WRITES);
        drop(pacer);
        assert!(out == written);
        while Arc::strong_count(&pace) > 1 {
            std::thread::yield_now();
        }
    }
}
