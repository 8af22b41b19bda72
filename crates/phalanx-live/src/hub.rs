//! Passes what changes to all readers, and waits for none.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use phalanx_base::lock;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// What a page shows.
pub(crate) trait View: Send + 'static {
    /// The page's own files: path and text.
    const FILES: &'static [(&'static str, &'static str)];

    /// All of it, as far as [`change`](Self::change) has given it; to be called after that.
    fn whole(&self) -> Value;

    /// What has changed since the last call; `None` if nothing has.
    fn change(&mut self) -> Option<Value>;

    /// The folder of the run with that number, and how it ended, where the page shows several.
    fn run(&self, _id: usize) -> Option<(PathBuf, Value)> {
        None
    }
}

/// How often the folders are read, and readers get something even if nothing changes.
const EVERY: Duration = Duration::from_millis(500);
const BEAT: Duration = Duration::from_secs(10);

/// Readers at a time.
const MOST_READERS: usize = 32;

/// Messages, and bytes, that a slow reader may be behind.
const MOST_BEHIND: usize = 32;
const MOST_BYTES: usize = 64 << 20;

/// The state of the page, and its readers.
#[derive(Default)]
pub(crate) struct Hub<V> {
    inner: Mutex<Inner<V>>,
    /// Nothing changes any more.
    is_over: AtomicBool,
}

#[derive(Default)]
struct Inner<V> {
    view: V,
    readers: Vec<Reader>,
    /// Messages so far: the number of the state.
    number: u64,
    /// The whole state as a message, until it changes.
    whole: Option<Bytes>,
    /// When the last message was sent.
    sent: Option<Instant>,
}

struct Reader {
    messages: Sender<Bytes>,
    /// Bytes that it has not taken.
    behind: Arc<AtomicUsize>,
    /// Ends its connection.
    drop: Arc<Notify>,
}

/// What a new reader gets.
pub(crate) struct Subscription {
    /// The whole state, until it is taken.
    first: Option<Bytes>,
    rest: Receiver<Bytes>,
    behind: Arc<AtomicUsize>,
}

impl Subscription {
    /// The whole state, then what changes; ends with the job.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        let next = self.rest.poll_recv(cx);
        if let Poll::Ready(Some(message)) = &next {
            self.behind.fetch_sub(message.len(), Ordering::Relaxed);
        }
        next
    }
}

impl<V: View> Hub<V> {
    /// Changes the state and sends what has changed.
    pub fn update(&self, change: impl FnOnce(&mut V)) {
        let mut inner = lock(&self.inner);
        change(&mut inner.view);
        if let Some(changed) = inner.view.change() {
            inner.number += 1;
            inner.whole = None;
            let message = message("change", inner.number, &changed);
            inner.send(&message);
        }
    }

    /// The folder of the run with that number, and how it ended.
    pub fn run(&self, id: usize) -> Option<(PathBuf, Value)> {
        lock(&self.inner).view.run(id)
    }

    /// Waits until the folders are to be read again. When nothing was sent for long, it sends something that is not shown, so
    /// that closed connections are noticed. Returns false when `stop` is disconnected.
    pub fn wait(&self, stop: &mpsc::Receiver<()>) -> bool {
        let mut inner = lock(&self.inner);
        if inner.sent.is_none_or(|at| at.elapsed() >= BEAT) {
            inner.send(&Bytes::from_static(b":\n\n"));
        }
        drop(inner);
        stop.recv_timeout(EVERY) == Err(mpsc::RecvTimeoutError::Timeout)
    }

    /// Ends all readers when they have read the rest.
    pub fn end(&self) {
        let mut inner = lock(&self.inner);
        self.is_over.store(true, Ordering::Relaxed);
        inner.readers.clear();
    }

    /// A new reader; `None` if there are too many. `drop` is notified when it is too slow.
    pub fn subscribe(&self, drop: Arc<Notify>) -> Option<Subscription> {
        let mut inner = lock(&self.inner);
        inner.readers.retain(|reader| !reader.messages.is_closed());
        if inner.readers.len() >= MOST_READERS {
            return None;
        }
        let first = match &inner.whole {
            Some(whole) => whole.clone(),
            None => {
                let whole = message("whole", inner.number, &inner.view.whole());
                inner.whole.insert(whole).clone()
            }
        };
        let (messages, rest) = channel(MOST_BEHIND);
        let behind = Arc::new(AtomicUsize::new(0));
        if !self.is_over.load(Ordering::Relaxed) {
            let behind = behind.clone();
            let reader = Reader {
                messages,
                behind,
                drop,
            };
            inner.readers.push(reader);
        }
        Some(Subscription {
            first: Some(first),
            rest,
            behind,
        })
    }
}

impl<V> Inner<V> {
    fn send(&mut self, message: &Bytes) {
        self.sent = Some(Instant::now());
        self.readers.retain(|reader| {
            let behind = reader.behind.fetch_add(message.len(), Ordering::Relaxed);
            let is_sent = behind <= MOST_BYTES && reader.messages.try_send(message.clone()).is_ok();
            if !is_sent {
                reader.drop.notify_one();
            }
            is_sent
        });
    }
}

/// A server-sent event.
fn message(event: &str, number: u64, data: &Value) -> Bytes {
    // JSON has no line breaks.
    format!("event: {event}\nid: {number}\ndata: {data}\n\n").into()
}
