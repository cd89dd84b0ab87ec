//! A sequence's blocks, in the order of its tokens, and how far they are known to the prefix cache.

use super::prefix_cache::Link;

/// Blocks of one sequence. Changed only by `KvBlocks`, which counts the references.
#[derive(Debug, Clone)]
pub struct BlockTable {
    pub(super) blocks: Vec<u32>,
    /// Chained hash of each full block of known tokens, computed or not; kept over preemptions.
    pub(super) hashes: Vec<u128>,
    /// Blocks from the start that were found in the prefix cache or registered there (or equal one that is).
    pub(super) linked: usize,
    /// Where the chain of linked blocks ends.
    pub(super) link: Link,
}

impl Default for BlockTable {
    fn default() -> Self {
        Self { blocks: Vec::new(), hashes: Vec::new(), linked: 0, link: Link::ROOT }
    }
}

impl BlockTable {
    /// A table that will not grow its memory up to `blocks` blocks.
    pub fn with_capacity(blocks: usize) -> Self {
        Self { blocks: Vec::with_capacity(blocks), hashes: Vec::with_capacity(blocks), ..Self::default() }
    }

    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Runs of neighbouring blocks; 1 is ideal.
    pub fn runs(&self) -> usize {
        self.blocks.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() + usize::from(!self.blocks.is_empty())
    }
}

/// The tokens of a sequence: its prompt, and what it has generated.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    pub prompt: &'a [u32],
    pub generated: &'a [u32],
}

impl Tokens<'_> {
    pub fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.generated[index],
        }
    }

    /// Copies the tokens from `start` on into `out`.
    pub fn copy(&self, start: usize, out: &mut [u32]) {
        let of_prompt = self.prompt.len().saturating_sub(start).min(out.len());
        let (head, tail) = out.split_at_mut(of_prompt);
        if of_prompt > 0 {
            head.copy_from_slice(&self.prompt[start..start + of_prompt]);
        }
        if !tail.is_empty() {
            let from = start + of_prompt - self.prompt.len();
            tail.copy_from_slice(&self.generated[from..from + tail.len()]);
        }
    }
}
