//! Data sets larger than memory: samples in tar archives or files of JSON lines, in a folder or an object store.
//!
//! By the index of its shards a stream is a data set like others: its length is known, and each sample can be read by its
//! number. So the sampler gives all ranks equally many steps, each sample once an epoch, and resumes anywhere on any number of
//! ranks. Only the order differs, see [`ShardOrder`].
//!
//! | where | is |
//! |---|---|
//! | `shard` | the formats: finds the samples of a shard, takes one apart |
//! | `place`, `remote` | folders, and object stores |
//! | `index` | the file with the offsets of all samples |
//! | `cache` | fetched shards on the disk |
//! | `source` | shards opened by the index, from folder or cache |

mod cache;
mod concat;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod index;
mod place;
#[cfg(feature = "object-store")]
mod remote;
mod sample;
mod shard;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use phalanx_base::error::system;
use phalanx_base::format::{bytes, plural};
use phalanx_base::text::grouped;
use phalanx_base::{Error, Result, lock};

pub use self::concat::Concat;
#[cfg(any(test, fuzzing))]
pub(crate) use self::fuzzing::{fuzz_index, fuzz_lines, fuzz_tar};
use self::index::{Index, Shard};
use self::place::Object;
pub use self::sample::Sample;
use self::shard::Content;
use self::source::Source;
use crate::dataset::Dataset;
use crate::order::ShardOrder;

/// Most bytes of the cache, unless [`Stream::cache`] says otherwise.
const CACHE_BYTES: u64 = 64 << 30;
/// Samples of this rank that are looked at for shards to fetch ahead, and every how many of them one is.
const LOOK_AHEAD: (usize, usize) = (4096, 8);
/// Most shards that are fetched ahead, and the threads that do so.
const FETCHED_AHEAD: usize = 4;
const FETCHERS: usize = 2;

/// Samples in shards: files in a folder or object store that end in `.tar`, `.jsonl` or `.ndjson`, all of one format.
///
/// A sample of a tar archive is the members with a common key, one after the other, as WebDataset writes them: `a/01.jpg` and
/// `a/01.cls` are the members `jpg` and `cls` of the sample `a/01`. Of JSON lines each line is a sample, an object.
///
/// The index `phalanx.index` has the place of each sample. That of a folder is made when it is first opened, and again when
/// its files have changed; that of an object store with `phalanx index URL`.
///
/// ```no_run
/// use phalanx_data::stream::Stream;
///
/// # fn main() -> phalanx_base::Result<()> {
/// let texts = Stream::new("s3://bucket/texts")
///     .shuffle_buffer(50_000)
///     .map(|sample| Ok((sample.text("txt")?.to_owned(), sample.json::<u32>("cls")?)))?;
/// # let _ = texts;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Stream {
    place: String,
    index: Option<PathBuf>,
    folder: Option<PathBuf>,
    limit: u64,
    buffer: usize,
}

impl Stream {
    /// The shards in `place`: a folder, `file:///PATH`, or with the feature `object-store` also `s3://BUCKET/PREFIX`,
    /// `gs://BUCKET/PREFIX`, `http://HOST/PATH` and `https://HOST/PATH`. Nothing is opened yet.
    pub fn new(place: &str) -> Stream {
        Stream {
            place: place.trim_end_matches('/').to_owned(),
            index: None,
            folder: None,
            limit: CACHE_BYTES,
            buffer: 10_000,
        }
    }

    /// The folder for shards of an object store, and the most bytes of all shards in it. All processes of a user on a host share
    /// it, also those of several jobs; what was not used for longest is removed first. Without this call the folder is
    /// `$XDG_CACHE_HOME/phalanx/streams`, or `~/.cache/phalanx/streams`, with up to 64 GiB.
    pub fn cache(mut self, folder: impl Into<PathBuf>, most_bytes: u64) -> Stream {
        (self.folder, self.limit) = (Some(folder.into()), most_bytes);
        self
    }

    /// The number of samples among which shuffled samples are drawn, 10,000 without this call: shards are shuffled, and samples
    /// are shuffled within groups of shards that have at least as many together. A training that is resumed needs the same.
    pub fn shuffle_buffer(mut self, samples: usize) -> Stream {
        self.buffer = samples;
        self
    }

    /// Takes the index from this file (`phalanx index --output FILE`) instead of the one beside the shards.
    pub fn index(mut self, file: impl Into<PathBuf>) -> Stream {
        self.index = Some(file.into());
        self
    }

    /// Opens the shards as a data set: `decode` makes of each sample what the batches, which are `Vec`s, consist of. It is
    /// called on the loader's threads. What it draws at random may depend on [`Sample::epoch`] and [`Sample::index`] only.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such place, it has no shards, those of two formats, no index, or when the cache cannot hold the
    /// shards of a shuffle buffer; `Data`, naming file and offset, for damaged shards; `System`.
    pub fn map<T: Send + 'static>(
        self,
        decode: impl Fn(&Sample) -> Result<T> + Send + Sync + 'static,
    ) -> Result<StreamDataset<T>> {
        Ok(StreamDataset {
            shards: Shards::open(&self)?,
            decode: Box::new(decode),
        })
    }

    fn source(&self) -> Result<Source> {
        Source::new(&self.place, (self.folder.as_deref(), self.limit))
    }

    /// Makes the index and writes it beside the shards, or to `output`. With `skip_damaged` what cannot be read is left out.
    /// Returns a line that says what was found.
    ///
    /// # Errors
    ///
    /// As [`map`](Self::map), and those of writing.
    pub fn make_index(&self, output: Option<&Path>, skip_damaged: bool) -> Result<String> {
        let (index, at) = self.source()?.make_index(output, skip_damaged)?;
        Ok(format!("{at}: {}", summary(&index)))
    }
}

/// `1.5 GiB`.
fn size(n: u64) -> String {
    bytes(usize::try_from(n).unwrap_or(usize::MAX))
}

fn summary(index: &Index) -> String {
    let shards = &index.list.shards;
    let sum = |of: fn(&Shard) -> u64| shards.iter().map(of).sum::<u64>();
    let samples = grouped(sum(|shard| shard.samples));
    let left_out = match sum(|shard| shard.damaged) {
        0 => String::new(),
        n => format!(", {n} damaged and left out"),
    };
    let (size, format) = (
        size(sum(|shard| shard.object.bytes)),
        index.list.format.name(),
    );
    let shards = plural(shards.len(), "shard");
    format!("{shards} of {format}, {samples} samples, {size}{left_out}")
}

/// Open shards, whose samples are read by number.
struct Shards {
    at: Arc<Opened>,
    order: ShardOrder,
    ahead: Option<Ahead>,
}

struct Opened {
    source: Source,
    index: Index,
}

/// Threads that fetch shards ahead.
struct Ahead {
    /// `None` when they are to end.
    queue: Option<SyncSender<Object>>,
    threads: Vec<JoinHandle<()>>,
    /// Shards that are fetched ahead.
    most: usize,
    at: Arc<Opened>,
}

impl Shards {
    fn open(stream: &Stream) -> Result<Shards> {
        let source = stream.source()?;
        let index = source.index(stream.index.as_deref())?;
        let order = index.order(stream.buffer);
        let at = Arc::new(Opened { source, index });
        let cache = at.source.cache().map(|cache| cache.limit);
        let ahead = cache.map(|limit| Ahead::new(&at, &order, limit));
        Ok(Shards {
            ahead: ahead.transpose()?,
            at,
            order,
        })
    }

    /// Reads samples; `each` gets them with their places in `indices`, in the order of the shards.
    fn read(
        &self,
        epoch: u64,
        indices: &[u64],
        each: &mut dyn FnMut(usize, Sample) -> Result<()>,
    ) -> Result<()> {
        let Opened { source, index } = &*self.at;
        let (has, none) = (self.order.samples(), |i: &&u64| **i >= self.order.samples());
        if let Some(i) = indices.iter().find(none) {
            let what = format!(
                "{} has {has} samples, so there is no sample {i}",
                source.name
            );
            return Err(Error::usage(what));
        }
        let places = indices.iter().enumerate();
        let found = places.map(|(place, i)| (self.order.find(*i), place));
        let mut found: Vec<_> = found.collect();
        found.sort_unstable();
        for group in found.chunk_by(|a, b| a.0.0 == b.0.0) {
            let shard = group[0].0.0;
            let object = &index.list.shards[shard].object;
            let file = source.file(object)?;
            for ((_, number), place) in group {
                let range = index.range(shard, *number)?;
                let mut sample = Sample {
                    key: format!("{}:{number}", object.name),
                    shard: format!("{}/{}", source.name, object.name),
                    offset: range.start,
                    epoch,
                    index: indices[*place],
                    content: Content::default(),
                };
                let mut bytes = vec![0; (range.end - range.start) as usize];
                let read = file.read_exact_at(&mut bytes, range.start);
                let read = read.map_err(|e| e.to_string());
                let parsed = read.and_then(|()| shard::parse(index.list.format, bytes));
                let (key, content) = parsed.map_err(|why| {
                    let fix = "if the shard was changed, make the index again with `phalanx index`";
                    sample.wrong(&why).note("fix", fix)
                })?;
                (sample.key, sample.content) = (key.unwrap_or(sample.key), content);
                each(*place, sample)?;
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let Opened { source, index } = &*self.at;
        let (buffer, order) = (self.order.buffer() as u64, 8 * self.order.samples());
        let cache = source.cache().map(|cache| {
            let (limit, folder) = (size(cache.limit), cache.dir.path().display());
            format!(", cache of {limit} in {folder}")
        });
        let (name, found, cache) = (&source.name, summary(index), cache.unwrap_or_default());
        let (buffer, order) = (grouped(buffer), size(order));
        format!(
            "{name}: {found}, shuffle buffer of {buffer}, {order} of memory over all ranks for the order{cache}"
        )
    }

    fn content(&self) -> String {
        let (samples, buffer) = (self.order.samples(), self.order.buffer());
        let hash = self.at.index.content();
        format!("{samples} samples in shards, SHA-256 {hash:.16}, shuffle buffer of {buffer}")
    }
}

impl Ahead {
    /// # Errors
    ///
    /// `Usage` when the cache cannot hold the shards of a group; `System`.
    fn new(at: &Arc<Opened>, order: &ShardOrder, limit: u64) -> Result<Ahead> {
        // The most shards that a group can have: those with the fewest samples. One more is read where the next group begins.
        let (mut samples, mut in_a_group): (Vec<u64>, _) = (order.shards().collect(), 1);
        samples.sort_unstable();
        let mut sum = 0;
        for n in samples {
            in_a_group += usize::from(sum < order.buffer() as u64);
            sum += n;
        }
        let shards = at.index.list.shards.iter();
        let mut sizes: Vec<u64> = shards.map(|shard| shard.object.bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let needed: u64 = sizes.iter().take(in_a_group).sum();
        let Some(room) = limit.checked_sub(needed) else {
            let (name, buffer) = (&at.source.name, order.buffer());
            let (limit, needed) = (size(limit), size(needed));
            let what = format!(
                "{name}: a cache of {limit} is too small for a shuffle buffer of {buffer} samples, whose shards have up to {needed}"
            );
            let fix = "a larger cache, or a smaller shuffle buffer";
            return Err(Error::usage(what).note("try", fix));
        };
        let more = room / sizes.first().copied().unwrap_or(0).max(1);
        let (queue, wanted) = sync_channel::<Object>(FETCHED_AHEAD);
        let wanted = Arc::new(Mutex::new(wanted));
        let mut ahead = Ahead {
            queue: Some(queue),
            threads: Vec::new(),
            most: FETCHED_AHEAD.min(usize::try_from(more).unwrap_or(FETCHED_AHEAD)),
            at: Arc::clone(at),
        };
        for i in 0..FETCHERS {
            let (at, wanted) = (Arc::clone(at), Arc::clone(&wanted));
            let next = move || lock(&wanted).recv().ok();
            // Whoever reads a shard gets the error.
            let fetch = move || {
                std::iter::from_fn(&next)
                    .for_each(|object| drop(at.source.try_file(&object, false)))
            };
            let thread = std::thread::Builder::new().name(format!("phalanx-fetch-{i}"));
            let thread = thread
                .spawn(fetch)
                .map_err(system("cannot start a thread"))?;
            ahead.threads.push(thread);
        }
        Ok(ahead)
    }

    /// Asks for the next shards of `upcoming`. What is there already is only looked at.
    fn ask(&self, order: &ShardOrder, upcoming: &[u64]) {
        let ((most, step), mut asked) = (LOOK_AHEAD, BTreeSet::new());
        for index in upcoming.iter().take(most).step_by(step) {
            let shard = order.find((*index).min(order.samples() - 1)).0;
            if asked.len() < self.most
                && asked.insert(shard)
                && let Some(queue) = &self.queue
            {
                let _ = queue.try_send(self.at.index.list.shards[shard].object.clone());
            }
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.at.source.place.close();
        self.queue = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The data set of [`Stream::map`].
pub struct StreamDataset<T> {
    shards: Shards,
    decode: Box<dyn Fn(&Sample) -> Result<T> + Send + Sync>,
}

impl<T> fmt::Debug for StreamDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shards.describe())
    }
}

impl<T: Send + 'static> Dataset for StreamDataset<T> {
    type Batch = Vec<T>;

    fn len(&self) -> usize {
        usize::try_from(self.shards.order.samples()).unwrap_or(usize::MAX)
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut Vec<T>) -> Result<()> {
        let mut slots: Vec<Option<T>> = indices.iter().map(|_| None).collect();
        self.shards.read(epoch, indices, &mut |place, sample| {
            slots[place] = Some((self.decode)(&sample)?);
            Ok(())
        })?;
        batch.clear();
        batch.extend(slots.into_iter().flatten());
        Ok(())
    }

    fn describe(&self) -> String {
        self.shards.describe()
    }

    fn content(&self) -> String {
        self.shards.content()
    }

    fn order(&self) -> Option<ShardOrder> {
        Some(self.shards.order.clone())
    }

    fn prefetch(&self, upcoming: &[u64]) {
        if let Some(ahead) = &self.shards.ahead {
            ahead.ask(&self.shards.order, upcoming);
        }
    }
}
