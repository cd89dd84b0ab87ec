//! (laid out; its owner fills it)
