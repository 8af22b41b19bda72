//! Ranks as threads, over every transport.

mod all_reduce;
mod collectives;
mod common;
mod faults;
mod flight;
mod forming;
mod grid;
mod handles;
mod subgroups;
mod waiting;
