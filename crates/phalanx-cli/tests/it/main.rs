//! The binary as its users run it: real processes, signals and files.

mod bench;
mod doctor;
mod elastic;
mod endings;
mod events;
mod flight;
mod flow;
mod flow_export;
mod flow_prune;
mod guide;
mod inputs;
mod launch;
mod layers;
mod live;
mod output_url;
mod own_program;
mod predict;
mod programs;
mod report;
mod resume;
mod support;
mod trackers;
mod train;
