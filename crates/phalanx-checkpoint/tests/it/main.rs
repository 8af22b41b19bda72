//! Weights, resumable state and PyTorch's files.

mod checkpoint;
mod pretrained;
mod pth_common;
mod pth_hostile;
mod pth_read;
mod pth_write;
mod state;
