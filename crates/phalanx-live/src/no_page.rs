//! The page of a program that was built without one.

use std::path::PathBuf;
use std::sync::Arc;

use crate::{Address, End, Error, Rank, Result, Tail};

/// There is none.
pub enum Page {}

impl Page {
    /// Refuses.
    ///
    /// # Errors
    ///
    /// `Usage` always.
    pub fn open(_address: &Address, _program: &str) -> Result<Page> {
        let why = "this program was built without the live page";
        Err(Error::usage(why).note("try", "phalanx launch --live -- PROGRAM"))
    }

    /// As the page's.
    pub fn link(&self) -> &str {
        match *self {}
    }

    /// As the page's.
    pub fn set_pointer(&self, _pointer: PathBuf) {
        match *self {}
    }

    /// As the page's.
    pub fn set_ranks(&self, _ranks: Vec<Rank>) {
        match *self {}
    }

    /// As the page's.
    pub fn tail(&self, _rank: usize) -> Arc<Tail> {
        match *self {}
    }

    /// As the page's.
    pub fn note(&self, _text: String) {
        match *self {}
    }

    /// As the page's.
    pub fn end(self, _end: End) {
        match self {}
    }
}
