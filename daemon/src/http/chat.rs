//! `/v1/chat/completions`: conversation to prompt, answer to message or chunks.

use super::assemble::{Answers, Counts, Part, finish_reason, request_metrics, stop_reason};
use super::call::{self, CallIdentity, Caller, PromptWork, facts, named_id};
use super::conversation::conversation;
use super::error::ApiError;
use super::history;
use super::layers::RequestId;
use super::logprobs::{self, Spelling};
use super::sse::{self, StreamForm};
use super::structured;
use super::tools::{self, ToolPlan};
use super::validate::{self, Checked};
use super::{Api, body, query_stream};
use crate::generate::{Admitted, AnswerEvent, Finish};
use crate::keys::Principal;
use crate::supervisor::Deployment;
use crate::text::TextModel;
use crate::text::chat_template::Conversation;
use crate::text::reasoning::ReasoningSplitter;
use crate::text::tool_calls::{ToolEvent, ToolParser};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use ernie_proto::openai::response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, FunctionCall, FunctionDelta,
    HistoryTruncation, StopReason, ToolCall, ToolCallDelta,
};
use ernie_proto::openai::{ChatCompletionRequest, StreamOptions};
use ernie_proto::worker::TokenLogprobs;
use std::sync::Arc;

pub async fn completions(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Extension(request_id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::new(&api, principal, request_id, request.headers())?;
    let stream_in_query = query_stream(request.uri());
    let body = body::object(&api, request).await?;
    let request = ChatCompletionRequest::read(body)?;
    api.unknown_members(&request.unknown)?;
    let stream = request.common.stream.or(stream_in_query).unwrap_or(false);
    let chat = begin(&api, caller, request, stream).await?;
    respond(&api, chat).await
}

/// A chat whose answer is under way.
#[derive(Debug)]
pub struct Chat {
    pub answers: Answers,
    pub form: ChatForm,
    pub stream: bool,
}

/// From a request to an answer under way: everything that can be refused is refused here.
pub async fn begin(
    api: &Arc<Api>,
    caller: Caller,
    request: ChatCompletionRequest,
    stream: bool,
) -> Result<Chat, ApiError> {
    let most = api.settings().limits.choices_max as usize;
    let wanted = usize::try_from(request.common.n.unwrap_or(1)).unwrap_or(1).min(most);
    let admitted = api.admit(&caller, wanted)?;
    let deployment = api.deployment(&caller, request.common.model.as_deref()).await?;
    let plan = ChatPlan::of(api, &request, &deployment, stream)?;
    plan.generate(api, caller, request, deployment, admitted, stream).await
}

/// A checked chat.
struct ChatPlan {
    checked: Checked,
    conversation: Conversation,
    tools: Option<ToolPlan>,
    /// The model's answers begin with thoughts.
    thinks: bool,
}

impl ChatPlan {
    fn of(
        api: &Api,
        request: &ChatCompletionRequest,
        deployment: &Deployment,
        stream: bool,
    ) -> Result<ChatPlan, ApiError> {
        let settings = api.settings();
        let logprobs = match (request.logprobs, request.top_logprobs) {
            (true, n) => Some(("logprobs", n.unwrap_or(0))),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::value(
                    "top_logprobs",
                    "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
                ));
            }
        };
        let mut checked = validate::check(&request.common, stream, logprobs, &facts(deployment), &settings.limits)?;
        let template = deployment.text.template().ok_or(crate::text::TextError::NoChatTemplate)?;
        let mut conversation =
            conversation(request, template, deployment.name(), settings.system_policy, &settings.limits)?;
        let tools = ToolPlan::of(request, &settings.limits)?;
        if let Some(tools) = &tools {
            tools.place(&mut conversation, template);
        }
        tools::flatten(&mut conversation, template);
        let thinks = template.mentions("<think>") || template.mentions("think_mode");
        if let Some(grammar) = tools.as_ref().map(|t| t.grammar(thinks, &settings.limits)).transpose()?.flatten() {
            if checked.sampling.grammar.is_some() {
                return Err(ApiError::value(
                    "tool_choice",
                    "tool_choice and a constraint on the answer can not be used together.",
                ));
            }
            checked.sampling.grammar = Some(grammar);
        }
        Ok(ChatPlan { checked, conversation, tools, thinks })
    }

    async fn generate(
        self,
        api: &Arc<Api>,
        caller: Caller,
        request: ChatCompletionRequest,
        deployment: Arc<Deployment>,
        admitted: Arc<Admitted>,
        stream: bool,
    ) -> Result<Chat, ApiError> {
        let ChatPlan { checked, conversation, tools, thinks } = self;
        let common = &request.common;
        let echo = if common.echo { echoed(&conversation) } else { None };
        let truncation = history::limit(&request, api.settings().truncate_history)?;
        let add_special = common.add_special_tokens.unwrap_or(false);
        let want_prompt_text = common.return_prompt_text;
        let rendered = {
            let (text, checked, max_len) = (deployment.text.clone(), checked.clone(), deployment.loaded.max_model_len);
            let deployment = deployment.clone();
            api.text(move || {
                checked.sampling.grammar.as_ref().map(structured::check).transpose()?;
                let reserve = checked.max_tokens.unwrap_or(1).max(1);
                let (conversation, dropped) = match truncation {
                    None => (conversation, None),
                    Some(limit) => {
                        let budget = limit.unwrap_or(u32::MAX).min(max_len.saturating_sub(reserve));
                        let fitted = history::fit(&text, conversation, budget, add_special)?;
                        (fitted.conversation, Some(fitted.dropped))
                    }
                };
                let rendered = text.render(&conversation)?;
                let mut prompt = text.encode_rendered(&rendered, add_special)?;
                checked.cut(&mut prompt, &facts(&deployment));
                let bad_words = call::bad_words(&text, &checked.bad_words)?;
                let prompt_text = rendered.text();
                Ok((prompt, bad_words, prompt_text, dropped))
            })
            .await?
        };
        let (prompt, bad_words, prompt_text, dropped) = rendered;
        let model = facts(&deployment);
        let max_tokens = checked.fit(prompt.len(), None, &model)?;
        let opens_thinking = prompt_text.trim_end().ends_with("<think>");
        let reasoning = (thinks || opens_thinking).then(|| ReasoningSplitter::new(opens_thinking));
        let form = ChatForm {
            identity: CallIdentity::new("chatcmpl", &caller, &deployment, common.request_id.as_deref()),
            text: deployment.text.clone(),
            counts: Counts {
                prompt_tokens: prompt.len() as u64,
                reasoning_tokens: reasoning.is_some().then_some(0),
                ..Counts::default()
            },
            choices: (0..checked.choices).map(|_| ChoiceForm::new(tools.as_ref())).collect(),
            tools,
            options: checked.stream.unwrap_or_default(),
            interval: checked.stream_interval,
            wants_logprobs: checked.sampling.logprobs.is_some(),
            wants_token_ids: checked.return_token_ids,
            wants_metrics: checked.return_metrics,
            tokens_as_ids: checked.tokens_as_ids,
            both_reasoning_names: api.settings().reasoning_content,
            prompt_logprobs: None,
            prompt_text: want_prompt_text.then_some(prompt_text),
            echo,
            dropped,
            prompt: prompt.clone(),
            metrics: None,
        };
        let work = PromptWork { operation: "chat", index: 0, prompt, max_tokens, bad_words, reasoning };
        let answer = api.generate(&caller, &deployment, &checked, work, &admitted).await?;
        Ok(Chat { answers: Answers::new(vec![answer]), form, stream })
    }
}

/// The text that `echo` repeats: the last message, when it is the assistant's own.
fn echoed(conversation: &Conversation) -> Option<String> {
    let last = conversation.messages.last()?;
    (last["role"] == "assistant").then(|| last["content"].as_str().unwrap_or_default().to_owned())
}

async fn respond(api: &Api, chat: Chat) -> Result<Response, ApiError> {
    let Chat { mut answers, form, stream } = chat;
    if stream {
        let first = call::first_event(&mut answers).await?;
        return Ok(sse::response(answers, first, form, api.settings().stream()));
    }
    let completion = collect(&mut answers, form).await?;
    Ok(axum::Json(completion).into_response())
}

/// Waits for the whole answer.
pub async fn collect(answers: &mut Answers, mut form: ChatForm) -> Result<ChatCompletion, ApiError> {
    let mut choices: Vec<Option<Shown>> = form.choices.iter().map(|_| None).collect();
    while let Some((_, event)) = answers.next().await {
        if let Some(shown) = form.take(event, u32::MAX)? {
            let index = shown.index as usize;
            choices[index] = Some(shown);
        }
    }
    form.metrics = answers.timings();
    form.whole(choices)
}

/// One choice on its way to the client.
#[derive(Debug)]
struct ChoiceForm {
    part: Part,
    parser: Option<ToolParser>,
}

impl ChoiceForm {
    fn new(tools: Option<&ToolPlan>) -> Self {
        Self { part: Part::default(), parser: tools.map(ToolPlan::parser) }
    }
}

/// What of one choice may be shown now, whatever the form it is shown in.
#[derive(Debug)]
pub struct Shown {
    pub index: u32,
    pub text: String,
    pub reasoning: String,
    /// Of a call that began in this piece the name is set; later ones have arguments only.
    pub calls: Vec<ToolCallDelta>,
    pub logprobs: Vec<(u32, TokenLogprobs)>,
    pub tokens: Vec<u32>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
}

impl Shown {
    /// The calls, when this is all of a choice.
    pub fn whole_calls(&self) -> impl Iterator<Item = FunctionCall> + '_ {
        self.calls.iter().map(|c| FunctionCall {
            name: c.function.name.clone().unwrap_or_default(),
            arguments: c.function.arguments.clone().unwrap_or_default(),
        })
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.reasoning.is_empty() && self.calls.is_empty() && self.finish_reason.is_none()
    }
}

/// Turns pieces into the chat's objects.
#[derive(Debug)]
pub struct ChatForm {
    pub identity: CallIdentity,
    pub counts: Counts,
    text: Arc<TextModel>,
    choices: Vec<ChoiceForm>,
    tools: Option<ToolPlan>,
    options: StreamOptions,
    interval: u32,
    wants_logprobs: bool,
    wants_token_ids: bool,
    wants_metrics: bool,
    tokens_as_ids: bool,
    both_reasoning_names: bool,
    prompt: Vec<u32>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    prompt_text: Option<String>,
    echo: Option<String>,
    dropped: Option<HistoryTruncation>,
    metrics: Option<crate::generate::Timings>,
}

impl ChatForm {
    /// Takes an event; gives what may be shown once `interval` tokens have come or the choice has ended.
    pub fn take(&mut self, event: AnswerEvent, interval: u32) -> Result<Option<Shown>, ApiError> {
        match event {
            AnswerEvent::Started { cached_tokens } => {
                self.counts.cached_tokens += u64::from(cached_tokens);
                Ok(None)
            }
            AnswerEvent::PromptLogprobs(tokens) => {
                self.prompt_logprobs = Some(tokens);
                Ok(None)
            }
            AnswerEvent::Failed(failure) => Err(failure.into()),
            AnswerEvent::Piece(piece) => {
                let index = usize::from(piece.choice);
                self.counts.piece(&piece);
                let part = &mut self.choices[index].part;
                part.add(piece);
                if part.is_due(interval, self.wants_token_ids) { self.show(index).map(Some) } else { Ok(None) }
            }
        }
    }

    fn show(&mut self, index: usize) -> Result<Shown, ApiError> {
        let part = std::mem::take(&mut self.choices[index].part);
        let mut calls = Vec::new();
        let mut called = false;
        let mut text = part.text;
        if let Some(parser) = &mut self.choices[index].parser {
            let mut events = Vec::new();
            parser.push(&text, &mut events);
            if part.finish.is_some() {
                parser.finish(&mut events);
            }
            called = parser.calls() > 0;
            text = deltas(events, &mut calls);
        }
        Ok(Shown {
            index: index as u32,
            text,
            reasoning: part.reasoning,
            calls,
            logprobs: part.logprobs,
            tokens: part.tokens,
            finish_reason: part.finish.as_ref().map(|f| self.finish_reason(f, called)).transpose()?,
            stop_reason: part.finish.as_ref().and_then(stop_reason),
        })
    }

    fn finish_reason(&self, finish: &Finish, called: bool) -> Result<&'static str, ApiError> {
        let reason = finish_reason(finish)?;
        match &self.tools {
            Some(tools) if called && reason == "stop" => Ok(tools.finish_reason()),
            _ => Ok(reason),
        }
    }

    fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: self.text.tokenizer(), as_ids: self.tokens_as_ids }
    }

    fn whole(self, shown: Vec<Option<Shown>>) -> Result<ChatCompletion, ApiError> {
        let mut choices = Vec::with_capacity(shown.len());
        for shown in shown {
            let shown = shown.ok_or_else(|| ApiError::internal("a choice never ended"))?;
            choices.push(self.choice(shown));
        }
        let prompt_logprobs =
            self.prompt_logprobs.as_ref().map(|tokens| logprobs::prompt(&self.prompt, tokens, self.text.tokenizer()));
        Ok(ChatCompletion {
            id: self.identity.id,
            object: "chat.completion",
            created: self.identity.created,
            model: self.identity.model,
            choices,
            service_tier: None,
            system_fingerprint: self.identity.fingerprint,
            usage: self.counts.whole_usage(),
            prompt_logprobs,
            prompt_token_ids: self.wants_token_ids.then_some(self.prompt),
            prompt_text: self.prompt_text,
            kv_transfer_params: None,
            ec_transfer_params: None,
            metrics: self.metrics.filter(|_| self.wants_metrics).map(request_metrics),
            truncated_history: self.dropped,
        })
    }

    fn choice(&self, shown: Shown) -> ChatChoice {
        let tool_calls: Vec<ToolCall> = (shown.whole_calls())
            .map(|function| ToolCall { id: named_id("call_"), kind: "function", function })
            .collect();
        let text = self.echo.clone().unwrap_or_default() + &shown.text;
        let reasoning = Some(shown.reasoning).filter(|r| !r.is_empty());
        ChatChoice {
            index: shown.index,
            message: AssistantMessage {
                role: "assistant",
                // Calls without a word beside them have null.
                content: (!text.is_empty() || tool_calls.is_empty()).then_some(text),
                refusal: None,
                annotations: None,
                audio: None,
                function_call: None,
                tool_calls,
                reasoning_content: reasoning.clone().filter(|_| self.both_reasoning_names),
                reasoning,
            },
            logprobs: self.wants_logprobs.then(|| logprobs::chat(&shown.logprobs, self.spelling())),
            finish_reason: shown.finish_reason.unwrap_or("stop"),
            stop_reason: shown.stop_reason,
            token_ids: self.wants_token_ids.then_some(shown.tokens),
            routed_experts: None,
        }
    }

    fn chunk(&self, choices: Vec<ChatChunkChoice>) -> ChatChunk<'_> {
        ChatChunk {
            id: &self.identity.id,
            object: "chat.completion.chunk",
            created: self.identity.created,
            model: &self.identity.model,
            choices,
            usage: self.options.continuous_usage_stats.then(|| self.counts.usage()),
            prompt_token_ids: None,
            prompt_text: None,
            system_fingerprint: None,
            metrics: None,
            truncated_history: None,
        }
    }

    fn send(&self, shown: Shown, out: &mut BytesMut) {
        if shown.is_empty() && shown.logprobs.is_empty() && !self.wants_token_ids {
            return;
        }
        let ended = shown.finish_reason.is_some();
        let says_nothing_else = shown.reasoning.is_empty() && shown.calls.is_empty();
        let reasoning = Some(shown.reasoning).filter(|r| !r.is_empty());
        let delta = Delta {
            role: None,
            content: (!shown.text.is_empty() || says_nothing_else).then_some(shown.text),
            reasoning_content: reasoning.clone().filter(|_| self.both_reasoning_names),
            reasoning,
            tool_calls: shown.calls,
        };
        let choice = ChatChunkChoice {
            index: shown.index,
            delta,
            logprobs: (self.wants_logprobs && !shown.logprobs.is_empty())
                .then(|| logprobs::chat(&shown.logprobs, self.spelling())),
            finish_reason: shown.finish_reason,
            stop_reason: ended.then_some(shown.stop_reason),
            token_ids: Some(self.wants_token_ids.then_some(shown.tokens)),
        };
        let mut chunk = self.chunk(vec![choice]);
        if ended && !self.options.include_usage {
            chunk.system_fingerprint = Some(&self.identity.fingerprint);
        }
        sse::data(out, &chunk);
    }
}

impl StreamForm for ChatForm {
    fn open(&mut self, out: &mut BytesMut) {
        for index in 0..self.choices.len() as u32 {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            let choice = ChatChunkChoice {
                index,
                delta,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            let mut chunk = self.chunk(vec![choice]);
            chunk.prompt_token_ids = Some(self.wants_token_ids.then(|| self.prompt.clone()));
            chunk.prompt_text = Some(self.prompt_text.clone());
            chunk.truncated_history = self.dropped;
            sse::data(out, &chunk);
        }
        if let Some(echo) = self.echo.take().filter(|e| !e.is_empty()) {
            for choice in &mut self.choices {
                choice.part.text.push_str(&echo);
            }
        }
    }

    fn event(&mut self, _: usize, event: AnswerEvent, out: &mut BytesMut) -> Result<(), ApiError> {
        if let Some(shown) = self.take(event, self.interval)? {
            self.send(shown, out);
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

/// Content, and the deltas of calls: the name whole in the first one, later ones only arguments.
fn deltas(events: Vec<ToolEvent>, calls: &mut Vec<ToolCallDelta>) -> String {
    let mut content = String::new();
    for event in events {
        match event {
            ToolEvent::Content(text) => content.push_str(&text),
            ToolEvent::Call { index, name } => calls.push(ToolCallDelta {
                id: Some(named_id("call_")),
                kind: Some("function"),
                index,
                function: FunctionDelta { name: Some(name), arguments: Some(String::new()) },
            }),
            ToolEvent::Arguments { index, text } => match calls.iter_mut().find(|c| c.index == index) {
                Some(call) => call.function.arguments.get_or_insert_default().push_str(&text),
                None => calls.push(ToolCallDelta {
                    id: None,
                    kind: None,
                    index,
                    function: FunctionDelta { name: None, arguments: Some(text) },
                }),
            },
        }
    }
    content
}
