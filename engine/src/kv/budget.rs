//! How many KV blocks a number of bytes makes, and whether that is enough to serve one sequence of full length.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    #[error(
        "the KV cache of {bytes} bytes holds {tokens} tokens, but max_model_len is {max_model_len}: give it at least \
         {needed} bytes, or lower max_model_len to {tokens}"
    )]
    TooSmall { bytes: u64, tokens: u64, max_model_len: u32, needed: u64 },
    #[error("a KV block of {block_bytes} bytes and {block_size} tokens makes no cache: both must be at least 1")]
    NoBlock { block_bytes: u64, block_size: u32 },
}

/// Blocks of `block_bytes` that fit into `bytes`; refused when they can not hold one sequence of `max_model_len`.
pub fn blocks_within(bytes: u64, block_bytes: u64, block_size: u32, max_model_len: u32) -> Result<u32, BudgetError> {
    if block_bytes == 0 || block_size == 0 {
        return Err(BudgetError::NoBlock { block_bytes, block_size });
    }
    let blocks = bytes / block_bytes;
    let least = u64::from(max_model_len.div_ceil(block_size));
    if blocks < least {
        let tokens = blocks * u64::from(block_size);
        return Err(BudgetError::TooSmall { bytes, tokens, max_model_len, needed: least * block_bytes });
    }
    Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_too_small_for_one_sequence_is_refused_with_the_numbers_that_help() {
        assert_eq!(blocks_within(1 << 20, 1 << 10, 16, 4096), Ok(1024));
        let refusal = blocks_within(100 << 10, 1 << 10, 16, 4096).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "the KV cache of 102400 bytes holds 1600 tokens, but max_model_len is 4096: give it at least 262144 bytes, or \
             lower max_model_len to 1600"
        );
    }
}
