//! Writes a model folder in prepared form: packs as a load does, and keeps what was packed.

use super::options::{LoadError, LoadOptions};
use crate::model::prepared::Writer;
use crate::model::weights::Loader;
use crate::model::{Checkpoint, Ernie, ModelConfig};
use ernie_kernels::Pool;
use std::path::Path;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareReport {
    /// `bf16`, `f32`, `int8`, `int4`.
    pub weights: &'static str,
    pub bytes: u64,
}

/// Packs the weights of `options.model_dir` into `out`, which exists and holds no prepared weights. Takes as much memory as
/// the packed weights do. Nothing but the weights is written; the rest of the folder is the caller's to copy.
pub fn prepare(
    options: &LoadOptions,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PrepareReport, LoadError> {
    let (config, text) = ModelConfig::read(&options.model_dir)?;
    let plan = options.weight_plan(&config)?;
    let checkpoint = Checkpoint::open(&options.model_dir, &config)?;
    let pool = Pool::new(options.threads, options.pin);
    let mut loader = Loader::new(checkpoint, text.as_bytes(), options.verify.as_ref(), &pool, progress)?;
    loader.write_down(Writer::new(out, &plan));
    // Dropped right away: what counts is what the writer saw.
    drop(Ernie::load(config, &plan, &mut loader, options.calibration.as_deref())?);
    let bytes = match loader.finish()? {
        Some(writer) => writer.finish()?,
        None => 0,
    };
    Ok(PrepareReport { weights: plan.name(), bytes })
}
