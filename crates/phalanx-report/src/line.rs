//! A line of `events.jsonl`.

use std::borrow::Cow;

use serde::Deserialize;

/// The names of all kinds of lines.
#[derive(Debug, Deserialize)]
pub struct Line<'a> {
    #[serde(borrow)]
    pub kind: Cow<'a, str>,
    pub step: Option<f64>,
    pub epoch: Option<f64>,
    pub elapsed_s: Option<f64>,
    pub attempt: Option<u64>,
    pub resumed_at: Option<f64>,
    #[serde(borrow)]
    pub text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub file: Option<Cow<'a, str>>,
    pub rows: Option<u64>,
    pub before: Option<f64>,
    pub after: Option<f64>,
    #[serde(default)]
    pub takes_over: bool,
    #[serde(borrow)]
    pub status: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub error: Option<Cow<'a, str>>,
}
