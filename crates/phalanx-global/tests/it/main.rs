//! Global tensors over threads, shared memory and TCP.

mod boxing;
mod checkpoint;
mod common;
mod ddp;
mod gpt;
