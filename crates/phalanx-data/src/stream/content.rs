//! What is in a sample, in every format.

use std::ops::Range;

use serde_json::{Map, Value};

/// What is in a sample.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// Its bytes, and where the members, or the columns of a row, lie, by their names.
    Members(Vec<u8>, Vec<(String, Range<usize>)>),
    Object(Map<String, Value>),
}
