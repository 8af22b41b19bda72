//! Ranks as threads, over every transport.

mod all_reduce;
mod batch;
mod circles;
mod coalesced;
mod collectives;
mod common;
mod faults;
mod flight;
mod forming;
mod grid;
mod handles;
mod hierarchical;
mod keys;
mod messages;
mod monitored;
mod objects;
mod parts;
mod phases;
mod reconfigure;
mod registered;
mod subgroups;
mod unanswered;
mod uneven;
mod waiting;
