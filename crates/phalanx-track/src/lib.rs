//! Trackers of a run: what a training leaves in its folder, handed to other programs while it grows.
//!
//! [`Follow`] reads the files of a run's folder as they are written; [`Delivery`] hands what it reads to a
//! [`Tracker`], while the training runs.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// Messages of Protocol Buffers: each field with its number and kind.
macro_rules! messages {
    ($($(#[$of_message:meta])* $name:ident {
        $($(#[$of_field:meta])* $field:ident: $type:ty = $tag:tt ($($kind:tt)*);)*
    })*) => {$(
        $(#[$of_message])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub(super) struct $name {$(
            $(#[$of_field])*
            #[prost($($kind)*, tag = $tag)]
            pub $field: $type,
        )*}
    )*};
}

mod args;
mod delivery;
mod ending;
#[cfg(any(feature = "mlflow", feature = "object-store"))]
mod files;
mod follow;
#[cfg(feature = "mlflow")]
mod kubeflow;
#[cfg(feature = "mlflow")]
mod mlflow;
#[cfg(feature = "object-store")]
mod store;
mod tensorboard;
mod tracker;
mod values;
mod wandb;

pub use args::{TrackArgs, is_object_store};
pub use delivery::{Delivery, FINISH_WAIT, take_over, upload};
pub use ending::{Ending, deliver_rest, record_end, record_unseen_end};
pub use follow::{EVENTS_FILE, Follow, METRICS_FILE, Position, RUN_FILE, Record, SUMMARY_FILE};
#[cfg(feature = "mlflow")]
pub use mlflow::Mlflow;
use phalanx_base::error::refuse;
pub use phalanx_base::error::{Error, ErrorKind, Result};
#[cfg(feature = "object-store")]
pub use store::RunCopy;
pub use tensorboard::{EVENT_FILE_PREFIX, TensorBoard};
pub use tracker::Tracker;
pub use wandb::Wandb;
