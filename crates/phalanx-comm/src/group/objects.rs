//! Collectives on objects: any values that serde can serialize.
//!
//! Lengths are exchanged first, under the same ticket, and are checked before anything
//! is allocated. A rank whose object cannot be sent announces that instead of its
//! length. Then all ranks fail alike, none waits, and the group stays usable.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::collectives::run_on;
use super::{Call, ProcessGroup};
use crate::backend::Runner;
use crate::plan::{Method, Uneven};
use crate::{Error, ErrorKind, Result};

/// Most bytes of all objects of one operation together (1 GiB).
pub const MAX_OBJECT_BYTES: usize = 1 << 30;

/// In place of a length: this rank has no object to send.
const NONE: i64 = -1;

/// A rank's contribution: its bytes, or the reason why it has none.
type Brought<'a> = std::result::Result<&'a [u8], &'a Error>;

impl ProcessGroup {
    /// The root's object on every rank; the root gives it, the others `None`.
    /// PyTorch: `broadcast_object_list`.
    ///
    /// It is sent as JSON, and every rank, the root included, gets the object read from
    /// that, so that all have the same to the last bit. JSON has no NaN and no
    /// infinities.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    ///
    /// let groups = ProcessGroup::threads(2, GroupOptions::default());
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let mine = (group.rank() == 0).then(|| ("run-7".to_owned(), 42));
    ///             let ours: (String, i32) = group.broadcast_object(mine.as_ref(), 0).unwrap();
    ///             assert_eq!(ours, ("run-7".to_owned(), 42));
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// As for all operations, see [`ProcessGroup`]. `Usage` on all ranks, with
    /// the group still usable, when the root gives no object, or one that cannot be
    /// serialized or takes more than [`MAX_OBJECT_BYTES`]; `Protocol` on a rank that
    /// cannot deserialize it as a `T`.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        root: usize,
    ) -> Result<T> {
        const NAME: &str = "broadcast_object";
        self.check_peer(NAME, "root", root)?;
        let bytes = if self.core.rank == root {
            match object {
                Some(object) => self.write(NAME, object),
                None => Err(self.usage(NAME, "the root needs an object".into())),
            }
        } else {
            Ok(Vec::new())
        };
        let bytes = self.broadcast_brought(NAME, bytes.as_deref(), root)?;
        self.read(NAME, root, &bytes)
    }

    /// The objects of all ranks on every rank, in rank order. PyTorch:
    /// `all_gather_object`. See [`ProcessGroup::broadcast_object`].
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`].
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        const NAME: &str = "all_gather_object";
        let bytes = self.write(NAME, object);
        let all = self.all_gather_brought(NAME, bytes.as_deref())?;
        self.read_all(NAME, &all)
    }

    /// The objects of all ranks on the root, in rank order; `None` elsewhere. PyTorch:
    /// `gather_object`. See [`ProcessGroup::broadcast_object`].
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`].
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        const NAME: &str = "gather_object";
        self.check_peer(NAME, "root", root)?;
        let bytes = self.write(NAME, object);
        match self.gather_brought(NAME, bytes.as_deref(), root)? {
            Some(all) => self.read_all(NAME, &all).map(Some),
            None => Ok(None),
        }
    }

    /// Gives object `r` of the root to rank `r`; the root gives one for each rank, the
    /// others `None`. PyTorch: `scatter_object_list`. See
    /// [`ProcessGroup::broadcast_object`].
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`].
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T> {
        const NAME: &str = "scatter_object";
        self.check_peer(NAME, "root", root)?;
        let world = self.core.world;
        let runs: Result<Vec<Vec<u8>>> = match objects {
            _ if self.core.rank != root => Ok(Vec::new()),
            Some(objects) if objects.len() == world => {
                objects.iter().map(|o| self.write(NAME, o)).collect()
            }
            other => Err(self.usage(
                NAME,
                format!(
                    "the root needs one object for each of {world} ranks, not {}",
                    other.map_or(0, <[_]>::len)
                ),
            )),
        };
        let bytes = self.scatter_brought(NAME, runs.as_deref(), root)?;
        self.read(NAME, root, &bytes)
    }

    fn broadcast_brought(&self, name: &str, mine: Brought<'_>, root: usize) -> Result<Vec<u8>> {
        let is_root = self.core.rank == root;
        let call = Call::default();
        let head = self.build_broadcast::<i64>(1, root, &call)?;
        let mut length = [announced(mine)];
        self.core.queue.run(|runner| {
            run_on(runner, &head, &[], &mut length)?;
            let len = self.accept(name, [(root, length[0])], mine.err().filter(|_| is_root))?[0];
            let mut bytes = match mine {
                Ok(mine) if is_root => mine.to_vec(),
                _ => vec![0; len],
            };
            let body = self.build_broadcast::<u8>(len, root, &call)?;
            run_on(runner, &body, &[], &mut bytes)?;
            Ok(bytes)
        })
    }

    fn all_gather_brought(&self, name: &str, mine: Brought<'_>) -> Result<Vec<Vec<u8>>> {
        self.core.queue.run(|runner| {
            let lens = self.exchange_lengths(runner, name, mine)?;
            let mut all = vec![0; lens.iter().sum()];
            let kind = Uneven::AllGather { lengths: &lens };
            let own = mine.unwrap_or_default();
            self.run_uneven(runner, (Method::AllGather, 0), &lens, kind, own, &mut all)?;
            Ok(cut(&all, &lens))
        })
    }

    fn gather_brought(
        &self,
        name: &str,
        mine: Brought<'_>,
        root: usize,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let is_root = self.core.rank == root;
        self.core.queue.run(|runner| {
            let lens = self.exchange_lengths(runner, name, mine)?;
            let mut all = vec![0; if is_root { lens.iter().sum() } else { 0 }];
            let lengths = &lens;
            let kind = Uneven::Gather { lengths, root };
            let own = mine.unwrap_or_default();
            self.run_uneven(runner, (Method::Gather, root), lengths, kind, own, &mut all)?;
            Ok(is_root.then(|| cut(&all, &lens)))
        })
    }

    fn scatter_brought(
        &self,
        name: &str,
        runs: std::result::Result<&[Vec<u8>], &Error>,
        root: usize,
    ) -> Result<Vec<u8>> {
        let is_root = self.core.rank == root;
        let world = self.core.world;
        let head = self.build_broadcast::<i64>(world, root, &Call::default())?;
        let mut lengths = vec![NONE; world];
        let mut packed = Vec::new();
        if let (Ok(runs), true) = (runs, is_root) {
            for (length, run) in lengths.iter_mut().zip(runs) {
                *length = announced(Ok(run));
            }
            packed = runs.concat();
        }
        self.core.queue.run(|runner| {
            run_on(runner, &head, &[], &mut lengths)?;
            let theirs = lengths.iter().map(|&length| (root, length));
            let lens = self.accept(name, theirs, runs.err().filter(|_| is_root))?;
            let mut mine = vec![0; lens[self.core.rank]];
            let lengths = &lens;
            let kind = Uneven::Scatter { lengths, root };
            let to = (Method::Scatter, root);
            self.run_uneven(runner, to, lengths, kind, &packed, &mut mine)?;
            Ok(mine)
        })
    }

    /// The lengths of all ranks, checked.
    fn exchange_lengths(
        &self,
        runner: &mut Runner,
        name: &str,
        mine: Brought<'_>,
    ) -> Result<Vec<usize>> {
        let world = self.core.world;
        let mut lengths = vec![0; world];
        let operation = self.build_all_gather::<i64>(1, world, &Call::default())?;
        run_on(runner, &operation, &[announced(mine)], &mut lengths)?;
        self.accept(name, lengths.into_iter().enumerate(), mine.err())
    }

    /// Checks the announced lengths. All ranks see the same, so all fail or none does;
    /// the rank at fault reports its `own` reason.
    fn accept(
        &self,
        name: &str,
        lengths: impl IntoIterator<Item = (usize, i64)>,
        own: Option<&Error>,
    ) -> Result<Vec<usize>> {
        if let Some(own) = own {
            return Err(own.clone());
        }
        let refuse = |rank: usize, why: String| {
            self.usage(name, format!("rank {rank} {why}"))
                .with_peer(rank)
        };
        let mut total = 0usize;
        lengths
            .into_iter()
            .map(|(rank, length)| {
                let len = usize::try_from(length).map_err(|_| {
                    refuse(rank, "sent nothing; its own error has the reason".into())
                })?;
                total = total.saturating_add(len);
                if total > MAX_OBJECT_BYTES {
                    return Err(refuse(
                        rank,
                        format!(
                            "has {len} bytes: with those of the ranks before it that is more than \
                             the {MAX_OBJECT_BYTES} that may travel at once"
                        ),
                    ));
                }
                Ok(len)
            })
            .collect()
    }

    fn write<T: Serialize>(&self, name: &str, object: &T) -> Result<Vec<u8>> {
        serde_json::to_vec(object).map_err(|e| {
            self.usage(name, format!("the object cannot be written as JSON: {e}"))
                .with_source(e)
        })
    }

    fn read<T: DeserializeOwned>(&self, name: &str, from: usize, bytes: &[u8]) -> Result<T> {
        serde_json::from_slice(bytes).map_err(|e| {
            Error::new(
                ErrorKind::Protocol,
                format!(
                    "the object of rank {from} is not a {}: {e}",
                    std::any::type_name::<T>()
                ),
            )
            .with_source(e)
            .with_rank(self.core.rank)
            .with_peer(from)
            .with_operation(name)
        })
    }

    fn read_all<T: DeserializeOwned>(&self, name: &str, all: &[Vec<u8>]) -> Result<Vec<T>> {
        all.iter()
            .enumerate()
            .map(|(rank, bytes)| self.read(name, rank, bytes))
            .collect()
    }
}

fn announced(mine: Brought<'_>) -> i64 {
    mine.map_or(NONE, |bytes| i64::try_from(bytes.len()).unwrap_or(NONE))
}

fn cut(all: &[u8], lens: &[usize]) -> Vec<Vec<u8>> {
    let mut rest = all;
    lens.iter()
        .map(|len| {
            let (run, after) = rest.split_at(*len);
            rest = after;
            run.to_vec()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupOptions;

    #[test]
    fn lengths_beyond_the_limit_are_refused_before_anything_is_allocated() {
        let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
        let accept =
            |lengths: &[i64]| group.accept("op", lengths.iter().copied().enumerate(), None);
        let most = MAX_OBJECT_BYTES as i64;
        assert_eq!(accept(&[3, 0]).unwrap(), [3, 0]);
        assert_eq!(accept(&[most]).unwrap(), [MAX_OBJECT_BYTES]);
        for lengths in [&[most + 1][..], &[1, most], &[1, i64::MAX, i64::MAX]] {
            let error = accept(lengths).unwrap_err();
            assert_eq!(error.peer(), Some(lengths.len().min(2) - 1), "{error}");
            let text = error.to_string();
            assert!(text.contains("more than the 1073741824"), "{text}");
        }
        let error = accept(&[1, -7]).unwrap_err();
        assert_eq!(error.peer(), Some(1));
    }
}
