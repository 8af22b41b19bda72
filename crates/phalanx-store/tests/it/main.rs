//! The stores over real files, sockets and processes.

mod attacks;
mod auth;
mod common;
mod conformance;
mod file;
mod followers;
mod tcp;
