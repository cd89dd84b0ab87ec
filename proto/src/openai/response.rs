//! Answers of the OpenAI-compatible API, member for member in vLLM's order.
//!
//! A whole answer names members that are null; a chunk of a stream leaves out what was never set. `Nullable` is a member of
//! a chunk that was set to null.

use serde::Serialize;
use serde_json::Value;

/// Left out when `None`, null when `Some(None)`.
pub type Nullable<T> = Option<Option<T>>;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorBody {
    pub error: ErrorObject,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorObject {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub param: Option<String>,
    /// A number in vLLM's style, a word or null in OpenAI's.
    pub code: Value,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub total_tokens: u64,
    pub completion_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Nullable<CompletionTokensDetails>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: u64,
}

/// Timings of one request, on demand.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RequestMetrics {
    pub time_to_first_token_ms: f64,
    pub generation_time_ms: f64,
    pub queue_time_ms: f64,
    pub mean_itl_ms: f64,
    pub tokens_per_second: f64,
}

/// How much of a conversation was left out (`truncate_history`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HistoryTruncation {
    pub dropped_turns: u64,
    pub dropped_messages: u64,
    pub dropped_tokens: u64,
}

/// The matched stop string or token id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Text(String),
    Token(u32),
}

/// Log-probabilities of one prompt position: decimal token id to value, chosen first.
pub type PromptLogprobsEntry = serde_json::Map<String, Value>;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatCompletion {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub service_tier: Option<String>,
    pub system_fingerprint: String,
    pub usage: Usage,
    pub prompt_logprobs: Option<Vec<Option<PromptLogprobsEntry>>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub prompt_text: Option<String>,
    pub kv_transfer_params: Option<Value>,
    pub ec_transfer_params: Option<Value>,
    pub metrics: Option<RequestMetrics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncated_history: Option<HistoryTruncation>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatChoice {
    pub index: u32,
    pub message: AssistantMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
    pub token_ids: Option<Vec<u32>>,
    pub routed_experts: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AssistantMessage {
    pub role: &'static str,
    pub content: Option<String>,
    pub refusal: Option<String>,
    pub annotations: Option<Value>,
    pub audio: Option<Value>,
    pub function_call: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    pub reasoning: Option<String>,
    /// The older name of `reasoning`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: FunctionCall,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatLogprob {
    pub token: String,
    pub logprob: f64,
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<ChatTopLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatTopLogprob {
    pub token: String,
    pub logprob: f64,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<ChatChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Nullable<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_text: Nullable<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<RequestMetrics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncated_history: Option<HistoryTruncation>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: Delta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Nullable<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Nullable<Vec<u32>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub index: u32,
    pub function: FunctionDelta,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Completion {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    pub service_tier: Option<String>,
    pub system_fingerprint: String,
    pub usage: Usage,
    pub kv_transfer_params: Option<Value>,
    pub ec_transfer_params: Option<Value>,
    pub metrics: Option<RequestMetrics>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CompletionChoice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
    pub token_ids: Option<Vec<u32>>,
    pub prompt_logprobs: Option<Vec<Option<PromptLogprobsEntry>>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub routed_experts: Option<Value>,
}

/// The older style of log-probabilities, column by column.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Where each token begins in the text, in characters.
    pub text_offset: Vec<u64>,
    pub token_logprobs: Vec<Option<f64>>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<Option<serde_json::Map<String, Value>>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CompletionChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<CompletionChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<RequestMetrics>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CompletionChunkChoice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptLogprobsEntry>>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    pub root: String,
    pub parent: Option<String>,
    pub max_model_len: u32,
    pub permission: Vec<ModelPermission>,
    /// Ours: content digest of the revision.
    pub revision: String,
    /// Ours: `serving`, or what else it is during a rollout.
    pub state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelPermission {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub allow_create_engine: bool,
    pub allow_sampling: bool,
    pub allow_logprobs: bool,
    pub allow_search_indices: bool,
    pub allow_view: bool,
    pub allow_fine_tuning: bool,
    pub organization: &'static str,
    pub group: Option<String>,
    pub is_blocking: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenizeResponse {
    pub count: usize,
    pub max_model_len: u32,
    pub tokens: Vec<u32>,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DetokenizeResponse {
    pub prompt: String,
}
