//! ERNIE-4.5 text models: configuration, weights, forward pass.
//!
//! `config` and `checkpoint` read and check a folder, `inspect` tells all that is in it, `weights` brings tensors into kernel layout, `ernie` and the blocks
//! below it compute. Memory for a step is the `workspace`; KV memory and the thread pool belong to the runner.

pub mod attention;
pub mod calibrate;
pub mod checkpoint;
pub mod config;
pub mod digest;
pub mod ernie;
pub mod inspect;
pub mod mlp;
pub mod moe;
pub mod observer;
pub mod parameters;
pub mod plan;
pub mod prepared;
pub mod weights;
pub mod workspace;

pub use calibrate::Calibration;
pub use checkpoint::{Checkpoint, CheckpointError};
pub use config::{ConfigError, ModelConfig, MoeConfig};
pub use digest::Manifest;
pub use ernie::Ernie;
pub use inspect::{Finding, Inspection, TensorClass, inspect};
pub use observer::{Observer, Op};
pub use plan::{Form, Turn, WeightPlan};
pub use prepared::{Prepared, Writer};
pub use weights::WeightsError;
