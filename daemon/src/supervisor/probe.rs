//! Asking a candidate before it serves: answers that are none, noise, too slow or not the expected ones keep it out.
//!
//! Runs as a task beside the supervisor and speaks to the candidate as any client does. Speed is compared with the serving
//! deployment on the same prompt at the same time of day: alternately, the best of a few runs each.

use super::deployment::Deployment;
use super::fleet::{FleetHandle, GenerationEvent, Submission};
use ernie_proto::worker::{FinishReason, SamplingParams};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Runs of which the fastest counts.
const SPEED_RUNS: usize = 3;

/// Runs before a candidate is called too slow: a busy moment passes, slowness stays.
const SPEED_RUNS_MAX: usize = 12;

/// Shorter answers say nothing about speed or repetition.
const TELLING_TOKENS: usize = 16;

/// Answers of this many different tokens or fewer, when long, are noise.
const DISTINCT_TOKENS_MIN: usize = 3;

/// Keeps the probes' prefixes apart from everybody's.
const PROBE_SALT: u64 = 0x6572_6e69_6570_726f;

/// One question.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    pub prompt: Arc<Vec<u32>>,
    /// The answer must contain one of these. Empty: any answer.
    pub expect_any: Vec<String>,
    pub max_tokens: u32,
}

/// What a candidate has to show.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) candidate: Arc<Deployment>,
    /// The deployment to compare with, when it is there.
    pub(super) reference: Option<Arc<Deployment>>,
    pub(super) probes: Vec<Probe>,
    pub(super) min_tokens_per_second: Option<f64>,
    /// A candidate that takes this many times as long per token is too slow.
    pub(super) slowdown_max: f64,
}

/// What a run brought.
#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    /// From the question to the last token, per token; only of answers that are long enough. Not between the first and the
    /// last: on a busy machine we are woken late, find all of them at once, and would take that for speed.
    per_token: Option<Duration>,
}

/// Why it may not serve, or a line about how it did.
pub(super) async fn run(fleet: FleetHandle, plan: Plan) -> Result<String, String> {
    for (index, probe) in plan.probes.iter().enumerate() {
        let what = |reason: String| format!("smoke prompt {}: {reason}", index + 1);
        let answer = ask(&fleet, &plan.candidate, probe, true).await.map_err(what)?;
        judge(&plan.candidate, probe, &answer).map_err(what)?;
    }
    speed(&fleet, &plan).await
}

fn judge(candidate: &Deployment, probe: &Probe, answer: &Answer) -> Result<(), String> {
    if answer.tokens.is_empty() {
        return Err("there was no answer".to_string());
    }
    let distinct = answer.tokens.iter().collect::<HashSet<_>>().len();
    if answer.tokens.len() >= TELLING_TOKENS && distinct < DISTINCT_TOKENS_MIN {
        return Err(format!("{} tokens, but only {distinct} different ones: it repeats itself", answer.tokens.len()));
    }
    let text = candidate.text.decode(&answer.tokens, true);
    if !probe.expect_any.is_empty() && !probe.expect_any.iter().any(|expected| text.contains(expected)) {
        return Err(format!("the answer is {text:?}, expected {:?}", probe.expect_any));
    }
    Ok(())
}

/// Compares the time per token.
async fn speed(fleet: &FleetHandle, plan: &Plan) -> Result<String, String> {
    let Some(longest) = plan.probes.iter().max_by_key(|probe| probe.max_tokens) else {
        return Ok("no smoke prompts".to_string());
    };
    let (mut own, mut other) = (None, None);
    for run in 1..=SPEED_RUNS_MAX {
        let answer = ask(fleet, &plan.candidate, longest, false).await?;
        own = faster(own, answer.per_token);
        if let Some(reference) = &plan.reference {
            // Its troubles are not the candidate's; other ids may mean other words to it, which does not matter.
            if let Ok(answer) = ask(fleet, reference, longest, false).await {
                other = faster(other, answer.per_token);
            }
        }
        if run >= SPEED_RUNS && verdict(plan, own, other).is_ok() {
            break;
        }
    }
    verdict(plan, own, other)
}

fn verdict(plan: &Plan, own: Option<Duration>, other: Option<Duration>) -> Result<String, String> {
    let Some(own) = own else { return Ok("answers too short to tell the speed".to_string()) };
    let rate = 1.0 / own.as_secs_f64().max(1e-9);
    if let Some(min) = plan.min_tokens_per_second.filter(|min| rate < *min) {
        return Err(format!("{rate:.1} tokens/s, but smoke.json asks for {min:.1}"));
    }
    if let Some(other) = other {
        let slowdown = own.as_secs_f64() / other.as_secs_f64().max(1e-9);
        if slowdown > plan.slowdown_max {
            return Err(format!(
                "{slowdown:.1} times as long per token as the serving revision ({rate:.1} tokens/s); at most {:.1} is allowed",
                plan.slowdown_max
            ));
        }
        return Ok(format!("{rate:.1} tokens/s, {slowdown:.2} times the serving revision's time per token"));
    }
    Ok(format!("{rate:.1} tokens/s"))
}

fn faster(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}

async fn ask(fleet: &FleetHandle, deployment: &Arc<Deployment>, probe: &Probe, strict: bool) -> Result<Answer, String> {
    let sampling = SamplingParams {
        max_tokens: probe.max_tokens,
        eos_token_ids: deployment.text.eos_token_ids().to_vec(),
        // So that a logit that is not finite shows.
        logprobs: strict.then_some(1),
        // A speed run shall have something to measure.
        ignore_eos: !strict,
        ..SamplingParams::default()
    };
    let submission = Submission {
        prompt: probe.prompt.clone(),
        choices: 1,
        sampling,
        priority: 0,
        cache_salt: PROBE_SALT,
        owner: PROBE_SALT,
    };
    let began = Instant::now();
    let mut generation = fleet.submit(deployment, submission).await.map_err(|refusal| refusal.to_string())?;
    let mut answer = Answer::default();
    while let Some(event) = generation.next().await {
        match event {
            GenerationEvent::Started { .. } | GenerationEvent::Computed(_) | GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Failed(failure) => return Err(failure.message),
            GenerationEvent::Output(output, _) => {
                if output.finish == Some(FinishReason::Error) {
                    return Err("its logits are not finite".to_string());
                }
                if output.logprobs.as_ref().is_some_and(|logprobs| !logprobs.logprob.is_finite()) {
                    return Err("its log-probabilities are not finite".to_string());
                }
                answer.tokens.push(output.token);
            }
        }
    }
    let tokens = answer.tokens.len();
    answer.per_token = (tokens >= TELLING_TOKENS).then(|| began.elapsed() / u32::try_from(tokens).unwrap_or(u32::MAX));
    Ok(answer)
}
