//! What the page shows, and what has changed of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::hub;
use super::job::Job;
use super::run::{New, RunView};
use crate::Rank;
use crate::tail::Tail;

/// Messages of the launcher that are shown.
const MOST_NOTES: usize = 200;

/// What the page shows.
#[derive(Default)]
pub(crate) struct View {
    job: New<Option<Job>>,
    ranks: New<Vec<Rank>>,
    notes: New<Vec<String>>,
    /// Output by rank, and how many lines were sent.
    tails: BTreeMap<usize, (Arc<Tail>, u64)>,
    pub run: RunView,
}

impl View {
    pub fn set_job(&mut self, job: Job) {
        self.job.set(Some(job));
    }

    pub fn set_ranks(&mut self, ranks: Vec<Rank>) {
        self.ranks.set(ranks);
    }

    pub fn set_tails(&mut self, tails: &BTreeMap<usize, Arc<Tail>>) {
        for (rank, tail) in tails {
            let entry = self.tails.entry(*rank);
            entry.or_insert_with(|| (tail.clone(), 0));
        }
    }

    /// Messages of the launcher.
    pub fn note(&mut self, new: Vec<String>) {
        if new.is_empty() {
            return;
        }
        let mut notes = std::mem::take(&mut self.notes.value);
        notes.extend(new);
        notes.drain(..notes.len().saturating_sub(MOST_NOTES));
        self.notes.set(notes);
    }
}

impl hub::View for View {
    const FILES: &'static [(&'static str, &'static str, &'static str)] = &[
        ("/", "text/html; charset=utf-8", include_str!("page.html")),
        (
            "/page.js",
            "text/javascript; charset=utf-8",
            include_str!("live.js"),
        ),
    ];

    fn whole(&self) -> Value {
        let tails = self.tails.iter().map(|(rank, (tail, sent))| {
            let (lines, _) = tail.lines(0, *sent);
            (rank.to_string(), json!(lines))
        });
        let mut whole = Map::new();
        let parts = [
            ("job", json!(self.job.value)),
            ("ranks", json!(self.ranks.value)),
            ("notes", json!(self.notes.value)),
            ("lines", tails.collect::<Map<_, _>>().into()),
        ];
        whole.extend(parts.map(|(name, part)| (name.to_owned(), part)));
        self.run.whole(&mut whole);
        whole.into()
    }

    fn change(&mut self) -> Option<Value> {
        let mut change = Map::new();
        self.job.add_to(&mut change, "job");
        self.ranks.add_to(&mut change, "ranks");
        self.notes.add_to(&mut change, "notes");
        self.run.change(&mut change);
        let mut lines = Map::new();
        for (rank, (tail, sent)) in &mut self.tails {
            let (new, next) = tail.lines(*sent, u64::MAX);
            if next > *sent {
                lines.insert(rank.to_string(), json!(new));
                *sent = next;
            }
        }
        if !lines.is_empty() {
            change.insert("lines".to_owned(), lines.into());
        }
        (!change.is_empty()).then(|| change.into())
    }
}
