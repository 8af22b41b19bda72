//! What several recipes share.

pub mod cifar;
pub mod device;
pub mod digits;
pub mod gpt2;
pub mod image;
pub mod net;
pub mod photos;
pub mod prepare;
pub mod rows;
pub mod table;
pub mod text;
pub mod views;
pub mod whiten;
