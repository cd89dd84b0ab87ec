//! Framing of the worker protocol: a little-endian `u32` length, then that many bytes of postcard.
//!
//! Both ends are the same binary, so the payload needs no self-description; `Hello` is variant 0 for ever and is
//! compared before anything else is sent.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// No frame is longer: the largest is a `Submit` with a full context of prompt ids, or `Load` with a vocabulary.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// What is read of a frame before the rest is believed in.
const READ_AT_ONCE: usize = 64 << 10;

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("a frame of {0} bytes exceeds the limit of {FRAME_BYTES_MAX} bytes")]
    TooLong(usize),
    #[error("a frame does not decode: {0}")]
    Malformed(#[from] postcard::Error),
    #[error(transparent)]
    Io(io::Error),
}

/// The whole frame, length included.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut bytes = postcard::to_extend(message, vec![0u8; 4])?;
    let length = bytes.len() - 4;
    if length > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong(length));
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// One frame's payload, without its length.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, FrameError> {
    Ok(postcard::from_bytes(payload)?)
}

/// Blocking read of one frame; `buffer` is reused between calls.
pub fn read<T: DeserializeOwned>(from: &mut impl Read, buffer: &mut Vec<u8>) -> Result<T, FrameError> {
    let mut length = [0u8; 4];
    from.read_exact(&mut length).map_err(closed_or_io)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong(length));
    }
    buffer.clear();
    // As it comes: a length that is only claimed takes no memory and no time. Exactly: a vector that grows by itself would go
    // beyond the limit that the length was just held against.
    while buffer.len() < length {
        let begin = buffer.len();
        let end = length.min(begin + begin.max(READ_AT_ONCE));
        buffer.reserve_exact(end - begin);
        buffer.resize(end, 0);
        from.read_exact(&mut buffer[begin..]).map_err(closed_or_io)?;
    }
    decode(buffer)
}

/// Blocking write of one frame.
pub fn write<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), FrameError> {
    to.write_all(&encode(message)?).map_err(closed_or_io)
}

fn closed_or_io(error: io::Error) -> FrameError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => FrameError::Closed,
        _ => FrameError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_as_it_went() {
        let bytes = encode(&("hello", 7u32)).expect("encodes");
        let back: (String, u32) = read(&mut &bytes[..], &mut Vec::new()).expect("decodes");
        assert_eq!(back, ("hello".to_string(), 7));
    }

    #[test]
    fn a_length_beyond_the_limit_allocates_nothing() {
        let mut buffer = Vec::new();
        let error = read::<u32>(&mut &u32::MAX.to_le_bytes()[..], &mut buffer).expect_err("too long");
        assert!(matches!(error, FrameError::TooLong(_)));
        assert_eq!(buffer.capacity(), 0);
    }

    #[test]
    fn a_length_that_is_only_claimed_takes_no_memory() {
        let mut bytes = (FRAME_BYTES_MAX as u32).to_le_bytes().to_vec();
        bytes.extend([0; 100_000]);
        let mut buffer = Vec::new();
        let error = read::<u32>(&mut &bytes[..], &mut buffer).expect_err("cut short");
        assert!(matches!(error, FrameError::Closed));
        assert!(buffer.capacity() <= 2 * bytes.len(), "{} bytes for {}", buffer.capacity(), bytes.len());
    }

    #[test]
    fn a_long_frame_comes_back_whole() {
        let long: Vec<u32> = (0..1_000_000).collect();
        let bytes = encode(&long).expect("encodes");
        let mut buffer = Vec::new();
        let back: Vec<u32> = read(&mut &bytes[..], &mut buffer).expect("decodes");
        assert_eq!(back, long);
        assert_eq!(buffer.capacity(), bytes.len() - 4, "exactly as much as came");
    }

    #[test]
    fn an_end_in_the_middle_is_a_closed_peer() {
        let bytes = encode(&123456u64).expect("encodes");
        let error = read::<u64>(&mut &bytes[..bytes.len() - 1], &mut Vec::new()).expect_err("cut short");
        assert!(matches!(error, FrameError::Closed));
    }
}
