//! Global tensors over threads, shared memory and TCP.

mod boxing;
mod checkpoint;
mod common;
mod ddp;
mod dtensor_bugs;
mod gpt;
mod lost;
mod oracle;
mod placement;
mod vote;
