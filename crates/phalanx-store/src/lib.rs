//! Rendezvous key/value store in memory or over TCP.
//!
//! Ranks find each other through a [`Store`] of short-lived keys: each rank
//! publishes its address and waits for those of the others. Later the store holds
//! the first cause of a failure, and the members of a group that is formed again.
//!
//! | store | reaches | use |
//! |---|---|---|
//! | [`MemStore`] | threads of this process | ranks as threads, tests |
//! | [`TcpStore`] with a [`TcpServer`] | processes on any host | `env://`, `tcp://`, `file://` |
//!
//! All enforce the limits of [`phalanx_wire::store_msg`] and pass the same tests
//! (`tests/it/conformance.rs`). A [`Follower`] keeps a copy of a [`TcpServer`]'s keys,
//! with which another server can continue.
//!
//! Every wait has a timeout, and its error names exactly the missing keys
//! ([`Error::missing_keys`]), so a failed join can name the missing ranks. A
//! connection that cannot prove the job's token ([`auth`]) is closed, counted, and
//! logged at most once a minute per source; it never fails the job.
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
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod handshakes;
mod mem;
mod pending;
mod refused;
mod store;
mod table;
mod tcp;
mod will;

pub use error::{Error, ErrorKind, Result};
pub use handshakes::{Authenticated, Handshakes, Listener};
pub use mem::MemStore;
pub use refused::{RefusalReason, RefusedConnections};
pub use store::Store;
pub use table::Limits;
pub use tcp::{Follower, ServerOptions, ServerState, TcpServer, TcpStore, host_port};
pub use will::Will;
