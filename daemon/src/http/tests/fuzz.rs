//! Random input, from seeds: bodies, conversations, streams. A few hundred rounds in every run;
//! `ERNIED_FUZZ_SECONDS=600 cargo test -p ernied --lib -- fuzz --nocapture` for ten minutes of each (`ERNIED_FUZZ_SEED`
//! chooses where to begin). A failure prints the seed of its round.

use super::*;
use crate::text::chat_template::Conversation;
use ernie_proto::openai::{ChatCompletionRequest, CompletionRequest, json as strict};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, json};
use std::time::Instant;

/// What a round's seed decides.
struct Dice(StdRng);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0.random()
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n.max(1))
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// The seeds of a run.
fn rounds(default: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let first = number("ERNIED_FUZZ_SEED").unwrap_or(1);
    let until = number("ERNIED_FUZZ_SECONDS").map(|s| Instant::now() + Duration::from_secs(s));
    (first..).take_while(move |seed| match until {
        Some(until) => Instant::now() < until,
        None => *seed < first + default,
    })
}

const NAMES: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "role",
    "content",
    "name",
    "type",
    "text",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stream",
    "stream_options",
    "include_usage",
    "seed",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "min_tokens",
    "response_format",
    "json_schema",
    "schema",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "structural_tag",
    "format",
    "structures",
    "triggers",
    "begin",
    "end",
    "tools",
    "function",
    "parameters",
    "tool_choice",
    "tool_calls",
    "arguments",
    "tool_call_id",
    "reasoning",
    "chat_template_kwargs",
    "truncate_prompt_tokens",
    "priority",
    "cache_salt",
    "user",
    "metadata",
    "echo",
    "suffix",
    "best_of",
    "truncate_history",
    "repetition_detection",
    "documents",
    "continue_final_message",
    "add_generation_prompt",
    "instructions",
    "input",
    "previous_response_id",
    "store",
    "background",
    "system",
    "stop_sequences",
    "tokens",
    "x\u{0}y",
];

const TEXTS: &[&str] = &[
    "",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "你好",
    "👍🏽",
    "\u{0}",
    "\u{feff}",
    "a\u{300}\u{301}",
    "text",
    "json_object",
    "json_schema",
    "structural_tag",
    "function",
    "auto",
    "none",
    "required",
    "</s>",
    "<|end_of_sentence|>",
    "<think>",
    "</think>",
    "<tool_call>\n{\"name\":",
    "</tool_call>",
    "{{ messages }}",
    "{% raw %}",
    "(a|b)*",
    "([",
    "auto",
    "9223372036854775808",
    "-1",
    "1e5",
    "true",
    "../../etc/passwd",
    "http://127.0.0.1/",
];

fn value(dice: &mut Dice, depth: usize) -> Value {
    match dice.below(if depth > 5 { 6 } else { 9 }) {
        0 => Value::Null,
        1 => json!(dice.below(2) == 0),
        2 => json!([0, 1, -1, 2, 16, 4096, i64::MAX, i64::MIN][dice.below(8)]),
        3 => json!([0.0, 0.5, 1.0, -2.0, 1e-300, 1e300, 2.5][dice.below(7)]),
        4 => json!(dice.one(TEXTS)),
        5 => json!(dice.one(TEXTS).repeat(dice.below(40))),
        6 => Value::Array((0..dice.below(4)).map(|_| value(dice, depth + 1)).collect()),
        _ => Value::Object(members(dice, depth + 1)),
    }
}

fn members(dice: &mut Dice, depth: usize) -> Map<String, Value> {
    (0..dice.below(6)).map(|_| (dice.one(NAMES).to_owned(), value(dice, depth))).collect()
}

fn messages(dice: &mut Dice) -> Value {
    let message = |dice: &mut Dice| {
        let mut message = members(dice, 4);
        message.insert("role".into(), json!(dice.one(&["user", "assistant", "system", "tool", "developer", "poet"])));
        message.insert("content".into(), if dice.below(4) == 0 { value(dice, 3) } else { json!(dice.one(TEXTS)) });
        Value::Object(message)
    };
    Value::Array((0..dice.below(5)).map(|_| message(dice)).collect())
}

/// A body that is nearly a request.
fn body(dice: &mut Dice) -> Value {
    let mut body = members(dice, 0);
    match dice.below(4) {
        0 => drop(body.insert("prompt".into(), json!(dice.one(TEXTS)))),
        1 => drop(body.insert("input".into(), json!(dice.one(TEXTS)))),
        _ => drop(body.insert("messages".into(), messages(dice))),
    }
    if dice.below(2) == 0 {
        body.insert("max_tokens".into(), json!(dice.below(40)));
    }
    Value::Object(body)
}

/// Some bytes exchanged, left out, doubled.
fn damaged(dice: &mut Dice, text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(4) {
            _ if bytes.is_empty() => {}
            0 => bytes[at] = dice.next() as u8,
            1 => bytes.truncate(at),
            2 => drop(bytes.remove(at)),
            _ => bytes.insert(at, dice.one(&[b'"', b'{', b'\\', 0, 0xff, b'9'])),
        }
    }
    bytes
}

const PATHS: &[&str] = &[
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
];

#[tokio::test]
async fn fuzz_request_parsing_never_panics_and_every_refusal_has_its_shape() {
    let house = House::saying("x<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>").await;
    let (mut taken, mut refused) = (0, 0);
    for seed in rounds(400) {
        let mut dice = Dice(StdRng::seed_from_u64(seed));
        let body = body(&mut dice);
        let bytes =
            if dice.below(3) == 0 { damaged(&mut dice, &body.to_string()) } else { body.to_string().into_bytes() };
        if let Ok(members) = strict::parse_object(&bytes) {
            let _ = ChatCompletionRequest::read(members.clone());
            let _ = CompletionRequest::read(members);
        }
        let path = dice.one(PATHS);
        let reply = house.call(post(path, bytes.clone())).await;
        let status = reply.status.as_u16();
        let shown = || format!("seed {seed}: {path} {}: {}", String::from_utf8_lossy(&bytes), reply.text());
        match status {
            200 => taken += 1,
            // 501 is what is known and not offered; nothing else above 499 may come of a body.
            400..=499 | 501 => {
                refused += 1;
                assert!(reply.json()["error"]["message"].is_string(), "{}", shown());
            }
            _ => panic!("{status}: {}", shown()),
        }
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 10 && refused > 10);
}

#[test]
fn fuzz_chat_template_rendering_is_bounded_and_user_text_makes_no_control_token() {
    let text = fixtures::text_model();
    let controls: Vec<u32> = text.eos_token_ids().to_vec();
    let (mut rendered, mut refused) = (0, 0);
    for seed in rounds(400) {
        let mut dice = Dice(StdRng::seed_from_u64(seed));
        let conversation = Conversation {
            messages: messages(&mut dice).as_array().cloned().unwrap_or_default(),
            tools: (dice.below(3) == 0).then(|| vec![value(&mut dice, 2)]),
            ..Conversation::default()
        };
        match text.render(&conversation) {
            Err(_) => refused += 1,
            Ok(prompt) => {
                rendered += 1;
                let Ok(ids) = text.encode_rendered(&prompt, false) else { continue };
                // The template itself ends turns of the assistant; a user's text must add none.
                let turns = conversation.messages.len();
                let ends = ids.iter().filter(|id| controls.contains(id)).count();
                assert!(ends <= 2 * turns + 2, "seed {seed}: {ends} control tokens of {turns} messages");
            }
        }
    }
    println!("{rendered} rendered, {refused} refused");
    assert!(rendered > 50);
}

#[tokio::test]
async fn fuzz_streams_join_to_the_whole_answer_whatever_the_tokens_are() {
    const PARTS: &[&str] = &[
        "a",
        "你",
        "👍🏽",
        " ",
        "\n\n",
        "data: [DONE]",
        "STOP",
        "ST",
        "<think>",
        "</think>",
        "</thi",
        "<tool_call>\n",
        "{\"name\": \"f\", \"arguments\": {\"x\": \"好\"}}",
        "\n</tool_call>",
        "</tool",
        "\u{0}",
        "\"",
        "\\",
    ];
    let said = Arc::new(std::sync::Mutex::new(String::new()));
    let script = said.clone();
    let house = House::answering(move |model, submit| {
        let text = script.lock().unwrap().clone();
        say(model, submit, &text)
    })
    .await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for seed in rounds(120) {
        let mut dice = Dice(StdRng::seed_from_u64(seed));
        let text: String = (0..dice.below(12)).map(|_| dice.one(PARTS)).collect();
        said.lock().unwrap().clone_from(&text);
        let mut ask = json!({"max_tokens": 1 + dice.below(200)});
        if dice.below(2) == 0 {
            ask["tools"] = tools.clone();
        }
        if dice.below(3) == 0 {
            ask["stop"] = json!(["STOP", "。"]);
        }
        if dice.below(3) == 0 {
            ask["stream_interval"] = json!(1 + dice.below(5));
        }
        let whole = house.chat(ask.clone()).await.ok();
        ask["stream"] = json!(true);
        let events = house.chat(ask.clone()).await.events();
        let joined =
            |name: &str| -> String { events.iter().filter_map(|e| e["choices"][0]["delta"][name].as_str()).collect() };
        let choice = &whole["choices"][0];
        let what = format!("seed {seed}: {text:?} {ask}");
        assert_eq!(joined("content"), choice["message"]["content"].as_str().unwrap_or_default(), "{what}");
        assert_eq!(joined("reasoning"), choice["message"]["reasoning"].as_str().unwrap_or_default(), "{what}");
        let last = events.iter().rev().find_map(|e| e["choices"][0]["finish_reason"].as_str());
        assert_eq!(last, choice["finish_reason"].as_str(), "{what}");
        let mut arguments: Vec<String> = Vec::new();
        for call in events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            arguments.resize(arguments.len().max(index + 1), String::new());
            arguments[index].push_str(call["function"]["arguments"].as_str().unwrap_or_default());
        }
        let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        let whole: Vec<&str> = calls.iter().filter_map(|c| c["function"]["arguments"].as_str()).collect();
        assert_eq!(arguments, whole, "{what}");
    }
}
