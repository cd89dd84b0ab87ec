//! The OpenAI-compatible JSON: what clients send (`request`) and what they get (`response`), as vLLM 0.32 spells it.
//!
//! Requests are read by hand from a JSON value (`fields`), not derived: a refusal has to name the field, the rule and the
//! value that broke it in vLLM's words, null means absent everywhere, and unknown members are collected instead of refused.
//! Ranges and limits are not here: they depend on the server's settings and the model (`daemon/http/validate`).

pub mod fields;
pub mod json;
pub mod request;
pub mod response;

pub use fields::FieldError;
pub use request::{
    ChatCompletionRequest, ChatMessage, CommonFields, CompletionRequest, Content, ContentPart, DetokenizeRequest,
    Prompt, ResponseFormat, StreamOptions, StructuredOutputs, TokenizeInput, TokenizeRequest, Tool, ToolChoice,
};
