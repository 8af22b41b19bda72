//! Data sets, samplers, a prefetching loader, metrics and progress.
//!
//! Data moves one way: [`Dataset`] → [`sampler`] → [`loader`] → the model → [`metrics`]. Nothing here communicates: values to be summed over ranks (means,
//! confusion counts) are plain numbers for the caller's all-reduce.
//!
//! ```
//! use std::sync::Arc;
//! use phalanx_data::loader::{Loader, LoaderOptions};
//! use phalanx_data::sampler::{Cursor, Sampler, SamplerConfig};
//! use phalanx_data::synthetic;
//!
//! # fn main() -> phalanx_base::Result<()> {
//! let data = Arc::new(synthetic::digits(100, 1));
//! let rank = SamplerConfig { samples: 100, world: 2, rank: 0, shuffle: true, seed: 1 };
//! let sampler = Sampler::exact(rank, 32)?;
//! let mut loader = Loader::new(data, LoaderOptions::default())?;
//! for plan in sampler.epochs(Cursor::START)?.take(2) {
//!     loader.start(plan);
//!     let mut samples = 0;
//!     while let Some(batch) = loader.next_batch()? {
//!         samples += batch.labels.len(); // train here
//!     }
//!     assert_eq!(samples, 50);
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod augment;
pub mod cifar10;
mod dataset;
mod digits;
#[cfg(feature = "images")]
pub mod folder;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gzip;
mod listing;
pub mod loader;
pub mod metrics;
pub mod mnist;
mod order;
mod packed;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod progress;
pub mod sampler;
mod stored;
pub mod stream;
mod subset;
pub mod synthetic;
pub mod table;
mod text_dataset;
mod text_files;
mod words;

pub use dataset::{Dataset, ImageBatch, ImageDataset};
pub use order::ShardOrder;
pub use packed::{Packer, Vocabulary};
pub use stored::StoredImages;
pub use subset::{Subset, Weighted, random_split};
pub use text_dataset::{TextBatch, TextDataset};
pub use text_files::{read_documents, text_files};
