//! Grammars: which tokens a constrained answer may go on with. llguidance does the work, over the vocabulary's bytes.
//!
//! Compiling may take a while (it is bounded by `ParserLimits`), so it is kept out of the step: a [`GrammarCompiler`] can be
//! taken to another thread and its result handed to `Engine::add_compiled`. The end of an answer is a token of its own here,
//! one past the vocabulary; it stands for whatever end-of-sequence ids the request has.

use crate::params::Grammar;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use std::sync::{Arc, Mutex, PoisonError};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Compiled grammars to keep: callers tend to send the same schema again and again.
const KEPT: usize = 32;

/// Compiles grammars for one vocabulary. Cheap to clone; clones share what they compiled.
#[derive(Clone)]
pub struct GrammarCompiler {
    shared: Arc<Shared>,
}

struct Shared {
    factory: ParserFactory,
    /// Most recently used last.
    kept: Mutex<Vec<(Grammar, CompiledGrammar)>>,
}

/// A grammar at its beginning.
#[derive(Clone)]
pub struct CompiledGrammar {
    matcher: Matcher,
}

/// Why a grammar can not be used. The caller's to mend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

impl GrammarCompiler {
    /// `vocabulary` has the bytes of every token id; tokens that stand for no text (control tokens) are empty.
    pub fn new(vocabulary: &[Vec<u8>]) -> Result<Self, GrammarError> {
        let end = u32::try_from(vocabulary.len()).map_err(|_| GrammarError("the vocabulary is too large".into()))?;
        let mut words = vocabulary.to_vec();
        words.push(Vec::new());
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|cause| GrammarError(cause.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { shared: Arc::new(Shared { factory, kept: Mutex::default() }) })
    }

    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        if let Some(known) = self.known(grammar) {
            return Ok(known);
        }
        let source = match grammar {
            Grammar::JsonSchema(schema) => {
                let schema = serde_json::from_str(schema)
                    .map_err(|cause| GrammarError(format!("the JSON schema is not JSON: {cause}")))?;
                TopLevelGrammar::from_json_schema(schema)
            }
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = self.shared.factory.create_parser(source);
        let matcher = Matcher::new(parser);
        if let Some(cause) = matcher.get_error() {
            return Err(GrammarError(cause));
        }
        let compiled = CompiledGrammar { matcher };
        let mut kept = self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((grammar.clone(), compiled.fresh()));
        Ok(compiled)
    }

    fn known(&self, grammar: &Grammar) -> Option<CompiledGrammar> {
        let mut kept = self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == grammar)?;
        let entry = kept.remove(at);
        let compiled = entry.1.fresh();
        kept.push(entry);
        Some(compiled)
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl CompiledGrammar {
    /// One more that shares no state.
    fn fresh(&self) -> Self {
        Self { matcher: self.matcher.deep_clone() }
    }

    /// The state of a choice that has generated this much.
    pub fn after(&self, generated: &[u32]) -> GrammarState {
        let mut state = GrammarState { matcher: self.matcher.deep_clone() };
        generated.iter().for_each(|&token| state.push(token));
        state
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

/// How far a choice is in its grammar.
pub struct GrammarState {
    matcher: Matcher,
}

impl GrammarState {
    /// Copies the logits of allowed tokens to `out` and bans the others. False if nothing is allowed: the grammar is at a
    /// dead end, or too costly to follow.
    pub fn mask(&mut self, row: &[f32], end_tokens: &[u32], out: &mut Vec<f32>) -> bool {
        let Ok(allowed) = self.matcher.compute_mask_or_eos() else {
            return false;
        };
        out.clear();
        out.resize(row.len(), f32::NEG_INFINITY);
        let end = allowed.len() - 1;
        let mut any = false;
        allowed.iter_set_entries(|token| {
            if token < end && token < row.len() {
                out[token] = row[token];
                any = true;
            }
        });
        if allowed.get(end) {
            for &token in end_tokens {
                if let Some(logit) = out.get_mut(token as usize) {
                    *logit = row[token as usize];
                    any = true;
                }
            }
        }
        any
    }

    /// A token was chosen. A token that does not fit makes the next mask fail.
    pub fn push(&mut self, token: u32) {
        // The error stays in the matcher, and comes out of `mask`.
        let _ = self.matcher.consume_token(token);
    }
}

impl std::fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as tokens; 256 is the end of an answer, 257 a token of two letters.
    fn compiler() -> GrammarCompiler {
        let mut vocabulary: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        vocabulary.push(Vec::new());
        vocabulary.push(b"ab".to_vec());
        GrammarCompiler::new(&vocabulary).unwrap()
    }

    const END: u32 = 256;

    fn allowed(state: &mut GrammarState) -> Vec<u32> {
        let mut out = Vec::new();
        state.mask(&[1.0; 260], &[END], &mut out);
        (0..).zip(out).filter(|&(_, logit)| logit == 1.0).map(|(token, _)| token).collect()
    }

    #[test]
    fn a_regex_allows_what_it_matches_and_its_end() {
        let grammar = compiler().compile(&Grammar::Regex("abc?".into())).unwrap();
        let mut state = grammar.after(&[]);
        assert_eq!(allowed(&mut state), [u32::from(b'a'), 257]);
        state.push(257);
        assert_eq!(allowed(&mut state), [u32::from(b'c'), END]);
        assert_eq!(allowed(&mut grammar.after(&[u32::from(b'a')])), [u32::from(b'b')]);
        assert_eq!(allowed(&mut grammar.after(&[257, u32::from(b'c')])), [END]);
    }

    #[test]
    fn a_json_schema_opens_with_a_brace() {
        let compiler = compiler();
        let schema =
            r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#;
        let grammar = compiler.compile(&Grammar::JsonSchema(schema.into())).unwrap();
        assert_eq!(allowed(&mut grammar.after(&[])), [u32::from(b'{')]);
        let again = compiler.compile(&Grammar::JsonSchema(schema.into())).unwrap();
        let answer: Vec<u32> = br#"{"a":1}"#.iter().map(|&byte| u32::from(byte)).collect();
        assert!(allowed(&mut again.after(&answer)).contains(&END));
    }

    #[test]
    fn once_a_trigger_is_written_its_tag_binds_what_follows_and_then_text_is_free_again() {
        // As the daemon writes a structural tag.
        let lark = "start: part_5\ntrigger_1[lazy]: /(.|\\n)*<f=/\njson_2: %json {\"enum\": [7]}\n\
                    tag_3: trigger_1 \"g>\" json_2 \"</f>\"\nREST_4: /(.|\\n)*/\npart_5: tag_3* REST_4\n";
        let grammar = compiler().compile(&Grammar::Lark(lark.into())).unwrap();
        let after = |text: &str| -> Vec<u32> {
            let written: Vec<u32> = text.bytes().map(u32::from).collect();
            allowed(&mut grammar.after(&written))
        };
        assert!(after("well, ").len() > 90 && after("well, ").contains(&END));
        assert_eq!(after("well, <f="), [u32::from(b'g')]);
        assert_eq!(after("well, <f=g>"), [u32::from(b'7')]);
        assert_eq!(after("well, <f=g>7"), [u32::from(b'<')]);
        assert!(after("well, <f=g>7</f> and").contains(&END));
        assert_eq!(after("a <f=g>7</f> and <f="), [u32::from(b'g')]);
    }

    #[test]
    fn a_vocabulary_with_two_tokens_of_equal_bytes_is_taken() {
        let mut vocabulary: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        vocabulary.extend([b"ab".to_vec(), b"ab".to_vec(), b"\xff<s>".to_vec()]);
        let grammar = GrammarCompiler::new(&vocabulary).unwrap().compile(&Grammar::Regex("ab".into())).unwrap();
        let mut out = Vec::new();
        assert!(grammar.after(&[]).mask(&[1.0; 259], &[], &mut out));
        assert!(out[256] == 1.0 || out[257] == 1.0);
    }

    #[test]
    fn a_token_that_does_not_fit_is_a_dead_end() {
        let grammar = compiler().compile(&Grammar::Regex("abc".into())).unwrap();
        assert!(!grammar.after(&[u32::from(b'x')]).mask(&[1.0; 260], &[END], &mut Vec::new()));
    }

    #[test]
    fn grammars_that_can_not_be_compiled_are_refused() {
        let compiler = compiler();
        assert!(compiler.compile(&Grammar::JsonSchema("{".into())).is_err());
        assert!(compiler.compile(&Grammar::Regex("(".into())).is_err());
        assert!(compiler.compile(&Grammar::Lark("start: nothing".into())).is_err());
    }
}
