//! `/v1/completions`: prompts as text or ids, one or many, answered as they stand.

use super::assemble::{Answers, Counts, Part, finish_reason, request_metrics, stop_reason};
use super::call::{self, CallIdentity, Caller, PromptWork, facts};
use super::error::ApiError;
use super::layers::RequestId;
use super::logprobs::{self, Offsets, Spelling};
use super::sse::{self, StreamForm};
use super::structured;
use super::validate::{self, Checked, ModelFacts};
use super::{Api, body, query_stream};
use crate::generate::AnswerEvent;
use crate::keys::Principal;
use crate::text::TextModel;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use ernie_proto::openai::response::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, CompletionLogprobs, PromptLogprobsEntry,
};
use ernie_proto::openai::{CompletionRequest, Prompt, StreamOptions};
use ernie_proto::worker::TokenLogprobs;
use std::sync::Arc;

/// vLLM's default for this endpoint.
const DEFAULT_MAX_TOKENS: u32 = 16;

pub async fn completions(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let stream_in_query = query_stream(request.uri());
    let body = body::object(&api, request).await?;
    let request = CompletionRequest::read(body)?;
    api.unknown_members(&request.unknown)?;
    let stream = request.common.stream.or(stream_in_query).unwrap_or(false);
    let (mut answers, form) = begin(&api, caller, request, stream).await?;
    if stream {
        let first = call::first_event(&mut answers).await?;
        return Ok(sse::response(answers, first, form, api.settings().stream()));
    }
    Ok(axum::Json(collect(&mut answers, form).await?).into_response())
}

/// From a request to answers under way.
pub async fn begin(
    api: &Arc<Api>,
    caller: Caller,
    request: CompletionRequest,
    stream: bool,
) -> Result<(Answers, CompletionForm), ApiError> {
    let settings = api.settings();
    let limits = &settings.limits;
    let prompts = checked_prompts(&request, limits.prompts_max)?;
    let n = usize::try_from(request.common.n.unwrap_or(1)).unwrap_or(1).min(limits.choices_max as usize);
    let admitted = api.admit(&caller, n.max(1) * prompts.len())?;
    let deployment = api.deployment(&caller, request.common.model.as_deref()).await?;
    let model = facts(&deployment);
    if request.suffix.as_ref().is_some_and(|s| !s.is_empty()) {
        return Err(ApiError::value("suffix", "suffix is only supported for models with FIM completion rendering"));
    }
    let logprobs = request.logprobs.map(|n| ("logprobs", n));
    let mut checked = validate::check(&request.common, stream, logprobs, &model, limits)?;
    if request.common.echo && checked.sampling.prompt_logprobs.is_none() {
        checked.sampling.prompt_logprobs = checked.sampling.logprobs;
    }
    let add_special = request.common.add_special_tokens.unwrap_or(true);
    let (encoded, bad_words) = {
        let (text, checked, deployment) = (deployment.text.clone(), checked.clone(), deployment.clone());
        api.text(move || {
            checked.sampling.grammar.as_ref().map(structured::check).transpose()?;
            let encoded = encode(&text, prompts, &checked, &facts(&deployment), add_special)?;
            Ok((encoded, call::bad_words(&text, &checked.bad_words)?))
        })
        .await?
    };
    // All of them are checked before the first one starts.
    let mut lengths = Vec::with_capacity(encoded.len());
    for prompt in &encoded {
        lengths.push(checked.fit(prompt.len(), Some(DEFAULT_MAX_TOKENS), &model)?);
    }
    let echo_only = checked.max_tokens == Some(0);
    let prompts: Vec<PromptForm> = encoded.iter().map(|ids| PromptForm::new(ids.clone())).collect();
    let choices = prompts.len() * usize::from(checked.choices);
    let form = CompletionForm {
        identity: CallIdentity::new("cmpl", &caller, &deployment, request.common.request_id.as_deref()),
        text: deployment.text.clone(),
        counts: Counts { prompt_tokens: encoded.iter().map(|p| p.len() as u64).sum(), ..Counts::default() },
        prompts,
        choices: vec![ChoiceForm::default(); choices],
        per_prompt: usize::from(checked.choices),
        options: checked.stream.unwrap_or_default(),
        interval: checked.stream_interval,
        echo: request.common.echo,
        echo_only,
        wants_logprobs: checked.sampling.logprobs.is_some(),
        wants_prompt_logprobs: request.common.prompt_logprobs.is_some() || checked.sampling.prompt_logprobs.is_some(),
        wants_token_ids: checked.return_token_ids,
        wants_metrics: checked.return_metrics,
        tokens_as_ids: checked.tokens_as_ids,
        metrics: None,
    };
    let mut answers = Vec::with_capacity(encoded.len());
    for (index, (prompt, max_tokens)) in encoded.into_iter().zip(lengths).enumerate() {
        let bad_words = bad_words.clone();
        let work = PromptWork { operation: "text_completion", index, prompt, max_tokens, bad_words, reasoning: None };
        answers.push(api.generate(&caller, &deployment, &checked, work, &admitted).await?);
    }
    Ok((Answers::new(answers), form))
}

fn checked_prompts(request: &CompletionRequest, most: usize) -> Result<Vec<Prompt>, ApiError> {
    let missing = || {
        ApiError::value("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
    };
    let prompts = request.prompts.clone().ok_or_else(missing)?;
    if prompts.is_empty() {
        return Err(ApiError::value("prompt", "You must pass at least one prompt"));
    }
    if prompts.len() > most {
        return Err(ApiError::value(
            "prompt",
            format!("at most {most} prompts are taken per call, got {}.", prompts.len()),
        ));
    }
    let empty = |p: &Prompt| match p {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(ids) => ids.is_empty(),
    };
    if prompts.iter().any(empty) {
        return Err(missing());
    }
    Ok(prompts)
}

fn encode(
    text: &TextModel,
    prompts: Vec<Prompt>,
    checked: &Checked,
    model: &ModelFacts<'_>,
    add_special: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut encoded = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let mut ids = match prompt {
            Prompt::Text(prompt) => text.encode(&prompt, add_special)?,
            Prompt::Tokens(ids) => in_vocabulary(&ids, model)?,
        };
        checked.cut(&mut ids, model);
        if ids.is_empty() {
            return Err(ApiError::value("prompt", "The prompt has no tokens."));
        }
        encoded.push(ids);
    }
    Ok(encoded)
}

fn in_vocabulary(ids: &[i64], model: &ModelFacts<'_>) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| match u32::try_from(id) {
            Ok(token) if token < model.vocab_size => Ok(token),
            _ => Err(ApiError::value("prompt", format!("Token id {id} is out of vocabulary"))),
        })
        .collect()
}

/// Waits for the whole answer.
pub async fn collect(answers: &mut Answers, mut form: CompletionForm) -> Result<Completion, ApiError> {
    while let Some((index, event)) = answers.next().await {
        match event {
            AnswerEvent::Started { cached_tokens } => form.counts.cached_tokens += u64::from(cached_tokens),
            AnswerEvent::PromptLogprobs(tokens) => form.prompts[index].logprobs = Some(tokens),
            AnswerEvent::Piece(piece) => {
                form.counts.piece(&piece);
                let choice = form.choice_index(index, piece.choice);
                form.choices[choice].part.add(piece);
            }
            AnswerEvent::Failed(failure) => return Err(failure.into()),
        }
    }
    form.metrics = answers.timings();
    form.whole()
}

#[derive(Debug)]
struct PromptForm {
    ids: Vec<u32>,
    logprobs: Option<Vec<Option<TokenLogprobs>>>,
}

impl PromptForm {
    fn new(ids: Vec<u32>) -> Self {
        Self { ids, logprobs: None }
    }
}

#[derive(Debug, Clone, Default)]
struct ChoiceForm {
    part: Part,
    offsets: Offsets,
    /// The prompt was repeated, or is not to be.
    opened: bool,
}

/// Turns pieces into the endpoint's objects.
#[derive(Debug)]
pub struct CompletionForm {
    identity: CallIdentity,
    text: Arc<TextModel>,
    pub counts: Counts,
    prompts: Vec<PromptForm>,
    choices: Vec<ChoiceForm>,
    per_prompt: usize,
    options: StreamOptions,
    interval: u32,
    echo: bool,
    /// The prompt alone: what had to be generated is not shown.
    echo_only: bool,
    wants_logprobs: bool,
    wants_prompt_logprobs: bool,
    wants_token_ids: bool,
    wants_metrics: bool,
    tokens_as_ids: bool,
    metrics: Option<crate::generate::Timings>,
}

impl CompletionForm {
    fn choice_index(&self, prompt: usize, choice: u16) -> usize {
        prompt * self.per_prompt + usize::from(choice)
    }

    fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: self.text.tokenizer(), as_ids: self.tokens_as_ids }
    }

    fn echoed_text(&self, prompt: usize) -> String {
        self.text.decode(&self.prompts[prompt].ids, true)
    }

    fn prompt_map(&self, prompt: usize) -> Option<Vec<Option<PromptLogprobsEntry>>> {
        let prompt = &self.prompts[prompt];
        let tokens = prompt.logprobs.as_ref().filter(|_| self.wants_prompt_logprobs)?;
        Some(logprobs::prompt(&prompt.ids, tokens, self.text.tokenizer()))
    }

    /// Columns of the prompt, when it is repeated with probabilities.
    fn prompt_columns(&self, prompt: usize, offsets: &mut Offsets) -> CompletionLogprobs {
        let prompt = &self.prompts[prompt];
        let nothing = Vec::new();
        let tokens = prompt.logprobs.as_ref().unwrap_or(&nothing);
        let rows = prompt.ids.iter().enumerate().map(|(i, &id)| (id, tokens.get(i).and_then(Option::as_ref)));
        logprobs::completion(rows, self.spelling(), offsets)
    }

    /// Drops what `echo` with no tokens had to generate all the same.
    fn hide_generated(&mut self, part: &mut Part) {
        if self.echo_only {
            part.text.clear();
            part.logprobs.clear();
            part.tokens.clear();
        }
    }

    fn whole(mut self) -> Result<Completion, ApiError> {
        let mut choices = Vec::with_capacity(self.choices.len());
        for (index, mut choice) in std::mem::take(&mut self.choices).into_iter().enumerate() {
            let prompt = index / self.per_prompt;
            let mut part = std::mem::take(&mut choice.part);
            let finish = part.finish.clone().ok_or_else(|| ApiError::internal("a choice never ended"))?;
            self.hide_generated(&mut part);
            let text = if self.echo { self.echoed_text(prompt) + &part.text } else { part.text };
            let logprobs = self.wants_logprobs.then(|| {
                let mut columns = match self.echo {
                    true => self.prompt_columns(prompt, &mut choice.offsets),
                    false => CompletionLogprobs::default(),
                };
                let rows = part.logprobs.iter().map(|(id, l)| (*id, Some(l)));
                append(&mut columns, logprobs::completion(rows, self.spelling(), &mut choice.offsets));
                columns
            });
            choices.push(CompletionChoice {
                index: index as u32,
                text,
                logprobs,
                finish_reason: if self.echo_only { "length" } else { finish_reason(&finish)? },
                stop_reason: stop_reason(&finish),
                token_ids: self.wants_token_ids.then_some(part.tokens),
                prompt_logprobs: self.prompt_map(prompt),
                prompt_token_ids: self.wants_token_ids.then(|| self.prompts[prompt].ids.clone()),
                routed_experts: None,
            });
        }
        if self.echo_only {
            self.counts.completion_tokens = 0;
        }
        Ok(Completion {
            id: self.identity.id,
            object: "text_completion",
            created: self.identity.created,
            model: self.identity.model,
            choices,
            service_tier: None,
            system_fingerprint: self.identity.fingerprint,
            usage: self.counts.whole_usage(),
            kv_transfer_params: None,
            ec_transfer_params: None,
            metrics: self.metrics.filter(|_| self.wants_metrics).map(request_metrics),
        })
    }

    fn chunk(&self, choices: Vec<CompletionChunkChoice>) -> CompletionChunk<'_> {
        CompletionChunk {
            id: &self.identity.id,
            object: "text_completion",
            created: self.identity.created,
            model: &self.identity.model,
            choices,
            usage: self.options.continuous_usage_stats.then(|| self.counts.usage()),
            system_fingerprint: None,
            metrics: None,
        }
    }

    fn flush(&mut self, index: usize, out: &mut BytesMut) -> Result<(), ApiError> {
        let prompt = index / self.per_prompt;
        let mut part = std::mem::take(&mut self.choices[index].part);
        let finish = part.finish.clone();
        self.hide_generated(&mut part);
        let first = !std::mem::replace(&mut self.choices[index].opened, true);
        let mut offsets = std::mem::take(&mut self.choices[index].offsets);
        let echo_now = first && self.echo;
        let text = if echo_now { self.echoed_text(prompt) + &part.text } else { part.text };
        let mut columns = None;
        if self.wants_logprobs && (echo_now || !part.logprobs.is_empty()) {
            let mut all = match echo_now {
                true => self.prompt_columns(prompt, &mut offsets),
                false => CompletionLogprobs::default(),
            };
            let rows = part.logprobs.iter().map(|(id, l)| (*id, Some(l)));
            append(&mut all, logprobs::completion(rows, self.spelling(), &mut offsets));
            columns = Some(all);
        }
        self.choices[index].offsets = offsets;
        let reason = match &finish {
            Some(_) if self.echo_only => Some("length"),
            Some(finish) => Some(finish_reason(finish)?),
            None => None,
        };
        let choice = CompletionChunkChoice {
            index: index as u32,
            text,
            logprobs: columns,
            finish_reason: reason,
            stop_reason: finish.as_ref().and_then(stop_reason),
            prompt_logprobs: if first { self.prompt_map(prompt) } else { None },
            prompt_token_ids: (first && self.wants_token_ids).then(|| self.prompts[prompt].ids.clone()),
            token_ids: self.wants_token_ids.then_some(part.tokens),
        };
        let mut chunk = self.chunk(vec![choice]);
        if reason.is_some() && !self.options.include_usage {
            chunk.system_fingerprint = Some(&self.identity.fingerprint);
        }
        sse::data(out, &chunk);
        Ok(())
    }
}

fn append(columns: &mut CompletionLogprobs, more: CompletionLogprobs) {
    columns.text_offset.extend(more.text_offset);
    columns.token_logprobs.extend(more.token_logprobs);
    columns.tokens.extend(more.tokens);
    columns.top_logprobs.extend(more.top_logprobs);
}

impl StreamForm for CompletionForm {
    fn open(&mut self, _: &mut BytesMut) {}

    fn event(&mut self, index: usize, event: AnswerEvent, out: &mut BytesMut) -> Result<(), ApiError> {
        match event {
            AnswerEvent::Started { cached_tokens } => self.counts.cached_tokens += u64::from(cached_tokens),
            AnswerEvent::PromptLogprobs(tokens) => self.prompts[index].logprobs = Some(tokens),
            AnswerEvent::Failed(failure) => return Err(failure.into()),
            AnswerEvent::Piece(piece) => {
                let choice = self.choice_index(index, piece.choice);
                if !self.echo_only {
                    self.counts.piece(&piece);
                }
                let part = &mut self.choices[choice].part;
                part.add(piece);
                if part.is_due(self.interval, self.wants_token_ids) {
                    self.flush(choice, out)?;
                }
            }
        }
        Ok(())
    }

    fn close(&mut self, out: &mut BytesMut) {
        if self.options.include_usage {
            let mut chunk = self.chunk(Vec::new());
            chunk.usage = Some(self.counts.usage());
            chunk.system_fingerprint = Some(&self.identity.fingerprint);
            sse::data(out, &chunk);
        }
    }
}
