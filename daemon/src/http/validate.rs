//! Values of a request against the server's limits and the model, before any costly work: what comes out of here can only
//! still fail because of the prompt's length or the fleet.
//!
//! Wordings are vLLM's where it has one; `param` always names the field.

use super::error::{ApiError, ErrorKind};
use super::structured;
use crate::text::GenerationDefaults;
use ernie_proto::openai::fields::Loc;
use ernie_proto::openai::request::CommonFields;
use ernie_proto::openai::{FieldError, StreamOptions};
use ernie_proto::worker::{RepetitionDetection, SamplingParams};
use serde_json::Value;

/// Bounds on the numbers and sizes in one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestLimits {
    /// Choices per prompt (`n`).
    pub choices_max: u32,
    /// Prompts per completion call.
    pub prompts_max: usize,
    pub stops_max: usize,
    pub stop_bytes_max: usize,
    pub bad_words_max: usize,
    pub bad_word_bytes_max: usize,
    pub logprobs_max: u32,
    pub logit_bias_max: usize,
    pub messages_max: usize,
    pub tools_max: usize,
    pub grammar_bytes_max: usize,
    /// Choices in a list of `structured_outputs.choice`.
    pub grammar_choices_max: usize,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            choices_max: 16,
            prompts_max: 1024,
            stops_max: 4,
            stop_bytes_max: 1024,
            bad_words_max: 128,
            bad_word_bytes_max: 256,
            logprobs_max: 20,
            logit_bias_max: 1024,
            messages_max: 4096,
            tools_max: 128,
            grammar_bytes_max: 64 << 10,
            grammar_choices_max: 1024,
        }
    }
}

/// What of the model matters for values.
#[derive(Debug, Clone, Copy)]
pub struct ModelFacts<'a> {
    pub vocab_size: u32,
    pub max_model_len: u32,
    pub eos_token_ids: &'a [u32],
    pub defaults: &'a GenerationDefaults,
}

/// Below this temperature the most likely token is taken.
const GREEDY_BELOW: f64 = 1e-5;

/// Beyond it the logits of seen tokens are all the same nothing.
const REPETITION_PENALTY_MAX: f64 = 1000.0;

/// The checked common part of a request. `sampling` lacks `max_tokens` and `bad_words`, which need the prompt and the
/// tokenizer.
#[derive(Debug, Clone)]
pub struct Checked {
    pub sampling: SamplingParams,
    pub choices: u16,
    pub stops: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    pub max_tokens: Option<u32>,
    /// The name under which the client gave `max_tokens`.
    pub max_tokens_name: &'static str,
    pub bad_words: Vec<String>,
    pub stream: Option<StreamOptions>,
    pub stream_interval: u32,
    pub truncate: Option<Truncate>,
    pub priority: i32,
    pub cache_salt: Option<String>,
    pub return_token_ids: bool,
    pub tokens_as_ids: bool,
    pub return_metrics: bool,
}

/// Cut the prompt to this many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncate {
    /// `None`: as many as fit.
    pub tokens: Option<u32>,
    /// Keep the end of the prompt, not its beginning.
    pub keep_end: bool,
}

/// `temperature must be ..., got 3.0. (parameter=temperature, value=3.0)`
fn out_of_range(name: &'static str, rule: &str, got: &str) -> ApiError {
    ApiError::value(name, format!("{name} must be {rule}, got {got}. (parameter={name}, value={got})"))
}

/// The shorter wording that vLLM has for some fields.
fn out_of_range_short(name: &'static str, rule: &str, got: &str) -> ApiError {
    ApiError::value(name, format!("{name} must be {rule}, got {got}."))
}

/// As Python prints a float.
pub(super) fn float(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e16 { format!("{value:.1}") } else { format!("{value}") }
}

/// Checks the members that completions and chat share. `stream` is the body's or the query's; `logprobs` the number of
/// alternatives asked for, by its name.
pub fn check(
    common: &CommonFields,
    stream: bool,
    logprobs: Option<(&'static str, i64)>,
    model: &ModelFacts<'_>,
    limits: &RequestLimits,
) -> Result<Checked, ApiError> {
    let mut sampling = temperatures(common, model.defaults)?;
    sampling.eos_token_ids = model.eos_token_ids.to_vec();
    sampling.ignore_eos = common.ignore_eos;
    sampling.seed = common.seed.map_or_else(rand::random, |seed| seed as u64);
    let choices = choices(common, sampling.temperature == 0.0, limits)?;
    let max_tokens = max_tokens(common, model)?;
    sampling.min_tokens = min_tokens(common, max_tokens)?;
    sampling.stop_token_ids = token_ids("stop_token_ids", &common.stop_token_ids, model, limits)?;
    sampling.logit_bias = logit_bias(common, model, limits)?;
    sampling.allowed_token_ids = match &common.allowed_token_ids {
        Some(ids) if ids.is_empty() => {
            return Err(ApiError::value("allowed_token_ids", "allowed_token_ids is not None and empty!"));
        }
        Some(ids) if ids.len() > model.vocab_size as usize => {
            return Err(ApiError::value(
                "allowed_token_ids",
                "allowed_token_ids has more entries than the vocabulary.",
            ));
        }
        Some(ids) => in_vocabulary("allowed_token_ids", ids, model)?,
        None => Vec::new(),
    };
    sampling.logprobs = logprobs.map(|(name, n)| alternatives(name, n, "sample", limits)).transpose()?;
    sampling.prompt_logprobs =
        common.prompt_logprobs.map(|n| alternatives("prompt_logprobs", n, "prompt", limits)).transpose()?;
    if stream && common.prompt_logprobs.is_some_and(|n| n != 0) {
        return Err(ApiError::value("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`."));
    }
    sampling.repetition_detection = repetition_detection(common)?;
    sampling.grammar = structured::grammar(common, limits)?;
    stops(common, limits)?;
    bad_words(common, limits)?;
    Ok(Checked {
        sampling,
        choices,
        stops: common.stop.clone(),
        include_stop: common.include_stop_str_in_output,
        skip_special_tokens: common.skip_special_tokens.unwrap_or(true),
        max_tokens,
        max_tokens_name: common.max_tokens.map_or("max_tokens", |(name, _)| name),
        bad_words: common.bad_words.clone(),
        stream: stream_options(common, stream)?,
        stream_interval: match common.stream_interval {
            None => 1,
            Some(n @ 1..=1024) => n as u32,
            Some(n) => return Err(out_of_range_short("stream_interval", "in [1, 1024]", &n.to_string())),
        },
        truncate: truncate(common, model)?,
        priority: match common.priority {
            None => 0,
            Some(p) => {
                i32::try_from(p).map_err(|_| out_of_range_short("priority", "a 32-bit integer", &p.to_string()))?
            }
        },
        cache_salt: match &common.cache_salt {
            Some(salt) if salt.is_empty() || salt.len() > 256 => {
                return Err(ApiError::value(
                    "cache_salt",
                    "cache_salt must be a non-empty string of at most 256 bytes.",
                ));
            }
            other => other.clone(),
        },
        return_token_ids: common.return_token_ids,
        tokens_as_ids: common.return_tokens_as_token_ids,
        return_metrics: common.return_metrics,
    })
}

fn temperatures(c: &CommonFields, defaults: &GenerationDefaults) -> Result<SamplingParams, ApiError> {
    if c.use_beam_search == Some(true) {
        return Err(ApiError::value("use_beam_search", "beam search is not implemented"));
    }
    let temperature = c.temperature.or(defaults.temperature.map(f64::from)).unwrap_or(1.0);
    if temperature < 0.0 {
        return Err(out_of_range("temperature", "non-negative", &float(temperature)));
    }
    if temperature > 2.0 {
        return Err(out_of_range("temperature", "in [0, 2]", &float(temperature)));
    }
    let top_p = c.top_p.or(defaults.top_p.map(f64::from)).unwrap_or(1.0);
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(out_of_range("top_p", "in (0, 1]", &float(top_p)));
    }
    let top_k = c.top_k.or(defaults.top_k.map(i64::from)).unwrap_or(0);
    if top_k < -1 || top_k > i64::from(u32::MAX) {
        return Err(out_of_range_short("top_k", "0 (disable), or at least 1", &top_k.to_string()));
    }
    let min_p = c.min_p.or(defaults.min_p.map(f64::from)).unwrap_or(0.0);
    if !(0.0..=1.0).contains(&min_p) {
        return Err(out_of_range_short("min_p", "in [0, 1]", &float(min_p)));
    }
    let penalty = |name: &'static str, value: Option<f64>, default: Option<f32>| {
        let value = value.or(default.map(f64::from)).unwrap_or(0.0);
        if (-2.0..=2.0).contains(&value) {
            Ok(value as f32)
        } else {
            Err(out_of_range_short(name, "in [-2, 2]", &float(value)))
        }
    };
    let presence_penalty = penalty("presence_penalty", c.presence_penalty, defaults.presence_penalty)?;
    let frequency_penalty = penalty("frequency_penalty", c.frequency_penalty, defaults.frequency_penalty)?;
    let repetition_penalty = c.repetition_penalty.or(defaults.repetition_penalty.map(f64::from)).unwrap_or(1.0);
    let narrowed = repetition_penalty as f32;
    if !(narrowed > 0.0 && narrowed.is_finite() && narrowed.recip().is_finite()) {
        return Err(out_of_range_short("repetition_penalty", "greater than zero", &float(repetition_penalty)));
    }
    if repetition_penalty > REPETITION_PENALTY_MAX {
        let rule = format!("at most {REPETITION_PENALTY_MAX}");
        return Err(out_of_range_short("repetition_penalty", &rule, &float(repetition_penalty)));
    }
    let greedy = temperature < GREEDY_BELOW;
    Ok(SamplingParams {
        temperature: if greedy { 0.0 } else { temperature as f32 },
        // A top_p that rounds to nothing would allow no token.
        top_p: (top_p as f32).max(f32::MIN_POSITIVE),
        top_k: u32::try_from(top_k).unwrap_or(0),
        min_p: min_p as f32,
        presence_penalty,
        frequency_penalty,
        repetition_penalty: narrowed,
        ..SamplingParams::default()
    })
}

fn choices(c: &CommonFields, greedy: bool, limits: &RequestLimits) -> Result<u16, ApiError> {
    let n = c.n.unwrap_or(1);
    if n < 1 {
        return Err(out_of_range_short("n", "at least 1", &n.to_string()));
    }
    if n > i64::from(limits.choices_max) {
        return Err(out_of_range_short("n", &format!("at most {}", limits.choices_max), &n.to_string()));
    }
    if n > 1 && greedy {
        return Err(ApiError::value("n", format!("n must be 1 when using greedy sampling, got {n}.")));
    }
    if c.best_of.is_some_and(|best_of| best_of != n && best_of != 1) {
        return Err(ApiError::value("best_of", "best_of is not supported; ask for `n` choices and choose yourself"));
    }
    u16::try_from(n).map_err(|_| out_of_range_short("n", "at most 65535", &n.to_string()))
}

fn max_tokens(c: &CommonFields, model: &ModelFacts<'_>) -> Result<Option<u32>, ApiError> {
    let Some((name, n)) = c.max_tokens else { return Ok(None) };
    if n == 0 && c.echo {
        return Ok(Some(0));
    }
    if n < 1 {
        return Err(out_of_range(name, "at least 1", &n.to_string()));
    }
    if n > i64::from(model.max_model_len) {
        return Err(ApiError::value(
            name,
            format!(
                "{name}={n} cannot be greater than max_model_len={}. Please request fewer output tokens. \
                 (parameter={name}, value={n})",
                model.max_model_len
            ),
        ));
    }
    Ok(Some(n as u32))
}

fn min_tokens(c: &CommonFields, max_tokens: Option<u32>) -> Result<u32, ApiError> {
    let n = c.min_tokens.unwrap_or(0);
    let Ok(min) = u32::try_from(n) else {
        return Err(out_of_range_short("min_tokens", "greater than or equal to 0", &n.to_string()));
    };
    match max_tokens {
        Some(max) if min > max => {
            let rule = format!("less than or equal to max_tokens={max}");
            Err(out_of_range_short("min_tokens", &rule, &n.to_string()))
        }
        _ => Ok(min),
    }
}

fn token_ids(
    name: &'static str,
    ids: &[i64],
    model: &ModelFacts<'_>,
    limits: &RequestLimits,
) -> Result<Vec<u32>, ApiError> {
    if ids.len() > limits.logit_bias_max {
        let rule = format!("a list of at most {} ids", limits.logit_bias_max);
        return Err(out_of_range_short(name, &rule, &ids.len().to_string()));
    }
    in_vocabulary(name, ids, model)
}

fn in_vocabulary(name: &'static str, ids: &[i64], model: &ModelFacts<'_>) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| match u32::try_from(id) {
            Ok(id) if id < model.vocab_size => Ok(id),
            _ => Err(ApiError::value(
                name,
                format!("{name} contains out-of-vocab token id {id}! Vocabulary size: {}", model.vocab_size),
            )),
        })
        .collect()
}

fn logit_bias(c: &CommonFields, model: &ModelFacts<'_>, limits: &RequestLimits) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    if c.logit_bias.len() > limits.logit_bias_max {
        let rule = format!("a map of at most {} ids", limits.logit_bias_max);
        return Err(out_of_range_short(NAME, &rule, &c.logit_bias.len().to_string()));
    }
    let mut out = Vec::with_capacity(c.logit_bias.len());
    for (key, bias) in &c.logit_bias {
        let Ok(id) = key.trim().parse::<i64>() else {
            return Err(ApiError::value(
                NAME,
                format!(
                    "logit_bias contains key(s) that cannot be converted to integer token IDs: ['{key}'] \
                     (parameter=logit_bias, value=['{key}'])"
                ),
            ));
        };
        match u32::try_from(id) {
            Ok(id) if id < model.vocab_size => out.push((id, bias.clamp(-100.0, 100.0) as f32)),
            _ => {
                return Err(ApiError::value(
                    NAME,
                    format!(
                        "token_id(s) [{id}] in logit_bias contain out-of-vocab token ids. Vocabulary size: {} \
                         (parameter=logit_bias, value=[{id}])",
                        model.vocab_size
                    ),
                ));
            }
        }
    }
    out.sort_unstable_by_key(|(id, _)| *id);
    out.dedup_by_key(|(id, _)| *id);
    Ok(out)
}

fn alternatives(name: &'static str, n: i64, what: &str, limits: &RequestLimits) -> Result<u32, ApiError> {
    if n < -1 {
        return Err(ApiError::value(
            name,
            format!("`{name}` must be a positive value or -1. (parameter={name}, value={n})"),
        ));
    }
    match u32::try_from(n) {
        Ok(n) if n <= limits.logprobs_max => Ok(n),
        // -1 asks for the whole vocabulary.
        _ => Err(ApiError::value(
            name,
            format!(
                "Requested {what} logprobs of {n}, which is greater than max allowed: {} (parameter={name}, value={n})",
                limits.logprobs_max
            ),
        )),
    }
}

fn stops(c: &CommonFields, limits: &RequestLimits) -> Result<(), ApiError> {
    if c.stop.len() > limits.stops_max {
        let message =
            format!("List should have at most {} items after validation, not {}", limits.stops_max, c.stop.len());
        let input = Value::Array(vec![Value::Null; c.stop.len()]);
        return Err(FieldError::new("too_long", Loc::body().member("stop"), message, &input).into());
    }
    if c.stop.iter().any(String::is_empty) {
        return Err(ApiError::value("stop", "stop cannot contain an empty string."));
    }
    if c.stop.iter().any(|s| s.len() > limits.stop_bytes_max) {
        return Err(ApiError::value(
            "stop",
            format!("a stop string may have at most {} bytes.", limits.stop_bytes_max),
        ));
    }
    Ok(())
}

fn bad_words(c: &CommonFields, limits: &RequestLimits) -> Result<(), ApiError> {
    if c.bad_words.len() > limits.bad_words_max {
        let rule = format!("a list of at most {} words", limits.bad_words_max);
        return Err(out_of_range_short("bad_words", &rule, &c.bad_words.len().to_string()));
    }
    if c.bad_words.iter().any(|w| w.trim().is_empty() || w.len() > limits.bad_word_bytes_max) {
        let message = format!("each of bad_words must have 1 to {} bytes.", limits.bad_word_bytes_max);
        return Err(ApiError::value("bad_words", message));
    }
    Ok(())
}

fn repetition_detection(c: &CommonFields) -> Result<Option<RepetitionDetection>, ApiError> {
    let Some(r) = c.repetition_detection else { return Ok(None) };
    if r.max_pattern_size == 0 && r.min_pattern_size == 0 {
        return Ok(None);
    }
    let fits = (1..=512).contains(&r.max_pattern_size)
        && (0..=r.max_pattern_size).contains(&r.min_pattern_size)
        && (2..=1024).contains(&r.min_count);
    if !fits {
        return Err(ApiError::value(
            "repetition_detection",
            "repetition_detection needs 1 <= min_pattern_size <= max_pattern_size <= 512 and 2 <= min_count <= 1024.",
        ));
    }
    Ok(Some(RepetitionDetection {
        min_pattern: (r.min_pattern_size as u32).max(1),
        max_pattern: r.max_pattern_size as u32,
        min_count: r.min_count as u32,
    }))
}

fn stream_options(c: &CommonFields, stream: bool) -> Result<Option<StreamOptions>, ApiError> {
    match (stream, c.stream_options) {
        (true, options) => Ok(Some(options.unwrap_or_default())),
        (false, None) => Ok(None),
        (false, Some(_)) => Err(ApiError::value(
            "stream_options",
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
        )),
    }
}

fn truncate(c: &CommonFields, model: &ModelFacts<'_>) -> Result<Option<Truncate>, ApiError> {
    let keep_end = match c.truncation_side.as_deref() {
        None | Some("left") => true,
        Some("right") => false,
        Some(_) => return Err(ApiError::value("truncation_side", "truncation_side must be \"left\" or \"right\".")),
    };
    match c.truncate_prompt_tokens {
        None => Ok(None),
        Some(-1) => Ok(Some(Truncate { tokens: None, keep_end })),
        Some(n) => match u32::try_from(n) {
            Ok(n) if n >= 1 && n <= model.max_model_len => Ok(Some(Truncate { tokens: Some(n), keep_end })),
            _ => Err(ApiError::value(
                "truncate_prompt_tokens",
                format!(
                    "truncate_prompt_tokens value ({n}) must be -1 or in [1, {}] (max_model_len).",
                    model.max_model_len
                ),
            )),
        },
    }
}

impl Checked {
    /// Whether a prompt of this length leaves room for what was asked; the number of tokens that may be generated.
    pub fn fit(&self, prompt_tokens: usize, default_max: Option<u32>, model: &ModelFacts<'_>) -> Result<u32, ApiError> {
        let context = model.max_model_len as usize;
        if prompt_tokens >= context {
            return Err(prompt_too_long(prompt_tokens, context));
        }
        let room = (context - prompt_tokens) as u32;
        match self.max_tokens {
            Some(asked) if asked > room => {
                let name = "input_tokens";
                let message = format!(
                    "This model's maximum context length is {context} tokens. However, you requested {asked} output tokens \
                     and your prompt contains at least {prompt_tokens} input tokens, for a total of at least {} tokens. \
                     Please reduce the length of the input prompt or the number of requested output tokens. \
                     (parameter={name}, value={prompt_tokens})",
                    prompt_tokens + asked as usize
                );
                Err(ApiError::new(ErrorKind::ContextLength, message).with_param(name))
            }
            // An echo of the prompt alone still takes one step.
            Some(asked) => Ok(asked.max(1)),
            None => {
                let most = default_max.or(model.defaults.max_new_tokens).unwrap_or(room);
                let most = most.min(room).max(1);
                if self.sampling.min_tokens > most {
                    let rule = format!("less than or equal to max_tokens={most}");
                    return Err(out_of_range_short("min_tokens", &rule, &self.sampling.min_tokens.to_string()));
                }
                Ok(most)
            }
        }
    }

    /// Cuts the prompt as asked.
    pub fn cut(&self, prompt: &mut Vec<u32>, model: &ModelFacts<'_>) {
        let Some(truncate) = self.truncate else { return };
        let fits = model.max_model_len.saturating_sub(self.max_tokens.unwrap_or(1).max(1)).max(1);
        let most = truncate.tokens.unwrap_or(fits) as usize;
        if prompt.len() > most {
            if truncate.keep_end {
                prompt.drain(..prompt.len() - most);
            } else {
                prompt.truncate(most);
            }
        }
    }
}

fn prompt_too_long(prompt_tokens: usize, context: usize) -> ApiError {
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your prompt contains at least {prompt_tokens} \
         input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input \
         prompt. (parameter=input_tokens, value={prompt_tokens})"
    );
    ApiError::new(ErrorKind::ContextLength, message).with_param("input_tokens")
}
