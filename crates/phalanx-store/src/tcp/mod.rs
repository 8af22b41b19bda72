//! The store over TCP: one server thread, any number of clients.
//!
//! The server is one thread around `poll`: waits are entries in a table, not
//! blocked threads, so 4096 waiting clients cost no processor time, and a
//! client that disappears takes its waits with it at once.

mod client;
mod conn;
mod refused;
mod room;
mod server;
mod socket;
mod waiters;

pub use client::{TcpStore, Will};
pub use refused::{RefusalReason, Refused};
#[cfg(any(test, fuzzing))]
pub(crate) use server::fuzzing;
pub use server::{ServerOptions, TcpServer};
