//! The stores over real sockets and processes.

mod attacks;
mod auth;
mod common;
mod conformance;
mod followers;
mod tcp;
