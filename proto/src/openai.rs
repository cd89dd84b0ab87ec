//! OpenAI-compatible JSON.
