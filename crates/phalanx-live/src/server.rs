//! HTTP: the page's files and its stream of changes, on one thread.

use std::convert::Infallible;
use std::future::{Future, pending, poll_fn};
use std::net::TcpListener;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::access::Access;
use crate::hub::{Hub, Subscription, View};

/// Connections at a time; others are closed at once.
const MOST_CONNECTIONS: usize = 192;

/// How long a request may take to arrive, and an answer other than the stream to be read.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The size of a request.
const HEAD_BYTES: usize = 16 << 10;
const MOST_HEADERS: usize = 64;

/// How long readers may take to read the rest when the job has ended.
const END_LIMIT: Duration = Duration::from_secs(2);

/// What browsers may do with the page: nothing from elsewhere is loaded, and nothing is sent there.
const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// The files of every page: path and text.
const FILES: [(&str, &str); 4] = [
    ("/report.css", phalanx_report::CSS),
    ("/live.css", include_str!("page/live.css")),
    ("/report.js", phalanx_report::JS),
    ("/stream.js", include_str!("page/stream.js")),
];

/// What the connections share.
pub(crate) struct Site<V> {
    pub access: Access,
    pub hub: Arc<Hub<V>>,
    /// Ends the server.
    pub stop: Notify,
    connections: AtomicUsize,
    streams: AtomicUsize,
    /// Reports are read one at a time.
    reading: tokio::sync::Mutex<()>,
}

impl<V> Site<V> {
    pub fn new(access: Access, hub: Arc<Hub<V>>) -> Site<V> {
        Site {
            access,
            hub,
            stop: Notify::new(),
            connections: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            reading: tokio::sync::Mutex::default(),
        }
    }
}

/// Serves until `site.stop` is notified, and the streams have then ended or two seconds have passed.
pub(crate) fn serve<V: View>(listener: TcpListener, site: &Arc<Site<V>>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        either(accept(&listener, site), site.stop.notified()).await;
        let streams_end = async {
            while site.streams.load(Ordering::Relaxed) > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = timeout(END_LIMIT, streams_end).await;
        Ok(())
    })
}

async fn accept<V: View>(listener: &tokio::net::TcpListener, site: &Arc<Site<V>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if site.connections.load(Ordering::Relaxed) < MOST_CONNECTIONS => {
                site.connections.fetch_add(1, Ordering::Relaxed);
                let site = site.clone();
                tokio::spawn(async move {
                    connection(stream, &site).await;
                    site.connections.fetch_sub(1, Ordering::Relaxed);
                });
            }
            Ok(_) => {}
            // Too many open files, for example.
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Answers one request.
async fn connection<V: View>(stream: TcpStream, site: &Arc<Site<V>>) {
    let end = Arc::new(Notify::new());
    let is_stream = Arc::new(AtomicBool::new(false));
    let service = service_fn(|request: Request<Incoming>| async {
        let answer = answer(request.into_parts().0, site, &end).await;
        if matches!(answer.body(), Answer::Stream(..)) {
            is_stream.store(true, Ordering::Relaxed);
            site.streams.fetch_add(1, Ordering::Relaxed);
        }
        Ok::<_, Infallible>(answer)
    });
    let answered = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_LIMIT)
        .max_headers(MOST_HEADERS)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let late = async {
        sleep(ANSWER_LIMIT).await;
        if is_stream.load(Ordering::Relaxed) {
            pending::<()>().await;
        }
    };
    // However it ends, there is no client to inform.
    either(answered, either(late, end.notified())).await;
    if is_stream.load(Ordering::Relaxed) {
        site.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn answer<V: View>(request: Parts, site: &Site<V>, end: &Arc<Notify>) -> Response<Answer> {
    let checked = site
        .access
        .check(&request.method, &request.uri, &request.headers);
    let allowed = match checked {
        Ok(allowed) => allowed,
        Err((status, text)) => return refused(status, text),
    };
    let path = request.uri.path();
    let mut files = FILES.iter().chain(V::FILES);
    let (kind, body) = match files.find(|(name, _)| *name == path) {
        Some((_, text)) => (
            match path.rsplit_once('.') {
                Some((_, "css")) => "text/css; charset=utf-8",
                Some((_, "js")) => "text/javascript; charset=utf-8",
                _ => "text/html; charset=utf-8",
            },
            Answer::Text(Some(Bytes::from_static(text.as_bytes()))),
        ),
        None if path == "/report.json" => match report(&request, site).await {
            Ok(report) => ("application/json", Answer::Text(Some(report))),
            Err((status, text)) => return refused(status, text),
        },
        None if path != "/events" => {
            return refused(StatusCode::NOT_FOUND, "There is no such page.");
        }
        None if request.method == Method::HEAD => ("text/event-stream", Answer::Text(None)),
        None => match site.hub.subscribe(end.clone()) {
            Some(subscription) => ("text/event-stream", Answer::Stream(subscription)),
            None => {
                let text = "Too many readers have the page open.";
                return refused(StatusCode::SERVICE_UNAVAILABLE, text);
            }
        },
    };
    let mut response = with_headers(StatusCode::OK, kind, body);
    let cookie = allowed.cookie.map(HeaderValue::try_from);
    if let Some(Ok(cookie)) = cookie {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

/// How the run `?id=N` ended, and its report as `phalanx_report` reads it, in JSON.
async fn report<V: View>(
    request: &Parts,
    site: &Site<V>,
) -> Result<Bytes, (StatusCode, &'static str)> {
    let id = request
        .uri
        .query()
        .and_then(|query| query.strip_prefix("id="));
    let id = id.and_then(|id| id.parse().ok());
    let none = (StatusCode::NOT_FOUND, "There is no such run.");
    let (folder, end) = id.and_then(|id| site.hub.run(id)).ok_or(none)?;
    let _one = site.reading.lock().await;
    let read = tokio::task::spawn_blocking(move || {
        let run = phalanx_report::Run::read(&folder).ok()?;
        serde_json::to_vec(&(end, run)).ok()
    });
    match read.await {
        Ok(Some(report)) => Ok(report.into()),
        _ => Err((
            StatusCode::INTERNAL_SERVER_ERROR,
            "The run's folder cannot be read.",
        )),
    }
}

fn refused(status: StatusCode, text: &'static str) -> Response<Answer> {
    let body = Answer::Text(Some(Bytes::from_static(text.as_bytes())));
    let mut response = with_headers(status, "text/plain; charset=utf-8", body);
    if status == StatusCode::METHOD_NOT_ALLOWED {
        let allowed = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

fn with_headers(status: StatusCode, kind: &'static str, body: Answer) -> Response<Answer> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The body of an answer.
enum Answer {
    Text(Option<Bytes>),
    Stream(Subscription),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = match self.get_mut() {
            Answer::Text(text) => text.take(),
            Answer::Stream(messages) => match messages.poll_next(cx) {
                Poll::Ready(next) => next,
                Poll::Pending => return Poll::Pending,
            },
        };
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Answer::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64),
            Answer::Stream(..) => SizeHint::default(),
        }
    }
}

/// Waits until one of both has ended.
async fn either(a: impl Future, b: impl Future) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    poll_fn(|cx| match (a.as_mut().poll(cx), b.as_mut().poll(cx)) {
        (Poll::Pending, Poll::Pending) => Poll::Pending,
        _ => Poll::Ready(()),
    })
    .await;
}
