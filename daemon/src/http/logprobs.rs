//! Log-probabilities in the three forms of the API: chat's list of tokens, completions' columns, and the map of prompt tokens.
//!
//! Tokens that are no whole text are spelled `bytes:\xe5\x8c`, so that no token is empty and no two look alike; the `bytes`
//! of a chat answer, joined, are the exact UTF-8 of its text.

use crate::text::detokenizer::CharacterAssembler;
use crate::text::tokenizer::Tokenizer;
use ernie_proto::openai::response::{
    ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs, PromptLogprobsEntry,
};
use ernie_proto::worker::TokenLogprobs;
use serde_json::{Map, Value, json};

/// What JSON can not say is said as vLLM says it.
const LOWEST: f64 = -9999.0;

fn finite(logprob: f32) -> f64 {
    f64::from(logprob).max(LOWEST)
}

/// How a token is spelled.
#[derive(Debug, Clone, Copy)]
pub struct Spelling<'a> {
    pub tokenizer: &'a Tokenizer,
    /// `token_id:123` instead of text.
    pub as_ids: bool,
}

impl Spelling<'_> {
    pub fn token(&self, id: u32) -> String {
        if self.as_ids { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }
}

/// Chat's form.
pub fn chat(tokens: &[(u32, TokenLogprobs)], spelling: Spelling<'_>) -> ChatLogprobs {
    let content = tokens.iter().map(|(id, l)| ChatLogprob {
        token: spelling.token(*id),
        logprob: finite(l.logprob),
        bytes: spelling.tokenizer.bytes(*id).to_vec(),
        top_logprobs: (l.top.iter())
            .map(|&(id, logprob)| ChatTopLogprob {
                token: spelling.token(id),
                logprob: finite(logprob),
                bytes: spelling.tokenizer.bytes(id).to_vec(),
            })
            .collect(),
    });
    ChatLogprobs { content: content.collect() }
}

/// Where tokens begin in the text so far, in characters.
#[derive(Debug, Clone, Default)]
pub struct Offsets {
    characters: CharacterAssembler,
    count: u64,
}

impl Offsets {
    /// The place of the next token, which is then counted in.
    pub fn next(&mut self, bytes: &[u8]) -> u64 {
        let at = self.count;
        let mut text = String::new();
        self.characters.push(bytes, &mut text);
        self.count += text.chars().count() as u64;
        at
    }
}

/// Completions' form: adds rows to the columns. `None`: the first token of a prompt, which has no probability.
pub fn completion<'t>(
    tokens: impl IntoIterator<Item = (u32, Option<&'t TokenLogprobs>)>,
    spelling: Spelling<'_>,
    offsets: &mut Offsets,
) -> CompletionLogprobs {
    let mut columns = CompletionLogprobs::default();
    for (id, logprobs) in tokens {
        let token = spelling.token(id);
        columns.text_offset.push(offsets.next(spelling.tokenizer.bytes(id)));
        columns.token_logprobs.push(logprobs.map(|l| finite(l.logprob)));
        columns.top_logprobs.push(logprobs.map(|l| {
            let mut top = Map::new();
            top.insert(token.clone(), Value::from(finite(l.logprob)));
            for &(id, logprob) in &l.top {
                top.entry(spelling.token(id)).or_insert_with(|| Value::from(finite(logprob)));
            }
            top
        }));
        columns.tokens.push(token);
    }
    columns
}

/// `prompt_logprobs`: per position the prompt's own token first, then the most likely ones.
pub fn prompt(
    prompt: &[u32],
    tokens: &[Option<TokenLogprobs>],
    tokenizer: &Tokenizer,
) -> Vec<Option<PromptLogprobsEntry>> {
    let entry = |id: u32, l: &TokenLogprobs| {
        let one = |id: u32, logprob: f32, rank: u32| json!({"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id)});
        let mut map = Map::new();
        map.insert(id.to_string(), one(id, l.logprob, l.rank));
        for (i, &(top, logprob)) in l.top.iter().enumerate() {
            map.entry(top.to_string()).or_insert_with(|| one(top, logprob, i as u32 + 1));
        }
        map
    };
    prompt.iter().zip(tokens).map(|(&id, l)| l.as_ref().map(|l| entry(id, l))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::fixtures;

    fn logprobs(logprob: f32, top: &[(u32, f32)]) -> TokenLogprobs {
        TokenLogprobs { logprob, rank: 3, top: top.to_vec() }
    }

    #[test]
    fn bytes_of_chinese_and_emoji_join_to_the_exact_text() {
        let t = fixtures::byte_fallback();
        for text in ["北京", "👨‍👩‍👧 龘", "a北b"] {
            let tokens: Vec<_> = text.bytes().map(|b| t.id_of(&format!("<0x{b:02X}>")).unwrap()).collect();
            let rows: Vec<_> = tokens.iter().map(|&id| (id, logprobs(-1.0, &[(id, -1.0)]))).collect();
            let out = chat(&rows, Spelling { tokenizer: &t, as_ids: false });
            let joined: Vec<u8> = out.content.iter().flat_map(|c| c.bytes.clone()).collect();
            assert_eq!(joined, text.as_bytes());
            assert!(out.content.iter().all(|c| !c.token.is_empty()));
        }
    }

    #[test]
    fn offsets_count_whole_characters() {
        let t = fixtures::byte_fallback();
        let ids: Vec<u32> = "a北b".bytes().map(|b| t.id_of(&format!("<0x{b:02X}>")).unwrap()).collect();
        let l = logprobs(f32::NEG_INFINITY, &[]);
        let spelling = Spelling { tokenizer: &t, as_ids: false };
        let out = completion(ids.iter().map(|&id| (id, Some(&l))), spelling, &mut Offsets::default());
        assert_eq!(out.text_offset, [0, 1, 1, 1, 2]);
        assert_eq!(out.tokens[1], "bytes:\\xe5");
        assert_eq!(out.token_logprobs[0], Some(-9999.0));
    }

    #[test]
    fn the_chosen_token_comes_first_and_is_not_repeated() {
        let t = fixtures::byte_fallback();
        let [a, b] = ["<0x41>", "<0x42>"].map(|p| t.id_of(p).unwrap());
        let l = logprobs(-2.0, &[(b, -0.5), (a, -2.0)]);
        let spelling = Spelling { tokenizer: &t, as_ids: false };
        let out = completion([(a, Some(&l))], spelling, &mut Offsets::default());
        assert_eq!(serde_json::to_string(&out.top_logprobs).unwrap(), r#"[{"A":-2.0,"B":-0.5}]"#);
        let map = prompt(&[b, a], &[None, Some(l)], &t);
        assert_eq!(map[0], None);
        let json = serde_json::to_string(&map[1]).unwrap();
        let expected = format!(
            r#"{{"{a}":{{"logprob":-2.0,"rank":3,"decoded_token":"A"}},"{b}":{{"logprob":-0.5,"rank":1,"decoded_token":"B"}}}}"#
        );
        assert_eq!(json, expected);
        assert_eq!(Spelling { tokenizer: &t, as_ids: true }.token(7), "token_id:7");
    }
}
