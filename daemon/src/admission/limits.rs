//! The bounds of admission, as plain numbers.

/// What may be under way at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Choices that the workers run at once, all workers together.
    pub running_max: usize,
    /// Choices that may wait behind them (`--max-num-queued-reqs`).
    pub queued_max: usize,
    /// Prompt tokens of requests that have not begun (`--max-num-queued-tokens`). `None`: no bound of its own.
    pub queued_tokens_max: Option<u64>,
}

impl AdmissionLimits {
    pub fn choices_max(&self) -> usize {
        self.running_max.saturating_add(self.queued_max)
    }
}
