//! `truncate_history`: leave out the oldest turns of a conversation until it fits, and say how much was left out.
//!
//! A turn is a user's message with everything that follows up to the next one; it goes as a whole, so that no answer stays
//! without its question and no tool result without its call. System messages and the last turn always stay. Counts are
//! exact: the conversation is rendered and encoded, not estimated.

use super::error::ApiError;
use crate::text::TextModel;
use crate::text::chat_template::Conversation;
use ernie_proto::openai::ChatCompletionRequest;
use ernie_proto::openai::response::HistoryTruncation;
use serde_json::Value;

/// A conversation that fits, if any cut makes it fit.
#[derive(Debug)]
pub struct Fitted {
    pub conversation: Conversation,
    pub dropped: HistoryTruncation,
}

/// The bound a request asks for, or the server's. Outer `None`: no truncation; inner `None`: what the context holds.
pub fn limit(request: &ChatCompletionRequest, server: Option<u32>) -> Result<Option<Option<u32>>, ApiError> {
    match request.truncate_history {
        None => Ok(server.map(Some)),
        Some(None) => Ok(Some(None)),
        Some(Some(n)) => match u32::try_from(n) {
            Ok(n) if n > 0 => Ok(Some(Some(n))),
            _ => {
                Err(ApiError::value("truncate_history.max_tokens", format!("max_tokens must be at least 1, got {n}.")))
            }
        },
    }
}

/// Drops turns from the oldest until the prompt has at most `budget` tokens.
pub fn fit(text: &TextModel, conversation: Conversation, budget: u32, add_special: bool) -> Result<Fitted, ApiError> {
    let count = |c: &Conversation| -> Result<usize, ApiError> {
        Ok(text.encode_rendered(&text.render(c)?, add_special)?.len())
    };
    let whole = count(&conversation)?;
    if whole <= budget as usize {
        return Ok(Fitted {
            conversation,
            dropped: HistoryTruncation { dropped_turns: 0, dropped_messages: 0, dropped_tokens: 0 },
        });
    }
    let turns = turns(&conversation.messages);
    // The fewest turns to drop, by halving: more dropped turns never make the prompt longer.
    let (mut low, mut high) = (1, turns.saturating_sub(1));
    let mut best = None;
    while low <= high {
        let drop = low + (high - low) / 2;
        let candidate = without_oldest(&conversation, drop);
        let tokens = count(&candidate)?;
        if tokens <= budget as usize {
            best = Some((drop, candidate, tokens));
            high = drop - 1;
        } else {
            low = drop + 1;
        }
    }
    // Nothing fits: as short as it can be; the length check refuses it with the usual words.
    let (drop, fitted, tokens) = match best {
        Some(best) => best,
        None if turns > 1 => {
            let candidate = without_oldest(&conversation, turns - 1);
            let tokens = count(&candidate)?;
            (turns - 1, candidate, tokens)
        }
        None => (0, conversation.clone(), whole),
    };
    let dropped = HistoryTruncation {
        dropped_turns: drop as u64,
        dropped_messages: (conversation.messages.len() - fitted.messages.len()) as u64,
        dropped_tokens: whole.saturating_sub(tokens) as u64,
    };
    Ok(Fitted { conversation: fitted, dropped })
}

fn is_system(message: &Value) -> bool {
    message["role"] == "system"
}

/// Which turn a message is in, counted from 0; system messages are in none.
fn turn_numbers(messages: &[Value]) -> Vec<Option<usize>> {
    let mut turn: Option<usize> = None;
    let mut user_seen = false;
    messages
        .iter()
        .map(|m| {
            if is_system(m) {
                return None;
            }
            if m["role"] == "user" {
                // What comes before the first question belongs to its turn.
                turn = Some(match turn {
                    Some(t) if user_seen => t + 1,
                    _ => 0,
                });
                user_seen = true;
            }
            Some(*turn.get_or_insert(0))
        })
        .collect()
}

fn turns(messages: &[Value]) -> usize {
    turn_numbers(messages).into_iter().flatten().max().map_or(0, |t| t + 1)
}

fn without_oldest(conversation: &Conversation, drop: usize) -> Conversation {
    let numbers = turn_numbers(&conversation.messages);
    let kept = conversation.messages.iter().zip(numbers).filter(|(_, n)| n.is_none_or(|n| n >= drop));
    let messages = kept.map(|(m, _)| m.clone()).collect();
    Conversation { messages, ..conversation.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::fixtures;
    use proptest::prelude::*;
    use serde_json::json;

    fn conversation(turns: usize) -> Conversation {
        let mut messages = vec![json!({"role": "system", "content": "be brief"})];
        for i in 0..turns {
            messages.push(json!({"role": "user", "content": format!("question {i} 北京")}));
            messages.push(json!({"role": "assistant", "content": format!("answer {i}")}));
        }
        messages.push(json!({"role": "user", "content": "last"}));
        Conversation { messages, add_generation_prompt: Some(true), ..Conversation::default() }
    }

    fn tokens(text: &TextModel, c: &Conversation) -> usize {
        text.encode_rendered(&text.render(c).unwrap(), false).unwrap().len()
    }

    proptest! {
        #[test]
        fn whole_turns_go_from_the_oldest_and_the_count_is_exact(turns in 0usize..12, budget in 1u32..600) {
            let text = fixtures::text_model();
            let c = conversation(turns);
            let whole = tokens(&text, &c);
            let fitted = fit(&text, c.clone(), budget, false).unwrap();
            let left = tokens(&text, &fitted.conversation);
            let d = fitted.dropped;
            prop_assert_eq!(d.dropped_tokens as usize, whole - left);
            prop_assert_eq!(d.dropped_messages, d.dropped_turns * 2);
            prop_assert_eq!(&fitted.conversation.messages[0], &c.messages[0], "the system message stays");
            prop_assert_eq!(fitted.conversation.messages.last(), c.messages.last(), "the last turn stays");
            if left > budget as usize {
                prop_assert_eq!(d.dropped_turns as usize, turns, "all that may go is gone");
            } else if d.dropped_turns > 0 {
                let one_less = without_oldest(&c, d.dropped_turns as usize - 1);
                prop_assert!(tokens(&text, &one_less) > budget as usize, "no more than needed is dropped");
            }
        }
    }

    #[test]
    fn a_tool_result_goes_with_its_question() {
        let mut c = conversation(0);
        c.messages.splice(
            1..1,
            [
                json!({"role": "user", "content": "q"}),
                json!({"role": "assistant", "content": "", "tool_calls": []}),
                json!({"role": "tool", "content": "r"}),
                json!({"role": "assistant", "content": "a"}),
            ],
        );
        assert_eq!(turns(&c.messages), 2);
        let cut = without_oldest(&c, 1);
        assert_eq!(cut.messages.len(), 2);
        assert_eq!(cut.messages[1]["content"], "last");
    }
}
