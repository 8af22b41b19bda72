//! Data sets larger than memory: samples in tar archives, files of JSON lines or Parquet.
//!
//! By the index of its shards a stream is a data set like others: its length is known, and each sample can be read by its
//! number. So the sampler gives all ranks equally many steps, each sample once an epoch, and resumes anywhere on any number of
//! ranks. Only the order differs, see [`ShardOrder`].
//!
//! | where | is |
//! |---|---|
//! | `shard`, `rows` | the formats: finds the samples of a shard, takes one apart |
//! | `index` | the file with the offsets of all samples |
//! | `source` | the files of a folder or an object store, and their index |
//! | `remote`, `cache` | object stores and HTTP servers, and the copies of their files on this host |

#[cfg(feature = "object-store")]
mod cache;
mod concat;
mod content;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod index;
#[cfg(feature = "object-store")]
mod remote;
#[cfg(feature = "parquet")]
mod rows;
mod sample;
mod shard;
mod source;
#[cfg(all(test, feature = "object-store"))]
mod tests;

use std::fmt;
#[cfg(not(feature = "parquet"))]
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use phalanx_base::format::{bytes, plural};
use phalanx_base::text::grouped;
use phalanx_base::{Result, refuse};

pub use self::concat::Concat;
use self::content::Content;
#[cfg(any(test, fuzzing))]
pub(crate) use self::fuzzing::{fuzz_index, fuzz_lines, fuzz_tar};
use self::index::{Index, Shard};
use self::rows::Rows;
pub use self::sample::Sample;
use self::shard::Format;
use self::source::{Caching, Source};
use crate::dataset::Dataset;
use crate::order::ShardOrder;

/// Samples in shards: files in a folder that end in `.tar`, `.jsonl`, `.ndjson` or `.parquet`, all of one format.
///
/// A sample of a tar archive is the members with a common key, one after the other, as WebDataset writes them: `a/01.jpg` and
/// `a/01.cls` are the members `jpg` and `cls` of the sample `a/01`. Of JSON lines each line is a sample, an object. Of Parquet
/// (feature `parquet`) each row is one, with its columns as members; those of a group have its name in front, `image.bytes`.
/// Row groups are decoded whole, and the last ones are kept, up to 512 MiB: a shuffle buffer should have no more.
///
/// The index `phalanx.index` has the place of each sample. It is made when the folder is first opened, and again when its files
/// have changed, or by `phalanx index FOLDER`.
///
/// ```no_run
/// use phalanx_data::stream::Stream;
///
/// # fn main() -> phalanx_base::Result<()> {
/// let texts = Stream::new("texts")
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
    buffer: usize,
    cache: Caching,
}

impl Stream {
    /// The shards in `place`, a folder or `file:///PATH`. With the feature `object-store` also `s3://BUCKET/PREFIX`,
    /// `gs://BUCKET/PREFIX`, and `https://HOST/PATH` or `http://` with an index beside the shards; they are fetched into a cache
    /// on this host's disk. Nothing is opened yet.
    pub fn new(place: &str) -> Stream {
        let cut = place.trim_end_matches('/');
        Stream {
            place: if cut.is_empty() { place } else { cut }.to_owned(),
            index: None,
            buffer: 10_000,
            cache: (None, None),
        }
    }

    /// Most bytes of the shards of object stores that are kept on the disk of this host, 64 GiB without this call. The variable
    /// `PHALANX_CACHE_BYTES` is used instead where it is set. It should hold the shards of a shuffle buffer twice.
    #[cfg(feature = "object-store")]
    pub fn cache_limit(mut self, bytes: u64) -> Stream {
        self.cache.1 = Some(bytes);
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
    /// `Usage` when there is no such place, it has no shards, those of two formats, or an index that is not of them; `Data`, naming file and offset, for damaged shards; `System`.
    pub fn map<T: Send + 'static>(
        self,
        decode: impl Fn(&Sample) -> Result<T> + Send + Sync + 'static,
    ) -> Result<StreamDataset<T>> {
        Ok(StreamDataset {
            shards: Shards::open(&self)?,
            decode: Box::new(decode),
        })
    }

    /// Makes the index and writes it beside the shards, or to `output`. With `skip_damaged` what cannot be read is left out.
    /// Returns a line that says what was found.
    ///
    /// # Errors
    ///
    /// As [`map`](Self::map), and those of writing.
    pub fn make_index(&self, output: Option<&Path>, skip_damaged: bool) -> Result<String> {
        let (index, at) =
            Source::new(&self.place, &self.cache)?.make_index(output, skip_damaged)?;
        Ok(format!("{at}: {}", summary(&index)))
    }
}

#[cfg(not(feature = "parquet"))]
mod rows {
    use super::*;

    #[derive(Default)]
    pub(super) struct Rows(());

    impl Rows {
        pub(super) fn read(&self, shard: (usize, &str), _: &File, _: u64) -> Result<Content> {
            Err(none(shard.1))
        }
    }

    pub(super) fn scan(name: &str, _: &File, _: &mut sha2::Sha256) -> Result<u64> {
        Err(none(name))
    }

    fn none(name: &str) -> phalanx_base::Error {
        let what = format!("{name}: this program was built without Parquet");
        phalanx_base::Error::usage(what).note("fix", "build with the feature `parquet`")
    }
}

/// How many shards are open, and fetched, at the same time.
const TOGETHER: usize = 4;

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
    source: Source,
    index: Index,
    order: ShardOrder,
    rows: Rows,
}

impl Shards {
    fn open(stream: &Stream) -> Result<Shards> {
        let source = Source::new(&stream.place, &stream.cache)?;
        let index = source.index(stream.index.as_deref())?;
        Ok(Shards {
            order: index.order(stream.buffer),
            source,
            index,
            rows: Rows::default(),
        })
    }

    /// Reads samples; `each` gets them with their places in `indices`, in the order of the shards.
    fn read(
        &self,
        epoch: u64,
        indices: &[u64],
        each: &mut dyn FnMut(usize, Sample) -> Result<()>,
    ) -> Result<()> {
        let (source, index) = (&self.source, &self.index);
        let (has, none) = (self.order.samples(), |i: &&u64| **i >= self.order.samples());
        if let Some(i) = indices.iter().find(none) {
            refuse!(
                "{} has {has} samples, so there is no sample {i}",
                source.name
            );
        }
        let places = indices.iter().enumerate();
        let found = places.map(|(place, i)| (self.order.find(*i), place));
        let mut found: Vec<_> = found.collect();
        found.sort_unstable();
        let groups: Vec<_> = found.chunk_by(|a, b| a.0.0 == b.0.0).collect();
        let mut files = Vec::new();
        for (i, group) in groups.iter().enumerate() {
            if i % TOGETHER == 0 {
                let next = groups[i..].iter().take(TOGETHER);
                let next: Vec<_> = next.map(|group| &index.list.shards[group[0].0.0]).collect();
                files = source.files(index.list.format, &next)?;
            }
            let (shard, file) = (group[0].0.0, &files[i % TOGETHER]);
            let object = &index.list.shards[shard].object;
            for ((_, number), place) in *group {
                let format = index.list.format;
                let range = match format {
                    Format::Parquet => 0..0,
                    _ => index.range(shard, *number)?,
                };
                let mut sample = Sample {
                    key: format!("{}:{number}", object.name),
                    shard: source.path(object),
                    at: match format {
                        Format::Parquet => format!("row {number}"),
                        _ => format!("byte {}", range.start),
                    },
                    epoch,
                    index: indices[*place],
                    content: Content::Object(serde_json::Map::new()),
                };
                if format == Format::Parquet {
                    let shard = (shard, sample.shard.as_str());
                    sample.content = self.rows.read(shard, file, *number)?;
                    each(*place, sample)?;
                    continue;
                }
                let mut bytes = vec![0; (range.end - range.start) as usize];
                let read = file.read_exact_at(&mut bytes, range.start);
                let read = read.map_err(|e| e.to_string());
                let parsed = read.and_then(|()| shard::parse(format, bytes));
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
        let (name, found) = (&self.source.name, summary(&self.index));
        let buffer = grouped(self.order.buffer() as u64);
        let order = size(8 * self.order.samples());
        let cache = self.source.describe();
        format!(
            "{name}: {found}, shuffle buffer of {buffer}, {order} of memory for the shuffled order, summed over ranks{cache}"
        )
    }

    fn content(&self) -> String {
        let (samples, buffer) = (self.order.samples(), self.order.buffer());
        let hash = self.index.content();
        format!("{samples} samples in shards, SHA-256 {hash:.16}, shuffle buffer of {buffer}")
    }
}

/// The data set of [`Stream::map`].
pub struct StreamDataset<T> {
    shards: Shards,
    decode: Decode<T>,
}

type Decode<T> = Box<dyn Fn(&Sample) -> Result<T> + Send + Sync>;

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
}
