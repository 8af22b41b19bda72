//! Keys and values with limits; no waiting, no locking.

use std::collections::BTreeMap;
use std::ops::Bound;

use phalanx_wire::store_msg::{
    Failure, MAX_KEYS, MAX_TOTAL_BYTES, MAX_VALUE_BYTES, MAX_WAIT_KEYS, Request, Response,
};

/// Limits of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of keys.
    pub max_keys: usize,
    /// Maximum total size of keys and values, in bytes.
    pub max_total_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(MAX_KEYS, MAX_TOTAL_BYTES)
    }
}

impl Limits {
    /// Limits in place of the defaults, 128 Ki keys and 256 MiB.
    pub const fn new(max_keys: usize, max_total_bytes: u64) -> Self {
        Self {
            max_keys,
            max_total_bytes,
        }
    }
}

/// Keys and values. Sorted, so that a prefix is a range.
#[derive(Debug, Default)]
pub(crate) struct Table {
    map: BTreeMap<String, Vec<u8>>,
    /// Total size of keys and values.
    pub(crate) bytes: u64,
    limits: Limits,
}

impl Table {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&[u8]> {
        self.map.get(key).map(Vec::as_slice)
    }

    pub(crate) fn contains(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.limits);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.map.iter().map(|(k, v)| (k.as_str(), v.as_slice()))
    }

    /// The keys after this one, with their values.
    pub(crate) fn after(&self, key: &str) -> impl Iterator<Item = (&str, &[u8])> {
        let range = (Bound::Excluded(key), Bound::Unbounded);
        let range = self.map.range::<str, _>(range);
        range.map(|(k, v)| (k.as_str(), v.as_slice()))
    }

    /// Those of `keys` that do not exist, in their order.
    pub(crate) fn missing<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        keys.into_iter().filter(|key| !self.contains(key)).collect()
    }

    pub(crate) fn set(&mut self, key: &str, value: &[u8]) -> Result<(), Failure> {
        let old = self.map.get(key);
        if old.is_none() && self.map.len() >= self.limits.max_keys {
            return Err(Failure::TooManyKeys);
        }
        let freed = old.map_or(0, |old| key.len() + old.len()) as u64;
        let after = self.bytes - freed + (key.len() + value.len()) as u64;
        if after > self.limits.max_total_bytes {
            return Err(Failure::StoreFull);
        }
        self.bytes = after;
        // A new allocation, so that a shorter value does not keep memory that the limits no
        // longer count.
        self.map.insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    pub(crate) fn add(&mut self, key: &str, delta: i64) -> Result<i64, Failure> {
        let old = match self.get(key) {
            None => 0,
            Some(text) => std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or(Failure::NotANumber)?,
        };
        let sum = old.checked_add(delta).ok_or(Failure::AddOverflow)?;
        self.set(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    /// Returns the new length.
    pub(crate) fn append(&mut self, key: &str, value: &[u8]) -> Result<u64, Failure> {
        let old = self.get(key).unwrap_or_default();
        if old.len() + value.len() > MAX_VALUE_BYTES {
            return Err(Failure::ValueTooLong);
        }
        let value = [old, value].concat();
        self.set(key, &value)?;
        Ok(value.len() as u64)
    }

    /// The elements of a queue in their order: keys and values.
    fn elements(&self, queue: &str) -> impl DoubleEndedIterator<Item = (&String, &Vec<u8>)> {
        let all = self
            .map
            .range(element_key(queue, 0)..=element_key(queue, u64::MAX));
        all.filter(move |(key, _)| element(key).is_some_and(|(of, _)| of == queue))
    }

    /// Returns the key of the element.
    pub(crate) fn push(&mut self, queue: &str, value: &[u8]) -> Result<String, Failure> {
        let last = self.elements(queue).next_back();
        let number = match last.and_then(|(key, _)| element(key)) {
            None => 0,
            Some((_, last)) => last.checked_add(1).ok_or(Failure::TooManyKeys)?,
        };
        let key = element_key(queue, number);
        self.set(&key, value)?;
        Ok(key)
    }

    /// Removes the first element. Returns its key and value.
    pub(crate) fn pop(&mut self, queue: &str) -> Option<(String, Vec<u8>)> {
        let key = self.elements(queue).next()?.0.clone();
        let value = self.get(&key)?.to_vec();
        self.delete(&key);
        Some((key, value))
    }

    pub(crate) fn queue_len(&self, queue: &str) -> u64 {
        self.elements(queue).count() as u64
    }

    /// Returns whether it stored `desired`.
    pub(crate) fn compare_set(
        &mut self,
        key: &str,
        expected: Option<&[u8]>,
        desired: &[u8],
    ) -> Result<bool, Failure> {
        let matches = self.get(key) == expected;
        if matches {
            self.set(key, desired)?;
        }
        Ok(matches)
    }

    pub(crate) fn delete(&mut self, key: &str) -> bool {
        match self.map.remove(key) {
            None => false,
            Some(value) => {
                self.bytes -= (key.len() + value.len()) as u64;
                true
            }
        }
    }

    /// All keys with this prefix.
    pub(crate) fn with_prefix(&self, prefix: &str) -> Vec<String> {
        let range = (Bound::Included(prefix), Bound::Unbounded);
        let keys = self.map.range::<str, _>(range).map(|(key, _)| key);
        let keys = keys.take_while(|key| key.starts_with(prefix));
        keys.cloned().collect()
    }

    /// Removes all keys with this prefix; returns them.
    pub(crate) fn delete_prefix(&mut self, prefix: &str) -> Vec<String> {
        let keys = self.with_prefix(prefix);
        for key in &keys {
            self.delete(key);
        }
        keys
    }

    /// Executes a request at once; a wait is answered as if its time were over. Returns the
    /// response, and the keys that have changed.
    pub(crate) fn apply(&mut self, request: &Request<'_>) -> (Response, Vec<String>) {
        let mut changed = Vec::new();
        let response = self.try_apply(request, &mut changed);
        (response.unwrap_or_else(Response::Failed), changed)
    }

    fn try_apply(
        &mut self,
        request: &Request<'_>,
        changed: &mut Vec<String>,
    ) -> Result<Response, Failure> {
        let mut change = |key: &str| changed.push(key.to_owned());
        Ok(match *request {
            Request::Set { key, value } => {
                self.set(key, value)?;
                change(key);
                Response::Done
            }
            Request::Get { key, .. } | Request::GetNumbered { key, .. } if !self.contains(key) => {
                Response::Missing(vec![key.to_owned()])
            }
            Request::TryGet { key } | Request::Get { key, .. } => self.value(key),
            Request::GetNumbered { key, .. } => self.numbered(key).1,
            Request::Wait { ref keys, .. } => match self.missing(keys.iter().copied()) {
                missing if missing.is_empty() => Response::Done,
                missing => Response::Missing(missing.into_iter().map(str::to_owned).collect()),
            },
            Request::Add { key, delta } => {
                let sum = self.add(key, delta)?;
                change(key);
                Response::Number(sum)
            }
            Request::Append { key, value } => {
                let length = self.append(key, value)?;
                change(key);
                Response::Number(length.cast_signed())
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                if self.compare_set(key, expected, desired)? {
                    change(key);
                }
                self.value(key)
            }
            Request::Delete { key } => {
                let existed = self.delete(key);
                if existed {
                    change(key);
                }
                Response::Existed(existed)
            }
            Request::DeletePrefix { prefix } => {
                *changed = self.delete_prefix(prefix);
                Response::Removed(changed.len() as u64)
            }
            Request::QueuePush { queue, value } => {
                changed.push(self.push(queue, value)?);
                Response::Done
            }
            Request::QueuePop { queue, .. } => match self.pop(queue) {
                Some((key, value)) => {
                    changed.push(key);
                    Response::Value(value)
                }
                None => Response::NotFound,
            },
            Request::QueueLen { queue } => Response::Number(self.queue_len(queue).cast_signed()),
            _ => return Err(Failure::BadRequest),
        })
    }

    pub(crate) fn value(&self, key: &str) -> Response {
        let value = self.get(key);
        value.map_or(Response::NotFound, |value| Response::Value(value.to_vec()))
    }

    /// The values of `key`, which ends with a number, and of the keys with the next numbers, as far as they exist and one
    /// response has room for them; with these keys.
    pub(crate) fn numbered(&self, key: &str) -> (Vec<String>, Response) {
        let prefix = key.trim_end_matches(|digit: char| digit.is_ascii_digit());
        // The only one, if it ends with no number.
        let first: u64 = key[prefix.len()..].parse().unwrap_or(u64::MAX);
        let next = (first..u64::MAX).map(|before| format!("{prefix}{}", before + 1));
        let (mut keys, mut values, mut more) = (Vec::new(), Vec::new(), false);
        let mut room = MAX_VALUE_BYTES;
        for key in std::iter::once(key.to_owned()).chain(next) {
            let Some(value) = self.get(&key) else { break };
            more = value.len() > room || values.len() == MAX_WAIT_KEYS;
            if more {
                break;
            }
            room -= value.len();
            values.push(value.to_vec());
            keys.push(key);
        }
        (keys, Response::Values { values, more })
    }
}

/// The key of an element. The order of the keys is that of the numbers.
fn element_key(queue: &str, number: u64) -> String {
    format!("{queue}/{number:016x}")
}

/// The queue and the number of the element with this key; `None` if it is no element's.
pub(crate) fn element(key: &str) -> Option<(&str, u64)> {
    let (queue, digits) = key.rsplit_once('/')?;
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if digits.len() != 16 || !digits.bytes().all(is_digit) {
        return None;
    }
    Some((queue, u64::from_str_radix(digits, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The running total must equal the sum over all keys.
    fn recount(table: &Table) {
        let counted: u64 = table.iter().map(|(k, v)| (k.len() + v.len()) as u64).sum();
        assert_eq!(table.bytes, counted);
    }

    #[test]
    fn bytes_are_counted_through_any_history() {
        let mut table = Table::new(Limits::default());
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..5000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let key = format!("k{}/{}", state % 3, (state >> 8) % 20);
            let value = vec![7; (state >> 16) as usize % 50];
            match (state >> 32) % 9 {
                0 => {
                    table.delete(&key);
                }
                1 => {
                    table.delete_prefix(&key[..2]);
                }
                2 => {
                    let old = table.get(&key).map(<[u8]>::to_vec);
                    assert!(table.compare_set(&key, old.as_deref(), &value).unwrap());
                }
                3 => {
                    table.append(&key, &value).unwrap();
                }
                4 => {
                    table.push(&key, &value).unwrap();
                }
                5 => {
                    table.pop(&key);
                }
                _ => table.set(&key, &value).unwrap(),
            }
            recount(&table);
        }
    }

    /// Neither other keys below the queue's name nor other spellings of a number are elements.
    #[test]
    fn elements_of_a_queue() {
        let mut table = Table::new(Limits::default());
        let others = [
            "q",
            "q/",
            "q/0",
            "q/00000000000000001",
            "q/+000000000000001",
            "q/000000000000000A",
            "q/5/0000000000000000",
            "q/é000000000000",
            "q0/0000000000000000",
        ];
        for key in others {
            table.set(key, b"no").unwrap();
        }
        assert_eq!(table.pop("q"), None);
        for number in 0..20 {
            assert_eq!(table.queue_len("q"), number);
            let key = table.push("q", b"").unwrap();
            assert_eq!(element(&key), Some(("q", number)));
        }
        assert_eq!(table.pop("q/5").unwrap().0, "q/5/0000000000000000");
        for number in 0..20 {
            assert_eq!(table.pop("q").unwrap().0, format!("q/{number:016x}"));
        }
        assert_eq!(table.pop("q"), None);
        table.set("q/fffffffffffffffe", b"").unwrap();
        assert_eq!(table.push("q", b"").unwrap(), "q/ffffffffffffffff");
        assert_eq!(table.push("q", b""), Err(Failure::TooManyKeys));
        assert_eq!(table.queue_len("q"), 2);
    }

    #[test]
    fn an_append_within_the_limits() {
        let mut table = Table::new(Limits::new(1, 2 << 20));
        assert_eq!(table.append("k", b"").unwrap(), 0);
        assert_eq!(table.append("k", &[1; MAX_VALUE_BYTES]), Ok(1 << 20));
        assert_eq!(table.append("k", b""), Ok(1 << 20));
        assert_eq!(table.append("k", b"2"), Err(Failure::ValueTooLong));
        assert_eq!(table.append("other", b""), Err(Failure::TooManyKeys));
        assert_eq!(table.get("k"), Some(&[1; MAX_VALUE_BYTES][..]));
        recount(&table);
    }

    #[test]
    fn too_many_keys() {
        let mut table = Table::new(Limits::new(2, 1000));
        table.set("a", b"").unwrap();
        table.set("b", b"").unwrap();
        table.set("a", b"replaced").unwrap();
        assert_eq!(table.set("c", b""), Err(Failure::TooManyKeys));
        assert_eq!(table.add("c", 1), Err(Failure::TooManyKeys));
        assert!(table.delete("b"));
        table.set("c", b"").unwrap();
    }

    #[test]
    fn store_full() {
        let mut table = Table::new(Limits::new(10, 100));
        table.set("a", &[0; 99]).unwrap();
        assert_eq!(table.set("b", b""), Err(Failure::StoreFull));
        assert_eq!(table.set("a", &[0; 100]), Err(Failure::StoreFull));
        assert_eq!(table.get("a").map(<[u8]>::len), Some(99));
        table.set("a", &[0; 9]).unwrap();
        table.set("b", &[0; 89]).unwrap();
        recount(&table);
    }

    #[test]
    fn prefix_is_no_pattern_and_no_neighbour() {
        let mut table = Table::new(Limits::default());
        for key in ["a", "a/", "a/b", "a/b/c", "a0", "b", "é/x"] {
            table.set(key, b"").unwrap();
        }
        assert_eq!(table.delete_prefix("a/").len(), 3);
        assert_eq!(table.delete_prefix("%").len(), 0);
        assert!(table.contains("a") && table.contains("a0") && table.contains("b"));
        let after: Vec<&str> = table.after("a").map(|(key, _)| key).collect();
        assert_eq!(after, ["a0", "b", "é/x"]);
        assert_eq!(table.delete_prefix("").len(), 4);
        recount(&table);
    }
}
