//! Requests to an MLflow tracking server.

use std::fs::File;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use phalanx_base::env::Env;
use phalanx_base::text::one_line;
use phalanx_http::ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};
use phalanx_http::ureq::http::{Response, Uri};
use phalanx_http::ureq::{self, Agent, Body, RequestBuilder};
use serde_json::Value;

use crate::{Error, ErrorKind, Result, refuse};

/// The variable with the server's address.
pub(super) const URI: &str = "MLFLOW_TRACKING_URI";
const USERNAME: &str = "MLFLOW_TRACKING_USERNAME";
const PASSWORD: &str = "MLFLOW_TRACKING_PASSWORD";
const TOKEN: &str = "MLFLOW_TRACKING_TOKEN";
const INSECURE: &str = "MLFLOW_TRACKING_INSECURE_TLS";

/// Timeout for connecting, for an answer and for each read and write.
const SILENCE: Duration = Duration::from_secs(30);

/// Limit for an answer.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// As much of a server's message is shown.
const SHOWN_CHARS: usize = 300;

/// An MLflow tracking server.
pub(super) struct Server {
    agent: Agent,
    /// Without a slash at its end, user and password.
    uri: String,
    authorization: Option<String>,
}

/// An answer of the server that says that the request is wrong.
pub(super) struct Refused {
    pub(super) code: String,
    message: String,
}

impl Refused {
    /// As an error that ends the delivery.
    pub(super) fn error(self) -> Error {
        let Refused { code, message } = self;
        let message = format!("the server refuses it: {code}: {message}");
        Error::new(ErrorKind::Failed, message)
    }
}

impl Server {
    /// The server at `uri`, with user, password or token from the environment.
    pub(super) fn new(uri: &str, env: &Env) -> Result<Server> {
        let parsed: Option<Uri> = uri.parse().ok();
        let parts = parsed.as_ref().and_then(|uri| {
            let scheme = uri.scheme_str().filter(|s| ["http", "https"].contains(s))?;
            let authority = uri.authority().filter(|a| !a.host().is_empty())?;
            Some((scheme, authority.as_str(), uri.path()))
        });
        let Some((scheme, authority, path)) = parts else {
            // It may hold a password.
            return Err(Error::usage(
                "the address of the MLflow server is not http://HOST:PORT or https://HOST",
            )
            .note("perhaps", "start a server: mlflow server --port 5000"));
        };
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        if scheme == "https" {
            phalanx_http::check_tls()
                .map_err(|why| Error::usage(why).note("try", "an http:// address"))?;
        }
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty());
        let basic = |user: &str| Some(format!("Basic {}", BASE64_STANDARD.encode(user)));
        let authorization = match (set(USERNAME), set(PASSWORD), set(TOKEN), user) {
            (Some(name), Some(password), ..) => basic(&format!("{name}:{password}")),
            (.., Some(token), _) => Some(format!("Bearer {token}")),
            (.., Some(user)) => {
                let decoded = percent_encoding::percent_decode_str(user).decode_utf8_lossy();
                basic(&decoded)
            }
            _ => None,
        };
        let insecure =
            set(INSECURE).is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1");
        Ok(Server {
            agent: phalanx_http::agent(SILENCE, insecure)?,
            uri: format!("{scheme}://{host}{}", path.trim_end_matches('/')),
            authorization,
        })
    }

    /// Its address, without a password.
    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    /// Asks for something.
    pub(super) fn get(&self, path: &str) -> Result<std::result::Result<Value, Refused>> {
        let url = format!("{}/api/2.0/mlflow/{path}", self.uri);
        self.answer(self.authorized(self.agent.get(url)).call())
    }

    /// Sends `body`.
    pub(super) fn try_post(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<std::result::Result<Value, Refused>> {
        let url = format!("{}/api/2.0/mlflow/{path}", self.uri);
        let request = self.authorized(self.agent.post(url));
        let request = request.header(CONTENT_TYPE, "application/json");
        self.answer(request.send(body.to_string()))
    }

    /// Sends `body`, which must be right.
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.try_post(path, body)?.map_err(Refused::error)
    }

    /// Sends `file` as the artifact at `path`.
    pub(super) fn put(&self, path: &str, file: File) -> Result<()> {
        let url = format!("{}/api/2.0/mlflow-artifacts/artifacts/{path}", self.uri);
        let request = self.authorized(self.agent.put(url));
        let request = request.header(CONTENT_TYPE, "application/octet-stream");
        let answer = self.answer(request.send(file))?;
        answer.map(|_| ()).map_err(Refused::error)
    }

    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        }
    }

    fn answer(
        &self,
        outcome: std::result::Result<Response<Body>, ureq::Error>,
    ) -> Result<std::result::Result<Value, Refused>> {
        let uri = &self.uri;
        let uri = format!("{uri}{}", phalanx_http::through_proxy(&self.agent, uri));
        let lost = |why: &str| Error::new(ErrorKind::PeerLost, format!("{uri}: {}", one_line(why)));
        let mut answer = outcome.map_err(|e| match e {
            ureq::Error::Timeout(_) => {
                Error::new(ErrorKind::Timeout, format!("{uri} does not answer"))
            }
            // A certificate that is not trusted would not be the next time.
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                Error::usage(format!("{uri}: {e}")).note(
                    "fix",
                    format!(
                        "{} may name a file of further root certificates",
                        phalanx_http::ROOTS
                    ),
                )
            }
            ureq::Error::Io(e) => lost(&e.to_string()),
            e => lost(&e.to_string()),
        })?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        // Read in any case: it may say why.
        let body = body.read_to_vec();
        let json = body.as_ref().ok().map(|body| serde_json::from_slice(body));
        match (status, json) {
            (401 | 403, _) => Err(Error::usage(format!(
                "{uri} refuses the user (HTTP status {status}); set {USERNAME} and {PASSWORD}, or {TOKEN}"
            ))),
            (408 | 429 | 500.., _) => Err(lost(&format!("HTTP status {status}"))),
            (200..300, Some(Ok(json))) => Ok(Ok(json)),
            // To an artifact.
            (200..300, Some(Err(_))) if body.as_ref().is_ok_and(Vec::is_empty) => {
                Ok(Ok(Value::Null))
            }
            (200..300, Some(Err(_))) => Err(lost("the answer is not JSON")),
            (_, None) => Err(lost("the answer broke off")),
            (_, Some(json)) => {
                let json: Value = json.unwrap_or_default();
                let text = |name: &str| json[name].as_str().map(|text| one_line(text).into_owned());
                let Some(code) = text("error_code") else {
                    refuse!("{uri} is not an MLflow tracking server (HTTP status {status})");
                };
                let message = text("message").unwrap_or_default();
                let message = message.chars().take(SHOWN_CHARS).collect();
                Ok(Err(Refused { code, message }))
            }
        }
    }
}
