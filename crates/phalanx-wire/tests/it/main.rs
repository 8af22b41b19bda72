//! Messages and handshakes, whole and damaged.

mod handshake;
mod mutation;
mod store_msg;
