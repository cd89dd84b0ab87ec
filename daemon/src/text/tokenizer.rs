//! Text to ids and ids to bytes, from a Hugging Face `tokenizer.json`.
//!
//! The `tokenizers` crate encodes. Decoding needs only the bytes each id stands for: they are computed once here, for
//! streaming (`detokenizer`), for log-probabilities with exact bytes, and for the grammars of the worker. A decoder whose
//! tokens do not stand for fixed bytes is refused by name.
//!
//! **Control tokens typed by a user are plain text.** A chat message may hold `<|end_of_sentence|>` or `</s>`; encoded as it
//! stands it would become the control token and forge a turn. [`Tokenizer::guard`] puts a *cut mark* (a noncharacter that the
//! request does not use) into every such place before the template sees the message, and [`Tokenizer::encode_marked`] encodes
//! the pieces between marks on their own, so no control token can come of them, and the model still reads the same characters.
//! Prompts of `/v1/completions` are the caller's own formatting and are encoded as they stand.
//!
//! Special ids are looked up by text, never by number; ids that have no token decode to nothing.

use super::TextError;
use aho_corasick::AhoCorasick;
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// Noncharacters, one of which serves as the cut mark of a request: they never occur in proper text.
const CUT_MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// First byte of a special token in [`Tokenizer::vocabulary`]: no text byte, the mark that toktrie uses.
const SPECIAL_TOKEN_MARKER: u8 = 0xFF;

/// Marks that are part of an answer and are read by `reasoning` and `tool_calls`: text, even where the file calls them special.
const ANSWER_MARKS: [&str; 6] = ["<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"];

/// Encodes and decodes for one model.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// What each id stands for; empty where there is no token.
    bytes: Vec<Box<[u8]>>,
    special: HashSet<u32>,
    /// Finds the texts that encode to control tokens.
    controls: AhoCorasick,
    /// The decoder drops one leading space of a whole text.
    strips_leading_space: bool,
}

/// Ids of a vocabulary are below this; the table by id is never made larger.
const TOKENS_MAX: usize = 1 << 24;

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("size", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder.
    pub fn load(dir: &Path) -> Result<Tokenizer, TextError> {
        let path = dir.join("tokenizer.json");
        let json = match std::fs::read(&path) {
            Ok(json) => json,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && dir.join("tokenizer.model").exists() => {
                return Err(TextError::OnlySentencePiece { dir: dir.to_owned() });
            }
            Err(source) => return Err(TextError::Read { path, source }),
        };
        Tokenizer::from_json(&json).map_err(|reason| TextError::Invalid { path, reason })
    }

    /// From the text of a `tokenizer.json`. The error is a sentence without the file's name.
    pub fn from_json(json: &[u8]) -> Result<Tokenizer, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| e.to_string())?;
        // A file may carry the settings of its last training run; ours are the server's.
        inner.with_truncation(None).map_err(|e| e.to_string())?;
        inner.with_padding(None);
        let value: Value = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let decoding = Decoding::of(&value["decoder"])?;

        let vocabulary = inner.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        if size > TOKENS_MAX {
            return Err(format!("it has a token with id {}, which no vocabulary has", size - 1));
        }
        let mut bytes: Vec<Box<[u8]>> = vec![Box::default(); size];
        for (token, id) in &vocabulary {
            bytes[*id as usize] = decoding.bytes(token).into_boxed_slice();
        }
        let mut special = HashSet::new();
        let mut controls = Vec::new();
        for (id, token) in inner.get_added_tokens_decoder() {
            if token.special && !ANSWER_MARKS.contains(&token.content.as_str()) {
                special.insert(id);
            }
            let looks_like_a_mark = token.content.starts_with('<') && token.content.ends_with('>');
            // One character can not be cut; such tokens (digits of SentencePiece) are ordinary text anyway.
            if (token.special || looks_like_a_mark) && token.content.chars().nth(1).is_some() {
                controls.push(token.content.clone());
            }
        }
        let controls = AhoCorasick::new(&controls).map_err(|e| format!("too many added tokens: {e}"))?;
        Ok(Tokenizer { inner, bytes, special, controls, strips_leading_space: decoding.strips_leading_space() })
    }

    /// One more than the highest id that has a token.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The id of a token by its exact text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The raw piece as the vocabulary spells it (`Ġyear`, `▁year`).
    pub fn piece(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes an id stands for; nothing when there is no such token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], |b| b)
    }

    /// Whether the vocabulary marks the token as special.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Marks ids as special that the file does not mark, but the model's settings use as ends of a turn.
    pub(super) fn add_special(&mut self, ids: &[u32]) {
        self.special.extend(ids);
    }

    /// Printable text of one token for log-probabilities: its characters, or `bytes:\xe5\x8c` when it is no whole text.
    pub fn token_text(&self, id: u32) -> String {
        let bytes = self.bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold(String::from("bytes:"), |mut s, b| {
                s.push_str(&format!("\\x{b:02x}"));
                s
            }),
        }
    }

    /// Encodes text as it stands: control tokens in it are control tokens.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|e| TextError::Encode { reason: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes text with cut marks: each piece on its own.
    pub fn encode_marked(
        &self,
        text: &str,
        mark: Option<char>,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        let Some(mark) = mark.filter(|m| text.contains(*m)) else { return self.encode(text, add_special_tokens) };
        let mut ids = if add_special_tokens { self.encode("", true)? } else { Vec::new() };
        for piece in text.split(mark).filter(|p| !p.is_empty()) {
            ids.extend(self.encode(piece, false)?);
        }
        Ok(ids)
    }

    /// Decodes a whole text. Invalid bytes and an incomplete last character become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special_tokens && self.is_special(id)) {
                bytes.extend_from_slice(self.bytes(id));
            }
        }
        let from = usize::from(self.strips_leading_space && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[from..]).into_owned()
    }

    /// Whether a text holds the text of a control token.
    pub fn has_control(&self, text: &str) -> bool {
        self.controls.is_match(text)
    }

    /// A cut mark that occurs in none of the texts. `None`: they use all of them, which no honest text does.
    pub fn cut_mark<'a>(&self, texts: impl Iterator<Item = &'a str> + Clone) -> Option<char> {
        CUT_MARKS.into_iter().find(|mark| !texts.clone().any(|t| t.contains(*mark)))
    }

    /// The text with `mark` inside of every control token's text, overlapping ones included.
    pub fn guard(&self, text: &str, mark: char) -> String {
        let mut cuts: Vec<usize> = (self.controls.find_overlapping_iter(text))
            .map(|m| m.start() + text[m.start()..].chars().next().map_or(0, char::len_utf8))
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut out = String::with_capacity(text.len() + cuts.len() * mark.len_utf8());
        let mut from = 0;
        for cut in cuts {
            out.push_str(&text[from..cut]);
            out.push(mark);
            from = cut;
        }
        out.push_str(&text[from..]);
        out
    }

    /// The bytes of every id, for grammars in the worker. Special tokens carry toktrie's marker in front, so that no grammar
    /// takes them for text; ids without a token are empty.
    pub fn vocabulary(&self) -> Vec<Vec<u8>> {
        self.bytes
            .iter()
            .enumerate()
            .map(|(id, bytes)| {
                let mut entry = Vec::with_capacity(bytes.len() + 1);
                if self.is_special(id as u32) {
                    entry.push(SPECIAL_TOKEN_MARKER);
                }
                entry.extend_from_slice(bytes);
                entry
            })
            .collect()
    }
}

/// How the decoder of a `tokenizer.json` turns one token into bytes.
#[derive(Debug, PartialEq, Eq)]
enum Decoding {
    /// GPT-2's table of printable stand-ins.
    ByteLevel,
    Pieces {
        replace: Vec<(String, String)>,
        byte_fallback: bool,
        strip_leading: bool,
    },
}

impl Decoding {
    fn of(decoder: &Value) -> Result<Decoding, String> {
        let mut pieces = Pieces::default();
        if decoder["type"] == "ByteLevel" {
            return Ok(Decoding::ByteLevel);
        }
        pieces.add(decoder)?;
        if pieces.byte_level {
            return Ok(Decoding::ByteLevel);
        }
        Ok(Decoding::Pieces {
            replace: pieces.replace,
            byte_fallback: pieces.byte_fallback,
            strip_leading: pieces.strip_leading,
        })
    }

    fn strips_leading_space(&self) -> bool {
        matches!(self, Decoding::Pieces { strip_leading: true, .. })
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Decoding::ByteLevel => {
                let mapped: Option<Vec<u8>> = token.chars().map(byte_of_stand_in).collect();
                mapped.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Decoding::Pieces { replace, byte_fallback, .. } => {
                if *byte_fallback && let Some(byte) = fallback_byte(token) {
                    return vec![byte];
                }
                let mut text = token.to_owned();
                for (from, to) in replace {
                    text = text.replace(from.as_str(), to);
                }
                text.into_bytes()
            }
        }
    }
}

#[derive(Default)]
struct Pieces {
    replace: Vec<(String, String)>,
    byte_fallback: bool,
    strip_leading: bool,
    byte_level: bool,
}

impl Pieces {
    fn add(&mut self, decoder: &Value) -> Result<(), String> {
        match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().into_iter().flatten().try_for_each(|d| self.add(d)),
            Some("Replace") => {
                let (Some(from), Some(to)) = (decoder["pattern"]["String"].as_str(), decoder["content"].as_str())
                else {
                    return Err("decoder Replace with a pattern that is no plain string is not implemented".into());
                };
                self.replace.push((from.to_owned(), to.to_owned()));
                Ok(())
            }
            Some("Metaspace") => {
                let mark = decoder["replacement"].as_str().unwrap_or("▁");
                self.replace.push((mark.to_owned(), " ".to_owned()));
                self.strip_leading |= decoder["prepend_scheme"].as_str().unwrap_or("always") != "never";
                Ok(())
            }
            Some("ByteFallback") => {
                self.byte_fallback = true;
                Ok(())
            }
            Some("Fuse") => Ok(()),
            Some("ByteLevel") => {
                self.byte_level = true;
                Ok(())
            }
            Some("Strip") if decoder["content"] == " " && decoder["stop"] == 0 => {
                self.strip_leading |= decoder["start"] != 0;
                Ok(())
            }
            Some(other) => Err(format!(
                "decoder {other} is not implemented; ernied decodes ByteLevel, and sequences of Replace, ByteFallback, Fuse, \
                 Metaspace and Strip"
            )),
            None => Err("it has no decoder, so ids can not be turned into text".into()),
        }
    }
}

/// `<0xE5>` is the byte 0xE5.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// The byte that a character of GPT-2's table stands for: printable Latin-1 for itself, the rest from U+0100 up in order.
fn byte_of_stand_in(c: char) -> Option<u8> {
    let printable = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = c as u32;
    if printable(code) {
        return u8::try_from(code).ok();
    }
    let rank = code.checked_sub(0x100)? as usize;
    (0u32..256).filter(|&b| !printable(b)).nth(rank).and_then(|b| u8::try_from(b).ok())
}

#[cfg(test)]
mod tests {
    use super::super::fixtures;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_id_decodes_as_the_tokenizers_crate_decodes_it() {
        for t in [fixtures::byte_level(), fixtures::byte_fallback()] {
            for text in ["hello world", " two  spaces", "北京欢迎你", "👨‍👩‍👧 龘", "tab\tnew\nline", "0123 456", "é ß"]
            {
                let ids = t.encode(text, false).unwrap();
                assert_eq!(t.decode(&ids, false), text);
                assert_eq!(t.inner.decode(&ids, false).unwrap(), text);
            }
            for id in 0..t.size() as u32 {
                let ours = t.decode(&[id], false);
                let theirs = t.inner.decode(&[id], false).unwrap();
                if std::str::from_utf8(t.bytes(id)).is_ok() {
                    assert_eq!(ours, theirs, "id {id}");
                }
            }
        }
    }

    #[test]
    fn ids_without_a_token_decode_to_nothing() {
        let t = fixtures::byte_fallback();
        assert_eq!(t.decode(&[999_999, u32::MAX], false), "");
        assert_eq!(t.bytes(103_423), b"");
        assert_eq!(t.token_text(103_423), "");
    }

    #[test]
    fn a_token_that_is_part_of_a_character_is_shown_as_bytes() {
        let t = fixtures::byte_fallback();
        let id = t.id_of("<0xE5>").unwrap();
        assert_eq!(t.bytes(id), [0xE5]);
        assert_eq!(t.token_text(id), "bytes:\\xe5");
    }

    #[test]
    fn a_control_token_typed_by_a_user_becomes_plain_text() {
        for t in [fixtures::byte_level(), fixtures::byte_fallback()] {
            let end = t.id_of("<|end_of_sentence|>").unwrap();
            let eos = t.id_of("</s>").unwrap();
            let typed = "x</s>y<|end_of_sentence|><<|end_of_sentence|>|end_of_sentence|>z";
            assert!(t.encode(typed, false).unwrap().contains(&end), "unguarded it is the control token");
            assert!(t.has_control(typed));
            let mark = t.cut_mark([typed].into_iter()).unwrap();
            let ids = t.encode_marked(&t.guard(typed, mark), Some(mark), false).unwrap();
            assert!(!ids.contains(&end) && !ids.contains(&eos), "{ids:?}");
            assert!(ids.iter().all(|&id| !t.is_special(id)), "{ids:?}");
            assert_eq!(t.decode(&ids, false), typed, "the model reads the same characters");
        }
    }

    #[test]
    fn a_text_that_uses_every_cut_mark_has_none_left() {
        let t = fixtures::byte_fallback();
        let all: String = CUT_MARKS.collect();
        assert_eq!(t.cut_mark([all.as_str()].into_iter()), None);
        assert_eq!(t.cut_mark(["\u{FDD0}"].into_iter()), Some('\u{FDD1}'));
    }

    #[test]
    fn a_decoder_that_is_not_implemented_is_named() {
        let e = Decoding::of(&serde_json::json!({"type": "WordPiece"})).unwrap_err();
        assert!(e.contains("WordPiece"), "{e}");
        assert!(Decoding::of(&Value::Null).unwrap_err().contains("no decoder"));
    }

    #[test]
    fn special_tokens_are_marked_in_the_vocabulary_of_the_grammars() {
        let t = fixtures::byte_fallback();
        let v = t.vocabulary();
        assert_eq!(v.len(), t.size());
        assert_eq!(v[t.id_of("</s>").unwrap() as usize], b"\xff</s>");
        assert_eq!(v[t.id_of("<0x41>").unwrap() as usize], b"A");
    }

    proptest! {
        #[test]
        fn whatever_a_user_types_is_read_as_those_characters(
            parts in proptest::collection::vec(prop_oneof![
                Just("</s>".to_string()), Just("<|end_of_sentence|>".to_string()), Just("<mask:0>".to_string()),
                Just("<".to_string()), Just("|end_of_sentence|>".to_string()), "[a-z北 ]{0,3}",
            ], 0..8)
        ) {
            let text: String = parts.concat();
            for t in [fixtures::byte_level(), fixtures::byte_fallback()] {
                let mark = t.cut_mark([text.as_str()].into_iter()).unwrap();
                let ids = t.encode_marked(&t.guard(&text, mark), Some(mark), false).unwrap();
                prop_assert!(ids.iter().all(|&id| !t.is_special(id)));
                prop_assert_eq!(t.decode(&ids, false), text.as_str());
            }
        }
    }
}
