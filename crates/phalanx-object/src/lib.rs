//! Object stores and HTTP servers, by the crate `object_store`.
//!
//! It signs requests, lists, and knows the errors of each store. How often a server is asked again is decided here: the crate
//! waits for a slow one without end.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::cell::Cell;
use std::error::Error as StdError;
use std::fs::File;
use std::io::{self, Read};
use std::iter::successors;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt};
pub use object_store;
use object_store::aws::AmazonS3Builder;
use object_store::client::HttpError;
use object_store::gcp::GoogleCloudStorageBuilder as Google;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    ClientOptions, Error as Store, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt,
    RetryConfig, WriteMultipart,
};
use phalanx_base::text::one_line;
use phalanx_base::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// How long a server is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A server that brings nothing for so long is asked again.
    pub silence: Duration,
    /// How long it is asked again while it brings nothing.
    pub total: Duration,
    /// Before it is asked for the second time; doubled each time, up to ten seconds.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            silence: Duration::from_secs(30),
            total: Duration::from_secs(180),
            pause: Duration::from_millis(250),
        }
    }
}

const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Fewer bytes than these in a [`Patience::silence`] are none.
const SLOW: u64 = 16 << 10;
/// Bytes of a part of a large file, how many are sent at the same time, and what a request that sends may take.
const PART: usize = 8 << 20;
const TOGETHER: usize = 4;
const SENDING: Duration = Duration::from_secs(600);

/// What is said of a server that sends whole files only.
const WHOLE: [&str; 2] = ["Range request not supported", "non-partial response"];
/// Words of an error, what it means, and the way out. The first that fits counts. The addresses are where credentials are looked
/// for when no variable has them.
const KNOWN: [(&str, &str, &str); 12] = [
    ("without LOCATION", ELSEWHERE, REGION),
    ("AuthorizationHeaderMalformed", ELSEWHERE, REGION),
    ("169.254.169.254", NONE, KEYS),
    ("/latest/api/token", NONE, KEYS),
    ("metadata.google.internal", NONE, KEYS),
    ("InvalidAccessKeyId", REFUSED, KEYS),
    ("SignatureDoesNotMatch", REFUSED, KEYS),
    ("Token</Code>", REFUSED, KEYS),
    ("status code: 401", REFUSED, KEYS),
    (
        "NoSuchBucket",
        "there is no such bucket",
        "check its name, and AWS_ENDPOINT",
    ),
    (
        "status code: 403",
        "the server does not allow it",
        "ask its owner, or use other credentials",
    ),
    ("status code: 404", "there is no such file", "check the URL"),
];
const ELSEWHERE: &str = "the bucket is in another region";
const REGION: &str = "set AWS_REGION to the bucket's region";
const NONE: &str = "there are no credentials";
const REFUSED: &str = "the server does not accept the credentials";
const KEYS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS; for a public bucket \
                    AWS_SKIP_SIGNATURE=true or GOOGLE_SKIP_SIGNATURE=true";

static RUNTIME: LazyLock<io::Result<Runtime>> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build());

fn runtime() -> Result<&'static Runtime> {
    let runtime = RUNTIME.as_ref();
    runtime.map_err(|e| Error::new(ErrorKind::System, format!("cannot start I/O: {e}")))
}

/// A prefix of an object store, or a folder of an HTTP server.
pub struct Objects {
    url: String,
    store: Box<dyn ObjectStore>,
    prefix: String,
    patience: Patience,
}

/// An error, and whether the next attempt may succeed.
struct Failure(bool, Error);

impl Objects {
    /// Those at `url`: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, or a folder of an HTTP server. The environment has the
    /// credentials. Nothing is asked yet.
    ///
    /// # Errors
    ///
    /// `Usage` for a URL or variables that the store does not understand, and for a URL with a password.
    pub fn open(url: &str, patience: Patience) -> Result<Objects> {
        // Fails where the program has chosen a provider already, which then serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let options = ClientOptions::new()
            .with_allow_http(true)
            .with_timeout_disabled()
            .with_connect_timeout(patience.silence)
            .with_read_timeout(2 * patience.silence);
        let retry = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        macro_rules! built {
            ($builder:expr, $url:expr) => {{
                let builder = $builder.with_client_options(options).with_retry(retry);
                let built = builder.with_url($url).build();
                Box::new(built.map_err(|e| Error::usage(format!("{url}: {e}")))?)
            }};
        }
        let slash = url.match_indices('/').nth(2);
        let slash = slash.map_or(url.len(), |(at, _)| at);
        let (bucket, prefix) = (&url[..slash], url[slash..].trim_matches('/'));
        if bucket.contains('@') {
            let what = "the URL of an object store has a user or password, which others could read";
            return Err(Error::usage(what).note("fix", KEYS));
        }
        let (store, prefix): (Box<dyn ObjectStore>, _) = match url.split(':').next() {
            Some("s3") => (built!(AmazonS3Builder::from_env(), bucket), prefix),
            Some("gs") => (built!(Google::from_env(), bucket), prefix),
            // Its URL has the path.
            _ => (built!(HttpBuilder::new(), url), ""),
        };
        Ok(Objects {
            url: url.trim_end_matches('/').to_owned(),
            store,
            prefix: prefix.to_owned(),
            patience,
        })
    }

    /// As it was typed.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// An object's path, whose name is taken as it is, and its URL; those of all for an empty name.
    ///
    /// # Errors
    ///
    /// `Usage`, naming the URL.
    fn path(&self, name: &str) -> Result<(Path, String)> {
        let url = format!("{}/{name}", self.url);
        let url = url.trim_end_matches('/').to_owned();
        let path = Path::parse(format!("{}/{name}", self.prefix).trim_matches('/'));
        let path = path.map_err(|e| Error::usage(format!("{url}: {e}")))?;
        Ok((path, url))
    }

    /// Asks until it succeeds, or cannot, or `at` has come forward by less than [`SLOW`] for [`Patience::total`].
    ///
    /// # Errors
    ///
    /// The last one.
    fn repeat<T>(
        &self,
        at: &Cell<u64>,
        ask: impl AsyncFn() -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let runtime = runtime()?;
        let Patience { total, pause, .. } = self.patience;
        let (mut since, mut reached, mut next) = (Instant::now(), 0, pause);
        loop {
            let error = match runtime.block_on(ask()) {
                Ok(done) => return Ok(done),
                Err(Failure(false, error)) => return Err(error),
                Err(Failure(true, error)) => error,
            };
            if at.get() >= reached + SLOW {
                (since, reached, next) = (Instant::now(), at.get(), pause);
            }
            if since.elapsed() > total {
                let (at, time) = (at.get(), total.as_secs());
                return Err(error.note("tried", format!("for {time} s, from byte {at} on")));
            }
            // The ranks of a job do not all come again at the same time.
            sleep(next * (16 + std::process::id() % 16) / 16);
            next = LONGEST_PAUSE.min(2 * next);
        }
    }

    /// Asks once.
    fn once<T>(&self, url: &str, ask: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        let done = runtime()?.block_on(async { timeout(SENDING, ask).await });
        let done = done.map_err(|_| {
            let what = format!("{url}: not done after {} s", SENDING.as_secs());
            Error::new(ErrorKind::Timeout, what)
        })?;
        done.map_err(|e| failure(url, e).1)
    }

    /// The object `name` as it is now.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`.
    pub fn about(&self, name: &str) -> Result<ObjectMeta> {
        let (path, url) = self.path(name)?;
        self.repeat(&Cell::new(0), async || {
            let found = self.store.head(&path).await;
            found.map_err(|e| failure(&url, e))
        })
    }

    /// The objects directly below the prefix.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`.
    pub fn top(&self) -> Result<Vec<ObjectMeta>> {
        let (prefix, url) = self.path("")?;
        let listed = self.repeat(&Cell::new(0), async || {
            let listed = self.store.list_with_delimiter(Some(&prefix)).await;
            listed.map_err(|e| failure(&url, e))
        })?;
        Ok(listed.objects)
    }

    /// All objects below the prefix, with their names.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`.
    pub fn all(&self) -> Result<Vec<(String, ObjectMeta)>> {
        let (prefix, url) = self.path("")?;
        let listed: Vec<ObjectMeta> = self.repeat(&Cell::new(0), async || {
            let listed = self.store.list(Some(&prefix)).try_collect().await;
            listed.map_err(|e| failure(&url, e))
        })?;
        let named = listed.into_iter().filter_map(|object| {
            let parts = object.location.prefix_match(&prefix)?;
            let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
            Some((parts.join("/"), object))
        });
        Ok(named.collect())
    }

    /// The content of a small object.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (path, url) = self.path(name)?;
        self.repeat(&Cell::new(0), async || {
            let got = self.store.get(&path).await.map_err(|e| failure(&url, e))?;
            let bytes = got.bytes().await.map_err(|e| failure(&url, e))?;
            Ok(bytes.to_vec())
        })
    }

    /// Writes the object `name` to `out`. It has `bytes` and the [`stamp`]; where the connection breaks, the rest of this version is asked for.
    ///
    /// # Errors
    ///
    /// `Data` when it has another version; `Usage`; `System` when the server brings nothing for
    /// [`Patience::total`].
    pub fn fetch(&self, name: &str, (bytes, version): (u64, &str), out: &File) -> Result<()> {
        let (path, url) = self.path(name)?;
        let silence = self.patience.silence;
        let (at, ranges) = (Cell::new(0), Cell::new(!version.is_empty()));
        self.repeat(&at, async || {
            if !ranges.get() {
                at.set(0);
            }
            let options = GetOptions {
                range: (at.get() > 0).then(|| GetRange::Offset(at.get())),
                if_match: Some(version.to_owned()).filter(|tag| tag.starts_with('"')),
                ..GetOptions::default()
            };
            let got = self.store.get_opts(&path, options).await.map_err(|e| {
                let text = e.to_string();
                ranges.set(ranges.get() && !WHOLE.iter().any(|words| text.contains(words)));
                failure(&url, e)
            })?;
            if (got.meta.size, &*stamp(&got.meta)) != (bytes, version) {
                return Err(Failure(false, changed(&url)));
            }
            let mut body = got.into_stream();
            while at.get() < bytes {
                let before = at.get();
                let next = async {
                    while at.get() < bytes.min(before + SLOW) {
                        let ended = || broken(&url, "the connection was closed");
                        let part = body.next().await.ok_or_else(ended)?;
                        let mut part = part.map_err(|e| failure(&url, e))?;
                        part.truncate((bytes - at.get()) as usize);
                        let written = out.write_all_at(&part, at.get());
                        let failed =
                            |e| Error::io("cannot write what is fetched of", url.as_ref(), e);
                        written.map_err(|e| Failure(false, failed(e)))?;
                        at.set(at.get() + part.len() as u64);
                    }
                    Ok(())
                };
                let slow = |_| {
                    let (got, time) = (at.get() - before, silence.as_secs());
                    broken(&url, &format!("it sent {got} bytes in {time} s"))
                };
                timeout(silence, next).await.map_err(slow)??;
            }
            Ok(())
        })
    }

    /// Makes the rest of `file` the object `name`, which is seen when it is whole. Asks once.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`, `Timeout`; those of reading.
    pub fn put(&self, name: &str, file: &mut File) -> Result<()> {
        let (path, url) = self.path(name)?;
        let mut part = Vec::new();
        let mut read = |part: &mut Vec<u8>| {
            part.clear();
            let read = file.take(PART as u64).read_to_end(part);
            read.map_err(|e| Error::io("cannot read", name.as_ref(), e))
        };
        if read(&mut part)? < PART {
            self.once(&url, self.store.put(&path, part.into()))?;
            return Ok(());
        }
        let upload = self.once(&url, self.store.put_multipart(&path))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, PART);
        let sent = loop {
            if let Err(error) = self.once(&url, upload.wait_for_capacity(TOGETHER)) {
                break Err(error);
            }
            // Sending begins, for which a runtime must be there.
            let _runtime = runtime()?.enter();
            upload.write(&part);
            match read(&mut part) {
                Ok(0) => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        match sent {
            Ok(()) => self.once(&url, upload.finish()).map(drop),
            Err(error) => {
                let _ = self.once(&url, upload.abort());
                Err(error)
            }
        }
    }

    /// Removes the object `name`, if it is there.
    ///
    /// # Errors
    ///
    /// `Usage` for what the user can mend; `System`.
    pub fn delete(&self, name: &str) -> Result<()> {
        let (path, url) = self.path(name)?;
        self.once(&url, async {
            match self.store.delete(&path).await {
                Err(Store::NotFound { .. }) => Ok(()),
                done => done,
            }
        })
    }
}

/// What tells a version of an object from others: its ETag in quotes, else the time of its last change, else nothing.
pub fn stamp(about: &ObjectMeta) -> String {
    let tag = about.e_tag.as_ref().map(|tag| match tag.contains('"') {
        true => tag.clone(),
        false => format!("\"{tag}\""),
    });
    // What a server without it is given.
    let dated = about.last_modified.timestamp() > 0;
    let dated = || dated.then(|| about.last_modified.to_rfc3339());
    tag.or_else(dated).unwrap_or_default()
}

fn changed(url: &str) -> Error {
    Error::data(format!("{url} was changed"))
}

/// That `url` cannot be read now, and `why`.
fn broken(url: &str, why: &str) -> Failure {
    let what = format!("{url}: {}", one_line(why));
    Failure(true, Error::new(ErrorKind::System, what))
}

/// What an error of the store means: `Usage` for what the user can mend, `Data` for another version than was asked for,
/// otherwise `System`.
fn failure(url: &str, error: Store) -> Failure {
    let causes: Vec<_> = successors(Some(&error as &dyn StdError), |e| (*e).source()).collect();
    let is_transport = causes.iter().any(|cause| cause.is::<HttpError>());
    let mut text = error.to_string();
    let deepest = causes.last().map(ToString::to_string).unwrap_or_default();
    if !text.contains(&deepest) {
        text += &format!(": {deepest}");
    }
    let has = |words: &str| text.contains(words);
    if has("status code: 412") {
        return Failure(false, changed(url));
    }
    let Some((_, what, fix)) = KNOWN.iter().find(|(words, ..)| has(words)) else {
        let again = ["status code: 5", "status code: 429", "status code: 408"];
        let is_again = is_transport && !has("certificate");
        let Failure(_, error) = broken(url, &text);
        return Failure(is_again || again.into_iter().chain(WHOLE).any(has), error);
    };
    let said: String = one_line(&text).chars().take(300).collect();
    let error = Error::usage(format!("{url}: {what}")).note("fix", *fix);
    Failure(false, error.note("since", said))
}
