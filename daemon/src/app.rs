//! Builds everything, knows everyone, contains no logic.
