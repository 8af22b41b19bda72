//! Object stores and HTTP servers, by the crate `object_store`.

use std::cell::Cell;
use std::error::Error as _;
use std::fs::File;
use std::future::Future;
use std::os::unix::fs::FileExt;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    ClientOptions, Error as Store, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutPayload, RetryConfig,
};
use phalanx_base::error::system;
use phalanx_base::files::read_regular;
use phalanx_base::text::one_line;
use phalanx_base::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use super::place::Object;

/// How long a server may send nothing, or less than [`SLOW`] bytes.
const SILENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 20 });
const SLOW: u64 = 16 << 10;
/// Attempts in turn that bring less than [`PROGRESS`].
const ATTEMPTS: u32 = 6;
const PROGRESS: u64 = 1 << 10;
/// Before the second attempt; doubled each time.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 1000 });
/// How often a fetch looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// Most bytes of an index that is sent.
const MAX_SENT: u64 = 4 << 30;

/// What S3 says for another region, and where credentials are looked for when no variable has them.
const REGION: [&str; 3] = [
    "without LOCATION",
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
];
const CREDENTIALS: [&str; 3] = [
    "169.254.169.254",
    "/latest/api/token",
    "metadata.google.internal",
];
const KEYS: &str = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS; of a public bucket \
                    AWS_SKIP_SIGNATURE=true or GOOGLE_SKIP_SIGNATURE=true";

/// A prefix of an object store.
pub(super) struct Remote {
    url: String,
    store: Box<dyn ObjectStore>,
    prefix: Path,
    runtime: Runtime,
    closing: AtomicBool,
}

/// Why an attempt failed.
enum Failure {
    /// Another attempt may succeed.
    Temporary(String),
    Final(Error),
}

type Attempt<T> = std::result::Result<T, Failure>;

impl Remote {
    pub(super) fn open(url: &str) -> Result<Remote> {
        // Fails where the program has chosen a provider already, which then serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let wrong = |e: Store| Error::usage(format!("{url}: {e}"));
        let options = ClientOptions::new()
            .with_allow_http(true)
            .with_timeout_disabled()
            .with_connect_timeout(SILENCE)
            .with_read_timeout(SILENCE);
        // What is tried again is decided here, where the place in the file is known.
        let retry = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        let builder: object_store::Result<Box<dyn ObjectStore>> = match url.split(':').next() {
            Some("s3") => {
                let builder = AmazonS3Builder::from_env().with_client_options(options);
                let store = builder.with_url(url).with_retry(retry).build();
                store.map(|store| Box::new(store) as _)
            }
            Some("gs") => {
                let builder = GoogleCloudStorageBuilder::from_env().with_client_options(options);
                let store = builder.with_url(url).with_retry(retry).build();
                store.map(|store| Box::new(store) as _)
            }
            _ => {
                let builder = HttpBuilder::new().with_client_options(options);
                let store = builder.with_url(url).with_retry(retry).build();
                store.map(|store| Box::new(store) as _)
            }
        };
        // That of HTTP has the path in its URL.
        let path = url
            .splitn(4, '/')
            .nth(3)
            .filter(|_| !url.starts_with("http"));
        let prefix = Path::parse(path.unwrap_or_default());
        let runtime = Builder::new_current_thread().enable_all().build();
        Ok(Remote {
            url: url.to_owned(),
            store: builder.map_err(wrong)?,
            prefix: prefix.map_err(|e| wrong(e.into()))?,
            runtime: runtime.map_err(system("cannot start I/O"))?,
            closing: AtomicBool::new(false),
        })
    }

    /// Ends what is being fetched.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    fn path(&self, name: &str) -> Path {
        self.prefix.clone().join(name)
    }

    /// The objects directly below the prefix.
    pub(super) fn list(&self) -> Result<Vec<Object>> {
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let listed = self.repeated(&self.url, || self.store.list_with_delimiter(prefix));
        // Few HTTP servers list what they have.
        let fix =
            "where it lists nothing: `phalanx index` of a copy in a folder, put beside the shards";
        let listed = listed.map_err(|e| e.note("try", fix))?;
        Ok(listed.objects.into_iter().map(object).collect())
    }

    /// Size and ETag of an object; `None` if there is none.
    pub(super) fn head(&self, name: &str) -> Result<Option<Object>> {
        let (path, url) = (self.path(name), format!("{}/{name}", self.url));
        self.repeated(&url, || async {
            // Not HEAD, whose answer does not say what is wrong. The body is not read.
            match self.store.get(&path).await {
                Err(Store::NotFound { .. }) => Ok(None),
                found => found.map(|found| Some(object(found.meta))),
            }
        })
    }

    /// Stores the content of a file.
    pub(super) fn put(&self, name: &str, from: &FilePath) -> Result<()> {
        let bytes = PutPayload::from(read_regular(from, MAX_SENT)?);
        let (path, url) = (self.path(name), format!("{}/{name}", self.url));
        let send = || self.store.put(&path, bytes.clone());
        self.repeated(&url, send).map(drop)
    }

    /// Writes an object to `out`. Where the connection breaks, the rest is asked for.
    ///
    /// # Errors
    ///
    /// `System`, naming URL, offset and reason, when several attempts in turn bring nothing; `Data` when the object is not
    /// the one that was indexed; `Usage` for credentials and regions.
    pub(super) fn get(&self, object: &Object, out: &File) -> Result<()> {
        let (url, at) = (format!("{}/{}", self.url, object.name), Cell::new(0));
        let attempt = || self.attempt(object, &url, &at, out);
        self.attempts(&url, &at, || self.runtime.block_on(attempt()))
    }

    async fn attempt(&self, object: &Object, url: &str, at: &Cell<u64>, out: &File) -> Attempt<()> {
        let options = GetOptions {
            // Some HTTP servers give whole files only.
            range: (at.get() > 0).then_some(GetRange::Offset(at.get())),
            // An index that was made in a folder has times instead.
            if_match: Some(object.stamp.clone()).filter(|stamp| stamp.starts_with('"')),
            ..GetOptions::default()
        };
        let path = self.path(&object.name);
        let got = self.store.get_opts(&path, options).await;
        let got = got.map_err(|e| self.failure(e, url))?;
        if got.meta.size != object.bytes {
            return Err(Failure::Final(changed(url)));
        }
        let mut body = got.into_stream();
        let (mut since, mut first) = (Instant::now(), at.get());
        while at.get() < object.bytes {
            let chunk = timeout(LOOK, body.next()).await;
            if self.closing.load(Ordering::Relaxed) {
                return Err(Failure::Final(Error::stopped()));
            }
            match chunk {
                Ok(Some(Ok(bytes))) => {
                    let room = (object.bytes - at.get()).min(bytes.len() as u64);
                    let written = out.write_all_at(&bytes[..room as usize], at.get());
                    let wrong = |e| Error::io("cannot write into the cache:", url.as_ref(), e);
                    written.map_err(|e| Failure::Final(wrong(e)))?;
                    at.set(at.get() + room);
                }
                Ok(Some(Err(e))) => return Err(self.failure(e, url)),
                Ok(None) => return Err(Failure::Temporary("the connection ended".into())),
                Err(_) => {}
            }
            if since.elapsed() > SILENCE {
                let brought = at.get() - first;
                if brought < SLOW {
                    let why = format!("only {brought} bytes came in {} s", SILENCE.as_secs());
                    return Err(Failure::Temporary(why));
                }
                (since, first) = (Instant::now(), at.get());
            }
        }
        Ok(())
    }

    /// Does `ask` until it succeeds.
    fn repeated<T, F>(&self, url: &str, ask: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.attempts(url, &Cell::new(0), || {
            let answer = self.runtime.block_on(ask());
            answer.map_err(|e| self.failure(e, url))
        })
    }

    /// Tries until it succeeds, or `at` has come forward by less than [`PROGRESS`] several times in turn.
    fn attempts<T>(
        &self,
        url: &str,
        at: &Cell<u64>,
        attempt: impl Fn() -> Attempt<T>,
    ) -> Result<T> {
        let mut failed = 0;
        loop {
            let before = at.get();
            let why = match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Final(e)) => return Err(e),
                Err(Failure::Temporary(why)) => why,
            };
            failed = match at.get() - before >= PROGRESS {
                true => 0,
                false => failed + 1,
            };
            if failed == ATTEMPTS {
                let what = format!("{url} cannot be read from byte {} on: {why}", at.get());
                let tried = format!("{ATTEMPTS} times in turn");
                return Err(Error::new(ErrorKind::System, what).note("tried", tried));
            }
            // The ranks of a job do not all come again at the same time.
            let jitter = PAUSE * (std::process::id() % 16) / 32;
            let until = Instant::now() + PAUSE * 2_u32.pow(failed) / 2 + jitter;
            while Instant::now() < until {
                if self.closing.load(Ordering::Relaxed) {
                    return Err(Error::stopped());
                }
                sleep(LOOK.min(PAUSE));
            }
        }
    }

    /// What an error of the store means.
    fn failure(&self, error: Store, url: &str) -> Failure {
        let causes = std::iter::successors(error.source(), |cause| (*cause).source());
        let deepest = causes.last().map(ToString::to_string).unwrap_or_default();
        let mut text = error.to_string();
        if !text.contains(&deepest) {
            text += &format!(": {deepest}");
        }
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        let is_refused = matches!(
            error,
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. }
        );
        let (what, fix) = if has(&REGION) {
            let fix = "AWS_REGION names the bucket's region";
            ("the bucket is in another region", fix)
        } else if has(&CREDENTIALS) {
            ("there are no credentials", KEYS)
        } else if is_refused {
            ("the credentials are refused", KEYS)
        } else {
            return match error {
                Store::Precondition { .. } => Failure::Final(changed(url)),
                Store::NotFound { .. } => {
                    Failure::Final(Error::usage(format!("there is no {url}")))
                }
                Store::Generic { .. } => Failure::Temporary(one_line(&text).into_owned()),
                _ => Failure::Final(system(format!("{url}: {}", one_line(&text)))(error)),
            };
        };
        let error = Error::usage(format!("{url}: {what}"));
        Failure::Final(error.note("since", one_line(&text)).note("fix", fix))
    }
}

fn object(about: ObjectMeta) -> Object {
    Object {
        name: about.location.filename().unwrap_or_default().to_owned(),
        bytes: about.size,
        stamp: about.e_tag.unwrap_or_default(),
    }
}

fn changed(url: &str) -> Error {
    let what = format!("{url} is not what it was when its index was made");
    Error::data(what).note("fix", "make the index again with `phalanx index`")
}
