//! The one backend trait: above it nobody knows what computes.

pub mod batch;
pub mod cpu;
pub mod mirror;
pub mod options;
pub mod prepare;

pub use batch::{BatchSequence, SampleRow, StepBatch, Want};

/// Why a step could not be computed. The batch had no effect that a later step may rely on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RunnerError(pub String);

/// Sizes a runner was built with; the scheduler never plans beyond them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunnerLimits {
    pub vocab_size: u32,
    pub block_size: u32,
    pub num_blocks: u32,
    pub max_num_batched_tokens: u32,
    pub max_num_seqs: u32,
    pub max_model_len: u32,
}

/// Computes one step. Owns weights, KV memory, workspace and the thread pool.
pub trait ModelRunner {
    fn limits(&self) -> RunnerLimits;

    /// Computes the batch: performs `batch.copies`, appends K and V of every token to its slot, and leaves one result per
    /// `batch.sample_rows`, to be read by [`ModelRunner::row`] until the next call.
    fn execute(&mut self, batch: &StepBatch) -> Result<(), RunnerError>;

    /// Result of sample row `i` of the last step.
    fn row(&mut self, i: usize) -> Row<'_>;

    /// Runs `jobs` independent pieces of work on the runner's threads. The default runs them here.
    fn parallel(&self, jobs: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..jobs).for_each(work);
    }

    /// Gives each of the last step's `rows` sample rows to `work` once, on the runner's threads and in any order (sampling
    /// uses it). The default runs them here, one after the other; a runner with threads overrides it.
    fn for_each_row(&mut self, rows: usize, work: &(dyn Fn(usize, Row<'_>) + Sync)) {
        for i in 0..rows {
            work(i, self.row(i));
        }
    }

    /// Bytes of one KV block as [`ModelRunner::export_block`] writes it. 0: blocks can not leave this runner, and the swap
    /// space stays off.
    fn block_bytes(&self) -> usize {
        0
    }

    /// Copies a KV block out; `out` is `block_bytes` long.
    fn export_block(&self, _block: u32, _out: &mut [u8]) {}

    /// Copies a KV block back, bit for bit.
    fn import_block(&mut self, _block: u32, _from: &[u8]) {}

    /// Per layer, tokens that each expert has seen since load; empty for dense layers and dense models.
    fn expert_tokens(&self) -> &[Vec<u64>] {
        &[]
    }

    /// Per layer, steps since load in which a token had no active expert; empty for dense models.
    fn zero_active(&self) -> &[u64] {
        &[]
    }
}

/// What a sample row gives, by what was wanted.
#[derive(Debug)]
pub enum Row<'a> {
    /// The most likely token (lowest id on ties) and its logit; NaN if any logit of the row was not finite.
    Greedy { token: u32, logit: f32 },
    /// All logits, `vocab_size` long.
    Logits(&'a [f32]),
}
