//! The store over TCP: one server thread, any number of clients.
//!
//! The server is one thread around `poll`. Waits are entries in a table, not blocked
//! threads, so thousands of waiting clients use no processor time, and the waits of
//! a client that disappears are removed at once.

mod client;
mod conn;
mod follower;
mod followers;
mod room;
mod server;
mod serving;
mod socket;
mod waiters;

pub use client::{ServerState, TcpStore, host_port};
pub use follower::Follower;
pub use server::TcpServer;
pub use serving::ServerOptions;
#[cfg(any(test, fuzzing))]
pub(crate) use serving::fuzzing;

/// The stream in a follower's hello; that of other members is 0.
const FOLLOWER_STREAM: u16 = 1;
