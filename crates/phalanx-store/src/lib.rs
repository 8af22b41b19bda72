//! Rendezvous key/value store: memory, file, TCP server and client, prefix view.
//!
//! Before ranks can talk they must find each other. They do so through a small
//! [`Store`] of short-lived keys: every rank publishes its address, waits for
//! those of the others, counts itself in. Later the store carries the first
//! cause of an abort and the epoch of a re-formed group.
//!
//! | store | reaches | use |
//! |---|---|---|
//! | [`MemStore`] | threads of this process | ranks as threads, tests |
//! | [`FileStore`] | processes that share a file system | `file://` |
//! | [`TcpStore`] with a [`TcpServer`] | processes on any host | `env://`, `tcp://` |
//! | [`PrefixStore`] | what the store below reaches | one name space per group or epoch |
//!
//! All keep the limits of [`phalanx_wire::store_msg`] and pass one conformance
//! suite (`tests/conformance.rs`).
//!
//! Two promises hold everywhere. **Every wait has a deadline**, and its error
//! names exactly the missing keys ([`Error::missing_keys`]), so that a join
//! which fails can name the ranks that never came. **A stranger never
//! disturbs a member**: whoever cannot prove the job's token
//! ([`auth`]) is closed, counted, and logged at most once a minute per source.
//!
//! ```
//! use phalanx_store::{MemStore, Store};
//! use std::time::Duration;
//!
//! let store = MemStore::new();
//! store.set("rank/0", b"127.0.0.1:4000")?;
//! let error = store
//!     .wait(&["rank/0", "rank/1"], Duration::from_millis(1))
//!     .unwrap_err();
//! assert_eq!(error.missing_keys(), ["rank/1"]);
//! # Ok::<(), phalanx_store::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod auth;
mod error;
mod file;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod mem;
mod pending;
mod prefix;
mod store;
mod table;
mod tcp;

pub use error::{Error, ErrorKind, Result};
pub use file::FileStore;
pub use mem::MemStore;
pub use prefix::PrefixStore;
pub use store::Store;
pub use table::Limits;
pub use tcp::{RefusalReason, Refused, ServerOptions, TcpServer, TcpStore, Will};
