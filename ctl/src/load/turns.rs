//! Chats that grow turn by turn behind one long system prompt: what the prefix cache is for.
//!
//! All chats take their first turn together, then the second, and so on. The same load is run twice: with one cache salt for
//! all requests, and with a new one for each, which no cache can serve. Both see the same words.

use super::stream::{Outcome, Target};
use super::{Summary, prompts::Prompts, summary};
use crate::load::LoadPlan;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Turns of each chat.
const TURNS: usize = 4;

/// Words of each question.
const QUESTION_TOKENS: usize = 24;

/// One round of all chats.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Turn {
    pub(crate) turn: usize,
    pub(crate) ttft_ms: Summary,
    pub(crate) prompt_tokens: f64,
    pub(crate) cached_tokens: f64,
}

/// The same load with and without a cache that can serve it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TurnsReport {
    pub(crate) chats: usize,
    pub(crate) system_tokens: usize,
    pub(crate) cached: Vec<Turn>,
    pub(crate) uncached: Vec<Turn>,
}

/// Runs both; `plan.users` chats, `plan.shared_prefix_tokens` of system prompt, `plan.output_tokens` per answer.
pub(crate) async fn run(plan: &LoadPlan, on_request: impl Fn() + Send + Sync + 'static) -> Result<TurnsReport> {
    let mut target = Target::new(&plan.url, plan.api_key.clone(), plan.timeout)?;
    target.model = match &plan.model {
        Some(model) => model.clone(),
        None => target.first_model().await?,
    };
    let mut prompts = Prompts::new(plan);
    prompts.calibrate(&target).await?;
    let (target, prompts, on_request) = (Arc::new(target), Arc::new(prompts), Arc::new(on_request));
    let once = |cached| round_by_round(plan, target.clone(), prompts.clone(), on_request.clone(), cached);
    let uncached = once(false).await?;
    let cached = once(true).await?;
    Ok(TurnsReport { chats: plan.users, system_tokens: plan.shared_prefix_tokens, cached, uncached })
}

/// Requests that both runs make.
pub(crate) fn requests(chats: usize) -> usize {
    2 * TURNS * chats
}

async fn round_by_round(
    plan: &LoadPlan,
    target: Arc<Target>,
    prompts: Arc<Prompts>,
    on_request: Arc<impl Fn() + Send + Sync + 'static>,
    cached: bool,
) -> Result<Vec<Turn>> {
    let system = json!({"role": "system", "content": prompts.words(plan.shared_prefix_tokens, u64::MAX - 7)});
    let mut chats: Vec<Vec<Value>> = vec![vec![system]; plan.users];
    let mut rounds = Vec::with_capacity(TURNS);
    for turn in 0..TURNS {
        let mut asked = Vec::with_capacity(chats.len());
        for (chat, messages) in chats.iter_mut().enumerate() {
            let number = (turn * plan.users + chat) as u64;
            messages.push(json!({"role": "user", "content": prompts.words(QUESTION_TOKENS, number)}));
            // The seed keeps runs of the same server apart.
            let salt = if cached { format!("bench {}", plan.seed) } else { format!("bench {} {number}", plan.seed) };
            let body = json!({"messages": messages, "cache_salt": salt});
            let (target, output, on_request) = (target.clone(), plan.output_tokens, on_request.clone());
            asked.push(tokio::spawn(async move {
                let outcome = target.chat_once(body, output).await;
                on_request();
                outcome
            }));
        }
        let mut outcomes = Vec::with_capacity(asked.len());
        for (asked, messages) in asked.into_iter().zip(&mut chats) {
            let outcome: Outcome = asked.await?.with_context(|| format!("turn {}", turn + 1))?;
            messages.push(json!({"role": "assistant", "content": outcome.text.clone()}));
            outcomes.push(outcome);
        }
        let mean =
            |of: fn(&Outcome) -> usize| outcomes.iter().map(|o| of(o) as f64).sum::<f64>() / outcomes.len() as f64;
        rounds.push(Turn {
            turn: turn + 1,
            ttft_ms: summary(outcomes.iter().map(|o| o.ttft.as_secs_f64()).collect()),
            prompt_tokens: mean(|o| o.prompt_tokens),
            cached_tokens: mean(|o| o.cached_tokens),
        });
    }
    Ok(rounds)
}
